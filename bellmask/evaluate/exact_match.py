"""Exact match: the share of held-out examples whose response a run reproduces exactly.

Examples are rows of prompts and responses (:mod:`bellmask.data.examples`), for instance the
validation rows of a fine-tuned run, ``run.blocks()[1]``. The run gets the given part of a row token
by token; its text up to the first EOS must equal the response, both stripped of white space. Case
matters.

The gap to fill has the same length for all examples, so that it does not reveal the length of an
answer; an answer that does not fit is wrong. An exam evaluates several runs on the same examples
and caches their answers.

S sampling seeds, B examples, L length.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bellmask.data.blocks import Blocks
from bellmask.data.examples import begin_row
from bellmask.data.tokenizers import Ids, Tokenizer
from bellmask.generate.fill import fill_rows, text_before_eos
from bellmask.generate.settings import Sampling
from bellmask.storage.loading import Loaded, load
from bellmask.storage.run_folder import read_description
from bellmask.utils.progress import NO_PROGRESS, Progress
from bellmask.utils.stats import Floats, clustered_error, document_clusters
from bellmask.utils.store import Store, content_key


@dataclass(frozen=True)
class ExactMatch:
    """Expected responses and the answers of a run; everything else is derived from these."""

    expected: tuple[str, ...]
    answers: tuple[tuple[str, ...], ...]
    """To every example, once for each sampling seed."""
    documents: tuple[int, ...]
    """Documents are the clusters of standard errors (turns of a conversation, for example)."""
    fingerprint: str = ""
    """Of the examples and the gap: what must agree for two runs to be paired."""

    @property
    def is_right_SB(self) -> NDArray[np.bool_]:
        """True where an answer is the response, case and all."""
        wanted = [text.strip() for text in self.expected]
        return np.array([[a.strip() == w for a, w in zip(one, wanted)] for one in self.answers])

    @property
    def share_B(self) -> Floats:
        """Each example's share of right answers over sampling seeds."""
        return self.is_right_SB.mean(axis=0)

    @property
    def share(self) -> float:
        """The exact match: the share of right answers, which is also the mean over seeds."""
        return float(self.is_right_SB.mean())

    @property
    def seed_shares(self) -> list[float]:
        """The exact match with each sampling seed."""
        return self.is_right_SB.mean(axis=1).tolist()

    @property
    def seed_deviation(self) -> float:
        """Standard deviation over sampling seeds (the paper's ±); nan for a single one."""
        return statistics.stdev(self.seed_shares) if len(self.answers) > 1 else math.nan

    @property
    def standard_error(self) -> float:
        """Standard error of ``share`` over examples."""
        return self._error_of(self.share_B)

    def difference(self, other: ExactMatch) -> tuple[float, float]:
        """(this share - the other's, its standard error), paired: the same examples."""
        if (self.fingerprint, self.expected) != (other.fingerprint, other.expected):
            raise ValueError("only answers to the same examples can be compared")
        return self.share - other.share, self._error_of(self.share_B - other.share_B)

    def _error_of(self, value_B: Floats) -> float:
        if len(value_B) < 2:
            return math.nan
        return clustered_error(value_B, document_clusters(np.array(self.documents)))


# An exam: the same examples for several runs; answers are cached in the run folders.
#
# Each (run, sampling seed) is a line of ``RUN/exact_match.jsonl`` under a key of everything that
# determines the answers. Existing answers are reused, so an interrupted exam continues, and adding
# seeds computes only the new ones.

FORMAT = 3
"""Increased when code changes the answers of a run: old answers are not reused."""


@dataclass(frozen=True)
class Exam:
    """The questions and sampling settings."""

    examples: Blocks
    tokenizer: Tokenizer
    length: int
    """Tokens of the gap, for all examples."""
    sampling: Sampling
    seeds: tuple[int, ...]
    batch_size: int = 64

    def missing(self, folder: Path, step: int) -> list[int]:
        """Seeds that the run has no answers for."""
        store = self._store(folder)
        return [seed for seed in self.seeds if self._key(folder, step, seed) not in store]

    def take(self, folder: Path, step: int, progress: Progress = NO_PROGRESS) -> ExactMatch:
        """All answers of the run at a step, from the cache or computed now.

        ``progress`` counts those that were missing.
        """
        run = functools.cache(partial(load, folder, checkpoint=str(step)))

        def answer(seed: int) -> dict[str, Any]:
            return {"seed": seed, "answers": self.ask(run(), seed, progress)}

        store = self._store(folder)
        keys = {seed: self._key(folder, step, seed) for seed in self.seeds}
        records = [store.get_or_make(key, partial(answer, seed)) for seed, key in keys.items()]
        return self.grade([record["answers"] for record in records])

    def grade(self, answers: Sequence[Sequence[str]]) -> ExactMatch:
        """Answers and expected responses: the maskable part, up to the first EOS."""
        given = [row[start:end].tolist() for row, start, end in self._rows()]
        expected = tuple(text_before_eos(ids, self.tokenizer)[0].strip() for ids in given)
        documents = tuple(self.examples.documents.tolist())
        fingerprint = f"{self.examples.fingerprint}/{self.length}"
        return ExactMatch(expected, tuple(map(tuple, answers)), documents, fingerprint)

    def ask(self, run: Loaded, seed: int, progress: Progress = NO_PROGRESS) -> list[str]:
        """A run's answer to every example; example i has noise i, whatever the batch."""
        how: dict[str, Any] = {"seed": seed, "batch_size": self.batch_size, "progress": progress}
        how["longest"] = self.examples.block_length
        made = fill_rows(run, self.canvases(run), self.sampling, **how)
        return [text_before_eos(one.ids, run.tokenizer)[0].strip() for one in made]

    def canvases(self, run: Loaded) -> list[Tensor]:
        """Each row's given part and a gap; a prompt too long for both loses its oldest tokens."""
        tokenizer, has_first = run.tokenizer, run.model.first_maskable > 0
        made = []
        gap = torch.full((self.length,), tokenizer.mask_id)
        for row, start, _ in self._rows():
            room = self.examples.block_length - self.length
            given, _ = begin_row(row[:start], room, tokenizer, has_first)
            made.append(torch.cat([torch.from_numpy(given), gap]))
        return made

    def _rows(self) -> Iterator[tuple[Ids, int, int]]:
        """Each row, and where its response begins and ends."""
        blocks, every = self.examples, slice(None)
        starts, ends = blocks.row_starts(every).tolist(), blocks.row_lengths(every).tolist()
        return zip(blocks.rows(every).numpy(), starts, ends, strict=True)

    def _store(self, folder: Path) -> Store:
        return Store(folder / "exact_match.jsonl")

    def _key(self, folder: Path, step: int, seed: int) -> str:
        run, fingerprint = read_description(folder).get("id"), self.examples.fingerprint
        settings = [FORMAT, run, step, fingerprint, self.length, asdict(self.sampling), seed]
        return content_key(settings)
