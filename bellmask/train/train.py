"""``bellmask train``: its options; the training itself is loaded when it starts (torch is slow)."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from bellmask.config.command_line import PresetOptions, parse_run_command, resolve
from bellmask.data.corpora import check_files
from bellmask.utils.console import announced, tell


@dataclass(frozen=True, kw_only=True)
class TrainCommand(PresetOptions):
    """Train a masked diffusion language model.

    Options of a run, listed below with the preset's defaults, can follow.

    Examples:
    bellmask train tiny

    bellmask train tiny_base --train.steps 500 --out runs/base

    bellmask train tiny --data.train 'texts/*.txt' --law laplace --law.scale 0.2

    bellmask train runs/base/config.json --out runs/again

    bellmask train tiny --out runs/bell --resume auto

    bellmask resume runs/bell

    torchrun --nproc-per-node 2 -m bellmask train lm1b --train.microbatch-size 64
    """

    out: str | None = None
    """Run folder; default: runs/PRESET-HASH, where HASH depends on all options."""
    resume: Literal["no", "auto", "yes"] = "no"
    """no: fail if the folder already has a run. auto: continue the run if there is one. yes: fail
    if there is no run to continue."""
    quiet: bool = False
    """Print only results, warnings and errors."""


def main(args: Sequence[str]) -> int:
    options, rest = parse_run_command(TrainCommand, args, command="train")
    name, config = resolve(options, rest, "bellmask train")
    folder = Path(options.out or Path("runs") / f"{name}-{config.fingerprint()}")
    if options.out is None and options.resume != "no" and Path(options.preset).is_dir():
        folder = Path(options.preset)  # a run folder in place of a preset: resume that run

    if config.sft.train is None:
        check_files(config.data)

    with announced("loading PyTorch", is_quiet=options.quiet):
        from bellmask.train.train_run import train_run

    result = train_run(config, folder, resume=options.resume, is_quiet=options.quiet)
    is_main = os.environ.get("RANK", "0") == "0"
    if result.stopped_by is not None:
        if is_main:
            how = f"bellmask resume {shlex.quote(str(folder))}"
            tell(f"stopped at step {result.step}; continue with {how}", sys.stderr)
        return 128 + result.stopped_by
    if is_main and not options.quiet:
        last = ""
        if result.nll is not None:
            last = f", validation NLL {result.nll:.4f} nats/token on {result.validated_on}"
        tell(f"done: step {result.step}{last}; run folder {folder}", sys.stdout)
    return 0
