"""Answers: prompts as in training, results that depend on the question and its number alone."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import product

import pytest
import torch
from counted_progress import Counted
from example_tools import encode_example
from hub_tools import install_hub
from sampling_tools import SAMPLINGS
from tuned_runs import tuned

import bellmask.generate.fill
from bellmask.data.chat_templates import Example, Message, Template
from bellmask.data.examples import ExampleRules
from bellmask.data.prepare import describe_blocks, load_inputs
from bellmask.data.tokenizers import ByteTokenizer
from bellmask.generate.answers import ANSWER_STEPS, Answerer, Question
from bellmask.generate.chat import ChatOptions, Talk
from bellmask.generate.fill import Filled
from bellmask.generate.settings import Sampling
from bellmask.run import load_run
from bellmask.utils.errors import UserError

BYTES = ByteTokenizer()
PROMPTS = ["Say a:", "Please say something that is longer:", "Say b c:", "x" * 40, "Say a:"]
QUESTIONS = [Question.plain(prompt) for prompt in PROMPTS]


@pytest.fixture(scope="module")
def run(zoo, tmp_path_factory):
    folder = tuned(zoo / "bell", tmp_path_factory.mktemp("answers") / "run", block_length=80)
    run = load_run(folder)
    noise = torch.Generator().manual_seed(0)
    with torch.no_grad():  # after a few steps all positions are alike, and rounding would choose
        for parameter in run.model.parameters():
            parameter.normal_(std=1.0, generator=noise)
    return run


@pytest.fixture
def answerer(run):
    return Answerer(run)


def test_progress_is_told_of_every_step(answerer):
    told = []

    class Noted(Counted):
        def advance(self, count=1, note=""):
            super().advance(count)
            told.append((self.done, note))

    how = {"length": 8, "sampling": Sampling(steps=4), "batch_size": 2}
    answerer.answer([QUESTIONS[0]] * 3, **how, progress=Noted())
    steps = [f"step {number} of 4" for number in (1, 2, 3, 4)]
    assert told == list(zip([0, 1, 1, 2, 2, 2, 2, 3], 2 * steps, strict=True))


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_an_answer_does_not_depend_on_what_else_is_asked(answerer, sampling):
    """Alone, in batches of any size, watched or not: the same."""
    options = {"sampling": sampling, "seed": 3, "length": 8}
    expected = [answer.ids for answer in answerer.answer(QUESTIONS, **options)]
    assert len(set(expected)) == len(QUESTIONS), "also the same prompt twice: other numbers"
    for more in ({"batch_size": 1}, {"batch_size": 3}, {"on_step": lambda step: None}):
        again = answerer.answer(QUESTIONS, **options, **more)
        assert [answer.ids for answer in again] == expected
    (alone,) = answerer.answer(QUESTIONS[3:4], samples=[3], **options)
    assert alone.ids == expected[3]


def test_padding_changes_nothing(answerer, monkeypatch):
    """Where no noise is drawn, which is another one in rows of another width."""
    likeliest, found = Sampling(rule="most_confident", steps=6, temperature=0.0), []
    for width in (1, 32, 80):
        monkeypatch.setattr(bellmask.generate.fill, "WIDTH", width)
        answers = answerer.answer(QUESTIONS, length=12, sampling=likeliest)
        found.append([answer.ids for answer in answers])
    assert found[0] == found[1] == found[2]
    assert len(set(found[0])) == len(set(PROMPTS))


def test_a_canvas_begins_as_the_training_row(run):
    turns = {"system": "Be brief.", "user": " Hi ", "assistant": "Yes?"}
    said = (*(Message(role, text) for role, text in turns.items()), Message("user", "Say a:"))
    templates, both = ("auto", "plain", "chat"), (said, said[-1:])
    for template, is_conversation, messages in product(templates, (False, True), both):
        rules = ExampleRules(run.config.data.block_length, 8, template)
        config = replace(run.config, sft=replace(run.config.sft, template=template))
        example = Example((*messages, Message("assistant", "a a")), is_conversation)
        row = encode_example(example, BYTES, Template(template), rules)
        answerer, length = Answerer(replace(run, config=config)), row.length - row.start
        asked, is_cut = answerer.row(Question(messages, is_conversation), length)
        assert asked.tolist() == [*row.ids[: row.start].tolist(), *[BYTES.mask_id] * length]
        assert not is_cut


def test_a_long_prompt_loses_its_oldest_tokens(answerer):
    text = "".join(chr(ord("a") + n % 26) for n in range(100))
    row, _ = answerer.row(Question.plain(text), 10)
    assert row[:70].tolist() == [*f"{text}\nAnswer:"[-70:].encode()]
    assert len(row) == 80
    answers = answerer.answer([Question.plain(text), Question.plain("a")], length=10)
    assert [answer.is_cut for answer in answers] == [True, False]
    for length in (0, 80):
        with pytest.raises(UserError, match="1 to 79 tokens"):
            answerer.row(Question.plain("a"), length)


def test_a_response_ends_at_its_first_end(answerer, monkeypatch):
    end = BYTES.eos_id
    made = [[32, 97, 98, end, 99, end], [end, 97], [97, 10, 98]]
    filled = [Filled(ids, 1.0) for ids in made]
    monkeypatch.setattr("bellmask.generate.answers.fill_rows", lambda *_, **__: filled)
    found = answerer.answer(QUESTIONS[:3])
    assert [(one.text, one.num_tokens, list(one.ids)) for one in found] == [
        ("ab", 3, made[0]), ("", 0, made[1]), ("a\nb", 3, made[2])
    ]  # fmt: skip


def test_watchers_see_questions_in_order_without_padding(answerer):
    def watched(questions):
        steps = []
        answerer.answer(questions, length=12, on_step=steps.append)
        return [step for step in steps if step.number == step.num_steps == ANSWER_STEPS]

    last = watched(QUESTIONS)
    assert [step.first_sample for step in last] == list(range(5))
    for step, prompt in zip(last, PROMPTS, strict=True):
        (row,) = step.ids_BL.tolist()
        assert row[:-12] == [*f"{prompt}\nAnswer:".encode()]
    shapes = [tuple(step.ids_BL.shape) for step in watched([*QUESTIONS[:1] * 3, QUESTIONS[2]])]
    assert shapes == [(3, 26), (1, 28)], "prompts of one length in a batch"


@pytest.mark.parametrize("name", ["arm", "aoarm"])
def test_causal_runs_continue_one_at_a_time(name, zoo):
    run = load_run(zoo / name)
    answerer, questions = Answerer(run), [Question.plain(text) for text in ("ab", "abc", "ab")]
    row, _ = answerer.row(questions[1], 6)
    assert row.tolist() == [*b"abc", *[BYTES.mask_id] * 6], "nothing is added"
    expected = answerer.answer(questions, length=6, seed=1)
    assert answerer.answer(questions[1:2], length=6, samples=[1], seed=1) == expected[1:2]
    assert run.answer(["ab", "abc", "ab"], length=6, seed=1) == [one.text for one in expected]
    with pytest.raises(UserError, match="steps"):
        answerer.answer(questions, length=6, sampling=Sampling(steps=4))
    assert run.answer("ab", length=6, seed=1) == expected[0].text


# --- conversations -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("template", "talks", "is_known"),
    [
        ("auto", 3, False),
        ("auto", 9, True),
        ("plain", 8, False),
        ("chat", 0, True),
        ("vicuna", 0, True),
    ],
)
def test_a_run_remembers_whether_roles_were_marked(
    monkeypatch, small_config, template, talks, is_known
):
    """Whatever the first example is, and wherever it comes from; and how long responses are."""
    talk = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    install_hub(monkeypatch, [*[{"prompt": "a", "response": "b"}] * (12 - talks), *[talk] * talks])
    options = f"--sft.train hub:owner/set-{talks} --sft.round-to 8 --data.block-length 48"
    config = small_config(*options.split(), "--sft.template", template)
    data = load_inputs(config, BYTES)
    about = describe_blocks(config, data)
    assert (about["has_turns"], about["response_tokens"]) == (is_known, 8)


@pytest.mark.parametrize(
    ("has_turns", "turns", "remembers"),
    [(True, "all", True), (True, "first", False), (False, "all", False)],
)
def test_only_runs_trained_on_later_turns_remember(zoo, tmp_path, has_turns, turns, remembers):
    folder = tuned(zoo / "bell", tmp_path / "run", has_turns)
    config = json.loads((folder / "config.json").read_text())
    config["sft"]["turns"] = turns
    (folder / "config.json").write_text(json.dumps(config))
    tuned_run = Answerer(load_run(folder))
    assert Talk(tuned_run, ChatOptions(run="")).has_memory == remembers
    marked, _ = tuned_run.row(Question((Message("user", "a"),), is_conversation=True))
    assert torch.equal(tuned_run.row(Question.plain("a"))[0], marked) == has_turns


def test_a_talk_remembers_what_was_said_where_it_should(answerer):
    talk = Talk(answerer, ChatOptions(run="", memory="on", length=8, system="Be brief."))
    first = talk.ask("a")
    talk.ask("b")
    question = talk.question("c", talk.said)
    roles = "system user assistant user assistant user".split()
    assert [message.role for message in question.messages] == roles
    assert [m.text for m in question.messages][:4] == ["Be brief.", "a", first.text, "b"]
    assert question.is_conversation
    talk.retry()
    assert [one.text for one in talk.said[::2]] == ["a", "b"], "in place of the first answer"

    def stop(step):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        talk.ask("c", stop)
    assert [one.text for one in talk.said[::2]] == ["a", "b"], "a stopped answer is none"
    talk.retry()
    assert [one.text for one in talk.said[::2]] == ["a", "b", "c"]
    talk.reset()
    assert talk.question("c", talk.said).messages[-2].role == "system"
    with pytest.raises(UserError, match="there is no prompt yet"):
        talk.retry()
    alone = Talk(answerer, ChatOptions(run="", length=8, seed=5))
    said = [alone.ask("a"), alone.ask("a"), alone.retry()]
    batch = answerer.answer([Question.plain("a")] * 3, length=8, seed=5)
    ids = [answer.ids for answer in batch]
    assert [answer.ids for answer in said] == ids, "the n-th answer is sample n of the seed"
    assert len(set(ids)) == 3
    assert alone.question("b", alone.said) == Question.plain("b")
    assert alone.sampling.steps == 64
