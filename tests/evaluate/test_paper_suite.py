"""The paper's suite: rows with gaps, scores and their errors, answers that are cached.

By hand, and with models that know everything or nothing. The command itself:
``tests/end_to_end/test_paper_suite.py``; its numbers: ``tests/frozen``.
"""

from __future__ import annotations

import json
import math
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
from bellmask.data.tasks import BENCHMARKS, scored_questions
from bellmask.evaluate.paper_suite import Suite, is_sure, summary
from bellmask.evaluate.paper_tasks import rouge
from bellmask.evaluate.scorer import Estimator, Score, Scorer
from bellmask.generate.settings import Sampling
from bellmask.model.pretrained import Backbone
from bellmask.run import load_run
from bellmask.utils.errors import UserError
from bellmask.utils.progress import NO_PROGRESS
from bellmask.utils.rng import stream_key
from bellmask.utils.stats import Estimate

pytest.importorskip("lm_eval")

from lm_eval.api.instance import Instance

from bellmask.evaluate import lm_eval_model as harness
from bellmask.evaluate.lm_eval_model import BellmaskLM, Gap, RandomLM, UnigramLM


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

    def make(*models, tasks=TASKS, limit=0, seeds=(0, 1), records=None):
        folder = tmp_path_factory.mktemp("suite")
        named = {getattr(model, "mark", "one"): model for model in models}
        return Suite(harness, named, records or loaded(*tasks), limit, seeds, folder)

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


def test_paired_errors_are_those_of_a_bootstrap():
    """Questions drawn again 20,000 times."""
    draw = np.random.default_rng(0)
    easy_B = draw.random(300)
    mine = 100.0 * (draw.random((2, 300)) < easy_B)
    other = 100.0 * (draw.random((2, 300)) < easy_B * 0.9)
    found = summary({"raw": mine}, {"raw": other})["raw"]["difference"]
    apart_B, again = (mine - other).mean(0), draw.integers(300, size=(20_000, 300))
    assert found["mean"] == pytest.approx(apart_B.mean())
    assert found["error"] == pytest.approx(apart_B[again].mean(1).std(), rel=0.03)


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
    short = {**STORY, "answer": " No", "after": "!"}
    assert row_of(one, short, before="abcdefghijklmnop") == "efghijklmnop␣␣␣!"
    for length, is_cut in ((8, False), (9, True)):
        one.facts.clear()
        row_of(one, {**WORD, "answer": " " * length})
        assert bool(one.facts["t"].cut) is is_cut
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


def test_choices_by_sum_token_and_byte_and_by_seed(stub, measure):
    """sol1 is the longer one; labels are 0, 1, 0, 1, 0."""
    first, second = [100, 0, 100, 0, 100], [0, 100, 0, 100, 0]
    longer = stub(lambda _, continuation, seed: -5.0 if continuation == " sat" else -6.0)
    values = measure(longer, "piqa", seeds=(0,))["piqa"]
    assert {name: value.tolist() for name, value in values.items()} == {
        "raw": [second], "per_token": [first], "per_byte": [first]
    }  # fmt: skip

    def by_seed(context, continuation, seed):
        return -1.0 if (continuation != " sat") == (seed == 0) else -100.0

    for longest, share, passes in ((0, 0.0, 3 * 20), (4, 0.5, 3 * 15)):
        one = stub(by_seed, longest_exact=longest)
        values = measure(one, "piqa")["piqa"]
        if not longest:
            assert values["raw"].tolist() == [first, second]
        facts = one.facts["piqa"]
        assert (facts.exact_share, sum(facts.passes.values())) == (share, passes)
    # who cannot tell choices apart guesses: WinoGrande's end alike
    values = measure(stub(), "winogrande")["winogrande"]
    assert all((value == 50).all() for value in values.values())


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
    heat = {(one.decode(gap.row).endswith("."), gap.sampling.temperature) for gap in one.asked}
    assert heat == {(True, 0.95), (False, 1.0)}
    assert len({(gap.sample, gap.seed) for gap in one.asked}) == len(one.asked) == 30
    ended = stub()
    ended.fill = lambda gaps, _: [[*b" dog", ended.tokenizer.eos_id, *b" x"] for _ in gaps]
    assert measure(ended, "lambada")["lambada"]["word"].tolist() == dog * 2


# --- answers that are cached -----------------------------------------------------------------


def test_nothing_is_asked_twice_and_numbers_depend_on_neither_chunks_nor_order(
    noisy, stub, suite_of, tmp_path, monkeypatch
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
    double = loaded("piqa")
    double["piqa"].records.extend(double["piqa"].records)
    for longest, count in ((1000, 10), (0, 40)):  # without noise: once for all seeds and repeats
        assert suite_of(stub(longest_exact=longest), records=double).num_missing() == count
    monkeypatch.setattr(harness, "CHUNK", 3)
    other = suite_of(noisy("base"), noisy("bell"), tasks=TASKS[::-1]).numbers()
    assert other["tasks"][::-1] == numbers["tasks"]


@pytest.mark.parametrize(
    ("option", "more"),
    [("seeds", (0, 1, 2)), ("limit", 5), ("tasks", ("lambada", "piqa", "infilling"))],
)
def test_more_work_does_only_what_is_new(noisy, suite_of, tmp_path, option, more):
    small = {"tasks": ("piqa", "infilling"), "limit": 3, "seeds": (0, 1)}
    before, after, whole = noisy(), noisy(), noisy()
    before.store_in(tmp_path)
    suite_of(before, **small).numbers()
    after.store_in(tmp_path)
    grown = suite_of(after, **{**small, option: more})
    once = suite_of(whole, **{**small, option: more})
    assert grown.numbers() == once.numbers()
    assert before.asked
    assert after.asked
    assert sorted(map(repr, before.asked + after.asked)) == sorted(map(repr, whole.asked))


@pytest.mark.parametrize("place", [0, 150])
def test_stopped_work_goes_on(noisy, suite_of, tmp_path, monkeypatch, place):
    monkeypatch.setattr(harness, "CHUNK", 7)
    whole = suite_of(noisy()).numbers()

    def stop():
        if first.progress.done >= place:
            raise KeyboardInterrupt

    first, second = noisy(), noisy()
    first.store_in(tmp_path)
    first.progress = Counted(stop)
    stopped = suite_of(first)
    total = stopped.num_missing()
    with pytest.raises(KeyboardInterrupt):
        stopped.numbers()
    for path in tmp_path.glob("*.jsonl"):  # as a kill leaves it
        path.write_bytes(path.read_bytes() + b'{"key": "half of a li')
    second.store_in(tmp_path)
    resumed = suite_of(second)
    left = resumed.num_missing()
    assert place - 7 <= total - left <= place + 7
    assert resumed.numbers() == whole
    assert len(second.asked) == left


@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_a_damaged_model_is_told(stub, suite_of, tmp_path, value):
    one = stub(lambda *_: value)
    one.store_in(tmp_path / "cache")
    with pytest.raises(UserError, match=r"piqa, document .* damaged"):
        suite_of(one, tasks=("piqa",)).numbers()
    assert not (tmp_path / "cache").exists()


# --- runs ------------------------------------------------------------------------------------

CHAT = "{% for m in messages %}<{{ m.role }}> {{ m.content }}\n{% endfor %}<assistant>{{ '\\n' }}"


@pytest.mark.parametrize(
    ("template", "has_turns", "chat"),
    [("auto", False, None), ("plain", True, CHAT), ("chat", False, None), ("auto", True, CHAT)],
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


def test_a_plain_run_is_asked_as_by_hand(small_config, measure):
    """Sums over windows, of masks that the question's number and the seed decide."""
    run, estimator = random_run(small_config(*EXACT)), Estimator(draws=2, longest_exact=3)
    one = BellmaskLM(run, draws=2, longest_exact=3, batch_tokens=64, greedy=False)
    assert (one.prompts, one.ending, one.own_length) == ("plain", (), None)
    assert BellmaskLM(run, ending="eos").ending == (run.tokenizer.eos_id,)
    scorer, found = Scorer(run, estimator), measure(one, "piqa", seeds=(5, 6))["piqa"]
    records = loaded("piqa")["piqa"].records
    for number, record in enumerate(records):
        noise = stream_key(0, "question", "piqa", number) % (1 << 62)
        texts = [f" {record[name]}" for name in ("sol1", "sol2")]
        context = f"Question: {record['goal']}\nAnswer:"
        windows = [scorer.asks(context, text, noise=noise) for text in texts]
        tokens = [sum(len(window.target) for window in own) for own in windows]
        sizes = {"raw": [1, 1], "per_token": tokens, "per_byte": [len(t.strip()) for t in texts]}
        for place, seed in enumerate((5, 6)):
            sums = [sum(s.log_probability for s in scorer.score(w, seed=seed)) for w in windows]
            for how, size in sizes.items():
                is_right = int(np.argmax(np.array(sums) / np.array(size))) == record["label"]
                assert found[how][place, number] == 100 * is_right


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
    monkeypatch.setattr(harness, "REFERENCE_BLOCKS", 3)
    rows = train.spread(3).rows(slice(0, 3)).flatten().tolist()
    wanted = [math.log((rows.count(token) + 1) / (len(rows) + 259)) for token in range(259)]
    assert UnigramLM.of(run).log_p_V.tolist() == pytest.approx(wanted), "a sample of a long text"
    monkeypatch.setattr(type(run), "blocks", lambda self: (valid, train))
    with pytest.raises(UserError, match="has changed"):
        UnigramLM.of(run)


def test_guessing_is_even(zoo, measure):
    guesser = RandomLM.of(load_run(zoo / "bell"))
    for task, values in measure(guesser, *BENCHMARKS).items():
        if BENCHMARKS[task].kind == "choice":
            count = int(BENCHMARKS[task].column.measure.split()[1])
            assert all((value == 100 / count).all() for value in values.values())
            facts = guesser.facts[task]
            assert (facts.passes, facts.exact_share) == ({}, None)
    (made,) = guesser.fill([Gap((259,) * 5180, Sampling(), 0, 0)], NO_PROGRESS)
    count = np.bincount(made, minlength=259)
    assert ((count - 20) ** 2 / 20).sum() < 259 + 5 * math.sqrt(2 * 259), "chi-squared"
