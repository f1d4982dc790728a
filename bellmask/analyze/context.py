"""Loss by number of observed tokens, at one checkpoint or from one to the next (Fig. 3).

Every block is asked in every bin of context counts, on contexts that depend on the seed alone: all
runs and checkpoints see the same ones, so differences are paired block by block.

B blocks, C bins, L block length.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray
from torch import Tensor

from bellmask.analyze.base import Analysis, StageOptions, finish_axes
from bellmask.data.blocks import Blocks
from bellmask.diffusion.frameworks import Framework
from bellmask.evaluate.likelihood import BlockScorer, references, scorer_of, weighted_mean
from bellmask.report.figures import COLOURS
from bellmask.storage.runs import NamedRun, check_same_text, chosen_steps, open_runs
from bellmask.utils.errors import UserError
from bellmask.utils.progress import Progress
from bellmask.utils.rng import stream_key, uniform
from bellmask.utils.stats import document_clusters
from bellmask.utils.table import Table


@dataclass(frozen=True, kw_only=True)
class ContextOptions(StageOptions):
    """Loss by number of observed tokens N_c (Sec. 3.2), of masked and causal runs on one text."""

    blocks: int = 512
    """Validation blocks, spread evenly over the text; 0 means all."""
    bins: int = 16
    """Bins of context counts, besides N_c = 0."""
    batch_size: int = 64
    """Blocks per forward pass."""


@dataclass(frozen=True, kw_only=True)
class CurveOptions(ContextOptions):
    """NLL by number of observed tokens, ARM against MDM: Fig. 3, left (Sec. 3.2).

    The last checkpoint of each run, or the last of --checkpoints; runs are on the same text, masked
    and causal ones. N_c = 0 is a bin of its own, set beside the cross-entropy of the training
    unigram and of each position's own training distribution, which is the optimum there for a
    masked model. An ARM's N_c = 0 is the first token of a block only: not the same thing.

    Examples:
    bellmask analyze context-curve runs/base runs/arm

    bellmask analyze context-curve runs/base --bins 32 --blocks 0
    """


@dataclass(frozen=True, kw_only=True)
class DropOptions(ContextOptions):
    """What each stage of training learned, by number of observed tokens: Fig. 3, right (Sec. 3.2).

    Runs on the same text, masked and causal ones: the fall of the NLL from each kept checkpoint to
    the next, with paired errors. Keep checkpoints with --checkpoint.keep-steps when training.

    Examples:
    bellmask analyze context-drop runs/base runs/arm

    bellmask analyze context-drop runs/base --checkpoints 100 300 1000
    """


# Measurement


def context_bins(length: int, num_bins: int) -> list[tuple[int, int]]:
    """(lowest, highest) N_c of each bin: 0 alone, then 1 .. L-1 in about equal parts."""
    if num_bins < 1:
        raise UserError(f"--bins must be at least 1, got {num_bins}")
    edges = np.unique(np.linspace(1, length, min(num_bins, max(1, length - 1)) + 1).astype(int))
    return [(0, 0), *((low, stop - 1) for low, stop in itertools.pairwise(edges.tolist()))]


def losses_by_bin(
    scorer: BlockScorer, bins: Sequence[tuple[int, int]], seed: int, batch_size: int
) -> NDArray[np.float64]:
    """[C, B]: each block's loss in each bin; nan where the block is too short for it."""
    length_B = scorer.blocks.num_maskable(slice(None))
    found = np.full((len(bins), len(length_B)), np.nan)
    for part in torch.arange(len(length_B)).split(batch_size):
        if scorer.framework.is_causal:
            found[:, part.numpy()] = _causal_bins(scorer, part, bins, seed)
            continue
        for number, (low, high) in enumerate(bins):
            is_long = length_B[part] > low
            index = part[is_long]
            if len(index):
                top = torch.minimum(length_B[index] - 1, torch.tensor(high))
                u = uniform(stream_key(seed, "context bin", number), index)
                context_B = low + ((top - low + 1) * u).long()
                key = stream_key(seed, "context masks", number)
                found[number, index.numpy()] = scorer.mean(index, context_B, key).numpy()
    return found


def _causal_bins(
    scorer: BlockScorer, part: Tensor, bins: Sequence[tuple[int, int]], seed: int
) -> NDArray[np.float64]:
    """All context counts come from one pass; a bin is their mean."""
    ce_BL = scorer.by_context(part, stream_key(seed, "context masks", 0)).numpy()
    length_B = scorer.blocks.num_maskable(part).numpy()
    ce_BL[np.arange(ce_BL.shape[1]) >= length_B[:, None]] = np.nan
    rows = []
    for low, high in bins:
        inside = ce_BL[:, low : high + 1]
        count = (~np.isnan(inside)).sum(1)
        with np.errstate(invalid="ignore"):
            rows.append(np.where(count > 0, np.nansum(inside, axis=1) / count, np.nan))
    return np.stack(rows)


def _points(
    values_CB: NDArray[np.float64], bins: Sequence[tuple[int, int]], blocks: Blocks
) -> list[dict[str, Any]]:
    """Token-weighted mean and standard error of each bin, clustered where documents span blocks."""
    points = []
    for (low, high), value_B in zip(bins, values_CB):
        mean = _mean(value_B, blocks)
        if mean is not None:
            points.append({"low": low, "high": high, **mean})
    return points


def _mean(value_B: NDArray[np.float64], blocks: Blocks) -> dict[str, float] | None:
    is_there = ~np.isnan(value_B)
    if is_there.sum() < 2:
        return None
    weight = blocks.num_maskable(slice(None)).double().numpy()[is_there]
    cluster = document_clusters(np.asarray(blocks.documents)[is_there])
    value, error = weighted_mean(value_B[is_there], weight, cluster)
    return {"value": value, "se": error}


def _measure(options: ContextOptions, progress: Progress, *, last_only: bool) -> dict[str, Any]:
    if options.blocks < 0 or options.blocks == 1 or options.batch_size < 1:
        raise UserError("--blocks must be 0 or at least 2, and --batch-size at least 1")
    runs = open_runs(options.runs)
    check_same_text(runs)
    steps = {run.name: chosen_steps(run, options.checkpoints) for run in runs}
    if last_only:
        steps = {name: kept[-1:] for name, kept in steps.items()}
    else:
        _check_several(runs, steps, options.checkpoints)
    first = runs[0].load(runs[0].steps[-1], options.device)
    train, valid = first.blocks()
    first.check_same_data(train)
    blocks = valid.spread(options.blocks)
    bins = context_bins(blocks.block_length, options.bins)
    known = references(train, blocks, first.tokenizer.num_tokens)
    progress.start(sum(map(len, steps.values())))
    found = []
    for run in runs:
        values = []
        for step in steps[run.name]:
            scorer = scorer_of(run.load(step, options.device), blocks)
            values.append(losses_by_bin(scorer, bins, options.seed, options.batch_size))
            progress.advance()
        stages = _stages(steps[run.name], values, bins, blocks)
        found.append(describe_run(run, scorer.framework, stages))
    return {
        "runs": found,
        "block_length": blocks.block_length,
        "blocks": len(blocks),
        "documents": len(np.unique(blocks.documents)),
        "seed": options.seed,
        "unigram_cross_entropy": known.unigram,
        "position_wise_cross_entropy": known.position_wise,
    }


def _check_several(
    runs: Sequence[NamedRun], steps: dict[str, list[int]], wanted: Sequence[int]
) -> None:
    """A drop needs two checkpoints."""
    for run in runs:
        if len(steps[run.name]) < 2 and wanted:
            raise UserError("a drop needs two or more --checkpoints")
        if len(steps[run.name]) < 2:
            raise UserError(
                f"{run.folder} has a single checkpoint; a drop needs two or more: train with "
                "--checkpoint.keep-steps 100 300 1000"
            )


def _stages(
    steps: Sequence[int],
    values: Sequence[NDArray[np.float64]],
    bins: Sequence[tuple[int, int]],
    blocks: Blocks,
) -> list[dict[str, Any]]:
    """Each checkpoint's curve; what was learned since the one before, and until the last.

    ``rise`` is how much more the upper half of the bins learned until the last checkpoint than
    N_c = 0 did, paired block by block.
    """
    stages: list[dict[str, Any]] = []
    for number, (step, value_CB) in enumerate(zip(steps, values)):
        stage: dict[str, Any] = {"step": step, "nll": _points(value_CB, bins, blocks)}
        if number > 0:
            stage["drop"] = _points(values[number - 1] - value_CB, bins, blocks)
        if number < len(steps) - 1:
            later_CB = value_CB - values[-1]
            stage["to_last"] = _points(later_CB, bins, blocks)
            stage["rise"] = _mean(later_CB[len(bins) // 2 :].mean(0) - later_CB[0], blocks)
        stages.append(stage)
    return stages


def describe_run(
    run: NamedRun, framework: Framework, stages: list[dict[str, Any]]
) -> dict[str, Any]:
    """What is told of a run beside its numbers at each checkpoint."""
    return {
        "name": run.name,
        "run": run.folder.name,
        "framework": run.config.framework.name,
        "is_exact": framework.is_exact,
        "stages": stages,
    }


# Tables


def _bin_name(point: dict[str, Any]) -> str:
    return str(point["low"]) if point["low"] == point["high"] else f"{point['low']}-{point['high']}"


def _bin_table(title: str, curves: Mapping[str, Sequence[dict[str, Any]]]) -> Table:
    """A row for each bin, a column for each curve; a dash where all blocks are too short."""
    cells = [
        {_bin_name(p): f"{p['value']:.3f} ± {p['se']:.3f}" for p in points}
        for points in curves.values()
    ]
    rows = [[name, *(column.get(name, "-") for column in cells)] for name in cells[0]]
    return Table(title, ["observed tokens", *curves], rows)


def _curve_tables(numbers: dict[str, Any]) -> list[Table]:
    last = [(run["name"], run["stages"][-1]) for run in numbers["runs"]]
    curves = {f"{name}, step {stage['step']}": stage["nll"] for name, stage in last}
    reference = [
        ["unigram", f"{numbers['unigram_cross_entropy']:.3f}"],
        ["position-wise", f"{numbers['position_wise_cross_entropy']:.3f}"],
    ]
    return [
        _bin_table("NLL by observed tokens, nats ± standard error (Fig. 3, left)", curves),
        Table("no context: training counts on validation tokens", ["model", "nats"], reference),
    ]


def _drop_tables(numbers: dict[str, Any]) -> list[Table]:
    tables = []
    for run in numbers["runs"]:
        pairs = itertools.pairwise(run["stages"])
        drops = {f"{a['step']} to {b['step']}": b["drop"] for a, b in pairs}
        title = f"{run['name']}: fall of the NLL between steps, nats ± paired error (Fig. 3, right)"
        tables.append(_bin_table(title, drops))
    return tables


# Figures

CONTEXT_LABEL = "observed tokens $N_c$"


def _draw(
    axes: Axes, points: Sequence[Mapping[str, Any]], colour: str, label: str, style: str = "o-"
) -> None:
    """Values with 95 % intervals, at the middle of each bin."""
    axes.errorbar(
        [(p["low"] + p["high"]) / 2 for p in points],
        [p["value"] for p in points],
        yerr=[1.96 * (p["se"] or 0) for p in points],
        fmt=style,
        markersize=3,
        capsize=2,
        linewidth=1.3,
        color=colour,
        label=label,
    )


def curve_figure(numbers: Mapping[str, Any]) -> Figure:
    """NLL against N_c at the last checkpoint of each run, and the optimum without context."""
    figure = Figure(figsize=(7.2, 4.4), layout="constrained")
    axes = figure.subplots()
    for run, colour in zip(numbers["runs"], itertools.cycle(COLOURS)):
        stage = run["stages"][-1]
        kind = "exact" if run["is_exact"] else "bound"
        _draw(axes, stage["nll"], colour, f"{run['name']}, step {stage['step']} ({kind})")
    lines = (
        ("unigram", "unigram_cross_entropy", "--"),
        ("position-wise", "position_wise_cross_entropy", ":"),
    )
    for name, key, style in lines:
        axes.axhline(
            numbers[key],
            color="0.35",
            linestyle=style,
            linewidth=1.2,
            label=f"{name} cross-entropy",
        )
    finish_axes(axes, CONTEXT_LABEL, "NLL of a target token (nats, 95 % interval)")
    axes.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=2)
    return figure


def drop_figure(numbers: Mapping[str, Any]) -> Figure:
    """One panel per run: the fall of the NLL from each checkpoint to the next."""
    runs = numbers["runs"]
    figure = Figure(figsize=(1.2 + 4.6 * len(runs), 4.2), layout="constrained")
    panels = figure.subplots(1, len(runs), sharey=True, squeeze=False)[0]
    for run, axes in zip(runs, panels):
        before = run["stages"][0]["step"]
        for stage, colour in zip(run["stages"][1:], itertools.cycle(COLOURS[1:])):
            _draw(axes, stage["drop"], colour, f"step {before} to {stage['step']}")
            before = stage["step"]
        axes.axhline(0, color="0.4", linewidth=0.8)
        finish_axes(axes, CONTEXT_LABEL, title=run["name"])
        axes.legend(fontsize=8)
    panels[0].set_ylabel("fall of the NLL (nats, 95 % interval)")
    return figure


CONTEXT_CURVE = Analysis(
    "context-curve",
    CurveOptions,
    lambda options, progress: _measure(options, progress, last_only=True),
    _curve_tables,
    curve_figure,
    "checkpoints",
)
CONTEXT_DROP = Analysis(
    "context-drop",
    DropOptions,
    lambda options, progress: _measure(options, progress, last_only=False),
    _drop_tables,
    drop_figure,
    "checkpoints",
)
