"""What the tests of samplers share: a model that notes its calls, canvases, every rule by name."""

import pytest
import torch

from bellmask.generate.engine import generate
from bellmask.generate.grids import uniform_grid
from bellmask.generate.network import Network
from bellmask.generate.rules import RULES, Remasking
from bellmask.generate.settings import Sampling

V, MASK = 6, 6
EVERY_RULE = RULES | {"cap": Remasking(0.3), "rescale": Remasking(0.5, "rescale")}
each = pytest.mark.parametrize("rule", EVERY_RULE)
SAMPLINGS = [
    Sampling(steps=8),
    Sampling(rule="first_hitting"),
    Sampling(rule="most_confident", steps=4, guidance=0.5),
    Sampling(steps=8, remask=0.1),
    Sampling(steps=8, block_length=4),
    Sampling(rule="most_confident", grid="count", per_step=3),
    Sampling(rule="most_confident", steps=6, block_length=4),
    Sampling(rule="margin", steps=6, block_length=4),
    Sampling(rule="margin", steps=6, block_length=4, cache="prefix"),
]
"""Of every kind, for what must not depend on the batch."""


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def masked(count: int, length: int, mask_id: int = MASK) -> torch.Tensor:
    return torch.full((count, length), mask_id)


def make(model, canvas, steps=None, rule="ancestral", *, mask_id=MASK, real=None, w=0.0, **options):
    network = Network(model, mask_id, is_real_BL=real, guidance=w)
    grid = steps if steps is None or isinstance(steps, torch.Tensor) else uniform_grid(steps)
    grid = None if rule == "first_hitting" else grid
    return generate(network, canvas, grid, EVERY_RULE[rule], **options)


class Spy:
    """A model that notes each call; its logits depend on the whole row and the position."""

    def __init__(self, num_tokens: int = V):
        self.num_tokens = num_tokens
        self.calls = []

    def __call__(self, x_BL, rows_N, *, t_B, mask):
        self.calls.append((x_BL.clone(), rows_N.clone(), t_B.clone(), mask))
        place = torch.arange(1, x_BL.shape[1] + 1, dtype=torch.float64)
        seed_BL = (x_BL * place).sum(1, keepdim=True) + 3 * place
        token = torch.arange(1, self.num_tokens + 1, dtype=torch.float64)
        return 2 * torch.sin(seed_BL.flatten()[rows_N, None] * token)
