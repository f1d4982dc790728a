"""The command ``bellmask train``."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from bellmask.config.presets import resolve, start_config, take_option, wants_help
from bellmask.utils.console import tell

TRAIN_HELP = """Train a masked diffusion language model.

usage: bellmask train PRESET [--config FILE] [--out DIR] [--resume MODE] [--quiet] [options below]

PRESET is a name from 'bellmask presets', another run's folder or its config.json. Defaults shown
below are those of the preset, if one is given before --help.
  --config FILE  options from a JSON or TOML file, over the preset and under the command line
  --out DIR      run folder; default runs/<preset>-<hash of all options>
  --resume MODE  no: refuse a folder that holds a run (default); auto: continue it or start it;
                 yes: insist on continuing
  --quiet        say nothing but errors

examples:
  bellmask train tiny
  bellmask train tiny_base --train.steps 500 --out runs/base
  bellmask train tiny --data.train 'texts/*.txt' --law laplace --law.scale 0.2
  bellmask train runs/base/config.json --out runs/again
  bellmask train tiny --out runs/bell --resume auto
  torchrun --nproc-per-node 2 -m bellmask train lm1b --train.microbatch-size 64
"""


def _print_option_help(where: str, args: Sequence[str]) -> None:
    """The options of a run with the defaults of a preset, if one is named."""
    import tyro

    from bellmask.config.config import RunConfig

    named = [a for a in args if not a.startswith("-")]
    default = start_config(named[0]) if named else RunConfig()
    tyro.cli(
        RunConfig, default=default, args=["--help"], prog=where, description="Options of a run."
    )


def main(args: list[str]) -> int:
    """Train a model."""
    if wants_help(args):
        print(TRAIN_HELP)
        for option in ("--out", "--resume", "--config"):
            take_option(args, option)
        _print_option_help("bellmask train PRESET", args)
        return 0
    out, resume = take_option(args, "--out"), take_option(args, "--resume")
    is_quiet = "--quiet" in args
    args = [a for a in args if a != "--quiet"]
    name, config = resolve(args, "bellmask train")
    folder = Path(out[-1]) if out else Path("runs") / f"{name}-{config.fingerprint()}"

    from bellmask.train.train_run import train_run

    result = train_run(config, folder, resume=resume[-1] if resume else "no", is_quiet=is_quiet)
    is_main = os.environ.get("RANK", "0") == "0"
    if result.stopped_by is not None:
        if is_main:
            how = f"the same command and --resume auto --out {shlex.quote(str(folder))}"
            tell(f"stopped at step {result.step}; continue with {how}", sys.stderr)
        return 128 + result.stopped_by
    if is_main and not is_quiet:
        last = f", validation NLL {result.nll:.4f} nats/token" if result.nll is not None else ""
        tell(f"done: step {result.step}{last}; run folder {folder}", sys.stdout)
    return 0
