"""Samples on disk, and the numbers that a scorer made of them, so that nothing is done twice."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bellmask import __version__
from bellmask.evaluate.scorers import TextScorer
from bellmask.utils.files import is_number, is_whole, load_json, read_json, write_text


def key_of(*parts: Any) -> str:
    """A short name for everything that decides a result."""
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:12]


@dataclass(frozen=True)
class Sample:
    """One generated row, or one block of text."""

    documents: list[str]
    ids: list[int]
    """The model's own tokens that the text came from."""
    calls: float | None = None
    """Network calls for a sample, the mean of its cell; None for text that nobody sampled."""


@dataclass(frozen=True)
class Place:
    """The files of one cell."""

    samples: Path
    numbers: Path

    @staticmethod
    def of(
        folder: Path, subject: str, key: str, nfe: int | None, seed: int, scorer: TextScorer
    ) -> Place:
        """Under a folder for each subject and set of options."""
        name = re.sub(r"[^A-Za-z0-9_.-]+", "-", subject).strip("-")
        stem = f"seed-{seed}" if nfe is None else f"nfe-{nfe}-seed-{seed}"
        inside = folder / "samples" / f"{name}-{key}"
        mark = key_of(__version__, scorer.fingerprint, scorer.context)
        return Place(inside / f"{stem}.jsonl", inside / f"{stem}.{mark}.json")

    def read_samples(self) -> list[Sample] | None:
        """None where the file is absent or damaged."""
        try:
            lines = self.samples.read_text(encoding="utf-8").split("\n")
            found = [Sample(**load_json(line)) for line in lines if line]
        except (OSError, ValueError, TypeError):
            return None
        return found if all(map(_is_sample, found)) else None

    def write_samples(self, samples: Sequence[Sample]) -> None:
        """One JSON object per line."""
        self.samples.parent.mkdir(parents=True, exist_ok=True)
        lines = [json.dumps(asdict(sample), ensure_ascii=False) for sample in samples]
        write_text(self.samples, "\n".join(lines) + "\n")

    def read_numbers(self) -> dict[str, Any] | None:
        """None unless they were made from the samples that are there now."""
        try:
            found = read_json(self.numbers)
            return found if found["samples_sha256"] == self._digest() else None
        except (OSError, ValueError, TypeError, KeyError):
            return None

    def write_numbers(self, numbers: Mapping[str, Any]) -> None:
        """With a mark of the samples."""
        content = {**numbers, "samples_sha256": self._digest()}
        write_text(self.numbers, json.dumps(content) + "\n")

    def _digest(self) -> str:
        return hashlib.sha256(self.samples.read_bytes()).hexdigest()


def _is_sample(sample: Sample) -> bool:
    """Fields of the kinds that they should have."""
    documents, ids, calls = sample.documents, sample.ids, sample.calls
    return (
        isinstance(documents, list)
        and all(isinstance(text, str) for text in documents)
        and isinstance(ids, list)
        and all(map(is_whole, ids))
        and (calls is None or is_number(calls))
    )
