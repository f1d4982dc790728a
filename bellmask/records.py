"""metrics.jsonl: one JSON object per line, appended while training, cut back on resume."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from bellmask.utils.files import has_kinds, is_whole, load_json, write_text

TIME_FIELDS = ("seconds", "tokens_per_second")
"""Fields of metrics.jsonl that differ between repetitions of a run."""


class MetricsFile:
    """metrics.jsonl: append a line; cut back to a step when a run is resumed."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, record: dict[str, Any]) -> None:
        """Append one line."""
        with self.path.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(record) + "\n")

    def sync(self) -> None:
        """Make sure that all lines so far are on disk."""
        if self.path.exists():
            with self.path.open("rb") as stream:
                os.fsync(stream.fileno())

    def cut_back(self, step: int) -> None:
        """Drop lines of later steps, and a last line that a kill left incomplete."""
        kept = [line for line in read_metrics(self.path) if line["step"] <= step]
        write_text(self.path, "".join(json.dumps(line) + "\n" for line in kept))


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All whole lines of a metrics.jsonl, in order; none if the file is absent."""
    if not path.exists():
        return []
    records = []
    for line in path.read_bytes().split(b"\n"):
        try:
            record = load_json(line)
        except ValueError:
            continue  # the line that was being written when the process was killed
        if has_kinds(record, {"step": int, "kind": str}) and is_whole(record["step"]):
            records.append(record)
    return records
