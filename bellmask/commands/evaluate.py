"""``bellmask evaluate``: numbers, a table and a plot for one run."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from bellmask.config.presets import parse_command, take_option
from bellmask.utils.errors import UserError, look_up

if TYPE_CHECKING:
    from bellmask.data.blocks import Blocks
    from bellmask.storage.loading import Loaded


@dataclass(frozen=True)
class EvaluateOptions:
    """Measure a run: NELBO per token ± standard error (the exact NLL of an ARM or sigma-ARM),
    perplexity, bits per byte, NLL by context count, beside the cross-entropy of the unigram and of
    each position's own distribution.

    Examples:
    bellmask evaluate runs/bell

    bellmask evaluate runs/bell --draws 8 --blocks 0

    bellmask evaluate runs/bell --data other.txt --checkpoint best

    Suites, each with options of its own (add --help):
    bellmask evaluate runs/base runs/bell --suite zero-shot

    bellmask evaluate runs/base runs/bell --suite generative

    bellmask evaluate runs/base runs/bell --suite paper
    """

    run: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """Run folder."""
    checkpoint: str = "latest"
    """latest, best, or a step."""
    weights: Literal["auto", "ema", "raw"] = "auto"
    """auto: the moving average where there is one."""
    data: str | None = None
    """Text to measure on (path or glob) instead of the run's validation text."""
    blocks: int = 2048
    """Blocks to use, spread evenly over the text; 0 means all."""
    draws: int = 4
    """Masks per block; 2 or more cover all context counts of each block. For an AoARM orders; an
    exact NLL has none."""
    batch_size: int = 64
    """Blocks per forward pass."""
    seed: int = 1234
    """Decides masks and orders."""
    out: str | None = None
    """Folder for evaluation.json, context_curve.png/.svg and blocks.npz; default RUN/evaluation,
    or RUN/evaluation-NAME for --data NAME."""
    device: str = "auto"
    """auto, cpu, cuda, ..."""


SUITES = {
    "zero-shot": "bellmask.commands.zero_shot",
    "generative": "bellmask.commands.generative",
    "paper": "bellmask.commands.paper_suite",
}
"""Suites by name; the module's ``run(args)`` is the command, with options of its own."""


def run(args: Sequence[str]) -> int:
    """Evaluate, print tables, write files; or hand over to a suite."""
    rest = list(args)
    if suite := take_option(rest, "--suite"):
        if len(suite) > 1:
            raise UserError(f"one --suite at a time, got {' and '.join(suite)}")
        return import_module(look_up("suite", suite[-1], SUITES)).run(rest)
    options = parse_command(EvaluateOptions, rest, command="evaluate")
    if options.draws < 1 or options.batch_size < 1 or options.blocks < 0:
        raise UserError("--draws and --batch-size must be at least 1, --blocks at least 0")

    from bellmask.evaluate.context_curve import binned_curve, exact_curve, references
    from bellmask.evaluate.likelihood import scorer_of
    from bellmask.storage.loading import load

    loaded = load(
        options.run, checkpoint=options.checkpoint, weights=options.weights, device=options.device
    )
    train_blocks, blocks = _blocks(loaded, options)
    result = _with_progress(loaded, blocks, options)
    length = blocks.block_length
    ends = [n for n in dict.fromkeys([0, 2, 8, length - 4, length - 1]) if 0 <= n < length]
    exact = exact_curve(
        scorer_of(loaded, blocks.slice(0, min(512, len(blocks)))),
        ends,
        seed=options.seed,
        batch_size=options.batch_size,
    )
    known = None
    if train_blocks is not None:
        known = references(train_blocks, blocks, loaded.tokenizer.num_tokens)
    report: dict[str, Any] = {
        "run": loaded.folder.name,
        "step": loaded.step,
        "data": options.data or "the run's validation text",
        "data_fingerprint": blocks.fingerprint,
        "seed": options.seed,
        **result.summary(),
        "unigram_cross_entropy": known.unigram if known else None,
        "position_wise_cross_entropy": known.position_wise if known else None,
        "context_curve": [asdict(point) for point in binned_curve(result)],
        "exact_contexts": [asdict(point) for point in exact],
    }
    own = f"evaluation-{Path(options.data).stem}" if options.data else "evaluation"
    folder = Path(options.out) if options.out else loaded.folder / own
    folder.mkdir(parents=True, exist_ok=True)
    result.save(folder / "blocks.npz")
    _write(report, folder)
    _show(report, folder)
    return 0


def _blocks(loaded: Loaded, options: EvaluateOptions) -> tuple[Blocks | None, Blocks]:
    from bellmask.data.prepare import prepare

    if options.data is not None:
        data = replace(loaded.config.data, valid=options.data)
        valid = prepare(data, loaded.tokenizer, "valid")
        train = _training_blocks(loaded)
    else:
        train, valid = loaded.blocks()
        loaded.check_same_data(train)
    return train, valid.spread(options.blocks).starting_at(loaded.model.first_maskable)


def _training_blocks(loaded: Loaded) -> Blocks | None:
    """For the reference cross-entropies; None where the training text is gone."""
    try:
        train, _ = loaded.blocks()
        loaded.check_same_data(train)
    except UserError as error:
        print(f"note: no unigram reference without the training text: {error}", file=sys.stderr)
        return None
    return train


def _with_progress(loaded: Loaded, blocks: Blocks, options: EvaluateOptions) -> Any:
    from bellmask.evaluate.likelihood import evaluate_run
    from bellmask.utils.console import progress_bar

    with progress_bar("evaluating", "blocks", len(blocks)) as advance:
        return evaluate_run(
            loaded,
            blocks,
            draws=options.draws,
            seed=options.seed,
            batch_size=options.batch_size,
            on_batch=advance,
        )


def _write(report: dict[str, Any], folder: Path) -> None:
    from bellmask.report.figures import plot_context_curve
    from bellmask.utils.files import write_text

    write_text(folder / "evaluation.json", json.dumps(report, indent=1) + "\n")
    plot_context_curve(
        report["context_curve"],
        {
            name: report[key]
            for name, key in (
                ("unigram", "unigram_cross_entropy"),
                ("position-wise", "position_wise_cross_entropy"),
            )
            if report[key] is not None
        },
        folder / "context_curve",
        title=f"{report['run']}, step {report['step']}, on {report['data']}: "
        f"{report['nll']:.4f} nats/token",
    )


def _number(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.4f}"


def _show(report: dict[str, Any], folder: Path) -> None:
    from bellmask.utils.console import print_plain_table

    bits = report["bits_per_byte"]
    what, bound = ("exact NLL", "") if report["is_exact"] else ("NELBO", " (bound)")
    print_plain_table(
        f"{report['run']}, step {report['step']}, on {report['data']}",
        ["quantity", "value"],
        [
            [f"{what}, nats per token", f"{report['nll']:.4f} ± {_number(report['nll_se'])}"],
            [f"perplexity{bound}", f"{report['perplexity']:.3f}"],
            [f"bits per byte{bound}", _number(bits)],
            ["unigram cross-entropy", _number(report["unigram_cross_entropy"])],
            ["position-wise cross-entropy", _number(report["position_wise_cross_entropy"])],
            ["blocks x draws", f"{report['num_blocks']} x {report['num_draws']}"],
        ],
    )
    for title, points in (
        ("NLL by context count: bins of the draws above", report["context_curve"]),
        ("NLL at exact context counts: the first blocks, 512 at most", report["exact_contexts"]),
    ):
        rows = [
            [
                str(p["low"]) if p["low"] == p["high"] else f"{p['low']}-{p['high']}",
                f"{p['nll']:.4f}",
                f"{p['standard_error']:.4f}",
                str(p["num_draws"]),
            ]
            for p in points
        ]
        if rows:  # few blocks make no bins
            print_plain_table(title, ["observed tokens", "nats", "standard error", "draws"], rows)
    print(f"written: {folder}/evaluation.json, context_curve.png, context_curve.svg, blocks.npz")
