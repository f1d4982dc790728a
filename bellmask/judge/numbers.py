"""Outcomes → the numbers of judge.json: rates of each seed, and over seeds (paper Table 5)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from bellmask.judge.published_length_control import Calibration
from bellmask.judge.verdicts import Judged
from bellmask.judge.win_rates import (
    WinRates,
    by_category,
    by_turn,
    length_controlled,
    lengths,
    over_seeds,
    published_length_controlled,
    readable,
    win_rates,
)
from bellmask.utils.errors import UserError
from bellmask.utils.stats import MIN_CLUSTERS

HEADLINES = ("win_rate", "non_tie", "length_controlled", "published_length_controlled")
"""Table 5 has the first three; the last one only with AlpacaEval's files."""
COUNTS = ("wins", "losses", "ties", "unreadable")
PARTS = {"by_category": by_category, "by_turn": by_turn}
ZERO = 1e-12
"""Errors below are 0 but for rounding."""
IN_FILE = "the fitted rate is in judge.json only"


def seed_numbers(judged: Sequence[Judged], calibration: Calibration | None) -> dict[str, Any]:
    """Rates of one seed; each headline has a value and its standard error over tasks."""
    rates = asdict(win_rates(judged))
    length_a, length_b = lengths(judged)
    numbers: dict[str, Any] = {
        "counts": {name: rates[name] for name in COUNTS},
        "win_rate": rates["win_rate"],
        "non_tie": rates["non_tie"],
        "length_controlled": _controlled(judged),
        "by_category": _rates(by_category(judged)),
        "by_turn": _rates(by_turn(judged)),
        "mean_length_a": float(length_a.mean()),
        "mean_length_b": float(length_b.mean()),
    }
    if calibration is not None:
        numbers["published_length_controlled"] = _published(judged, calibration)
    return numbers


def _rates(groups: dict[str, list[Judged]]) -> dict[str, Any]:
    return {name: asdict(win_rates(group)) for name, group in groups.items()}


def _controlled(judged: Sequence[Judged]) -> dict[str, Any]:
    """Two terms; nan where nothing was judged, not usable where the fit only reaches out."""
    found = length_controlled(judged)
    if found is None:
        nan = float("nan")
        return {"value": nan, "error": nan, "note": "nothing was judged", "is_usable": False}
    length_a, length_b = lengths(readable(judged))
    about = asdict(found)
    is_usable = not about.pop("is_separated")
    if (length_a < length_b).all() or (length_a > length_b).all():
        word = "shorter" if length_a[0] < length_b[0] else "longer"
        reach = f"A's answers are all {word} than B's, so equal length is out of the data's reach"
        about["note"] = "; ".join(filter(None, (about["note"], reach)))
        is_usable = False
    if not is_usable and np.isfinite(found.rate):
        about["note"] = f"{about['note']}; {IN_FILE}"
    return {"value": about.pop("rate"), **about, "is_usable": is_usable}


def _published(judged: Sequence[Judged], calibration: Calibration) -> dict[str, Any]:
    """AlpacaEval's own rate; where it cannot be had, the reason: the other rates stand."""
    try:
        about = asdict(published_length_controlled(judged, calibration))
    except UserError as error:
        return {"value": float("nan"), "error": float("nan"), "note": str(error)}
    return {"value": about.pop("rate"), **about, "weights": list(about["weights"])}


def summarise(
    results: Sequence[dict[str, Any]], judged: Sequence[Sequence[Judged]]
) -> dict[str, Any]:
    """Mean ± deviation over seeds of every headline that there is, and of categories and turns.

    ``judged`` holds the outcomes of each seed: errors over tasks come from all of them together,
    around the rate of all. A task is one cluster, whichever the seed.
    """
    everything = [one for seed in judged for one in seed]
    errors = _errors(everything, win_rates(everything))
    controlled = length_controlled(everything)
    errors["length_controlled"] = float("nan")
    if controlled is not None:
        errors["length_controlled"] = _known(controlled.error, readable(everything))
    found: dict[str, Any] = {}
    for name in (name for name in HEADLINES if name in results[0]):
        mine = [result[name] for result in results]
        # the full model's error is a spread of predictions, one for each seed
        spread = float(np.mean([one["error"] for one in mine]))
        found[name] = _over_seeds(mine, errors.get(name, spread))
    found["length_controlled"]["is_usable"] = all(
        result["length_controlled"]["is_usable"] for result in results
    )
    return found | {
        name: _part([result[name] for result in results], everything, split)
        for name, split in PARTS.items()
    }


def _errors(judged: Sequence[Judged], rates: WinRates) -> dict[str, float]:
    """Of the win rate over its tasks, of the non-tie rate over those that have a winner."""
    chosen = [one for one in judged if one.outcome.result in ("win", "loss")]
    return {
        "win_rate": _known(rates.win_rate.error, readable(judged)),
        "non_tie": _known(rates.non_tie.error, chosen),
    }


def _known(error: float, judged: Sequence[Judged]) -> float:
    """nan for an error of 0 over few tasks: that they agree says little of the next one."""
    num_tasks = len({one.pair.task.index for one in judged})
    return float("nan") if error < ZERO and num_tasks < MIN_CLUSTERS else error


def _over_seeds(values: Sequence[dict[str, Any]], error: float) -> dict[str, Any]:
    """Mean and deviation of the values, and the error over tasks."""
    return {**asdict(over_seeds([one["value"] for one in values])), "error": error}


def _part(
    seeds: Sequence[dict[str, Any]],
    judged: Sequence[Judged],
    split: Callable[[Sequence[Judged]], dict[str, list[Judged]]],
) -> dict[str, Any]:
    """Of each category or turn: counts of all seeds together, rates over seeds."""
    found = {}
    for name, group in split(judged).items():
        mine = [seed[name] for seed in seeds]
        together = win_rates(group)
        found[name] = {count: getattr(together, count) for count in COUNTS}
        found[name] |= {
            rate: _over_seeds([one[rate] for one in mine], error)
            for rate, error in _errors(group, together).items()
        }
    return found
