"""``bellmask evaluate MODEL... --suite paper``: the benchmarks of the paper's Table 4.

Several models (runs and two baselines) answer the same questions of several
tasks of lm-eval, once for each evaluation seed. Scores have
a deviation over seeds and an error over questions, and are compared with those of the first model.
Tables go to the screen, to Markdown and to LaTeX.
"""

from __future__ import annotations

import functools
import json
import logging
import re
import string
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from statistics import fmean
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from bellmask.config.command_line import parse_command
from bellmask.data import tasks as data_tasks
from bellmask.data.chat_templates import response_after
from bellmask.data.readers import Record, cache_folder
from bellmask.data.tasks import BENCHMARKS, SCORES, TABLE_4, TaskRecords
from bellmask.evaluate.lm_eval import import_harness, stock_folder, task_names, write_overlay
from bellmask.evaluate.scorer import Estimator
from bellmask.evaluate.suite import SuiteOptions, on_all_ranks, write_results
from bellmask.storage.runs import by_folder
from bellmask.utils.distributed import World
from bellmask.utils.errors import UserError, look_up
from bellmask.utils.libraries import import_optional
from bellmask.utils.progress import NO_PROGRESS, progress_bar
from bellmask.utils.stats import Estimate, Floats, plus_minus
from bellmask.utils.table import Bold, Table, markdown_page

logger = logging.getLogger(__name__)

if TYPE_CHECKING:
    from bellmask.evaluate.lm_eval_model import BellmaskLM, LoadedTasks, ScoredChoice

    Models = Mapping[str, BellmaskLM]

# Options

BASELINES = ("random", "unigram")


@dataclass(frozen=True, kw_only=True)
class PaperOptions(SuiteOptions, Estimator):
    """Multiple choice, completion and infilling: the benchmarks of the paper's Table 4.

    Accuracy on OpenBookQA, WinoGrande, PIQA, Social IQA and HellaSwag, last words of LAMBADA,
    answers of TriviaQA, ROUGE of ROCStories' missing sentences. Mean ± deviation over evaluation
    seeds, errors over questions, paired differences to the first model; as baselines, guessing
    and a unigram. Six tasks come in a wheel and need no hub. If interrupted, the same command
    continues; adding tasks, questions or seeds computes only the new ones.

    Examples:
    bellmask evaluate runs/base runs/bell --suite paper --skip-missing

    bellmask evaluate runs/bell --suite paper --tasks piqa openbookqa --limit 100

    bellmask evaluate runs/base runs/bell --suite paper --data-dir benchmarks --limit 0
    """

    tasks: tuple[str, ...] = TABLE_4
    """Tasks: lambada openbookqa winogrande piqa social_iqa infilling triviaqa hellaswag."""
    data_dir: str | None = None
    """Folder with <task>.jsonl, .json, .parquet, .arrow or .csv; other tasks are downloaded."""
    skip_missing: bool = False
    """Skip tasks whose data are not available; the table says so."""
    limit: int = 500
    """Questions per task, the same in every run; 0 means all."""
    prompts: Literal["auto", "plain", "tuned"] = "auto"
    """Prompts. plain: lm-eval's. tuned: as in fine-tuning. auto: tuned for fine-tuned runs."""
    ending: Literal["auto", "none", "eos"] = "auto"
    """eos: score the EOS after a choice too. auto: eos for tuned prompts."""
    baselines: bool = True
    """Add rows for guessing and for the unigram of the first model's training text."""
    cache_dir: str | None = None
    """Folder for downloads; default: $BELLMASK_CACHE or ~/.cache/bellmask."""


def _check(options: PaperOptions) -> None:
    options.check(limit=0)
    for name in options.tasks:
        look_up("task", name, BENCHMARKS)
    if not options.tasks:
        raise UserError("--tasks needs at least one name")
    if "infilling" in options.tasks:
        import_optional("rouge_score", "infilling", "eval")


Prompts = Literal["plain", "tuned"]
"""plain: those of lm-eval's stock tasks, for models that were not fine-tuned and to compare with
published numbers. tuned: those of fine-tuning (:mod:`bellmask.data.tasks`)."""
OWN = "_own"
"""Ends the names of a task, and of its scores, whose gap does not have the gold answer's length."""


# The tasks as lm-eval's: their documents and files.
#
# A task is lm-eval's stock task, or for fine-tuned prompts one of our own, with ``tasks/KIND.yaml``
# on top, which set prompts and scores as in Table 4. Five are multiple choice, two generate text
# after a prompt, one fills in the missing sentence of a story. Generated text goes into a gap of
# the gold answer's length; a second task, ``TASK_own``, does not reveal it. A document has a column
# ``bellmask`` with the data that the model and the scores need.


def gaps(task: str) -> tuple[str, ...]:
    """Endings of lm-eval's names of a task: one for each kind of gap."""
    return ("", OWN) if BENCHMARKS[task].gives_length else ("",)


def write_task(
    folder: Path, task: str, records: Sequence[Record], limit: int, prompts: Prompts
) -> int:
    """Write a task's files for lm-eval; the number of its questions."""
    about = BENCHMARKS[task]
    own = Path(__file__).parent / "tasks"
    stock = about.stock if prompts == "plain" else None
    asked = own / "prompts.yaml" if stock is None else stock_folder() / stock.file
    questions = data_tasks.scored_questions(task, records, limit)
    for ending in gaps(task):
        documents = folder / f"{task}{ending}.jsonl"
        with documents.open("wb") as stream:
            for number, question in questions.items():
                document = {
                    **({} if stock is None else records[number]),
                    "bellmask": _about(task, number, records[number], question, prompts, ending),
                }
                text = json.dumps(document, ensure_ascii=False, default=str) + "\n"
                stream.write(text.encode("utf-8", "replace"))  # half surrogate pairs become '?'
        include = [asked, own / f"{about.kind}.yaml"]
        source = {"split": "validation", "files": [str(documents.absolute())]}
        write_overlay(folder, task + ending, include, source)
    return len(questions)


def _about(
    task: str,
    number: int,
    record: Record,
    question: data_tasks.TaskQuestion,
    prompts: Prompts,
    ending: str,
) -> dict[str, Any]:
    """Additional data of a question besides the columns of the stock task."""
    answer, stock = response_after(question.prompt, question.answer), BENCHMARKS[task].stock
    if prompts == "plain" and stock is not None and stock.target is not None:
        answer = f" {stock.target(record)}"
    accepted = dict.fromkeys(text.strip() for text in (answer, *question.accepted))
    return {
        "task": task,
        "number": number,
        "gap": "own" if ending else "gold",
        "prompt": question.prompt,
        "choices": [response_after(question.prompt, choice) for choice in question.choices],
        "gold": question.gold,
        "answer": answer,
        "accepted": list(filter(None, accepted)),
        "after": question.after,
    }


# Scores of one document, in percent, called by lm-eval.


# Paper: Table 4
def score_choices(doc: Mapping[str, Any], results: Sequence[ScoredChoice]) -> dict[str, float]:
    """The choice with the highest log-probability, summed or per token or byte, is the gold one;
    the first of equals. A model with equally likely choices (a unigram on WinoGrande) guesses.
    """
    if len({(one[0], one.num_tokens) for one in results}) == 1:
        return dict.fromkeys(SCORES["choice"], 100 / len(results))
    means = {
        "per_token": [one[0] / one.num_tokens for one in results],
        "raw": [one[0] for one in results],
        "per_byte": [one[0] / one.num_bytes for one in results],
    }
    gold = doc["bellmask"]["gold"]
    return {how: 100.0 * (mean.index(max(mean)) == gold) for how, mean in means.items()}


# Paper: Table 4
def score_text(doc: Mapping[str, Any], results: Sequence[str]) -> dict[str, float]:
    """What was written into the gap, by the kind of task."""
    about, (written,) = doc["bellmask"], results
    kind = BENCHMARKS[about["task"]].kind
    if kind == "story":
        return rouge(written, about["answer"])
    if kind == "word":
        is_right = begins_with_word if about["gap"] == "own" else is_word
        return {"word": 100.0 * is_right(written, about["answer"])}
    return {
        "contains": 100.0 * contains(written, about["accepted"]),
        "exact_match": 100.0 * matches_exactly(written, about["accepted"]),
    }


# LAMBADA's last word. Case and punctuation count: DiffuLLaMA compares it as it is.


def is_word(written: str, gold: str) -> bool:
    """The generated text is the gold word (for a gap of the gold length)."""
    return written.strip() == gold.strip()


def begins_with_word(written: str, gold: str) -> bool:
    """The first generated word is the gold word (for text of any length).

    A word ends at white space. Punctuation after it is ignored, unless the gold word has some, too:
    a passage continues after its last word. (A gold "word" with a line end inside, of which LAMBADA
    has a few, is compared with as many words.)
    """
    wanted = gold.split()
    found = written.split()[: len(wanted)]
    if found and wanted and wanted[-1][-1].isalnum():
        found[-1] = re.sub(r"[\W_]+\Z", "", found[-1])
    return found == wanted


# TriviaQA's answers, normalized as their release does it.

_PUNCTUATION = dict.fromkeys(map(ord, string.punctuation + "\u2018\u2019\u00b4"), " ")


def normalize(text: str) -> str:
    """Lower case, no articles, spaces for punctuation, single spaces: as TriviaQA's own
    ``normalized_aliases``.
    """
    text = text.lower().translate(_PUNCTUATION)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def _normalized(written: str, accepted: Sequence[str]) -> Iterator[tuple[str, str]]:
    """The answer, which is the first line, with each accepted one."""
    answer = normalize(written.split("\n", 1)[0])
    return ((answer, wanted) for wanted in map(normalize, accepted) if wanted)


def matches_exactly(written: str, accepted: Sequence[str]) -> bool:
    """The answer is one of the accepted ones, both normalized."""
    return any(answer == wanted for answer, wanted in _normalized(written, accepted))


def contains(written: str, accepted: Sequence[str]) -> bool:
    """An accepted answer is in the answer, both normalized; whole words: no 'us' in 'house'."""
    return any(f" {wanted} " in f" {answer} " for answer, wanted in _normalized(written, accepted))


# Sentences of stories

ROUGE = {"rouge_1": "rouge1", "rouge_2": "rouge2", "rouge_l": "rougeL"}
"""Our names of scores, and rouge-score's."""


def rouge(written: str, gold: str) -> dict[str, float]:
    """rouge-score's F1 of stemmed words, pairs of words and the longest common subsequence, in
    percent; the mean of the three is the column "Infilling" of Table 4.
    """
    found = _rouge_scorer().score(gold, written)
    parts = {name: 100 * float(found[kind].fmeasure) for name, kind in ROUGE.items()}
    return {"rouge_mean": sum(parts.values()) / len(parts), **parts}


@functools.cache
def _rouge_scorer() -> Any:
    from rouge_score import rouge_scorer

    return rouge_scorer.RougeScorer(list(ROUGE.values()), use_stemmer=True)


# Scores of a model on a task, with two kinds of error.
#
# *Deviation* is over evaluation seeds (masks, sampling noise), as the paper's ±; *error* over
# questions: what another sample of questions would change. Differences between models are paired:
# the same questions and seeds.
#
# S seeds, B questions; all scores are percentages.
FEWEST_QUESTIONS = 20
"""With fewer, the spread over questions says too little about the error."""
SURE = 1.96
"""A difference of more standard errors is called larger than its error (95 %)."""


Values = dict[str, Floats]
"""Score by name, for each seed and question [S, B]."""


def summary(measured: Values, reference: Values | None) -> dict[str, Any]:
    """Mean and errors of each score; with a reference also the difference to it."""
    scores: dict[str, Any] = {}
    for name, value_SB in measured.items():
        over_seeds = Estimate.over_seeds(value_SB.mean(axis=1).tolist())
        value_B = value_SB.mean(axis=0).tolist()
        se = Estimate.over_seeds(value_B).se
        scores[name] = {"mean": over_seeds.value, "deviation": over_seeds.deviation, "error": se}
        if reference is not None:
            apart = Estimate.paired(value_B, reference[name].mean(axis=0).tolist())
            gap = {"mean": apart.value, "error": apart.se, "is_sure": is_sure(apart)}
            scores[name]["difference"] = gap
    return scores


def is_sure(apart: Estimate) -> bool:
    """The difference is larger than its error, with enough questions."""
    is_known = apart.se is not None and apart.n >= FEWEST_QUESTIONS
    return is_known and abs(apart.value) > SURE * (apart.se or 0.0)


# The suite: the same questions for all models, differences to the first.

Tasks = Mapping[str, TaskRecords]


# Paper: Table 4
class Suite:
    """Models and tasks of a suite; its ``numbers`` are for files and tables."""

    def __init__(
        self, models: Models, tasks: Tasks, limit: int, seeds: Sequence[int], folder: Path
    ) -> None:
        """``limit`` questions of each task (0: all); task files are written into ``folder``."""
        self._models, self._records, self._seeds = models, tasks, tuple(seeds)
        self._num_questions: dict[str, int] = {}
        self._tasks: dict[str, LoadedTasks] = {}
        for prompts in {model.prompts for model in models.values()}:
            place = folder / prompts
            place.mkdir()
            for task, loaded in tasks.items():
                self._num_questions[task] = write_task(place, task, loaded.records, limit, prompts)
            names = [task + ending for task in tasks for ending in gaps(task)]
            self._tasks[prompts] = import_harness().LoadedTasks(place, names)

    def num_missing(self) -> int:
        """Answers of models that are left to get (baselines take no time)."""
        requests = {prompts: tasks.requests() for prompts, tasks in self._tasks.items()}
        models = [model for model in self._models.values() if model.is_model]
        return sum(model.num_missing(requests[model.prompts], self._seeds) for model in models)

    def _measure(self, model: BellmaskLM) -> dict[str, Values]:
        values: dict[str, dict[str, list[list[float]]]] = {task: {} for task in self._records}
        for seed in self._seeds:
            model.seed = seed
            samples = self._tasks[model.prompts].samples(model)
            for task, found in values.items():
                for ending in gaps(task):
                    for score in SCORES[BENCHMARKS[task].kind]:
                        value_B = [document[score] for document in samples[task + ending]]
                        found.setdefault(score + ending, []).append(value_B)
        return {
            task: {score: np.array(value_SB) for score, value_SB in found.items()}
            for task, found in values.items()
        }

    def numbers(self) -> dict[str, Any]:
        """Evaluate everything that is not cached."""
        measured = {name: self._measure(model) for name, model in self._models.items()}
        first = next(iter(measured))
        tasks = []
        for task in self._records:
            results = {}
            for name, found in measured.items():
                reference = None if name == first else measured[first][task]
                facts = self._models[name].facts[task]
                results[name] = {
                    "scores": summary(found[task], reference),
                    "exact_share": facts.exact_share,
                    "num_cut": len(facts.cut),
                    "num_shortened": len(facts.shortened),
                }
            tasks.append({**self._about_task(task), "results": results})
        models = [{"name": name, **_about_model(model)} for name, model in self._models.items()]
        return {"models": models, "seeds": list(self._seeds), "tasks": tasks}

    def _about_task(self, task: str) -> dict[str, Any]:
        loaded, column = self._records[task], BENCHMARKS[task].column
        return {
            "name": task,
            "title": column.title,
            "main": SCORES[column.kind][0],
            "measure": column.measure,
            "note": f"{column.title}: {column.note}",
            "gives_length": BENCHMARKS[task].gives_length,
            "origin": loaded.origin,
            "identity": loaded.identity,
            "num_questions": self._num_questions[task],
            "num_records": len(loaded.records),
        }


def _about_model(model: BellmaskLM) -> dict[str, Any]:
    run = model.run if model.is_model else None
    return {
        "is_model": model.is_model,
        "step": run and run.step,
        "framework": run and run.config.framework.name,
        "tokenizer": run and run.tokenizer.fingerprint,
        "prompts": model.prompts,
        "ending": "eos" if model.ending else "none",
        "block_length": model.block_length,
    }


# Notes needed to compare a table of benchmarks with others.
Numbers = Mapping[str, Any]
MARK = "†"
"""Behind columns whose score tells the model how long the gold answer is."""
PROMPTS = {"plain": "lm-eval's", "tuned": "those of fine-tuning"}


def notes(numbers: Numbers) -> list[str]:
    """Notes needed to compare these numbers with others."""
    models, tasks, seeds = _models(numbers), numbers["tasks"], len(numbers["seeds"])
    first = numbers["models"][0]["name"]
    lines = [f"Mean ± standard deviation over {seeds} evaluation seeds."]
    if seeds == 1:
        lines = ["One evaluation seed: no deviation."]
    if len(models) > 1:
        sure = f"more than {SURE} standard errors over at least {FEWEST_QUESTIONS} questions"
        lines.append(f"In brackets: difference to {first}, paired; * {sure}. Bold: best model.")
    if any(task["gives_length"] for task in tasks):
        lines.append(f"{MARK} The model is given the number of tokens of the gold answer.")
    lines += [f"{t['note']}; {t['num_questions']:,} questions, {t['origin']}." for t in tasks]
    if choices := [task for task in tasks if task["main"] == "per_token"]:
        lines.append(_estimator(numbers, choices))
    for model in models:
        ending = ", EOS scored behind choices" if model["ending"] == "eos" else ""
        lines.append(f"Prompts of {model['name']}: {PROMPTS[model['prompts']]}{ending}.")
    if len({model["tokenizer"] for model in models}) > 1:
        lines.append("Tokenizers differ, so scores per token are not comparable: compare per byte.")
    kinds = {model["framework"] for model in models}
    if "arm" in kinds and len(kinds) > 1:
        lines.append("Log-probabilities of ARMs are exact; others are bounds.")
    lines += [line for model in models for task in tasks for line in _too_long(model, task)]
    baselines = {
        "random": "guesses in expectation, and texts of random tokens",
        "unigram": f"each token by its frequency in the training text of {first}",
    }
    here = [model["name"] for model in numbers["models"] if not model["is_model"]]
    lines += [f"{name}: {baselines[name]}." for name in here]
    return [*lines, *(f"Skipped, no data: {name}." for name in numbers["missing"])]


def _models(numbers: Numbers) -> list[Mapping[str, Any]]:
    return [model for model in numbers["models"] if model["is_model"]]


def _estimator(numbers: Numbers, choices: Sequence[Numbers]) -> str:
    how = f"{numbers['estimator']}, {numbers['draws']} masks"
    if numbers["estimator"] == "auto":
        how = f"all masks up to {numbers['longest_exact']} tokens, else {numbers['draws']} of them"
    shares = []
    for model in _models(numbers):
        share = fmean(task["results"][model["name"]]["exact_share"] for task in choices)
        shares.append(f"{share:.0%} of {model['name']}'s")
    return f"Log-probabilities of choices: {how}; exact for {', '.join(shares)}."


def _too_long(model: Numbers, task: Numbers) -> list[str]:
    """Notes on questions that do not fit into the model's rows."""
    found = task["results"][model["name"]]
    what = {
        "num_cut": "gold answers are longer than half of a row; their gaps are truncated",
        "num_shortened": "questions do not fit into a row and lose their oldest tokens",
    }
    where = f"{model['name']}, rows of {model['block_length']} tokens, {task['title']}"
    return [f"{where}: {found[key]:,} {text}." for key, text in what.items() if found[key]]


# Table 4's layout: models by benchmarks, on the screen, in Markdown and in LaTeX.
NAMES = {
    "per_token": "accuracy, per token",
    "raw": "accuracy, sum",
    "per_byte": "accuracy, per byte",
    "word": "word",
    "contains": "contains an answer",
    "exact_match": "exact match",
    "rouge_mean": "ROUGE, mean",
    "rouge_1": "ROUGE-1",
    "rouge_2": "ROUGE-2",
    "rouge_l": "ROUGE-L",
}
NAMES |= {score + OWN: f"{name}, length not given" for score, name in NAMES.items()}


def _change(gap: Mapping[str, Any], error: float | None, star: str) -> str:
    """With a star where it is larger than its error."""
    return plus_minus(gap["mean"], error, sign="+") + (star if gap["is_sure"] else "")


def _title(task: Mapping[str, Any]) -> str:
    unit = "" if task["name"] == "infilling" else " (%)"
    return task["title"] + unit + (MARK if task["gives_length"] else "")


def main_table(numbers: Numbers) -> Table:
    """Table 4: the main score of each task, and its change to the first row."""
    tasks, names = numbers["tasks"], [model["name"] for model in _models(numbers)]
    rows = []
    for model in numbers["models"]:
        name, step = model["name"], model["step"]
        cells = [name if step is None else f"{name}, step {step}"]
        for task in tasks:
            results = {n: result["scores"][task["main"]] for n, result in task["results"].items()}
            found, best = results[name], max(round(results[n]["mean"], 2) for n in names)
            text = plus_minus(found["mean"], found["deviation"])
            if "difference" in found and model["is_model"]:
                text += f" ({_change(found['difference'], None, '*')})"
            # best as printed; not if all scores are 0, and not a baseline or a single model
            is_best = len(names) > 1 and name in names and round(found["mean"], 2) == best > 0
            cells.append(Bold(text) if is_best else text)
        rows.append(cells)
    title = "downstream benchmarks (Table 4)"
    return Table(title, ["model", *map(_title, tasks)], rows, notes(numbers))


def full_table(numbers: Numbers) -> Table:
    """Every score of every model, with both errors and the paired difference."""
    columns = ["task", "score", "model", "mean", "deviation", "error", "difference ± error"]
    rows = []
    for task in numbers["tasks"]:
        for score in task["results"][numbers["models"][0]["name"]]["scores"]:
            for model in numbers["models"]:
                found = task["results"][model["name"]]["scores"][score]
                three = (plus_minus(found[name], None) for name in ("mean", "deviation", "error"))
                gap = found.get("difference")
                change = "-" if gap is None else _change(gap, gap["error"], " *")
                rows.append([task["title"], NAMES[score], model["name"], *three, change])
    return Table("Every score", columns, rows)


def markdown(numbers: Numbers) -> str:
    """Table 4 and the notes as a page, then every score with its errors."""
    main = replace(main_table(numbers), title="")
    return markdown_page("Downstream benchmarks", main, full_table(numbers))


# The command


def _load_models(options: PaperOptions, harness: ModuleType, cache: Path) -> dict[str, BellmaskLM]:
    """By name: the models, then the baselines."""
    places = by_folder(options.models)
    for name in BASELINES if options.baselines else ():
        if name in places:
            raise UserError(f"{places[name]} is named {name}; rename it or give --no-baselines")
    models: dict[str, BellmaskLM] = {}
    for name, place in places.items():
        how = {field.name: getattr(options, field.name) for field in fields(Estimator)}
        how |= {"prompts": options.prompts, "ending": options.ending, "greedy": False}
        models[name] = harness.BellmaskLM(options.load(place), **how)
        models[name].store_in(cache)
    if options.baselines:
        first = next(iter(models.values())).run
        models["random"] = harness.RandomLM.of(first)
        try:
            models["unigram"] = harness.UnigramLM.of(first)
        except UserError as error:
            logger.info("no unigram without the training text: %s", error)
    return models


def _load_tasks(options: PaperOptions) -> tuple[dict[str, TaskRecords], dict[str, str]]:
    """(records by task, why others are missing)."""
    loaded, missing = {}, {}
    for task in options.tasks:
        try:
            cache = cache_folder(options.cache_dir)
            loaded[task] = data_tasks.open_task(task, options.data_dir, cache)
        except data_tasks.MissingData as error:
            missing[task] = str(error)
    if missing and not options.skip_missing:
        raise UserError(f"{' '.join(missing.values())} (--skip-missing skips them)")
    for why in missing.values():
        logger.info("skipped: %s", why)
    if not loaded:
        raise UserError("there is no data for any of the tasks")
    return loaded, missing


def main(args: Sequence[str]) -> int:
    options = parse_command(PaperOptions, args, command="evaluate MODEL... --suite paper")
    options = replace(options, tasks=tuple(task_names(options.tasks)))
    _check(options)
    return on_all_ranks(_measure, options, options.models, "paper")


def _measure(options: PaperOptions, world: World, folder: Path) -> None:
    harness = import_harness()
    loaded, missing = _load_tasks(options)
    models = _load_models(options, harness, folder / "cache")
    with tempfile.TemporaryDirectory() as scratch:
        suite = Suite(models, loaded, options.limit, options.all_seeds, Path(scratch))
        with progress_bar("paper suite", "answers", suite.num_missing()) as progress:
            for model in models.values():
                model.progress = progress if model.is_model else NO_PROGRESS
                model.world = world if model.is_model else model.world
            try:
                found = suite.numbers()
            except KeyboardInterrupt:
                words = f"answers are in {folder}/cache, and the same command continues"
                raise KeyboardInterrupt(f"interrupted; {words}") from None
    told = ("estimator", "draws", "longest_exact", "weights", "limit")
    about = {name: getattr(options, name) for name in told}
    numbers = {"suite": "paper", **about, **found, "missing": missing}
    write_results(folder, numbers, "paper", md=markdown(numbers), tex=main_table(numbers).latex())
    main_table(numbers).print()
    print(f"written: {folder}/paper.json, paper.md, paper.tex; all answers in {folder}/cache")
