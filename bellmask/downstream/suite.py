"""Several contestants on several tasks: the same questions for all, differences to the first."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from bellmask.downstream.contestants import Contestant
from bellmask.downstream.data_sources import TaskRecords
from bellmask.downstream.questions import TASKS, Item, Prompts, limit_items, make_items
from bellmask.downstream.results import Measured, grade, summary
from bellmask.downstream.work import TaskItems, Work
from bellmask.utils.errors import UserError


class Suite:
    """What is asked of whom; ``do`` it, then take the ``numbers``."""

    def __init__(
        self,
        contestants: Mapping[str, Contestant],
        tasks: Mapping[str, TaskRecords],
        limit: int,
        seeds: Sequence[int],
        folder: Path,
    ) -> None:
        """``limit`` questions of each task (0: all); what is done is kept in ``folder``."""
        self._loaded, self._seeds = tasks, tuple(seeds)
        items = same_items(tasks, sorted({one.prompts for one in contestants.values()}), limit)
        self._works = {
            name: Work(one, items[one.prompts], seeds, folder) for name, one in contestants.items()
        }

    def missing(self) -> int:
        """Answers of models that are left to get (baselines take no time)."""
        works = self._works.values()
        return sum(work.missing() for work in works if work.contestant.is_model)

    def do(self, on_done: Callable[[int], None] | None = None) -> None:
        """Get them; ``on_done`` is told how many there are."""
        before = 0
        for work in self._works.values():
            if not work.contestant.is_model:
                work.do()
                continue
            count = work.missing()
            work.do(on_done and partial(_later, on_done, before))
            before += count

    def measured(self) -> dict[str, dict[str, Measured]]:
        """Scores by contestant and task."""
        return {
            name: {task.name: grade(work, task) for task in work.tasks}
            for name, work in self._works.items()
        }

    def numbers(self) -> dict[str, Any]:
        """All of it, for files and tables."""
        measured = self.measured()
        first, *_ = measured
        tasks = []
        for task in self._works[first].tasks:
            results = {
                name: summary(
                    found[task.name], None if name == first else measured[first][task.name]
                )
                for name, found in measured.items()
            }
            tasks.append({**self._about_task(task), "results": results})
        models = [
            {"name": name, "is_model": work.contestant.is_model, **work.contestant.about()}
            for name, work in self._works.items()
        ]
        return {"models": models, "seeds": list(self._seeds), "tasks": tasks}

    def _about_task(self, task: TaskItems) -> dict[str, Any]:
        info, loaded = TASKS[task.name], self._loaded[task.name]
        return {
            "name": task.name,
            "title": info.title,
            "main": info.main_score,
            "measure": info.measure,
            "note": info.note,
            "gives_length": info.gives_length,
            "origin": loaded.origin,
            "identity": loaded.identity,
            "num_questions": len(task.items),
            "num_records": len(loaded.records),
        }


def _later(on_done: Callable[[int], None], before: int, inside: int) -> None:
    """Tell what was done, behind what others did."""
    on_done(before + inside)


def same_items(
    tasks: Mapping[str, TaskRecords], kinds: Sequence[Prompts], limit: int
) -> dict[Prompts, list[TaskItems]]:
    """The same questions with each kind of prompt, so that differences can be paired."""
    found: dict[Prompts, list[TaskItems]] = {kind: [] for kind in kinds}
    for task, loaded in tasks.items():
        made = {kind: make_items(task, loaded.records, kind) for kind in kinds}
        numbers = set.intersection(*({item.number for item in items} for items in made.values()))
        if not numbers:
            raise UserError(f"{task}: none of {len(loaded.records)} records has a usable answer")
        for kind, items in made.items():
            usable: list[Item] = [item for item in items if item.number in numbers]
            kept = tuple(limit_items(task, usable, limit))
            found[kind].append(TaskItems(task, TASKS[task].kind, kept))
    return found
