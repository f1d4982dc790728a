"""Answers: prompts as in training, results that depend on the question and its number alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hub_tools import install_hub
from sampling_tools import SAMPLINGS

from bellmask.answers import DEFAULT_STEPS, Answerer, Question
from bellmask.assemble import train_run
from bellmask.config import RunConfig
from bellmask.data.example_rows import ExampleRules, encode_example
from bellmask.data.messages import Example, Message
from bellmask.data.templates import Template
from bellmask.data.tokenizer import ByteTokenizer
from bellmask.errors import UserError
from bellmask.generate.settings import Sampling
from bellmask.generate.steps import Step
from bellmask.run import Run, load_run
from bellmask.talk import Talk

BYTES = ByteTokenizer()
PROMPTS = ["Say a:", "Please say something that is longer:", "Say b c:", "x" * 40, "Say a:"]
QUESTIONS = [Question.plain(prompt) for prompt in PROMPTS]


def write_examples(path: Path, count: int = 64) -> Path:
    pairs = [{"prompt": f"Say {n}:", "response": f"{n} {n}"} for n in range(count)]
    path.write_text("\n".join(map(json.dumps, pairs)))
    return path


@pytest.fixture(scope="module")
def run(small_config: Callable[..., RunConfig], tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("answers")
    file = write_examples(folder / "examples.jsonl")
    options = ["--sft.train", str(file), "--sft.round-to", "8", "--data.block-length", "80"]
    train_run(small_config(*options), folder / "run", is_quiet=True)
    run = load_run(folder / "run")
    noise = torch.Generator().manual_seed(0)
    with torch.no_grad():  # after a few steps all positions are alike, and rounding would choose
        for parameter in run.model.parameters():
            parameter.normal_(std=0.4, generator=noise)
    return run


@pytest.fixture
def answerer(run: Run) -> Answerer:
    return Answerer(run)


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_an_answer_does_not_depend_on_what_else_is_asked(
    answerer: Answerer, sampling: Sampling
) -> None:
    """Alone, in batches of any size, watched or not: the same."""
    options: dict[str, Any] = {"sampling": sampling, "seed": 3, "length": 8}
    together = answerer.answer(QUESTIONS, **options)
    expected = [answer.ids for answer in together]
    assert len(set(expected)) == len(QUESTIONS), "also the same prompt twice: other numbers"
    for size in (1, 3):
        again = answerer.answer(QUESTIONS, batch_size=size, **options)
        assert [answer.ids for answer in again] == expected
    watched = answerer.answer(QUESTIONS, on_step=lambda step: None, **options)
    assert [answer.ids for answer in watched] == expected
    for number, question in enumerate(QUESTIONS):
        (alone,) = answerer.answer([question], first_sample=number, **options)
        assert alone.ids == expected[number]


def test_padding_changes_nothing(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits of a padded canvas are those of the canvas by itself."""
    import bellmask.filling as module

    seen: list[torch.Tensor] = []

    def spy(model: Any, x_BL: torch.Tensor, *args: Any, is_real_BL: Any, **more: Any) -> None:
        from bellmask.generate.network import Network

        is_masked = x_BL == BYTES.mask_id
        network = Network(model, BYTES.mask_id, is_real_BL=is_real_BL)
        seen.append(network.logits(x_BL, is_masked, torch.full((len(x_BL),), 0.7)))
        raise StopIteration

    monkeypatch.setattr(module, "fill", spy)
    answerer = Answerer(run)
    for width in (1, 32, 80):
        monkeypatch.setattr(module, "WIDTH", width)
        with pytest.raises(StopIteration):
            answerer.answer(QUESTIONS[:1], length=12)
    exact, padded, wide = seen
    assert exact.shape == (12, BYTES.num_tokens)
    torch.testing.assert_close(padded, exact, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(wide, exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("template", ["auto", "plain", "chat"])
@pytest.mark.parametrize("is_conversation", [False, True])
def test_a_canvas_begins_as_the_training_row(
    run: Run, template: Any, is_conversation: bool
) -> None:
    said = (
        Message("system", "Be brief."),
        Message("user", " Hi "),
        Message("assistant", "Yes?"),
        Message("user", "Say a:"),
    )
    rules = ExampleRules(run.config.data.block_length, 8, template)
    config = replace(run.config, sft=replace(run.config.sft, template=template))
    answerer = Answerer(replace(run, config=config))
    for messages in (said, said[-1:]):
        example = Example((*messages, Message("assistant", "a a")), is_conversation)
        row = encode_example(example, BYTES, Template(template), rules)
        assert row is not None
        canvas, is_cut = answerer.canvas(
            Question(messages, is_conversation), row.length - row.start
        )
        assert not is_cut
        assert canvas.ids_L[: row.start].tolist() == row.ids[: row.start].tolist()
        assert (canvas.ids_L[row.start :] == BYTES.mask_id).all()
        assert len(canvas) == row.length


def test_a_long_prompt_loses_its_oldest_tokens(answerer: Answerer) -> None:
    text = "".join(chr(ord("a") + n % 26) for n in range(100))
    canvas, is_cut = answerer.canvas(Question.plain(text), 10)
    assert is_cut
    assert canvas.ids_L[:70].tolist() == [*f"{text}\nAnswer:"[-70:].encode()]
    assert len(canvas) == 80
    answers = answerer.answer([Question.plain(text), Question.plain("a")], length=10)
    assert [answer.is_cut for answer in answers] == [True, False]
    for length in (0, 80, -1):
        with pytest.raises(UserError, match="1 to 79 tokens"):
            answerer.canvas(Question.plain("a"), length)


def test_a_response_ends_at_its_first_end(answerer: Answerer) -> None:
    end = BYTES.eos_id
    found = answerer._answer([32, 97, 98, end, 99, end], 1.0, False)
    assert (found.text, found.num_tokens, len(found.ids)) == ("ab", 3, 6)
    assert answerer._answer([end, 97], 1.0, False).text == ""
    found = answerer._answer([97, 10, 98], 1.0, False)
    assert (found.text, found.num_tokens) == ("a\nb", 3)


def test_seeds_and_defaults(answerer: Answerer) -> None:
    assert answerer.length == 8, "0.9 of the examples needed 8: 'n n', EOS, rounded up"
    one, same, other = (answerer.answer(QUESTIONS[:1], seed=seed)[0] for seed in (0, 0, 1))
    assert one == same
    assert one.ids != other.ids
    assert len(one.ids) == 8
    steps: list[Step] = []
    answerer.answer(QUESTIONS[:1], on_step=steps.append)
    assert steps[-1].num_steps == DEFAULT_STEPS == 64
    assert answerer.sampling(Sampling(rule="first_hitting")).steps is None


def test_watchers_see_questions_in_order_without_padding(answerer: Answerer) -> None:
    steps: list[Step] = []

    def keep(step: Step) -> None:
        if step.number == 0:
            steps.append(replace(step, ids_BL=step.ids_BL.clone()))

    answerer.answer(QUESTIONS, length=12, on_step=keep)
    assert [step.first_sample for step in steps] == list(range(5))
    for step, prompt in zip(steps, PROMPTS, strict=True):
        assert step.ids_BL.tolist() == [[*f"{prompt}\nAnswer:".encode(), *[BYTES.mask_id] * 12]]
    steps.clear()
    answerer.answer(QUESTIONS[:1] * 3, length=12, on_step=steps.append)
    assert {tuple(step.ids_BL.shape) for step in steps} == {(3, 26)}, "one prompt, one batch"
    steps.clear()
    answerer.answer(QUESTIONS[0::2][:2], length=12, on_step=steps.append)
    assert {tuple(step.ids_BL.shape) for step in steps} == {(1, 26), (1, 28)}, "of one width"


def test_odd_texts_are_answered(answerer: Answerer) -> None:
    for text in ("\ud800x", "\x00\x1b[31m", "é日\u202e", " "):
        assert len(answerer.answer([Question.plain(text)])[0].ids) == 8


@pytest.mark.parametrize("name", ["arm", "aoarm"])
def test_causal_runs_continue_one_at_a_time(
    name: str, small_config: Callable[..., RunConfig], tmp_path: Path
) -> None:
    from bellmask.presets import preset

    config = small_config("--train.steps", "2", start=preset(f"tiny_{name}"))
    train_run(config, tmp_path / "run", is_quiet=True)
    answerer = Answerer(load_run(tmp_path / "run"))
    assert not answerer.is_tuned
    questions = [Question.plain(text) for text in ("ab", "abc", "ab")]
    canvas, _ = answerer.canvas(questions[1], 6)
    assert canvas.ids_L.tolist() == [*b"abc", *[BYTES.mask_id] * 6], "nothing is added"
    expected = answerer.answer(questions, length=6)
    for number, question in enumerate(questions):
        assert answerer.answer([question], length=6, first_sample=number) == [expected[number]]
    with pytest.raises(UserError, match="for masked models only"):
        answerer.answer(questions, length=6, sampling=Sampling(steps=4))


# --- conversations -----------------------------------------------------------------------------


TALK = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
PAIR = {"prompt": "a", "response": "b"}


@pytest.mark.parametrize(
    ("template", "talks", "pairs", "is_known"),
    [
        ("auto", 8, 0, True),
        ("auto", 0, 8, False),
        ("auto", 3, 9, False),
        ("auto", 9, 3, True),
        ("plain", 8, 0, False),
        ("chat", 0, 8, True),
    ],
)
def test_a_run_remembers_whether_roles_were_marked(
    monkeypatch: pytest.MonkeyPatch,
    small_config: Callable[..., RunConfig],
    tmp_path: Path,
    template: str,
    talks: int,
    pairs: int,
    is_known: bool,
) -> None:
    """Whatever the first example is, and wherever it comes from."""
    install_hub(monkeypatch, [*[PAIR] * pairs, *[TALK] * talks])
    options = f"--sft.train hub:owner/set-{talks}-{pairs} --sft.round-to 8 --data.block-length 48"
    options += f" --sft.template {template} --train.steps 1"
    train_run(small_config(*options.split()), tmp_path / "run", is_quiet=True)
    assert Answerer(load_run(tmp_path / "run")).knows_turns is is_known
    about = json.loads((tmp_path / "run" / "run.json").read_text())
    del about["has_turns"]
    (tmp_path / "run" / "run.json").write_text(json.dumps(about))
    assert Answerer(load_run(tmp_path / "run")).knows_turns is False


def test_a_talk_remembers_what_was_said_where_it_should(answerer: Answerer) -> None:
    talk = Talk(answerer, has_memory=True, length=8, sampling=Sampling(), system="Be brief.")
    first = talk.ask("a")
    talk.ask("b")
    question = talk.question("c", talk.turns)
    assert [message.role for message in question.messages] == [
        "system", "user", "assistant", "user", "assistant", "user",
    ]  # fmt: skip
    assert [m.text for m in question.messages][:4] == ["Be brief.", "a", first.text, "b"]
    assert question.is_conversation
    talk.retry()
    assert [turn.asked for turn in talk.turns] == ["a", "b"], "in place of the first answer"
    talk.reset()
    assert talk.question("c", talk.turns).messages[-2].role == "system"
    with pytest.raises(UserError, match="nothing has been asked"):
        talk.retry()
    alone = Talk(answerer, has_memory=False, length=8, sampling=Sampling())
    alone.ask("a")
    assert alone.question("b", alone.turns) == Question.plain("b")


def test_a_talk_draws_every_answer_anew_and_the_same_from_the_same_seed(answerer: Answerer) -> None:
    def said(seed: int) -> list[tuple[int, ...]]:
        talk = Talk(answerer, has_memory=False, length=12, sampling=Sampling(), seed=seed)
        return [talk.ask("a").ids, talk.ask("a").ids, talk.retry().ids]

    assert said(5) == said(5)
    assert len({*said(5), *said(6)}) == 6
    (batch,) = (answerer.answer([Question.plain("a")] * 2, length=12, seed=5),)
    assert [answer.ids for answer in batch] == said(5)[:2], "generate gives the same"


def test_a_stopped_answer_is_not_remembered(answerer: Answerer) -> None:
    def stop(step: Step) -> None:
        raise KeyboardInterrupt

    talk = Talk(answerer, has_memory=True, length=8, sampling=Sampling())
    talk.ask("a")
    with pytest.raises(KeyboardInterrupt):
        talk.ask("b", stop)
    assert [turn.asked for turn in talk.turns] == ["a"]
    talk.retry()
    assert [turn.asked for turn in talk.turns] == ["a", "b"]


def test_settings_of_a_talk_are_checked_and_a_bad_one_changes_nothing(answerer: Answerer) -> None:
    talk = Talk(answerer, has_memory=False, length=8, sampling=Sampling())
    assert talk.sampling.steps == 64
    talk.set_sampling(steps=4)
    for bad in ({"steps": 0}, {"temperature": -1.0}, {"temperature": float("nan")}):
        with pytest.raises(UserError):
            talk.set_sampling(**bad)
    with pytest.raises(UserError, match="79"):
        talk.set_length(80)
    assert (talk.sampling, talk.length) == (Sampling(steps=4), 8)
