"""summarize on run folders written by hand, whose curves have speed-ups in closed form."""

import functools
import json
import math
import shutil
import statistics
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest

from bellmask import presets
from bellmask.compare.comparison import PLAN, from_comparison
from bellmask.compare.laws import describe_law
from bellmask.compare.records import check_comparable, read_run
from bellmask.compare.results import Entry, summarize
from bellmask.compare.speedup import paired_bootstrap
from bellmask.compare.variants import parse_variant
from bellmask.errors import UserError
from bellmask.evaluate.result import Likelihood
from bellmask.options import LawOptions

STEPS = (100, 200, 300, 400)
A, B = 5.0, 0.5
NUM_BLOCKS, LENGTH = 40, 64
OFFSET = 3 * np.random.default_rng(0).standard_normal(NUM_BLOCKS)
"""Blocks are much harder or easier than one another, in all runs alike."""
DESCRIPTION = {
    "tokenizer_fingerprint": "tok",
    "train_fingerprint": "train",
    "valid_fingerprint": "valid",
    "unigram_nll": 6.0,
    "device": "cpu",
}


@functools.cache
def applied(variant):
    shared = presets.tiny()
    shared = replace(shared, train=replace(shared.train, steps=STEPS[-1]))
    return parse_variant(variant).apply(shared)


@dataclass(frozen=True)
class Run:
    """What is written into a run folder; block NLL = A - B log(step) - shift + offset."""

    variant: str = "base"
    seed: int = 1
    shift: float = 0.0
    shift_B: tuple[float, ...] = (0.0,) * NUM_BLOCKS
    steps: tuple[int, ...] = STEPS
    seconds: tuple[float, ...] = tuple(map(float, STEPS))
    length_B: tuple[int, ...] = tuple(LENGTH - block for block in range(NUM_BLOCKS))
    document_B: tuple[int, ...] = tuple(range(NUM_BLOCKS))
    draws: int = 1
    mask_seed: int = 1
    fingerprint: str = "blocks"
    config: dict = field(default_factory=dict)
    description: dict = field(default_factory=dict)

    def options(self):
        config = applied(self.variant)
        train = replace(config.train, seed=self.seed, steps=self.steps[-1])
        config = replace(config, train=train)
        return config.with_options(self.config) if self.config else config

    def likelihood(self, step):
        length = np.array(self.length_B)
        draw = np.random.default_rng(self.mask_seed)
        count = draw.integers(1, length[:, None] + 1, (NUM_BLOCKS, self.draws))
        block = A - B * math.log(step) - self.shift - np.array(self.shift_B) + OFFSET
        ce = np.repeat(block[:, None], self.draws, axis=1)
        level = (draw.permutation(NUM_BLOCKS) + 0.5) / NUM_BLOCKS
        owner = np.array(self.document_B)
        return Likelihood(length, level, count, ce, owner, 3.0 * length.sum(), self.fingerprint)

    def nll(self, step):
        weight = np.array(self.length_B) / sum(self.length_B)
        base = A - B * math.log(step) - self.shift
        return base + float((weight * (OFFSET - np.array(self.shift_B))).sum())

    def lines(self):
        for step, seconds in zip(self.steps, self.seconds):
            train = {"tokens_per_second": 1e5 / step, "gradient_norm": 0.5, "clipped_share": 0.25}
            yield {"kind": "train", "step": step, "largest_weight": 9.0 + step, **train}
            check = {"nll": self.nll(step), "nll_se": 0.01, "seconds": seconds}
            yield {"kind": "validation", "step": step, **check}

    def write(self, folder: Path) -> Path:
        (folder / "validation").mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(self.options().to_dict()))
        (folder / "run.json").write_text(json.dumps({**DESCRIPTION, **self.description}))
        lines = "".join(json.dumps(line) + "\n" for line in self.lines())
        (folder / "metrics.jsonl").write_text(lines)
        for step in self.steps:
            self.likelihood(step).save(folder / "validation" / f"step-{step:09d}.npz")
        return folder


def sooner(ratio):
    """The shift with which the reference's last NLL is reached ``ratio`` times sooner."""
    return B * math.log(ratio)


@pytest.fixture(scope="module")
def entries(tmp_path_factory):
    """``entries(Run(...), ("name", "point", Run(...)))``: written, read and placed."""
    root, records = tmp_path_factory.mktemp("runs"), {}

    def record(run):
        if repr(run) not in records:
            records[repr(run)] = read_run(run.write(root / str(len(records))))
        return records[repr(run)]

    def build(*runs):
        places = [run if isinstance(run, tuple) else (run.variant, "", run) for run in runs]
        return [Entry(name, run.seed, point, record(run)) for name, point, run in places]

    return build


def test_three_seeds_give_the_ratios_that_were_built_in(entries):
    ratios = {1: 1.5, 2: 2.0, 3: 3.0}
    runs = [Run("base", seed) for seed in ratios]
    runs += [Run("bell", seed, sooner(ratio)) for seed, ratio in ratios.items()]
    found = summarize(entries(*runs), "base")
    comparison = found["variants"]["bell"]["comparison"]
    assert [one["ratio"] for one in comparison["per_seed"]] == pytest.approx([1.5, 2.0, 3.0])
    assert comparison["speed_up"]["mean"] == pytest.approx(9 ** (1 / 3))
    reach = 4.302653 * statistics.stdev(map(math.log, ratios.values())) / math.sqrt(3)
    assert comparison["speed_up"]["high"] == pytest.approx(9 ** (1 / 3) * math.exp(reach), rel=1e-4)
    assert (comparison["num_reached"], comparison["num_seeds"]) == (3, 3)
    assert not comparison["is_bound"]
    gaps = [-sooner(ratio) for ratio in ratios.values()]
    assert comparison["gaps"] == pytest.approx(gaps)
    assert comparison["gap"] == pytest.approx(statistics.mean(gaps))
    assert comparison["gap_se"] == pytest.approx(0, abs=1e-12)
    bootstrap = comparison["bootstrap_first_seed"]
    assert (bootstrap["low"], bootstrap["high"]) == (pytest.approx(1.5), pytest.approx(1.5))
    assert (found["seeds"], found["steps"], found["reference"]) == ([1, 2, 3], 400, "base")
    assert "comparison" not in found["variants"]["base"]
    assert "grid" not in found
    json.dumps(found, allow_nan=False)


def test_seeds_are_paired_by_number_not_by_order(entries):
    runs = [Run("base", 2, 0.3), Run("base", 1), Run("bell", 1, sooner(2))]
    runs += [Run("bell", 3, 2.0), Run("bell", 2, 0.3 + sooner(3))]
    found = summarize(entries(*runs), "base")
    comparison = found["variants"]["bell"]["comparison"]
    assert [one["ratio"] for one in comparison["per_seed"]] == pytest.approx([2.0, 3.0])
    assert [run["seed"] for run in found["variants"]["bell"]["runs"]] == [1, 2, 3]
    assert comparison["speed_up"]["low"] is None


def test_time_has_its_own_ratio(entries):
    """The bell arrives at step 200, after 60 seconds; the base needed 400."""
    bell = Run("bell", shift=sooner(2), seconds=(50.0, 60.0, 61.0, 62.0))
    comparison = summarize(entries(Run(), bell), "base")["variants"]["bell"]["comparison"]
    assert comparison["speed_up"]["mean"] == pytest.approx(2.0)
    assert comparison["time_speed_up"]["mean"] == pytest.approx(400 / 60)


def test_a_bound_is_flagged(entries):
    comparison = summarize(entries(Run(), Run("bell", shift=9.0)), "base")["variants"]["bell"][
        "comparison"
    ]
    assert comparison["is_bound"]
    assert comparison["speed_up"]["mean"] == pytest.approx(4.0)


def test_one_bound_among_the_seeds_makes_the_mean_a_bound(entries):
    runs = [Run("base", 1), Run("base", 2), Run("bell", 1, sooner(2)), Run("bell", 2, 9.0)]
    comparison = summarize(entries(*runs), "base")["variants"]["bell"]["comparison"]
    assert [one["is_bound"] for one in comparison["per_seed"]] == [False, True]
    assert comparison["is_bound"]
    assert comparison["speed_up"]["mean"] == pytest.approx(math.sqrt(2 * 4))


def test_one_seed_that_does_not_arrive_leaves_no_number(entries):
    runs = [Run("base", 1), Run("base", 2), Run("bell", 1, sooner(2)), Run("bell", 2, -0.2)]
    comparison = summarize(entries(*runs), "base")["variants"]["bell"]["comparison"]
    assert comparison["speed_up"] is None
    assert comparison["time_speed_up"] is None
    assert comparison["num_reached"] == 1
    assert [one["ratio"] for one in comparison["per_seed"]] == [pytest.approx(2.0), None]
    assert comparison["gaps"] == pytest.approx([-sooner(2), 0.2])


def test_the_gaps_error_by_hand(entries):
    """Deviations +-0.1 in 40 equal blocks: variance 0.4 / 39 / 40.

    A second seed is scored on the same blocks, so it does not make that error smaller.
    """
    deviations = (0.1, -0.1) * (NUM_BLOCKS // 2)
    equal = {"length_B": (LENGTH,) * NUM_BLOCKS, "draws": 2}
    runs = [Run("base", seed, **equal) for seed in (1, 2)]
    runs += [Run("bell", seed, 0.3, deviations, **equal) for seed in (1, 2)]
    comparison = summarize(entries(*runs), "base")["variants"]["bell"]["comparison"]
    assert comparison["gap"] == pytest.approx(-0.3)
    assert comparison["gap_se"] == pytest.approx(math.sqrt(0.4 / 39 / 40))
    bootstrap = comparison["bootstrap_first_seed"]
    assert 1 < bootstrap["low"] < math.exp(0.3 / B) < bootstrap["high"]


def test_the_bootstrap_draws_documents_and_weighs_by_tokens(entries):
    """Tokens and documents reach the bootstrap; that it uses them well is tested on its own."""
    document_B = tuple(block // 2 for block in range(NUM_BLOCKS))
    shift_B = tuple(sooner(1.2 + (block // 2) / NUM_BLOCKS) for block in range(NUM_BLOCKS))
    runs = entries(Run(document_B=document_B), Run("bell", 1, 0.1, shift_B, document_B=document_B))
    comparison = summarize(runs, "base")["variants"]["bell"]["comparison"]
    curves = [(STEPS, entry.record.block_nll_EB) for entry in runs]
    length, document = np.array(Run().length_B, dtype=float), np.array(document_B)
    assert comparison["bootstrap_first_seed"] == asdict(
        paired_bootstrap(*curves, length, document, replicates=1000)
    )


def grid_of(*shifts):
    """(variant, point, shift) triples as entries to write."""
    return [(name, point, Run(name, shift=shift)) for name, point, shift in shifts]


def test_best_is_compared_with_best(entries):
    found = summarize(
        entries(
            *grid_of(
                ("base", "optim.lr=1", 0.1),
                ("base", "optim.lr=2", 0.0),
                ("bell", "optim.lr=1", 0.1 + sooner(1.5)),
                ("bell", "optim.lr=2", 0.1 + sooner(3)),
            )
        ),
        "base",
    )
    points = {name: variant["grid_point"] for name, variant in found["variants"].items()}
    assert points == {"base": "optim.lr=1", "bell": "optim.lr=2"}
    assert found["variants"]["bell"]["comparison"]["speed_up"]["mean"] == pytest.approx(3.0)
    first, second = found["grid"]
    assert (first["point"], second["point"]) == ("optim.lr=1", "optim.lr=2")
    assert first["nll"]["base"] == pytest.approx(Run(shift=0.1).nll(400))
    assert second["nll"]["bell"] == pytest.approx(Run(shift=0.1 + sooner(3)).nll(400))
    assert first["speed_up"]["bell"]["mean"] == pytest.approx(1.5)
    assert second["speed_up"]["bell"]["mean"] == pytest.approx(3 * math.exp(0.1 / B))


def test_the_best_point_is_the_best_on_average(entries):
    """Point 1 has the best single run, point 2 the best mean."""
    found = summarize(
        entries(
            *[("base", "1", Run(seed=1, shift=0.5)), ("base", "1", Run(seed=2, shift=0.0))],
            *[("base", "2", Run(seed=1, shift=0.3)), ("base", "2", Run(seed=2, shift=0.3))],
        ),
        "base",
    )
    assert found["variants"]["base"]["grid_point"] == "2"
    assert found["variants"]["base"]["nll"] == pytest.approx(Run(shift=0.3).nll(400))


def test_a_point_that_only_one_variant_survived_has_no_speed_up(entries):
    runs = [("base", "1", 0.0), ("bell", "1", sooner(2)), ("bell", "2", 0.0)]
    found = summarize(entries(*grid_of(*runs)), "base")
    assert found["grid"][1]["speed_up"] == {}
    assert set(found["grid"][1]["nll"]) == {"bell"}


def test_a_point_that_diverged_is_not_the_best(entries):
    broken = ("base", "1", Run(shift=math.nan))
    found = summarize(entries(broken, ("base", "2", Run())), "base")
    assert found["variants"]["base"]["grid_point"] == "2"


def test_progress_is_read_beside_the_unigram_and_the_arm(entries):
    """Half of what the ARM has gained over the unigram, which is the reference plus 1."""
    unigram = {"unigram_nll": Run().nll(400) + 1}
    runs = [Run(description=unigram), ("arm", "", Run(shift=1.0, description=unigram))]
    progress = summarize(entries(*runs), "base")["progress"]
    assert progress["below_unigram"] == pytest.approx(1.0)
    assert progress["share_to_arm"] == pytest.approx(0.5)


def test_without_an_arm_there_is_no_share(entries):
    found = summarize(entries(Run(), Run("bell")), "base")
    below = DESCRIPTION["unigram_nll"] - Run().nll(400)
    assert found["progress"] == {"below_unigram": pytest.approx(below), "share_to_arm": None}


def test_a_run_that_never_counted_its_unigram_has_no_progress(entries):
    found = summarize(entries(Run(description={"unigram_nll": None})), "base")
    assert found["progress"] == {"below_unigram": None, "share_to_arm": None}


def test_a_variant_says_what_is_different_about_it(entries):
    runs = [Run(), Run("laplace:0.5,0.2+muon", config={"data.cache": None})]
    found = summarize(entries(*runs), "base")["variants"]["laplace:0.5,0.2+muon"]
    assert found["options"] == {
        "law.name": "laplace",
        "law.mu": 0.5,
        "law.scale": 0.2,
        "objective.name": "bell",
        "optim.name": "muon",
    }
    assert "laplace" in found["law"]["name"].lower()


def test_a_runs_numbers_are_those_of_its_files(entries):
    (entry,) = entries(Run(seed=4))
    found = entry.record.summary()
    assert (found["seed"], found["steps"]) == (4, list(STEPS))
    assert found["run"] == entry.record.folder.name
    assert found["nll"] == pytest.approx([Run().nll(step) for step in STEPS])
    assert found["tokens_per_second"] == pytest.approx((1e5 / 200 + 1e5 / 300) / 2)
    assert found["largest_weight"] == 409
    assert found["clipped_share"] == 0.25
    # three bytes per token
    assert found["bits_per_byte"] == pytest.approx(Run().nll(400) / 3 / math.log(2))
    curve = np.array([Run().nll(step) for step in STEPS])
    spread = math.sqrt(np.mean((curve[:-2] - 2 * curve[1:-1] + curve[2:]) ** 2) / 6)
    assert found["nll_spread"] == pytest.approx(spread)
    assert found["log_gradient_norm_spread"] == pytest.approx(0, abs=1e-12)


def test_the_curve_in_blocks_is_the_curve(entries):
    (entry,) = entries(Run())
    weight = np.array(Run().length_B) / sum(Run().length_B)
    assert (entry.record.block_nll_EB @ weight).tolist() == pytest.approx(entry.record.nll)


def test_an_unknown_reference_is_refused(entries):
    with pytest.raises(UserError, match="bass is not among base, bell"):
        summarize(entries(Run(), Run("bell")), "bass")


def test_seeds_must_meet(entries):
    with pytest.raises(UserError, match="bell and base have no seed in common"):
        summarize(entries(Run(seed=1), Run("bell", seed=2)), "base")


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"description": {"tokenizer_fingerprint": "x"}}, "their tokenizers differ"),
        ({"description": {"train_fingerprint": "x"}}, "their training texts differ"),
        ({"description": {"valid_fingerprint": "x"}}, "their validation texts differ"),
        ({"fingerprint": "x"}, "their validation blocks or masks differ"),
        ({"mask_seed": 2}, "their validation blocks or masks differ"),
        ({"draws": 2}, "their validation blocks or masks differ"),
        ({"steps": (100, 200, 300)}, r"train\.steps is 400 and 300"),
        ({"config": {"train.batch_size": 16}}, r"train\.batch_size is 32 and 16"),
        ({"config": {"data.block_length": 32}}, r"data\.block_length is 64 and 32"),
        ({"steps": (150, 200, 300, 400)}, "validated at different steps"),
    ],
)
def test_runs_that_differ_in_more_are_refused(entries, other, message):
    found = entries(Run(), Run("bell"), replace(Run("uniform"), **other))
    with pytest.raises(UserError, match=message) as caught:
        summarize(found, "base")
    first, _, last = (entry.record.folder for entry in found)
    assert f"{first} and {last} cannot be compared" in str(caught.value)


def test_runs_that_differ_in_the_rest_are_not_refused(entries):
    free = Run("bell+muon", 7, 0.1, config={"optim.lr": 0.1, "model.width": 32, "log.every": 7})
    check_comparable([entry.record for entry in entries(Run(), free)])


def test_a_folder_without_config_is_no_run(tmp_path):
    with pytest.raises(UserError, match=r"not a run folder: it has no config\.json"):
        read_run(tmp_path)


def test_an_unfinished_run_says_how_to_finish_it(tmp_path):
    folder = Run().write(tmp_path / "run")
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    for kept in (lines[:-1], []):
        (folder / "metrics.jsonl").write_text("".join(kept))
        with pytest.raises(UserError, match="no validation at its last step 400") as caught:
            read_run(folder)
        assert f"bellmask train {folder} --out {folder} --resume auto" in str(caught.value)


def test_a_missing_description_is_refused(tmp_path):
    folder = Run().write(tmp_path / "run")
    (folder / "run.json").unlink()
    with pytest.raises(UserError, match=r"run\.json"):
        read_run(folder)


def test_missing_blocks_are_refused(tmp_path):
    folder = Run().write(tmp_path / "run")
    (folder / "validation" / "step-000000200.npz").unlink()
    with pytest.raises(UserError, match=r"step-000000200\.npz is missing"):
        read_run(folder)


def without_an_array(path):
    arrays = dict(np.load(path))
    del arrays["ce_BR"]
    np.savez(path, **arrays)


def turned_byte(path):
    """One byte of the last array's compressed content."""
    content = bytearray(path.read_bytes())
    place = content.index(b"ce_BR.npy") + 60
    content[place] ^= 0xFF
    path.write_bytes(bytes(content))


def complaint(folder):
    """What reading says, without keeping the exception and the file that it holds open."""
    try:
        read_run(folder)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda path: path.write_bytes(b"no archive" * 9), id="garbage"),
        pytest.param(lambda path: path.write_bytes(path.read_bytes()[:700]), id="cut"),
        pytest.param(lambda path: path.write_bytes(b""), id="empty"),
        pytest.param(turned_byte, id="turned byte"),
        pytest.param(without_an_array, id="without an array"),
    ],
)
def test_damaged_blocks_are_refused(tmp_path, damage):
    folder = Run().write(tmp_path / "run")
    damage(folder / "validation" / "step-000000200.npz")
    path = folder / "validation" / "step-000000200.npz"
    assert complaint(folder).startswith(f"UserError: {path} is damaged: ")


def test_a_comparisons_folder_finds_its_runs_again(tmp_path):
    """Also after both were moved together."""
    root, out = tmp_path / "here" / "runs", tmp_path / "here" / "out"
    Run().write(root / "a")
    Run("bell", 3).write(root / "b")
    rows = [("base", 1, "", "a"), ("bell", 3, "optim.lr=1", "b"), ("same", 3, "", "b")]
    keys = ("variant", "seed", "point", "run")
    plan = {"root": "../runs", "reference": "base", "title": "T", "failed": ["bell lr=9"]}
    out.mkdir()
    (out / PLAN).write_text(json.dumps({**plan, "runs": [dict(zip(keys, row)) for row in rows]}))
    shutil.copytree(tmp_path / "here", tmp_path / "there")
    for place in (tmp_path / "here", tmp_path / "there"):
        found, reference, title, failed = from_comparison(place / "out")
        assert (reference, title, failed) == ("base", "T", ["bell lr=9"])
        read = [(e.variant, e.seed, e.point, e.record.folder.name) for e in found]
        assert read == rows
        shutil.rmtree(tmp_path / "here", ignore_errors=True)
    assert found[1].record.folder.resolve() == tmp_path / "there" / "runs" / "b"


def test_a_law_is_described_as_it_is_trained_on(entries):
    narrow = replace(applied("bell"), law=LawOptions("gaussian", 0.4, 0.05))
    (entry,) = entries(Run("bell"))
    entry = replace(entry, record=replace(entry.record, config=narrow))
    law = summarize([entry], "bell")["variants"]["bell"]["law"]
    t, density = np.array(law["t"]), np.array(law["density"])
    assert t[density.argmax()] == pytest.approx(0.4)
    rate = (np.arange(25) + 0.5) / 25
    histogram = np.array(law["mask_rate_histogram"]) / 25
    assert histogram.sum() == pytest.approx(1)
    assert (rate * histogram).sum() == pytest.approx(0.4, abs=0.01)
    # E[t]^2 / E[t^2]: rows of a sequence that is masked more weigh more
    assert law["effective_sample_share"] == pytest.approx(0.4**2 / (0.4**2 + 0.05**2), abs=2e-3)
    assert sum(law["context_weights"]) == pytest.approx(1)


@pytest.mark.parametrize(
    ("text", "share"),
    [("base", 1.0), ("importance_t", 0.354), ("importance", 0.348), ("middle_flat", 1 / 2815)],
)
def test_the_effective_sample_share(text: str, share: float):
    """E[s]^2 / E[s^2] of s = w(t)(1 - alpha): 1, 2 sigma sqrt(pi), and 1 / integral of 1/f.

    The last is dominated by times that a hundred steps hardly draw: only its order is checked.
    """
    found = describe_law(applied(text))["effective_sample_share"]
    if text == "middle_flat":
        assert found < 0.1
    else:
        assert found == pytest.approx(share, abs=5e-3)


def test_runs_of_one_name_must_be_one_thing(entries):
    """Two seeds whose learning rates differ are not two seeds of one variant."""
    first, second = entries(Run("base", 1), Run("base", 2))
    record = second.record
    other = replace(record.config, optim=replace(record.config.optim, lr=0.5))
    second = replace(second, record=replace(record, config=other))
    with pytest.raises(UserError, match=r"differ in optim\.lr"):
        summarize([first, second], "base")


def test_times_are_compared_at_the_same_pace_only(entries):
    """One thread against two says nothing about the variants."""
    fair = entries(Run("base", 1), Run("bell", 1, 0.3))
    assert summarize(fair, "base")["variants"]["bell"]["comparison"]["time_speed_up"] is not None
    base, bell = fair
    bell = replace(bell, record=replace(bell.record, description={"threads": 99}))
    base = replace(base, record=replace(base.record, description={"threads": 1}))
    compared = summarize([base, bell], "base")["variants"]["bell"]["comparison"]
    assert compared["time_speed_up"] is None
    assert compared["speed_up"] is not None
