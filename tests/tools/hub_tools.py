"""A hub of data sets that holds what a test gives it."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest


class FakeHub:
    """Stands for ``datasets`` and ``huggingface_hub``: rows, and what was asked."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.rows, self.commit = rows, "c0ffee"
        self.asked: list[tuple[Any, ...]] = []
        self.error: Exception | None = None
        """Instead of a commit."""
        self.error_after: Exception | None = None
        """Behind the rows."""

    def dataset_info(self, repository: str, revision: str | None) -> Any:
        if self.error:
            raise self.error
        return types.SimpleNamespace(sha=self.commit)

    def load_dataset(self, *args: Any, **named: Any) -> Iterator[dict[str, Any]]:
        self.asked.append((*args, named["split"], named["revision"]))
        return self._rows()

    def _rows(self) -> Iterator[dict[str, Any]]:
        yield from self.rows
        if self.error_after:
            raise self.error_after


def install_hub(monkeypatch: pytest.MonkeyPatch, rows: list[dict[str, Any]]) -> FakeHub:
    """Until the test is over, data sets come from here."""
    fake = FakeHub(rows)
    data = types.SimpleNamespace(load_dataset=fake.load_dataset)
    monkeypatch.setitem(sys.modules, "datasets", data)
    api = types.SimpleNamespace(HfApi=lambda: fake)
    monkeypatch.setitem(sys.modules, "huggingface_hub", api)
    return fake
