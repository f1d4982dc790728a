"""summarize on run folders written by hand, whose curves have speed-ups in closed form."""

import functools
import json
import math
import statistics
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest

from bellmask.compare.report import comparison_tables, curves_figure, sentence
from bellmask.compare.results import Entry, law_summary, paired_bootstrap, read_run, summarize
from bellmask.compare.variants import parse_variant
from bellmask.config import presets
from bellmask.evaluate.likelihood import Likelihood

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
        return [Entry(name, point, record(run)) for name, point, run in places]

    return build


@pytest.fixture(scope="module")
def compared(entries):
    """``compared(base, bell, ...)``: the comparison of bell with base."""

    def build(*runs):
        return summarize(entries(*runs), "base")["variants"]["bell"]["comparison"]

    return build


def test_three_seeds_give_the_ratios_that_were_built_in(entries):
    ratios = {1: 1.5, 2: 2.0, 3: 3.0}
    runs = [Run("base", seed) for seed in (3, 1, 2)]  # paired by number, not by order
    runs += [Run("bell", seed, sooner(ratio)) for seed, ratio in ratios.items()]
    found = summarize(entries(*runs), "base")
    comparison = found["variants"]["bell"]["comparison"]
    assert [one["ratio"] for one in comparison["per_seed"]] == pytest.approx([1.5, 2.0, 3.0])
    assert comparison["speed_up"]["mean"] == pytest.approx(9 ** (1 / 3))
    reach = 4.302653 * statistics.stdev(map(math.log, ratios.values())) / math.sqrt(3)
    ends = [9 ** (1 / 3) * math.exp(sign * reach) for sign in (-1, 1)]
    found_ends = [comparison["speed_up"][end] for end in ("low", "high")]
    assert found_ends == pytest.approx(ends, rel=1e-4)
    assert (comparison["num_reached"], comparison["num_seeds"]) == (3, 3)
    assert not comparison["is_bound"]
    gaps = [-sooner(ratio) for ratio in ratios.values()]
    assert comparison["gaps"] == pytest.approx(gaps)
    assert comparison["gap"] == pytest.approx(statistics.mean(gaps))
    assert comparison["gap_se"] == pytest.approx(0, abs=1e-12)
    bootstrap = comparison["bootstrap_first_seed"]
    assert (bootstrap["low"], bootstrap["high"]) == (pytest.approx(1.5), pytest.approx(1.5))
    assert (found["seeds"], found["steps"], "grid" in found) == ([1, 2, 3], 400, False)
    json.dumps(found, allow_nan=False)


def test_time_has_its_own_ratio(compared):
    """The bell arrives at step 200, after 60 seconds; the base needed 400."""
    bell = Run("bell", shift=sooner(2), seconds=(50.0, 60.0, 61.0, 62.0))
    slow = compared(Run(), Run("bell", shift=sooner(1 / 2)))  # nothing is extrapolated
    assert (slow["speed_up"], slow["gap"]) == (None, pytest.approx(sooner(2)))
    comparison = compared(Run(), bell)
    assert comparison["speed_up"]["mean"] == pytest.approx(2.0)
    assert comparison["time_speed_up"]["mean"] == pytest.approx(400 / 60)
    # one thread against two says nothing about the variants
    unfair = compared(Run(), replace(bell, description={"threads": 99}))
    assert (unfair["time_speed_up"], unfair["speed_up"]) == (None, comparison["speed_up"])


def test_one_seed_that_does_not_arrive_leaves_no_number(compared):
    runs = [Run("base", 1), Run("base", 2), Run("bell", 1, sooner(2)), Run("bell", 2, -0.2)]
    comparison = compared(*runs)
    assert comparison["speed_up"] is comparison["time_speed_up"] is None
    assert (comparison["num_reached"], comparison["num_seeds"]) == (1, 2)
    assert comparison["missed_gap"] == pytest.approx(0.2)
    assert [one["ratio"] for one in comparison["per_seed"]] == [pytest.approx(2.0), None]
    assert comparison["gaps"] == pytest.approx([-sooner(2), 0.2])
    error = statistics.stdev([-sooner(2), 0.2]) / math.sqrt(2)
    assert comparison["gap_se_over_seeds"] == pytest.approx(error)
    # one bound among the seeds makes the mean a bound, without an interval
    third = [Run("base", 3), Run("bell", 3, sooner(2))]
    comparison = compared(*runs[:-1], Run("bell", 2, 9.0), *third)
    assert [one["is_bound"] for one in comparison["per_seed"]] == [False, True, False]
    assert comparison["is_bound"]
    mean = pytest.approx((2 * 4 * 2) ** (1 / 3))
    assert comparison["speed_up"] == {"mean": mean, "low": None, "high": None, "num_seeds": 3}


def test_the_gaps_error_by_hand(entries, compared):
    """Deviations +-0.1 in 40 equal blocks: variance 0.4 / 39 / 40, about that of neighbors' too.

    A second seed is scored on the same blocks, so it does not make that error smaller.
    """
    deviations = (0.1, -0.1) * (NUM_BLOCKS // 2)
    equal = {"length_B": (LENGTH,) * NUM_BLOCKS, "draws": 2}
    runs = [Run("base", seed, **equal) for seed in (1, 2)]
    runs += [Run("bell", seed, 0.3, deviations, **equal) for seed in (1, 2)]
    comparison = compared(*runs)
    assert comparison["gap"] == pytest.approx(-0.3)
    assert comparison["gap_se"] == pytest.approx(math.sqrt(0.4 / 39 / 40), rel=0.1)
    # tokens and documents reach the bootstrap; that it uses them well is tested on its own
    document_B = tuple(block // 2 for block in range(NUM_BLOCKS))
    bell = Run("bell", 1, 0.3, tuple(OFFSET / 9), document_B=document_B)
    pair = [Run("base", 1, document_B=document_B), bell]
    curves = [entry.record.block_nll_EB for entry in entries(*pair)]
    length = np.array(Run().length_B, dtype=float)
    truth = paired_bootstrap(STEPS, *curves, length, np.array(document_B), replicates=1000)
    assert compared(*pair)["bootstrap_first_seed"] == truth


def best_point(found, name="base"):
    return found["variants"][name]["grid_point"]


def test_best_is_compared_with_best(entries):
    shifts = {("base", "1"): 0.1, ("base", "2"): 0.0}
    shifts |= {("bell", "1"): 0.1 + sooner(1.5), ("bell", "2"): 0.1 + sooner(3)}
    runs = [(*place, Run(place[0], shift=shift)) for place, shift in shifts.items()]
    found = summarize(entries(*runs), "base")
    assert (best_point(found), best_point(found, "bell")) == ("1", "2")
    assert found["variants"]["bell"]["comparison"]["speed_up"]["mean"] == pytest.approx(3.0)
    for row, point, ratio in zip(found["grid"], "12", (1.5, 3 * math.exp(0.1 / B)), strict=True):
        nll = {name: Run(shift=shifts[name, point]).nll(400) for name in ("base", "bell")}
        assert (row["point"], row["nll"]) == (point, pytest.approx(nll))
        assert row["speed_up"]["bell"]["mean"] == pytest.approx(ratio)


def test_which_point_is_best(entries):
    """The best mean, not the best single run; more seeds go before a lower NLL."""
    shifts = {("1", 1): 0.5, ("1", 2): 0.0, ("2", 1): 0.3, ("2", 2): 0.3}
    runs = [("base", point, Run("base", seed, shift)) for (point, seed), shift in shifts.items()]
    found = summarize(entries(*runs), "base")
    assert (best_point(found), found["variants"]["base"]["nll"]) == ("2", Run(shift=0.3).nll(400))
    assert best_point(summarize(entries(runs[0], *runs[2:]), "base")) == "2"
    # one that diverged is not the best; one that only one variant survived has no speed-up
    broken, bell = ("base", "1", Run(shift=math.nan)), ("bell", "3", Run("bell"))
    found = summarize(entries(broken, ("base", "2", Run()), bell), "base")
    assert best_point(found) == "2"
    assert (found["grid"][2]["speed_up"], list(found["grid"][2]["nll"])) == ({}, ["bell"])


def test_progress_is_read_beside_the_unigram_and_the_arm(entries):
    """Half of what the ARM has gained over the unigram, which is the reference plus 1."""
    unigram = {"unigram_nll": Run().nll(400) + 1}
    runs = [Run(description=unigram), ("arm", "", Run(shift=1.0, description=unigram))]
    progress = summarize(entries(*runs), "base")["progress"]
    assert progress == {"below_unigram": pytest.approx(1), "share_to_arm": pytest.approx(0.5)}
    poor = ("arm", "", Run(shift=-1.5, description=unigram))  # worse than the unigram
    assert summarize(entries(runs[0], poor), "base")["progress"]["share_to_arm"] is None
    progress = summarize(entries(Run(), Run("bell")), "base")["progress"]
    below = DESCRIPTION["unigram_nll"] - Run().nll(400)
    assert progress == {"below_unigram": pytest.approx(below), "share_to_arm": None}
    progress = summarize(entries(Run(description={"unigram_nll": None})), "base")["progress"]
    assert progress == {"below_unigram": None, "share_to_arm": None}


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
    weight = np.array(Run().length_B) / sum(Run().length_B)
    assert (entry.record.block_nll_EB @ weight).tolist() == pytest.approx(entry.record.nll)


UNPAIRED = [
    ([Run(seed=1), Run("bell", seed=2)], "seed"),
    ([Run("bell"), Run("uniform")], "reference 'base'"),
    # two seeds whose learning rates differ are not two seeds of one variant
    ([Run("base", 1), Run("base", 2, config={"optim.lr": 0.5})], r"optim\.lr"),
    ([Run(shift=math.nan)], "diverged"),
]
DIFFERENT = {
    "tokenizers": [{"description": {"tokenizer_fingerprint": "x"}}],
    "training texts": [{"description": {"train_fingerprint": "x"}}],
    "validation texts": [{"description": {"valid_fingerprint": "x"}}],
    "masks": [{"fingerprint": "x"}, {"mask_seed": 2}, {"draws": 2}],
    r"train\.steps is 400 and 300": [{"steps": (100, 200, 300)}],
    r"train\.batch_size is 32 and 16": [{"config": {"train.batch_size": 16}}],
    r"data\.block_length is 64 and 32": [{"config": {"data.block_length": 32}}],
    "steps": [{"steps": (150, 200, 300, 400)}],
}
"""In what a third run differs; both folders are named."""
UNPAIRED += [
    ([Run(), Run("bell"), replace(Run("uniform"), **other)], f"/[0-9]+ and .*/[0-9]+ .*{named}")
    for named, others in DIFFERENT.items()
    for other in others
]


@pytest.mark.parametrize(("runs", "message"), UNPAIRED)
def test_runs_that_cannot_be_compared_are_refused(entries, runs, message):
    with pytest.raises(ValueError, match=message):
        summarize(entries(*runs), "base")


def test_incomplete_and_damaged_runs_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"config\.json"):
        read_run(tmp_path)
    folder = Run().write(tmp_path / "run")
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    for kept in (lines[:-1], []):
        (folder / "metrics.jsonl").write_text("".join(kept))
        with pytest.raises(ValueError, match=f"step 400.* bellmask resume {folder}"):
            read_run(folder)
    (folder / "metrics.jsonl").write_text("".join(lines))
    assert read_run(folder).steps == list(STEPS)
    path = folder / "validation" / "step-000000200.npz"
    for damaged in (path.read_bytes()[:700], b"", None):
        path.write_bytes(damaged) if damaged is not None else path.unlink()
        with pytest.raises(ValueError, match=str(path)):
            read_run(folder)


def test_a_law_is_described_as_it_is_trained_on():
    law = law_summary(applied("gaussian:0.4,0.05"))
    t, density = np.array(law["t"]), np.array(law["density"])
    assert t[density.argmax()] == pytest.approx(0.4)
    rate = (np.arange(25) + 0.5) / 25
    histogram = np.array(law["mask_rate_histogram"]) / 25
    assert histogram.sum() == pytest.approx(1)
    assert (rate * histogram).sum() == pytest.approx(0.4, abs=0.01)
    # E[t]^2 / E[t^2]: rows of a sequence that is masked more weigh more
    assert law["effective_sample_share"] == pytest.approx(0.4**2 / (0.4**2 + 0.05**2), abs=2e-3)
    assert sum(law["context_weights"]) == pytest.approx(1)


def test_a_law_that_changed_is_shown_over_the_training(entries):
    """Half of the steps at a mean of 0.2 or so, then at 0.8: both in what was drawn."""
    steps = applied("progress").train.steps
    laws = [[-1, 0.2], [steps // 2 - 1, 0.8]]
    lines = [{"step": step, "parameters": [mean, 0.1]} for step, mean in laws]
    law = law_summary(applied("progress"), lines)
    t, density = np.array(law["t"]), np.array(law["density"])
    assert t[density.argmax()] == pytest.approx(0.8)
    rate, histogram = (np.arange(25) + 0.5) / 25, np.array(law["mask_rate_histogram"]) / 25
    assert (rate * histogram).sum() == pytest.approx(0.5, abs=0.02)
    assert histogram[rate < 0.5].sum() == pytest.approx(0.5, abs=0.05)
    found = summarize(entries(Run(), Run("bell", shift=sooner(2))), "base")
    assert len(comparison_tables(found)) == 2
    shown = [{"step": s, "mean": 0.1 + s / 1000, "width": 0.15} for s in (100, 200, 350)]
    found["variants"]["bell"]["runs"][0]["law"] = shown
    rows = comparison_tables(found)[-1].rows
    assert rows == [["bell", "-", "0.20 ± 0.15", "0.30 ± 0.15", "0.30 ± 0.15", "0.45 ± 0.15"]]


def test_the_effective_sample_share():
    """E[s]^2 / E[s^2] of s = w(t)(1 - alpha): 1, 2 sigma sqrt(pi), and 1 / integral of 1/f."""
    shares = {"base": 1.0, "importance_t": 0.354, "importance": 0.348, "aoarm": 1}
    for text, share in shares.items():
        found = law_summary(applied(text))["effective_sample_share"]
        assert found == pytest.approx(share, abs=5e-3)
    # dominated by times that a hundred steps hardly draw: only its order is checked
    assert law_summary(applied("middle_flat"))["effective_sample_share"] < 0.1
    causal = law_summary(applied("aoarm"))  # each context count of a row, once
    assert (causal["context_weights"], causal["density"]) == (pytest.approx([1 / 64] * 64), None)


def test_the_result_in_words_and_on_the_curve(entries):
    found = summarize(entries(Run(), Run("bell", shift=sooner(2))), "base")
    assert "after 200 steps: a speed-up of 2.00x, 1 paired seed" in sentence(found, "bell")
    texts = [text.get_text() for text in curves_figure(found).axes[0].texts]
    assert "2.00x fewer steps" in texts
    missed = summarize(entries(Run(), Run("bell", shift=-0.2)), "base")
    assert "does not stay at or below base's final NLL" in sentence(missed, "bell")
    assert "not reached (gap +0.200 ± " in comparison_tables(missed)[0].rows[1][3]
