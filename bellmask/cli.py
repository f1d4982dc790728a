"""The ``bellmask`` command: a table of subcommands, each imported when it is called.

Exit codes: 0 done, 1 training failed or something is broken (a full disk), 2 bad input, 130/143
stopped by a signal (the run can be resumed).
"""

from __future__ import annotations

import errno
import json
import os
import re
import sys
from collections.abc import Sequence
from importlib import import_module

from bellmask import __version__
from bellmask.config.presets import resolve, start_config, wants_help
from bellmask.utils.console import finish_telling, tell
from bellmask.utils.errors import (
    LostProcessError,
    SavingError,
    TrainingError,
    UserError,
    look_up,
)

DISK_FAILURES = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
"""Of an OSError: not what the user gave, so the exit code is 1."""


OUT_OF_MEMORY = r"out of memory|can't allocate memory"
"""What torch says, on GPUs and on CPUs."""
LESS_MEMORY = (
    "for a training try a smaller --train.microbatch-size or --scale.recompute block ('bellmask "
    "plan' says what fits), for anything else a smaller --batch-size"
)


CONFIG_HELP = """Show or compare resolved options.

usage: bellmask config show PRESET [options]
       bellmask config diff PRESET|FILE|RUN PRESET|FILE|RUN

examples:
  bellmask config show lm1b --optim.lr 1e-4
  bellmask config diff tiny_base tiny_bell
  bellmask config diff lm1b runs/mine/config.json
"""


def config(args: list[str]) -> int:
    """Show or compare resolved options."""
    if not args or wants_help(args):
        print(CONFIG_HELP)
        return 0
    action = args.pop(0)
    look_up("config action", action, {"show": 0, "diff": 0})
    if action == "show":
        _, resolved = resolve(args, "bellmask config show")
        print(json.dumps(resolved.resolved().to_dict(), indent=2))
        return 0
    if len(args) != 2:
        raise UserError("config diff needs two presets, config files or run folders")
    left, right = (start_config(name).resolved().flat() for name in args)
    for option in left:
        if left[option] != right[option]:
            print(f"{option}: {json.dumps(left[option])} -> {json.dumps(right[option])}")
    return 0


def presets(args: list[str]) -> int:
    """List the presets."""
    if wants_help(args):
        print("List the presets.\n\nusage: bellmask presets\n\nexample:\n  bellmask presets")
        return 0
    if args:
        raise UserError(f"presets takes no arguments, got {' '.join(args)}")
    from bellmask.config.presets import PRESETS

    for name, build in PRESETS.items():
        if not name.endswith(("_base", "_bell", "_arm", "_aoarm")):
            print(f"{name:<15} {(build.__doc__ or '').strip().splitlines()[0]}")
    print("each but arm_tiny also as NAME_base (NELBO, uniform times) and NAME_bell (as NAME);")
    print("those before arm_tiny also as causal models: NAME_arm, NAME_sigma_arm, NAME_aoarm")
    return 0


COMMANDS: dict[str, tuple[str, str]] = {
    "demo": ("bellmask.compare.compare:demo_main", "Base against bell on a laptop, in minutes."),
    "prepare": ("bellmask.data.prepare:prepare_main", "Turn a corpus into training blocks."),
    "data": (
        "bellmask.data.prepare:data_main",
        "List named corpora, or show a corpus's data card.",
    ),
    "plan": ("bellmask.plan.plan:main", "Say what a run will need: memory, storage, time."),
    "train": ("bellmask.train.train:main", "Train a model."),
    "compare": (
        "bellmask.compare.compare:main",
        "Measure how many times sooner a variant reaches the reference's NLL.",
    ),
    "report": (
        "bellmask.compare.compare:report_main",
        "Rebuild a comparison's report from run folders.",
    ),
    "evaluate": (
        "bellmask.evaluate.likelihood:main",
        "Measure a run's NELBO, perplexity and NLL by context count.",
    ),
    "generate": ("bellmask.generate.generate:main", "Sample or infill text with a run."),
    "chat": ("bellmask.generate.chat:main", "Talk to a run; its answers are unmasked live."),
    "judge": ("bellmask.evaluate.judge:main", "Compare two models' answers by a judge."),
    "lm-eval": ("bellmask.evaluate.lm_eval:main", "Run lm-eval's tasks on a run."),
    "analyze": (
        "bellmask.analyze.base:main",
        "Run one of the paper's analyses: gradients, contexts, orders, masks, entropies.",
    ),
    "import": (
        "bellmask.exchange.mdlm:main",
        "Make a run of a checkpoint in the layout of mdlm and duo.",
    ),
    "export": (
        "bellmask.exchange.huggingface:main",
        "Write a run for Hugging Face or in mdlm's layout.",
    ),
    "config": ("bellmask.cli:config", "Show or compare resolved options."),
    "presets": ("bellmask.cli:presets", "List the presets."),
}
"""Command: (the function that takes its arguments and returns an exit code, what it does)."""


def _overview() -> str:
    lines = ["bellmask trains masked diffusion language models, fast.", ""]
    lines += ["usage: bellmask COMMAND ...    (bellmask COMMAND --help says more)", ""]
    lines += [f"  {name:<10} {summary}" for name, (_, summary) in COMMANDS.items()]
    lines += ["", "examples:", "  bellmask train tiny", "  bellmask evaluate runs/tiny-..."]
    lines += ["  bellmask generate runs/tiny-... --prefix 'The '", "  bellmask --version"]
    return "\n".join(lines)


def run_command(argv: Sequence[str]) -> int:
    """Run one command line; errors a user can mend become one message and exit code 2."""
    args = list(argv)
    if not args or args[0] in ("-h", "--help", "help"):
        print(_overview())
        return 0
    if args[0] in ("-V", "--version", "version"):
        print(f"bellmask {__version__}")
        return 0
    speaks = os.environ.get("LOCAL_RANK", "0") == "0"  # one process of each machine
    try:
        module, function = look_up("command", args[0], COMMANDS)[0].split(":")
        return getattr(import_module(module), function)(args[1:])
    except UserError as error:
        code, message = 2, str(error)
    except BrokenPipeError:  # whoever read our output has had enough
        return 0
    except OSError as error:
        code = 1 if error.errno in DISK_FAILURES else 2
        message = f"{error.strerror or error}: {error.filename or ''}".rstrip(": ")
    except (TrainingError, SavingError, LostProcessError) as error:
        code, message = 1, str(error)
    except (MemoryError, RuntimeError) as error:
        if not re.search(OUT_OF_MEMORY, str(error)) and not isinstance(error, MemoryError):
            raise
        told = (str(error) or "malloc failed").splitlines()[0]
        code, message = 1, f"not enough memory ({told}); {LESS_MEMORY}"
        speaks = True  # it may be this process alone
    except KeyboardInterrupt as stop:
        code, message = 130, str(stop) or "interrupted"
    if speaks:
        from bellmask.utils.console import visible_lines

        tell(f"error: {visible_lines(message)}", sys.stderr)
    return code


def main() -> None:
    """Entry point."""
    from bellmask.utils.allocator import keep_freed_memory

    keep_freed_memory()
    code = run_command(sys.argv[1:])
    finish_telling()
    sys.exit(code)
