"""A contestant's work on the tasks: what is missing is done in batches over tasks, and kept.

A unit is one log-probability or one written text, kept under a key of all that decides it
(:mod:`bellmask.utils.store`): a suite that was stopped goes on, one with more tasks, questions or
seeds does only what is new. A log-probability without noise is one unit for all seeds. Of units
only names are held in memory; tokens are made again when their turn comes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from math import isfinite, isnan, nan
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bellmask.downstream.asks import Ask, Score, add_up
from bellmask.downstream.contestants import Contestant
from bellmask.downstream.gaps import TEMPERATURE, VARIANTS, Variant, make_row
from bellmask.downstream.questions import Choice, Item
from bellmask.utils.errors import UserError
from bellmask.utils.files import is_number, is_whole
from bellmask.utils.rng import shuffle, stream_key
from bellmask.utils.store import Kept, content_key

FORMAT = 1
"""Raised when code changes what is measured: what was kept is not used again."""
CHUNK = 128
"""Units that are done before they are written down."""


@dataclass(frozen=True)
class TaskItems:
    """One task's questions, as one kind of prompt shows them."""

    name: str
    kind: str
    items: tuple[Item, ...]


@dataclass(frozen=True)
class _Name:
    """What is kept of a question, but for the seed."""

    key: str
    is_exact: bool
    size: tuple[int, ...]
    """Units of about one size share batches."""

    def with_seed(self, seed: int) -> str:
        """The key that it is kept under."""
        return self.key if self.is_exact else f"{self.key}/{seed}"


@dataclass(frozen=True)
class _Unit:
    """Something that is to be done: an ask to be scored, or a gap to be filled."""

    key: str
    seed: int
    size: tuple[int, ...]
    task: TaskItems
    item: Item
    part: int | Variant
    """Which choice, or which gap."""
    window: int = 0

    @property
    def batch(self) -> tuple[int, float]:
        """Units that can be done at once have the same; log-probabilities have no temperature."""
        return self.seed, -1.0 if isinstance(self.item, Choice) else TEMPERATURE[self.task.kind]


class Work:
    """All units of one contestant."""

    def __init__(
        self,
        contestant: Contestant,
        tasks: Sequence[TaskItems],
        seeds: Sequence[int],
        folder: Path,
    ) -> None:
        """What is done is kept in ``folder``."""
        self.contestant, self.tasks, self.seeds = contestant, tasks, tuple(seeds)
        mark = content_key(FORMAT, contestant.fingerprint)
        self._kept = Kept(folder / f"{mark}.jsonl", self._is_unit)
        self._names: dict[tuple[str, int, int | Variant], tuple[_Name, ...]] = {}

    def _is_unit(self, record: dict[str, Any]) -> bool:
        """What a file has under a key: the tokens of a text, or a score."""
        if "ids" in record:
            ids, top = record["ids"], self.contestant.tokenizer.mask_id
            return isinstance(ids, list) and all(is_whole(i) and i <= top for i in ids)
        counts = [record.get(name) for name in ("num_tokens", "num_passes")]
        is_error = record.get("error", "") is None or is_number(record.get("error"))
        is_right = is_number(record.get("log_probability")) and is_error
        return is_right and all(map(is_whole, counts)) and type(record.get("is_exact")) is bool

    def missing(self) -> int:
        """Units that are left to do."""
        return len(self._missing())

    def do(self, on_done: Callable[[int], None] | None = None) -> None:
        """Do what is missing; ``on_done`` is told how many units are done."""
        done = 0

        def advance(inside: int) -> None:
            if on_done:
                on_done(done + inside)

        for chunk in _chunks(self._missing()):
            if isinstance(chunk[0].item, Choice):
                self._kept.add(self._score(chunk, advance))
            else:
                self._kept.add(self._write(chunk, advance))
            done += len(chunk)
            advance(0)

    def _missing(self) -> list[_Unit]:
        found: dict[str, _Unit] = {}
        for task in self.tasks:
            for item in task.items:
                for part in self._parts(item):
                    for window, name in enumerate(self._named(task, item, part)):
                        for seed in self.seeds[:1] if name.is_exact else self.seeds:
                            key = name.with_seed(seed)
                            if key not in self._kept and key not in found:
                                found[key] = _Unit(key, seed, name.size, task, item, part, window)
        return list(found.values())

    def _parts(self, item: Item) -> Sequence[int | Variant]:
        if not isinstance(item, Choice):
            return VARIANTS
        return () if self.contestant.is_guess else range(len(item.continuations))

    def _named(self, task: TaskItems, item: Item, part: int | Variant) -> tuple[_Name, ...]:
        place = (task.name, item.number, part)
        if place not in self._names:
            self._names[place] = tuple(self._make_names(task, item, part))
        return self._names[place]

    def _make_names(self, task: TaskItems, item: Item, part: int | Variant) -> Iterator[_Name]:
        if isinstance(item, Choice):
            for ask in self._asks(task, item, int(part)):
                is_exact = self.contestant.is_exact(ask)
                noise = () if is_exact else (ask.noise,)
                key = content_key("score", ask.given, ask.target, *noise)
                yield _Name(key, is_exact, (ask.length,))
        else:
            row = make_row(self.contestant, task.kind, item, part)
            sample, temperature = _sample(task, item, part), TEMPERATURE[task.kind]
            gap = row.count(self.contestant.tokenizer.mask_id)
            yield _Name(content_key("text", row, sample, temperature), False, (gap, len(row)))

    # --- log-probabilities -----------------------------------------------------------------

    def _asks(self, task: TaskItems, item: Choice, choice: int) -> list[Ask]:
        """The choices of a question share their noise."""
        noise = stream_key(0, "question", task.name, item.number) % (1 << 62)
        return self.contestant.asks(item.contexts[choice], item.continuations[choice], noise)

    def _score(self, chunk: list[_Unit], advance: Callable[[int], None]) -> list[dict[str, Any]]:
        asks = []
        for unit in chunk:
            assert isinstance(unit.item, Choice)
            asks.append(self._asks(unit.task, unit.item, int(unit.part))[unit.window])
        scores = self.contestant.score(asks, chunk[0].seed, advance)
        return [_record(unit, score) for unit, score in zip(chunk, scores, strict=True)]

    def scores(self, task: TaskItems, item: Choice, seed: int) -> list[Score]:
        """Of an item's choices, with one seed; all must have been done."""
        found = []
        for choice in range(len(item.continuations)):
            names = self._named(task, item, choice)
            found.append(add_up([_score(self._kept[name.with_seed(seed)]) for name in names]))
        return found

    def num_passes(self, task: TaskItems) -> int:
        """Rows through the network for all log-probabilities of a task."""
        keys = {
            name.with_seed(seed)
            for item in task.items
            if isinstance(item, Choice)
            for part in self._parts(item)
            for name in self._named(task, item, part)
            for seed in self.seeds
        }
        return sum(self._kept[key]["num_passes"] for key in keys)

    # --- texts -----------------------------------------------------------------------------

    def _write(self, chunk: list[_Unit], advance: Callable[[int], None]) -> list[dict[str, Any]]:
        seed, temperature = chunk[0].batch
        written = self.contestant.write(
            [torch.tensor(make_row(self.contestant, u.task.kind, u.item, u.part)) for u in chunk],
            [_sample(unit.task, unit.item, unit.part) for unit in chunk],
            seed=stream_key(seed, "downstream") % (1 << 31),
            temperature=temperature,
            on_batch=advance,
        )
        return [{"key": unit.key, "ids": ids} for unit, ids in zip(chunk, written, strict=True)]

    def text(self, task: TaskItems, item: Item, variant: Variant, seed: int) -> str:
        """What was written; up to EOS."""
        tokenizer = self.contestant.tokenizer
        (name,) = self._named(task, item, variant)
        ids = self._kept[name.with_seed(seed)]["ids"]
        end = ids.index(tokenizer.eos_id) if tokenizer.eos_id in ids else len(ids)
        return tokenizer.decode(np.array(ids[:end], dtype=np.int64))


def _sample(task: TaskItems, item: Item, part: int | Variant) -> int:
    """Names a text's noise."""
    return stream_key(0, "text", task.name, item.number, part) % (1 << 40)


def _record(unit: _Unit, score: Score) -> dict[str, Any]:
    """For JSON, which has no nan: a single draw has no error."""
    if not isfinite(score.log_probability):
        raise UserError(
            f"{unit.task.name}, question {unit.item.number + 1}: the model gives a choice the "
            f"log-probability {score.log_probability}; its weights are damaged"
        )
    return {"key": unit.key, **asdict(score), "error": None if isnan(score.error) else score.error}


def _score(record: dict[str, Any]) -> Score:
    fields = {name: record[name] for name in Score.__dataclass_fields__}
    return Score(**{**fields, "error": nan if record["error"] is None else record["error"]})


def _chunks(units: Sequence[_Unit]) -> list[list[_Unit]]:
    """Units that are done at once, of about one size, whatever task they belong to.

    Cheap and dear chunks are mixed, so that the time left can be told from the time taken.
    """
    ordered = sorted(units, key=lambda unit: (unit.batch, unit.size))
    chunks = []
    for _, same in groupby(ordered, key=lambda unit: unit.batch):
        together = list(same)
        chunks += [together[start : start + CHUNK] for start in range(0, len(together), CHUNK)]
    return [chunks[place] for place in shuffle(stream_key(0, "chunks"), len(chunks)).tolist()]
