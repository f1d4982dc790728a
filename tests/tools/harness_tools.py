"""What the tests of lm-eval's model share."""

from __future__ import annotations

from typing import Any

from lm_eval.api.instance import Instance


def ask(
    kind: str, arguments: tuple[Any, ...], doc: int | None = 0, idx: int = 0, task: str = "t"
) -> Instance:
    """A request as lm-eval makes it."""
    metadata = (None, None, None) if doc is None else (task, doc, 1)
    return Instance(kind, {}, arguments, idx, metadata)
