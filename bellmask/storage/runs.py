"""Run folders for analyses: named by their options, at some of their checkpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bellmask.config.config import RunConfig, is_free_option
from bellmask.config.options import DEFAULT_ENCODINGS
from bellmask.storage.checkpoint import list_checkpoints, step_of
from bellmask.storage.loading import OWN, Loaded, is_export, load, local_folder
from bellmask.storage.run_folder import read_config, read_description
from bellmask.utils.errors import UserError

# Display names of runs, from their options: base, bell, laplace:0.5,0.2, aoarm+crossed.

_NAMED = ("framework.", "objective.", "law.", "schedule.")
_UNNAMED = ("train.seed", "validation.", "data.", "start.", "sft.", "model.backbone")


def names_of(configs: Sequence[RunConfig]) -> list[str]:
    """Names such as base and bell from the options, plus other differences from the first run."""
    first = configs[0].resolved().flat()
    names = []
    for config in configs:
        flat = config.resolved().flat()
        differ = (k for k in flat if flat[k] != first[k] and not is_free_option(k))
        other = [k for k in differ if not k.startswith(_UNNAMED + _NAMED)]
        names.append(_objective_name(flat) + "".join(f" {k}={flat[k]}" for k in other))
    return names


def _objective_name(flat: Mapping[str, Any]) -> str:
    """``base`` and ``bell`` for those two, all numbers for anything else."""
    framework, encoding = flat["framework.name"], flat["framework.encoding"]
    if framework != "mdm":
        is_default = encoding == DEFAULT_ENCODINGS[framework]
        return framework if is_default else f"{framework}+{encoding}"
    kind, law, schedule = flat["objective.name"], flat["law.name"], flat["schedule.name"]
    ends = ("law.mu", "law.scale", "law.low", "law.high")
    numbers = ",".join(str(flat[k]) for k in ends if flat[k] is not None)
    law = f"{law}:{numbers}" if numbers else law
    law += f"+uniform{share}" if (share := flat["law.uniform_share"]) is not None else ""
    if schedule != "linear":
        keys = ("schedule.power", "schedule.mu", "schedule.scale")
        numbers = ",".join(str(flat[k]) for k in keys if flat[k] is not None)
        return f"{kind} {law} {schedule}" + (f":{numbers}" if numbers else "")
    if kind == "importance":
        return f"importance{'_t' if flat['objective.divide_by_t'] else ''} {law}"
    known = {("nelbo", "uniform"): "base", ("bell", "gaussian:0.5,0.1"): "bell"}
    return known.get((kind, law), law if kind == "bell" else f"{kind} {law}")


# The runs of an analysis.


@dataclass(frozen=True)
class NamedRun:
    """A run folder with a unique name."""

    name: str
    folder: Path
    config: RunConfig
    steps: list[int]
    """Of its checkpoints, in order."""

    def load(self, checkpoint: int | str = "latest", device: str = "auto") -> Loaded:
        """The run at one of its checkpoints: a step, latest or best."""
        return load(self.folder, checkpoint=str(checkpoint), device=device)


def open_runs(folders: Sequence[str]) -> list[NamedRun]:
    """All of them; UserError where a folder is no run or has no checkpoint."""
    if not folders:
        raise UserError("this analysis needs at least one run folder")
    paths = [local_folder(folder) for folder in folders]
    for path in paths:
        if not (path / "config.json").exists():
            raise UserError(f"{path} is not a run folder: it has no config.json")
    if len(set(paths)) < len(paths):
        raise UserError("the same run folder is given twice")
    configs = [read_config(path, OWN if is_export(path) else "") for path in paths]
    names, found = names_of(configs), []
    for name, path, config, short in zip(names, paths, configs, _folder_names(paths)):
        steps = _steps(path)
        if not steps:
            raise UserError(f"{path} has no checkpoint")
        unique = name if names.count(name) == 1 else f"{name} ({short})"
        found.append(NamedRun(unique, path, config, steps))
    return found


def check_all_maskable(runs: Sequence[NamedRun], analysis: str) -> None:
    """Reject runs with positions that are never masked: causal LMs and prompts."""
    for run in runs:
        if run.config.model.backbone != "dit" or run.config.sft.train is not None:
            what = "on a causal LM" if run.config.model.backbone != "dit" else "fine-tuned"
            raise UserError(f"{analysis} needs text on the built-in DiT; {run.folder} is {what}")


def by_folder(folders: Sequence[str]) -> dict[str, Path]:
    """Run folders by their own names; by path where two have the same."""
    paths = [named.folder for named in open_runs(folders)]
    return dict(zip(_folder_names(paths), paths))


def _steps(path: Path) -> list[int]:
    """Of the checkpoints; an export holds one."""
    if is_export(path):
        return [int(read_description(path)["step"])]
    return [step_of(checkpoint) for checkpoint in list_checkpoints(path / "checkpoints")]


def _folder_names(paths: Sequence[Path]) -> list[str]:
    """Their last names; whole paths where two have the same."""
    short = [path.absolute().name for path in paths]
    return [name if short.count(name) == 1 else str(p) for name, p in zip(short, paths)]


def chosen_steps(run: NamedRun, wanted: Sequence[int]) -> list[int]:
    """The requested checkpoints; all by default."""
    missing = [step for step in wanted if step not in run.steps]
    if missing:
        have = ", ".join(map(str, run.steps))
        raise UserError(f"{run.folder} has no checkpoint at step {missing[0]}; it has {have}")
    return sorted(set(wanted)) or run.steps


def check_same_text(runs: Sequence[NamedRun]) -> None:
    """UserError unless all runs have the same text and tokenizer."""
    kinds = ("train_fingerprint", "tokenizer_fingerprint")
    marks = [[read_description(run.folder).get(kind) for kind in kinds] for run in runs]
    for run, mark in zip(runs, marks):
        if mark != marks[0]:
            raise UserError(f"{runs[0].folder} and {run.folder} have different text or tokenizers")
