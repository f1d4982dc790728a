"""Does a law that tunes itself (``--law progress``) lose anything? Registered before any run.

usage: python evidence/tuning.py [--texts NAME ...] [--seeds N] [--steps N] [--jobs N] [--lm1b GLOB]

Three paired seeds of every variant on every text below; finished runs are not trained again. Small
numbers go to docs/results/tuning-NAME.json; docs/results/tuning.md has the verdict.

The claim holds on a text when all three do:

1. Speed-up over the base within 5 % of the best of the fixed laws (geometric mean over seeds). A
   law that does not reach the base's NLL in every seed counts as 1 where its mean final NLL is at
   most 0.01 nats above the base's, else as 0. The base counts as 1.
2. Where the bell ends above the base (mean over seeds): a lower final NLL than the bell's.
3. The NLL without context (N_c = 0, the first 512 validation blocks) is at most 0.02 nats above
   the base's, in the mean over seeds.

It holds when it does so on every text. The other adaptive laws and ``bell+uniform0.05`` are judged
by the same rules; if one of them passes and ``progress`` does not, that one is recommended.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from analyses import ROOT
from pages import read_result, write_result
from torch import Tensor

from bellmask.compare.execute import TrainingOptions, execute, for_comparison, plan_runs
from bellmask.compare.results import Entry, read_run, summarize
from bellmask.compare.variants import parse_variants
from bellmask.config.config import RunConfig, override
from bellmask.config.presets import small, tiny
from bellmask.diffusion.laws import DensityLaw, TimeLaw
from bellmask.diffusion.progress import NUM_RATES, RATES, UNIFORM_SHARE, AdaptiveLaw
from bellmask.evaluate.likelihood import exact_curve, scorer_of
from bellmask.storage.loading import LoadOptions
from bellmask.train.train_run import train_run
from bellmask.utils.errors import UserError
from bellmask.utils.stats import plus_minus
from bellmask.utils.table import Table

FIXED = ("base", "bell", "laplace", "gaussian:0.5,0.2", "uniform")
JUDGED = ("progress", "bell+uniform0.05", "band:0.3,0.8")
WITHIN, CLOSE, MOST_AT_ZERO = 0.95, 0.01, 0.02
TOY = "--data.tokenizer symbols:8 --data.block-length 32"
HOLDS = "`progress` holds all three on every text."
FAILS = "`progress` misses one of the three, so the claim fails; the bell stays the default."


# Other ways to let the training choose its times, on the same probe


@cache
def histogram(heights: tuple[float, ...]) -> TimeLaw:
    """Cached: a step asks several times, and integration takes milliseconds."""
    height = torch.tensor(heights, dtype=torch.float64)
    height = height / height.mean() * (1 - UNIFORM_SHARE) + UNIFORM_SHARE
    edges = [k / NUM_RATES for k in range(1, NUM_RATES)]
    return DensityLaw(lambda t: height[(t * NUM_RATES).long().clamp(0, NUM_RATES - 1)], edges)


class Histogram(AdaptiveLaw):
    """A constant density around each rate of the probe, and a share of uniform times."""

    first = (1.0,) * NUM_RATES

    def build(self, parameters: Sequence[float]) -> TimeLaw:
        """The density, normalized."""
        return histogram(tuple(parameters))

    def measure(self, nll_KB: Tensor) -> Sequence[float] | None:
        """Heights, to three digits of the largest."""
        height = self.height(nll_KB[:-1])
        return [round(value, 3) for value in (height / height.max()).tolist()]

    @abstractmethod
    def height(self, nll_KB: Tensor) -> Tensor:
        """Of the density at each rate."""


class LossSecondMoment(Histogram):
    """Times in proportion to the root of the loss's second moment (improved DDPM's sampler)."""

    def height(self, nll_KB: Tensor) -> Tensor:
        """What a row adds to the bell's loss is t times its NLL."""
        rate_K1 = torch.tensor(RATES[:-1], dtype=torch.float64)[:, None]
        return ((rate_K1 * nll_KB) ** 2).mean(1).sqrt()


class EntropyRate(Histogram):
    """Times in proportion to how fast the entropy of the hidden tokens grows (InfoNoise's idea)."""

    def height(self, nll_KB: Tensor) -> Tensor:
        """d H(hidden tokens) / dt, by the chain rule the NLL at t."""
        return nll_KB.mean(1)


RIVALS: dict[str, type[AdaptiveLaw]] = {
    "loss_second_moment": LossSecondMoment,
    "entropy_rate": EntropyRate,
}


# Training


def texts(lm1b: str | None, steps: int | None) -> dict[str, RunConfig]:
    """The eight texts, all with the same validation as their preset."""
    toys = {name: f"--data.train toy:{name} {TOY}" for name in ("sticky", "order2", "hidden")}
    toys["local0.5"] = f"--data.train toy:local:0.5 {TOY}"
    sft = "--sft.train toy:reverse:4 --sft.round-to 16 --data.block-length 64"
    found = {
        "wikitext2": small(),
        "wikitext2_bytes": tiny(),
        "lm1b": override(small(), ["--data.train", "lm1b", *(["--from", lm1b] if lm1b else [])]),
        **{name: override(tiny(), options.split()) for name, options in toys.items()},
        "reverse": override(tiny(), sft.split()),
    }
    return {name: with_steps(config, steps) for name, config in found.items()}


def with_steps(config: RunConfig, steps: int | None) -> RunConfig:
    """A shorter run, to see that all works."""
    if steps is None:
        return config
    every = replace(config.validation, every=f"{max(1, steps // 10)} steps")
    return replace(config, train=replace(config.train, steps=steps), validation=every)


def measure(name: str, config: RunConfig, options: TrainingOptions) -> dict[str, Any]:
    """Train what is missing on one text; what the rules need."""
    variants = parse_variants([*FIXED, *JUDGED])
    planned = plan_runs(for_comparison(config), variants, options)
    execute(planned, options)
    entries = [Entry(run.variant, "", read_run(run.folder)) for run in planned]
    for run in planned:
        for rival, law in RIVALS.items() if run.variant == "bell" else ():
            folder = run.folder.with_name(f"{run.folder.name}-{rival}")
            print(f"{name}: {rival}, seed {run.config.train.seed}", flush=True)
            train_run(run.config, folder, resume="auto", law=law(), is_quiet=True)
            entries.append(Entry(rival, "", read_run(folder)))
    summary = summarize(entries, "base")
    at_zero: dict[str, list[float]] = {}
    for entry in entries:
        at_zero.setdefault(entry.variant, []).append(nll_without_context(entry.record.folder))
    return {
        "text": name,
        **{key: summary[key] for key in ("steps", "seeds", "unigram_nll")},
        "variants": {
            variant: {
                "nll": found["nll"],
                "at_zero": at_zero[variant],
                "comparison": found.get("comparison"),
                "law": found["runs"][0].get("law"),
            }
            for variant, found in summary["variants"].items()
        },
    }


def nll_without_context(folder: Path) -> float:
    """At N_c = 0, on the first 512 validation blocks."""
    run = LoadOptions().load(str(folder))
    blocks = run.blocks()[1]
    first = blocks.slice(0, min(512, len(blocks)))
    return exact_curve(scorer_of(run, first), [0])[0].nll


# The rules


def speed_of(variants: Mapping[str, Any], name: str) -> float:
    """The speed-up that counts."""
    compared = variants[name]["comparison"]
    if compared is None:
        return 1.0
    if compared["speed_up"] is not None:
        return float(compared["speed_up"]["mean"])
    return 1.0 if variants[name]["nll"] - variants["base"]["nll"] <= CLOSE else 0.0


def judge(variants: Mapping[str, Any], name: str) -> list[bool]:
    """Each of the three conditions for one law."""
    best = max(speed_of(variants, other) for other in FIXED)
    base, bell, own = (variants[other] for other in ("base", "bell", name))
    at_zero = statistics.mean(own["at_zero"]) - statistics.mean(base["at_zero"])
    return [
        speed_of(variants, name) >= WITHIN * best,
        bell["nll"] <= base["nll"] or own["nll"] < bell["nll"],
        at_zero <= MOST_AT_ZERO,
    ]


def table(found: Mapping[str, Any]) -> Table:
    """One text."""
    variants, rows = found["variants"], []
    for name, one in variants.items():
        passed = ["yes" if is_true else "no" for is_true in judge(variants, name)]
        law = one["law"][-1] if one["law"] else None
        rows.append(
            [
                name,
                f"{one['nll']:.4f}",
                f"{speed_of(variants, name):.2f}",
                f"{statistics.mean(one['at_zero']):.3f}",
                plus_minus(law["mean"], law["width"]) if law else "-",
                *passed,
            ]
        )
    columns = ["variant", "final NLL", "speed-up", "N_c = 0", "law at the end"]
    columns += ["within 5 %", "beats a losing bell", "N_c = 0 kept"]
    return Table(f"{found['text']}, {found['steps']} steps", columns, rows)


def measure_tuning(
    lm1b: str | None,
    jobs: int,
    *,
    names: Sequence[str] | None = None,
    seeds: int = 3,
    steps: int | None = None,
) -> bool:
    """Train, judge and store; False when a text had to be left out. ``steps``: a short trial."""
    options = TrainingOptions(seeds=seeds, jobs=jobs, runs=str(ROOT))
    is_complete = True
    for name, config in texts(lm1b, steps).items():
        if names is not None and name not in names:
            continue
        stored = read_result(f"tuning-{name}")
        if steps is None and stored is not None and len(stored["seeds"]) >= seeds:
            print(f"{name}: docs/results has it")
            continue
        try:
            found = measure(name, config, options)
        except UserError as error:
            print(f"left out: {name}: {error}", file=sys.stderr)
            is_complete = False
            continue
        table(found).print()
        if steps is None:
            write_result(f"tuning-{name}", found)
    return is_complete


# The page

INTRODUCTION = """# A law that tunes itself

`--law progress` ([how it works](../training.md#a-law-that-tunes-itself)) is compared with fixed
laws and other adaptive ones, with paired seeds. The rules were written before the runs, in
`evidence/tuning.py`: a speed-up within 5 % of the best fixed law; a lower NLL than the bell's where
the bell ends above the base; an NLL without context at most 0.02 nats above the base's. The claim
is that all three hold on every text.
"""


def tuning_page() -> list[str]:
    """Every text that was measured, and what follows from it."""
    found = {name: read_result(f"tuning-{name}") for name in texts(None, None)}
    missing = [name for name, one in found.items() if one is None]
    lines = [INTRODUCTION]
    passed: dict[str, bool] = {}
    for one in filter(None, found.values()):
        shown = table(one)
        lines += [f"## {shown.title}", "", shown.markdown()]
        for law in (*JUDGED, *RIVALS):
            passed[law] = passed.get(law, True) and all(judge(one["variants"], law))
    if passed:
        where = "everywhere" if not missing else "on all of these"
        lines += [f"Pass {where}: {', '.join(law for law in passed if passed[law]) or 'none'}.", ""]
    if passed and not passed["progress"]:  # one text is enough
        lines += [FAILS, ""]
    elif not missing:
        lines += [HOLDS, ""]
    if missing:
        lines += [f"Not measured yet: {', '.join(missing)}.", ""]
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    names = list(texts(None, None))
    parser.add_argument("--texts", nargs="+", choices=names, default=names)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, help="a short trial; its numbers are not stored")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--lm1b", help="local LM1B files (path or quoted glob) instead of the hub")
    given = parser.parse_args()
    how = {"names": given.texts, "seeds": given.seeds, "steps": given.steps}
    return 0 if measure_tuning(given.lm1b, given.jobs, **how) else 1


if __name__ == "__main__":
    sys.exit(main())
