"""The paper's suite: rows with gaps, scores and their errors, answers that are cached.

By hand, and with models that know everything or nothing. The command itself:
``tests/end_to_end/test_suites.py``; its numbers: ``tests/frozen``.
"""

from __future__ import annotations

import json
import math
import sys
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from continuation_tools import EXACT, ids, random_run
from counted_progress import Counted
from downstream_tools import NOUNS, TASKS, loaded
from example_tools import encode_example

from bellmask.data.chat_templates import Example, Message, make_template
from bellmask.data.examples import ExampleRules
from bellmask.data.tasks import BENCHMARKS, SCORES, open_task, scored_questions, validation_records
from bellmask.evaluate import paper_suite
from bellmask.evaluate.lm_eval import STOCK
from bellmask.evaluate.paper_suite import (
    Suite,
    full_table,
    is_sure,
    main_table,
    normalize,
    notes,
    rouge,
    summary,
)
from bellmask.evaluate.scorer import Score
from bellmask.generate.settings import Sampling
from bellmask.model.pretrained import Backbone
from bellmask.run import load_run
from bellmask.utils.errors import UserError
from bellmask.utils.progress import NO_PROGRESS
from bellmask.utils.rng import stream_key
from bellmask.utils.stats import Estimate
from bellmask.utils.table import Bold

pytest.importorskip("lm_eval")

from lm_eval.api.instance import Instance

from bellmask.evaluate import lm_eval_model as harness
from bellmask.evaluate.lm_eval_model import (
    BellmaskLM,
    Gap,
    LoadedTasks,
    ScoredChoice,
    UnigramLM,
)


class Stub(BellmaskLM):
    """Scores and writes by functions of texts, in which ␣ is a mask, and notes what it is asked."""

    def __init__(self, run, log_p=None, text=None, *, longest_exact=1000, mark="stub"):
        super().__init__(run, greedy=False)
        self.log_p, self.text = log_p or (lambda *_: -1.0), text or (lambda *_: "")
        self.longest_exact, self.mark = longest_exact, mark
        self.asked, self.calls, self.progress = [], Counter(), NO_PROGRESS

    @property
    def fingerprint(self):
        return self.mark

    def decode(self, ids):
        return self.tokenizer.decode(np.array(ids))

    def is_exact(self, window):
        return len(window.target) <= self.longest_exact

    def score(self, windows, progress):
        self.calls["score"] += 1
        made = []
        for window in windows:
            self.asked.append((window, self.seed))
            value = self.log_p(self.decode(window.given), self.decode(window.target), self.seed)
            error = 0.0 if self.is_exact(window) else math.nan
            made.append(Score(value, error, len(window.target), 3, self.is_exact(window)))
            progress.advance()
        return made

    def fill(self, gaps, progress):
        self.calls["fill"] += 1
        progress.advance(len(gaps))
        self.asked += gaps
        texts = [self.text(self.decode(gap.row), self.seed) for gap in gaps]
        return [self.tokenizer.encode(text).tolist() for text in texts]


@pytest.fixture
def stub(small_config):
    """``stub(log_p, text, block_length=...)``."""

    def make(*args, block_length=256, **options):
        config = small_config(*EXACT, "--data.block-length", str(block_length))
        return Stub(random_run(config), *args, **options)

    return make


@pytest.fixture
def noisy(stub):
    """All that it says differs with everything; up to five bytes have no noise."""

    def make(mark="noisy"):
        def log_p(context, continuation, seed):
            seed = seed if len(continuation) > 5 else 0
            return -float(stream_key(seed, mark, context, continuation) % 1000)

        def text(row, seed):
            return f" {NOUNS[stream_key(seed, mark, row) % 5]}"

        return stub(log_p, text, longest_exact=5, mark=mark)

    return make


@pytest.fixture
def suite_of(tmp_path_factory):
    """Of one model or more, by their marks."""

    def make(*models, tasks=TASKS, limit=0, seeds=(0, 1)):
        folder = tmp_path_factory.mktemp("suite")
        named = {getattr(model, "mark", "one"): model for model in models}
        return Suite(named, loaded(*tasks), limit, seeds, folder)

    return make


@pytest.fixture
def measure(suite_of):
    """By task: value [S, B] of each score."""

    def values(model, *tasks, seeds=(0, 1)):
        return suite_of(model, tasks=tasks or TASKS, seeds=seeds)._measure(model)

    return values


# --- errors ----------------------------------------------------------------------------------


def test_errors_by_hand():
    """Three seeds, four questions."""
    mine = np.array([[100, 0, 0, 100], [100, 100, 0, 100], [100, 0, 0, 0]], dtype=float)
    other = np.array([[0, 0, 0, 100], [0, 100, 0, 100], [0, 0, 100, 100]], dtype=float)
    found = summary({"raw": mine}, {"raw": other})["raw"]
    assert (found["mean"], found["deviation"]) == (50, pytest.approx(25))  # 50, 75, 25 by seed
    # 100, 100/3, 0, 200/3 by question: mean 50
    spread = (50**2 + (50 / 3) ** 2 + 50**2 + (50 / 3) ** 2) / 3
    assert found["error"] == pytest.approx(math.sqrt(spread / 4))
    apart = np.array([100, 0, -100 / 3, -100 / 3])
    assert found["difference"] == {
        "mean": pytest.approx(apart.mean()),
        "error": pytest.approx(apart.std(ddof=1) / 2),
        "is_sure": False,
    }
    single = summary({"raw": mine[:1, :1]}, None)["raw"]
    assert single == {"mean": 100, "deviation": None, "error": None}
    for value, error, count, wanted in (
        (-1.97, 1.0, 20, True), (1.95, 1.0, 20, False), (-1.97, 1.0, 19, False),
        (0.0, 0.0, 20, False), (1.0, None, 20, False),
    ):  # fmt: skip
        assert is_sure(Estimate(value, error, count)) is wanted


# --- rows with a gap -------------------------------------------------------------------------

WORD = {"task": "lambada", "number": 0, "answer": " dog", "after": ""}
ANSWER = {**WORD, "task": "triviaqa"}
STORY = {"task": "infilling", "number": 0, "answer": " Three was very new.",
         "after": " Four saw. Five."}  # fmt: skip
SHOWN = {"lambada": "the old cat saw a", "infilling": "One sat. Two ran."}


def row_of(one, about, gap="gold", before=None):
    """The row of a question, as text."""
    context = before or SHOWN.get(about["task"], SHOWN["lambada"])
    doc, settings = {"bellmask": {**about, "gap": gap}}, {"temperature": 1.0}
    request = Instance("generate_until", doc, (context, settings), 0, ("t", 0, 1))
    return one.decode(one._gaps([request])[0].row)


def test_a_gap_has_the_gold_length_or_one_that_tells_nothing(stub):
    one = stub()
    before, after = SHOWN["infilling"], STORY["after"]
    for gold in (" dog", " é", " elephants"):
        masks = "␣" * len(gold.encode())
        assert row_of(one, {**WORD, "answer": gold}) == SHOWN["lambada"] + masks
        assert row_of(one, {**STORY, "answer": gold}) == before + masks + after
        for about, words in ((WORD, 4), (ANSWER, 8)):  # the prompt has 17 bytes in 5 words
            row = row_of(one, {**about, "answer": gold}, "own")
            assert row == SHOWN["lambada"] + "␣" * math.ceil(words * 17 / 5)
        row = row_of(one, {**STORY, "answer": gold}, "own")
        assert row == before + "␣" * 8 + after, "33 bytes in four sentences"
    one.own_length = 11  # of a tuned run
    lengths = [row_of(one, *args).count("␣") for args in ((WORD, "own"), (WORD,), (STORY, "own"))]
    assert lengths == [11, 4, 8]
    one.sees_behind = False
    assert row_of(one, STORY) == before + "␣" * 20


def test_what_is_furthest_from_the_gap_is_left_out(stub):
    one = stub(block_length=16)
    assert row_of(one, WORD) == "ld cat saw a␣␣␣␣"
    assert row_of(one, {**WORD, "answer": " " + "x" * 30}) == "at saw a" + "␣" * 8
    assert row_of(one, STORY, "own") == "ran." + "␣" * 8 + " Fou"
    short = {**STORY, "answer": " No", "after": " abcdefghijklmnop"}
    assert row_of(one, short, before="Hi.") == "Hi.␣␣␣ abcdefghi"
    one.facts.clear()
    row_of(one, {**WORD, "answer": " " * 8})
    assert not one.facts["t"].cut
    row_of(one, {**WORD, "answer": " " * 9})
    assert one.facts["t"].cut == {0}
    # WORD has 17 + 4 bytes, STORY 17 + 20 + 16, the choice 3 + 5
    choice = Instance("loglikelihood", {"bellmask": WORD}, ("who", " they"), 0, ("t", 0, 1))
    for ask, size in (
        (lambda one: row_of(one, WORD), 21),
        (lambda one: row_of(one, STORY), 53),
        (lambda one: one._windows(choice), 8),
    ):
        for block, wanted in ((size, set()), (size - 1, {0})):
            one = stub(block_length=block)
            ask(one)
            assert one.facts["t"].shortened == wanted


# --- scores ----------------------------------------------------------------------------------


@pytest.mark.parametrize("is_right", [True, False])
def test_who_knows_all_is_always_right_and_who_errs_always_wrong(stub, measure, is_right):
    golds = set()
    for task, found in loaded().items():
        for question in scored_questions(task, found.records, 0).values():
            golds.add((question.prompt, f" {question.answer}"))

    def log_p(context, continuation, seed):
        return -0.001 if ((context, continuation) in golds) == is_right else -1000.0

    def text(row, seed):
        noun = next(noun for noun in NOUNS if noun in row) if is_right else "xyz"
        return f" The {noun} ran under a tree." if row.endswith(".") and is_right else f" {noun}"

    one = stub(log_p, text, block_length=512)
    one.prompts = "tuned"
    for measured in measure(one).values():
        for values in measured.values():
            assert values.shape == (2, 5)
            assert values == pytest.approx(100.0 if is_right else 0.0)


def test_texts_are_graded_by_variant(stub, measure):
    """More than the word is wrong in a gap of its length only; EOS ends a text."""
    one = stub(text=lambda row, seed: " dog, and more")
    found = measure(one, "lambada", "triviaqa", "infilling", seeds=(0,))
    dog, nobody = [[0, 100, 0, 0, 0]], [[0] * 5]
    words, answers, stories = (found[task] for task in ("lambada", "triviaqa", "infilling"))
    assert (words["word"].tolist(), words["word_own"].tolist()) == (nobody, dog)
    for ending in ("", "_own"):
        assert answers["contains" + ending].tolist() == dog
        assert answers["exact_match" + ending].tolist() == nobody
        for place, noun in enumerate(NOUNS):
            for name, value in rouge(" dog, and more", f"The {noun} ran under a tree.").items():
                assert stories[name + ending][0, place] == pytest.approx(value)
    assert len({(gap.sample, gap.seed) for gap in one.asked}) == len(one.asked) == 30
    ended = stub()
    ended.fill = lambda gaps, _: [[*b" dog", ended.tokenizer.eos_id, *b" x"] for _ in gaps]
    assert measure(ended, "lambada")["lambada"]["word"].tolist() == dog * 2


# --- answers that are cached -----------------------------------------------------------------


def test_nothing_is_asked_twice_and_numbers_depend_on_neither_chunks_nor_order(
    noisy, suite_of, tmp_path, monkeypatch
):
    base, bell = noisy("base"), noisy("bell")
    for model in (base, bell):
        model.store_in(tmp_path)
        model.progress = Counted()
    suite = suite_of(base, bell)
    total, numbers = suite.num_missing(), suite.numbers()
    assert base.progress.done + bell.progress.done == total == len(base.asked) + len(bell.asked)
    assert len(set(base.asked)) == len(base.asked)
    assert base.calls == {"score": 2, "fill": 4}, "two seeds, texts at two temperatures"
    noise = Counter((w.noise, seed) for w, seed in [a for a in base.asked if isinstance(a, tuple)])
    assert {2, 3, 4} <= set(noise.values()), "choices of a question share it"
    numbers = json.loads(json.dumps(numbers, allow_nan=False))
    for task in numbers["tasks"]:
        for name, mine in task["results"]["bell"]["scores"].items():
            gap = mine["mean"] - task["results"]["base"]["scores"][name]["mean"]
            assert mine["difference"]["mean"] == pytest.approx(gap)
    monkeypatch.setattr(harness, "CHUNK", 3)
    other = suite_of(noisy("base"), noisy("bell"), tasks=TASKS[::-1]).numbers()
    assert other["tasks"][::-1] == numbers["tasks"]


@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_a_damaged_model_is_told(stub, suite_of, tmp_path, value):
    one = stub(lambda *_: value)
    one.store_in(tmp_path / "cache")
    with pytest.raises(UserError, match=r"piqa: .* not finite"):
        suite_of(one, tasks=("piqa",)).numbers()
    assert not (tmp_path / "cache").exists()


# --- runs ------------------------------------------------------------------------------------

CHAT = "{% for m in messages %}<{{ m.role }}> {{ m.content }}\n{% endfor %}<assistant>{{ '\\n' }}"


@pytest.mark.parametrize(
    ("template", "has_turns", "chat"),
    [("plain", True, CHAT), ("chat", False, None), ("auto", True, CHAT)],
)
def test_tuned_prompts_are_rows_of_fine_tuning(small_config, tmp_path, template, has_turns, chat):
    """A run that says it was fine-tuned, with any template."""
    config = small_config(*EXACT, "--data.block-length", "64")
    config = replace(config, sft=replace(config.sft, train="toy:reverse", template=template))
    about = {"has_turns": has_turns, "response_tokens": 11}
    (tmp_path / "run.json").write_text(json.dumps(about), encoding="utf-8")
    run = replace(random_run(config, "gpt2"), folder=tmp_path, backbone=Backbone({}, chat))
    eos = run.tokenizer.eos_id

    def asked(context, continuation, prompts="auto", ending="auto"):
        one = BellmaskLM(run, prompts=prompts, ending=ending)
        assert one.own_length == 11
        (window,) = one.windows(*one.split(context, continuation), 7)
        return one.prompts, window

    rules = ExampleRules(64, round_to=1, bos_first=True)
    for prompt in ("Question: 2 + 2?\nAnswer:", "say it "):
        for answer in ("four", "ça va"):
            example = Example((Message("user", prompt), Message("assistant", answer)), has_turns)
            written = make_template(template, run.tokenizer, chat)
            row = encode_example(example, run.tokenizer, written, rules)
            prompts, window = asked(prompt, f" {answer}")
            assert (*window.given, *window.target) == tuple(row.ids[: row.length].tolist())
            assert (len(window.given), window.target[-1]) == (row.start, eos)
            assert (prompts, window.noise) == ("tuned", 7)
    _, window = asked("a cat ", "sat", prompts="plain")
    assert (window.given, window.target) == ((run.tokenizer.bos_id, *ids("a cat")), ids(" sat"))
    assert asked("a cat", " sat", ending="none")[1].target[-1] != eos


def test_a_fingerprint_changes_when_answers_may(small_config):
    def mark(*options, seed=0, **more):
        return BellmaskLM(random_run(small_config(*options), seed=seed), **more).fingerprint

    base = mark()
    assert mark(batch_tokens=64) == base
    others = {mark(seed=1), mark(draws=4), mark("--framework", "arm")}
    others |= {mark("--model.num-heads", "4"), mark("--train.precision", "bfloat16")}
    assert len(others | {base}) == 6


# --- models that know nothing ----------------------------------------------------------------


def test_a_unigram_is_counted_by_hand(zoo, monkeypatch):
    run = load_run(zoo / "bell")
    train, valid = run.blocks()
    counts = Counter()
    for row, length in zip(np.asarray(train.tokens), np.asarray(train.lengths), strict=True):
        counts.update(row[:length].tolist())
    unigram, total = UnigramLM.of(run), sum(counts.values()) + 259
    (window,) = unigram.windows(*unigram.split("the red ", "moon"), 0)
    wanted = sum(math.log((counts[token] + 1) / total) for token in ids(" moon"))
    score = Score(pytest.approx(wanted, rel=1e-12), 0.0, 5, 0, True)
    assert unigram.score([window], NO_PROGRESS) == [score]
    row = (*ids("the"), *[259] * 4000)

    def write(seed, *samples):
        return unigram.fill([Gap(row, Sampling(), seed, n) for n in samples], NO_PROGRESS)

    one, two = write(0, 1, 2)
    assert one != two, "a sample has its own noise"
    assert write(0, 2) == [two] != write(1, 2)
    share = np.bincount(one, minlength=259) / 4000
    assert np.abs(share - np.exp(unigram.log_p_V)).max() < 5 * math.sqrt(0.25 / 4000)
    monkeypatch.setattr(type(run), "blocks", lambda self: (valid, train))
    with pytest.raises(UserError, match="has changed"):
        UnigramLM.of(run)


# --- tables ----------------------------------------------------------------------------------


def score(mean, gap=None, *, sure=False):
    found = {"mean": mean, "deviation": 0.5, "error": 1.5}
    return found | (
        {} if gap is None else {"difference": {"mean": gap, "error": 0.75, "is_sure": sure}}
    )


def made_up(*names, means=(40.0, 45.5)):
    """Models and a baseline on PIQA and LAMBADA."""
    facts = {"step": 4, "prompts": "plain", "ending": "none", "tokenizer": "bytes"}
    facts |= {"framework": "mdm", "block_length": 64}
    models = [{"name": name, "is_model": True, **facts} for name in names]
    models.append({**models[0], "name": "random", "is_model": False, "step": None})
    piqa, lambada = {}, {}
    for place, (name, mean) in enumerate(zip([*names, "random"], [*means, 99.0], strict=True)):
        gap = None if place == 0 else mean - means[0]
        found = {"num_cut": 0, "num_shortened": 0, "exact_share": 0.25 if name in names else None}
        scores = {how: score(mean, gap, sure=place == 1) for how in ("per_token", "raw")}
        piqa[name] = {**found, "scores": scores}
        words = {"word": score(0.0, gap and 0.0), "word_own": score(7.0, gap and -0.001)}
        lambada[name] = {**found, "scores": words}
    tasks = [
        {"name": name.lower(), "title": name, "main": main, "note": f"{name}: a note",
         "gives_length": main == "word", "results": results, "num_questions": 1234,
         "origin": "a file"}
        for name, main, results in (("PIQA", "per_token", piqa), ("LAMBADA", "word", lambada))
    ]  # fmt: skip
    found = {"models": models, "seeds": [0, 1, 2], "tasks": tasks, "missing": {}}
    return found | {"estimator": "auto", "draws": 16, "longest_exact": 6}


def main_rows(numbers):
    rows = main_table(numbers).rows
    return [[f"<{c}>" if isinstance(c, Bold) else c for c in row] for row in rows]


def test_main_and_full_table():
    numbers = made_up("base", "bell")
    assert main_table(numbers).columns == ["model", "PIQA (%)", "LAMBADA (%)†"]
    assert main_rows(numbers) == [
        ["base, step 4", "40.00 ± 0.50", "0.00 ± 0.50"],
        ["bell, step 4", "<45.50 ± 0.50 (+5.50*)>", "0.00 ± 0.50 (+0.00)"],
        ["random", "99.00 ± 0.50", "0.00 ± 0.50"],
    ]
    rows = full_table(numbers).rows
    assert {len(row) for row in rows} == {len(full_table(numbers).columns)}
    assert [row[-1] for row in rows[:2]] == ["-", "+5.50 ± 0.75 *"]
    assert rows[1][3:6] == ["45.50", "0.50", "1.50"]
    numbers["tasks"][0]["results"]["base"]["scores"]["per_token"]["deviation"] = None
    assert full_table(numbers).rows[0][4] == "-"
    assert main_rows(numbers)[0][1] == "40.00"


@pytest.mark.parametrize(
    ("means", "best"),
    [
        ((40.0, 45.5, 1.0), "b"),
        ((45.501, 45.499, 45.5), "abc"),
        ((0.004, 0.001, 0.0), ""),
        ((45.5,), ""),
    ],
)
def test_the_best_models_are_bold(means, best):
    """As printed: baselines never, ties all, nobody where nobody scored or nobody competes."""
    numbers = made_up(*"abc"[: len(means)], means=means)
    bold = {row[0][0] for row in main_rows(numbers) if row[1].startswith("<")}
    assert bold == set(best)


def test_notes_say_what_differs():
    numbers = made_up("base", "bell")
    before = "\n".join(notes(numbers))
    for words in ("3 evaluation seeds", "1,234 questions", "up to 6 tokens, else 16", "25% of b"):
        assert words in before
    numbers["missing"] = {"triviaqa": "no network"}
    numbers["models"][1].update(prompts="tuned", tokenizer="bpe", framework="arm")
    numbers["tasks"][1]["results"]["bell"].update(num_cut=3, num_shortened=1001)
    after = "\n".join(notes(numbers))
    for words in ("no data: triviaqa", "those of fine-tuning", "Tokenizers differ", "ARMs",
                  "LAMBADA: 3 gold answers", "LAMBADA: 1,001 questions"):  # fmt: skip
        assert words in after
        assert words not in before
    numbers["seeds"] = [0]
    assert "One evaluation seed" in "\n".join(notes(numbers))


# --- tasks: their documents beside lm-eval's own, and their scores ----------------------------


@pytest.fixture
def some_records(fetched, shared_file):
    """From the whole set; of LAMBADA also the ones with a line end in the word."""

    def load(task, count=100):
        if task == "lambada":
            folder = shared_file("lambada/lambada_test_openai.jsonl").parents[1]
            records = open_task(task, str(folder), folder).records
        else:
            records = fetched(lambda cache: validation_records(task, cache))
        odd = [r for r in records if task == "lambada" and "\n" in r["text"].split(" ")[-1]]
        return [*records[:: max(1, len(records) // count)][:count], *odd]

    return load


def asked(folder, task, records, prompts):
    """lm-eval's task, and by document what it asks."""
    assert paper_suite.write_task(folder, task, records, 0, prompts) == len(records)
    loaded = LoadedTasks(folder, [task])
    requests = {}
    for request in loaded.requests():
        requests.setdefault(request.doc_id, []).append(request)
    return loaded._loaded["tasks"][task], list(requests.values())


@pytest.mark.parametrize("task", STOCK)
def test_documents_say_what_lm_evals_own_task_wants(task, some_records, tmp_path):
    stock, documents = asked(tmp_path, task, some_records(task), "plain")
    for requests in documents:
        doc = requests[0].doc
        about, target = doc["bellmask"], stock.doc_to_target(doc)
        if BENCHMARKS[task].kind == "choice":
            gold = stock.doc_to_text(doc) if task == "winogrande" else target
            assert about["gold"] == int(gold)
            assert BENCHMARKS[task].column.measure == f"accuracy, {len(requests)} choices"
        elif task == "lambada":
            assert requests[0].args[0] + about["answer"] == doc["text"]
        else:
            assert set(doc["answer"]["aliases"]) <= set(about["accepted"])
            assert about["answer"].strip() == about["accepted"][0] == doc["answer"]["value"]


def scored(values, tokens, texts):
    pairs = zip(values, tokens, texts, strict=True)
    return [ScoredChoice.of(Score(v, 0.0, n, 1, True), False, text) for v, n, text in pairs]


def test_each_way_to_choose_can_choose_differently():
    texts = [" abc", " abcdefghij", " \u00e9\u00e9\u00e9\u00e9\u00e9"]  # 3, 10 and 10 bytes

    def right(gold, values=(-6.0, -8.0, -7.0)):
        found = paper_suite.score_choices(
            {"bellmask": {"gold": gold}}, scored(values, [2, 3, 1], texts)
        )
        return [name for name, value in found.items() if value]

    assert [right(gold) for gold in range(3)] == [["raw"], ["per_token"], ["per_byte"]]
    assert right(1, (-2.0, -1.0, -1.0)) == ["per_token", "raw", "per_byte"], "the first of equals"
    alike = paper_suite.score_choices({"bellmask": {"gold": 0}}, scored([-1.0] * 3, [2] * 3, texts))
    assert alike == dict.fromkeys(SCORES["choice"], 100 / 3)


@pytest.mark.parametrize(
    ("written", "gold", "is_all", "is_first"),
    [
        ("signs\n", " signs ", True, True),
        (" Signs", "signs", False, False),
        (' signs,"', "signs", False, True),
        (" signs. Then he", "signs", False, True),
        (" signsand", "signs", False, False),
        (" the signs", "signs", False, False),
        ("", "signs", False, False),
        (" ...", "signs", False, False),
        (" 'paid", "'paid", True, True),
        (" paid", "'paid", False, False),
        (" Mr.", "Mr.", True, True),
        (" Mr", "Mr.", False, False),
        (" of Power, then", "of\n\nPower", False, True),
        (" of", "of\n\nPower", False, False),
    ],
)
def test_last_words_of_lambada(written, gold, is_all, is_first):
    assert paper_suite.is_word(written, gold) is is_all
    assert paper_suite.begins_with_word(written, gold) is is_first


@pytest.mark.parametrize(
    ("written", "is_exact", "is_inside"),
    [
        ("the sunset   boulevard!\nQuestion: What", True, True),
        (" It is Sunset Boulevard, I think.", False, True),
        (" sunset-blvd", True, True),
        (" A house", False, False),
        (" the US", True, True),
        (" Sunset\nBoulevard", False, False),
        ("\nSunset Boulevard", False, False),
        ("", False, False),
        (" the !", False, False),
    ],
)
def test_answers_of_triviaqa(written, is_exact, is_inside):
    accepted = ("Sunset Boulevard", "The Sunset Blvd.", "US", "!")
    assert paper_suite.matches_exactly(written, accepted) is is_exact
    assert paper_suite.contains(written, accepted) is is_inside


def test_answers_are_normalized_as_in_the_release(fetched):
    for record in fetched(lambda cache: validation_records("triviaqa", cache))[::10]:
        answer = record["answer"]
        assert normalize(answer["value"]) == answer["normalized_value"]
        found = {normalize(alias) for alias in answer["aliases"]} - {""}
        assert found == set(answer["normalized_aliases"])


def test_rouge_by_hand(monkeypatch):
    pytest.importorskip("rouge_score")
    for written, gold, scores in (
        # 4 of 6 words (the, cat, on, mat), 1 of 5 pairs (the cat), the cat on mat in order
        ("the cat sat on the mat", "The cat lay on a mat.", (4 / 6, 1 / 5, 4 / 6)),
        # stems: walked = walking, dogs = dog
        ("walked dogs", "walking dog", (1, 1, 1)),
        ("", "something", (0, 0, 0)),
    ):
        percent = [100 * score for score in (sum(scores) / 3, *scores)]
        assert list(rouge(written, gold).values()) == pytest.approx(percent)
    monkeypatch.setitem(sys.modules, "rouge_score", None)
    with pytest.raises(UserError, match=r"bellmask\[eval\]"):
        paper_suite._check(paper_suite.PaperOptions(models=("bell",)))
