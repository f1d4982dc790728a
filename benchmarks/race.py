"""A race: the plain implementation of ``reference.py`` (mdlm's way) against our recipes.

    python benchmarks/race.py small --seeds 3 --out runs/race
    python benchmarks/race.py medium --seeds 1 --recipes bell fast

Every run trains in its own process, on one thread, on the same blocks in the same order. As many
runs train at once as there are cores. Afterwards the reference and the recipes take turns, a step
each: seconds are steps times the median time of a step, so that other work on the machine affects
all alike. Validation and reading the text do not count. The reference's learning rate is the best
of --rates on validation text (or the given one); reported numbers come from the test split.
Finished runs are stored in --out, so that a race can be continued; ours are runs that `bellmask
compare` shares.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from matplotlib.ticker import LogLocator, NullLocator, ScalarFormatter
from reference import ReferenceStep
from subjects import Size, Subject

from bellmask.compare.execute import TrainingOptions, for_comparison, run_key, text_identity
from bellmask.compare.results import Curve, ratio_over_seeds, speed_up
from bellmask.compare.variants import parse_variant
from bellmask.config.config import RunConfig
from bellmask.config.presets import preset
from bellmask.evaluate.likelihood import any_network, evaluate
from bellmask.report.figures import COLORS, finish_axes, new_figure, save_figure, trim_start
from bellmask.storage.build import build_objective
from bellmask.storage.run_folder import read_metrics
from bellmask.train.optim import learning_rate
from bellmask.train.planning import StepPlanner
from bellmask.train.setup import open_start
from bellmask.train.train_run import train_run
from bellmask.utils.distributed import World
from bellmask.utils.files import write_json
from bellmask.utils.libraries import keep_freed_memory
from bellmask.utils.table import Table

REFERENCE = "reference"
NUM_VALIDATIONS = 50
ROUNDS = 40
"""Steps of each whose median is its time."""


@dataclass(frozen=True)
class Racer:
    """One training; ``rate`` is the reference's learning rate over the preset's."""

    name: str
    seed: int
    split: str
    steps: int
    config: RunConfig
    rate: float = 1.0

    @property
    def label(self) -> str:
        rate = f"-lr{self.rate:g}" if self.name == REFERENCE else ""
        key = self.config.fingerprint()[:8]
        return f"{self.name}{rate}-{self.split}-seed{self.seed}-{key}"


def make_racer(name: str, size: str, seed: int, split: str, steps: int, rate: float) -> Racer:
    shared = preset(size)
    every = max(1, steps // NUM_VALIDATIONS)
    shared = shared.with_options(
        {
            "train.seed": seed,
            "train.steps": steps,
            "data.valid_split": split,
            "validation.every": f"{every} steps",
        }
    )
    variant = parse_variant("base" if name == REFERENCE else name)
    return Racer(name, seed, split, steps, variant.apply(for_comparison(shared)), rate)


# The two kinds of runs


def run_racer(racer: Racer, out: Path, runs: Path) -> dict[str, Any]:
    """Train, and write down steps, NLL and seconds; what is there already is read."""
    path = out / f"{racer.label}.json"
    if path.exists():
        return json.loads(path.read_text())
    torch.set_num_threads(1)
    curve = _run_reference(racer) if racer.name == REFERENCE else _run_ours(racer, runs)
    steps, nll, seconds = curve
    found = {"racer": racer.name, "seed": racer.seed, "split": racer.split, "rate": racer.rate}
    write_json(path, {**found, "steps": steps, "nll": nll, "seconds": seconds})
    return json.loads(path.read_text())


def _run_ours(racer: Racer, runs: Path) -> Curve:
    """Our trainer, with the allocator settings of the command line."""
    keep_freed_memory()
    folder = runs / run_key(racer.config, text_identity(racer.config, is_quiet=True))
    train_run(racer.config, folder, resume="auto", is_quiet=True)
    lines = [r for r in read_metrics(folder / "metrics.jsonl") if r["kind"] == "validation"]
    steps, nll, seconds = ([line[key] for line in lines] for key in ("step", "nll", "seconds"))
    return steps, nll, seconds


def _run_reference(racer: Racer) -> Curve:
    """The plain step on the rows, times and masks of our base."""
    config, world = racer.config, World()
    start = open_start(config)
    tokenizer, data = start.load_data()
    planner = StepPlanner(data.train, build_objective(config), config, world)
    torch.manual_seed(racer.seed)
    step = ReferenceStep(config.model, tokenizer.num_tokens, ema=config.optim.ema)
    held_out = data.valid.spread(config.validation.blocks)
    every = max(1, racer.steps // NUM_VALIDATIONS)
    curve: tuple[list[float], list[float], list[float]] = ([], [], [])
    clock = 0.0
    for number in range(racer.steps):
        began = time.perf_counter()
        (batch,) = planner(number).microbatches
        weight = planner.objective.weight(batch.t_B).float()
        step.set_rate(racer.rate * learning_rate(config.optim, number, racer.steps))
        step(batch.x0_BL, batch.u_BL, batch.t_B.float(), weight)
        clock += time.perf_counter() - began
        if (number + 1) % every == 0 or number + 1 == racer.steps:
            with step.averaged() as model:
                found = evaluate(
                    any_network(model, tokenizer.mask_id),
                    held_out,
                    mask_id=tokenizer.mask_id,
                    seed=config.validation.seed,
                    batch_size=config.validation.batch_size,
                )
            for values, value in zip(curve, (number + 1, found.nll, clock), strict=True):
                values.append(value)
    return curve


# The race


def race(racers: Sequence[Racer], out: Path, runs: Path, jobs: int) -> list[dict[str, Any]]:
    """Train all runs, several at once; results in the given order."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context, max_tasks_per_child=1) as pool:
        futures = {pool.submit(run_racer, racer, out, runs): racer for racer in racers}
        for future in as_completed(futures):
            found = future.result()
            print(
                f"{futures[future].label}: NLL {found['nll'][-1]:.4f} after {found['steps'][-1]} "
                f"steps, {found['seconds'][-1]:.0f} s of training",
                flush=True,
            )
        return [future.result() for future in futures]


def time_steps(racers: Sequence[Racer]) -> dict[str, float]:
    """Seconds per step of each recipe on one thread, medians of steps taken in turn."""
    subjects = {}
    for racer in racers:
        config = racer.config
        if config.train.batch_warmup:
            raise SystemExit(f"{racer.name}: its steps differ; a race needs steps of one size")
        what = "plain training" if racer.name == REFERENCE else "our training"
        what += ", Muon" if config.optim.name == "muon" else ""
        vocabulary = int(config.data.tokenizer.partition(":")[2] or 256)
        data, batch = config.data, config.train.batch_size
        size = Size(racer.name, config.model, vocabulary, data.block_length, batch)
        subjects[racer.name] = Subject(what, size, config.objective.name)
    for number in range(ROUNDS + 1):
        for subject in subjects.values():
            subject.work(number)
    for subject in subjects.values():
        subject.finish()
    return {name: statistics.median(subject.seconds) for name, subject in subjects.items()}


def curve_of(found: dict[str, Any]) -> Curve:
    return found["steps"], found["nll"], found["seconds"]


def summarize(found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Of each recipe, seed by seed: its speed-up to the reference's final NLL."""
    references = {one["seed"]: one for one in found if one["racer"] == REFERENCE}
    rows: dict[str, Any] = {}
    for one in found:
        if one["racer"] != REFERENCE:
            result = speed_up(curve_of(references[one["seed"]]), curve_of(one))
            rows.setdefault(one["racer"], []).append({"seed": one["seed"], **result})
    for name, seeds in rows.items():
        kinds = {"steps": "ratio", "seconds": "time_ratio"}
        ratios = {kind: [seed[key] for seed in seeds] for kind, key in kinds.items()}
        rows[name] = {
            "seeds": seeds,
            **{k: None if None in v else ratio_over_seeds(v) for k, v in ratios.items()},
        }
    return rows


def print_table(
    size: str, rows: dict[str, Any], found: Sequence[dict[str, Any]], rate: float
) -> None:
    def ratio(value: dict[str, Any] | None) -> str:
        if value is None:
            return "not reached"
        interval = "" if value["low"] is None else f" ({value['low']:.1f} to {value['high']:.1f})"
        return f"{value['mean']:.1f}x{interval}"

    def last(name: str, key: str) -> float:
        values = [one[key][-1] for one in found if one["racer"] == name]
        return sum(values) / len(values)

    names = [REFERENCE, *rows]
    lines = []
    for name in names:
        summary = rows.get(name)
        speed = ["1", "1"] if summary is None else [ratio(summary[k]) for k in ("steps", "seconds")]
        milliseconds = 1000 * last(name, "seconds") / last(name, "steps")
        lines.append([name, f"{last(name, 'nll'):.3f}", f"{milliseconds:.1f}", *speed])
    columns = ["", "final NLL, nats/token", "ms per step", "speed-up in steps", "in seconds"]
    note = f"Reference: learning rate {rate:g} times the preset's."
    Table(f"Race at {size}, test split", columns, lines, [note]).print()


def draw(size: str, found: Sequence[dict[str, Any]], out: Path) -> None:
    """NLL against seconds of training, one line per recipe and seed."""
    names = list(dict.fromkeys(one["racer"] for one in found))
    figure, (axes,) = new_figure(7, 4.2)
    for name, color in zip(names, COLORS):
        for number, one in enumerate(run for run in found if run["racer"] == name):
            label = name if number == 0 else None
            axes.plot(one["seconds"], one["nll"], color=color, label=label, linewidth=1.3)
    target = [one["nll"][-1] for one in found if one["racer"] == REFERENCE]
    label = "reference at its last step"
    axes.axhline(sum(target) / len(target), color="0.5", linewidth=0.8, linestyle="--", label=label)
    trim_start(axes, [one["nll"] for one in found])
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(ScalarFormatter())
    axes.xaxis.set_minor_locator(NullLocator())
    finish_axes(
        axes, "seconds of training on one thread", "test NLL, nats/token", f"race at {size}"
    )
    axes.legend(fontsize=8)
    save_figure(figure, out / f"race-{size}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("size", choices=("tiny", "small", "medium"))
    parser.add_argument("--recipes", nargs="+", default=["base", "bell", "bell+muon", "fast"])
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--steps", type=int, help="default: the preset's")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument(
        "--rates",
        type=float,
        nargs="+",
        default=[0.5, 1.0, 2.0],
        help="learning rates that the reference tries, as factors of the preset's",
    )
    parser.add_argument("--out", type=Path, default=Path("runs/race"))
    parser.add_argument("--runs", type=Path, default=Path(TrainingOptions.runs))
    given = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    out, steps = given.out / given.size, given.steps or preset(given.size).train.steps
    out.mkdir(parents=True, exist_ok=True)

    def make(name: str, seed: int, split: str = "test", rate: float = 1.0) -> Racer:
        return make_racer(name, given.size, seed, split, steps, rate)

    def run(racers: Sequence[Racer]) -> list[dict[str, Any]]:
        return race(racers, out, given.runs, given.jobs)

    best = given.rates[0]
    if len(given.rates) > 1:
        tried = run([make(REFERENCE, 1, "valid", rate) for rate in given.rates])
        best = min(tried, key=lambda one: one["nll"][-1])["rate"]
        print(f"The reference's best learning rate is {best:g} times the preset's.")
    seeds = range(1, given.seeds + 1)
    racers = [make(REFERENCE, seed, rate=best) for seed in seeds]
    racers += [make(name, seed) for seed in seeds for name in given.recipes]
    found = run(racers)
    torch.set_num_threads(1)
    pace = time_steps([racer for racer in racers if racer.seed == 1])
    found = [one | {"seconds": [pace[one["racer"]] * n for n in one["steps"]]} for one in found]
    rows = summarize(found)
    print_table(given.size, rows, found, best)
    draw(given.size, found, out)
    write_json(out / "race.json", {"size": given.size, "rate": best, "rows": rows, "runs": found})


if __name__ == "__main__":
    main()
