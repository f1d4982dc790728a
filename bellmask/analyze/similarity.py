"""Gradients of a masked model under different masks of the same row, and how alike they are.

Evaluation mode, no weight on the loss; for all parameters and for embedding, trunk and head apart.
L block length.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from bellmask.report.gradient_plots import PARTS
from bellmask.utils.rng import shuffle, stream_key, uniform

MARGIN = 4
"""A centre is at least this far from both ends, so that radius 4 has 8 neighbours."""


def parts_of(model: nn.Module) -> dict[str, list[nn.Parameter]]:
    """Parameters by part; the trunk is all that is neither embedding nor head."""
    named = list(model.named_parameters())
    own = {
        part: [p for n, p in named if n.startswith(f"{part}.")] for part in ("embedding", "head")
    }
    rest = [p for n, p in named if not n.startswith(("embedding.", "head."))]
    return {"whole": [p for _, p in named], **own, "trunk": rest}


def gradient(
    model: nn.Module, x0_BL: Tensor, is_masked_BL: Tensor, scored: Tensor, mask_id: int
) -> dict[str, Tensor]:
    """Gradient of the sum of cross-entropies at the flat indices ``scored``, part by part."""
    x_BL = torch.where(is_masked_BL, mask_id, x0_BL)
    model.zero_grad(set_to_none=True)
    rate_B = is_masked_BL.float().mean(1)  # the time, under the linear schedule
    with torch.enable_grad():
        model(x_BL, scored, x0_BL.flatten()[scored], t_B=rate_B).backward()
    return {
        part: torch.cat([_flat(p) for p in parameters])
        for part, parameters in parts_of(model).items()
    }


def _flat(parameter: nn.Parameter) -> Tensor:
    return (torch.zeros_like(parameter) if parameter.grad is None else parameter.grad).flatten()


def cosine(left: Tensor, right: Tensor) -> float:
    """Cosine similarity in float64; nan where one of them is zero."""
    a, b = left.double(), right.double()
    norms = float(a.norm() * b.norm())
    return float(a @ b) / norms if norms > 0 else math.nan


def neighbours(centre: int, radius: int, length: int) -> list[int]:
    """Positions other than the centre within a radius, inside the block."""
    low, high = max(0, centre - radius), min(length - 1, centre + radius)
    return [i for i in range(low, high + 1) if i != centre]


def margin_of(masks: int) -> int:
    """How far a centre is from both ends, so that a radius of half as many has all neighbours."""
    return max(MARGIN, math.ceil(masks / 2))


def radius_similarities(
    model: nn.Module, x0_L: Tensor, radii: Sequence[int], masks: int, mask_id: int, key: int
) -> dict[int, dict[str, float]]:
    """cos(g({c}), g({c} and 8 more)) for a random centre c, at each radius."""
    length = len(x0_L)
    spread = float(uniform(key, torch.arange(1)))
    margin = margin_of(masks)
    centre = margin + int(spread * (length - 2 * margin))
    alone = torch.zeros(1, length, dtype=torch.bool, device=x0_L.device)
    alone[0, centre] = True
    scored = torch.tensor([centre], device=x0_L.device)
    before = gradient(model, x0_L[None], alone, scored, mask_id)
    found = {}
    for radius in radii:
        near = neighbours(centre, radius, length)
        chosen = [near[i] for i in shuffle(stream_key(key, "radius", radius), len(near))[:masks]]
        more = alone.clone()
        more[0, chosen] = True
        after = gradient(model, x0_L[None], more, scored, mask_id)
        found[radius] = {part: cosine(before[part], after[part]) for part in PARTS}
    return found


def additivity_similarities(
    model: nn.Module, x0_L: Tensor, counts: Sequence[int], mask_id: int, key: int
) -> dict[int, dict[str, float]]:
    """cos(sum of single-mask gradients, gradient of the joint mask) for each number of masks."""
    length, found = len(x0_L), {}
    for count in counts:
        places = shuffle(stream_key(key, "count", count), length)[:count].to(x0_L.device)
        single = torch.zeros(count, length, dtype=torch.bool, device=x0_L.device)
        single[torch.arange(count), places] = True
        rows = torch.arange(count, device=x0_L.device) * length + places
        apart = gradient(model, x0_L.expand(count, -1), single, rows, mask_id)
        joint = gradient(model, x0_L[None], single.any(0, keepdim=True), places, mask_id)
        found[count] = {part: cosine(apart[part], joint[part]) for part in PARTS}
    return found
