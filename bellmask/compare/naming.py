"""What a person calls a run, from its options: base, bell, laplace:0.5,0.2, aoarm+crossed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bellmask.config.config import RunConfig
from bellmask.config.options import DEFAULT_ENCODINGS

_NAMED = ("framework.", "objective.", "law.", "schedule.")
_UNNAMED: tuple[str, ...] = (
    "train.seed",
    "train.device",
    "train.skip_limit",
    "scale.",
    "log.",
    "checkpoint.",
    "validation.",
    "data.",
    "start.",
    "sft.",
    "model.backbone",
)


def names_of(configs: Sequence[RunConfig]) -> list[str]:
    """base, bell and so on by their options, and what else sets a run apart from the first one."""
    first = configs[0].resolved().flat()
    names = []
    for config in configs:
        flat = config.resolved().flat()
        other = [k for k in flat if flat[k] != first[k] and not k.startswith(_UNNAMED + _NAMED)]
        names.append(_objective_name(flat) + "".join(f" {k}={flat[k]}" for k in other))
    return names


def _objective_name(flat: Mapping[str, Any]) -> str:
    """``base`` and ``bell`` for those two, all numbers for anything else."""
    framework, encoding = flat["framework.name"], flat["framework.encoding"]
    if framework != "mdm":
        is_default = encoding == DEFAULT_ENCODINGS[framework]
        return framework if is_default else f"{framework}+{encoding}"
    kind, law, schedule = flat["objective.name"], flat["law.name"], flat["schedule.name"]
    numbers = ",".join(str(flat[k]) for k in ("law.mu", "law.scale") if flat[k] is not None)
    law = f"{law}:{numbers}" if numbers else law
    if schedule != "linear":
        keys = ("schedule.power", "schedule.mu", "schedule.scale")
        numbers = ",".join(str(flat[k]) for k in keys if flat[k] is not None)
        return f"{kind} {law} {schedule}" + (f":{numbers}" if numbers else "")
    if kind == "importance":
        return f"importance{'_t' if flat['objective.divide_by_t'] else ''} {law}"
    known = {("nelbo", "uniform"): "base", ("bell", "gaussian:0.5,0.1"): "bell"}
    return known.get((kind, law), law if kind == "bell" else f"{kind} {law}")
