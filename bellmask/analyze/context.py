"""Loss by number of observed tokens, at one checkpoint or from one to the next (Fig. 3).

Every block is evaluated in every bin of context counts. Contexts depend only on the seed, so all
runs and checkpoints see the same ones and differences are paired by block.

B blocks, C bins, L block length.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor

from bellmask.analyze.base import Analysis, StageOptions, describe_run
from bellmask.data.blocks import Blocks
from bellmask.evaluate import likelihood
from bellmask.evaluate.likelihood import REFERENCES, BlockScorer
from bellmask.report.figures import COLORS, draw_bins, finish_axes, new_figure
from bellmask.storage.runs import check_same_text, chosen_steps, open_runs
from bellmask.utils.errors import UserError, check_least
from bellmask.utils.progress import Progress
from bellmask.utils.rng import stream_key, uniform
from bellmask.utils.stats import Floats, document_clusters, plus_minus
from bellmask.utils.table import Table


@dataclass(frozen=True, kw_only=True)
class ContextOptions(StageOptions):
    """Loss by number of observed tokens N_c (Sec. 3.2), of masked and causal runs on one text."""

    blocks: int = 512
    """Validation blocks, spread evenly over the text; 0 means all."""
    bins: int = 16
    """Number of bins of context counts, in addition to N_c = 0."""
    batch_size: int = 64
    """Blocks per forward pass."""


@dataclass(frozen=True, kw_only=True)
class CurveOptions(ContextOptions):
    """NLL by number of observed tokens, ARM against MDM: Fig. 3, left (Sec. 3.2).

    Uses the last checkpoint of each run, or the last of --checkpoints; all runs, masked or causal,
    must be on the same text. N_c = 0 is a separate bin, shown with the cross-entropy of the
    training unigram and of per-position training frequencies, which is the optimum there for a
    masked model. For an ARM, N_c = 0 is only the first token of a block, which is not comparable.

    Examples:
    bellmask analyze context-curve runs/base runs/arm

    bellmask analyze context-curve runs/base --bins 32 --blocks 0
    """


@dataclass(frozen=True, kw_only=True)
class DropOptions(ContextOptions):
    """What each stage of training learned, by number of observed tokens: Fig. 3, right (Sec. 3.2).

    For runs on the same text, masked or causal: the decrease of the NLL from each saved checkpoint
    to the next, with paired errors. Keep checkpoints with --checkpoint.keep-steps when training.

    Examples:
    bellmask analyze context-drop runs/base runs/arm

    bellmask analyze context-drop runs/base --checkpoints 100 300 1000
    """


# Measurement

Bins = Sequence[tuple[int, int]]
"""(lowest, highest) N_c of each."""


def context_bins(length: int, num_bins: int) -> list[tuple[int, int]]:
    """N_c = 0 alone, then 1 .. L-1 in about equal parts."""
    edges = np.unique(np.linspace(1, length, min(num_bins, max(1, length - 1)) + 1).astype(int))
    return [(0, 0), *((low, stop - 1) for low, stop in itertools.pairwise(edges.tolist()))]


def losses_by_bin(scorer: BlockScorer, bins: Bins, seed: int, batch_size: int) -> Floats:
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


def _causal_bins(scorer: BlockScorer, part: Tensor, bins: Bins, seed: int) -> Floats:
    """All context counts come from one pass; a bin is their mean."""
    ce_BL = scorer.by_context(part, stream_key(seed, "context masks", 0)).numpy()
    length_B = scorer.blocks.num_maskable(part).numpy()
    ce_BL[np.arange(ce_BL.shape[1]) >= length_B[:, None]] = np.nan
    parts = [ce_BL[:, low : high + 1] for low, high in bins]
    with np.errstate(invalid="ignore"):  # 0 / 0: the block is too short for the bin
        return np.stack([np.nansum(part, axis=1) / (~np.isnan(part)).sum(1) for part in parts])


def _points(values_CB: Floats, bins: Bins, blocks: Blocks) -> list[dict[str, Any]]:
    """Mean and error of each bin for which at least two blocks are long enough."""
    means = [_mean(value_B, blocks) for value_B in values_CB]
    return [{"low": low, "high": high, **mean} for (low, high), mean in zip(bins, means) if mean]


def _mean(value_B: Floats, blocks: Blocks) -> dict[str, float] | None:
    """Token-weighted, with a standard error, clustered where documents span blocks."""
    is_there = ~np.isnan(value_B)
    if is_there.sum() < 2:
        return None
    weight = blocks.num_maskable(slice(None)).double().numpy()[is_there]
    cluster = document_clusters(np.asarray(blocks.documents)[is_there])
    value, error = likelihood.weighted_mean(value_B[is_there], weight, cluster)
    return {"value": value, "se": error}


def _measure(options: ContextOptions, progress: Progress) -> dict[str, Any]:
    # a block alone has no error; 0 means all
    check_least(options, bins=1, batch_size=1, blocks=2 if options.blocks else 0)
    runs = open_runs(options.runs)
    check_same_text(runs)
    steps = {run.name: chosen_steps(run, options.checkpoints) for run in runs}
    if isinstance(options, CurveOptions):
        steps = {name: chosen[-1:] for name, chosen in steps.items()}
    for run in runs:
        if isinstance(options, DropOptions) and len(steps[run.name]) < 2:
            words = f"context-drop needs two --checkpoints; of {run.folder} {steps[run.name]} are"
            raise UserError(f"{words} chosen (keep more with --checkpoint.keep-steps)")
    first = runs[0].load(runs[0].steps[-1], options.device)
    train, valid = first.blocks()
    first.check_same_data(train)
    blocks = valid.spread(options.blocks)
    bins = context_bins(blocks.block_length, options.bins)
    known = likelihood.references(train, blocks, first.tokenizer.num_tokens)
    progress.start(sum(map(len, steps.values())))
    found = []
    for run in runs:
        values = []
        for step in steps[run.name]:
            scorer = likelihood.scorer_of(run.load(step, options.device), blocks)
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
        **known,
    }


def _stages(
    steps: Sequence[int], values: Sequence[Floats], bins: Bins, blocks: Blocks
) -> list[dict[str, Any]]:
    """Each checkpoint's curve, and the decrease since the previous one and until the last.

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


# Tables


def _drops(run: Mapping[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """``100 to 300``: the fall of the NLL between these steps."""
    return {f"{a['step']} to {b['step']}": b["drop"] for a, b in itertools.pairwise(run["stages"])}


def _bin_table(title: str, curves: Mapping[str, Sequence[dict[str, Any]]]) -> Table:
    """A row for each bin, a column for each curve; a dash where all blocks are too short."""
    cells: dict[tuple[int, int], dict[str, str]] = {}
    for name, points in curves.items():
        for p in points:
            row = cells.setdefault((p["low"], p["high"]), {})
            row[name] = plus_minus(p["value"], p["se"], 3)
    rows = [
        [str(low) if low == high else f"{low}-{high}", *(row.get(name, "-") for name in curves)]
        for (low, high), row in sorted(cells.items())
    ]
    return Table(title, ["observed tokens", *curves], rows)


def _curve_tables(numbers: dict[str, Any]) -> list[Table]:
    last = [(run["name"], run["stages"][-1]) for run in numbers["runs"]]
    curves = {f"{name}, step {stage['step']}": stage["nll"] for name, stage in last}
    known = [[name, f"{numbers[key]:.3f}"] for name, key in REFERENCES.items()]
    return [
        _bin_table("NLL by observed tokens, nats ± standard error (Fig. 3, left)", curves),
        Table("no context: training counts on validation tokens", ["model", "nats"], known),
    ]


def _drop_tables(numbers: dict[str, Any]) -> list[Table]:
    title = "fall of the NLL between steps, nats ± paired error (Fig. 3, right)"
    return [_bin_table(f"{run['name']}: {title}", _drops(run)) for run in numbers["runs"]]


# Figures

CONTEXT_LABEL = "observed tokens $N_c$"


# Paper: Fig. 3
def curve_figure(numbers: Mapping[str, Any]) -> Figure:
    """NLL against N_c at the last checkpoint of each run, and the optimum without context."""
    figure, (axes,) = new_figure(7.2, 4.4)
    for run, color in zip(numbers["runs"], itertools.cycle(COLORS)):
        stage, kind = run["stages"][-1], "exact" if run["is_exact"] else "bound"
        label = f"{run['name']}, step {stage['step']} ({kind})"
        draw_bins(axes, stage["nll"], "value", color=color, label=label)
    for (name, key), style in zip(REFERENCES.items(), ("--", ":")):
        label = f"{name} cross-entropy"
        axes.axhline(numbers[key], color="0.35", linestyle=style, linewidth=1.2, label=label)
    finish_axes(axes, CONTEXT_LABEL, "NLL of a target token (nats, 95 % interval)", legend=2)
    return figure


# Paper: Fig. 3
def drop_figure(numbers: Mapping[str, Any]) -> Figure:
    """One panel per run: the fall of the NLL from each checkpoint to the next."""
    runs = numbers["runs"]
    figure, panels = new_figure(1.2 + 4.6 * len(runs), 4.2, len(runs), sharey=True)
    for run, axes in zip(runs, panels):
        for (name, points), color in zip(_drops(run).items(), itertools.cycle(COLORS[1:])):
            draw_bins(axes, points, "value", color=color, label=f"step {name}")
        axes.axhline(0, color="0.4", linewidth=0.8)
        finish_axes(axes, CONTEXT_LABEL, title=run["name"], legend=0)
    panels[0].set_ylabel("fall of the NLL (nats, 95 % interval)")
    return figure


UNIT = "checkpoints"
# Paper: Fig. 3
CONTEXT_CURVE = Analysis("context-curve", CurveOptions, _measure, _curve_tables, curve_figure, UNIT)
# Paper: Fig. 3, Finding 2
CONTEXT_DROP = Analysis("context-drop", DropOptions, _measure, _drop_tables, drop_figure, UNIT)
