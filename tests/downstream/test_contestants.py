"""A run in a suite: how it is asked, what its answers depend on, what names it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from continuation_tools import EXACT, ids, random_run

from bellmask.config import RunConfig
from bellmask.data.example_rows import ExampleRules, encode_example
from bellmask.data.messages import Example, Message
from bellmask.data.templates import make_template
from bellmask.downstream.contestants import RunContestant
from bellmask.downstream.continuations import ContinuationScorer
from bellmask.downstream.masks import Estimator
from bellmask.errors import UserError
from bellmask.run import Run
from bellmask.runfolder import Backbone

Config = Callable[..., RunConfig]
CHAT = "{% for m in messages %}<{{ m.role }}> {{ m.content }}\n{% endfor %}<assistant>{{ '\\n' }}"


@pytest.fixture
def tuned(small_config: Config, tmp_path: Path) -> Callable[..., Run]:
    """A run that says it was fine-tuned, with any template."""

    def build(template: str = "auto", *, has_turns: bool = False, chat: str | None = None) -> Run:
        config = small_config(*EXACT)
        sft = replace(config.sft, train="toy:reverse", template=template)  # type: ignore[arg-type]
        data = replace(config.data, block_length=64)
        about = {"has_turns": has_turns, "response_tokens": 11}
        (tmp_path / "run.json").write_text(json.dumps(about), encoding="utf-8")
        run = random_run(replace(config, sft=sft, data=data), "gpt2")
        return replace(run, folder=tmp_path, backbone=Backbone({}, chat))

    return build


@pytest.mark.parametrize(
    ("template", "has_turns", "chat"),
    [
        ("auto", False, None),
        ("plain", True, CHAT),
        ("chat", False, None),
        ("chat", False, CHAT),
        ("auto", True, CHAT),
        ("auto", False, CHAT),
    ],
)
@pytest.mark.parametrize("prompt", ["Question: 2 + 2?\nAnswer:", "say it "])
def test_tuned_prompts_are_rows_of_fine_tuning(
    tuned: Callable[..., Run], template: str, has_turns: bool, chat: str | None, prompt: str
) -> None:
    run = tuned(template, has_turns=has_turns, chat=chat)
    one = RunContestant(run)
    assert (one.prompts, one.has_eos, one.own_length) == ("tuned", True, 11)
    for answer in ("four", "ça va"):
        example = Example((Message("user", prompt), Message("assistant", answer)), has_turns)
        written = make_template(template, run.tokenizer, chat)  # type: ignore[arg-type]
        rules = ExampleRules(64, round_to=1, bos_first=run.model.first_maskable > 0)
        row = encode_example(example, run.tokenizer, written, rules)
        assert row is not None
        (ask,) = one.asks(prompt, f" {answer}", 7)
        assert (*ask.given, *ask.target) == tuple(row.ids[: row.length].tolist())
        assert len(ask.given) == row.start
        assert ask.target[-1] == run.tokenizer.eos_id
        assert (ask.noise, ask.after) == (7, ())
        before, target = one.pair(prompt, f" {answer}")
        assert (one.begin(before, 64), target) == (ask.given, ask.target[:-1])


def test_plain_prompts_are_cut_as_lm_eval_does(small_config: Config) -> None:
    run = random_run(small_config(*EXACT))
    one = RunContestant(run)
    assert (one.prompts, one.has_eos, one.own_length) == ("plain", False, None)
    (ask,) = one.asks("the cat ", "sat", 3)
    assert (ask.given, ask.target, ask.noise) == (ids("the cat"), ids(" sat"), 3)
    assert [ask] == ContinuationScorer(run).asks("the cat ", "sat", noise=3)
    assert one.begin(ids("the cat"), 3) == ids("cat")


def test_options_say_how_it_is_asked(small_config: Config, tuned: Callable[..., Run]) -> None:
    plain = random_run(small_config(*EXACT))
    end = plain.tokenizer.eos_id
    (ask,) = RunContestant(plain, ending="eos").asks("a cat", " sat", 0)
    assert ask.target == (*ids(" sat"), end)
    (ask,) = RunContestant(plain, prompts="tuned").asks("Answer:", " sat", 0)
    assert (ask.given, ask.target) == (ids("Answer:"), (*ids(" sat"), end))
    (ask,) = RunContestant(tuned("chat"), prompts="plain").asks("a cat", " sat", 0)
    assert (ask.given[1:], ask.target) == (ids("a cat"), ids(" sat"))
    assert ask.given[0] == plain.tokenizer.bos_id, "of a causal LM"
    (ask,) = RunContestant(tuned("chat"), ending="none").asks("a cat", " sat", 0)
    assert ask.target == ids(" sat")
    with pytest.raises(UserError, match="has no tokens"):
        RunContestant(plain, ending="eos").asks("a cat", "", 0)


def test_long_choices_are_cut_into_windows(small_config: Config) -> None:
    run = random_run(small_config(*EXACT))
    asks = RunContestant(run, ending="eos").asks("abc", " " + "x" * 20, 0)
    assert len(asks) == 3
    assert all(ask.length <= 16 for ask in asks)
    target = tuple(token for ask in asks for token in ask.target)
    assert target == (*ids(" " + "x" * 20), run.tokenizer.eos_id)


def test_scores_are_those_of_the_scorer(small_config: Config) -> None:
    run = random_run(small_config(*EXACT))
    estimator = Estimator(draws=4, longest_exact=3)
    one, scorer = RunContestant(run, estimator, batch_tokens=64), ContinuationScorer(run, estimator)
    asks = one.asks("a cat", " sa", 1) + one.asks("a cat", " sat on", 1)
    assert [one.is_exact(ask) for ask in asks] == [True, False]
    for found, wanted in zip(one.score(asks, 5), scorer.score(asks, seed=5), strict=True):
        assert found.log_probability == pytest.approx(wanted.log_probability, abs=1e-4)


def test_a_name_changes_when_answers_may(small_config: Config) -> None:
    config = small_config(*EXACT)
    base = RunContestant(random_run(config)).fingerprint
    assert RunContestant(random_run(config), batch_tokens=64).fingerprint == base
    others = [
        RunContestant(random_run(config, seed=1)),
        RunContestant(random_run(config), Estimator(draws=4)),
        RunContestant(random_run(small_config(*EXACT, "--framework", "arm"))),
        RunContestant(random_run(small_config(*EXACT, "--model.num-heads", "4"))),
        RunContestant(random_run(small_config("--train.precision", "bfloat16"))),
    ]
    assert len({base, *(one.fingerprint for one in others)}) == 6


@pytest.mark.parametrize("kind", ["mdm", "arm", "aoarm"])
def test_texts_depend_on_row_seed_and_sample_alone(small_config: Config, kind: str) -> None:
    run = random_run(small_config(*EXACT, "--framework", kind))
    mask = run.tokenizer.mask_id
    rows = [torch.tensor([*ids(text), *[mask] * gap]) for text, gap in _GAPS]
    samples = [1 << 39, 3, 12, 13, 12]
    many, few = RunContestant(run), RunContestant(run, batch_tokens=16)
    told: list[int] = []
    made = many.write(rows, samples, seed=1, temperature=1.0, on_batch=told.append)
    assert told[-1] == len(rows)
    assert [len(one) for one in made] == [gap for _, gap in _GAPS]
    assert made[2] == made[4] != made[3]
    assert few.write(rows, samples, seed=1, temperature=1.0) == made
    for row, sample, wanted in zip(rows, samples, made, strict=True):
        assert many.write([row], [sample], seed=1, temperature=1.0) == [wanted]
    assert many.write(rows, samples, seed=2, temperature=1.0) != made
    cold = [many.write(rows, samples, seed=seed, temperature=0.0) for seed in (1, 2)]
    assert (cold[0] == cold[1]) or kind == "aoarm", "whose order is drawn"


_GAPS = [("the cat", 3), ("a", 5), ("the dog", 4), ("the dog", 4), ("the dog", 4)]


def test_the_surest_token_is_written_first(small_config: Config) -> None:
    """At temperature 0, by hand: fill the place whose best token is most likely, ask again."""
    run = random_run(small_config(*EXACT))
    texts = ("the cat", "a dog sat", "moon", "red sun and")
    rows = [torch.tensor([*ids(text), *[run.tokenizer.mask_id] * 5]) for text in texts]
    made = RunContestant(run).write(rows, range(4), seed=0, temperature=0.0)
    in_order = []
    for row, found in zip(rows, made, strict=True):
        places, picked = list(range(len(row) - 5, len(row))), []
        while places:
            with torch.no_grad():
                log_p = run.model(row[None], torch.tensor(places)).double().log_softmax(1)
            number = int(log_p.max(1).values.argmax())
            picked.append(places.pop(number))
            row[picked[-1]] = int(log_p[number].argmax())
        assert found == row[-5:].tolist()
        in_order.append(picked == sorted(picked))
    assert not all(in_order)


def test_who_sees_behind_a_gap(small_config: Config) -> None:
    sees = {}
    for kind in ("mdm", "arm", "aoarm"):
        one = RunContestant(random_run(small_config(*EXACT, "--framework", kind)))
        assert one.about()["framework"] == kind
        sees[kind] = one.sees_behind
    assert sees == {"mdm": True, "arm": False, "aoarm": True}
    with pytest.raises(UserError, match="sigma-ARM"):
        RunContestant(random_run(small_config(*EXACT, "--framework", "sigma_arm")))
