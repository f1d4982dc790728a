"""Where a run starts: anew or from a checkpoint, and which options may differ then."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from bellmask.config.config import RunConfig, load_config
from bellmask.config.options import FREE_OPTIONS
from bellmask.storage.checkpoint import CheckpointStore, read_state
from bellmask.storage.run_folder import is_free, read_description
from bellmask.train.metrics import Window
from bellmask.utils.distributed import World
from bellmask.utils.errors import UserError, look_up
from bellmask.utils.files import is_number

_FREE_WITHOUT_DROPOUT = ("train.microbatch_size",)
_FREE_WITH_CONSTANT_RATE = ("train.steps",)


def _may_change(option: str, config: RunConfig) -> bool:
    free: tuple[str, ...] = FREE_OPTIONS
    if config.model.dropout == 0:
        free += _FREE_WITHOUT_DROPOUT
    if config.optim.curve == "constant":
        free += _FREE_WITH_CONSTANT_RATE
    return option.startswith(free)


def check_same_run(
    before: dict[str, Any], now: dict[str, Any], config: RunConfig, folder: Path
) -> None:
    """Refuse to go on where text, tokenizer, precision or dropout's noise would be others.

    ``before`` is the run's run.json, ``now`` what it would be.
    """
    watched = {
        "tokenizer_fingerprint": "the tokenizer",
        "train_fingerprint": "the training text",
        "valid_fingerprint": "the validation text",
        "precision": "the precision of matrix products",
    }
    if config.model.dropout and config.train.microbatch_size is None:
        watched["processes"] = (
            "the number of processes, on which dropout's noise depends where no "
            "train.microbatch_size was given,"
        )
    for key, what in watched.items():
        if before.get(key) != now[key]:
            values = "" if "fingerprint" in key else f" (was {before.get(key)}, now {now[key]})"
            raise UserError(
                f"{what} has changed since {folder} was started{values}; "
                "restore it, or start another run with another --out"
            )


def check_resumable(path: Path, config: RunConfig) -> None:
    """Refuse, naming them, options that differ from the run's and would change its course."""
    before, now = load_config(path).resolved().flat(), config.resolved().flat()
    changed = [o for o in now if now[o] != before[o] and not _may_change(o, config)]
    if changed:
        lines = [f"  {o}: was {before[o]}, now {now[o]}" for o in changed]
        raise UserError(
            "these options cannot change when a run is resumed:\n"
            + "\n".join(lines)
            + "\nresume without them, or start another run with another --out"
        )


def find_start(config: RunConfig, folder: Path, resume: str, world: World) -> Path | None:
    """The checkpoint to start from; refuses a folder that is in use or cannot be continued."""
    modes = {"no": False, "auto": True, "yes": True}
    may_resume = look_up("resume mode", resume, modes)
    has_run = world.agree((folder / "config.json").exists())
    if has_run and not may_resume:
        raise UserError(
            f"{folder} already holds a run; continue it with --resume auto, or choose another --out"
        )
    if not has_run and not is_free(folder):
        raise UserError(f"{folder} exists and is not a run of bellmask; choose another --out")
    if not has_run and resume == "yes":
        raise UserError(f"{folder} holds no run to resume; use --resume auto to start one")
    if not has_run:
        return None
    check_resumable(folder / "config.json", config)
    store = CheckpointStore(folder / "checkpoints", config.checkpoint, world)
    found, complaints = store.newest_intact()
    if complaints and config.checkpoint.when_damaged == "stop":
        advice = "with --checkpoint.when-damaged older the newest intact one would be used"
        raise UserError("\n".join([*complaints, advice]))
    if complaints and found is None:
        advice = "no intact checkpoint is left; move the folder away or choose another --out"
        raise UserError("\n".join([*complaints, advice]))
    for complaint in complaints if world.is_main else []:
        print(f"warning: {complaint}; using an older one", file=sys.stderr)
    if found is not None:
        _check_state(read_state(found), found, folder, config)
    return found


def _check_state(state: dict[str, Any], found: Path, folder: Path, config: RunConfig) -> None:
    """Refuse a whole checkpoint that is not this run's, before anything is changed."""
    if state["step"] > config.train.steps:
        raise UserError(
            f"{folder} is at step {state['step']}, beyond train.steps="
            f"{config.train.steps}; give at least that many to resume it"
        )
    own = read_description(folder).get("id")
    if state.get("run", own) != own:
        raise UserError(f"{found} is of another run than {folder}; remove it, and an older is used")
    window = state.get("window")
    numbers = [state.get("tokens"), state.get("seconds"), state.get("skipped", 0)]
    if (
        not isinstance(window, dict)
        or not set(window) <= set(Window.__dataclass_fields__)
        or not all(map(is_number, [*window.values(), *numbers]))
    ):
        raise UserError(
            f"{found}/state.json does not say where the run was; remove that checkpoint"
        )
