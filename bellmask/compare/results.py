"""Runs → results.json: speed-ups per seed and over seeds, with the numbers needed to judge them.

Each run folder is read into a :class:`RunRecord`; runs whose text, masks or budget differ are
rejected. A variant's record has its runs, its law as numbers, and its speed-up over the reference.

E evaluations, B blocks, R bootstrap replicates.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bellmask import __version__
from bellmask.config.config import RunConfig, is_free_option
from bellmask.data.blocks import Blocks, Row
from bellmask.diffusion.objectives import ChainRule
from bellmask.diffusion.progress import AdaptiveLaw
from bellmask.diffusion.theory import context_weights
from bellmask.evaluate.likelihood import Likelihood, binned_curve
from bellmask.storage.build import build_objective, describe_learning
from bellmask.storage.run_folder import read_config, read_description, read_metrics
from bellmask.train.planning import StepPlanner
from bellmask.utils.distributed import World
from bellmask.utils.errors import UserError, look_up
from bellmask.utils.files import is_finite, is_number, without_nan, write_text
from bellmask.utils.stats import Estimate, Floats, Labels

# The training distribution of a variant, from its options: density, times, context weights

DRAWN_STEPS = 100
"""Steps whose times make the histogram."""
POINTS = 101
BINS = 25


def law_summary(config: RunConfig, changes: Sequence[Mapping[str, Any]] = ()) -> dict[str, Any]:
    """Density on a grid, histogram of mask rates drawn, context weights, effective sample size.

    The histogram is of the mask rate 1 - alpha(t), which is t for the linear schedule, so that the
    middle-flat schedule can be compared with time laws. The effective sample share is that of
    sequences: E[s]^2 / E[s^2] of s = w(t) (1 - alpha), the contribution of a sequence to the loss.

    For a law that changed during training (``changes``: its lines of metrics), density and weights
    are the last ones, and the histogram covers the whole run.
    """
    objective, steps = build_objective(config), range(DRAWN_STEPS)
    law = getattr(objective, "law", None)
    if changes and isinstance(law, AdaptiveLaw):
        laws = [[line["step"] + 1, *line["parameters"]] for line in changes]
        law.load_state({"laws": [[0, *law.first], *laws]})
        steps = range(0, config.train.steps, max(1, config.train.steps // DRAWN_STEPS))
    omega = context_weights(objective, config.data.block_length)
    found: dict[str, Any] = {"context_weights": (omega / omega.sum()).tolist()}
    if isinstance(objective, ChainRule):  # no times: every context count of a row, once
        found |= {"t": [], "density": None, "mask_rate_histogram": None}
        return {**found, "name": describe_learning(config), "effective_sample_share": 1.0}
    law, schedule = objective.law, objective.schedule
    t = torch.linspace(0, 1, POINTS, dtype=torch.float64)
    one = Blocks.from_rows(iter([Row(np.zeros(1, dtype=np.int64), 1, 0)]))
    planner = StepPlanner(one, objective, config, World())  # as the run drew them
    times = torch.cat([planner.times(step) for step in steps])
    rate = 1 - schedule.alpha(times)
    signal = objective.weight(times) * rate
    histogram, _ = np.histogram(rate.numpy(), bins=BINS, range=(0, 1), density=True)
    return {
        **found,
        "name": f"{law}, {config.objective.name}, {schedule}",
        "t": t.tolist(),
        "density": law.pdf(t).tolist() if law.has_density else None,
        "mask_rate_histogram": histogram.tolist(),
        "effective_sample_share": float(signal.mean() ** 2 / (signal**2).mean()),
    }


# The speed-up: how many times fewer steps to the reference's final NLL, and its uncertainty
#
# y* is the reference's NLL at its last step T. A variant arrives at tau, where the final run of its
# evaluations with NLL <= y* starts, interpolated linearly in (log step, NLL) from the evaluation
# before. The speed-up is T / tau. Nothing is extrapolated: a variant that is above y* at its end
# has not arrived, and one that was below y* from its first evaluation on has a lower bound only.

BOOTSTRAP_REPLICATES = 1000
Curve = tuple[Sequence[float], Sequence[float], Sequence[float]]
"""Steps, NLL, seconds of training."""


# Paper: Fig. 6
def arrival(
    steps: Sequence[float], nll: Sequence[float], target: float
) -> tuple[float, bool] | None:
    """Where the final run of evaluations with NLL <= target starts; None if the last is above.

    The second value is True when the first evaluation was there already: the step is a bound.
    """
    above = [i for i, value in enumerate(nll) if not value <= target]  # nan counts as above
    if not above:
        return float(steps[0]), True
    last = above[-1]
    if last == len(nll) - 1:
        return None
    drop = nll[last] - nll[last + 1]
    share = (nll[last] - target) / drop if math.isfinite(drop) else 1.0
    log_step = math.log(steps[last]) * (1 - share) + math.log(steps[last + 1]) * share
    return math.exp(log_step), False


# Paper: Fig. 6
def speed_up(reference: Curve, variant: Curve) -> dict[str, Any]:
    """One seed's comparison; the reference's last NLL is the target.

    ``ratio`` is T / tau, ``time_ratio`` the same in seconds; both are None when the variant did not
    arrive, and lower bounds where ``is_bound``. ``gap`` is its last NLL minus the target.
    """
    steps, nll, seconds = variant
    last_step, target, last_second = (values[-1] for values in reference)
    found = {"target": target, "gap": nll[-1] - target}
    there = arrival(steps, nll, target)
    if there is None:
        return found | {"ratio": None, "time_ratio": None, "is_bound": False}
    step, is_bound = there
    at = float(np.interp(step, [0, *steps], [0.0, *seconds]))
    time_ratio = last_second / at if at > 0 else None
    return found | {"ratio": last_step / step, "time_ratio": time_ratio, "is_bound": is_bound}


# Paper: Fig. 6
def ratio_over_seeds(ratios: Sequence[float]) -> dict[str, Any]:
    """The headline: geometric mean over paired seeds, 95 % t-interval of the log ratios."""
    logs = Estimate.over_seeds([math.log(ratio) for ratio in ratios])
    low, high = (None if end is None else math.exp(end) for end in logs.interval)
    return {"mean": math.exp(logs.value), "low": low, "high": high, "num_seeds": logs.n}


# Paper: Fig. 6
def paired_bootstrap(
    steps: Sequence[float],
    reference_EB: Floats,
    variant_EB: Floats,
    weight_B: Floats,
    cluster_B: Labels | None = None,
    replicates: int = BOOTSTRAP_REPLICATES,
) -> dict[str, Any]:
    """Uncertainty due to the sample of validation blocks; training noise is not included.

    Blocks (whole documents, with clusters) are redrawn, the same for both curves at all steps.
    ``weight_B`` are the blocks' token counts. ``low`` and ``high`` are the 95 % interval over
    replicates that reach the target, ``never_share`` counts the others.
    """
    labels = np.arange(len(weight_B)) if cluster_B is None else cluster_B
    _, owner_B = np.unique(labels, return_inverse=True)
    count = int(owner_B.max()) + 1
    draw = np.random.default_rng(0)
    times_RC = draw.multinomial(count, np.full(count, 1 / count), replicates)
    weight_RB = times_RC[:, owner_B] * weight_B
    weight_RB /= weight_RB.sum(axis=1, keepdims=True)
    # both in the same way, so that equal curves are equal to the last digit
    base_RE, other_RE = weight_RB @ reference_EB.T, weight_RB @ variant_EB.T
    ratios = []
    for base, other in zip(base_RE.tolist(), other_RE.tolist()):
        there = arrival(steps, other, base[-1])
        ratios.append(math.nan if there is None else steps[-1] / there[0])
    never = float(np.isnan(ratios).mean())
    ends = [None, None] if never == 1 else np.nanquantile(ratios, [0.025, 0.975]).tolist()
    return {"low": ends[0], "high": ends[1], "never_share": never}


def detrended_spread(values: Sequence[float]) -> float | None:
    """Standard deviation about a slowly changing trend, from second differences.

    Over the last half of the values, where the trend is nearly straight; None for fewer than four.
    """
    late = np.asarray(values[len(values) // 2 :] if len(values) >= 8 else values, dtype=np.float64)
    if len(late) < 4 or not np.isfinite(late).all():
        return None
    return float(np.sqrt(np.mean(np.diff(late, 2) ** 2) / 6))


# The parts of a finished run that a comparison reads: curve, per-block values, settings

CONTEXT_BINS = 8


@dataclass(frozen=True)
class RunRecord:
    """The contents of one run folder."""

    folder: Path
    config: RunConfig
    description: dict[str, Any]
    steps: list[int]
    nll: list[float]
    nll_se: list[float | None]
    seconds: list[float]
    """Training time at each evaluation, excluding evaluation and saving."""
    block_nll_EB: Floats
    last: Likelihood
    train_lines: list[dict[str, Any]]
    law_lines: list[dict[str, Any]]
    """Where the time law changed while training."""

    @property
    def curve(self) -> Curve:
        return self.steps, self.nll, self.seconds

    def summary(self) -> dict[str, Any]:
        train = {key: [line[key] for line in self.train_lines] for key in _READ["train"]}
        norms = [math.log(max(n, 1e-30)) for n in train["gradient_norm"] if n is not None]
        return {
            "run": self.folder.name,
            "seed": self.config.train.seed,
            **{name: getattr(self, name) for name in ("steps", "nll", "nll_se", "seconds")},
            "bits_per_byte": self.last.summary()["bits_per_byte"],
            "tokens_per_second": float(np.median(train["tokens_per_second"])),
            "nll_by_context": [
                {"low": p.low, "high": p.high, "nll": p.nll, "se": p.standard_error}
                for p in binned_curve(self.last, CONTEXT_BINS)
            ],
            "nll_spread": detrended_spread(self.nll),
            "log_gradient_norm_spread": detrended_spread(norms),
            "largest_weight": max(train["largest_weight"]),
            "clipped_share": float(np.mean(train["clipped_share"])),
            **({"law": self.law_lines} if self.law_lines else {}),
        }

    def samples(self) -> list[str]:
        """Two of the last samples in the run folder."""
        files = sorted((self.folder / "samples").glob("step-*.txt"))
        text = files[-1].read_text(encoding="utf-8", errors="replace") if files else ""
        return [part.strip("\n") for part in text.split("\n\n--------\n\n")][:2] if text else []


def read_run(folder: Path) -> RunRecord:
    """Read a run folder; a UserError says what is missing."""
    if not (folder / "config.json").exists():
        raise UserError(f"{folder} is not a run folder: it has no config.json")
    config = read_config(folder)
    lines = _whole_lines(folder / "metrics.jsonl")
    checks, train, laws = ([r for r in lines if r["kind"] == kind] for kind in _READ)
    if not checks or checks[-1]["step"] != config.train.steps:
        raise UserError(
            f"{folder} has no validation at its last step {config.train.steps}; finish it with "
            f"bellmask resume {folder}, or train with another --validation.every"
        )
    if not train:
        raise UserError(f"{folder / 'metrics.jsonl'} has no training metrics")
    likelihoods = []
    for line in checks:
        path = folder / "validation" / f"step-{line['step']:09d}.npz"
        try:
            likelihoods.append(Likelihood.load(path))
        except (OSError, ValueError) as error:
            raise UserError(f"{path} is missing or damaged: {error}") from None
    if len({len(likelihood.length_B) for likelihood in likelihoods}) > 1:
        raise UserError(f"{folder} was validated on different blocks; it cannot be compared")
    nll = [
        line["nll"] if is_finite(line["nll"]) and found.is_finite else math.nan
        for line, found in zip(checks, likelihoods)
    ]
    steps, errors, seconds = ([r[key] for r in checks] for key in ("step", "nll_se", "seconds"))
    about, blocks_EB = read_description(folder), np.stack([one.block_nll for one in likelihoods])
    curve = (steps, nll, errors, seconds, blocks_EB)
    return RunRecord(folder, config, about, *curve, likelihoods[-1], train, laws)


_READ = {
    "validation": ("seconds", "nll", "nll_se"),
    "train": ("tokens_per_second", "largest_weight", "clipped_share", "gradient_norm"),
    "law": ("mean", "width"),
}
"""What is read of each kind of line."""
_MAY_BE_NONE = ("nll", "nll_se", "gradient_norm")
"""None: a diverged model's NLL, the error of a single block, the norm of skipped steps."""


def _whole_lines(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics.jsonl; UserError where one lacks a number that is read."""
    lines = read_metrics(path)
    for line in lines:
        for name in _READ.get(line["kind"], ()):
            value, may_be_none = line.get(name, ""), name in _MAY_BE_NONE
            if not (value is None or is_number(value) if may_be_none else is_finite(value)):
                raise UserError(f"{path}, step {line['step']}: {name} is not a number")
    return lines


_MUST_AGREE = {
    "tokenizer_fingerprint": "tokenizers",
    "train_fingerprint": "training texts",
    "valid_fingerprint": "validation texts",
}
_WHERE_TEXT_LIES = ("data.train", "data.from_files", "data.valid", "data.cache")
_SAME_BUDGET = ("train.steps", "train.batch_size", "train.random_length_fraction")


def check_comparable(runs: list[RunRecord]) -> None:
    """Reject, with the reason, runs that differ in text, tokenizer, evaluation masks or budget."""
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


# All runs of a comparison: the best grid point of each variant, and the reference

FORMAT = 1
ARM = "arm"
"""The variant with this name is the autoregressive model on the same blocks."""
PACE = ("threads", "processes", "device", "precision", "machine", "torch")
"""What must agree for times to be compared."""


@dataclass(frozen=True)
class Entry:
    """A run and its place in the comparison."""

    variant: str
    point: str
    record: RunRecord


Runs = dict[int, RunRecord]
"""By seed."""


def summarize(entries: Sequence[Entry], reference: str) -> dict[str, Any]:
    """Everything of results.json; the reference's runs decide the target, seed by seed."""
    check_comparable([entry.record for entry in entries])
    names = list(dict.fromkeys(entry.variant for entry in entries))
    points = list(dict.fromkeys(entry.point for entry in entries))
    look_up("reference", reference, dict.fromkeys(names))
    runs: dict[str, dict[str, Runs]] = {point: {name: {} for name in names} for point in points}
    for entry in entries:
        seeds = runs[entry.point][entry.variant]
        same = next(iter(seeds.values()), entry.record)  # runs of a variant differ in the seed only
        own = ("train.seed", "framework.order_seed")  # a seed may bring its own order
        differing = _differing(entry.record, same)
        if others := [o for o in differing if o not in own and not is_free_option(o)]:
            pair = f"{same.folder} and {entry.record.folder}"
            raise UserError(f"{pair} are both {entry.variant} but differ in {', '.join(others)}")
        seeds[entry.record.config.train.seed] = entry.record
    best = {name: min(points, key=lambda point: _rank(runs[point][name])) for name in names}
    chosen = {name: runs[best[name]][name] for name in names}
    first = next(iter(chosen[reference].values()))
    unigram = first.description.get("unigram_nll")
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
        "variants": {
            name: _variant(name, chosen, reference) | {"grid_point": best[name]} for name in names
        },
        "is_annealed": first.config.optim.curve != "constant",
    }
    summary["progress"] = _progress(summary)
    if len(points) > 1:
        summary["grid"] = [_grid_row(point, runs[point], reference) for point in points]
    return summary


def _differing(run: RunRecord, base: RunRecord) -> dict[str, Any]:
    """Options in which a run differs from another one."""
    mine, theirs = run.config.resolved().flat(), base.config.resolved().flat()
    return {option: value for option, value in mine.items() if value != theirs[option]}


def _final_nll(runs: Runs) -> float:
    return statistics.mean(run.nll[-1] for run in runs.values())


def _rank(runs: Runs) -> tuple[int, float]:
    """Grid points by their mean final NLL, among those with the most finished seeds."""
    mean = _final_nll(runs) if runs else math.nan
    return -len(runs), math.inf if math.isnan(mean) else mean


def _data(record: RunRecord) -> dict[str, Any]:
    options, names = record.config.data, ("train", "tokenizer", "block_length", "packing")
    about = ("train_blocks", "valid_blocks", "num_tokens", "train_fingerprint", "valid_fingerprint")
    return {
        **{name: getattr(options, name) for name in names},
        **{key: record.description.get(key) for key in about},
    }


def _variant(name: str, chosen: Mapping[str, Runs], reference: str) -> dict[str, Any]:
    """One variant: its runs, and its comparison with the reference where seeds pair up."""
    runs, base = chosen[name], chosen[reference]
    for run in runs.values():  # a grid has dropped such runs, unless there is no better one
        diverged = [step for step, nll in zip(run.steps, run.nll) if math.isnan(nll)]
        if diverged:
            raise UserError(f"{run.folder} diverged at step {diverged[0]}; lower its learning rate")
    paired = sorted(runs.keys() & base.keys())
    if not paired:
        raise UserError(f"{name} and {reference} have no seed in common")
    first = runs[paired[0]]
    found: dict[str, Any] = {
        "options": _differing(first, base[paired[0]]),
        "law": law_summary(first.config, first.law_lines),
        "runs": [runs[seed].summary() for seed in sorted(runs)],
        "nll": _final_nll({seed: runs[seed] for seed in paired}),
        "is_exact": first.last.is_exact,
        "samples": first.samples(),
    }
    if name != reference:
        found["comparison"] = _compare([(base[seed], runs[seed]) for seed in paired])
    return found


def _compare(
    pairs: Sequence[tuple[RunRecord, RunRecord]], replicates: int = BOOTSTRAP_REPLICATES
) -> dict[str, Any]:
    """Of (reference, variant), seed by seed."""
    found = [speed_up(base.curve, run.curve) for base, run in pairs]
    differences = [run.last.difference(base.last) for base, run in pairs]
    base, run = pairs[0]
    curves, blocks = (base.block_nll_EB, run.block_nll_EB), base.last
    weight_B = blocks.length_B.astype(float)
    bootstrap = paired_bootstrap(base.steps, *curves, weight_B, blocks.clusters, replicates)
    are_times_fair = all(
        base.description.get(key) == run.description.get(key) for base, run in pairs for key in PACE
    )
    whole = over_seeds(found, differences, with_time=are_times_fair)
    return {**whole, "bootstrap_first_seed": bootstrap}


def over_seeds(
    found: Sequence[dict[str, Any]],
    differences: Sequence[tuple[float, float]],
    *,
    with_time: bool,
) -> dict[str, Any]:
    """One comparison from each seed's :func:`speed_up` and final (difference, standard error)."""
    missed = [one["gap"] for one in found if one["ratio"] is None]
    gap = Estimate.over_seeds([value for value, _ in differences])
    is_bound = any(one["is_bound"] for one in found)

    def mean_of(key: str) -> dict[str, Any] | None:
        """Summary over seeds; no number unless all reached the target, no interval for a bound."""
        ratios = [one[key] for one in found if one[key] is not None]
        if len(ratios) < len(found):
            return None
        return ratio_over_seeds(ratios) | ({"low": None, "high": None} if is_bound else {})

    return {
        "per_seed": list(found),
        "num_reached": len(found) - len(missed),
        "missed_gap": statistics.mean(missed) if missed else None,
        "num_seeds": len(found),
        "is_bound": is_bound,
        "speed_up": mean_of("ratio"),
        "time_speed_up": mean_of("time_ratio") if with_time else None,
        "gap": gap.value,
        "gap_se": statistics.mean(error for _, error in differences),
        "gaps": [value for value, _ in differences],
        "gap_se_over_seeds": gap.se,
    }


def _progress(summary: Mapping[str, Any]) -> dict[str, float | None]:
    """How much the reference has learned: below the unigram, and progress toward an ARM."""
    unigram, variants = summary["unigram_nll"], summary["variants"]
    if unigram is None:
        return {"below_unigram": None, "share_to_arm": None}
    below, share = unigram - variants[summary["reference"]]["nll"], None
    if ARM in variants and below > 0 and variants[ARM]["nll"] < unigram:
        share = below / (unigram - variants[ARM]["nll"])
    return {"below_unigram": below, "share_to_arm": share}


def _grid_row(point: str, runs: Mapping[str, Runs], reference: str) -> dict[str, Any]:
    """Final NLLs at a grid point, and the speed-ups when all use that same point."""
    row: dict[str, Any] = {"point": point, "nll": {}, "speed_up": {}}
    for name, mine in runs.items():
        if mine:
            row["nll"][name] = _final_nll(mine)
        pairs = [(runs[reference][s], mine[s]) for s in sorted(mine.keys() & runs[reference])]
        if name != reference and pairs:
            row["speed_up"][name] = _compare(pairs, replicates=1)["speed_up"]
    return row


def write_json(path: Path, content: dict[str, Any], *, is_quiet: bool = False) -> None:
    """Write results as JSON; print a note if it replaces different ones."""
    text = json.dumps(without_nan(content), indent=1, allow_nan=False) + "\n"
    if not is_quiet and path.exists() and path.read_bytes() != text.encode():
        print(f"note: replacing different results in {path.parent}")
    write_text(path, text)
