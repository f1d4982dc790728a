"""The paper's three Findings, and how the analyses at this scale speak to each.

Every rule can come out either way. A difference counts beyond ``NOISE_UNITS`` of its errors (the
97.5 % quantile of Student's t for five runs), and training noise is part of the error where runs
are compared: a single run gets the spread of the five sigma-ARMs. A model that has made less than
``LEAST_PROGRESS`` from the unigram to the ARM says nothing about what is hard for it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pages import AGREES, DISAGREES, INCONCLUSIVE, Verdict, worst

Numbers = Mapping[str, Any]
NOISE_UNITS = 2.776
LEAST_PROGRESS = 0.3
EARLY = 300
"""The step by which the low end should be learned."""
NEAR = 0.05
"""Nats that count as having arrived."""
ADDS_UP = 0.9
"""Cosine from which on a joint gradient counts as the sum."""
CLEAR_RISE = 0.2
"""Cosine by which the largest radius must exceed the smallest."""


@dataclass(frozen=True)
class Statement:
    """One checkable sentence of a Finding, and the analysis that speaks to it."""

    finding: int
    text: str
    paper: str
    analysis: str
    judge: Callable[[Numbers], Verdict]


def _word(value: float, error: float) -> str:
    """Agrees when clearly above zero, disagrees when clearly below."""
    if not math.isfinite(error) or abs(value) < NOISE_UNITS * error:
        return INCONCLUSIVE
    return AGREES if value > 0 else DISAGREES


def _final(numbers: Numbers, name: str) -> float:
    return float(numbers["groups"][name]["nll"][-1])


def _error(numbers: Numbers, name: str) -> float:
    """Of a group's final NLL: over its runs, else the sigma-ARMs' spread and the blocks' error."""
    group = numbers["groups"][name]
    if len(group["runs"]) > 1:
        return float(group["sd_over_runs"][-1]) / len(group["runs"]) ** 0.5
    spreads = [g["sd_over_runs"][-1] for g in numbers["groups"].values() if len(g["runs"]) > 1]
    return math.hypot(max(spreads, default=math.nan), group["final_se"][0] or 0.0)


def progress(numbers: Numbers, name: str) -> float:
    """From unigram (0) to ARM (1); 0 where the ARM has not left the unigram."""
    unigram, arm = numbers["unigram_nll"], _final(numbers, "arm")
    return (unigram - _final(numbers, name)) / (unigram - arm) if arm < unigram else 0.0


def arm_is_ahead(other: str) -> Callable[[Numbers], Verdict]:
    """The ARM ends below."""

    def judge(numbers: Numbers) -> Verdict:
        gap = _final(numbers, other) - _final(numbers, "arm")
        error = math.hypot(_error(numbers, other), _error(numbers, "arm"))
        share = progress(numbers, other)
        word = _word(gap, error) if share >= LEAST_PROGRESS else INCONCLUSIVE
        return Verdict(word, f"{-gap:+.2f} ± {error:.2f}, progress {share:.0%}")

    return judge


def orders_cost_less(fixed: str, any_order: str) -> Callable[[Numbers], Verdict]:
    """All orders instead of one cost less than half of what leaving left-to-right costs."""

    def judge(numbers: Numbers) -> Verdict:
        locality = _final(numbers, fixed) - _final(numbers, "arm")
        orders = _final(numbers, any_order) - _final(numbers, fixed)
        errors = [_error(numbers, name) for name in (fixed, any_order, "arm")]
        least = min(progress(numbers, name) for name in (fixed, any_order))
        said = f"{orders:+.2f} against {locality:+.2f}, progress {least:.0%}"
        if least < LEAST_PROGRESS:
            return Verdict(INCONCLUSIVE, said)
        error = math.hypot(1.5 * errors[0], errors[1], errors[2] / 2)
        return Verdict(_word(locality / 2 - orders, error), said)

    return judge


def _run(numbers: Numbers, name: str) -> Numbers:
    return next(run for run in numbers["runs"] if run["name"] == name)


def _early(numbers: Numbers) -> Numbers:
    stages = _run(numbers, "base")["stages"]
    return next(stage for stage in stages if stage["step"] == EARLY)


def low_end_is_reached_early(numbers: Numbers) -> Verdict:
    """At N_c = 0 the base is no worse than the unigram (and no better than each position's own)."""
    point = _early(numbers)["nll"][0]
    unigram, own = numbers["unigram_cross_entropy"], numbers["position_wise_cross_entropy"]
    above, slack = point["value"] - unigram, NOISE_UNITS * point["se"]
    said = f"{point['value']:.2f} ± {point['se']:.2f} at step {EARLY}, unigram {unigram:.2f}"
    if slack > NEAR or point["value"] < min(own, unigram) - NEAR:
        return Verdict(INCONCLUSIVE, said)
    return Verdict(AGREES if above < NEAR else DISAGREES, said)


def low_contexts_learn_less(numbers: Numbers) -> Verdict:
    """From then on the loss falls less at N_c = 0 than in the upper half of the bins."""
    stage = _early(numbers)
    low, rise = stage["to_last"][0], stage["rise"]
    said = f"{low['value']:+.3f}; upper half of N_c {rise['value']:+.2f} more"
    return Verdict(_word(rise["value"], rise["se"]), said)


def arm_is_flatter(numbers: Numbers) -> Verdict:
    """Fall of the loss from the third bin to the last but one, base against ARM.

    The first bins hold the ARM's first tokens, the last one the end of wrapped rows.
    """
    falls, errors = {}, []
    for name in ("base", "arm"):
        points = _run(numbers, name)["stages"][-1]["nll"]
        falls[name] = points[2]["value"] - points[-2]["value"]
        errors += [points[2]["se"], points[-2]["se"]]
    said = f"fall over N_c: base {falls['base']:+.2f}, ARM {falls['arm']:+.2f}"
    return Verdict(_word(falls["base"] / 2 - abs(falls["arm"]), math.hypot(*errors)), said)


def toy_low_end(numbers: Numbers) -> Verdict:
    """Exact: less is left to learn at N_c = 0 than in the middle, at the last checkpoint."""
    stage = _run(numbers, "base")["stages"][-1]
    middle = len(stage["blue"]) // 2
    low, center = stage["blue"][0], stage["blue"][middle]
    error = math.hypot(stage["blue_se"][0], stage["blue_se"][middle])
    said = f"{numbers['source'].removeprefix('toy:')} {low:.3f}, {center:.3f}"
    return Verdict(_word(center - low, error), said)


def bell_meets_more(numbers: Numbers) -> Verdict:
    """Exact: at every checkpoint of the base, a row drawn by the bell holds more to learn."""
    gains, words = [], set()
    for stage in _run(numbers, "base")["stages"]:
        spent = stage["spend"]
        extra = [b - a for a, b in zip(spent["base"]["draws"], spent["bell"]["draws"])]
        targets = range(len(extra), 0, -1)
        error = math.hypot(*(e * n * se for e, n, se in zip(extra, targets, stage["blue_se"])))
        held = {law: spent[law]["reducible_per_row"] for law in ("base", "bell")}
        words.add(_word(held["bell"] - held["base"], error))
        gains.append(held["bell"] / held["base"])
    said = f"{numbers['source'].removeprefix('toy:')} {min(gains):.2f} to {max(gains):.2f}x"
    return Verdict(words.pop() if len(words) == 1 else INCONCLUSIVE, said)


def _rows(numbers: Numbers) -> list[Numbers]:
    """Of the trained model, which comes first."""
    return list(numbers["models"][0]["rows"])


def far_tokens_matter_less(numbers: Numbers) -> Verdict:
    """The similarity at the largest radius is clearly above that at the smallest."""
    rows = _rows(numbers)
    near, far = rows[0]["whole"], rows[-1]["whole"]
    said = f"{near['mean']:.3f} to {far['mean']:.3f}"
    rise = far["mean"] - near["mean"] - CLEAR_RISE
    return Verdict(_word(rise, math.hypot(near["se"], far["se"])), said)


def gradients_add_up(numbers: Numbers) -> Verdict:
    """Cosine clearly above ``ADDS_UP`` at every number of masks; disagrees where one is below."""
    rows = _rows(numbers)
    words = {_word(row["whole"]["mean"] - ADDS_UP, row["whole"]["se"]) for row in rows}
    said = f"{rows[0]['whole']['mean']:.3f} to {rows[-1]['whole']['mean']:.3f}"
    return Verdict(worst(words), said)


STATEMENTS = [
    Statement(1, "ARM beats sigma-ARM", "Fig. 2", "orders", arm_is_ahead("sigma_arm")),
    Statement(1, "ARM beats AoARM", "Fig. 2", "orders", arm_is_ahead("aoarm")),
    Statement(
        1,
        "ARM beats sigma-ARM, crossed encoding",
        "-",
        "orders",
        arm_is_ahead("sigma_arm+crossed"),
    ),
    Statement(
        1,
        "All orders cost less than half of what locality costs",
        "Fig. 2",
        "orders",
        orders_cost_less("sigma_arm", "aoarm"),
    ),
    Statement(
        1,
        "The same, crossed encoding",
        "-",
        "orders",
        orders_cost_less("sigma_arm+crossed", "aoarm+crossed"),
    ),
    Statement(
        2,
        "ARM's loss is less than half as steep in N_c",
        "Fig. 3",
        "context-curve",
        arm_is_flatter,
    ),
    Statement(2, "N_c = 0 is learned early", "Fig. 3", "context-drop", low_end_is_reached_early),
    Statement(2, "Later N_c = 0 learns less", "Fig. 3", "context-drop", low_contexts_learn_less),
    Statement(
        3,
        "Far masks change the gradient less (cosine)",
        "Table 1: 0.108 to 0.935",
        "gradient-radius",
        far_tokens_matter_less,
    ),
    Statement(
        3,
        "Single-mask gradients add up (cosine)",
        "Table 2: 0.999 to 0.976",
        "gradient-additivity",
        gradients_add_up,
    ),
]
"""Judged on text."""

TOY_STATEMENTS = [
    Statement(
        2,
        "Toys: less reducible loss at N_c = 0 than in the middle",
        "Prop. 3.1",
        "decompose",
        toy_low_end,
    ),
    Statement(
        2,
        "Toys: more reducible loss in the bell's rows, bell/base",
        "Prop. 3.1",
        "decompose",
        bell_meets_more,
    ),
]
"""Judged on every toy source, with exact numbers."""
