"""Noise of multiple choice: a model whose noise is known, and a whole run."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from itertools import combinations, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from continuation_tools import EXACT, ids, random_run
from torch import Tensor

from bellmask.analyze.choice_repeats import LABELS, OURS, WAYS, Asker
from bellmask.analyze.choices import CHOICES, ChoiceOptions, measure_questions
from bellmask.assemble import train_run
from bellmask.compare.results import without_nan
from bellmask.config import RunConfig
from bellmask.data.messages import Message
from bellmask.data.templates import join, make_template
from bellmask.downstream.continuations import ContinuationScorer
from bellmask.downstream.masks import Estimator
from bellmask.downstream.questions import Choice
from bellmask.errors import UserError
from bellmask.report.choice_plots import LINES
from bellmask.rng import stream_key
from bellmask.run import load_run

Config = Callable[..., RunConfig]


def ignore(*_: int) -> None:
    pass


# --- a model whose noise is known ------------------------------------------------------------


class Table(torch.nn.Module):
    """A cross-entropy for each token, whatever is visible."""

    first_maskable, uses_time = 0, False

    def forward(self, x: Tensor, rows: Tensor, targets: Tensor, **_: Any) -> Tensor:
        return targets.float() / 64


def item(number: int, *continuations: str) -> Choice:
    return Choice(number, ("q",) * len(continuations), continuations, 0)


def known(small_config: Config, items: list[Choice], **changes: Any) -> dict[str, Any]:
    run = replace(random_run(small_config(*EXACT, "--data.block-length", "32")), model=Table())
    base: dict[str, Any] = {"draws": (1,), "repeats": 60, "longest_exact": 4}
    return measure_questions(
        run, "piqa", items, ChoiceOptions(("x",), **{**base, **changes}), ignore
    )


def row_of(numbers: dict[str, Any], way: str, draws: int = 1) -> dict[str, Any]:
    (row,) = [r for r in numbers["rows"] if (r["way"], r["draws"]) == (way, draws)]
    return row


def strata_variance(text: str) -> float:
    """Of the mean cross-entropy of the masked tokens: any count, then any mask of that count."""
    ce, length = [ord(letter) / 64 for letter in text], len(text)
    values, chances = [], []
    for count in range(1, length + 1):
        masks = list(combinations(ce, count))
        values += [sum(mask) / count for mask in masks]
        chances += [1 / length / len(masks)] * len(masks)
    centre = np.dot(values, chances)
    return float(np.dot((np.array(values) - centre) ** 2, chances))


def diffullama_variance(text: str) -> float:
    """Of the mean of two passes with rates 1/2 and 1: only the first has noise."""
    values = []
    for mask in product((0, 1), repeat=len(text)):
        ce = [ord(letter) / 64 for letter, is_in in zip(text, mask, strict=True) if is_in]
        values.append(float(np.mean(ce)) if ce else 0.0)
    return float(np.var(values)) / 4


def test_common_numbers_leave_what_choices_do_not_share(small_config: Config) -> None:
    """Choices that differ in one token: d / L sqrt(H_L - 1) is left of the noise of both."""
    texts = " abcdefg", " abczefg"
    numbers = known(small_config, [item(number, *texts) for number in range(4)], draws=(1, 2))
    length, step = len(texts[0]), (ord("z") - ord("d")) / 64
    harmonic = sum(1 / n for n in range(1, length + 1))
    shared = step / length * math.sqrt(harmonic - 1)
    apart = math.sqrt(strata_variance(texts[0]) + strata_variance(texts[1]))
    assert apart > 2 * shared
    for way, truth in ((OURS, shared), ("strata", shared), ("strata_apart", apart)):
        found = row_of(numbers, way)
        assert found["noise"]["long"]["value"] == pytest.approx(truth, rel=0.2)
        assert found["passes"] == {"long": 2.0, "all": 2.0}
    single = row_of(numbers, "diffullama")
    assert single["noise"]["all"]["value"] == 0, "with one draw it masks everything"
    assert single["bias"]["all"] == pytest.approx(0, abs=0.05), "no token depends on the others"
    two = math.sqrt(sum(map(diffullama_variance, texts)))
    assert row_of(numbers, "diffullama", 2)["noise"]["all"]["value"] == pytest.approx(two, rel=0.2)
    times = numbers["needed"]["strata_apart"]["long"]
    assert times["value"] == pytest.approx((apart / shared) ** 2, rel=0.4)
    assert numbers["exact"] is None
    assert numbers["questions"] == {"long": 4, "all": 4}


def test_equal_tokens_have_no_noise_in_strata(small_config: Config) -> None:
    """Every mask of a count says the same; a Bernoulli mask's count still varies."""
    numbers = known(small_config, [item(n, " aaaaaa"[1:], "bbbbbb") for n in range(3)], repeats=8)
    assert row_of(numbers, "strata_apart")["noise"]["all"]["value"] == pytest.approx(0, abs=1e-6)
    assert row_of(numbers, "bernoulli_apart")["noise"]["all"]["value"] > 0.1
    assert row_of(numbers, "strata")["flips"]["all"] == 0
    assert row_of(numbers, "strata")["accuracy"] == 100, "'a' has the smaller cross-entropy"


def test_short_choices_are_exact_and_their_passes_counted(small_config: Config) -> None:
    """Three and four tokens: 7 + 15 masks, no noise; a question with a longer one is long."""
    items = [item(0, "abc", "abcz"), item(1, "abc", "zbca"), item(2, "abc", "abcdef", "x")]
    numbers = known(small_config, items, repeats=12, draws=(4, 2))
    assert numbers["questions"] == {"short": 2, "long": 1, "all": 3}
    ours = row_of(numbers, OURS, 4)
    assert ours["noise"]["short"] == {"value": 0.0, "error": 0.0}
    assert ours["passes"]["short"] == 7 + 15
    assert ours["passes"]["long"] == 7 + 4 + 1
    assert ours["passes"]["all"] == pytest.approx((22 * 2 + 12) / 3)
    assert row_of(numbers, "strata", 4)["passes"]["long"] == 12
    assert numbers["needed"]["strata"]["short"]["value"] == math.inf
    assert numbers["exact"]["passes"] == 22
    left = numbers["exact"]["noise"]["strata_apart"]["value"]
    measured = row_of(numbers, "strata_apart", 4)["noise"]["short"]["value"]
    assert 0 < left < measured


def test_tuned_prompts_are_those_of_fine_tuning(small_config: Config, tmp_path: Path) -> None:
    """The run's template around the question, EOS behind every choice."""
    config = small_config(*EXACT, "--data.block-length", "64")
    config = replace(config, sft=replace(config.sft, train="toy:reverse", template="chat"))
    (tmp_path / "run.json").write_text("{}")
    run = replace(random_run(config), folder=tmp_path)
    end, items = run.tokenizer.eos_id, [item(0, " abc", " abcdefgh"), item(1, " x", " y")]
    template = make_template("chat", run.tokenizer, None)
    shown = join(template.parts((Message("user", "q"),), False))
    assert shown != "q"
    asked = Asker(run, "piqa", items, "tuned")
    texts = " abc", " abcdefgh", " x", " y"
    assert [ask.given for ask in asked.asks] == [ids(shown)] * 4
    assert [ask.target for ask in asked.asks] == [(*ids(text), end) for text in texts]
    assert asked.is_drawn_NC.tolist() == [[False, True], [False, False]]
    plain = Asker(run, "piqa", items, "plain")
    assert [(ask.given, ask.target) for ask in plain.asks] == [
        (ids("q"), ids(text)) for text in texts
    ]
    assert [ask.noise for ask in plain.asks] == [ask.noise for ask in asked.asks]
    short = [item(0, " a", " b"), item(1, " a", " bc")]  # with EOS 7 + 7 and 7 + 15 masks
    exact = known(small_config, short, repeats=4, prompts="tuned")["exact"]
    assert exact["passes"] == (14 + 22) / 2


# --- a whole run -----------------------------------------------------------------------------

SOLUTIONS = [("it", "to", 0), ("the cat", "dog", 1), ("sat on the mat", "ran under a tree", 0)]


@pytest.fixture(scope="module")
def folder(small_config: Config, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("choices")
    size = ["--data.block-length", "48", *EXACT]
    train_run(small_config("--train.steps", "20", *size), place / "bell", is_quiet=True)
    train_run(small_config("--framework", "arm", *size), place / "arm", is_quiet=True)
    lines = [
        json.dumps({"goal": f"the old {n}", "sol1": one, "sol2": two, "label": gold})
        for n, (one, two, gold) in enumerate(SOLUTIONS)
    ]
    (place / "piqa.jsonl").write_text("\n".join(lines))
    return place


def options(folder: Path, **changes: Any) -> ChoiceOptions:
    base: dict[str, Any] = {
        "tasks": ("piqa",),
        "draws": (4, 1),
        "repeats": 5,
        "questions": 8,
        "data_dir": str(folder),
    }
    return ChoiceOptions((str(folder / "bell"),), **{**base, **changes})


@pytest.fixture(scope="module")
def told() -> list[tuple[int, int]]:
    return []


@pytest.fixture(scope="module")
def numbers(folder: Path, told: list[tuple[int, int]]) -> dict[str, Any]:
    return CHOICES.measure(options(folder), lambda *both: told.append(both))


def test_noise_is_the_deviation_of_repeated_scores(folder: Path, numbers: dict[str, Any]) -> None:
    run = load_run(folder / "bell")
    (task,) = numbers["runs"][0]["tasks"]
    scorer = ContinuationScorer(run, Estimator("strata", 4, is_common=False))
    gaps: list[list[float]] = []
    for number, (one, two, _) in enumerate(SOLUTIONS):
        noise = stream_key(0, "piqa", number) % (1 << 62)
        context = f"Question: the old {number}\nAnswer:"
        asks = [scorer.asks(context, f" {text}", noise=noise)[0] for text in (one, two)]
        gaps.append([])
        for k in range(5):
            found = scorer.score(asks, seed=stream_key(1234, "choices", "strata_apart", 4, k))
            first, second = (s.log_probability / s.num_tokens for s in found)
            gaps[-1].append(first - second)
    truth = np.std(gaps, axis=1, ddof=1)
    row = row_of(task, "strata_apart", 4)
    assert row["noise"]["all"]["value"] == pytest.approx(truth.mean(), rel=1e-4)
    assert row["noise"]["all"]["error"] == pytest.approx(truth.std(ddof=1) / math.sqrt(3), rel=1e-4)
    is_right = [(np.array(g) > 0) == (gold == 0) for g, (_, _, gold) in zip(gaps, SOLUTIONS)]
    assert row["accuracy"] == pytest.approx(100 * np.mean(is_right))
    flips = [np.mean([(a > 0) != (b > 0) for a, b in combinations(g, 2)]) for g in gaps]
    assert row["flips"]["all"] == pytest.approx(np.mean(flips))
    assert row_of(task, OURS, 4)["bias"]["all"] == 0
    assert task["questions"] == {"short": 1, "long": 2, "all": 3}
    assert numbers["origins"] == {"piqa": "piqa.jsonl of --data-dir"}


def test_progress_ends_at_the_total(told: list[tuple[int, int]], numbers: dict[str, Any]) -> None:
    assert told[0][0] == 0
    assert told[-1] == (6 * len(WAYS) * 5 * 5, 6 * len(WAYS) * 5 * 5)


def test_the_tables_and_the_figure_show_every_number(numbers: dict[str, Any]) -> None:
    (task,) = numbers["runs"][0]["tasks"]
    stored = json.loads(json.dumps(without_nan(numbers), allow_nan=False))
    assert len(CHOICES.tables(stored)) == len(CHOICES.tables(numbers)), "from a file, too"
    noise, needed = CHOICES.tables(numbers)
    assert [row[0] for row in noise.rows] == [LABELS[way] for way in LABELS for _ in (1, 4)]
    found = row_of(task, "strata", 4)["noise"]["long"]
    assert noise.columns[3:5] == ["noise, short (1)", "noise, long (2)"]
    shown = noise.rows[3]
    assert shown[1] == "4"
    assert shown[4] == f"{found['value']:.3f} ± {found['error']:.3f}"
    assert [row[0] for row in needed.rows] == [LABELS[way] for way in WAYS]
    assert {row[1] for row in needed.rows} == {"never"}
    assert needed.columns[-1] == "noise at exact's 14 passes, short"
    short, long = CHOICES.figure(numbers).axes
    assert short.get_title() == "piqa, short choices (1 question)"
    assert long.get_title() == "piqa, long choices (2 questions)"
    drawn = {box.get_label(): box.lines[0].get_ydata() for box in long.containers}
    values = [row_of(task, "strata", count)["noise"]["long"]["value"] for count in (1, 4)]
    assert list(drawn["strata, common numbers"]) == values
    assert len(drawn) == len(LABELS)
    assert not any(box.get_label().startswith("ours") for box in short.containers)
    (legend,) = short.figure.legends
    named = [text.get_text() for text in legend.get_texts()]
    assert named == ["ours, exact: no noise left", *(label for label, *_ in LINES.values())]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"questions": 1}, "--questions must be at least 2"),
        ({"repeats": 3}, "--repeats at least 4"),
        ({"draws": ()}, "--draws wants different positive numbers"),
        ({"draws": (2, 2)}, "--draws wants different positive numbers"),
        ({"draws": (0, 2)}, "--draws wants different positive numbers"),
        ({"tasks": ()}, "--tasks wants at least one task"),
        ({"tasks": ("piqa", "piqa")}, "none of them twice"),
        ({"batch_tokens": 0}, "--batch-tokens must be at least 1"),
        ({"longest_exact": 13}, "--longest-exact must be from 0 to 12"),
        ({"data_dir": "nowhere"}, "there is no such folder"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    folder: Path, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(UserError, match=words):
        CHOICES.measure(options(folder, **changes), ignore)


def test_a_single_question_is_too_few(folder: Path, tmp_path: Path) -> None:
    first = (folder / "piqa.jsonl").read_text().split("\n")[0]
    (tmp_path / "piqa.jsonl").write_text(first)
    with pytest.raises(UserError, match="fewer than 2 usable questions"):
        CHOICES.measure(options(folder, data_dir=str(tmp_path)), ignore)


def test_a_causal_run_has_no_masks(folder: Path) -> None:
    with pytest.raises(UserError, match="arm is arm: it has no masks to compare"):
        CHOICES.measure(ChoiceOptions((str(folder / "arm"),)), ignore)
