"""Gradients and their similarities against torch.autograd, one backward pass at a time."""

from __future__ import annotations

import itertools
import json
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from counted_progress import Counted
from sampling_tools import awake, seeded

from bellmask.analyze.gradients import (
    GRADIENT_ADDITIVITY,
    GRADIENT_RADIUS,
    PARTS,
    AdditivityOptions,
    RadiusOptions,
    gradient,
)
from bellmask.run import load_run
from bellmask.utils.rng import stream_key

VOCABULARY, MASK, LENGTH = 7, 7, 12
CLOSE = {"rtol": 1e-4, "atol": 1e-5}
"""Of float32 sums in another order."""


def row(seed=3, length=LENGTH):
    return torch.randint(VOCABULARY, (length,), generator=seeded(seed))


PART = {"embedding.weight": "embedding", "head.weight": "head", "head.bias": "head"}


def own_gradient(model, x0_L, masked, scored):
    """The gradient of the scored places' cross-entropies, by part, from logits."""
    x_L = x0_L.clone()
    x_L[masked] = model.mask_id
    logits = model(x_L[None], torch.tensor(scored), t_B=torch.tensor([len(masked) / len(x0_L)]))
    loss = F.cross_entropy(logits, x0_L[scored], reduction="sum")
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    found = {part: [] for part in PARTS}
    for (name, _), g in zip(model.named_parameters(), gradients, strict=True):
        for part in ("whole", PART.get(name, "trunk")):
            found[part].append(g.flatten())
    return {part: torch.cat(parts).double() for part, parts in found.items()}


def check_cosines(found, left, right):
    for part in PARTS:
        expected = float(F.cosine_similarity(left[part], right[part], dim=0))
        assert found[part] == pytest.approx(expected, abs=1e-5)
        assert found[part] < 0.9999


def recorded(model):
    """(masked tokens, rows, targets) of every call from now on."""
    asked = []
    model.register_forward_pre_hook(lambda _, args: asked.append(args))
    return asked


# one gradient


@pytest.mark.parametrize("modulation", ["constant", "time"])
def test_a_gradient_is_that_of_autograd_part_by_part(modulation):
    model, x0_L = awake(2, VOCABULARY, dropout=0.3, modulation=modulation), row()
    masked, scored = [2, 5, 6, 9], [2, 6, 9]
    is_masked = torch.zeros(1, LENGTH, dtype=torch.bool)
    is_masked[0, masked] = True
    with torch.no_grad():
        for x_L in (row(4), x0_L):  # the first must not pile up
            found = gradient(model, x_L[None], is_masked, torch.tensor(scored), MASK)
    expected = own_gradient(model, x0_L, masked, scored)
    assert set(found) == set(PARTS)
    assert len(found["whole"]) == sum(len(found[part]) for part in PARTS[1:])
    for part in PARTS:
        torch.testing.assert_close(found[part].double(), expected[part], **CLOSE)
        assert float(found[part].norm()) > 0.1


# radius


def radius_masks(length, radii, masks, keys):
    """(center, {radius: other masked places}) for each key; also that only the center is scored."""
    model, x0_L, found = awake(2, VOCABULARY), row(length=length), []
    asked = recorded(model)
    options = RadiusOptions(runs=(), radii=radii, masks=masks)
    for key in keys:
        asked.clear()
        similarities = options.similarities(model, x0_L, MASK, key)
        (center,), sets = asked[0][1].tolist(), []
        for x_BL, scored, targets in asked:
            assert (scored.tolist(), targets.tolist()) == ([center], [x0_L[center]])
            hidden = (x_BL[0] == MASK).nonzero().squeeze(1).tolist()
            assert all(x_BL[0, i] == x0_L[i] for i in range(length) if i not in hidden)
            sets.append({*hidden} - {center})
        assert sets[0] == set()
        found.append((center, dict(zip(radii, sets[1:], strict=True))))
    alone = own_gradient(model, x0_L, [center], [center])
    for radius, places in found[-1][1].items():
        after = own_gradient(model, x0_L, [center, *places], [center])
        check_cosines(similarities[radius], alone, after)
    return found


def test_eight_neighbors_within_the_radius_are_masked():
    draws = radius_masks(24, (4, 16, 128), 8, range(60))
    assert {center for center, _ in draws} == set(range(4, 20))
    for center, chosen in draws:
        assert chosen[4] == {*range(center - 4, center + 5)} - {center}
        assert all(len(places) == 8 for places in chosen.values())
        assert all(abs(i - center) <= r for r, places in chosen.items() for i in places)
    # all of the region is used, not its first places only
    assert max(abs(i - center) for center, chosen in draws for i in chosen[16]) == 16
    assert {i for _, chosen in draws for i in chosen[128]} == set(range(24))
    # 16 masks within radius 8 need 8 places on both sides; the shortest block has one center
    wide = radius_masks(24, (8, 128), 16, range(60))
    assert {center for center, _ in wide} == set(range(8, 16))
    assert {len(places) for _, chosen in wide for places in chosen.values()} == {16}
    assert radius_masks(9, (4,), 8, [0]) == [(4, {4: {0, 1, 2, 3, 5, 6, 7, 8}})]


# additivity


def test_the_sum_of_single_masks_is_that_of_separate_passes():
    model, x0_L = awake(2, VOCABULARY), row()
    asked = recorded(model)
    found = AdditivityOptions(runs=(), counts=(2, 5)).similarities(model, x0_L, MASK, key=3)
    joint = [asked[1][1].tolist(), asked[3][1].tolist()]
    for count, places in zip((2, 5), joint, strict=True):
        assert len(set(places)) == count
        apart = [own_gradient(model, x0_L, [place], [place]) for place in places]
        total = {part: sum(one[part] for one in apart) for part in PARTS}
        check_cosines(found[count], total, own_gradient(model, x0_L, places, places))


# runs


@pytest.mark.parametrize("kind", ["additivity", "radius"])
def test_a_summary_is_the_mean_and_error_over_draws(zoo, kind):
    """At the checkpoint asked for; the untrained model beside it, the paper's numbers too."""
    progress, run = Counted(), load_run(zoo / "steps", checkpoint="30")
    common = {"runs": (str(zoo / "steps"),), "checkpoint": "30", "draws": 5, "seed": 8}
    analysis, options, settings = {
        "additivity": (GRADIENT_ADDITIVITY, AdditivityOptions(counts=(2, 6), **common), [2, 6]),
        "radius": (GRADIENT_RADIUS, RadiusOptions(radii=(4, 6), **common), [4, 6]),
    }[kind]
    found = analysis.measure(options, progress)
    assert (progress.totals, progress.done) == ([10], 10)
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert [model["step"] for model in found["models"]] == [30, 0]
    valid, mask_id = run.blocks()[1], run.tokenizer.mask_id
    spread = valid.rows(slice(None))[:: len(valid) // 5][:5]
    draws = [
        options.similarities(run.model, x0_L, mask_id, stream_key(8, "gradients", n))
        for n, x0_L in enumerate(spread)
    ]
    trained, untrained = (model["rows"] for model in found["models"])
    assert [line["setting"] for line in trained] == settings
    for line, part in itertools.product(trained, PARTS):
        values = np.array([draw[line["setting"]][part] for draw in draws])
        assert line[part]["mean"] == pytest.approx(values.mean(), abs=1e-6)
        expected = values.std(ddof=1) / math.sqrt(5)
        assert line[part]["se"] == pytest.approx(expected, rel=1e-3, abs=1e-7)
        assert line[part]["draws"] == 5
    for line in untrained:
        assert line["trunk"] == line["embedding"] == {"mean": None, "se": None, "draws": 0}
        assert line["whole"]["mean"] == pytest.approx(1, abs=1e-6)
    rows = analysis.tables(found)[0].rows
    assert [row[-1] for row in rows] == [{"additivity": "0.999", "radius": "0.108"}[kind], "-"]
