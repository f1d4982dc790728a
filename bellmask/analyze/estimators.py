"""The noise of three estimators of the NELBO on a trained model, against forward passes.

Exact mask counts (ours) beside mdlm's way: a mask rate per block, stratified over a batch or
independent. "Noise" is the standard deviation of the estimate over repetitions with fresh masks on
the same blocks; no formula is trusted. Behind each stands its own sampling error.

B blocks, R masks per block, K repetitions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import tyro
from numpy.typing import NDArray

from bellmask.analyze.analysis import Analysis, OnProgress, Table
from bellmask.analyze.runs import NamedRun, check_all_maskable, open_runs
from bellmask.data.blocks import Blocks
from bellmask.evaluate.estimators import (
    GROUP,
    TIME_FLOOR,
    Kind,
    floor_bias,
    low_rate_loss,
    one_pass,
)
from bellmask.evaluate.likelihood import Scorer, evaluate_run, scorer_of
from bellmask.report.estimator_plots import estimators_figure
from bellmask.storage.loading import Loaded
from bellmask.utils.errors import UserError
from bellmask.utils.rng import stream_key

KINDS: tuple[Kind, ...] = ("stratified", "independent")
Singles = dict[Kind, list[float]]
"""Estimates from one mask per block."""
LOW_DRAWS = 8
"""Masks per block for the loss below the time floor."""


@dataclass(frozen=True)
class EstimatorOptions:
    """Noise of the reported NELBO against forward passes, beside mdlm's estimators (App. C.3).

    exact: masks of exact size, the sizes spread evenly (what every command here reports).
    stratified: mdlm's, one mask rate per block, stratified over a batch. independent: the same
    without strata. Also the bias of mdlm's smallest mask rate. Masked runs only.

    Examples:
    bellmask analyze estimators runs/bell

    bellmask analyze estimators runs/base runs/bell --blocks 128 --repeats 100
    """

    runs: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN...")]
    """Folders of masked runs."""
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
    seed: int = 1234
    """Decides all masks."""
    checkpoint: str = "latest"
    """latest, best, or a step."""
    device: str = "auto"
    """auto, cpu, cuda, ..."""
    out: str | None = None
    """Folder for the results; default RUN/analysis for a single run, else
    runs/analysis/estimators."""


def spread(values: Sequence[float] | NDArray[np.float64]) -> dict[str, float]:
    """Standard deviation of repeated estimates, and its own error by the delta method.

    Var(s^2) is about (m4 - s^4) / K: heavy tails, which weights have, are not taken for normal.
    """
    found = np.asarray(values, dtype=np.float64)
    variance = float(found.var(ddof=1))
    if not variance:
        raise UserError("every mask gives the same loss (an untrained model?): there is no noise")
    fourth = float(((found - found.mean()) ** 4).mean())
    error = math.sqrt(max(fourth - variance**2, 0.0) / len(found)) / (2 * math.sqrt(variance))
    return {"se": math.sqrt(variance), "error": error}


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
    if not options.draws or min(options.draws) < 1 or len(set(options.draws)) < len(options.draws):
        raise UserError(f"--draws wants different positive numbers, got {options.draws}")
    if not 0 < options.time_floor < 1:
        raise UserError(
            f"--time-floor must be between 0 and 1, got {options.time_floor}: at 0 the variance "
            "of weighted estimates is infinite"
        )


def _measure(options: EstimatorOptions, on_progress: OnProgress) -> dict[str, Any]:
    _check(options)
    runs = open_runs(options.runs)
    check_all_maskable(runs, "estimators")
    for run in runs:
        if run.config.framework.name != "mdm":
            raise UserError(
                f"{run.folder} is {run.config.framework.name}: it has no masks to compare"
            )
    draws = sorted(options.draws)
    per_run = options.repeats * (sum(draws) + len(KINDS) * draws[-1]) + LOW_DRAWS
    done = 0

    def advance(rounds: int) -> None:
        nonlocal done
        done += rounds
        on_progress(done * options.blocks, per_run * len(runs) * options.blocks)

    advance(0)
    return {
        "runs": [_measure_run(run, draws, options, advance) for run in runs],
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
    advance: Callable[[int], None],
) -> dict[str, Any]:
    run = named.load(options.checkpoint, options.device)
    blocks = run.blocks()[1].spread(options.blocks)
    scorer, most = scorer_of(run, blocks), draws[-1]
    singles: Singles = {
        kind: _single_passes(scorer, kind, most, options, advance) for kind in KINDS
    }
    exact, nelbo_B = _exact_counts(run, blocks, draws, options, advance)
    low_B = low_rate_loss(
        scorer,
        stream_key(options.seed, "estimators", "low"),
        draws=LOW_DRAWS,
        time_floor=options.time_floor,
        batch_size=options.batch_size,
    )
    advance(LOW_DRAWS)
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
    scorer: Scorer,
    kind: Kind,
    most: int,
    options: EstimatorOptions,
    advance: Callable[[int], None],
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
        advance(1)
    return values


def _exact_counts(
    run: Loaded,
    blocks: Blocks,
    draws: Sequence[int],
    options: EstimatorOptions,
    advance: Callable[[int], None],
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
            advance(count)
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


ESTIMATORS = Analysis(
    "estimators", EstimatorOptions, _measure, _tables, estimators_figure, "passes"
)
