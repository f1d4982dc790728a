"""The course of a generation: recorded step by step, written to a file, read back.

B rows of one batch, L length.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bellmask.data.tokenizers import Tokenizer
from bellmask.generate.canvas import Step, TokenTexts
from bellmask.utils.errors import UserError
from bellmask.utils.files import read_json, sanitize, write_text

# The file: the canvas, then what changed in each step.
#
# Tokens are kept as text, so that reports need no tokenizer; see ``TokenTexts`` for bytes that are
# no character alone. The text of a finished sample is decoded as a whole. One JSON file:
#
#     {"version": 1, "title": ..., "settings": {...}, "num_calls": ..., "samples": [
#         {"given": [true, ...], "tokens": ["The", null, ...], "num_steps": ..., "text": ...,
#          "steps": [{"number": 3, "t": 0.9, "calls": 2, "set": [[1, " cat"]], "unset": []}, ...]}]}
#
# ``tokens`` is step 0, null where masked; ``steps`` are those in which the sample changed.

VERSION = 1
MOST = 10**9
"""Steps and calls that a trace may have; larger numbers are damage."""


@dataclass(frozen=True)
class Change:
    """What one step did to one sample."""

    number: int
    t: float
    calls: int
    """Network calls so far."""
    set: list[tuple[int, str]]
    """Positions that got a (new) token, and its text."""
    unset: list[int]
    """Positions that were masked again."""


@dataclass(frozen=True)
class TracedSample:
    """One row from the canvas to the finished text."""

    given: list[bool]
    """True where the token was given."""
    tokens: list[str | None]
    """The canvas; None where masked."""
    steps: list[Change]
    """Steps that changed this row, in order."""
    text: str
    """The finished text, decoded as a whole."""
    num_steps: int
    """The last step's number; it may have changed nothing here."""

    def at(self, number: int) -> list[str | None]:
        """Each position's text after a step; None where masked."""
        now = list(self.tokens)
        for change in self._until(number):
            for position in change.unset:
                now[position] = None
            for position, text in change.set:
                now[position] = text
        return now

    def since(self, number: int) -> list[int | None]:
        """The step in which each position got what it has after a step; None: given or masked."""
        when: list[int | None] = [None] * len(self.tokens)
        for change in self._until(number):
            for position in change.unset:
                when[position] = None
            for position, _ in change.set:
                when[position] = change.number
        return when

    def remasked(self, number: int) -> list[int]:
        """How often each position was masked again up to a step."""
        count = [0] * len(self.tokens)
        for change in self._until(number):
            for position in change.unset:
                count[position] += 1
        return count

    def _until(self, number: int) -> list[Change]:
        return [change for change in self.steps if change.number <= number]


@dataclass(frozen=True)
class Trace:
    """All samples of one generation."""

    title: str
    settings: dict[str, Any]
    num_calls: int
    """Network calls, over all batches."""
    samples: list[TracedSample]

    def save(self, path: Path) -> None:
        """Write the file as a whole or not at all."""
        content = {"version": VERSION, **asdict(self)}
        write_text(path, json.dumps(content, ensure_ascii=False, allow_nan=False) + "\n")


# Reading, with every value checked.


def load_trace(path: Path) -> Trace:
    """Read a trace; whatever is wrong with the file becomes one error that says where."""
    if not path.is_file():
        raise UserError(
            f"there is no trace {path}; 'bellmask generate RUN --trace {path}' makes one"
        )
    try:
        content = read_json(path)
    except ValueError as error:
        raise UserError(f"{path} is not a trace: it is not JSON ({error})") from None
    try:
        return _read_trace(content)
    except _Fault as fault:
        raise UserError(f"{path} is not a trace: {fault}") from None


class _Fault(Exception):
    """What is wrong, and where."""


def _want(is_right: bool, what: str) -> None:
    if not is_right:
        raise _Fault(what)


def _is_count(value: Any, top: int = MOST) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= top


def _fields(value: Any, where: str, kinds: Mapping[str, type]) -> list[Any]:
    """The named fields of an object, in order, each of its kind."""
    _want(isinstance(value, dict), f"{where} must be an object")
    for name, kind in kinds.items():
        _want(name in value, f"{where} has no {name!r}")
        is_kind = isinstance(value[name], kind)
        is_kind = _is_count(value[name]) if kind is int else is_kind
        _want(is_kind, f"{name!r} of {where} must be {_KINDS[kind]}")
    return [value[name] for name in kinds]


_KINDS = {str: "a text", dict: "an object", list: "a list", int: "a whole number of at least 0"}


def _read_trace(content: Any) -> Trace:
    _want(isinstance(content, dict) and "version" in content, "it has no 'version'")
    version = content["version"]
    _want(version == VERSION, f"version {version!r:.40}; this bellmask reads version {VERSION}")
    kinds = {"title": str, "settings": dict, "num_calls": int, "samples": list}
    title, settings, num_calls, samples = _fields(content, "the file", kinds)
    _want(bool(samples), "it has no samples")
    read = [_read_sample(sample, f"sample {number}") for number, sample in enumerate(samples)]
    settings = {sanitize(name): value for name, value in settings.items()}
    return Trace(sanitize(title), settings, num_calls, read)


def _read_sample(value: Any, where: str) -> TracedSample:
    kinds = {"given": list, "tokens": list, "steps": list, "text": str, "num_steps": int}
    given, tokens, steps, text, num_steps = _fields(value, where, kinds)
    is_right = bool(tokens) and all(token is None or isinstance(token, str) for token in tokens)
    _want(is_right, f"'tokens' of {where} must be texts and nulls")
    _want(
        given == [token is not None for token in tokens] and all(g in (True, False) for g in given),
        f"'given' of {where} must be true where 'tokens' has a text, else false",
    )
    changes: list[Change] = []
    is_masked = [token is None for token in tokens]
    for step in steps:
        change = _read_change(step, where, is_masked)
        first = changes[-1].number + 1 if changes else 1
        _want(
            first <= change.number <= num_steps,
            f"step {change.number} of {where} is out of order (from {first} to {num_steps})",
        )
        changes.append(change)
    return TracedSample(given, tokens, changes, text, num_steps)


def _read_change(value: Any, where: str, is_masked: list[bool]) -> Change:
    """One step; ``is_masked`` says what was masked before it and is brought up to date."""
    kinds = {"number": int, "calls": int, "set": list, "unset": list}
    number, calls, tokens, unset = _fields(value, f"a step of {where}", kinds)
    where, last = f"step {number} of {where}", len(is_masked) - 1
    t = value.get("t")
    is_time = isinstance(t, int | float) and not isinstance(t, bool) and 0 <= t <= 1
    _want(is_time, f"'t' of {where} must be a number from 0 to 1")
    for pair in tokens:
        is_pair = isinstance(pair, list) and len(pair) == 2 and isinstance(pair[1], str)
        is_right = is_pair and _is_count(pair[0], last)
        _want(
            is_right, f"'set' of {where} must hold [position up to {last}, text], not {pair!r:.60}"
        )
    for position in unset:
        _want(
            _is_count(position, last), f"'unset' of {where}: there is no position {position!r:.40}"
        )
        _want(not is_masked[position], f"{where} masks position {position}, which is masked")
        is_masked[position] = True
    for position, _ in tokens:
        is_masked[position] = False
    return Change(number, float(t), calls, [(i, text) for i, text in tokens], unset)


# Recording: take in the steps of batches, keep what changes.


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
            TracedSample(
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
