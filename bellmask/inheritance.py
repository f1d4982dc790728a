"""What a law, schedule or framework that takes another's place does not inherit from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from bellmask.options import LawOptions, ObjectiveOptions, ScheduleOptions

if TYPE_CHECKING:
    from bellmask.config import RunConfig


def forget_replaced(before: RunConfig, after: RunConfig, args: Sequence[str]) -> RunConfig:
    """A new law or schedule does not inherit the old one's parameters."""
    sections: dict[str, Any] = {}
    for section, names in (("law", ("mu", "scale")), ("schedule", ("power", "mu", "scale"))):
        old, new = getattr(before, section), getattr(after, section)
        if old.name != new.name:
            stale = {n: None for n in names if f"--{section}.{n}" not in args}
            sections[section] = replace(new, **stale)
    sections |= _forget_replaced_framework(before, after, args)
    return replace(after, **sections)


def _forget_replaced_framework(
    before: RunConfig, after: RunConfig, args: Sequence[str]
) -> dict[str, Any]:
    """A new framework brings its own encoding and order; causal ones have no times."""
    old, new = before.framework, after.framework
    if old.name == new.name:
        return {}
    stale: dict[str, Any] = {
        name: None
        for name in ("encoding", "order_seed")
        if f"--framework.{name.replace('_', '-')}" not in args
    }
    sections: dict[str, Any] = {"framework": replace(new, **stale)}
    if new.name != "mdm":
        untimed = {
            "law": LawOptions("uniform"),
            "schedule": ScheduleOptions(),
            "objective": ObjectiveOptions("nelbo"),
        }
        for section, value in untimed.items():
            if not any(arg.split(".")[0] == f"--{section}" for arg in args):
                sections[section] = value
    return sections
