"""The shared view of Sec. 2.2: each framework defines how contexts of N_c tokens and targets are
drawn.

| framework        | context z (paper Table 6)                  | target i            | NLL      |
|------------------|--------------------------------------------|---------------------|----------|
| ARM              | the first N_c tokens                       | the next one        | exact    |
| sigma-ARM        | the first N_c tokens in a fixed order      | the next one in it  | exact    |
| AoARM            | the first N_c tokens in a random order     | the next one in it  | bound    |
| MDM              | x with L - N_c random tokens masked        | any masked one      | bound    |
| time-variant MDM | the same, and t = alpha^-1(Beta(N_c+1, L-N_c)) | any masked one  | bound    |

All losses are L_F = sum over N_c of E[-log p(x^i | z)] (Eq. loss_shared). The input of a model is a
:class:`Problem`; backbone, trainer and evaluation do not depend on the framework otherwise.

B batch, L block length (and number of slots), N scored rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from bellmask.diffusion.schedules import Linear, Schedule

# x0 and a mask rate → xt: which tokens are hidden.


# Paper: Sec. 2.1: forward process
def mask_tokens(
    x0_BL: Tensor,
    mask_rate: Tensor,
    *,
    mask_id: int,
    u_BL: Tensor | None = None,
    is_maskable_BL: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Tensor]:
    """Mask each maskable token with its row's probability; return (xt, is_masked).

    ``mask_rate`` [B] is 1 - alpha: the time itself for the linear schedule. ``u_BL`` are
    the uniforms that decide (float64 where exactness across machines matters), drawn from
    ``generator`` when not given. Tokens that are not maskable (pads, prompts) stay visible.
    """
    if mask_rate.shape != x0_BL.shape[:1]:
        raise ValueError(f"mask_rate needs one rate for each of {len(x0_BL)} rows")
    if u_BL is None:
        dtype = torch.float32 if x0_BL.device.type == "mps" else torch.float64  # a Mac has none
        u_BL = torch.rand(x0_BL.shape, dtype=dtype, device=x0_BL.device, generator=generator)
    is_masked_BL = u_BL < mask_rate.to(u_BL)[:, None]
    if is_maskable_BL is not None:
        is_masked_BL = is_masked_BL & is_maskable_BL
    return torch.where(is_masked_BL, mask_id, x0_BL), is_masked_BL


# The frameworks. A training step's contexts come from uniform numbers, by ``training`` (masks, at
# their times) or ``every_context`` (orders); ``given`` makes contexts of exactly N_c tokens, each
# with all its targets. ``is_causal``: slots see earlier slots only, so one pass scores every
# context count of a row. ``is_exact``: the NLL is -log p of the model; otherwise an upper bound on
# it.

Model = Callable[..., Tensor]
"""Called as :class:`bellmask.model.transformer.Denoiser` is."""


# Paper: Eq. 4, Eq. 9
@dataclass(frozen=True)
class Problem:
    """Input of a model and the predictions that are scored."""

    x_BL: Tensor
    rows_N: Tensor
    """Slots that are scored, as flat indices into B * L."""
    targets_N: Tensor
    context_N: Tensor
    """N_c: tokens of the row that each scored slot may use."""
    t_B: Tensor | None = None
    positions: Tensor | None = None
    """Where the token in each slot stands, from 1, 0 for the start token; None: slot by slot."""
    target_positions: Tensor | None = None
    """Where the token that each slot predicts stands, from 1."""

    @staticmethod
    def of(
        x_BL: Tensor, is_scored_BL: Tensor, target_BL: Tensor, context_BL: Tensor, **more: Any
    ) -> Problem:
        """The problem of a batch in which these slots are scored."""
        rows_N = is_scored_BL.flatten().nonzero().squeeze(1)
        targets_N, context_N = (
            one.expand_as(x_BL).flatten()[rows_N] for one in (target_BL, context_BL)
        )
        return Problem(x_BL, rows_N, targets_N, context_N, **more)

    def select(self, is_wanted_N: Tensor) -> Problem:
        """The same with some of its scored slots only."""
        names = ("rows_N", "targets_N", "context_N")
        return replace(self, **{name: getattr(self, name)[is_wanted_N] for name in names})

    def ask(
        self, model: Model, device: torch.device, *, mask: Tensor | None = None, **how: Any
    ) -> Tensor:
        """The model's sum of cross-entropies, weighted by ``weight_N``; or each row's with
        ``reduce=False``.
        """
        return self._call(model, device, mask, self.targets_N, **how)

    def logits(self, model: Model, device: torch.device, mask: Tensor | None = None) -> Tensor:
        """The model's logits [N, V] of the scored rows."""
        return self._call(model, device, mask)

    def map(self, change: Callable[[Tensor], Tensor]) -> Problem:
        """The same with every tensor changed."""
        return replace(self, **{k: change(v) for k, v in vars(self).items() if v is not None})

    def _call(
        self, model: Model, device: torch.device, mask: Tensor | None, *targets: Tensor, **more: Any
    ) -> Tensor:
        """Masked rows come with their times, ordered ones with their positions."""

        def move(value: Any) -> Any:  # without waiting; a copy from pinned memory runs by itself
            return value.to(device, non_blocking=True) if isinstance(value, Tensor) else value

        if self.positions is None:
            more["t_B"] = None if self.t_B is None else self.t_B.float()
        else:
            assert self.target_positions is not None
            more |= {"positions": self.positions, "target_positions": self.target_positions}
        more["mask"] = mask
        rows = map(move, (self.x_BL, self.rows_N, *targets))
        return model(*rows, **{name: move(value) for name, value in more.items()})


# Paper: Sec. 2.1: AoARM equals MDM, Lemma B.1, Eq. 13
@dataclass(frozen=True)
class Mdm:
    """Masked rows: the fourth and fifth row of the table (a model without time input ignores t)."""

    schedule: Schedule = field(default_factory=Linear)
    noises_pads: bool = False
    """mdlm's rule: pads are masked like text, but never scored."""
    is_causal = False
    is_exact = False

    def training(
        self, x0_BL: Tensor, t_B: Tensor, u_BL: Tensor, *, mask_id: int, is_real_BL: Tensor | None
    ) -> Problem:
        """Each token masked with probability 1 - alpha(t)."""
        xt_BL, is_masked_BL = mask_tokens(
            x0_BL,
            1 - self.schedule.alpha(t_B),
            mask_id=mask_id,
            u_BL=u_BL,
            is_maskable_BL=None if self.noises_pads else is_real_BL,
        )
        if is_real_BL is not None:
            is_masked_BL = is_masked_BL & is_real_BL  # what is scored
        return _masked_problem(x0_BL, xt_BL, is_masked_BL, t_B, is_real_BL)

    # Paper: Lemma A.1, Eq. 7, Lemma A.2, Eq. 8, Table 6, Eq. 10, Eq. 11
    def given(
        self,
        x0_BL: Tensor,
        context_B: Tensor,
        u_BL: Tensor,
        *,
        mask_id: int,
        is_real_BL: Tensor | None = None,
    ) -> Problem:
        """Exactly N_c tokens visible, and a time that such a mask may have come from."""
        order_BL = u_BL if is_real_BL is None else torch.where(is_real_BL, u_BL, torch.inf)
        rank_BL = order_BL.argsort(dim=1, stable=True).argsort(dim=1)
        is_masked_BL = rank_BL < (_lengths(x0_BL, is_real_BL) - context_B)[:, None]
        xt_BL = torch.where(is_masked_BL, mask_id, x0_BL)
        # given n masks, the mask rate follows Beta(n, L - n + 1): that of the n-th smallest uniform
        rate_B = torch.where(is_masked_BL, u_BL, -1.0).amax(dim=1)
        if self.noises_pads and is_real_BL is not None:
            xt_BL = torch.where(~is_real_BL & (u_BL < rate_B[:, None]), mask_id, xt_BL)
        t_B = self.schedule.inverse(1 - rate_B)
        return _masked_problem(x0_BL, xt_BL, is_masked_BL, t_B, is_real_BL)


def _lengths(x0_BL: Tensor, is_real_BL: Tensor | None) -> Tensor:
    if is_real_BL is None:
        return torch.full((len(x0_BL),), x0_BL.shape[1])
    return is_real_BL.sum(1)


def _masked_problem(
    x0_BL: Tensor, xt_BL: Tensor, is_masked_BL: Tensor, t_B: Tensor, is_real_BL: Tensor | None
) -> Problem:
    context_B = _lengths(x0_BL, is_real_BL) - is_masked_BL.sum(1)
    return Problem.of(xt_BL, is_masked_BL, x0_BL, context_B[:, None], t_B=t_B)


# Paper: Eq. 2, Sec. 2.1: AoARM equals MDM
@dataclass(frozen=True)
class Ordered:
    """Token by token: slot r holds the r-th token of an order and predicts the next one.

    Slot 0 holds the start token (the mask's row of the embedding, which nothing else needs here).
    Pads come last in any order, so no slot that is scored sees one.
    """

    rank_L: Tensor | None
    """Rank of each position in the order; None: a new order for each row."""
    is_causal = True

    @property
    def is_exact(self) -> bool:
        """A fixed order is the chain rule; over random ones the mean of -log p bounds it."""
        return self.rank_L is not None

    def orders(self, u_BL: Tensor, is_real_BL: Tensor | None = None) -> Tensor:
        """Positions (from 0) in the order they come: [B, L], or [L] where it is one for all."""
        key = u_BL if self.rank_L is None else self.rank_L[: u_BL.shape[1]].to(u_BL)
        if is_real_BL is not None:
            key = torch.where(is_real_BL, key, torch.inf)
        return key.argsort(dim=-1, stable=True)

    # Paper: App. C.1: ARM, App. C.1: sigma-ARM
    def every_context(
        self, x0_BL: Tensor, u_BL: Tensor, *, mask_id: int, is_real_BL: Tensor | None = None
    ) -> Problem:
        """All slots whose target is a token: slot r has N_c = r."""
        order = self.orders(u_BL, is_real_BL)
        tokens_BL = x0_BL.gather(1, order.expand_as(x0_BL))
        begin = torch.full_like(tokens_BL[:, :1], mask_id)
        slots, places = torch.arange(x0_BL.shape[1]), order + 1
        return Problem.of(
            torch.cat([begin, tokens_BL[:, :-1]], dim=1),
            slots < _lengths(x0_BL, is_real_BL)[:, None],
            tokens_BL,
            slots,
            positions=torch.cat([torch.zeros_like(places[..., :1]), places[..., :-1]], dim=-1),
            target_positions=places,
        )

    def given(
        self,
        x0_BL: Tensor,
        context_B: Tensor,
        u_BL: Tensor,
        *,
        mask_id: int,
        is_real_BL: Tensor | None = None,
    ) -> Problem:
        """The slot of each row that sees N_c tokens."""
        whole = self.every_context(x0_BL, u_BL, mask_id=mask_id, is_real_BL=is_real_BL)
        return whole.select(whole.context_N == context_B[whole.rows_N // x0_BL.shape[1]])


@dataclass(frozen=True)
class Shifted(Ordered):
    """Left to right with a pretrained causal LM: slot i holds token i, and the model's own shift
    predicts it from those before. Token 0 is given, so it has no start token and is not scored.
    """

    def every_context(
        self, x0_BL: Tensor, u_BL: Tensor, *, mask_id: int, is_real_BL: Tensor | None = None
    ) -> Problem:
        """All maskable tokens, each seeing what is before it; N_c counts maskable ones of those."""
        is_real_BL = torch.ones_like(x0_BL) if is_real_BL is None else is_real_BL
        is_scored_BL = is_real_BL.bool() & (torch.arange(x0_BL.shape[1]) > 0)
        return Problem.of(x0_BL, is_scored_BL, x0_BL, is_scored_BL.cumsum(1) - 1)


# Paper: Eq. 4, Eq. 9
Framework = Mdm | Ordered


def shifted_arm(block_length: int) -> Shifted:
    """Left to right on a pretrained backbone."""
    return Shifted(torch.arange(block_length))


# Paper: Eq. 2, Table 6
def arm(block_length: int) -> Ordered:
    """Left to right (Eq. loss_ARM)."""
    return Ordered(torch.arange(block_length))


# Paper: Sec. 2.1: sigma-ARM, Table 6
def sigma_arm(order_L: Tensor) -> Ordered:
    """A fixed order, given as the positions (from 0) in the order they come."""
    return Ordered(order_L.argsort())


# Paper: Eq. 3, Table 6, Lemma B.1, Eq. 13
def any_order() -> Ordered:
    """AoARM: a new random order for every row (Eq. loss_aogpt)."""
    return Ordered(None)
