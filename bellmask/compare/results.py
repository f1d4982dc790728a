"""Runs → results.json: speed-ups per seed and over seeds, and what they must be read beside."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from bellmask import __version__
from bellmask.compare.laws import describe_law
from bellmask.compare.records import RunRecord, check_comparable
from bellmask.compare.speedup import over_seeds, paired_bootstrap, speed_up
from bellmask.config.options import FREE_OPTIONS
from bellmask.utils.errors import UserError
from bellmask.utils.files import is_finite

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
        others = [o for o in mine if mine[o] != first[o] and o not in own]
        others = [o for o in others if not o.startswith(FREE_OPTIONS)]
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
        "law": describe_law(runs[paired[0]].config),
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
    found = asdict(over_seeds(ratios))
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
