"""Whether options ask for training on conversations."""

from __future__ import annotations

from bellmask.data.example_files import LISTS, read_records
from bellmask.data.sources import find_files
from bellmask.errors import UserError
from bellmask.options import SftOptions


def has_turns(sft: SftOptions) -> bool:
    """True for options that train on conversations, as far as they tell.

    With template auto the examples decide; of a file that is still there the first one. Where
    nothing is known they are taken for single prompts.
    """
    if sft.train is None or sft.template != "auto":
        return sft.train is not None and sft.template == "chat"
    kind, sign, _ = sft.train.partition(":")
    if sign and kind in ("sharegpt", "toy", "tasks", "stories", "hub"):
        return kind == "sharegpt"
    try:
        first = next(read_records(find_files(sft.train)[0]), {})
    except (UserError, OSError):
        return False
    return any(column in first for column in LISTS)
