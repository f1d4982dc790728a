"""Sources whose true conditionals are known exactly: the independent truth of tests and analyses.

V symbols, L length, B rows. The mask is id V, as everywhere.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bellmask.data.blocks import Blocks
from bellmask.data.packing import Row


@dataclass(frozen=True)
class MarkovSource:
    """An order-1 chain: any conditional p(x^i | some of the others) by forward-backward sums."""

    initial_V: Tensor
    transition_VV: Tensor
    """Row v: the distribution of the next symbol after v."""
    length: int

    @staticmethod
    def sticky(num_tokens: int, length: int, stay: float) -> MarkovSource:
        """Uniform start; the symbol stays with a probability, else moves anywhere at random."""
        move = torch.full((num_tokens, num_tokens), (1 - stay) / num_tokens, dtype=torch.float64)
        start = torch.full((num_tokens,), 1 / num_tokens, dtype=torch.float64)
        return MarkovSource(start, move + stay * torch.eye(num_tokens).double(), length)

    @property
    def num_tokens(self) -> int:
        """V."""
        return len(self.initial_V)

    @property
    def entropy(self) -> float:
        """H(X) of a whole row, nats: the exact losses summed over context counts (Prop 3.1)."""
        marginal = self.initial_V
        total = -float(torch.xlogy(marginal, marginal).sum())
        row_entropy = -torch.xlogy(self.transition_VV, self.transition_VV).sum(1)
        for _ in range(self.length - 1):
            total += float(marginal @ row_entropy)
            marginal = marginal @ self.transition_VV
        return total

    def sample(self, count: int, generator: torch.Generator) -> Tensor:
        """Rows of the source, int64 [count, L]."""
        first = torch.multinomial(self.initial_V, count, replacement=True, generator=generator)
        columns = [first]
        for _ in range(self.length - 1):
            probabilities = self.transition_VV[columns[-1]]
            columns.append(torch.multinomial(probabilities, 1, generator=generator).squeeze(1))
        return torch.stack(columns, dim=1)

    def blocks(self, count: int, generator: torch.Generator) -> Blocks:
        """Rows as blocks, each its own document."""
        rows = self.sample(count, generator).numpy()
        return Blocks.from_rows(Row(ids, self.length, n) for n, ids in enumerate(rows))

    def log_conditionals(self, x_BL: Tensor) -> Tensor:
        """Log p(x^i = v | all observed symbols but i), float64 [B, L, V]."""
        is_seen = (x_BL < self.num_tokens)[..., None]
        seen_BLV = torch.nn.functional.one_hot(x_BL.clamp(max=self.num_tokens - 1), self.num_tokens)
        emission = torch.where(is_seen, seen_BLV.double(), torch.ones((), dtype=torch.float64))
        before = [self.initial_V.expand(len(x_BL), -1)]
        after = [torch.ones(len(x_BL), self.num_tokens, dtype=torch.float64)]
        for i in range(self.length - 1):
            step = (before[-1] * emission[:, i]) @ self.transition_VV
            before.append(step / step.sum(1, keepdim=True))
            back = (after[-1] * emission[:, self.length - 1 - i]) @ self.transition_VV.T
            after.append(back / back.sum(1, keepdim=True))
        joint = torch.stack(before, dim=1) * torch.stack(after[::-1], dim=1)
        return torch.log(joint / joint.sum(-1, keepdim=True))


@dataclass(frozen=True)
class ExactDenoiser:
    """The perfect model of a source, callable like :class:`bellmask.model.transformer.Denoiser`."""

    source: MarkovSource

    def __call__(
        self,
        x_BL: Tensor,
        rows_N: Tensor,
        targets_N: Tensor | None = None,
        *,
        weight_N: Tensor | None = None,
        t_B: Tensor | None = None,
        mask: Tensor | None = None,
        reduce: bool = True,
    ) -> Tensor:
        """Log-probabilities [N, V]; or with targets the (weighted) sum, or each row's value."""
        log_p_NV = self.source.log_conditionals(x_BL).flatten(0, 1)[rows_N]
        if targets_N is None:
            return log_p_NV
        ce_N = -log_p_NV.gather(1, targets_N[:, None]).squeeze(1)
        if not reduce:
            return ce_N
        return ce_N.sum() if weight_N is None else (ce_N * weight_N).sum()
