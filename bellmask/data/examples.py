"""Examples to fine-tune on, opened by name: files, the hub, the task mix, ShareGPT, toys, stories.

Every source yields (document, example) pairs in a fixed order; see
:class:`bellmask.data.messages.ExampleSource`.
"""

from __future__ import annotations

from pathlib import Path

from bellmask.config.options import SftOptions
from bellmask.data.example_files import (
    RecordSource,
    example_files,
    from_records,
    hub_named,
    record_files,
)
from bellmask.data.messages import Example, ExampleSource, Message, Role, turns
from bellmask.data.sharegpt import from_sharegpt
from bellmask.data.sources import find_files, is_hub_name
from bellmask.data.story_questions import open_stories
from bellmask.data.task_files import open_tasks
from bellmask.data.toy_examples import open_toy
from bellmask.utils.errors import UserError

__all__ = ["Example", "ExampleSource", "Message", "Role", "open_examples", "turns"]


def open_examples(source: str, options: SftOptions, cache: Path) -> ExampleSource:
    """The examples that ``--sft.train`` or ``--sft.valid`` names, not read yet.

    Of the options only ``counts`` is read, and only for the task mix.
    """
    kind, sign, rest = source.partition(":")
    if source == "tasks":
        return open_tasks(None, options.counts)
    if is_hub_name(source):
        return from_records(hub_named(source))
    if sign and kind in _OPENERS and not Path(source).exists():
        if not rest:
            raise UserError(f"{source!r}: what comes after {kind}: is missing")
        return _OPENERS[kind](rest, options)
    is_a_word = not any(mark in source for mark in "/.*?[") and not Path(source).exists()
    if is_a_word:
        raise UserError(
            f"unknown examples {source!r} (tasks, tasks:FOLDER, hub:OWNER/NAME, sharegpt:FILE, "
            "sharegpt:hub:OWNER/NAME, toy:copy, toy:reverse, toy:sums, stories:FILE, or a .jsonl, "
            ".json or .parquet file)"
        )
    return example_files(source)


def _sharegpt_records(rest: str) -> RecordSource:
    """Of files, or of ``hub:OWNER/NAME[:CONFIG[:SPLIT]]``."""
    name = f"sharegpt:{rest}"
    return hub_named(name) if is_hub_name(rest) else record_files(find_files(rest), name)


_OPENERS = {
    "tasks": lambda rest, options: open_tasks(rest, options.counts),
    "sharegpt": lambda rest, options: from_sharegpt(_sharegpt_records(rest)),
    "toy": lambda rest, options: open_toy(f"toy:{rest}"),
    "stories": lambda rest, options: open_stories(rest),
}
