"""Gradients and their similarities against torch.autograd, one backward pass at a time."""

import json
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from bellmask.analyze.gradients import (
    GRADIENT_ADDITIVITY,
    GRADIENT_RADIUS,
    PAPER_ADDITIVITY,
    PAPER_RADIUS,
    AdditivityOptions,
    RadiusOptions,
)
from bellmask.analyze.similarity import (
    PARTS,
    additivity_similarities,
    cosine,
    gradient,
    neighbours,
    parts_of,
    radius_similarities,
)
from bellmask.assemble import train_run
from bellmask.errors import UserError
from bellmask.model.transformer import Denoiser
from bellmask.options import ModelOptions
from bellmask.rng import stream_key
from bellmask.run import load_run

VOCABULARY, MASK, LENGTH = 7, 7, 12
CLOSE = {"rtol": 1e-4, "atol": 1e-5}
"""Of float32 sums in another order."""


def ignore(done, total):
    pass


def denoiser(seed=1, modulation="constant", is_awake=True):
    """Two layers; awake: all weights random, so that gates are open and the head looks."""
    options = ModelOptions(num_layers=2, width=16, num_heads=2, dropout=0.3, modulation=modulation)
    model = Denoiser(options, VOCABULARY).eval()
    if is_awake:
        generator = torch.Generator().manual_seed(seed)
        for parameter in model.parameters():
            parameter.data = 0.4 * torch.randn(parameter.shape, generator=generator)
    return model


def row(seed=3, length=LENGTH):
    return torch.randint(VOCABULARY, (length,), generator=torch.Generator().manual_seed(seed))


def own_gradient(model, x0_L, masked, scored):
    """The gradient of the scored places' cross-entropies, by parameter, from logits."""
    x_L = x0_L.clone()
    x_L[masked] = model.mask_id
    logits = model(x_L[None], torch.tensor(scored), t_B=torch.tensor([len(masked) / len(x0_L)]))
    loss = F.cross_entropy(logits, x0_L[scored], reduction="sum")
    found = torch.autograd.grad(loss, list(model.parameters()))
    return {name: g for (name, _), g in zip(model.named_parameters(), found, strict=True)}


def joined(named, part="whole"):
    """One part's gradient as a vector."""
    wanted = {
        "whole": lambda name: True,
        "embedding": lambda name: name == "embedding.weight",
        "head": lambda name: name in ("head.weight", "head.bias"),
        "trunk": lambda name: name.split(".")[0] not in ("embedding", "head"),
    }[part]
    return torch.cat([g.flatten() for name, g in named.items() if wanted(name)]).double()


def own_cosine(left, right, part="whole"):
    a, b = joined(left, part), joined(right, part)
    return float((a * b).sum() / ((a * a).sum().sqrt() * (b * b).sum().sqrt()))


def is_masked(*rows, length=LENGTH):
    found = torch.zeros(len(rows), length, dtype=torch.bool)
    for number, masked in enumerate(rows):
        found[number, masked] = True
    return found


class Recorder(nn.Module):
    """A model that remembers what it was asked."""

    def __init__(self, model):
        super().__init__()
        self.model, self.asked = model, []

    def named_parameters(self, *args, **more):
        return self.model.named_parameters(*args, **more)

    def forward(self, x_BL, rows_N, targets_N, **more):
        self.asked.append((x_BL.clone(), rows_N.tolist(), targets_N.tolist()))
        return self.model(x_BL, rows_N, targets_N, **more)


class PlaceByPlace(nn.Module):
    """Open to all parts, but blind to the context."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        self.embedding = nn.Embedding(VOCABULARY + 1, 6)
        self.middle = nn.Linear(6, 6)
        self.head = nn.Linear(6, VOCABULARY)
        for parameter in self.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator)

    def forward(self, x_BL, rows_N, targets_N, *, t_B):
        h = self.embedding(x_BL).flatten(0, 1)[rows_N]
        return F.cross_entropy(self.head(self.middle(h).tanh()), targets_N, reduction="sum")


# one gradient


@pytest.mark.parametrize("modulation", ["constant", "time"])
def test_a_gradient_is_that_of_autograd_part_by_part(modulation):
    model, x0_L = denoiser(modulation=modulation), row()
    masked, scored = [2, 5, 6, 9], [2, 6, 9]
    found = gradient(model, x0_L[None], is_masked(masked), torch.tensor(scored), MASK)
    expected = own_gradient(model, x0_L, masked, scored)
    assert set(found) == set(PARTS)
    for part in PARTS:
        torch.testing.assert_close(found[part].double(), joined(expected, part), **CLOSE)
        assert float(found[part].norm()) > 0.1


def test_the_parts_are_the_whole():
    model = denoiser()
    names = {part: {id(p) for p in parameters} for part, parameters in parts_of(model).items()}
    assert names["whole"] == {id(p) for p in model.parameters()}
    assert names["embedding"] | names["trunk"] | names["head"] == names["whole"]
    assert sum(len(names[part]) for part in PARTS[1:]) == len(names["whole"])
    found = gradient(model, row()[None], is_masked([1, 4]), torch.tensor([1, 4]), MASK)
    squares = {part: float(g.double().square().sum()) for part, g in found.items()}
    assert squares["whole"] == pytest.approx(sum(squares[part] for part in PARTS[1:]), rel=1e-9)


def test_gradients_do_not_pile_up_and_are_taken_where_none_are_wanted():
    model = denoiser()
    asked = (row()[None], is_masked([1, 4]), torch.tensor([1]), MASK)
    first = gradient(model, *asked)["whole"]
    gradient(model, row(4)[None], is_masked([2]), torch.tensor([2]), MASK)
    with torch.no_grad():
        again = gradient(model, *asked)["whole"]
    assert torch.equal(first, again)


def test_cosines_of_known_vectors():
    a = torch.tensor([3.0, 4.0])
    assert cosine(a, torch.tensor([4.0, 3.0])) == pytest.approx(24 / 25, abs=1e-15)
    assert cosine(a, 10 * a) == pytest.approx(1, abs=1e-15)
    assert cosine(a, -a) == pytest.approx(-1, abs=1e-15)
    assert cosine(a, torch.tensor([4.0, -3.0])) == 0
    tiny = torch.tensor([1e-30, 0.0])  # its square is no float32
    assert cosine(tiny, tiny) == pytest.approx(1, abs=1e-12)
    assert math.isnan(cosine(a, torch.zeros(2)))
    assert math.isnan(cosine(torch.zeros(2), a))


# radius


def test_neighbours_are_inside_the_block_and_not_the_centre():
    assert neighbours(5, 2, 12) == [3, 4, 6, 7]
    assert neighbours(1, 3, 12) == [0, 2, 3, 4]
    assert neighbours(10, 3, 12) == [7, 8, 9, 11]
    assert neighbours(4, 128, 9) == [0, 1, 2, 3, 5, 6, 7, 8]
    for centre in range(4, 12 - 4):
        assert len(neighbours(centre, 4, 12)) == 8


def radius_masks(length, radii, masks, keys):
    """(centre, {radius: other masked places}) for each key; also that only the centre is scored."""
    x0_L, found = row(length=length), []
    for key in keys:
        model = Recorder(PlaceByPlace())
        similarities = radius_similarities(model, x0_L, radii, masks, MASK, key)
        assert list(similarities) == list(radii)
        (centre,) = model.asked[0][1]
        sets = []
        for x_BL, scored, targets in model.asked:
            assert (x_BL.shape, scored, targets) == ((1, length), [centre], [x0_L[centre]])
            hidden = (x_BL[0] == MASK).nonzero().squeeze(1).tolist()
            assert all(x_BL[0, i] == x0_L[i] for i in range(length) if i not in hidden)
            assert centre in hidden
            sets.append({i for i in hidden if i != centre})
        assert sets[0] == set()
        found.append((centre, dict(zip(radii, sets[1:], strict=True))))
    return found


def test_eight_neighbours_within_the_radius_are_masked():
    draws = radius_masks(40, (4, 6, 16, 128), 8, range(150))
    assert {centre for centre, _ in draws} == set(range(4, 36))
    for centre, chosen in draws:
        assert chosen[4] == {*range(centre - 4, centre + 5)} - {centre}
        assert all(len(places) == 8 for places in chosen.values())
        assert all(abs(i - centre) <= r for r, places in chosen.items() for i in places)
    # all of the region is used, not its first places only
    reach = [max(abs(i - centre) for i in chosen[16]) for centre, chosen in draws]
    assert max(reach) == 16
    left = sum(i < centre for centre, chosen in draws for i in chosen[6])
    assert 0.4 < left / (8 * 150) < 0.6
    assert {i for _, chosen in draws for i in chosen[128]} == set(range(40))


def test_more_masks_keep_the_centre_further_from_the_ends():
    """16 masks within radius 8 need 8 places on both sides."""
    draws = radius_masks(40, (8, 128), 16, range(100))
    assert {centre for centre, _ in draws} == set(range(8, 32))
    for centre, chosen in draws:
        assert chosen[8] == {*range(centre - 8, centre + 9)} - {centre}
        assert len(chosen[128]) == 16


def test_the_shortest_block_has_one_centre_and_eight_neighbours():
    for centre, chosen in radius_masks(9, (4, 32), 8, range(3)):
        assert centre == 4
        assert chosen[4] == chosen[32] == {0, 1, 2, 3, 5, 6, 7, 8}


def test_radius_similarities_are_cosines_of_two_backward_passes():
    model, x0_L = denoiser(), row(length=24)
    recorder = Recorder(model)
    found = radius_similarities(recorder, x0_L, (2, 8), 4, MASK, key=11)
    (centre,) = recorder.asked[0][1]
    alone = own_gradient(model, x0_L, [centre], [centre])
    for radius, (x_BL, _, _) in zip((2, 8), recorder.asked[1:], strict=True):
        hidden = (x_BL[0] == MASK).nonzero().squeeze(1).tolist()
        more = own_gradient(model, x0_L, hidden, [centre])
        for part in PARTS:
            assert found[radius][part] == pytest.approx(own_cosine(alone, more, part), abs=1e-5)
    assert found[2]["whole"] < 0.999


# additivity


def test_the_sum_of_single_masks_is_that_of_separate_passes():
    model, x0_L = denoiser(), row()
    recorder = Recorder(model)
    found = additivity_similarities(recorder, x0_L, (2, 5), MASK, key=3)
    assert list(found) == [2, 5]
    for number, count in enumerate((2, 5)):
        singles, joint = recorder.asked[2 * number : 2 * number + 2]
        places = [index % LENGTH for index in singles[1]]
        assert [index // LENGTH for index in singles[1]] == list(range(count))
        assert len(set(places)) == count
        assert singles[2] == joint[2] == x0_L[places].tolist()
        assert joint[1] == places
        for place, x_L in zip(places, singles[0]):
            assert (x_L == MASK).nonzero().flatten().tolist() == [place]
        assert (joint[0][0] == MASK).nonzero().flatten().tolist() == sorted(places)
        apart = [own_gradient(model, x0_L, [place], [place]) for place in places]
        total = {name: sum(one[name] for one in apart) for name in apart[0]}
        together = own_gradient(model, x0_L, places, places)
        for part in PARTS:
            expected = own_cosine(total, together, part)
            assert found[count][part] == pytest.approx(expected, abs=1e-5)
            assert found[count][part] < 0.9999
        batched = gradient(
            model, x0_L.expand(count, -1), is_masked(*([p] for p in places)),
            torch.tensor(singles[1]), MASK,
        )  # fmt: skip
        torch.testing.assert_close(batched["whole"].double(), joined(total), **CLOSE)


def test_a_model_that_ignores_the_context_is_additive_and_needs_no_neighbours():
    for key in range(3):
        for found in (
            additivity_similarities(PlaceByPlace(), row(), (1, 3, 12), MASK, key),
            radius_similarities(PlaceByPlace(), row(), (4, 128), 8, MASK, key),
        ):
            values = [value for similarities in found.values() for value in similarities.values()]
            assert values == pytest.approx([1.0] * len(values), abs=1e-6)


def test_an_untrained_model_has_a_gradient_in_its_head_only():
    """Gates and head are zero: the head's rows see one and the same state at every mask."""
    model = denoiser(is_awake=False)
    found = gradient(model, row()[None], is_masked([1, 4]), torch.tensor([1, 4]), MASK)
    assert {part for part, g in found.items() if bool((g != 0).any())} == {"whole", "head"}
    for similarities in (
        additivity_similarities(model, row(), (4,), MASK, 1)[4],
        radius_similarities(model, row(), (4,), 8, MASK, 1)[4],
    ):
        assert similarities["whole"] == pytest.approx(1, abs=1e-6)
        assert similarities["head"] == pytest.approx(1, abs=1e-6)
        assert math.isnan(similarities["trunk"])
        assert math.isnan(similarities["embedding"])


# runs


@pytest.fixture(scope="module")
def runs(small_config, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    for name, options in {
        "mdm": "--train.steps 6 --checkpoint.keep-steps 3 6",
        "arm": "--framework arm --train.steps 2",
        "apart": "--train.steps 2 --data.document-attention",
        "timed": "--train.steps 2 --model.modulation time --schedule cosine --law uniform "
        "--objective nelbo",
        "lines": "--train.steps 2 --data.documents line --data.packing unpacked "
        "--data.block-length 48",
    }.items():
        train_run(small_config(*options.split()), folder / name, is_quiet=True)
    return folder


def spread_rows(run, count):
    """Rows at even distances over the validation text."""
    valid = run.blocks()[1]
    return valid.rows(slice(None))[:: len(valid) // count][:count]


def test_a_summary_is_the_mean_and_error_over_draws(runs):
    told = []
    options = AdditivityOptions((str(runs / "mdm"),), draws=5, seed=8, counts=(2, 6))
    found = GRADIENT_ADDITIVITY.measure(options, lambda *n: told.append(n))
    assert told == [(n, 10) for n in range(1, 11)]
    assert [model["name"] for model in found["models"]] == ["bell, step 6", "bell, untrained"]
    assert [model["step"] for model in found["models"]] == [6, 0]
    run = load_run(runs / "mdm")
    rows = spread_rows(run, 5)
    draws = [
        additivity_similarities(
            run.model, x0_L, (2, 6), run.tokenizer.mask_id, stream_key(8, "gradients", number)
        )
        for number, x0_L in enumerate(rows)
    ]
    trained, untrained = (model["rows"] for model in found["models"])
    assert [line["setting"] for line in trained] == [2, 6]
    for line in trained:
        for part in PARTS:
            values = np.array([draw[line["setting"]][part] for draw in draws])
            assert line[part]["mean"] == pytest.approx(values.mean(), abs=1e-6)
            expected = values.std(ddof=1) / math.sqrt(5)
            assert line[part]["se"] == pytest.approx(expected, rel=1e-3, abs=1e-7)
            assert line[part]["draws"] == 5
            assert 0 < line[part]["mean"] < 1
    for line in untrained:
        assert line["trunk"] == line["embedding"] == {"mean": None, "se": None, "draws": 0}
        assert line["whole"]["mean"] == pytest.approx(1, abs=1e-6)
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    tables = GRADIENT_ADDITIVITY.tables(found)
    assert tables[0].title == "bell, step 6: cosine similarity ± standard error (Table 2)"
    assert tables[0].columns == ["number of masks", *PARTS, "paper, 1M steps"]
    first = trained[0]
    cells = [f"{first[part]['mean']:.3f} ± {first[part]['se']:.3f}" for part in PARTS]
    assert tables[0].rows[0] == ["2", *cells, "0.999"]
    assert tables[0].rows[1][-1] == "-"
    assert tables[1].rows[0][2:4] == ["no gradient", "no gradient"]


def test_the_checkpoint_asked_for_and_the_paper_beside_it(runs):
    options = RadiusOptions((str(runs / "mdm"),), checkpoint="3", draws=2, radii=(4, 128))
    found = GRADIENT_RADIUS.measure(options, ignore)
    assert [model["name"] for model in found["models"]] == ["bell, step 3", "bell, untrained"]
    run = load_run(runs / "mdm", checkpoint="3")
    rows, mask_id = spread_rows(run, 2), run.tokenizer.mask_id
    draws = [
        radius_similarities(
            run.model, x0_L, (4, 128), 8, mask_id, stream_key(1234, "gradients", number)
        )
        for number, x0_L in enumerate(rows)
    ]
    for line in found["models"][0]["rows"]:
        mean = sum(draw[line["setting"]]["trunk"] for draw in draws) / 2
        assert line["trunk"]["mean"] == pytest.approx(mean, abs=1e-6)
        assert 0 < mean < 0.9999
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    table = GRADIENT_RADIUS.tables(found)[0]
    assert (table.columns[0], table.title[-9:]) == ("radius r", "(Table 1)")
    assert [line[-1] for line in table.rows] == ["0.108", "0.935"]
    figure = GRADIENT_RADIUS.figure(found)
    assert [axes.get_title() for axes in figure.axes] == ["bell, step 3", "bell, untrained"]
    assert figure.axes[1].get_legend_handles_labels()[1] == [
        "paper (LM1B, 1M steps)", "whole model", "head",
    ]  # fmt: skip
    assert "8 tokens masked" in figure.axes[0].get_xlabel()


def test_the_papers_numbers_are_those_printed():
    radii = {4: 0.108, 8: 0.463, 16: 0.685, 32: 0.839, 128: 0.935}
    counts = {2: 0.999, 4: 0.997, 8: 0.994, 16: 0.985, 32: 0.976}
    assert {int(r): value for r, value in PAPER_RADIUS.items()} == radii
    assert {int(k): value for k, value in PAPER_ADDITIVITY.items()} == counts
    assert RadiusOptions(()).radii == tuple(radii)
    assert AdditivityOptions(()).counts == tuple(counts)


def test_rows_are_long_enough_and_without_padding(runs, monkeypatch):
    """Lines of 20 to 60 bytes in blocks of 48; few are long enough for 44 masks: again from the
    first one.
    """
    seen = []

    def watched(model, x0_L, *rest):
        seen.append(x0_L)
        return {44: dict.fromkeys(PARTS, 1.0)}

    monkeypatch.setattr("bellmask.analyze.gradients.additivity_similarities", watched)
    options = AdditivityOptions((str(runs / "lines"),), draws=64, counts=(44,))
    GRADIENT_ADDITIVITY.measure(options, ignore)
    blocks = load_run(runs / "lines").blocks()[1]
    lengths = blocks.row_lengths(slice(None))
    long = [i for i, length in enumerate(lengths.tolist()) if length >= 44]
    assert 1 < len(long) < 64 < len(blocks)
    assert any(lengths[i] < 48 for i in long)
    rows = blocks.rows(slice(None))
    assert len(seen) == 2 * 64
    for number, x0_L in enumerate(seen):
        place = long[number % 64 % len(long)]
        assert torch.equal(x0_L, rows[place, : lengths[place]])


@pytest.mark.parametrize(
    ("analysis", "options", "words"),
    [
        (GRADIENT_RADIUS, RadiusOptions(("arm",)), "arm is a causal model; this analysis is about"),
        (GRADIENT_ADDITIVITY, AdditivityOptions(("mdm", "arm"), counts=(2,)), "causal model"),
        (GRADIENT_ADDITIVITY, AdditivityOptions(("mdm",)), "blocks of 16 tokens; .* needs 32"),
        (
            GRADIENT_RADIUS,
            RadiusOptions(("mdm",), masks=16, radii=(8,)),
            "of 16 tokens; .* needs 17",
        ),
        (GRADIENT_RADIUS, RadiusOptions(("mdm",), radii=(3, 8)), "--radii 3 8: each must have at"),
        (GRADIENT_RADIUS, RadiusOptions(("mdm",), radii=()), "--radii"),
        (GRADIENT_RADIUS, RadiusOptions(("mdm",), masks=0), "--masks 0"),
        (GRADIENT_RADIUS, RadiusOptions(("mdm",), draws=1), "--draws must be at least 2, got 1"),
        (GRADIENT_ADDITIVITY, AdditivityOptions(("mdm",), counts=(0, 2)), "at least 1"),
        (GRADIENT_ADDITIVITY, AdditivityOptions(("mdm",), counts=()), "--counts needs"),
        (
            GRADIENT_RADIUS,
            RadiusOptions(("mdm",), checkpoint="5"),
            "no checkpoint '5'.*steps: 3, 6",
        ),
        (GRADIENT_RADIUS, RadiusOptions(("apart",)), "apart keeps attention inside documents"),
        (GRADIENT_RADIUS, RadiusOptions(("timed",)), "timed is told times of another than"),
        (GRADIENT_RADIUS, RadiusOptions(()), "at least one run folder"),
    ],
    ids=lambda value: value if isinstance(value, str) else getattr(value, "name", ""),
)
def test_what_cannot_be_measured_is_refused(runs, analysis, options, words, monkeypatch):
    monkeypatch.chdir(runs)
    with pytest.raises(UserError, match=words):
        analysis.measure(options, ignore)
