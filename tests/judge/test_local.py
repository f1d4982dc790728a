"""The likelihood judge against a slow reference: one forward pass per token, by transformers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from pretrained_tools import save_lm

from bellmask.assemble import train_run
from bellmask.config import RunConfig
from bellmask.data.wheels import cache_folder
from bellmask.errors import UserError
from bellmask.evaluate.load_scorer import load_scorer
from bellmask.evaluate.scorers import TextScore
from bellmask.judge.benchmarks import Task
from bellmask.judge.local import LikelihoodJudge, request_text, whole_text
from bellmask.judge.verdicts import Outcome, Pair
from bellmask.smollm2 import SMOLLM2

TEXT = "Question: why does the cat sit on the mat\nAnswer: the cat saw an old dog run. " * 5
TURNS = ("why does the cat sit", "and the dog")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """GPT-2's architecture with random weights and a context of 64."""
    return save_lm(tmp_path_factory.mktemp("lm"), "gpt2", TEXT, bos_token="<|begin|>")


@pytest.fixture(scope="module")
def judge(folder: Path) -> LikelihoodJudge:
    return LikelihoodJudge(load_scorer(str(folder), device="cpu"))


def pair_of(a: str, b: str, *earlier: tuple[str, str], turns: Sequence[str] = TURNS) -> Pair:
    answers = [*earlier, (a, b)]
    task = Task("0", tuple(turns), "all", None, 0)
    said_a, said_b = zip(*answers, strict=True)
    return Pair(task, len(earlier), said_a, said_b)


def slow_log_likelihood(folder: Path, before: str, answer: str) -> tuple[float, int]:
    """Sum over the answer's tokens of log p(token | all before it), each from its own pass."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    given = [tokenizer.bos_token_id, *tokenizer(before, add_special_tokens=False).input_ids]
    said = tokenizer(answer, add_special_tokens=False).input_ids
    total = 0.0
    with torch.no_grad():
        for place, token in enumerate(said):
            row = torch.tensor([given + said[:place]])
            total += float(model(row).logits[0, -1].double().log_softmax(0)[token])
    return total, len(said)


def test_an_answers_likelihood_is_that_of_its_tokens_after_the_request(
    judge: LikelihoodJudge, folder: Path
) -> None:
    answers = ("the old dog.", "(no) Cats sit!")
    pair = pair_of(*answers)
    found = judge.judge([pair])[0]
    before = "Question: why does the cat sit\nAnswer:"
    for score, answer in zip((found.a, found.b), answers, strict=True):
        total, count = slow_log_likelihood(folder, before, " " + answer)
        assert score.log_likelihood == pytest.approx(total, abs=1e-3)
        assert score.num_tokens == count
        assert score.is_exact
        assert not score.is_cut
    expected = "win" if found.a.per_token > found.b.per_token else "loss"
    assert found.outcome.result == expected


def test_the_request_decides_too(judge: LikelihoodJudge) -> None:
    pairs = [pair_of("the mat", "a dog"), pair_of("the mat", "a dog", turns=["who ran", ""])]
    one, two = judge.judge(pairs)
    assert one.a.log_likelihood != pytest.approx(two.a.log_likelihood, abs=1e-3)


def test_a_later_turn_follows_what_was_said_before(judge: LikelihoodJudge, folder: Path) -> None:
    pair = pair_of("it ran", "it sat", ("the mat ", "a dog"))
    before = (
        "Question: why does the cat sit\nAnswer: the mat\n\nQuestion: and the dog\nAnswer:",
        "Question: why does the cat sit\nAnswer: a dog\n\nQuestion: and the dog\nAnswer:",
    )
    assert request_text(pair, pair.answers_a) == before[0]
    assert whole_text(pair, pair.answers_b) == before[1] + " it sat"
    found = judge.judge([pair])[0]
    total, _ = slow_log_likelihood(folder, before[1], " it sat")
    assert found.b.log_likelihood == pytest.approx(total, abs=1e-3)


def test_verdicts_do_not_depend_on_the_batch_and_mirror_when_swapped(folder: Path) -> None:
    judge = LikelihoodJudge(load_scorer(str(folder), device="cpu"))
    words = ["the cat", "a dog saw it", "run", "old mat on the old mat", "dog dog"]
    pairs = [pair_of(a, b) for a in words for b in words]
    whole = judge.judge(pairs, batch_size=50)
    single = judge.judge(pairs, batch_size=1)
    swapped = judge.judge([pair_of(pair.answers_b[0], pair.answers_a[0]) for pair in pairs])
    mirror = {"win": "loss", "loss": "win", "tie": "tie"}
    for one, two, three in zip(whole, single, swapped, strict=True):
        assert one.outcome == two.outcome
        assert mirror[three.outcome.result] == one.outcome.result
    assert [one.outcome.result for one in whole].count("tie") == len(words)


class Counting:
    """A scorer that knows how likely it finds what, and what it was asked."""

    name, fingerprint, context, rule = "counting", "f", 100, ""

    def __init__(self, nll_per_word: dict[str, float]) -> None:
        self.prices = nll_per_word
        self.asked: list[str] = []

    def score(
        self,
        samples: Sequence[Sequence[str]],
        *,
        batch_size: int = 8,
        on_batch: Callable[[int], None] | None = None,
    ) -> list[TextScore]:
        self.asked += [sample[0] for sample in samples]
        found = []
        for sample in samples:
            words = sample[0].split()
            kept = words[: self.context]
            nll = sum(self.prices.get(word, 1.0) for word in kept)
            ids = [len(word) for word in kept]
            found.append(TextScore(nll, len(kept), ids, len(kept) < len(words)))
        if on_batch:
            on_batch(len(samples))
        return found


def test_per_token_and_raw_can_disagree() -> None:
    """Two tokens of 2 nats against five of 1: likelier per token, less likely as a whole."""
    scorer = Counting({"x": 2.0})
    pair = pair_of("x x", "y y y y y")
    assert LikelihoodJudge(scorer).judge([pair])[0].outcome == Outcome("loss", 0.0)
    assert LikelihoodJudge(scorer, "raw").judge([pair])[0].outcome == Outcome("win", 1.0)
    assert LikelihoodJudge(scorer, "raw").fingerprint != LikelihoodJudge(scorer).fingerprint
    with pytest.raises(UserError, match="unknown measure of likelihood 'total'"):
        LikelihoodJudge(scorer, "total")  # type: ignore[arg-type]


@pytest.mark.parametrize("measure", ["per-token", "raw"])
def test_an_empty_answer_loses_and_two_are_a_tie(measure: Any) -> None:
    judge = LikelihoodJudge(Counting({}), measure)
    pairs = [pair_of("", "x"), pair_of("x", " \n"), pair_of("", " "), pair_of("", "")]
    results = [found.outcome.result for found in judge.judge(pairs)]
    assert results == ["loss", "win", "tie", "tie"]


def test_equal_likelihoods_are_a_tie() -> None:
    found = LikelihoodJudge(Counting({"x": 1.0 + 1e-7})).judge([pair_of("x", "y")])
    assert found[0].outcome == Outcome("tie", 0.5)
    ten = pair_of("x " * 10, "y " * 10)  # sums of ten are ten times less exact
    found = LikelihoodJudge(Counting({"x": 1.0 + 5e-6}), "raw").judge([ten])
    assert found[0].outcome == Outcome("tie", 0.5)
    found = LikelihoodJudge(Counting({"x": 1.001})).judge([pair_of("x", "y")])
    assert found[0].outcome == Outcome("loss", 0.0)


def test_a_request_that_fills_the_context_cannot_be_judged() -> None:
    scorer = Counting({})
    scorer.context = 12  # the request has 7 words
    long = pair_of("x", "y", turns=["w " * 20])
    cut, fits, none = LikelihoodJudge(scorer).judge(
        [pair_of("x " * 9, "y"), pair_of("x", "y z"), long]
    )
    assert (cut.a.num_tokens, cut.a.is_cut, cut.b.is_cut) == (5, True, False)
    assert not fits.a.is_cut
    assert none.outcome == Outcome("unreadable", None)


def test_requests_whose_tokens_change_are_marked() -> None:
    scorer = Counting({})
    found = LikelihoodJudge(scorer).judge([pair_of("x", "y")])[0]
    assert found.a.is_exact

    class Merging(Counting):
        def score(self, samples: Any, **more: Any) -> list[TextScore]:
            found = super().score(samples, **more)
            return [TextScore(s.nll, s.num_tokens, [*s.ids[:-2], 0], s.is_cut) for s in found]

    assert not LikelihoodJudge(Merging({})).judge([pair_of("x", "y")])[0].a.is_exact


def test_nothing_is_scored_twice_and_progress_is_told() -> None:
    scorer, told = Counting({}), []
    pairs = [pair_of("x", "y"), pair_of("y", "x"), pair_of("x", "")]
    LikelihoodJudge(scorer).judge(pairs, on_batch=told.append)
    assert len(scorer.asked) == len(set(scorer.asked)) == 3
    assert told == [3]


def test_the_label_says_what_it_is(judge: LikelihoodJudge, folder: Path) -> None:
    assert judge.label == f"likelihood of {folder.name}, not a judgement of quality"


def test_an_arm_run_judges_too(small_config: Callable[..., RunConfig], tmp_path: Path) -> None:
    """Word salad it was trained on against letters it has never seen in that order."""
    options = "--framework arm --train.steps 30 --data.block-length 64".split()
    train_run(small_config(*options), tmp_path / "run", is_quiet=True)
    judge = LikelihoodJudge(load_scorer(str(tmp_path / "run"), device="cpu"))
    found = judge.judge([pair_of("the cat sat on the mat.", "xq zzkj wvv qqpx jjq zx.")])[0]
    assert found.outcome.result == "win"
    assert found.a.is_exact


@pytest.mark.long
def test_smollm2_prefers_sense_to_nonsense() -> None:
    if not SMOLLM2.path(cache_folder()).exists():
        pytest.skip("the wheel of SmolLM2 is not here")
    pytest.importorskip("gguf")
    judge = LikelihoodJudge(load_scorer("smollm2", device="cpu"))
    questions = ["What is the capital of France?", "How many legs does a spider have?"]
    answers = [("The capital is Paris.", "The capital is Bread."), ("Eight.", "Purple.")]
    pairs = [pair_of(*both, turns=[asked]) for asked, both in zip(questions, answers)]
    found = judge.judge(pairs)
    assert [one.outcome.result for one in found] == ["win", "win"]
    assert all(one.a.is_exact and one.b.is_exact for one in found)
    assert judge.label.startswith("likelihood of smollm2, not")


def test_errors_call_the_option_as_the_user_did(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="without network give --judge local:smollm2 "):
        load_scorer(str(tmp_path / "empty"), option="--judge local:NAME")
    with pytest.raises(UserError, match=r"there is no folder .*none for --judge local:NAME"):
        load_scorer(str(tmp_path / "none"), option="--judge local:NAME")
