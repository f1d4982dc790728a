"""Calls of the network while sampling: only rows that need one, counted, guided, with a cache.

B canvases, L length, N predicted positions, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from bellmask.model.attention import KeyValues, attention_mask
from bellmask.utils.errors import UserError


class Network:
    """A denoiser as samplers use it, and what its calls cost.

    ``model(x, rows, t_B=, mask=)`` returns logits [N, V]; for a cache also ``positions=``,
    ``cache=``, and it has ``new_cache``.
    """

    def __init__(
        self,
        model: Callable[..., Tensor],
        mask_id: int,
        *,
        is_real_BL: Tensor | None = None,
        guidance: float = 0.0,
        device: torch.device | None = None,
    ) -> None:
        """Guidance w > 0 takes logits u + (1 + w)(c - u), where u does not see given tokens."""
        self.model, self.mask_id, self.device = model, mask_id, device or torch.device("cpu")
        self.is_real_BL, self.guidance = is_real_BL, guidance
        self._forget()

    def _forget(self) -> None:
        self.num_calls = self.num_rows = self._prefix = 0
        self._cache: KeyValues | None = None
        self._is_given_BL: Tensor | None = None

    def begin(self, canvas_BL: Tensor) -> None:
        """Count from zero, without a cache, for canvases whose given tokens guidance will hide."""
        self._forget()
        self._is_given_BL = canvas_BL != self.mask_id
        # what a causal LM predicts the first token from stays, as it did in training
        self._is_given_BL[:, : getattr(self.model, "first_maskable", 0)] = False
        if self.guidance and not bool(self._is_given_BL.any()):
            raise UserError(
                "guidance weighs what given tokens change, and nothing is given here: leave it "
                "out, or give a prefix or a canvas"
            )

    def check_cacheable(self) -> None:
        """UserError unless the model can keep keys and values between calls."""
        if getattr(self.model, "uses_time", False):
            raise UserError(
                "a time-conditioned model sees another time in every call, so nothing can be kept "
                "between calls: sample it without --cache"
            )
        if not hasattr(self.model, "new_cache"):
            raise UserError("this model cannot keep keys and values between calls")

    def cache_prefix(self, length: int) -> None:
        """From the next call on keep the keys and values of the first ``length`` positions.

        That call takes every row along, so calls per sample then depend a little on the batch.
        """
        self.check_cacheable()
        self._prefix, self._cache = length, None

    def logits(self, x_BL: Tensor, is_wanted_BL: Tensor, t_B: Tensor) -> Tensor:
        """Logits [N, V] at the wanted positions, row by row; rows that want none are left out."""
        is_first = self._prefix > 0 and self._cache is None
        active = is_wanted_BL.any(dim=1).nonzero().squeeze(1)
        if is_first:
            active = torch.arange(len(x_BL))  # the cache must hold every row
        x, wanted, t = x_BL[active], is_wanted_BL[active], t_B[active]
        rows_N = wanted.flatten().nonzero().squeeze(1)
        self.num_calls += 1
        if not self.guidance:
            return self._call(x, rows_N, t, active)
        assert self._is_given_BL is not None, "begin comes first"
        blind = torch.where(self._is_given_BL[active], self.mask_id, x)
        both = torch.cat([active, active + len(x_BL)])
        logits = self._call(
            torch.cat([x, blind]), torch.cat([rows_N, rows_N + x.numel()]), t.repeat(2), both
        )
        seeing, unseeing = logits.chunk(2)
        return unseeing + (1 + self.guidance) * (seeing - unseeing)

    def _call(self, x_BL: Tensor, rows_N: Tensor, t_B: Tensor, batch_B: Tensor) -> Tensor:
        """One pass over rows whose places in the (doubled) batch are ``batch_B``."""
        self.num_rows += len(x_BL)
        mask, more = None, {}
        if self.is_real_BL is not None:
            mask = attention_mask(self.is_real_BL[batch_B % len(self.is_real_BL)])
        if self._prefix and self._cache is None:
            self._cache = self.model.new_cache(self._prefix)  # type: ignore[attr-defined]
            more["cache"] = self._cache
        elif self._cache is not None:
            length = x_BL.shape[1]
            rows_N = rows_N - (rows_N // length + 1) * self._prefix
            x_BL = x_BL[:, self._prefix :]
            more["positions"] = torch.arange(self._prefix, length, device=self.device)
            more["cache"] = self._cache.select(batch_B.to(self.device))
        return self.model(
            x_BL.to(self.device),
            rows_N.to(self.device),
            t_B=t_B.float().to(self.device),
            mask=None if mask is None else mask.to(self.device),
            **more,
        )
