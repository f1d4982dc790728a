"""The analyses of Sec. 3 and 4.2 at CPU scale: train what they need, measure, keep the numbers.

Runs are keyed by content like those of the comparisons, so what is finished is not trained again.
Numbers go to docs/results/analysis-NAME.json; the page and its figures are made from those.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from estimators import ESTIMATORS
from pages import write_result

from bellmask.analyze.base import Analysis
from bellmask.analyze.context import CONTEXT_CURVE, CONTEXT_DROP
from bellmask.analyze.decompose import DECOMPOSE
from bellmask.analyze.gradients import GRADIENT_ADDITIVITY, GRADIENT_RADIUS
from bellmask.analyze.orders import ORDERS
from bellmask.analyze.time_laws import INEFFICIENT_MASKS, SCHEDULES, TIME_LAWS
from bellmask.compare.execute import TrainingOptions, execute, plan_runs
from bellmask.compare.variants import parse_variants
from bellmask.config.config import RunConfig
from bellmask.config.presets import tiny
from bellmask.utils.errors import UserError
from bellmask.utils.progress import NO_PROGRESS

ROOT = Path("runs/evidence/runs")
SEEDS_OF_SIGMA = 5
TOYS = ("sticky", "order2", "hidden", "local:0.5")
STAGES = (100, 300, 1000)
"""Checkpoints that are looked at, besides the last one."""

ANALYSES: dict[str, Analysis] = {
    **{f"{a.name}": a for a in (INEFFICIENT_MASKS, TIME_LAWS, SCHEDULES)},
    **{
        f"wikitext2-{a.name}": a
        for a in (ORDERS, CONTEXT_CURVE, CONTEXT_DROP, GRADIENT_RADIUS, GRADIENT_ADDITIVITY)
    },
    "wikitext2-estimators": ESTIMATORS,
    **{f"{toy.replace(':', '')}-decompose": DECOMPOSE for toy in TOYS},
}
"""What docs/results/analysis-NAME.json holds, by NAME."""


def on_text(config: RunConfig) -> RunConfig:
    """The run whose contexts and gradients are looked at: twice as long as the suites'."""
    return replace(
        config,
        train=replace(config.train, steps=2000),
        validation=replace(config.validation, every="250 steps"),
        checkpoint=replace(config.checkpoint, keep_steps=STAGES),
    )


def for_orders(config: RunConfig) -> RunConfig:
    """Bytes in short rows: in longer ones no any-order causal model leaves the plateau here."""
    start = tiny()
    return replace(
        start,
        data=replace(config.data, tokenizer="bytes", block_length=32),
        train=replace(start.train, steps=2000),
        validation=replace(start.validation, every="200 steps"),
    )


def on_toy(name: str) -> RunConfig:
    """Rows of 32 symbols, every one of them new."""
    start = tiny()
    return replace(
        start,
        data=replace(start.data, train=f"toy:{name}", tokenizer="symbols:8", block_length=32),
        optim=replace(start.optim, lr=3e-3),
        train=replace(start.train, steps=1000),
        validation=replace(start.validation, every="100 steps"),
        checkpoint=replace(start.checkpoint, keep_steps=STAGES),
    )


def trained(
    config: RunConfig, variants: Sequence[str], *, seeds: int = 1, jobs: int = 2
) -> list[str]:
    """Run folders of these variants, trained now unless they are there."""
    ROOT.mkdir(parents=True, exist_ok=True)
    options = TrainingOptions(seeds=seeds, jobs=jobs, runs=str(ROOT))
    planned = plan_runs(config, parse_variants(variants), options)
    execute(planned, options)
    return [str(run.folder) for run in planned]


def keep(name: str, options: Any) -> None:
    """Measure and store."""
    print(f"== analysis: {name}", flush=True)
    write_result(f"analysis-{name}", ANALYSES[name].measure(options, NO_PROGRESS))


def analyze_theory() -> None:
    """What needs no run."""
    for name in ("inefficient-masks", "time-laws", "schedules"):
        keep(name, ANALYSES[name].options())


def analyze_text(config: RunConfig, jobs: int) -> None:
    """Fig. 3 and Tables 1 and 2 on base, bell and ARM."""
    config = on_text(config)
    base, bell, arm = trained(config, ["base", "bell", "arm"], jobs=jobs)
    stages = (*STAGES, config.train.steps)
    for name in ("wikitext2-context-curve", "wikitext2-context-drop"):
        options = ANALYSES[name].options
        keep(name, options(runs=(base, bell, arm), checkpoints=stages, blocks=1024, bins=12))
    for name in ("wikitext2-gradient-radius", "wikitext2-gradient-additivity"):
        keep(name, ANALYSES[name].options(runs=(base,), draws=256))
    keep("wikitext2-estimators", ESTIMATORS.options(runs=(base, bell), repeats=100))


def analyze_orders(config: RunConfig, jobs: int) -> None:
    """Fig. 2: one ARM, five orders of sigma-ARM, AoARM; both encodings."""
    single = ["base", "arm", "aoarm", "aoarm+crossed"]
    runs = trained(config, single, jobs=jobs)
    sigma = ["sigma_arm", "sigma_arm+crossed"]
    runs += trained(config, sigma, seeds=SEEDS_OF_SIGMA, jobs=jobs)
    keep("wikitext2-orders", ORDERS.options(runs=tuple(runs)))


def analyze_toys(jobs: int) -> None:
    """Prop. 3.1, exactly."""
    for toy in TOYS:
        variants = ["base", "bell", "arm", *(["aoarm+crossed"] if toy == TOYS[0] else [])]
        config = on_toy(toy)
        runs = tuple(trained(config, variants, jobs=jobs))
        stages = (*STAGES, config.train.steps)
        options = DECOMPOSE.options(runs=runs, checkpoints=stages, rows=512)
        keep(f"{toy.replace(':', '')}-decompose", options)


def analyze_everything(config: RunConfig, jobs: int) -> bool:
    """All analyses; False when the text had to be left out."""
    analyze_theory()
    analyze_toys(jobs)
    try:
        analyze_text(config, jobs)
        analyze_orders(for_orders(config), jobs)
    except UserError as error:
        print(f"left out: {error}", file=sys.stderr)
        return False
    return True
