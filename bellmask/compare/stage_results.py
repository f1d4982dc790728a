"""Outcomes of the suite ``cpt_sft`` → the rows of Table 4, with differences and their errors.

A row is compared with the base row of its section. With one training seed the difference is paired
over validation blocks (NLL) or examples (exact match), and its error says what other ones would
change. With several it is paired over training seeds: mean, standard error over seeds, and from
three seeds on a 95 % t-interval, as everywhere in comparisons.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bellmask import __version__
from bellmask.compare.records import RunRecord
from bellmask.compare.speedup import over_seeds
from bellmask.evaluate.exact_match import ExactMatch
from bellmask.utils.errors import UserError

FORMAT = 1
BASE = "base"


@dataclass(frozen=True)
class Cell:
    """One place in the table, for one training seed."""

    seed: int
    cpt: str
    sft: str | None = None
    """None: continual pretraining only."""

    @property
    def name(self) -> str:
        """What a person calls it."""
        return f"CPT {self.cpt}" + (f" + SFT {self.sft}" if self.sft else "")


@dataclass(frozen=True)
class Outcome:
    """A trained cell: what its folder says, and its answers."""

    cell: Cell
    record: RunRecord
    answered: ExactMatch

    def summary(self) -> dict[str, Any]:
        """The numbers of results.json; nothing that a clock decides."""
        record, answered = self.record, self.answered
        return {
            "seed": self.cell.seed,
            "run": record.folder.name,
            "steps": record.steps,
            "nll": record.nll,
            "nll_se": record.nll_se[-1],
            "exact_match": answered.share,
            "exact_match_se": answered.standard_error,
            "by_sampling_seed": answered.seed_shares,
            "sampling_deviation": answered.seed_deviation,
        }


def summarize(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Rows in the table's order: continual pretraining first, then with fine-tuning."""
    places = dict.fromkeys((o.cell.cpt, o.cell.sft) for o in outcomes)
    ordered = sorted(places, key=lambda place: place[1] is not None)  # stable
    seeds = list(dict.fromkeys(o.cell.seed for o in outcomes))
    found = {(o.cell.cpt, o.cell.sft, o.cell.seed): o for o in outcomes}
    rows = []
    for cpt, sft in ordered:
        mine = [found[cpt, sft, seed] for seed in seeds]
        base = [found[BASE, sft and BASE, seed] for seed in seeds]
        rows.append(_row(cpt, sft, mine, None if mine == base else base))
    return {
        "format": FORMAT,
        "bellmask": __version__,
        "suite": "cpt_sft",
        "seeds": seeds,
        "rows": rows,
    }


def _row(
    cpt: str, sft: str | None, mine: Sequence[Outcome], base: Sequence[Outcome] | None
) -> dict[str, Any]:
    shares = [one.answered.share for one in mine]
    row: dict[str, Any] = {
        "section": "cpt" if sft is None else "sft",
        "cpt": cpt,
        "sft": sft,
        "nll": statistics.fmean(one.record.nll[-1] for one in mine),
        "exact_match": statistics.fmean(shares),
        # of one model's answers: the mean variance over training seeds
        "sampling_deviation": math.sqrt(
            statistics.fmean(one.answered.seed_deviation**2 for one in mine)
        ),
        "training_deviation": statistics.stdev(shares) if len(shares) > 1 else None,
        "difference": None,
        "runs": [one.summary() for one in mine],
    }
    if base is not None:
        pairs = list(zip(mine, base, strict=True))
        for one, other in pairs:
            if not one.record.last.is_paired_with(other.record.last):
                raise UserError(
                    f"{one.record.folder} and {other.record.folder} were validated on different "
                    "blocks or masks"
                )
        row["difference"] = {
            "nll": join_seeds([a.record.last.difference(b.record.last) for a, b in pairs]),
            "exact_match": join_seeds([a.answered.difference(b.answered) for a, b in pairs]),
        }
    return row


def join_seeds(differences: Sequence[tuple[float, float]]) -> dict[str, Any]:
    """(difference, its error within the seed) of each training seed → mean, error, interval."""
    values = [value for value, _ in differences]
    if len(values) == 1:
        return {
            "value": values[0],
            "se": differences[0][1],
            "low": None,
            "high": None,
            "by_seed": values,
        }
    # over_seeds takes ratios and works with their logs, which the differences are
    interval = over_seeds([math.exp(value) for value in values])
    low, high = (None if end is None else math.log(end) for end in (interval.low, interval.high))
    return {
        "value": statistics.fmean(values),
        "se": statistics.stdev(values) / math.sqrt(len(values)),
        "low": low,
        "high": high,
        "by_seed": values,
    }
