"""The ``bellmask`` command: a table of subcommands, each imported when it is called.

Exit codes: 0 done, 1 training failed or something is broken (a full disk), 2 bad input, 130/143
stopped by a signal (the run can be resumed).
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import re
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Annotated, Literal

import tyro

from bellmask import __version__
from bellmask.config.command_line import EVERY_COMMAND, parse_command, parse_run_command
from bellmask.config.presets import PRESETS
from bellmask.utils import errors
from bellmask.utils.console import (
    announced,
    finish_telling,
    messages_on_stderr,
    tell,
    visible_lines,
)

OUT_OF_MEMORY = r"out of memory|can't allocate memory"
"""What torch says, on GPUs and on CPUs."""
GRACE_SECONDS = 5.0
LESS_MEMORY = (
    "to train, try a smaller --train.microbatch-size or --scale.recompute block ('bellmask "
    "plan' shows what fits); for anything else, a smaller --batch-size"
)

COMMANDS = {
    "demo": ("compare.compare:demo_main", "Compare base and bell on a laptop in minutes."),
    "prepare": ("data.prepare:prepare_main", "Turn a corpus into training blocks."),
    "data": ("data.prepare:data_main", "List named corpora, or show a corpus's data card."),
    "plan": ("plan.plan:main", "Estimate what a run needs: memory, storage, time."),
    "train": ("train.train:main", "Train a model."),
    "resume": ("cli:resume_main", "Resume a training."),
    "compare": ("compare.compare:main", "Measure the speed-up of variants over a reference."),
    "report": ("compare.compare:report_main", "Rebuild a comparison's report from run folders."),
    "evaluate": (
        "evaluate.likelihood:main",
        "Measure NELBO, perplexity and NLL by context count; or run a suite.",
    ),
    "generate": ("generate.generate:main", "Sample or infill text with a run."),
    "chat": ("generate.chat:main", "Chat with a run; watch its answers being unmasked."),
    "judge": ("evaluate.judge:main", "Compare two models' answers with a judge."),
    "lm-eval": ("evaluate.lm_eval:main", "Run lm-eval's tasks on a run."),
    "analyze": (
        "analyze.base:main",
        "Run one of the paper's analyses: gradients, contexts, orders, masks, entropies.",
    ),
    "import": ("exchange.mdlm:main", "Import a checkpoint in the format of mdlm and duo."),
    "export": ("exchange.huggingface:main", "Export a run for Hugging Face or mdlm."),
    "config": ("config.command_line:config_main", "Show or compare resolved options."),
    "presets": ("config.command_line:presets_main", "List the presets."),
    "completion": ("cli:completion_main", "Print a completion script for bash or zsh."),
}
"""Subcommands: module:function, which takes the arguments and returns an exit code; what it does.
Modules are imported when they are called."""


def _overview() -> str:
    lines = ["bellmask trains masked diffusion language models, fast.", ""]
    lines += ["usage: bellmask COMMAND ...    (see bellmask COMMAND --help)", ""]
    lines += [f"  {name:<10} {summary}" for name, (_, summary) in COMMANDS.items()]
    lines += [
        "",
        EVERY_COMMAND,
        "",
        "examples:",
        "  bellmask train tiny",
        "  bellmask evaluate runs/tiny-...",
    ]
    lines += ["  bellmask generate runs/tiny-... --prefix 'The '", "  bellmask --version"]
    return "\n".join(lines)


def run_command(argv: Sequence[str]) -> int:
    """Run one command line; errors that a user can fix become one message and exit code 2."""
    args, level = _take_verbosity(argv)
    if not args or args[0] in ("-h", "--help", "help"):
        print(_overview())
        return 0
    if args[0] in ("-V", "--version", "version"):
        print(f"bellmask {__version__}")
        return 0
    speaks = os.environ.get("LOCAL_RANK", "0") == "0"  # one process of each machine
    try:
        module, _, function = errors.look_up("command", args[0], COMMANDS)[0].partition(":")
        with announced("loading PyTorch"):
            command = import_module(f"bellmask.{module}")
        with messages_on_stderr(level):
            return getattr(command, function)(args[1:])
    except errors.UserError as error:
        code, message = 2, str(error)
        if level == logging.DEBUG:
            traceback.print_exc()
    except BrokenPipeError:  # the reader closed the pipe
        return 0
    except OSError as error:
        code = 1 if error.errno in errors.DISK_FAILURES else 2
        message = f"{error.strerror or error}: {error.filename or ''}".rstrip(": ")
    except (errors.TrainingError, errors.SavingError, errors.LostProcessError) as error:
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
        tell(f"error: {visible_lines(message)}", sys.stderr)
    elif "TORCHELASTIC_RUN_ID" in os.environ:
        time.sleep(GRACE_SECONDS)  # torchrun ends all when one ends: the one that prints goes first
    return code


HAVE_QUIET = ("demo", "train", "resume", "compare")
"""Commands that also have an option of that name."""


def _take_verbosity(argv: Sequence[str]) -> tuple[list[str], int]:
    """(arguments without --quiet and --verbose, level of messages); not after ``--``."""
    end = argv.index("--") if "--" in argv else len(argv)
    args = [arg for arg in argv[:end] if arg not in ("--quiet", "--verbose")]
    is_quiet, is_verbose = (name in argv[:end] for name in ("--quiet", "--verbose"))
    args += ["--quiet"] if is_quiet and args and args[0] in HAVE_QUIET else []
    level = logging.WARNING if is_quiet else logging.DEBUG if is_verbose else logging.INFO
    return [*args, *argv[end:]], level


# ``bellmask resume RUN`` is ``bellmask train RUN --resume yes``.


@dataclass(frozen=True)
class ResumeOptions:
    """Resume a training from its latest checkpoint.

    Options of a run that do not change its result can follow, --train.steps for example.

    Examples:
    bellmask resume runs/bell

    bellmask resume runs/bell --train.steps 2000 --train.device cpu

    torchrun --nproc-per-node 2 -m bellmask resume runs/bell
    """

    run: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """Run folder."""


def resume_main(args: Sequence[str]) -> int:
    options, rest = parse_run_command(ResumeOptions, args, command="resume", needs="a run folder")
    if not (Path(options.run) / "config.json").exists():
        raise errors.UserError(f"{options.run} is not a run folder; see bellmask train")
    train = import_module("bellmask.train.train")
    return train.main([options.run, "--resume", "yes", *rest])


# Shell completion: a script with all commands and their options, generated on request.


@dataclass(frozen=True)
class CompletionOptions:
    """Print a script that completes commands, presets, options and files in a shell.

    Examples:
    bellmask completion bash > ~/.local/share/bash-completion/completions/bellmask

    bellmask completion zsh > ~/.bellmask.zsh    (and in ~/.zshrc: source ~/.bellmask.zsh)
    """

    shell: Annotated[Literal["bash", "zsh"], tyro.conf.Positional]
    """The shell."""


def completion_main(args: Sequence[str]) -> int:
    options = parse_command(CompletionOptions, args, command="completion")
    os.environ["COLUMNS"] = "80"  # help in one column: a row begins with its option
    if options.shell == "zsh":
        print("autoload -U +X compinit bashcompinit && compinit && bashcompinit")
    print(_script({name: _words(name) for name in COMMANDS}))
    return 0


def help_text(*words: str) -> str:
    """The help text of a command."""
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.suppress(SystemExit):
        run_command([*words, "--help"])
    return out.getvalue()


def _words(name: str) -> list[str]:
    """What can follow a command, from its help: actions, analyses, suites, presets, options."""
    about = help_text(name)
    actions = re.findall(rf"bellmask {name} ([a-z]+)(?: --help| [A-Z]|$)", about, re.MULTILINE)
    actions += re.findall(r"^  ([a-z]+(?:-[a-z]+)*)  ", about, re.MULTILINE)
    named = re.findall(r"--suite ([a-z][\w-]+)", about)
    texts = [about, *(help_text(name, action) for action in actions)]
    texts += [help_text(name, "--suite", suite) for suite in named]
    words = [*actions, *named]
    if named:
        words += ["--suite"]
        words += import_module(f"bellmask.{COMMANDS[name][0].partition(':')[0]}").SUITES
    words += PRESETS if " PRESET" in about else []
    words += ["bash", "zsh"] if name == "completion" else []
    for row in re.findall(r"^\W (-.*?)(?:  |\n)", "\n".join(texts), re.MULTILINE):
        words += re.findall(r"--[a-z][\w.-]*\w", row)  # descriptions name other commands' too
    words += ["--quiet", "--verbose"]
    return list(dict.fromkeys(words))


def _script(words: dict[str, list[str]]) -> str:
    """For bash; zsh runs it too, by its bashcompinit."""
    cases = "\n".join(f"    {name}) found='{' '.join(they)}' ;;" for name, they in words.items())
    return f"""_bellmask() {{
  local current=${{COMP_WORDS[COMP_CWORD]}} found=''
  if [ "$COMP_CWORD" -eq 1 ]; then
    found='{" ".join(words)}'
  else
    case "${{COMP_WORDS[1]}}" in
{cases}
    esac
  fi
  COMPREPLY=($(compgen -W "$found" -- "$current"))
  if [ "$COMP_CWORD" -gt 1 ] && [[ $current != -* ]]; then
    COMPREPLY+=($(compgen -f -- "$current"))
  fi
}}
complete -o filenames -F _bellmask bellmask"""


def main() -> None:
    from bellmask.utils.libraries import keep_freed_memory

    keep_freed_memory()
    code = run_command(sys.argv[1:])
    finish_telling()
    sys.exit(code)
