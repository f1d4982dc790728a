"""The noise of three estimators of the NELBO on a trained model, against forward passes.

Exact mask counts (ours) beside mdlm's way: a mask rate per block, stratified over a batch or
independent. "Noise" is the standard deviation of the estimate over repetitions with fresh masks on
the same blocks; no formula is trusted. Behind each stands its own sampling error.

B blocks, L block length, N masked rows, R masks per block, K repetitions.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import choices
import numpy as np
import torch
import tyro
from matplotlib.figure import Figure
from numpy.typing import NDArray
from torch import Tensor

from bellmask.analyze.base import Analysis, RunsOptions, run_analysis
from bellmask.data.blocks import Blocks
from bellmask.diffusion.frameworks import Mdm
from bellmask.evaluate.likelihood import BlockScorer, evaluate_run, scorer_of
from bellmask.report.figures import COLORS, finish_axes
from bellmask.storage.loading import Loaded, LoadOptions
from bellmask.storage.runs import NamedRun, check_all_maskable
from bellmask.utils.distributed import autocast
from bellmask.utils.errors import UserError
from bellmask.utils.progress import Progress
from bellmask.utils.rng import stream_key, uniform, uniform_rows
from bellmask.utils.stats import clustered_error
from bellmask.utils.table import Table

TIME_FLOOR = 1e-3
"""mdlm's smallest mask rate."""
GROUP = 16
"""Blocks over which mdlm's evaluation stratifies: its batch."""


@dataclass(frozen=True, kw_only=True)
class EstimatorOptions(RunsOptions, LoadOptions):
    """Noise of the reported NELBO against forward passes, compared with mdlm's estimators (App.
    C.3).

    exact: masks of exact size, the sizes spread evenly (what every command here reports).
    stratified: mdlm's, one mask rate per block, stratified over a batch. independent: the same
    without strata. Also the bias of mdlm's smallest mask rate. Masked runs only.

    Examples:
    python evidence/estimators.py runs/bell

    python evidence/estimators.py runs/base runs/bell --blocks 128 --repeats 100
    """

    blocks: int = 64
    """Validation blocks, spread evenly over the text, the same in every repetition."""
    draws: tuple[int, ...] = (1, 2, 4, 8)
    """Masks per block; passes are blocks times draws."""
    repeats: int = 32
    """Estimates of each kind at the largest number of draws; 32 give the noise to an eighth."""
    group: int = GROUP
    """Blocks over which mask rates are stratified: mdlm's evaluation batch."""
    time_floor: float = TIME_FLOOR
    """Smallest mask rate of mdlm's estimators. Without one their variance is infinite."""
    batch_size: int = 64
    """Blocks per forward pass of the network."""


# mdlm's estimators of the NELBO, for comparison with exact mask counts
#
# A mask rate m is drawn for each block, each token is hidden with probability m, and the sum of
# cross-entropies of hidden tokens is divided by m (Eq. L_MDM with uniform times): per token,
# its mean over m in (0, 1) is the NELBO. Rates are stratified over a group of blocks, as mdlm does
# over its evaluation batch, or independent.
#
# At m -> 0 the weight 1/m makes the variance infinite (its integral diverges like a logarithm), so
# mdlm draws m from [floor, 1]. That leaves out what is easiest to predict: a bias upwards.
#
# A pass is one block seen once.

Kind = Literal["stratified", "independent"]


def mask_rates(
    count: int, seed: int, *, kind: Kind, group: int = GROUP, time_floor: float = TIME_FLOOR
) -> Tensor:
    """A mask rate in [floor, 1) for each of ``count`` blocks, float64.

    Stratified: in each group of consecutive blocks one from each of as many equal strata, in
    random order.
    """
    u_B = uniform(stream_key(seed, "estimator rates"), torch.arange(count))
    if kind == "stratified":
        group_B = torch.arange(count) // group
        first_B = group_B * group
        # sorting random numbers, group after group, gives random orders of strata
        noise_B = uniform(stream_key(seed, "estimator strata"), torch.arange(count))
        order_B = (group_B + noise_B).argsort() - first_B
        u_B = (order_B + u_B) / (count - first_B).clamp(max=group)
    return time_floor + (1 - time_floor) * u_B


@torch.no_grad()
def weighted_sums(scorer: BlockScorer, index_B: Tensor, rate_B: Tensor, key: int) -> Tensor:
    """Sum of hidden tokens' cross-entropies over the mask rate, for each block, float64 [B]."""
    framework, device = scorer.framework, scorer.world.device
    assert isinstance(framework, Mdm)
    x0_BL, length_B = scorer.blocks.rows(index_B), scorer.blocks.row_lengths(index_B)
    is_real_BL = torch.arange(x0_BL.shape[1]) < length_B[:, None]
    real = None if bool(is_real_BL.all()) else is_real_BL
    problem = framework.training(
        x0_BL,
        framework.schedule.inverse(1 - rate_B),
        uniform_rows(key, index_B, x0_BL.shape[1]),
        mask_id=scorer.mask_id,
        is_real_BL=real,
    )
    with autocast(device, scorer.precision):
        mask = scorer.rules.mask(x0_BL, real)
        ce_N = problem.ask(scorer.model, device, mask=mask, reduce=False).double().cpu()
    owner_N = problem.rows_N // x0_BL.shape[1]
    return torch.zeros(len(index_B), dtype=torch.float64).index_add_(0, owner_N, ce_N) / rate_B


# Paper: Table 7
def one_pass(
    scorer: BlockScorer,
    seed: int,
    *,
    kind: Kind,
    group: int = GROUP,
    time_floor: float = TIME_FLOOR,
    batch_size: int = 64,
) -> float:
    """The NELBO per token, nats, from one mask for each block."""
    count = len(scorer.blocks)
    rate_B = mask_rates(count, seed, kind=kind, group=group, time_floor=time_floor)
    key = stream_key(seed, "estimator masks")
    total = sum(
        float(weighted_sums(scorer, index_B, rate_B[index_B], key).sum())
        for index_B in torch.arange(count).split(batch_size)
    )
    return total / int(scorer.blocks.row_lengths(slice(None)).sum())


def low_rate_loss(
    scorer: BlockScorer,
    seed: int,
    *,
    draws: int,
    time_floor: float = TIME_FLOOR,
    batch_size: int = 64,
) -> NDArray[np.float64]:
    """Mean cross-entropy of hidden tokens at mask rates below the floor, for each block.

    Given that a token is hidden, the L - 1 others are so with probability m each: the count of
    masks is 1 + Binomial(L - 1, m), and the mean loss at that count is measured. No weight occurs.
    """
    length_B = scorer.blocks.row_lengths(slice(None))
    total_B = torch.zeros(len(length_B), dtype=torch.float64)
    for draw in range(draws):
        for index_B in torch.arange(len(length_B)).split(batch_size):
            level_B = uniform(stream_key(seed, "low rate", draw), index_B)
            rate_B = time_floor * (draw + level_B) / draws
            u_BL = uniform_rows(
                stream_key(seed, "low count", draw), index_B, scorer.blocks.block_length
            )
            is_other_BL = torch.arange(u_BL.shape[1]) < length_B[index_B, None] - 1
            others_B = ((u_BL < rate_B[:, None]) & is_other_BL).sum(1)
            context_B = length_B[index_B] - 1 - others_B
            key = stream_key(seed, "low masks", draw)
            total_B[index_B] += scorer.mean(index_B, context_B, key) / draws
    return total_B.numpy()


# Paper: Table 7
def floor_bias(
    nelbo_B: NDArray[np.float64],
    low_B: NDArray[np.float64],
    length_B: NDArray[np.int64],
    time_floor: float,
) -> tuple[float, float]:
    """(bias of the floor in nats per token, standard error over blocks).

    With g(m) the loss at rate m, mean g over [floor, 1] - mean g over [0, 1] is
    floor / (1 - floor) (NELBO - mean g over [0, floor]).
    """
    scale = time_floor / (1 - time_floor)
    weight_B = length_B / length_B.mean()
    gap_B = weight_B * (nelbo_B - low_B)
    mean = float(gap_B.mean())
    error = clustered_error(gap_B - weight_B * mean) if len(gap_B) > 1 else math.nan
    return scale * mean, scale * error


# Measurement

KINDS: tuple[Kind, ...] = ("stratified", "independent")
Singles = dict[Kind, list[float]]
"""Estimates from one mask per block."""
LOW_DRAWS = 8
"""Masks per block for the loss below the time floor."""


def spread(values: Sequence[float] | NDArray[np.float64]) -> dict[str, float]:
    """Standard deviation of repeated estimates, and its own error; UserError where it is 0."""
    found = choices.spread(np.asarray(values, dtype=np.float64))
    if not found["value"]:
        raise UserError("every mask gives the same loss (an untrained model?): there is no noise")
    return {"se": found["value"], "error": found["error"]}


def passes_needed(one: dict[str, float], draws: int, ours: dict[str, float]) -> dict[str, float]:
    """How many times our passes an average of single passes takes to have our error.

    ``one`` is the noise of one mask per block; independent passes average it as 1 / sqrt(R).
    """
    value = (one["se"] / ours["se"]) ** 2 / draws
    share = 2 * math.hypot(one["error"] / one["se"], ours["error"] / ours["se"])
    return {"value": value, "error": value * share}


def overall(one: dict[str, float], ours: dict[int, dict[str, float]]) -> dict[str, float]:
    """The geometric mean of ``passes_needed`` over all numbers of draws."""
    logs = [math.log(passes_needed(one, draws, found)["value"]) for draws, found in ours.items()]
    own = math.hypot(*(found["error"] / found["se"] for found in ours.values())) / len(ours)
    value = math.exp(sum(logs) / len(logs))
    return {"value": value, "error": value * 2 * math.hypot(one["error"] / one["se"], own)}


def _check(options: EstimatorOptions) -> None:
    if options.blocks < 2 or options.repeats < 4 or options.batch_size < 1 or options.group < 1:
        raise UserError(
            "--blocks must be at least 2, --repeats at least 4, --batch-size and --group at least 1"
        )
    choices.check_draws(options.draws)
    if not 0 < options.time_floor < 1:
        raise UserError(
            f"--time-floor must be between 0 and 1, got {options.time_floor}: at 0 the variance "
            "of weighted estimates is infinite"
        )


def _measure(options: EstimatorOptions, progress: Progress) -> dict[str, Any]:
    _check(options)
    runs = choices.masked_runs(options.runs)
    check_all_maskable(runs, "estimators")
    draws = sorted(options.draws)
    per_run = options.repeats * (sum(draws) + len(KINDS) * draws[-1]) + LOW_DRAWS
    progress.start(per_run * len(runs) * options.blocks)
    return {
        "runs": [_measure_run(run, draws, options, progress) for run in runs],
        "draws": draws,
        "repeats": options.repeats,
        "group": options.group,
        "time_floor": options.time_floor,
        "seed": options.seed,
    }


def _measure_run(
    named: NamedRun,
    draws: Sequence[int],
    options: EstimatorOptions,
    progress: Progress,
) -> dict[str, Any]:
    run = options.load(named.folder)
    blocks = run.blocks()[1].spread(options.blocks)
    scorer, most = scorer_of(run, blocks), draws[-1]
    singles: Singles = {
        kind: _single_passes(scorer, kind, most, options, progress) for kind in KINDS
    }
    exact, nelbo_B = _exact_counts(run, blocks, draws, options, progress)
    low_B = low_rate_loss(
        scorer,
        stream_key(options.seed, "estimators", "low"),
        draws=LOW_DRAWS,
        time_floor=options.time_floor,
        batch_size=options.batch_size,
    )
    progress.advance(LOW_DRAWS * options.blocks)
    bias, error = floor_bias(nelbo_B, low_B, np.asarray(blocks.lengths), options.time_floor)
    return {
        "name": named.name,
        "step": run.step,
        "blocks": len(blocks),
        "rows": [_row(count, len(blocks), exact[count], singles) for count in draws],
        "passes_needed": {
            kind: overall(spread(values), {count: spread(exact[count]) for count in draws})
            for kind, values in singles.items()
        },
        "means": _means(exact[most], singles),
        "floor_bias": {"value": bias, "error": error},
    }


def _single_passes(
    scorer: BlockScorer,
    kind: Kind,
    most: int,
    options: EstimatorOptions,
    progress: Progress,
) -> list[float]:
    """K R estimates with one mask per block; averages of R of them are K of R masks."""
    values = []
    for number in range(options.repeats * most):
        value = one_pass(
            scorer,
            stream_key(options.seed, "estimators", kind, number),
            kind=kind,
            group=options.group,
            time_floor=options.time_floor,
            batch_size=options.batch_size,
        )
        values.append(value)
        progress.advance(options.blocks)
    return values


def _exact_counts(
    run: Loaded,
    blocks: Blocks,
    draws: Sequence[int],
    options: EstimatorOptions,
    progress: Progress,
) -> tuple[dict[int, list[float]], NDArray[np.float64]]:
    """(K estimates for each number of draws, each block's mean over those with most draws)."""
    found: dict[int, list[float]] = {}
    block_values: list[NDArray[np.float64]] = []
    for count in draws:
        found[count], block_values = [], []
        for number in range(options.repeats):
            seed = stream_key(options.seed, "estimators", "exact", count, number)
            result = evaluate_run(
                run, blocks, draws=count, seed=seed, batch_size=options.batch_size
            )
            found[count].append(result.nll)
            block_values.append(result.block_nll)
            progress.advance(count * options.blocks)
    return found, np.mean(block_values, axis=0)


def _row(draws: int, num_blocks: int, exact: Sequence[float], singles: Singles) -> dict[str, Any]:
    """One number of passes: the noise of each estimator, and the passes that others need."""
    ours = spread(exact)
    row: dict[str, Any] = {"draws": draws, "passes": draws * num_blocks, "exact": ours}
    for kind, values in singles.items():
        averaged = np.reshape(values[: len(values) // draws * draws], (-1, draws)).mean(1)
        row[kind] = spread(averaged)
        row[f"{kind}_passes"] = passes_needed(spread(values), draws, ours)
    return row


def _means(exact: Sequence[float], singles: Singles) -> dict[str, dict[str, float]]:
    """Mean of all estimates of each kind, and its error: they differ by the floor's bias alone."""
    return {
        kind: {
            "value": float(np.mean(values)),
            "error": float(np.std(values, ddof=1) / math.sqrt(len(values))),
        }
        for kind, values in [("exact", exact), *singles.items()]
    }


# Tables


def _show(found: dict[str, float], value: str = "value", digits: int = 4) -> str:
    return f"{found[value]:.{digits}f} ± {found['error']:.{digits}f}"


def _tables(numbers: dict[str, Any]) -> list[Table]:
    floor = numbers["time_floor"]
    columns = ["passes", "exact counts", f"stratified rates ({numbers['group']} blocks)"]
    columns += ["independent rates", "passes needed: stratified", "independent"]
    tables = []
    for run in numbers["runs"]:
        rows = [
            [
                f"{row['passes']:,} ({run['blocks']} x {row['draws']})",
                *(_show(row[kind], "se") for kind in ("exact", *KINDS)),
                *(_show(row[f"{kind}_passes"], digits=1) + " times" for kind in KINDS),
            ]
            for row in run["rows"]
        ]
        title = f"{run['name']}: standard error of the NELBO over masks, nats per token (App. C.3)"
        tables.append(Table(title, columns, rows))
        needed = [[kind, _show(found, digits=2)] for kind, found in run["passes_needed"].items()]
        title = f"{run['name']}: passes needed for our error, times ours, all rows together"
        tables.append(Table(title, ["estimator", "times"], needed))
        means = [[kind, _show(found)] for kind, found in run["means"].items()]
        means += [[f"bias of the time floor {floor:g}", _show(run["floor_bias"], digits=6)]]
        title = f"{run['name']}: mean of all estimates, nats per token"
        tables.append(Table(title, ["estimator", "mean ± error"], means))
    return tables


# Figure

LINES = {
    "exact": ("exact counts (ours)", "o-", COLORS[1]),
    "stratified": ("stratified rates (mdlm)", "s-", COLORS[0]),
    "independent": ("independent rates", "^-", COLORS[3]),
}


def estimators_figure(numbers: Mapping[str, Any]) -> Figure:
    """A log-log panel for each run; gray lines fall as passes^-1/2 and passes^-1."""
    runs = numbers["runs"]
    figure = Figure(figsize=(1.2 + 4.6 * len(runs), 4.2), layout="constrained")
    panels = figure.subplots(1, len(runs), sharey=True, squeeze=False)[0]
    for run, axes in zip(runs, panels):
        passes = [row["passes"] for row in run["rows"]]
        for kind, (label, style, color) in LINES.items():
            axes.errorbar(
                passes,
                [row[kind]["se"] for row in run["rows"]],
                yerr=[row[kind]["error"] for row in run["rows"]],
                fmt=style,
                color=color,
                markersize=4,
                capsize=3,
                label=label,
            )
        start = run["rows"][0]["exact"]["se"]
        for power, style in ((-0.5, "--"), (-1.0, ":")):
            falling = [start * (count / passes[0]) ** power for count in passes]
            label = f"passes$^{{{power:g}}}$"
            axes.plot(passes, falling, style, color="0.6", linewidth=1, zorder=0, label=label)
        choices.make_logarithmic(axes)
        axes.set_xticks(passes, [f"{count:,}" for count in passes])
        title = f"{run['name']}, step {run['step']}"
        finish_axes(axes, "forward passes (blocks x masks)", title=title)
    panels[0].set_ylabel(
        "standard error of the NELBO over masks\n(nats per token, ± its own error)"
    )
    panels[0].legend(fontsize=8)
    return figure


# Paper: Table 7
ESTIMATORS = Analysis(
    "estimators", EstimatorOptions, _measure, _tables, estimators_figure, "passes"
)


if __name__ == "__main__":
    try:
        run_analysis(ESTIMATORS, tyro.cli(EstimatorOptions))
    except UserError as error:
        sys.exit(f"error: {error}")
