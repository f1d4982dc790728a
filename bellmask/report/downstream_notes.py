"""What a reader must know to compare a table of benchmarks with others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Numbers = Mapping[str, Any]
MARK = "†"


def notes(numbers: Numbers) -> list[str]:
    """What a reader must know to compare these numbers with others."""
    tasks = numbers["tasks"]
    lines = _errors(numbers)
    if any(task["gives_length"] for task in tasks):
        lines.append(f"{MARK} The model is told how many tokens the gold answer has.")
    lines += [f"{t['note']}; {t['num_questions']:,} questions, {t['origin']}." for t in tasks]
    lines += [*_estimator(numbers), *_prompts(numbers), *_alike(numbers)]
    lines += [*_cut(numbers), *_shortened(numbers), *_baselines(numbers)]
    return [*lines, *(f"Left out, no data: {name}." for name in numbers["missing"])]


def _errors(numbers: Numbers) -> list[str]:
    seeds = len(numbers["seeds"])
    lines = [f"Mean ± standard deviation over {seeds} evaluation seeds."]
    if seeds == 1:
        lines = ["One evaluation seed: no deviation is known."]
    if len(_models(numbers)) > 1:
        lines.append(
            f"In brackets the change to {numbers['models'][0]['name']}, with * where it is more "
            "than 1.96 standard errors over 20 questions or more (paired; one training run each). "
            "Bold: the best of the models."
        )
    return lines


def _models(numbers: Numbers) -> list[Mapping[str, Any]]:
    return [model for model in numbers["models"] if model["is_model"]]


def _estimator(numbers: Numbers) -> list[str]:
    choices = [task for task in numbers["tasks"] if task["main"] == "per_token"]
    if not choices:
        return []
    how = f"{numbers['estimator']}, {numbers['draws']} masks"
    if numbers["estimator"] == "auto":
        how = f"all masks up to {numbers['longest_exact']} tokens, else {numbers['draws']} of them"
    shares = []
    for model in _models(numbers):
        found = [task["results"][model["name"]]["exact_share"] for task in choices]
        shares.append(f"{100 * sum(found) / len(found):.0f} % of {model['name']}'s")
    return [f"Log-probabilities of choices: {how}; without noise are {', '.join(shares)}."]


def _prompts(numbers: Numbers) -> list[str]:
    what = {"plain": "lm-eval's", "tuned": "those of fine-tuning"}
    names: dict[str, list[str]] = {}
    for model in _models(numbers):
        ending = ", EOS scored behind choices" if model["ending"] == "eos" else ""
        names.setdefault(what[model["prompts"]] + ending, []).append(model["name"])
    return [f"Prompts of {', '.join(mine)}: {form}." for form, mine in names.items()]


def _cut(numbers: Numbers) -> list[str]:
    return [
        f"{model['name']}: {count:,} gold answers of {task['title']} are longer than half of its "
        "block; their gaps are cut."
        for model in _models(numbers)
        for task in numbers["tasks"]
        if (count := task["results"][model["name"]]["num_cut"])
    ]


def _shortened(numbers: Numbers) -> list[str]:
    lines = []
    for model in _models(numbers):
        found = {t["title"]: t["results"][model["name"]]["num_shortened"] for t in numbers["tasks"]}
        counts = ", ".join(f"{title} {count:,}" for title, count in found.items() if count)
        if counts:
            lines.append(
                f"{model['name']}: questions that did not fit into rows of {model['block_length']} "
                f"tokens and lost their oldest ones: {counts}."
            )
    return lines


def _alike(numbers: Numbers) -> list[str]:
    """What makes models hard to compare."""
    models, lines = _models(numbers), []
    if len({model["tokenizer"] for model in models}) > 1:
        lines.append("Tokenizers differ, and scores per token with them: compare per byte.")
    kinds = {model["framework"] for model in models}
    if "arm" in kinds and len(kinds) > 1:
        lines.append("Log-probabilities of an ARM are exact, those of the others bounds.")
    return lines


def _baselines(numbers: Numbers) -> list[str]:
    first = numbers["models"][0]["name"]
    what = {
        "random": "guesses in expectation, and texts of random tokens",
        "unigram": f"each token by its frequency in the training text of {first}",
    }
    here = [model["name"] for model in numbers["models"] if not model["is_model"]]
    return [f"{name}: {what[name]}." for name in here]
