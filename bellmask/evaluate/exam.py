"""An exam: the same examples for several runs; answers are kept in the run folders.

Each (run, sampling seed) is a file of its own under ``RUN/exact_match``, named by a key of all that
decides the answers. What is there is not asked again, so an exam that was stopped goes on, and
one with more seeds asks only the new ones.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bellmask.data.blocks import Blocks
from bellmask.data.tokenizers import Tokenizer
from bellmask.evaluate.exact_match import ExactMatch, Gap, ask, grade
from bellmask.evaluate.sample_files import key_of
from bellmask.generate.settings import Sampling
from bellmask.storage.loading import Loaded, load_run
from bellmask.storage.run_folder import read_description
from bellmask.utils.files import read_json, write_text

FORMAT = 1
"""Raised when code changes what a run answers: old answers are not reused."""


@dataclass(frozen=True)
class Exam:
    """What is asked, and how."""

    examples: Blocks
    tokenizer: Tokenizer
    length: Gap
    sampling: Sampling
    seeds: tuple[int, ...]
    batch_size: int = 64

    def missing(self, folder: Path, step: int) -> list[int]:
        """Seeds that the run has no answers for."""
        return [seed for seed in self.seeds if self._kept(folder, step, seed) is None]

    def take(
        self, folder: Path, step: int, on_batch: Callable[[int], None] | None = None
    ) -> ExactMatch:
        """All answers of the run at a step, asked now or before.

        ``on_batch`` is told how many of those that were missing are there.
        """
        found = {seed: self._kept(folder, step, seed) for seed in self.seeds}
        missing = [seed for seed, answers in found.items() if answers is None]
        run = load_run(folder, checkpoint=str(step)) if missing else None
        for number, seed in enumerate(missing):

            def advance(done: int, before: int = number * len(self.examples)) -> None:
                if on_batch:
                    on_batch(before + done)

            assert run is not None
            found[seed] = self._ask(run, seed, advance)
        return grade(
            self.examples, self.tokenizer, self.length, [found[seed] or [] for seed in self.seeds]
        )

    def _ask(self, run: Loaded, seed: int, on_batch: Callable[[int], None]) -> list[str]:
        answers = ask(
            run,
            self.examples,
            self.length,
            self.sampling,
            seed=seed,
            batch_size=self.batch_size,
            on_batch=on_batch,
        )
        path = self._path(run.folder, run.step, seed)
        path.parent.mkdir(exist_ok=True)
        content = {**self._settings(run.folder, run.step, seed), "answers": answers}
        write_text(path, json.dumps(content, ensure_ascii=False, indent=0) + "\n")
        return answers

    def _kept(self, folder: Path, step: int, seed: int) -> list[str] | None:
        """Answers of before; None where there are none, or damaged ones."""
        try:
            found = read_json(self._path(folder, step, seed))
            answers = found.pop("answers")
        except (OSError, ValueError, KeyError, AttributeError, TypeError):
            return None
        is_ours = found == self._settings(folder, step, seed) and isinstance(answers, list)
        is_ours = is_ours and all(isinstance(answer, str) for answer in answers)
        return answers if is_ours and len(answers) == len(self.examples) else None

    def _settings(self, folder: Path, step: int, seed: int) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "run": read_description(folder).get("id"),
            "step": step,
            "examples": self.examples.fingerprint,
            "length": self.length,
            "sampling": asdict(self.sampling),
            "seed": seed,
        }

    def _path(self, folder: Path, step: int, seed: int) -> Path:
        key = key_of(self._settings(folder, step, seed))
        return folder / "exact_match" / f"seed-{seed}-{key}.json"
