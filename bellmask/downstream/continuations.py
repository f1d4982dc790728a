"""Log-probabilities of continuations under any run, batched, the same whatever the batch.

A masked model is asked for the bound of :mod:`bellmask.downstream.masks`: its passes are rows of
the continuation partly masked behind a context that is always visible. A causal model needs one
pass. Rows of all asks are sorted by width and go through the network together, padded to a multiple
of 32 tokens that nobody attends to; the width depends on the ask alone.

B rows of a batch, L their width, R passes of an ask (:mod:`bellmask.downstream.jobs`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bellmask.diffusion.frameworks import Mdm, Ordered, Problem
from bellmask.downstream.asks import Ask, AskMaker, Score
from bellmask.downstream.jobs import (
    Job,
    MaskedJob,
    OrderedJob,
    Row,
    clean,
    masked_row,
    ordered_row,
)
from bellmask.downstream.masks import Estimator, make_plan
from bellmask.generate.fill import WIDTH, pad_rows
from bellmask.model.attention import attention_mask
from bellmask.storage.loading import Loaded
from bellmask.utils.distributed import autocast, pick_precision
from bellmask.utils.errors import UserError

OnDone = Callable[[int], None]


class ContinuationScorer:
    """Asks a run how probable texts are after others."""

    def __init__(
        self, run: Loaded, estimator: Estimator | None = None, *, batch_tokens: int = 8192
    ) -> None:
        """``batch_tokens`` of padded rows go through the network at once; it changes no score."""
        if run.config.framework.name == "sigma_arm":
            raise UserError(
                f"{run.folder} is a sigma-ARM: it reads tokens in one fixed order, so it has no "
                "probability of a continuation after a context; give an mdm, arm or aoarm run"
            )
        if batch_tokens < 1:
            raise UserError(f"--batch-tokens must be at least 1, got {batch_tokens}")
        self.run, self.estimator = run, (estimator or Estimator()).check()
        self.batch_tokens = batch_tokens
        self.uses_time = bool(run.model.uses_time)
        begin = (run.tokenizer.bos_id,) if run.is_wrapped or run.model.first_maskable else ()
        self.maker = AskMaker(run.tokenizer, run.config.data.block_length, begin)

    def asks(
        self, context: str, continuation: str, *, after: str = "", noise: int = 0
    ) -> list[Ask]:
        """See :meth:`bellmask.downstream.asks.AskMaker.asks`."""
        return self.maker.asks(context, continuation, after=after, noise=noise)

    def rolling(self, text: str, *, noise: int = 0) -> list[Ask]:
        """See :meth:`bellmask.downstream.asks.AskMaker.rolling`."""
        return self.maker.rolling(text, noise=noise)

    @property
    def is_causal(self) -> bool:
        """The run reads tokens one after another."""
        return self.run.framework.is_causal

    def is_exact(self, ask: Ask) -> bool:
        """The ask's score has no noise: any seed gives the same."""
        if self.is_causal:
            return self.run.framework.is_exact
        kind = self.estimator.kind_for(len(ask.target), self.uses_time)
        return kind in ("exact", "left_to_right")

    def score(
        self, asks: Sequence[Ask], *, seed: int = 0, on_batch: OnDone | None = None
    ) -> list[Score]:
        """The score of each ask; ``on_batch`` is told how many asks are done."""
        self._check(asks)
        jobs = [self._job(ask, seed) for ask in asks]
        left = [sum(map(job.is_needed, range(len(job)))) for job in jobs]
        sums = [np.zeros(len(job)) for job in jobs]
        done = sum(count == 0 for count in left)
        for part in self._batches(jobs):
            values = self._run_batch([jobs[number].row(place) for number, place in part])
            for (number, place), value in zip(part, values, strict=True):
                sums[number][place] = value
                left[number] -= 1
                done += left[number] == 0
            if on_batch:
                on_batch(done)
        return [job.conclude(sum_R) for job, sum_R in zip(jobs, sums, strict=True)]

    def is_greedy(self, asks: Sequence[Ask], on_batch: OnDone | None = None) -> list[bool]:
        """See :func:`bellmask.downstream.greedy.writes_target`."""
        from bellmask.downstream.greedy import writes_target

        self._check(asks)
        return writes_target(self, asks, on_batch)

    def _check(self, asks: Sequence[Ask]) -> None:
        sees_behind = not self.is_causal or not self.run.framework.is_exact
        first = self.run.model.first_maskable
        for ask in asks:
            if not ask.target or len(ask.given) < first:
                raise ValueError("an ask needs a target, and a begin sign where the run has one")
            if ask.after and not sees_behind:
                raise UserError("an ARM cannot see what follows a gap; ask a masked run")

    def _job(self, ask: Ask, seed: int) -> Job:
        if not self.is_causal:
            plan = make_plan(ask, self.estimator, seed=seed, uses_time=self.uses_time)
            return MaskedJob(ask, plan, self.run.tokenizer.mask_id)
        is_exact = self.run.framework.is_exact
        draws = 1 if is_exact else self.estimator.draws
        return OrderedJob(ask, draws, self.estimator.key(ask, seed), is_exact)

    def row_with(self, ask: Ask, is_masked: NDArray[np.bool_]) -> Row:
        """A pass of a masked model with just these tokens of the target masked, all of them scored.

        A time-conditioned model is told what sampling tells it: the share of the row.
        """
        rate = float(is_masked.sum()) / ask.length
        return masked_row(ask, self.run.tokenizer.mask_id, is_masked, is_masked, rate)

    def left_to_right_row(self, ask: Ask) -> Row:
        """A pass of a causal model with the target in its own order, whatever the framework's."""
        return ordered_row(ask, torch.arange(len(ask.target), dtype=torch.float64))

    def width(self, ask: Ask) -> int:
        """Tokens of the ask's padded rows."""
        rounded = -(-ask.length // WIDTH) * WIDTH
        return max(ask.length, min(rounded, self.run.config.data.block_length))

    def _batches(self, jobs: Sequence[Job]) -> Iterator[list[tuple[int, int]]]:
        """(ask, pass) pairs of one width, all padded or none."""
        groups: dict[tuple[int, bool], list[tuple[int, int]]] = {}
        for number, job in enumerate(jobs):
            width = self.width(job.ask)
            group = groups.setdefault((width, width == job.ask.length), [])
            group += [(number, place) for place in range(len(job)) if job.is_needed(place)]
        for (width, _), members in sorted(groups.items()):
            size = max(1, self.batch_tokens // width)
            for start in range(0, len(members), size):
                yield members[start : start + size]

    @torch.no_grad()
    def _run_batch(self, rows: Sequence[Row]) -> list[float]:
        """The sum of cross-entropies that each row scores."""
        problem, mask = self.problem(rows)
        device = self.run.device
        precision = pick_precision(self.run.config.train.precision, device)
        with autocast(device, precision):
            ce_N = problem.ask(self.run.model, device, mask=mask, reduce=False)
        owner_N = problem.rows_N // problem.x_BL.shape[1]
        total_B = torch.zeros(len(rows), dtype=torch.float64)
        return total_B.index_add_(0, owner_N, ce_N.double().cpu()).tolist()

    def problem(self, rows: Sequence[Row]) -> tuple[Problem, Tensor | None]:
        """(what the model is asked in a batch, its attention mask)."""
        width = self.width(rows[0].ask)
        pad, framework = self.run.tokenizer.pad_id, self.run.framework
        x0_BL, is_real_BL = pad_rows([row.tokens for row in rows], width, pad)
        is_full = bool(is_real_BL.all())
        if isinstance(framework, Ordered):
            u_BL = torch.zeros(len(rows), width, dtype=torch.float64)
            for number, row in enumerate(rows):
                u_BL[number, : row.ask.length] = row.numbers
            whole = framework.every_context(
                x0_BL,
                u_BL,
                mask_id=self.run.tokenizer.mask_id,
                is_real_BL=None if is_full else is_real_BL,
            )
            return _only_targets(whole, rows, width), None
        assert isinstance(framework, Mdm)
        is_scored_BL = torch.zeros_like(is_real_BL)
        for number, row in enumerate(rows):
            is_scored_BL[number, : len(row.is_scored)] = row.is_scored
        targets_BL, _ = pad_rows([torch.tensor(clean(row.ask)) for row in rows], width, pad)
        rows_N = is_scored_BL.flatten().nonzero().squeeze(1)
        rate_B = torch.tensor([row.rate for row in rows], dtype=torch.float64)
        problem = Problem(
            x0_BL,
            rows_N,
            targets_BL.flatten()[rows_N],
            torch.zeros_like(rows_N),
            framework.schedule.inverse(1 - rate_B),
        )
        return problem, None if is_full else attention_mask(is_real_BL)


def _only_targets(whole: Problem, rows: Sequence[Row], width: int) -> Problem:
    """Of every slot's prediction those of the targets: what is shown comes first in any order."""
    shown_B = torch.tensor([row.ask.length - len(row.ask.target) for row in rows])
    length_B = torch.tensor([row.ask.length for row in rows])
    owner_N, slot_N = whole.rows_N // width, whole.rows_N % width
    is_kept_N = (slot_N >= shown_B[owner_N]) & (slot_N < length_B[owner_N])
    return Problem(
        whole.x_BL,
        whole.rows_N[is_kept_N],
        whole.targets_N[is_kept_N],
        whole.context_N[is_kept_N],
        None,
        whole.positions,
        whole.target_positions,
    )
