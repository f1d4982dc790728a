"""``bellmask generate``: samples, continuations and infillings from one run."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from bellmask.commands.options import parse_command
from bellmask.errors import UserError

SEPARATOR = "\n--------\n"


@dataclass(frozen=True)
class GenerateOptions:
    """Sample text: from nothing, after a prefix, or into the gaps of a canvas.

    Examples:
    bellmask generate runs/bell --num 4 --steps 64

    bellmask generate runs/bell --prefix 'The history of ' --length 64

    bellmask generate runs/bell --canvas 'The [MASK*12] of the war [MASK*8].'

    bellmask generate runs/bell --num 100 --format jsonl --output samples.jsonl
    """

    run: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """Run folder."""
    num: int = 1
    """Samples."""
    steps: int = 128
    """Sampling steps; the network is called only in those in which a token appears. A causal model
    takes one per token, whatever this says."""
    length: int | None = None
    """Tokens per sample; default: the run's block length. Not with --canvas."""
    prefix: str | None = None
    """Given beginning."""
    canvas: str | None = None
    """Text with gaps: [MASK*12] stands for 12 tokens to generate. Given tokens are kept."""
    temperature: float = 1.0
    """Divides the logits; 0 takes the most likely token."""
    noise: Literal["float64", "float32"] = "float64"
    """Precision of the Gumbel noise; float32 lowers the effective temperature."""
    seed: int = 0
    """Sample i depends on the seed and i alone, not on the batch."""
    batch_size: int = 64
    """Samples per forward pass."""
    format: Literal["text", "jsonl"] = "text"
    """text, or one JSON object per line with text and ids."""
    output: str | None = None
    """File to write; default: the screen."""
    checkpoint: str = "latest"
    """latest, best, or a step."""
    weights: Literal["auto", "ema", "raw"] = "auto"
    """auto: the moving average where there is one."""
    device: str = "auto"
    """auto, cpu, cuda, ..."""


def _check(options: GenerateOptions) -> None:
    if options.num < 1 or options.steps < 1 or options.batch_size < 1:
        raise UserError("--num, --steps and --batch-size must be at least 1")
    if not 0 <= options.temperature < float("inf"):
        raise UserError(f"--temperature must not be negative, got {options.temperature}")
    if options.canvas is not None and (options.prefix is not None or options.length is not None):
        raise UserError("--canvas says all: it goes with neither --prefix nor --length")
    if options.output is not None and not Path(options.output).parent.is_dir():
        raise UserError(f"there is no folder {Path(options.output).parent} to write --output into")
    if options.length is not None and options.length < 1:
        raise UserError(f"--length must be at least 1, got {options.length}")


def run(args: Sequence[str]) -> int:
    """Generate and write."""
    options = parse_command(GenerateOptions, args, command="generate")
    _check(options)

    import torch

    from bellmask.report.console import progress_bar
    from bellmask.run import load_run

    loaded = load_run(
        options.run, checkpoint=options.checkpoint, weights=options.weights, device=options.device
    )
    canvas = loaded.canvas(
        prefix=options.prefix or "", template=options.canvas, length=options.length
    )
    if len(canvas) > loaded.config.data.block_length:
        print(
            f"note: the canvas has {len(canvas)} tokens, the run was trained on "
            f"{loaded.config.data.block_length}",
            file=sys.stderr,
        )
    with progress_bar("generating", "samples", options.num) as advance:
        made = loaded.generate(
            canvas,
            options.num,
            steps=options.steps,
            temperature=options.temperature,
            seed=options.seed,
            batch_size=options.batch_size,
            on_batch=advance,
            noise_dtype=getattr(torch, options.noise),
        )
    texts = loaded.texts(made)
    if options.format == "jsonl":
        rows = zip(texts, made.ids_BL.tolist(), strict=True)
        lines = [
            json.dumps({"sample": i, "text": text, "ids": ids}, ensure_ascii=False)
            for i, (text, ids) in enumerate(rows)
        ]
        content = "\n".join(lines) + "\n"
    else:
        content = SEPARATOR.join(texts) + "\n"
    if options.output is None:
        sys.stdout.write(content)
    else:
        from bellmask.train.checkpoint import write_text

        write_text(Path(options.output), content)
    return 0
