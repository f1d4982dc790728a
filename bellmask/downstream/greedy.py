"""Would a model write a continuation by itself? lm-eval's ``is_greedy``, for any order.

A masked model is given a gap of exactly the continuation's length (so it is told the length) and
writes the token it is surest of, at temperature 0, one per pass; an ARM writes from left to right.
The first token that differs ends it, so most answers take a pass or two.

B rows of a batch, N masked positions, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from bellmask.downstream.asks import Ask
from bellmask.utils.distributed import autocast, pick_precision

if TYPE_CHECKING:
    from bellmask.downstream.continuations import ContinuationScorer, OnDone

MOST_LOGITS = 1 << 26
"""Logits of a batch that exist at once: 256 MB."""


def writes_target(
    scorer: ContinuationScorer, asks: Sequence[Ask], on_batch: OnDone | None = None
) -> list[bool]:
    """For each ask: is the target what the model would write?"""
    found: dict[int, bool] = {}
    hidden = {number: np.ones(len(ask.target), dtype=bool) for number, ask in enumerate(asks)}
    while len(found) < len(asks):
        left = [number for number in range(len(asks)) if number not in found]
        for part in _batches(scorer, asks, left):
            for number, verdict in zip(part, _one_pass(scorer, asks, part, hidden), strict=True):
                if verdict is not None:
                    found[number] = verdict
            if on_batch:
                on_batch(len(found))
    return [found[number] for number in range(len(asks))]


def _batches(
    scorer: ContinuationScorer, asks: Sequence[Ask], left: Sequence[int]
) -> Iterator[list[int]]:
    groups: dict[tuple[int, bool], list[int]] = {}
    for number in left:
        width = scorer.width(asks[number])
        groups.setdefault((width, width == asks[number].length), []).append(number)
    vocabulary = scorer.run.tokenizer.num_tokens
    for (width, _), members in sorted(groups.items()):
        longest = max(len(asks[number].target) for number in members)
        size = max(1, min(scorer.batch_tokens // width, MOST_LOGITS // (longest * vocabulary)))
        for start in range(0, len(members), size):
            yield members[start : start + size]


@torch.no_grad()
def _one_pass(
    scorer: ContinuationScorer,
    asks: Sequence[Ask],
    part: Sequence[int],
    hidden: dict[int, np.ndarray],
) -> list[bool | None]:
    """One token more of each ask (of a causal model all); None where it is not decided yet."""
    run = scorer.run
    if scorer.is_causal:
        rows = [scorer.left_to_right_row(asks[number]) for number in part]
    else:
        rows = [scorer.row_with(asks[number], hidden[number]) for number in part]
    problem, mask_or_none = scorer.problem(rows)
    with autocast(run.device, pick_precision(run.config.train.precision, run.device)):
        logits_NV = problem.logits(run.model, run.device, mask_or_none).float().cpu()
    sure_N, best_N = logits_NV.log_softmax(1).max(1)
    is_right_N = best_N == problem.targets_N
    owner_N = problem.rows_N // problem.x_BL.shape[1]
    verdicts: list[bool | None] = []
    for place, number in enumerate(part):
        mine = (owner_N == place).nonzero().squeeze(1)
        if scorer.is_causal:
            verdicts.append(bool(is_right_N[mine].all()))
        else:
            verdicts.append(_reveal(hidden[number], sure_N[mine], is_right_N[mine]))
    return verdicts


def _reveal(is_hidden_L: np.ndarray, sure_N: Tensor, is_right_N: Tensor) -> bool | None:
    """Write the surest token into the gap: wrong ends it, the last right one too."""
    first = int(sure_N.argmax())
    if not bool(is_right_N[first]):
        return False
    is_hidden_L[np.flatnonzero(is_hidden_L)[first]] = False
    return None if is_hidden_L.any() else True
