"""The paper's three Findings, and how the analyses at this scale speak to each.

A difference counts when it exceeds two of its standard errors. Where an any-order causal model has
not gone a third of the way from the unigram to the ARM, nothing is said about what is hard for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from claims import AGREES, DISAGREES, UNTOLD, Verdict

Numbers = Mapping[str, Any]
ERRORS = 2.0
LEAST_WAY = 0.3
EARLY = 300
"""The step by which the low end should be learned."""


@dataclass(frozen=True)
class Statement:
    """One checkable sentence of a Finding, and the analysis that speaks to it."""

    finding: int
    text: str
    analysis: str
    judge: Callable[[Numbers], Verdict]


def _sure(value: float, error: float) -> str:
    """Agrees when clearly above zero."""
    if abs(value) < ERRORS * error:
        return UNTOLD
    return AGREES if value > 0 else DISAGREES


def _final(numbers: Numbers, name: str) -> float:
    return float(numbers["groups"][name]["nll"][-1])


def _error(numbers: Numbers, name: str) -> float:
    group = numbers["groups"][name]
    spread, count = group["sd_over_runs"][-1], len(group["runs"])
    return float(group["final_se"][0] if spread is None else spread / count**0.5)


def arm_outperforms(other: str) -> Callable[[Numbers], Verdict]:
    """The ARM ends below."""

    def judge(numbers: Numbers) -> Verdict:
        gap = _final(numbers, other) - _final(numbers, "arm")
        error = (_error(numbers, other) ** 2 + _error(numbers, "arm") ** 2) ** 0.5
        return Verdict(_sure(gap, error), f"{other} minus arm: {gap:+.3f} ± {error:.3f}")

    return judge


def orders_cost_less(fixed: str, any_order: str) -> Callable[[Numbers], Verdict]:
    """All orders instead of one cost less than half of what leaving left-to-right costs."""

    def judge(numbers: Numbers) -> Verdict:
        locality = _final(numbers, fixed) - _final(numbers, "arm")
        orders = _final(numbers, any_order) - _final(numbers, fixed)
        error = (_error(numbers, fixed) ** 2 + _error(numbers, any_order) ** 2) ** 0.5
        unigram = numbers["unigram_nll"]
        way = (unigram - _final(numbers, fixed)) / (unigram - _final(numbers, "arm"))
        said = f"{any_order} minus {fixed}: {orders:+.3f} ± {error:.3f}; {fixed} minus arm: "
        said += f"{locality:+.3f}; {fixed} has gone {way:.0%} of the way from unigram to ARM"
        if way < LEAST_WAY:
            return Verdict(UNTOLD, said)
        return Verdict(_sure(locality / 2 - orders, 1.5 * error), said)

    return judge


def _run(numbers: Numbers, name: str) -> Numbers:
    return next(run for run in numbers["runs"] if run["name"] == name)


def _stage(run: Numbers, step: int) -> Numbers:
    return next(stage for stage in run["stages"] if stage["step"] == step)


def unigram_is_reached_early(numbers: Numbers) -> Verdict:
    """At N_c = 0 the base is at the unigram's cross-entropy by an early checkpoint."""
    run = _run(numbers, "base")
    fall = sum(s["drop"][0]["value"] for s in run["stages"] if s["step"] > EARLY)
    error = sum(s["drop"][0]["se"] ** 2 for s in run["stages"] if s["step"] > EARLY) ** 0.5
    last = run["stages"][-1]["nll"][0]["value"]
    gap = last + fall - numbers["unigram_cross_entropy"]
    said = f"at step {EARLY}: {gap:+.3f} from the unigram; later fall {fall:+.3f} ± {error:.3f}"
    return Verdict(AGREES if abs(gap) < 0.05 else UNTOLD, said)


def low_contexts_learn_less(numbers: Numbers) -> Verdict:
    """After the early checkpoint the loss falls less at few observed tokens than at many."""
    run = _run(numbers, "base")
    later = [stage for stage in run["stages"] if stage["step"] > EARLY]
    bins = len(later[0]["drop"])
    falls = [sum(stage["drop"][b]["value"] for stage in later) for b in range(bins)]
    errors = [sum(stage["drop"][b]["se"] ** 2 for stage in later) ** 0.5 for b in range(bins)]
    low, high = falls[0], sum(falls[bins // 2 :]) / (bins - bins // 2)
    said = f"fall after step {EARLY}: {low:+.3f} at N_c = 0, {high:+.3f} in the upper half"
    return Verdict(_sure(high - low, max(errors)), said)


def arm_is_flat(numbers: Numbers) -> Verdict:
    """Beyond the first tokens the ARM's loss hardly depends on N_c, the masked model's does."""
    spans = {}
    for name in ("base", "arm"):
        points = _run(numbers, name)["stages"][-1]["nll"][2:]
        spans[name] = max(p["value"] for p in points) - min(p["value"] for p in points)
    word = AGREES if spans["arm"] < spans["base"] / 2 else UNTOLD
    said = f"range beyond the first two bins: arm {spans['arm']:.2f}, base {spans['base']:.2f}"
    return Verdict(word, said)


def toy_low_end(numbers: Numbers) -> Verdict:
    """Exact: what is left to learn at N_c = 0 and in the middle, at the last checkpoint."""
    stage = _run(numbers, "base")["stages"][-1]
    middle = len(stage["blue"]) // 2
    low, centre = stage["blue"][0], stage["blue"][middle]
    error = (stage["blue_se"][0] ** 2 + stage["blue_se"][middle] ** 2) ** 0.5
    said = f"{numbers['source']}: red {stage['red'][0]:.2f}, blue {low:.4f} at N_c = 0; red "
    said += f"{stage['red'][middle]:.2f}, blue {centre:.4f} at N_c = {middle}"
    return Verdict(_sure(centre - low, error), said)


def bell_meets_more(numbers: Numbers) -> Verdict:
    """Exact: a row drawn by the bell holds more to learn than one drawn by the base."""
    stages = _run(numbers, "base")["stages"]
    ratios = [
        s["spend"]["bell"]["reducible_per_row"] / s["spend"]["base"]["reducible_per_row"]
        for s in stages
    ]
    rates = [s["spend"]["oracle"]["mask_rate_mean"] for s in stages]
    said = (
        f"{numbers['source']}, base's checkpoints: {min(ratios):.2f} to {max(ratios):.2f} times as "
    )
    said += f"much; an oracle's mean mask rate {min(rates):.2f} to {max(rates):.2f}"
    word = AGREES if min(ratios) > 1 else DISAGREES if max(ratios) < 1 else UNTOLD
    return Verdict(word, said)


def _rows(numbers: Numbers, number: int) -> list[Numbers]:
    return list(numbers["models"][number]["rows"])


def far_tokens_matter_less(numbers: Numbers) -> Verdict:
    """Similarity grows with the radius."""
    rows = _rows(numbers, 0)
    near, far = rows[0]["whole"], rows[-1]["whole"]
    error = (near["se"] ** 2 + far["se"] ** 2) ** 0.5
    said = f"cosine {near['mean']:.3f} at radius {rows[0]['setting']}, {far['mean']:.3f} at "
    said += f"{rows[-1]['setting']} (paper 0.108, 0.935)"
    return Verdict(_sure(far["mean"] - near["mean"], error), said)


def gradients_add_up(numbers: Numbers) -> Verdict:
    """The joint gradient is nearly the sum: 0.9 or more at every number of masks."""
    values = {row["setting"]: row["whole"]["mean"] for row in _rows(numbers, 0)}
    said = ", ".join(f"{setting}: {value:.3f}" for setting, value in values.items())
    word = (
        AGREES
        if min(values.values()) > 0.9
        else DISAGREES
        if max(values.values()) < 0.9
        else UNTOLD
    )
    return Verdict(word, f"cosine by number of masks {said} (paper 0.999 to 0.976)")


STATEMENTS = [
    Statement(1, "ARM is far ahead of sigma-ARM.", "orders", arm_outperforms("sigma_arm")),
    Statement(1, "ARM is far ahead of AoARM.", "orders", arm_outperforms("aoarm")),
    Statement(
        1,
        "The number of orders matters less than locality (the paper's encodings).",
        "orders",
        orders_cost_less("sigma_arm", "aoarm"),
    ),
    Statement(
        1,
        "The same with the crossed encoding for both.",
        "orders",
        orders_cost_less("sigma_arm+crossed", "aoarm+crossed"),
    ),
    Statement(2, "ARM's loss is flat in N_c, MDM's is not.", "context-curve", arm_is_flat),
    Statement(2, "N_c = 0 is learned early.", "context-drop", unigram_is_reached_early),
    Statement(2, "Low contexts learn little later on.", "context-drop", low_contexts_learn_less),
    Statement(
        3, "Only nearby tokens change the gradient.", "gradient-radius", far_tokens_matter_less
    ),
    Statement(
        3, "Single-mask gradients add up to the joint one.", "gradient-additivity", gradients_add_up
    ),
]
"""Judged on text."""

TOY_STATEMENTS = [
    Statement(2, "Low contexts: high entropy, little left to learn.", "decompose", toy_low_end),
    Statement(
        2, "The bell's rows hold more to learn than the base's.", "decompose", bell_meets_more
    ),
]
"""Judged on every toy source, with exact numbers."""
