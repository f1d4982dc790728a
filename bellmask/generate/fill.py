"""Fill canvases with any framework: by a rule for masked models, else token by token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from bellmask.diffusion.frameworks import Framework, Mdm, Ordered, Shifted
from bellmask.generate.choice import Choice
from bellmask.generate.engine import Generation, generate
from bellmask.generate.grids import GRIDS
from bellmask.generate.network import Network
from bellmask.generate.rules import RULES, Remasking, Rule
from bellmask.generate.sequential import generate_in_order
from bellmask.generate.settings import DEFAULT_STEPS, Sampling
from bellmask.generate.steps import OnStep
from bellmask.utils.errors import UserError, look_up


def fill(
    model: Callable[..., Tensor],
    canvas_BL: Tensor,
    framework: Framework,
    sampling: Sampling,
    *,
    mask_id: int,
    seed: int = 0,
    first_sample: int | Tensor = 0,
    is_real_BL: Tensor | None = None,
    device: torch.device | None = None,
    on_step: OnStep | None = None,
) -> Generation:
    """Fill all masked positions the way ``sampling`` says.

    ``is_real_BL`` is False at padding behind a canvas; ``first_sample`` is the first row's number,
    or those of all rows.
    """
    sampling.check()
    if getattr(model, "first_maskable", 0) and bool((canvas_BL[:, 0] == mask_id).any()):
        raise UserError(
            "this model predicts a token from what is before it: the first one must be given (BOS)"
        )
    choice = Choice(
        sampling.temperature, sampling.top_k, sampling.top_p, getattr(torch, sampling.noise)
    )
    noise: dict[str, Any] = {
        "choice": choice,
        "seed": seed,
        "first_sample": first_sample,
        "on_step": on_step,
    }
    if isinstance(framework, Shifted):
        _refuse_for_causal(sampling)
        network = Network(model, mask_id, is_real_BL=is_real_BL, device=device)
        return _left_to_right(network, canvas_BL, noise)
    if isinstance(framework, Ordered):
        _refuse_for_causal(sampling)
        if is_real_BL is not None or not isinstance(first_sample, int):
            raise UserError("a causal model of our own trunk takes one canvas at a time")
        return generate_in_order(
            model, canvas_BL, framework, mask_id=mask_id, device=device, **noise
        )
    assert isinstance(framework, Mdm)
    return generate(
        Network(model, mask_id, is_real_BL=is_real_BL, guidance=sampling.guidance, device=device),
        canvas_BL,
        make_grid(sampling),
        make_rule(sampling),
        schedule=framework.schedule,
        block_length=sampling.block_length,
        is_cached=sampling.cache == "prefix",
        **noise,
    )


def _left_to_right(network: Network, canvas_BL: Tensor, noise: dict[str, Any]) -> Generation:
    """Token by token with a causal LM: blocks of one token; what is masked later it cannot see."""
    is_masked_BL = canvas_BL == network.mask_id
    if network.is_real_BL is not None:
        is_masked_BL = is_masked_BL | ~network.is_real_BL  # padding comes behind all
    if bool(is_masked_BL.long().diff(dim=1).lt(0).any()):
        raise UserError("this model writes left to right: it takes a prefix, not gaps")
    return generate(network, canvas_BL, 1, RULES["random"], block_length=1, **noise)


def make_rule(sampling: Sampling) -> Rule:
    """The rule that the settings name."""
    if sampling.remask is not None:
        return Remasking(sampling.remask, sampling.remask_kind)
    return look_up("rule", sampling.rule, RULES)


def make_grid(sampling: Sampling) -> Tensor | int | None:
    """The grid that the settings name, or tokens per step; None for a rule without one."""
    if sampling.rule == "first_hitting":
        return None
    if sampling.grid == "count":
        return sampling.per_step or 1
    return look_up("grid", sampling.grid, GRIDS)(sampling.steps or DEFAULT_STEPS)


def _refuse_for_causal(sampling: Sampling) -> None:
    """A causal model has its own order: settings about order and blocks would be ignored."""
    kept = asdict(sampling.for_causal())
    asked = [name for name, value in asdict(sampling).items() if value != kept[name]]
    if asked:
        given = ", ".join("--" + name.replace("_", "-") for name in asked)
        raise UserError(
            f"{given}: for masked models only; a causal model writes token by token in its own "
            "order"
        )
