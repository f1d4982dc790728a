"""Outcomes → the numbers of judge.json: rates of each seed, and over seeds (paper Table 5)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from bellmask.errors import UserError
from bellmask.judge.published_length_control import Calibration
from bellmask.judge.verdicts import Judged
from bellmask.judge.win_rates import (
    by_category,
    by_turn,
    length_controlled,
    lengths,
    over_seeds,
    published_length_controlled,
    readable,
    win_rates,
)

HEADLINES = ("win_rate", "non_tie", "length_controlled", "published_length_controlled")
"""Table 5 has the first three; the last one only with AlpacaEval's files."""
PARTS = ("by_category", "by_turn")


def seed_numbers(judged: Sequence[Judged], calibration: Calibration | None) -> dict[str, Any]:
    """Rates of one seed; each headline has a value and its standard error over tasks."""
    rates = asdict(win_rates(judged))
    length_a, length_b = lengths(judged)
    numbers: dict[str, Any] = {
        "counts": {name: rates[name] for name in ("wins", "losses", "ties", "unreadable")},
        "win_rate": rates["win_rate"],
        "non_tie": rates["non_tie"],
        "length_controlled": _controlled(judged),
        "by_category": {name: asdict(part) for name, part in by_category(judged).items()},
        "by_turn": {name: asdict(part) for name, part in by_turn(judged).items()},
        "mean_length_a": float(length_a.mean()),
        "mean_length_b": float(length_b.mean()),
    }
    if calibration is not None:
        numbers["published_length_controlled"] = _published(judged, calibration)
    return numbers


def _controlled(judged: Sequence[Judged]) -> dict[str, Any]:
    """Two terms; nan where nothing was judged."""
    found = length_controlled(judged)
    if found is None:
        return {"value": float("nan"), "error": float("nan"), "note": "nothing was judged"}
    length_a, length_b = lengths(readable(judged))
    about = asdict(found)
    if (length_a < length_b).all() or (length_a > length_b).all():
        word = "shorter" if length_a[0] < length_b[0] else "longer"
        reach = f"A's answers are all {word} than B's, so equal length is out of the data's reach"
        about["note"] = "; ".join(filter(None, (about["note"], reach)))
    return {"value": about.pop("rate"), **about}


def _published(judged: Sequence[Judged], calibration: Calibration) -> dict[str, Any]:
    """AlpacaEval's own rate; where it cannot be had, the reason: the other rates stand."""
    try:
        about = asdict(published_length_controlled(judged, calibration))
    except UserError as error:
        return {"value": float("nan"), "error": float("nan"), "note": str(error)}
    return {"value": about.pop("rate"), **about, "weights": list(about["weights"])}


def summarise(seeds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Mean ± deviation over seeds of every headline that there is, and of categories and turns."""
    found: dict[str, Any] = {
        name: _over_seeds([seed[name] for seed in seeds]) for name in HEADLINES if name in seeds[0]
    }
    return found | {part: _part([seed[part] for seed in seeds]) for part in PARTS}


def _over_seeds(values: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Mean and deviation of the values; beside them the mean of their errors over tasks, if all
    have one.
    """
    error = float(np.mean([one["error"] for one in values]))
    return {**asdict(over_seeds([one["value"] for one in values])), "error": error}


def _part(seeds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Of each category or turn: counts of all seeds together, rates over seeds."""
    found = {}
    for name in seeds[0]:
        mine = [seed[name] for seed in seeds]
        counts = ("wins", "losses", "ties", "unreadable")
        found[name] = {count: sum(one[count] for one in mine) for count in counts}
        found[name] |= {
            rate: _over_seeds([one[rate] for one in mine]) for rate in ("win_rate", "non_tie")
        }
    return found
