"""Record a generation: take in the steps of its batches, keep what changes.

The file's format is described in ``trace_file.py``. B rows of one batch, L length.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bellmask.data.tokenizers import Tokenizer
from bellmask.generate.steps import Step, TokenTexts
from bellmask.generate.trace_file import Change, Sample, Trace, load_trace

__all__ = ["Change", "Recorder", "Sample", "Trace", "load_trace"]


@dataclass
class _Batch:
    """A batch under way."""

    canvas_BL: NDArray[np.int64]
    now_BL: NDArray[np.int64]
    changes: list[list[Change]]
    num_steps: int = 0
    num_calls: int = 0


@dataclass
class Recorder:
    """Receives the steps of one or more batches and keeps what changed.

    ``recorder = Recorder(tokenizer)``, give it as ``on_step``, then ``recorder.save(path, ...)``.
    """

    tokenizer: Tokenizer
    _batches: list[_Batch] = field(default_factory=list)
    _open: dict[int, _Batch] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._texts = TokenTexts(self.tokenizer)

    def __call__(self, step: Step) -> None:
        """Take one step in; number 0 begins a batch."""
        ids_BL = step.ids_BL.numpy().copy()
        if step.number == 0:
            batch = _Batch(ids_BL, ids_BL, [[] for _ in ids_BL])
            self._batches.append(batch)
            self._open[step.first_sample] = batch
        batch = self._open[step.first_sample]
        assert step.number == 0 or step.number > batch.num_steps, "steps come in order"
        for row in (ids_BL != batch.now_BL).any(axis=1).nonzero()[0].tolist():
            batch.changes[row].append(self._change(step, batch.now_BL[row], ids_BL[row]))
        batch.now_BL, batch.num_steps = ids_BL, step.number
        batch.num_calls = step.num_calls

    def _change(
        self, step: Step, before_L: NDArray[np.int64], after_L: NDArray[np.int64]
    ) -> Change:
        changed = (before_L != after_L).nonzero()[0].tolist()
        is_masked = after_L == self.tokenizer.mask_id
        return Change(
            step.number,
            min(max(float(step.t), 0.0), 1.0),
            step.num_calls,
            [(i, self._texts(int(after_L[i]))) for i in changed if not is_masked[i]],
            [i for i in changed if is_masked[i]],
        )

    def trace(
        self,
        title: str,
        settings: Mapping[str, Any] | None = None,
        texts: Sequence[str] | None = None,
    ) -> Trace:
        """All that was received. ``texts``: finished texts, where they are cut (at EOS, say)."""
        rows = [(batch, row) for batch in self._batches for row in range(len(batch.now_BL))]
        if texts is None:
            texts = [self.tokenizer.decode(batch.now_BL[row]) for batch, row in rows]
        samples = [
            Sample(
                (batch.canvas_BL[row] != self.tokenizer.mask_id).tolist(),
                self._canvas(batch.canvas_BL[row]),
                batch.changes[row],
                text,
                batch.num_steps,
            )
            for (batch, row), text in zip(rows, texts, strict=True)
        ]
        calls = sum(batch.num_calls for batch in self._batches)
        return Trace(title, dict(settings or {}), calls, samples)

    def _canvas(self, ids_L: NDArray[np.int64]) -> list[str | None]:
        mask_id = self.tokenizer.mask_id
        return [None if token == mask_id else self._texts(token) for token in ids_L.tolist()]

    def save(
        self,
        path: Path,
        title: str,
        settings: Mapping[str, Any] | None = None,
        texts: Sequence[str] | None = None,
    ) -> Trace:
        """Write the trace and return it."""
        trace = self.trace(title, settings, texts)
        trace.save(path)
        return trace
