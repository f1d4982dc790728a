"""What the tests of samplers share: random networks, every rule, what the network was asked."""

import itertools

import numpy as np
import pytest
import torch
from scipy import stats

from bellmask.config.options import ModelOptions
from bellmask.generate.rules import RULES, Remasking
from bellmask.generate.sampler import SamplingDenoiser, generate
from bellmask.generate.settings import Sampling
from bellmask.model.transformer import Denoiser

V, MASK = 6, 6
"""Tokens, and the mask's id, of most tests."""
EVERY_RULE = RULES | {"cap": Remasking(0.3), "rescale": Remasking(0.5, "rescale")}
each = pytest.mark.parametrize("rule", EVERY_RULE)

SAMPLINGS = [
    Sampling(rule="first_hitting"),
    Sampling(rule="most_confident", steps=4, guidance=0.5),
    Sampling(steps=8, remask=0.1),
    Sampling(rule="most_confident", grid="count", per_step=3),
    Sampling(rule="margin", steps=6, block_length=4, cache="prefix"),
]
"""Of every kind, for what must not depend on the batch."""
BITS = list(itertools.product((0, 1), repeat=4))


def p_value(ids_BL, joint, given):
    """Of the made rows of four bits against p(row | what is given), given as {place: bit}."""
    rows = [r for r in BITS if all(r[i] == v for i, v in given.items())]
    counts = dict.fromkeys(rows, 0)
    for row in ids_BL.tolist():
        counts[tuple(row)] += 1  # a KeyError is a given token that was changed
    p = np.array([joint[r] for r in rows])
    return stats.chisquare(list(counts.values()), len(ids_BL) * p / p.sum()).pvalue


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def masked(count: int, length: int, mask_id: int = MASK) -> torch.Tensor:
    return torch.full((count, length), mask_id)


def awake(num_layers=2, num_tokens=7, *, std=0.4, is_causal=False, encoding="source", **options):
    """A network whose zero-initialized parts are random too, so that everything matters."""
    options = ModelOptions(num_layers, 16, 2, **{"dropout": 0.0} | options)
    model = Denoiser(options, num_tokens, is_causal=is_causal, encoding=encoding)
    draw = seeded(8)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, std, generator=draw)
    return model.eval()


class Told(SamplingDenoiser):
    """Keeps what was asked, at which places, and the logits that came back."""

    def begin(self, canvas_BL):
        super().begin(canvas_BL)
        self.asked = []

    def read(self, x_BL, is_wanted_BL, t_B, reader):
        x_BL, parts = x_BL.clone(), []

        def note(logits_NV):
            parts.append(logits_NV)
            return reader(logits_NV)

        found = super().read(x_BL, is_wanted_BL, t_B, note)
        self.asked.append((x_BL, is_wanted_BL.clone(), torch.cat(parts)))
        return found


def make_told(
    model, canvas, grid=None, rule="ancestral", *, mask_id=MASK, real=None, w=0.0, **options
):
    """(what is made, the network that was asked)."""
    network = Told(model, mask_id, is_real_BL=real, guidance=w)
    rule = EVERY_RULE[rule] if isinstance(rule, str) else rule
    grid = grid if rule.takes_grid else None
    return generate(network, canvas, grid, rule, **options), network


def make(*args, **options):
    return make_told(*args, **options)[0]
