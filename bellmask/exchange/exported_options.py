"""A run's options as an export keeps them: without what is true on one machine only."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from bellmask.config.config import RunConfig
from bellmask.config.options import StartOptions


def exported_options(config: RunConfig, *, is_pushed: bool) -> dict[str, Any]:
    """Ready for JSON; ``load_config`` takes it.

    Where the weights came from is kept as a name, and low-rank updates are no more: they are
    merged. The paths of the text stay, so that ``evaluate`` finds it, unless the export is pushed.
    """
    start, plain = config.start, StartOptions()
    start = replace(
        start,
        model=start_name(start.model),
        architecture=start_name(start.architecture),
        lora_rank=plain.lora_rank,
        lora_alpha=plain.lora_alpha,
    )
    options = replace(config, start=start).resolved().to_dict()
    options["data"]["cache"] = None  # a folder of this machine
    if is_pushed:
        for section in ("data", "sft"):
            options[section] = {k: without_folders(v) for k, v in options[section].items()}
    return options


def start_name(path: str | None) -> str | None:
    """A folder by its last name; a name on the hub as it is."""
    if path is None or not (Path(path).is_absolute() or Path(path).exists()):
        return path
    return Path(path).absolute().name


def without_folders(value: Any) -> Any:
    """Paths shortened to names, also those behind a kind (``sharegpt:FILE``) and in lists."""
    if isinstance(value, list):
        return [without_folders(one) for one in value]
    if not isinstance(value, str):
        return value
    kind, colon, rest = value.partition(":")
    if colon and Path(rest).is_absolute() and not Path(value).is_absolute():
        return kind + colon + Path(rest).name
    return Path(value).name if Path(value).is_absolute() else value
