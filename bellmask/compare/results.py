"""Runs → results.json: speed-ups per seed and over seeds, and what they must be read beside.

Each run folder is read into a :class:`RunRecord`; runs whose text, masks or budget differ are
refused. A variant's record has its runs, its law as numbers, and its speed-up over the reference.

E evaluations, B blocks, R bootstrap replicates.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from bellmask import __version__
from bellmask.config.config import RunConfig, is_free_option, load_config
from bellmask.data.blocks import Blocks
from bellmask.data.packing import Row
from bellmask.diffusion.objectives import ChainRule
from bellmask.diffusion.theory import context_weights
from bellmask.evaluate.likelihood import Likelihood, binned_curve
from bellmask.storage.build import (
    build_law,
    build_objective,
    build_schedule,
    describe_learning,
)
from bellmask.storage.run_folder import read_description, read_metrics
from bellmask.train.planning import StepPlanner
from bellmask.utils.distributed import World
from bellmask.utils.errors import UserError
from bellmask.utils.files import is_finite, is_number, read_json
from bellmask.utils.stats import Floats

# What a variant trains on, from its options alone: density, drawn times, context weights

DRAWN_STEPS = 100
"""Steps whose times make the histogram."""
POINTS = 101
BINS = 25


def drawn_times(config: RunConfig) -> torch.Tensor:
    """The times a run drew in its first steps, as its own planner gives them."""
    one = Blocks.from_rows(iter([Row(np.zeros(1, dtype=np.int64), 1, 0)]))
    planner = StepPlanner(one, build_objective(config), config.train, World())
    return torch.cat([planner.times(step) for step in range(DRAWN_STEPS)])


def law_summary(config: RunConfig) -> dict[str, Any]:
    """Density on a grid, histogram of mask rates drawn, context weights, effective sample size.

    The histogram is of the mask rate 1 - alpha(t), which is t for the linear schedule, so that the
    middle-flat schedule can be set beside time laws. The effective sample share is that of
    sequences: E[s]^2 / E[s^2] of s = w(t) (1 - alpha), what a sequence adds to the loss.
    """
    objective, law = build_objective(config), build_law(config.law)
    if isinstance(objective, ChainRule):
        return _describe_order(config, objective)
    schedule = build_schedule(config.schedule)
    t = torch.linspace(0, 1, POINTS, dtype=torch.float64)
    times = drawn_times(config)
    rate = 1 - schedule.alpha(times)
    weight = objective.weight(times)
    signal = weight * rate  # what a sequence adds to the loss, per unit of cross-entropy
    effective = float(signal.mean() ** 2 / (signal**2).mean())
    histogram, _ = np.histogram(rate.numpy(), bins=BINS, range=(0, 1), density=True)
    omega = context_weights(objective, config.data.block_length)
    return {
        "name": f"{law}, {config.objective.name}, {schedule}",
        "t": t.tolist(),
        "density": law.pdf(t).tolist() if law.has_density else None,
        "mask_rate_histogram": histogram.tolist(),
        "context_weights": (omega / omega.sum()).tolist(),
        "effective_sample_share": effective,
    }


def _describe_order(config: RunConfig, objective: ChainRule) -> dict[str, Any]:
    """A causal framework has no times: each row is asked at every context count, once."""
    omega = context_weights(objective, config.data.block_length)
    return {
        "name": describe_learning(config),
        "t": [],
        "density": None,
        "mask_rate_histogram": None,
        "context_weights": (omega / omega.sum()).tolist(),
        "effective_sample_share": 1.0,
    }


# The speed-up: how many times fewer steps to the reference's final NLL, and how sure that is
#
# y* is the reference's NLL at its last step T. A variant arrives at tau, where the final run of its
# evaluations with NLL <= y* starts, interpolated linearly in (log step, NLL) from the evaluation
# before. The speed-up is T / tau. Nothing is extrapolated: a variant that is above y* at its end
# has not arrived, and one that was below y* from its first evaluation on has a lower bound only.

MIN_SEEDS = 3
"""Paired seeds from which on an interval is given."""

# quantiles of Student's t at 0.975 for 1, 2, ... degrees of freedom
_T_975: tuple[float, ...] = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
_T_975 += (2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086)


@dataclass(frozen=True)
class Arrival:
    """Where a curve comes to stay at or below a target."""

    step: float
    is_bound: bool = False
    """True when the first evaluation was there already: it arrived at this step or before."""


def arrival(steps: Sequence[float], nll: Sequence[float], target: float) -> Arrival | None:
    """The start of the final run of evaluations with NLL <= target; None if the last is above."""
    if len(steps) != len(nll) or len(steps) == 0:
        raise ValueError(f"{len(steps)} steps and {len(nll)} values: they must agree, and not be 0")
    above = [i for i, value in enumerate(nll) if not value <= target]  # nan counts as above
    if not above:
        return Arrival(float(steps[0]), is_bound=True)
    last = above[-1]
    if last == len(nll) - 1:
        return None
    drop = nll[last] - nll[last + 1]
    share = (nll[last] - target) / drop if math.isfinite(drop) else 1.0
    log_step = math.log(steps[last]) * (1 - share) + math.log(steps[last + 1]) * share
    return Arrival(math.exp(log_step))


@dataclass(frozen=True)
class SpeedUp:
    """One seed's comparison with its reference run."""

    target: float
    """y*: the reference's last NLL."""
    ratio: float | None
    """T / tau; None when the variant did not arrive."""
    time_ratio: float | None
    """The same in seconds of training."""
    is_bound: bool
    """True when the ratio is a lower bound."""
    gap: float
    """The variant's last NLL minus the target."""


def speed_up(
    reference: tuple[Sequence[float], Sequence[float], Sequence[float]],
    variant: tuple[Sequence[float], Sequence[float], Sequence[float]],
) -> SpeedUp:
    """Compare two (steps, nll, seconds); the reference's last evaluation is the target."""
    steps, nll, seconds = variant
    target = reference[1][-1]
    there = arrival(steps, nll, target)
    gap = nll[-1] - target
    if there is None:
        return SpeedUp(target, None, None, False, gap)
    at = float(np.interp(there.step, [0, *steps], [0.0, *seconds]))
    time_ratio = reference[2][-1] / at if at > 0 else None
    return SpeedUp(target, reference[0][-1] / there.step, time_ratio, there.is_bound, gap)


@dataclass(frozen=True)
class SeedInterval:
    """Geometric mean over paired seeds, with a t-interval of the log ratios."""

    mean: float
    low: float | None
    """None with fewer than three seeds."""
    high: float | None
    num_seeds: int


def ratio_over_seeds(ratios: Sequence[float]) -> SeedInterval:
    """The headline: geometric mean and 95 % t-interval."""
    logs = np.log(np.asarray(ratios, dtype=np.float64))
    mean, count = float(logs.mean()), len(logs)
    if count < MIN_SEEDS:
        return SeedInterval(math.exp(mean), None, None, count)
    freedom = count - 1
    quantile = _T_975[freedom - 1] if freedom <= len(_T_975) else 1.96 + 2.4 / freedom
    reach = quantile * float(logs.std(ddof=1)) / math.sqrt(count)
    return SeedInterval(math.exp(mean), math.exp(mean - reach), math.exp(mean + reach), count)


@dataclass(frozen=True)
class Bootstrap:
    """What another sample of validation blocks would change; training noise is not in it."""

    low: float | None
    """2.5 % quantile over the replicates that arrive."""
    high: float | None
    never_share: float
    """Share of replicates in which the variant does not arrive."""


def paired_bootstrap(
    reference: tuple[Sequence[float], Floats],
    variant: tuple[Sequence[float], Floats],
    weight_B: Floats,
    cluster_B: NDArray[np.int64] | None = None,
    *,
    replicates: int = 1000,
    seed: int = 0,
) -> Bootstrap:
    """Redraw blocks (whole documents, with clusters), the same for both curves at all steps.

    Each curve is (steps, NLL per block [E, B]); ``weight_B`` are the blocks' token counts.
    """
    labels = np.arange(len(weight_B)) if cluster_B is None else cluster_B
    _, owner = np.unique(labels, return_inverse=True)
    num_clusters = int(owner.max()) + 1
    draw = np.random.default_rng(seed)
    times_RC = draw.multinomial(num_clusters, np.full(num_clusters, 1 / num_clusters), replicates)
    total_R1 = times_RC @ np.bincount(owner, weight_B)[:, None]
    base_RE, other_RE = (
        times_RC @ _sums(values_EB * weight_B, owner, num_clusters).T / total_R1
        for _, values_EB in (reference, variant)
    )
    ratios = []
    for base, other in zip(base_RE, other_RE):
        there = arrival(variant[0], other.tolist(), float(base[-1]))
        ratios.append(math.nan if there is None else reference[0][-1] / there.step)
    found = np.asarray(ratios)
    never = float(np.isnan(found).mean())
    if never == 1:
        return Bootstrap(None, None, never)
    low, high = np.nanquantile(found, [0.025, 0.975])
    return Bootstrap(float(low), float(high), never)


def _sums(values_EB: Floats, owner_B: NDArray[np.int64], num_clusters: int) -> Floats:
    """Sums over the blocks of each cluster, [E, C]."""
    sums = np.zeros((len(values_EB), num_clusters))
    np.add.at(sums.T, owner_B, values_EB.T)
    return sums


def detrended_spread(values: Sequence[float]) -> float | None:
    """Standard deviation about a slowly changing trend, from second differences.

    Over the last half of the values, where the trend is nearly straight; None for fewer than four.
    """
    late = np.asarray(values[len(values) // 2 :] if len(values) >= 8 else values, dtype=np.float64)
    if len(late) < 4 or not np.isfinite(late).all():
        return None
    return float(np.sqrt(np.mean(np.diff(late, 2) ** 2) / 6))


# A finished run as a comparison sees it: its curve, its per-block values, its settings

CONTEXT_BINS = 8


@dataclass(frozen=True)
class RunRecord:
    """What one run folder says."""

    folder: Path
    config: RunConfig
    description: dict[str, Any]
    steps: list[int]
    nll: list[float]
    nll_se: list[float | None]
    seconds: list[float]
    """Training time at each evaluation; evaluation and saving are not in it."""
    block_nll_EB: Floats
    last: Likelihood
    train_lines: list[dict[str, Any]]
    diverged_at: int | None = None
    """The first step whose NLL is not finite: such a run can lose a grid and do nothing else."""

    @property
    def curve(self) -> tuple[list[float], list[float], list[float]]:
        """(steps, nll, seconds), for the speed-up."""
        return [float(step) for step in self.steps], self.nll, self.seconds

    @property
    def tokens_per_second(self) -> float:
        """Median over the training lines."""
        return float(np.median([line["tokens_per_second"] for line in self.train_lines]))

    def summary(self) -> dict[str, Any]:
        """The numbers of results.json."""
        norms = [line["gradient_norm"] for line in self.train_lines]
        norms = [math.log(max(norm, 1e-30)) for norm in norms if norm is not None]
        return {
            "run": self.folder.name,
            "seed": self.config.train.seed,
            "steps": self.steps,
            "nll": self.nll,
            "nll_se": self.nll_se,
            "seconds": self.seconds,
            "bits_per_byte": self.last.summary()["bits_per_byte"],
            "tokens_per_second": self.tokens_per_second,
            "nll_by_context": [
                {"low": p.low, "high": p.high, "nll": p.nll, "se": p.standard_error}
                for p in binned_curve(self.last, CONTEXT_BINS)
            ],
            "nll_spread": detrended_spread(self.nll),
            "log_gradient_norm_spread": detrended_spread(norms),
            "largest_weight": max(line["largest_weight"] for line in self.train_lines),
            "clipped_share": float(np.mean([line["clipped_share"] for line in self.train_lines])),
        }

    def samples(self, limit: int = 2) -> list[str]:
        """The last samples that the run wrote."""
        files = sorted((self.folder / "samples").glob("step-*.txt"))
        text = files[-1].read_text(encoding="utf-8", errors="replace") if files else ""
        return [part.strip("\n") for part in text.split("\n\n--------\n\n")][:limit] if text else []


def read_run(folder: Path) -> RunRecord:
    """Read a run folder; a UserError says what is missing."""
    if not folder.is_dir():
        raise UserError(f"there is no folder {folder}")
    if not (folder / "config.json").exists():
        raise UserError(f"{folder} is not a run folder: it has no config.json")
    config = load_config(folder / "config.json")
    lines = _whole_lines(folder / "metrics.jsonl")
    checks = [line for line in lines if line["kind"] == "validation"]
    if not checks or checks[-1]["step"] != config.train.steps:
        raise UserError(
            f"{folder} has no validation at its last step {config.train.steps}; finish it with "
            f"bellmask train {folder} --out {folder} --resume auto"
        )
    if not any(line["kind"] == "train" for line in lines):
        raise UserError(f"{folder / 'metrics.jsonl'} has no line of training metrics")
    block_nll, diverged = [], []
    for line in checks:
        last = _load(folder, line["step"])
        block_nll.append(last.block_nll)
        if not (is_finite(line["nll"]) and last.is_finite):
            diverged.append(line["step"])
    if len({len(values) for values in block_nll}) > 1:
        raise UserError(f"{folder} was validated on different blocks; it cannot be compared")
    return RunRecord(
        folder,
        config,
        read_description(folder),
        [line["step"] for line in checks],
        [math.nan if line["step"] in diverged else line["nll"] for line in checks],
        [line["nll_se"] for line in checks],
        [line["seconds"] for line in checks],
        np.stack(block_nll),
        last,
        [line for line in lines if line["kind"] == "train"],
        diverged[0] if diverged else None,
    )


_NUMBERS = {
    "validation": ("seconds",),
    "train": ("tokens_per_second", "largest_weight", "clipped_share"),
}
"""What is read of each kind of line."""
_MAY_BE_ABSENT = {"validation": ("nll", "nll_se"), "train": ("gradient_norm",)}
"""No NLL of a model that diverged, no error of a single block, no norm of skipped steps."""


def _whole_lines(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics.jsonl; UserError where one lacks a number that is read."""
    lines = read_metrics(path)
    for line in lines:
        for name in _NUMBERS.get(line["kind"], ()):
            if not is_finite(line.get(name)):
                raise UserError(f"{path}, step {line['step']}: {name} is no finite number")
        for name in _MAY_BE_ABSENT.get(line["kind"], ()):
            if line.get(name, "") is not None and not is_number(line.get(name)):
                raise UserError(f"{path}, step {line['step']}: {name} is no number")
    return lines


def _load(folder: Path, step: int) -> Likelihood:
    path = folder / "validation" / f"step-{step:09d}.npz"
    try:
        return Likelihood.load(path)
    except FileNotFoundError:
        raise UserError(f"{path} is missing; the run cannot be compared") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path} is damaged: {error}") from None


_MUST_AGREE = {
    "tokenizer_fingerprint": "tokenizers",
    "train_fingerprint": "training texts",
    "valid_fingerprint": "validation texts",
}
_WHERE_TEXT_LIES = ("data.train", "data.from_files", "data.valid", "data.cache")
_SAME_BUDGET = ("train.steps", "train.batch_size", "train.random_length_fraction")


def check_comparable(runs: list[RunRecord]) -> None:
    """Refuse, saying why, runs whose text, tokenizer, evaluation masks or budget differ."""
    first = runs[0]
    masked = [run for run in runs if not run.last.is_causal]
    for other in runs[1:]:
        pair = f"{first.folder} and {other.folder} cannot be compared"
        for key, what in _MUST_AGREE.items():
            if first.description.get(key) != other.description.get(key):
                raise UserError(f"{pair}: their {what} differ")
        same_kind = first if other.last.is_causal else masked[0]
        if not all(one.last.is_paired_with(other.last) for one in (first, same_kind)):
            raise UserError(f"{pair}: their validation blocks or masks differ")
        left, right = first.config.flat(), other.config.flat()
        for option in left:
            is_watched = option.startswith("data.") and option not in _WHERE_TEXT_LIES
            if (is_watched or option in _SAME_BUDGET) and left[option] != right[option]:
                raise UserError(f"{pair}: {option} is {left[option]} and {right[option]}")
        if first.steps != other.steps:
            raise UserError(f"{pair}: they were validated at different steps")


def read_run_json(path: Path) -> Any:
    """A JSON file, or a UserError."""
    try:
        return read_json(path)
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {path}: {error}") from None


# All runs of a comparison: the best grid point of each variant, beside the reference

FORMAT = 1
BOOTSTRAP_REPLICATES = 1000
ARM = "arm"
"""A variant of this name is the autoregressive model on the same blocks."""


@dataclass(frozen=True)
class Entry:
    """A run and its place in the comparison."""

    variant: str
    seed: int
    point: str
    record: RunRecord


def summarize(entries: Sequence[Entry], reference: str) -> dict[str, Any]:
    """Everything of results.json; the reference's runs decide the target, seed by seed."""
    check_comparable([entry.record for entry in entries])
    names = list(dict.fromkeys(entry.variant for entry in entries))
    if reference not in names:
        raise UserError(f"the reference {reference} is not among {', '.join(names)}")
    for name, point in dict.fromkeys((entry.variant, entry.point) for entry in entries):
        _check_one_thing([e.record for e in entries if (e.variant, e.point) == (name, point)], name)
    best = {name: _best_point([e for e in entries if e.variant == name]) for name in names}
    chosen = {
        name: {e.seed: e.record for e in entries if e.variant == name and e.point == best[name]}
        for name in names
    }
    for record in (one for runs in chosen.values() for one in runs.values()):
        if record.diverged_at is not None:
            raise UserError(
                f"{record.folder} diverged: its NLL at step {record.diverged_at} is not finite; "
                "leave it out, or train it with a lower rate"
            )
    first = next(iter(chosen[reference].values()))
    unigram = first.description.get("unigram_nll")
    variants = {name: _variant(name, chosen, reference) for name in names}
    for name in names:
        variants[name]["grid_point"] = best[name]
    summary = {
        "format": FORMAT,
        "bellmask": __version__,
        "reference": reference,
        "steps": first.config.train.steps,
        "seeds": sorted(chosen[reference]),
        "data": _data(first),
        "machine": {k: first.description.get(k) for k in ("torch", "python", "machine", "device")},
        "options": first.config.resolved().to_dict(),
        "unigram_nll": unigram if is_finite(unigram) else None,
        "variants": variants,
        "is_annealed": first.config.optim.curve != "constant",
    }
    summary["progress"] = _progress(summary)
    if len({entry.point for entry in entries}) > 1:
        summary["grid"] = _grid(entries, names, reference)
    return summary


def _check_one_thing(runs: Sequence[RunRecord], name: str) -> None:
    """Refuse seeds of one variant that differ in more than the seed."""
    first = runs[0].config.resolved().flat()
    for run in runs[1:]:
        mine = run.config.resolved().flat()
        own = ("train.seed", "framework.order_seed")  # a seed may bring its own order
        others = [o for o in mine if mine[o] != first[o] and o not in own and not is_free_option(o)]
        if others:
            raise UserError(
                f"{runs[0].folder} and {run.folder} are both {name}, but differ in "
                f"{', '.join(others)}"
            )


def _best_point(entries: Sequence[Entry]) -> str:
    """The grid point with the lowest mean final NLL, among those where most seeds survived."""
    points: dict[str, list[float]] = {}
    for entry in entries:
        points.setdefault(entry.point, []).append(entry.record.nll[-1])

    def rank(point: str) -> tuple[int, float]:
        mean = statistics.mean(points[point])
        return -len(points[point]), math.inf if math.isnan(mean) else mean

    return min(points, key=rank)


def _data(record: RunRecord) -> dict[str, Any]:
    options = record.config.data
    kept = ("train_blocks", "valid_blocks", "num_tokens", "train_fingerprint", "valid_fingerprint")
    return {
        "train": options.train,
        "tokenizer": options.tokenizer,
        "block_length": options.block_length,
        "packing": options.packing,
        **{key: record.description.get(key) for key in kept},
    }


def _variant(
    name: str, chosen: Mapping[str, Mapping[int, RunRecord]], reference: str
) -> dict[str, Any]:
    """One variant: its runs, and its comparison with the reference where seeds pair up."""
    runs, base = chosen[name], chosen[reference]
    paired = sorted(runs.keys() & base.keys())
    if not paired:
        raise UserError(f"{name} and {reference} have no seed in common")
    found: dict[str, Any] = {
        "options": _differing(runs[paired[0]], base[paired[0]]),
        "law": law_summary(runs[paired[0]].config),
        "runs": [runs[seed].summary() for seed in sorted(runs)],
        "nll": statistics.mean(runs[seed].nll[-1] for seed in paired),
        "is_exact": runs[paired[0]].last.is_exact,
        "samples": runs[paired[0]].samples(),
    }
    if name != reference:
        found["comparison"] = _compare([(base[seed], runs[seed]) for seed in paired])
    return found


def _differing(run: RunRecord, base: RunRecord) -> dict[str, Any]:
    """Options in which a run differs from the reference."""
    mine, theirs = run.config.resolved().flat(), base.config.resolved().flat()
    return {option: value for option, value in mine.items() if value != theirs[option]}


def _compare(
    pairs: Sequence[tuple[RunRecord, RunRecord]], *, with_bootstrap: bool = True
) -> dict[str, Any]:
    found = [speed_up(base.curve, run.curve) for base, run in pairs]
    missed = [one.gap for one in found if one.ratio is None]
    differences = [run.last.difference(base.last) for base, run in pairs]
    gaps = [gap for gap, _ in differences]
    base, run = pairs[0]
    bootstrap = paired_bootstrap(
        (base.curve[0], base.block_nll_EB),
        (run.curve[0], run.block_nll_EB),
        base.last.length_B.astype(float),
        base.last.clusters,
        replicates=BOOTSTRAP_REPLICATES if with_bootstrap else 1,
    )
    ratios = [one.ratio for one in found if one.ratio is not None]
    are_times_fair = all(_pace(base) == _pace(run) for base, run in pairs)
    times = [one.time_ratio for one in found if one.time_ratio is not None and are_times_fair]
    is_bound = any(one.is_bound for one in found)
    return {
        "per_seed": [asdict(one) for one in found],
        "num_reached": len(ratios),
        "missed_gap": statistics.mean(missed) if missed else None,
        "num_seeds": len(found),
        "is_bound": is_bound,
        "speed_up": _interval(ratios, len(found), is_bound),
        "time_speed_up": _interval(times, len(found), is_bound),
        "gap": statistics.mean(gaps),
        "gap_se": statistics.mean(error for _, error in differences),
        "gaps": gaps,
        "gap_se_over_seeds": _standard_error(gaps),
        "bootstrap_first_seed": asdict(bootstrap),
    }


def _pace(record: RunRecord) -> list[Any]:
    """What must agree for times to be compared."""
    keys = ("threads", "processes", "device", "precision", "machine", "torch")
    return [record.description.get(key) for key in keys]


def _standard_error(values: Sequence[float]) -> float | None:
    """Of the mean, over seeds; None for a single one."""
    return statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else None


def _interval(ratios: Sequence[float], num_seeds: int, is_bound: bool) -> dict[str, Any] | None:
    """Mean and interval over seeds; no number unless all arrived, no interval for a bound."""
    if len(ratios) < num_seeds:
        return None
    found = asdict(ratio_over_seeds(ratios))
    return {**found, "low": None, "high": None} if is_bound else found


def _progress(summary: Mapping[str, Any]) -> dict[str, float | None]:
    """How much the reference has learned: below the unigram, and of the way to an ARM."""
    unigram, variants = summary["unigram_nll"], summary["variants"]
    target = variants[summary["reference"]]["nll"]
    arm = variants[ARM]["nll"] if ARM in variants else None
    if unigram is None:
        return {"below_unigram": None, "share_to_arm": None}
    share = None
    if arm is not None and max(arm, target) < unigram:
        share = (unigram - target) / (unigram - arm)
    return {"below_unigram": unigram - target, "share_to_arm": share}


def _grid(entries: Sequence[Entry], names: Sequence[str], reference: str) -> list[dict[str, Any]]:
    """Final NLL at every grid point, and the speed-up when all use that same point."""
    rows = []
    for point in dict.fromkeys(entry.point for entry in entries):
        at: dict[str, dict[int, RunRecord]] = {
            name: {e.seed: e.record for e in entries if e.variant == name and e.point == point}
            for name in names
        }
        row: dict[str, Any] = {"point": point, "nll": {}, "speed_up": {}}
        for name in names:
            if at[name]:
                row["nll"][name] = statistics.mean(r.nll[-1] for r in at[name].values())
            seeds = sorted(at[name].keys() & at[reference].keys())
            if name != reference and seeds:
                pairs = [(at[reference][s], at[name][s]) for s in seeds]
                row["speed_up"][name] = _compare(pairs, with_bootstrap=False)["speed_up"]
        rows.append(row)
    return rows
