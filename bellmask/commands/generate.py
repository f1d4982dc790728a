"""``bellmask generate``: its options and what they ask for.

Samples, continuations and infillings are in ``continuing.py``, answers to prompts in ``ask.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from bellmask.commands.generating import load_noted, settings_of
from bellmask.config.presets import parse_command
from bellmask.generate.settings import Sampling
from bellmask.utils.errors import UserError
from bellmask.utils.files import check_folder

if TYPE_CHECKING:
    from bellmask.config.config import RunConfig


@dataclass(frozen=True)
class GenerateOptions:
    """Sample text: from nothing, after a prefix, into the gaps of a canvas, or as an answer.

    Examples:
    bellmask generate runs/bell --num 4 --steps 64

    bellmask generate runs/bell --prefix 'The history of ' --length 64 --rule most_confident

    bellmask generate runs/bell --canvas 'The [MASK*12] of the war [MASK*8].' --watch

    bellmask generate runs/bell --num 100 --format jsonl --output samples.jsonl

    bellmask generate runs/bell --rule first_hitting --trace trace.json

    bellmask generate runs/base runs/bell --prompts prompts.txt --side-by-side

    bellmask generate runs/sft --prompt 'What is a bell?' --num 3

    bellmask generate runs/sft --prompts questions.jsonl --format jsonl --output answers.jsonl
    """

    runs: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """Run folder; several with --side-by-side."""
    num: int = 1
    """Samples; of each prompt with --prompts."""
    length: int | None = None
    """Tokens per sample; default: the run's block length. Of an answer: of the answer alone;
    default: what most of the training examples needed. Not with --canvas."""
    prefix: str | None = None
    """Given beginning."""
    canvas: str | None = None
    """Text with gaps: [MASK*12] stands for 12 tokens to generate. Given tokens are kept."""
    prompt: str | None = None
    """Ask, in the form of the run's training examples, and print the answer alone. Taken as it is
    typed: for a line break write one (in bash $'one\\ntwo')."""
    prompts: str | None = None
    """File of prompts. For a run fine-tuned on prompts: questions, one per line, or JSON lines with
    "prompt" or "messages". For any other run: beginnings to continue, one per line, or JSON lines
    with "prompt" or "canvas"."""
    side_by_side: bool = False
    """Compare runs on the same prompts: a table, comparison.html and comparison.md in --output."""
    sampling: Annotated[Sampling, tyro.conf.arg(name="")] = field(default_factory=Sampling)
    """How to sample."""
    seed: int = 0
    """Sample i depends on the seed and i alone, not on the batch; with --prompts samples are
    counted through."""
    batch_size: int = 64
    """Samples per forward pass."""
    watch: bool = False
    """Show the text being unmasked."""
    fps: float | None = None
    """Steps per second of --watch at most, 12 by default; 0 does not wait."""
    trace: str | None = None
    """File for the trajectory; 'bellmask report trace FILE' makes a page and a strip of it."""
    format: Literal["text", "jsonl"] = "text"
    """text, or one JSON object per line: text, ids and prompt; of answers all keys of the prompt's
    line, response, sample, num_tokens and prompt_cut."""
    output: str | None = None
    """File to write (with --side-by-side a folder); default: the screen."""
    checkpoint: str = "latest"
    """latest, best, or a step."""
    weights: Literal["auto", "ema", "raw"] = "auto"
    """auto: the moving average where there is one."""
    device: str = "auto"
    """auto, cpu, cuda, ..."""


def _check(options: GenerateOptions) -> None:
    if not options.runs:
        raise UserError("generate needs a run folder: bellmask generate RUN")
    if options.num < 1 or options.batch_size < 1:
        raise UserError("--num and --batch-size must be at least 1")
    options.sampling.check()
    if options.canvas is not None and (options.prefix is not None or options.length is not None):
        raise UserError("--canvas says all: it goes with neither --prefix nor --length")
    if options.length is not None and options.length < 1:
        raise UserError(f"--length must be at least 1, got {options.length}")
    sources = ("prefix", "canvas", "prompt", "prompts")
    given = [f"--{name}" for name in sources if getattr(options, name) is not None]
    if len(given) > 1:
        raise UserError(f"{' and '.join(given)} do not go together: one says what is given")
    if options.prompts is not None and not Path(options.prompts).is_file():
        raise UserError(f"there is no file of prompts {options.prompts}")
    if len(options.runs) > 1 and not options.side_by_side:
        raise UserError("several runs are compared with --side-by-side")
    if options.side_by_side and (options.trace or options.watch or options.format == "jsonl"):
        raise UserError("--side-by-side goes with neither --watch, --trace nor --format jsonl")
    if options.fps is not None and not options.watch:
        raise UserError("--fps goes with --watch")
    _check_places(options)


def _check_places(options: GenerateOptions) -> None:
    """Where results go: found out before anything is generated."""
    if options.side_by_side:
        check_folder(options.output, "--output")
    files = {"--trace": options.trace}
    if not options.side_by_side:
        files["--output"] = options.output
    for name, path in files.items():
        if path is not None and not Path(path).parent.is_dir():
            raise UserError(f"there is no folder {Path(path).parent} to write {name} into")
        if path is not None and Path(path).is_dir():
            raise UserError(f"{name} {path} is a folder; give a file")
    if options.trace and options.output and Path(options.trace) == Path(options.output):
        raise UserError(f"--trace and --output are the same file {options.trace}")


def run(args: Sequence[str]) -> int:
    """Generate and write."""
    options = parse_command(GenerateOptions, args, command="generate")
    _check(options)
    if options.side_by_side:
        return _side_by_side(options)
    loaded = load_noted(options, options.runs[0])
    if _is_asked(options, loaded.config):
        from bellmask.commands.ask import answer_and_write

        return answer_and_write(options, loaded)
    from bellmask.commands.continuing import continue_and_write

    return continue_and_write(options, loaded)


def _is_asked(options: GenerateOptions, config: RunConfig) -> bool:
    """True where an answer is wanted: for --prompt, and for --prompts of a fine-tuned run."""
    is_tuned = config.sft.train is not None
    return options.prompt is not None or (options.prompts is not None and is_tuned)


def _side_by_side(options: GenerateOptions) -> int:
    from bellmask.analyze.runs import by_folder, open_runs
    from bellmask.commands.ask import answered_beside, asked_texts
    from bellmask.commands.continuing import begun_texts, continued_beside
    from bellmask.report.side_by_side import show_side_by_side

    runs = open_runs(options.runs)
    are_asked = {str(run.folder): _is_asked(options, run.config) for run in runs}
    if len(set(are_asked.values())) > 1:
        odd = ", ".join(name for name, is_asked in are_asked.items() if not is_asked)
        raise UserError(
            f"{odd}: not fine-tuned on prompts, so --prompts are beginnings there and questions "
            "for the others; ask all of them with --prompt"
        )
    is_asked = all(are_asked.values())
    texts = asked_texts(options) if is_asked else begun_texts(options)
    write = answered_beside if is_asked else continued_beside
    columns: dict[str, list[list[str]]] = {}
    for name, folder in by_folder(options.runs).items():
        loaded = load_noted(options, str(folder))
        is_causal = loaded.framework.is_causal
        sampling = options.sampling.for_causal() if is_causal else options.sampling
        title = f"{name} (token by token)" if is_causal else name
        columns[title] = write(options, loaded, sampling, name)
    settings = settings_of(options, is_answer=is_asked)
    line = ", ".join(f"{name} {value}" for name, value in settings.items())
    show_side_by_side(texts, columns, Path(options.output) if options.output else None, line)
    return 0
