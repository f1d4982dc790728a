"""The paper's suite: rows with gaps, scores and their errors, work that is kept.

By hand, and with contestants who know everything or nothing. The command itself:
``tests/end_to_end/test_paper_suite.py``; its numbers: ``tests/frozen``.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from continuation_tools import EXACT, ids, random_run
from counted_progress import Counted
from downstream_tools import NOUNS, TASKS, loaded
from example_tools import encode_example

from bellmask.data.chat_templates import make_template
from bellmask.data.example_files import Example, Message
from bellmask.data.examples import ExampleRules
from bellmask.data.tokenizers import ByteTokenizer
from bellmask.evaluate import paper_suite as work_file
from bellmask.evaluate.paper_suite import (
    RunContestant,
    Suite,
    TaskScores,
    Unigram,
    guesser_for,
    is_cut,
    is_shortened,
    is_sure,
    make_row,
    same_items,
    summary,
    unigram_of,
)
from bellmask.evaluate.paper_tasks import ChoiceItem, Completion, Infilling, rouge
from bellmask.evaluate.scorer import Estimator, Score, Scorer
from bellmask.model.pretrained import Backbone
from bellmask.run import load_run
from bellmask.utils.errors import UserError
from bellmask.utils.rng import stream_key


class Stub(Unigram):
    """Scores and writes by functions of texts, in which ␣ is a mask, and notes what it is asked."""

    def __init__(self, log_p=None, text=None, *, longest_exact=1000, mark="stub", block_length=256):
        super().__init__(ByteTokenizer(), np.zeros(1), block_length, is_model=True)
        self.log_p, self.text = log_p or (lambda *_: -1.0), text or (lambda *_: "")
        self.longest_exact, self.mark = longest_exact, mark
        self.asked, self.calls = [], Counter()

    @property
    def fingerprint(self):
        return self.mark

    def decode(self, ids):
        return self.tokenizer.decode(np.array(ids))

    def is_exact(self, ask):
        return len(ask.target) <= self.longest_exact

    def score(self, asks, seed, progress=None):
        self.calls["score"] += 1
        self.asked += [(ask, seed) for ask in asks]
        made = []
        for ask in asks:
            value = self.log_p(self.decode(ask.given), self.decode(ask.target), seed)
            error = 0.0 if self.is_exact(ask) else math.nan
            made.append(Score(value, error, len(ask.target), 3, self.is_exact(ask)))
            progress.advance()
        return made

    def write(self, rows, samples, *, seed, temperature, progress=None):
        self.calls["write"] += 1
        if progress:
            progress.advance(len(rows))
        shown = [self.decode(row.tolist()) for row in rows]
        self.asked += [(row, n, seed, temperature) for row, n in zip(shown, samples, strict=True)]
        return [self.tokenizer.encode(self.text(row, seed)).tolist() for row in shown]


def noisy(mark="noisy"):
    """All that it says differs with everything; up to five bytes have no noise."""

    def log_p(context, continuation, seed):
        seed = seed if len(continuation) > 5 else 0
        return -float(stream_key(seed, mark, context, continuation) % 1000)

    def text(row, seed):
        return f" {NOUNS[stream_key(seed, mark, row) % 5]}"

    return Stub(log_p, text, longest_exact=5, mark=mark)


def measure(one, folder, *tasks, seeds=(0, 1)):
    """Scores by task."""
    suite = Suite({"one": one}, loaded(*tasks), 0, seeds, folder)
    suite.do()
    return suite.measured()["one"]


# --- errors ----------------------------------------------------------------------------------


def test_errors_by_hand():
    """Three seeds, four questions."""
    mine = np.array([[100, 0, 0, 100], [100, 100, 0, 100], [100, 0, 0, 0]], dtype=float)
    other = np.array([[0, 0, 0, 100], [0, 100, 0, 100], [0, 0, 100, 100]], dtype=float)
    one, two = TaskScores({"raw": mine}), TaskScores({"raw": other})
    assert one.mean("raw") == 600 / 12
    assert one.deviation("raw") == pytest.approx(25.0)  # 50, 75, 25 by seed
    # 100, 100/3, 0, 200/3 by question: mean 50
    spread = (50**2 + (50 / 3) ** 2 + 50**2 + (50 / 3) ** 2) / 3
    assert one.error("raw") == pytest.approx(math.sqrt(spread / 4))
    apart = np.array([100, 0, -100 / 3, -100 / 3])
    wanted = apart.mean(), apart.std(ddof=1) / 2
    assert one.difference(two, "raw") == pytest.approx(wanted)
    single = TaskScores({"raw": mine[:1, :1]}, num_passes=7, exact_share=0.5)
    assert (single.deviation("raw"), single.error("raw")) == (None, None)
    found = json.loads(json.dumps(summary(single, single), allow_nan=False))
    gap = {"mean": 0.0, "error": None, "is_sure": False}
    assert found["scores"]["raw"]["difference"] == gap
    assert (found["num_passes"], found["exact_share"]) == (7, 0.5)
    assert "difference" not in summary(single, None)["scores"]["raw"]
    assert [is_sure(-1.97, 1.0, 20), is_sure(1.95, 1.0, 20), is_sure(-1.97, 1.0, 19)] == [
        True, False, False
    ]  # fmt: skip
    assert not is_sure(0.0, 0.0, 20)


def test_paired_errors_are_those_of_a_bootstrap():
    """Questions drawn again 20,000 times."""
    draw = np.random.default_rng(0)
    easy_B = draw.random(300)
    mine = 100.0 * (draw.random((2, 300)) < easy_B)
    other = 100.0 * (draw.random((2, 300)) < easy_B * 0.9)
    gap, error = TaskScores({"raw": mine}).difference(TaskScores({"raw": other}), "raw")
    apart_B, again = (mine - other).mean(0), draw.integers(300, size=(20_000, 300))
    assert gap == pytest.approx(apart_B.mean())
    assert error == pytest.approx(apart_B[again].mean(1).std(), rel=0.03)


# --- rows with a gap -------------------------------------------------------------------------

WORD = Completion(0, "the old cat saw a", " dog", ("dog",))
STORY = Infilling(0, "One sat. Two ran.", " Three was very new.", " Four saw. Five.")


def gap(one, kind, item, variant):
    return one.decode(make_row(one, kind, item, variant))


def test_a_gap_has_the_gold_length_or_one_that_tells_nothing():
    one = Stub()
    for gold in (" dog", " é", " elephants"):
        masks = "␣" * len(gold.encode())
        assert gap(one, "word", replace(WORD, answer=gold), "gold") == WORD.prompt + masks
        row = gap(one, "story", replace(STORY, gold=gold), "gold")
        assert row == STORY.before + masks + STORY.after
        for kind, words in (("word", 4), ("answer", 8)):  # the prompt has 17 bytes in 5 words
            row = gap(one, kind, replace(WORD, answer=gold), "own")
            assert row == WORD.prompt + "␣" * math.ceil(words * 17 / 5)
        row = gap(one, "story", replace(STORY, gold=gold), "own")
        assert row == STORY.before + "␣" * 8 + STORY.after, "33 bytes in four sentences"
    assert gap(one, "word", replace(WORD, answer=""), "gold").count("␣") == 1
    one.own_length = 11  # of a tuned run
    lengths = [gap(one, *args).count("␣") for args in (
        ("word", WORD, "own"), ("word", WORD, "gold"), ("story", STORY, "own")
    )]  # fmt: skip
    assert lengths == [11, 4, 8]
    one.sees_behind = False
    assert gap(one, "story", STORY, "gold") == STORY.before + "␣" * 20
    odd = replace(STORY, before="a\ud800b", gold=" c", after=" d\udc00")
    assert gap(Stub(), "story", odd, "gold") == "a?b␣␣ d?"


def test_what_is_furthest_from_the_gap_is_left_out():
    one = Stub(block_length=16)
    assert gap(one, "word", WORD, "gold") == "ld cat saw a␣␣␣␣"
    assert gap(one, "word", replace(WORD, answer=" " * 30), "gold") == "at saw a" + "␣" * 8
    assert gap(one, "story", STORY, "own") == "ran." + "␣" * 8 + " Fou"
    short = replace(STORY, before="Hi.", gold=" No", after=" abcdefghijklmnop")
    assert gap(one, "story", short, "gold") == "Hi.␣␣␣ abcdefghi"
    short = replace(STORY, before="abcdefghijklmnop", gold=" No", after="!")
    assert gap(one, "story", short, "gold") == "efghijklmnop␣␣␣!"
    assert is_cut(one, STORY)
    assert [is_cut(one, replace(WORD, answer=" " * n)) for n in (8, 9)] == [False, True]
    # WORD has 17 + 4 bytes, STORY 17 + 20 + 16, the choice 3 + 5
    choice = ChoiceItem(0, ("who", "who"), (" I", " they"), 0)
    for item, size in ((WORD, 21), (STORY, 53), (choice, 8)):
        assert not is_shortened(Stub(block_length=size), item)
        assert is_shortened(Stub(block_length=size - 1), item)


# --- scores ----------------------------------------------------------------------------------


@pytest.mark.parametrize("is_right", [True, False])
def test_who_knows_all_is_always_right_and_who_errs_always_wrong(tmp_path, is_right):
    golds = {
        (item.contexts[item.gold].rstrip(), item.continuations[item.gold])
        for task in same_items(loaded(), ["plain"], 0)["plain"]
        for item in task.items
        if isinstance(item, ChoiceItem)
    }

    def log_p(context, continuation, seed):
        return -0.001 if ((context, continuation) in golds) == is_right else -1000.0

    def text(row, seed):
        noun = next(noun for noun in NOUNS if noun in row) if is_right else "xyz"
        return f" The {noun} ran under a tree." if row.endswith(".") and is_right else f" {noun}"

    for measured in measure(Stub(log_p, text), tmp_path).values():
        for values in measured.value_SB.values():
            assert values.shape == (2, 5)
            assert values == pytest.approx(100.0 if is_right else 0.0)


def test_choices_by_sum_token_and_byte_and_by_seed(tmp_path):
    """sol1 is the longer one; labels are 0, 1, 0, 1, 0."""
    first, second = [100, 0, 100, 0, 100], [0, 100, 0, 100, 0]
    longer = Stub(lambda _, continuation, seed: -5.0 if continuation == " sat" else -6.0)
    values = measure(longer, tmp_path, "piqa", seeds=(0,))["piqa"].value_SB
    assert {name: value.tolist() for name, value in values.items()} == {
        "raw": [second], "per_token": [first], "per_byte": [first]
    }  # fmt: skip

    def by_seed(context, continuation, seed):
        return -1.0 if (continuation != " sat") == (seed == 0) else -100.0

    found = measure(Stub(by_seed, longest_exact=0, mark="a"), tmp_path, "piqa")["piqa"]
    assert found.value_SB["raw"].tolist() == [first, second]
    assert (found.exact_share, found.num_passes) == (0.0, 3 * 20)
    found = measure(Stub(by_seed, longest_exact=4, mark="b"), tmp_path, "piqa")["piqa"]
    assert (found.exact_share, found.num_passes) == (0.5, 3 * 15)
    # who cannot tell choices apart guesses: WinoGrande's end alike
    values = measure(Stub(mark="c"), tmp_path, "winogrande")["winogrande"].value_SB
    assert all((value == 50).all() for value in values.values())


def test_texts_are_graded_by_variant(tmp_path):
    """More than the word is wrong in a gap of its length only; EOS ends a text."""
    one = Stub(text=lambda row, seed: " dog, and more")
    found = measure(one, tmp_path, "lambada", "triviaqa", "infilling", seeds=(0,))
    dog, nobody = [[0, 100, 0, 0, 0]], [[0] * 5]
    words, answers, stories = (found[t].value_SB for t in ("lambada", "triviaqa", "infilling"))
    assert (words["word"].tolist(), words["word_own"].tolist()) == (nobody, dog)
    for ending in ("", "_own"):
        assert answers["contains" + ending].tolist() == dog
        assert answers["exact_match" + ending].tolist() == nobody
        for place, noun in enumerate(NOUNS):
            wanted = rouge(" dog, and more", f"The {noun} ran under a tree.")
            for name in ("rouge_1", "rouge_2", "rouge_l", "rouge_mean"):
                assert stories[name + ending][0, place] == pytest.approx(getattr(wanted, name))
    assert {(row.endswith("."), t) for row, *_, t in one.asked} == {(True, 0.95), (False, 1.0)}
    assert len({(sample, seed) for _, sample, seed, _ in one.asked}) == len(one.asked) == 30
    ended = Stub(mark="ended")
    ended.write = lambda rows, *_, **__: [[*b" dog", ended.tokenizer.eos_id, *b" x"] for _ in rows]
    assert measure(ended, tmp_path, "lambada")["lambada"].value_SB["word"].tolist() == dog * 2


def test_guesses_and_answers_that_do_not_fit(tmp_path):
    one = Stub()
    one.is_guess = True
    found = measure(one, tmp_path)
    choices = {"openbookqa": 4, "winogrande": 2, "piqa": 2, "social_iqa": 3, "hellaswag": 4}
    for name, count in choices.items():
        assert all((values == 100 / count).all() for values in found[name].value_SB.values())
        assert (found[name].num_passes, found[name].exact_share) == (0, None)
    assert one.calls.keys() == {"write"}
    # sentences of 26 and 27 bytes
    found = measure(Stub(block_length=52, mark="short"), tmp_path, "infilling", "triviaqa")
    lengths = [len(f" The {noun} ran under a tree.") for noun in NOUNS]
    assert found["infilling"].num_cut == sum(length > 26 for length in lengths)
    assert found["triviaqa"].num_cut == 0


# --- work that is kept -----------------------------------------------------------------------


def suite_of(folder, *models, tasks=TASKS, limit=0, seeds=(0, 1)):
    return Suite({one.mark: one for one in models}, loaded(*tasks), limit, seeds, folder)


def test_all_models_get_the_same_questions():
    found = same_items(loaded(), ["plain", "tuned"], 3)
    more = same_items(loaded(), ["plain"], 4)["plain"]
    assert [task.name for task in more] == list(TASKS)
    for plain, tuned, many in zip(found["plain"], found["tuned"], more, strict=True):
        assert [item.number for item in plain.items] == [item.number for item in tuned.items]
        assert len(plain.items) == 3
        assert set(plain.items) < set(many.items)
    rows = loaded("piqa")["piqa"]
    for row in rows.records:
        row["label"] = -1
    with pytest.raises(UserError, match="piqa"):
        same_items({"piqa": rows}, ["plain"], 0)


def test_nothing_is_asked_twice_and_numbers_depend_on_neither_chunks_nor_order(
    tmp_path, monkeypatch
):
    base, bell = noisy("base"), noisy("bell")
    suite = suite_of(tmp_path / "a", base, bell)
    total, progress = suite.missing(), Counted()
    suite.do(progress)
    assert progress.done == total == len(base.asked) + len(bell.asked)
    assert len(set(base.asked)) == len(base.asked)
    assert base.calls == {"score": 2, "write": 4}, "two seeds, texts at two temperatures"
    noise = Counter((ask.noise, seed) for ask, seed in [a for a in base.asked if len(a) == 2])
    assert {2, 3, 4} <= set(noise.values()), "choices of a question share it"
    numbers = json.loads(json.dumps(suite.numbers(), allow_nan=False))
    for task in numbers["tasks"]:
        for name, mine in task["results"]["bell"]["scores"].items():
            gap = mine["mean"] - task["results"]["base"]["scores"][name]["mean"]
            assert mine["difference"]["mean"] == pytest.approx(gap)
    again = suite_of(tmp_path / "a", base, bell)
    assert (again.missing(), again.numbers()) == (0, suite.numbers())
    double = loaded("piqa")
    double["piqa"].records.extend(double["piqa"].records)
    for longest, count in ((1000, 10), (0, 40)):  # without noise: once for all seeds and repeats
        one = Stub(longest_exact=longest)
        assert Suite({"one": one}, double, 0, (0, 1), tmp_path / "c").missing() == count
    monkeypatch.setattr(work_file, "CHUNK", 3)
    other = suite_of(tmp_path / "b", noisy("base"), noisy("bell"), tasks=TASKS[::-1])
    other.do()
    assert other.numbers()["tasks"][::-1] == suite.numbers()["tasks"]


@pytest.mark.parametrize(
    ("option", "more"),
    [("seeds", (0, 1, 2)), ("limit", 5), ("tasks", ("lambada", "piqa", "infilling"))],
)
def test_more_work_does_only_what_is_new(tmp_path, option, more):
    small = {"tasks": ("piqa", "infilling"), "limit": 3, "seeds": (0, 1)}
    before, after, whole = noisy(), noisy(), noisy()
    suite_of(tmp_path / "grown", before, **small).do()
    grown = suite_of(tmp_path / "grown", after, **{**small, option: more})
    grown.do()
    once = suite_of(tmp_path / "once", whole, **{**small, option: more})
    once.do()
    assert before.asked
    assert after.asked
    assert sorted(map(repr, before.asked + after.asked)) == sorted(map(repr, whole.asked))
    assert grown.numbers() == once.numbers()


@pytest.mark.parametrize("place", [0, 40, 150])
def test_stopped_work_goes_on(tmp_path, monkeypatch, place):
    monkeypatch.setattr(work_file, "CHUNK", 7)
    whole = suite_of(tmp_path / "whole", noisy())
    whole.do()

    def stop():
        if progress.done >= place:
            raise KeyboardInterrupt

    progress = Counted(stop)

    stopped = suite_of(tmp_path / "stopped", noisy())
    total = stopped.missing()
    with pytest.raises(KeyboardInterrupt):
        stopped.do(progress)
    for path in (tmp_path / "stopped").glob("*"):  # as a kill leaves it
        path.write_bytes(path.read_bytes() + b'{"key": "half of a li')
    second = noisy()
    resumed = suite_of(tmp_path / "stopped", second)
    left = resumed.missing()
    assert place - 7 <= total - left <= place + 7
    resumed.do()
    assert len(second.asked) == left
    assert resumed.numbers() == whole.numbers()


@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_a_damaged_model_is_told(tmp_path, value):
    with pytest.raises(UserError, match=r"piqa, question .* damaged"):
        suite_of(tmp_path, Stub(lambda *_: value), tasks=("piqa",)).do()
    assert not list(tmp_path.iterdir())


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
    one, eos = RunContestant(run), run.tokenizer.eos_id
    assert (one.prompts, one.has_eos, one.own_length) == ("tuned", True, 11)
    rules = ExampleRules(64, round_to=1, bos_first=True)
    for prompt in ("Question: 2 + 2?\nAnswer:", "say it "):
        for answer in ("four", "ça va"):
            example = Example((Message("user", prompt), Message("assistant", answer)), has_turns)
            written = make_template(template, run.tokenizer, chat)
            row = encode_example(example, run.tokenizer, written, rules)
            (ask,) = one.asks(prompt, f" {answer}", 7)
            assert (*ask.given, *ask.target) == tuple(row.ids[: row.length].tolist())
            assert (len(ask.given), ask.target[-1], ask.noise) == (row.start, eos, 7)
    (ask,) = RunContestant(run, prompts="plain").asks("a cat ", "sat", 0)
    assert (ask.given, ask.target) == ((run.tokenizer.bos_id, *ids("a cat")), ids(" sat"))
    (ask,) = RunContestant(run, ending="none").asks("a cat", " sat", 0)
    assert ask.target[-1] != eos


def test_a_plain_run_is_asked_as_by_hand(small_config, tmp_path):
    """Sums over windows, of masks that the question's number and the seed decide."""
    run, estimator = random_run(small_config(*EXACT)), Estimator(draws=2, longest_exact=3)
    (ask,) = RunContestant(run, ending="eos").asks("a cat", " sat", 0)
    assert ask.target == (*ids(" sat"), run.tokenizer.eos_id)
    one, scorer = RunContestant(run, estimator, batch_tokens=64), Scorer(run, estimator)
    assert (one.prompts, one.has_eos, one.own_length) == ("plain", False, None)
    found = measure(one, tmp_path, "piqa", "winogrande", seeds=(5, 6))
    for task in same_items(loaded("piqa", "winogrande"), ["plain"], 0)["plain"]:
        for place, item in enumerate(task.items):
            noise = stream_key(0, "question", task.name, item.number) % (1 << 62)
            pairs = list(zip(item.contexts, item.continuations, strict=True))
            asks = [scorer.asks(*pair, noise=noise) for pair in pairs]
            tokens = [sum(len(ask.target) for ask in windows) for windows in asks]
            ways = {"raw": [1, 1], "per_token": tokens}
            ways["per_byte"] = [len(text.strip()) for text in item.continuations]
            for number, seed in enumerate((5, 6)):
                sums = [sum(s.log_probability for s in scorer.score(w, seed=seed)) for w in asks]
                for how, by in ways.items():
                    is_right = int(np.argmax(np.array(sums) / np.array(by))) == item.gold
                    assert found[task.name].value_SB[how][number, place] == 100 * is_right


@pytest.mark.parametrize("kind", ["mdm", "arm", "aoarm"])
def test_texts_depend_on_row_seed_and_sample_alone(small_config, kind):
    run = random_run(small_config(*EXACT, "--framework", kind))
    gaps = [("the cat", 3), ("a", 5), ("the dog", 4), ("the dog", 4), ("the dog", 4)]
    rows = [torch.tensor([*ids(text), *[run.tokenizer.mask_id] * gap]) for text, gap in gaps]
    many, few = RunContestant(run), RunContestant(run, batch_tokens=16)
    assert (many.about()["framework"], many.sees_behind) == (kind, kind != "arm")
    samples, hot = [1 << 39, 3, 12, 13, 12], {"seed": 1, "temperature": 1.0}
    made = many.write(rows, samples, **hot)
    assert [len(one) for one in made] == [gap for _, gap in gaps]
    assert made[2] == made[4] != made[3]
    assert few.write(rows[::-1], samples[::-1], **hot)[::-1] == made
    assert many.write(rows[1:2], samples[1:2], **hot) == made[1:2]
    assert many.write(rows, samples, seed=2, temperature=1.0) != made
    cold = [many.write(rows, samples, seed=seed, temperature=0.0) for seed in (1, 2)]
    assert (cold[0] == cold[1]) or kind == "aoarm", "whose order is drawn"


def test_a_fingerprint_changes_when_answers_may(small_config):
    def mark(*options, seed=0, **more):
        return RunContestant(random_run(small_config(*options), seed=seed), **more).fingerprint

    base = mark()
    assert mark(batch_tokens=64) == base
    others = {mark(seed=1), mark(estimator=Estimator(draws=4)), mark("--framework", "arm")}
    others |= {mark("--model.num-heads", "4"), mark("--train.precision", "bfloat16")}
    assert len(others | {base}) == 6


# --- contestants that know nothing ------------------------------------------------------------


def test_a_unigram_is_counted_by_hand(zoo, monkeypatch):
    run = load_run(zoo / "bell")
    train, valid = run.blocks()
    counts = Counter()
    for row, length in zip(np.asarray(train.tokens), np.asarray(train.lengths), strict=True):
        counts.update(row[:length].tolist())
    unigram, total = unigram_of(run), sum(counts.values()) + 259
    (ask,) = unigram.asks("the red ", "moon", 0)
    wanted = sum(math.log((counts[token] + 1) / total) for token in ids(" moon"))
    assert unigram.score([ask], 3) == [Score(pytest.approx(wanted, rel=1e-12), 0.0, 5, 0, True)]
    row = torch.tensor([*ids("the"), *[259] * 4000])
    one, two = unigram.write([row, row], [1, 2], seed=0, temperature=1.0)
    assert one != two, "a sample has its own noise"
    assert unigram.write([row], [2], seed=0, temperature=1.0) == [two]
    assert unigram.write([row], [2], seed=1, temperature=1.0) != [two]
    share = np.bincount(one, minlength=259) / 4000
    assert np.abs(share - np.exp(unigram.log_p_V)).max() < 5 * math.sqrt(0.25 / 4000)
    monkeypatch.setattr("bellmask.evaluate.paper_suite.REFERENCE_BLOCKS", 3)
    rows = train.spread(3).rows(slice(0, 3)).flatten().tolist()
    wanted = [math.log((rows.count(token) + 1) / (len(rows) + 259)) for token in range(259)]
    assert unigram_of(run).log_p_V.tolist() == pytest.approx(wanted), "a sample of a long text"
    monkeypatch.setattr(type(run), "blocks", lambda self: (valid, train))
    with pytest.raises(UserError, match="has changed"):
        unigram_of(run)


def test_guessing_is_even(zoo):
    guesser = guesser_for(load_run(zoo / "bell"))
    (made,) = guesser.write([torch.tensor([259] * 5180)], [0], seed=0, temperature=1.0)
    count = np.bincount(made, minlength=259)
    assert ((count - 20) ** 2 / 20).sum() < 259 + 5 * math.sqrt(2 * 259), "chi-squared"
