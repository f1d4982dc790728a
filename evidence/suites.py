"""The speed-up of Sec. 5.2 and the suites of Sec. 5.1, 5.4 and App. C: trained, then shown."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from claims import CLAIMS
from pages import (
    AGREES,
    DISAGREES,
    INCONCLUSIVE,
    Judged,
    Verdict,
    picture,
    read_comparisons,
    read_result,
    trimmed,
    write_result,
)
from records import folders

from bellmask.compare.execute import TrainingOptions, execute, for_comparison, plan_runs
from bellmask.compare.report import curves_figure, show_speed_up
from bellmask.compare.results import (
    Curve,
    Entry,
    ratio_over_seeds,
    read_run,
    speed_up,
    summarize,
)
from bellmask.compare.variants import SUITES, parse_variants
from bellmask.config.config import RunConfig
from bellmask.config.presets import medium, small
from bellmask.utils.console import plural
from bellmask.utils.errors import UserError
from bellmask.utils.files import without_nan
from bellmask.utils.stats import Estimate
from bellmask.utils.table import Table

ROOT = Path("runs/evidence")
MEDIUM, WIKITEXT = "medium", "wikitext2"
HEADLINE, ARM = "headline", "arm"
MEDIUM_SEEDS, ABLATION_SEEDS = 3, 5
LARGER_BATCH = "batch128"
"""Weights of few rows are noise: importance sampling may need batches nearer to the paper's 512."""
UNCLIPPED = [
    "base unclipped=--objective nelbo --law uniform --optim.clip 0",
    "bell unclipped=--objective bell --law gaussian --optim.clip 0",
]
"""The base is clipped more often: does that explain a part of the bell's lead?"""
LONG = (MEDIUM, "sentences", "sentences_unpacked")
"""Runs that are recorded, because one machine may not finish all of them."""
TEXTS = {
    MEDIUM: "clean enwik8, test split",
    "sentences": "its sentences, packed",
    "sentences_unpacked": "its sentences, unpacked",
    WIKITEXT: "WikiText-2",
}
"""By setting, in the order of the tables."""
PAPER = {"sentences": "3.86x (LM1B)", "sentences_unpacked": "2.32x (LM1B)"}
"""Speed-ups of Fig. 6 at 1M steps."""
TARGETS = (0.25, 0.5, 0.75, 1.0)
"""Shares of the base's steps whose NLL is to be reached."""
LEAST_PROGRESS = 0.3
"""Below this progress from unigram to ARM no speed-up is claimed."""
Comparisons = Mapping[str, Mapping[str, Any]]
"""Results on one text, by name."""


# Training


def settings() -> dict[str, RunConfig]:
    """The texts; the sentences are made of the first (``medium.py``)."""
    larger = medium()
    return {
        MEDIUM: replace(larger, data=replace(larger.data, valid_split="test")),
        WIKITEXT: small(),
    }


def comparisons(setting: str) -> Iterator[tuple[str, list[str], range]]:
    """(name, variants, seeds): the headline first, then the suites."""
    if setting == MEDIUM:  # an hour per run: a seed at a time; later seeds join the earlier ones
        yield HEADLINE, ["base", "bell"], range(1, 2)
        yield ARM, ["base", ARM], range(1, 2)
        yield "fast", ["base", "fast"], range(1, 2)
        yield "convolution", ["base", "base+conv", ARM, f"{ARM}+conv"], range(1, 2)
        for last in range(2, MEDIUM_SEEDS + 1):
            yield HEADLINE, ["base", "bell"], range(1, last + 1)
            yield "fast", ["base", "fast"], range(1, last + 1)
        return
    if setting.startswith("sentences"):
        yield HEADLINE, ["base", "bell"], range(1, 2)
        return
    yield HEADLINE, ["base", "bell"], range(1, ABLATION_SEEDS + 1)
    yield ARM, ["base", ARM], range(1, 2)
    names = "families alternatives mean variance dirac laplace gaussian optimizers stratification"
    for name in names.split():
        yield name, SUITES[name], range(1, ABLATION_SEEDS + 1)
    yield LARGER_BATCH, ["base", "bell", "importance"], range(1, 4)
    yield "clipping", ["base", "bell", *UNCLIPPED], range(1, 4)


def measure_suites(chosen: Mapping[str, RunConfig], jobs: int) -> bool:
    """All comparisons on the given texts that are not stored; False when one was left out."""
    is_complete = True
    for setting, config in chosen.items():
        for name, variants, seeds in comparisons(setting):
            if is_stored(f"{setting}-{name}", variants, seeds):
                print(f"== {setting}: {name}: docs/results has it")
                continue
            print(f"== {setting}: {name}, {len(seeds)} seed(s)", flush=True)
            batch = 128 if name == LARGER_BATCH else config.train.batch_size
            used = replace(config, train=replace(config.train, batch_size=batch))
            try:
                results = trimmed(measure(setting, used, variants, seeds, jobs))
            except UserError as error:
                print(f"left out: {error}", file=sys.stderr)
                is_complete = False
                continue
            write_result(f"{setting}-{name}", results)
    return is_complete


def is_stored(name: str, variants: Sequence[str], seeds: range) -> bool:
    """Whether docs/results has all of it: measured before, perhaps on another machine."""
    found = read_result(name)
    if found is None or not set(seeds) <= set(found["seeds"]):
        return False
    return {variant.partition("=")[0] for variant in variants} <= found["variants"].keys()


def measure(
    setting: str, config: RunConfig, variants: Sequence[str], seeds: range, jobs: int
) -> dict[str, Any]:
    """Train what is missing, and compare."""
    first = replace(config, train=replace(config.train, seed=seeds[0]))
    options = TrainingOptions(seeds=len(seeds), jobs=jobs, runs=str(ROOT / "runs"))
    planned = plan_runs(for_comparison(first), parse_variants(variants), options)
    if setting in LONG:
        places = folders(setting, planned, options, ROOT / "records")
    else:
        execute(planned, options)
        places = [run.folder for run in planned]
    entries = [Entry(run.variant, "", read_run(at)) for run, at in zip(planned, places)]
    return without_nan(summarize(entries, variants[0]))


# Verdicts


def load() -> dict[str, Comparisons]:
    """By setting, those with a headline, which comes first."""
    found = {setting: read_comparisons(setting) for setting in TEXTS}
    return {s: {HEADLINE: r[HEADLINE], **r} for s, r in found.items() if HEADLINE in r}


def judge_suites() -> list[Judged]:
    """The speed-up on every text, then the claims about laws and objectives."""
    found = load()
    rows = [_judge_speed_up(setting, results) for setting, results in found.items()]
    if "sentences" in found and "sentences_unpacked" in found:
        rows.append(_judge_packing(found["sentences"], found["sentences_unpacked"]))
    results = found[WIKITEXT]
    for claim in CLAIMS:
        if claim.suite in results:
            verdict = claim.judge(results[claim.suite], noise(results[HEADLINE]))
            rows.append(Judged(claim.text, claim.paper, verdict))
    return rows


def _judge_packing(packed: Comparisons, unpacked: Comparisons) -> Judged:
    """The paper's order; the gain of one seed each cannot decide it."""
    compared = [one[HEADLINE]["variants"]["bell"]["comparison"] for one in (packed, unpacked)]
    shown = [show_speed_up(one) for one in compared]
    ends = [one["speed_up"] or {"low": None, "high": None} for one in compared]
    word = INCONCLUSIVE
    if None not in (ends[0]["low"], ends[1]["low"]):
        if ends[0]["low"] > ends[1]["high"]:
            word = AGREES
        elif ends[0]["high"] < ends[1]["low"]:
            word = DISAGREES
    verdict = Verdict(word, f"{shown[0]} against {shown[1]}")
    return Judged("The bell gains more on packed sentences", "Fig. 6: 3.86x, 2.32x", verdict)


def noise(headline: Mapping[str, Any]) -> float:
    """The difference between two runs that counts: t times the deviation of bell's paired gaps."""
    gaps = Estimate.over_seeds(headline["variants"]["bell"]["comparison"]["gaps"])
    low, high = gaps.interval
    return math.inf if low is None or high is None else (high - low) / 2 * math.sqrt(gaps.n)


def _judge_speed_up(setting: str, results: Comparisons) -> Judged:
    compared = results[HEADLINE]["variants"]["bell"]["comparison"]
    share, told = _progress_told(results)
    word = INCONCLUSIVE if share < LEAST_PROGRESS else speed_up_word(compared)
    verdict = Verdict(word, f"{show_ratio(compared)}, progress {told}")
    paper = f"Fig. 6: {PAPER[setting]}" if setting in PAPER else "Fig. 6"
    return Judged(f"The bell needs fewer steps than the base ({TEXTS[setting]})", paper, verdict)


def show_ratio(compared: Mapping[str, Any]) -> str:
    """With both values where two seeds make no interval."""
    ratios = [one["ratio"] for one in compared["per_seed"] if one["ratio"] is not None]
    both = (
        f" ({ratios[0]:.2f}, {ratios[1]:.2f})" if len(ratios) == compared["num_seeds"] == 2 else ""
    )
    return show_speed_up(compared) + both


def speed_up_word(compared: Mapping[str, Any]) -> str:
    """Agrees when the whole interval is on the bell's side."""
    found = compared["speed_up"]
    if found is None:
        return INCONCLUSIVE if compared["num_reached"] else DISAGREES
    if found["low"] is None:  # a lower bound where it was reached at once, or too few seeds
        return AGREES if compared["is_bound"] and found["mean"] > 1 else INCONCLUSIVE
    if found["low"] > 1:
        return AGREES
    return DISAGREES if found["high"] < 1 else INCONCLUSIVE


def progress(found: Comparisons) -> tuple[float, bool]:
    """How far the base has come from unigram (0) to ARM (1), and whether an ARM was trained.

    Where there is no ARM, an upper bound: the best run on the same text stands in for it.
    """
    nll = [(name, v["nll"]) for r in found.values() for name, v in r["variants"].items()]
    arms = [value for name, value in nll if name == ARM]
    best = min(arms or [value for _, value in nll])
    unigram, base = found[HEADLINE]["unigram_nll"], found[HEADLINE]["variants"]["base"]["nll"]
    return (unigram - base) / (unigram - best), bool(arms)


def _progress_told(found: Comparisons) -> tuple[float, str]:
    """Progress, and how it is shown: '<' where there is no ARM."""
    share, is_exact = progress(found)
    return share, f"{share:.0%}" if is_exact else f"< {share:.0%}"


# The headline


def headline_table() -> str:
    """Base and bell on every text."""
    rows = []
    for setting, results in load().items():
        headline = results[HEADLINE]
        nll = [f"{headline['variants'][name]['nll']:.3f}" for name in ("base", "bell")]
        ratio = show_ratio(headline["variants"]["bell"]["comparison"])
        _, told = _progress_told(results)
        text = f"{TEXTS[setting]}: {describe(headline)}, {plural(len(headline['seeds']), 'seed')}"
        rows.append([text, *nll, ratio, PAPER.get(setting, "-"), told])
    columns = ["text and run", "base", "bell", "speed-up", "paper, 1M steps", "progress"]
    return Table("", columns, rows).markdown()


def describe(results: Mapping[str, Any]) -> str:
    model, tokenizer = results["model"], results["data"]["tokenizer"]
    if tokenizer.startswith("bpe:"):
        tokenizer = f"{tokenizer.removeprefix('bpe:')}-token BPE"
    size = f"{model['num_layers']} layers of width {model['width']}"
    return f"{size}, {tokenizer}, {results['steps']:,} steps"


def headline_figure() -> tuple[str, str]:
    """(title, name) of the first text's curves."""
    setting = next(iter(load()))
    return TEXTS[setting], f"{setting}-{HEADLINE}"


def targets_table(setting: str = MEDIUM) -> list[str]:
    """Speed-ups to the base's NLL at several of its steps, where that text was run."""
    if (found := load().get(setting)) is None:
        return []
    others = {
        name: results
        for results in found.values()
        for name in results["variants"]
        if name.partition("+")[0] != ARM and name != "base"
    }
    headline, rows = found[HEADLINE], []
    for share in TARGETS:
        step = share * headline["steps"]
        curves = [until(curve_of(run), step) for run in headline["variants"]["base"]["runs"]]
        nll = float(np.mean([curve[1][-1] for curve in curves]))
        ratios = [show_speed_up_at(results, name, step) for name, results in others.items()]
        rows.append([f"{share:.0%} (step {step:,.0f})", f"{nll:.3f}", *ratios])
    title = f"{TEXTS[setting]}, speed-up to the base's NLL at a share of its steps:"
    return [title, "", Table("", ["base at", "NLL", *others], rows).markdown()]


def curve_of(run: Mapping[str, Any]) -> Curve:
    return run["steps"], run["nll"], run["seconds"]


def until(curve: Curve, step: float) -> Curve:
    """The curve up to a step, interpolated there as arrivals are: linearly in (log step, NLL)."""
    steps, nll, seconds = (np.asarray(values, dtype=float) for values in curve)
    before = steps < step
    ends = [
        step,
        np.interp(math.log(step), np.log(steps), nll),
        np.interp(step, steps, seconds),
    ]
    parts = zip((steps, nll, seconds), ends, strict=True)
    first, second, third = ([*values[before].tolist(), float(end)] for values, end in parts)
    return first, second, third


def show_speed_up_at(results: Mapping[str, Any], name: str, step: float) -> str:
    """As ``compare`` does it, with the base's NLL at this step as the target of each seed."""
    base, runs = ({r["seed"]: curve_of(r) for r in results["variants"][n]["runs"]}
                  for n in ("base", name))  # fmt: skip
    found = [speed_up(until(base[s], step), runs[s]) for s in sorted(base.keys() & runs.keys())]
    ratios = [one["ratio"] for one in found if one["ratio"] is not None]
    if len(ratios) < len(found):
        return f"not reached in {len(found) - len(ratios)} of {len(found)}"
    is_bound = any(one["is_bound"] for one in found)
    mean = ratio_over_seeds(ratios) | ({"low": None, "high": None} if is_bound else {})
    return show_speed_up({"speed_up": mean, "num_seeds": len(found), "is_bound": is_bound})


# The page


INTRODUCTION = """# Speed-ups, time laws and objectives (Sec. 5.1, 5.2, 5.4, App. C)

The verdicts are in [the results](../results.md#verdicts); the rules are in `evidence/claims.py`.
All variants of a text share batches, validation blocks and masks. A difference between final NLLs
is significant if the 95 % interval of the paired differences over seeds excludes zero. Variants
with fewer than three seeds must exceed Student's t times the standard deviation of bell's gap over
the headline's seeds.
"""
NOTE = """Variants are compared with the base of the same seeds. *NLL spread* is the
deviation of the second half of the curve about its trend. *Effective sample share* is
E[s]^2 / E[s^2] of what a row adds to the loss. *Clipped* is the share of steps with a clipped
gradient."""


def suites_page() -> list[str]:
    """Every text: how much of it was seen, the variants, the curves."""
    lines = [INTRODUCTION, NOTE, ""]
    for setting, found in load().items():
        headline = found[HEADLINE]
        rows = headline["data"]["train_blocks"]
        epochs = headline["batch_size"] * headline["steps"] / rows
        lines += [f"## {TEXTS[setting]}", "", f"{describe(headline)}, blocks of "]
        lines[-1] += f"{headline['data']['block_length']}, batch {headline['batch_size']}; "
        lines[-1] += f"{rows:,} training rows, seen {epochs:.1f} times; unigram NLL "
        lines[-1] += f"{headline['unigram_nll']:.3f}; {_significant(noise(headline))}."
        lines += ["", variants_table(found)]
        for name, results in found.items():
            if name != ARM:
                alt, figure = f"{TEXTS[setting]}: {name}", f"{setting}-{name}"
                lines += picture(alt, figure, partial(curves_figure, results, with_time=False))
    return lines


def _significant(least: float) -> str:
    """From where on a difference between single runs counts."""
    if math.isinf(least):
        return "with fewer than two seeds no difference is significant"
    return f"differences of one seed are significant from {least:.3f} nats"


def variants_table(found: Comparisons) -> str:
    """Every variant once, in the comparison that has it first; the headline's with all seeds."""
    rows: dict[str, list[str]] = {}
    for results in found.values():
        for name, variant in results["variants"].items():
            run = variant["runs"][0]
            ratio = show_ratio(variant["comparison"]) if "comparison" in variant else "1"
            spread = "-" if run["nll_spread"] is None else f"{run['nll_spread']:.4f}"
            cells = [name, str(len(variant["runs"])), f"{variant['nll']:.3f}", ratio, spread]
            cells += [f"{variant['law']['effective_sample_share']:.2f}"]
            rows.setdefault(name, [*cells, f"{run['clipped_share']:.0%}"])
    columns = ["variant", "seeds", "final NLL", "speed-up", "NLL spread"]
    columns += ["effective sample share", "clipped"]
    return Table("", columns, list(rows.values())).markdown()
