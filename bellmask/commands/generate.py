"""``bellmask generate``: samples, continuations and infillings, watched or compared."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from bellmask.commands.options import parse_command
from bellmask.errors import UserError
from bellmask.files import check_folder
from bellmask.generate.prompts import Prompt, read_prompts
from bellmask.generate.settings import DEFAULT_STEPS, Sampling

if TYPE_CHECKING:
    from bellmask.generate.canvas import Canvas
    from bellmask.generate.engine import Generation
    from bellmask.generate.steps import OnStep
    from bellmask.run import Run

SEPARATOR = "\n--------\n"


@dataclass(frozen=True)
class GenerateOptions:
    """Sample text: from nothing, after a prefix, or into the gaps of a canvas.

    Examples:
    bellmask generate runs/bell --num 4 --steps 64

    bellmask generate runs/bell --prefix 'The history of ' --length 64 --rule most_confident

    bellmask generate runs/bell --canvas 'The [MASK*12] of the war [MASK*8].' --watch

    bellmask generate runs/bell --num 100 --format jsonl --output samples.jsonl

    bellmask generate runs/bell --rule first_hitting --trace trace.json

    bellmask generate runs/base runs/bell --prompts prompts.txt --side-by-side
    """

    runs: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """Run folder; several with --side-by-side."""
    num: int = 1
    """Samples; of each prompt with --prompts."""
    length: int | None = None
    """Tokens per sample; default: the run's block length. Not with --canvas."""
    prefix: str | None = None
    """Given beginning."""
    canvas: str | None = None
    """Text with gaps: [MASK*12] stands for 12 tokens to generate. Given tokens are kept."""
    prompts: str | None = None
    """File of prompts: one beginning per line, or JSON lines with "prompt" or "canvas"."""
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
    """text, or one JSON object per line with text, ids and prompt."""
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
    if options.prompts is not None and (options.prefix or options.canvas is not None):
        raise UserError("--prompts has the beginnings: it goes with neither --prefix nor --canvas")
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
    prompts = _prompts(options)
    if options.side_by_side:
        return _side_by_side(options, prompts)
    loaded = _load(options, options.runs[0])
    canvases = [_canvas(loaded, prompt, options) for prompt in prompts]
    made = _generate(loaded, canvases, options, options.sampling, "generating")
    texts = [loaded.texts(one) for one in made]
    _write(options, prompts, texts, made)
    calls, nfe = sum(one.num_calls for one in made), sum(one.nfe for one in made) / len(made)
    print(f"{calls} network calls, {nfe:.1f} per sample", file=sys.stderr)
    return 0


def _prompts(options: GenerateOptions) -> list[Prompt]:
    if options.prompts is None:
        return [Prompt(options.prefix, options.canvas)]
    return read_prompts(Path(options.prompts))


def _load(options: GenerateOptions, name: str) -> Run:
    from bellmask.exchange.loading import load

    loaded = load(
        name, checkpoint=options.checkpoint, weights=options.weights, device=options.device
    )
    if loaded.config.data.document_attention:
        print(
            "note: the run was trained with attention inside documents; here all of a row is seen",
            file=sys.stderr,
        )
    return loaded


def _canvas(loaded: Run, prompt: Prompt, options: GenerateOptions) -> Canvas:
    length = None if prompt.canvas is not None else options.length
    canvas = loaded.canvas(prefix=prompt.prompt or "", template=prompt.canvas, length=length)
    if len(canvas) > loaded.config.data.block_length:
        print(
            f"note: the canvas has {len(canvas)} tokens, the run was trained on "
            f"{loaded.config.data.block_length}",
            file=sys.stderr,
        )
    return canvas


def _generate(
    loaded: Run,
    canvases: Sequence[Canvas],
    options: GenerateOptions,
    sampling: Sampling,
    title: str,
) -> list[Generation]:
    """All samples of all canvases, with a progress bar, or shown live."""
    from bellmask.generate.steps import to_all
    from bellmask.generate.trace import Recorder
    from bellmask.report.console import progress_bar
    from bellmask.report.watch import Watch

    recorder = Recorder(loaded.tokenizer) if options.trace is not None else None
    made: list[Generation] = []

    def fill_all(on_step: OnStep | None, advance: Callable[[int], None]) -> None:
        for canvas in canvases:

            def tell(done: int, before: int = options.num * len(made)) -> None:
                advance(before + done)

            made.append(
                loaded.generate(
                    canvas,
                    options.num,
                    sampling,
                    seed=options.seed,
                    first_sample=options.num * len(made),
                    batch_size=options.batch_size,
                    on_batch=tell,
                    on_step=on_step,
                )
            )

    receivers = [] if recorder is None else [recorder]
    if options.watch:
        keep_last = not (sys.stdout.isatty() and options.output is None)  # the texts follow
        with Watch(
            loaded.tokenizer,
            title=loaded.folder.name,
            fps=12.0 if options.fps is None else options.fps,
            keep_last=keep_last,
        ) as watch:
            fill_all(to_all(*receivers, watch), lambda done: None)
    else:
        with progress_bar(title, "samples", options.num * len(canvases)) as advance:
            fill_all(to_all(*receivers) if receivers else None, advance)
    if recorder is not None:
        assert options.trace is not None
        texts = [text for one in made for text in loaded.texts(one)]
        title = f"{loaded.folder.name}, step {loaded.step}"
        recorder.save(Path(options.trace), title, _settings(options), texts)
    return made


def _settings(options: GenerateOptions) -> dict[str, Any]:
    """How the texts were made, for who reads them."""
    sampling, plain = options.sampling, asdict(Sampling())
    asked = {name: v for name, v in asdict(sampling).items() if v != plain[name]}
    steps = {"steps": sampling.steps or DEFAULT_STEPS} if sampling.has_steps else {}
    return {"rule": sampling.rule, **steps, **asked, "seed": options.seed}


def _write(
    options: GenerateOptions,
    prompts: Sequence[Prompt],
    texts: Sequence[Sequence[str]],
    made: Sequence[Generation],
) -> None:
    if options.format == "jsonl":
        lines = [
            json.dumps(
                {
                    "sample": i,
                    **({"prompt": prompt.text} if options.prompts else {}),
                    "text": text,
                    "ids": ids,
                },
                ensure_ascii=False,
            )
            for n, (prompt, some, one) in enumerate(zip(prompts, texts, made, strict=True))
            for i, (text, ids) in enumerate(
                zip(some, one.ids_BL.tolist(), strict=True), start=n * options.num
            )
        ]
        content = "\n".join(lines) + "\n"
    else:
        content = SEPARATOR.join(text for some in texts for text in some) + "\n"
    if options.output is None:
        sys.stdout.write(content)
    else:
        from bellmask.files import write_text

        write_text(Path(options.output), content)


def _side_by_side(options: GenerateOptions, prompts: Sequence[Prompt]) -> int:
    from bellmask.analyze.runs import by_folder
    from bellmask.report.side_by_side import show_side_by_side

    columns: dict[str, list[list[str]]] = {}
    for name, folder in by_folder(options.runs).items():
        loaded = _load(options, str(folder))
        sampling, is_causal = options.sampling, loaded.framework.is_causal
        canvases = [_canvas(loaded, prompt, options) for prompt in prompts]
        made = _generate(
            loaded,
            canvases,
            options,
            sampling.for_causal() if is_causal else sampling,
            f"generating with {name}",
        )
        title = f"{name} (token by token)" if is_causal else name
        columns[title] = [loaded.texts(one) for one in made]
    settings = ", ".join(f"{name} {value}" for name, value in _settings(options).items())
    out = Path(options.output) if options.output else None
    show_side_by_side([prompt.text for prompt in prompts], columns, out, settings)
    return 0
