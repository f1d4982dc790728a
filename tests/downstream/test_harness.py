"""A run as a model of lm-eval: against sums over all masks, and against lm-eval's own HFLM."""

from __future__ import annotations

import json
import math
import random
import typing
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bellmask.downstream.harness_options import RequestOptions, parse_arguments
from bellmask.downstream.masks import KINDS, Estimator
from bellmask.downstream.overlays import write_overlays
from bellmask.errors import UserError
from bellmask.generate.settings import Sampling
from bellmask.run import Run
from bellmask.transformers_library import quiet

pytest.importorskip("lm_eval")

from harness_tools import ask
from lm_eval.api.instance import Instance
from lm_eval.api.registry import get_model

from bellmask.downstream.harness import BellmaskLM, evaluate_tasks, noise_number

pytestmark = pytest.mark.usefixtures("short_report")
PAIRS = [
    ("the cat", " s"),
    ("the cat", " on"),
    ("the cat ", "ran"),
    ("", "the"),
    ("a dog saw the old red sun and the moon", " an"),
]


def hflm(lm: Path, add_bos_token: bool) -> Any:
    from lm_eval.models.huggingface import HFLM

    with quiet():
        return HFLM(pretrained=str(lm), device="cpu", dtype="float32", add_bos_token=add_bos_token)


def scored(pairs: list[tuple[str, str]]) -> list[Instance]:
    return [ask("loglikelihood", pair, doc) for doc, pair in enumerate(pairs)]


# --- log-probabilities -----------------------------------------------------------------------


def bound_by_all_masks(run: Run, given: list[int], target: list[int]) -> float:
    """- sum over n of the mean over all masks of n tokens of their mean cross-entropy."""
    total = 0.0
    for count in range(1, len(target) + 1):
        values = []
        for hidden in combinations(range(len(target)), count):
            row = given + target
            places = [len(given) + place for place in hidden]
            for place in places:
                row[place] = run.tokenizer.mask_id
            with torch.no_grad():
                logits = run.model(torch.tensor([row]), torch.tensor(places)).double()
            log_p = logits.log_softmax(-1)
            mine = [float(log_p[n, target[place]]) for n, place in enumerate(hidden)]
            values.append(math.fsum(mine) / count)
        total += math.fsum(values) / len(values)
    return total


def test_short_continuations_are_the_sum_over_all_masks(masked: Run) -> None:
    found = BellmaskLM(run=masked).loglikelihood(scored(PAIRS))
    encode = masked.tokenizer.encode
    for (context, continuation), (value, _) in zip(PAIRS, found, strict=True):
        kept = context.rstrip()
        given, whole = encode(kept).tolist(), encode(context + continuation).tolist()
        target = whole[len(given) :]
        given = given[max(0, len(whole) - 16) :]  # the block has 16 tokens
        assert value == pytest.approx(bound_by_all_masks(masked, given, target), abs=1e-5)


def test_a_causal_lm_scores_as_in_lm_eval(lm: Path, arm: Run) -> None:
    theirs, ours = hflm(lm, add_bos_token=True), BellmaskLM(run=arm)
    draw = random.Random(1)
    words = "the a cat dog sat ran on under mat tree and then saw".split()
    sizes = [(draw.randint(1, 8), count) for count in (1, 1, 2, 3, 5)]
    texts = [[" ".join(draw.choices(words, k=size)) for size in pair] for pair in sizes]
    pairs = [(context, f" {continuation}") for context, continuation in texts]
    pairs += [("the cat ", "sat"), ("", "the dog"), ("x\n", "\ny")]
    # what it writes itself, so that is_greedy is True somewhere
    written = ours.generate_until([ask("generate_until", ("the cat", {"max_gen_toks": 2}))])
    pairs += [("the cat", written[0]), ("the cat", written[0] + " mat")]
    expected = theirs.loglikelihood(scored(pairs), disable_tqdm=True)
    found = ours.loglikelihood(scored(pairs))
    assert [is_it for _, is_it in found] == [is_it for _, is_it in expected]
    assert {is_it for _, is_it in found} == {True, False}
    assert [v for v, _ in found] == pytest.approx([v for v, _ in expected], rel=1e-5)
    summary = ours.noise_summary()["t"]
    assert summary["exact_share"] == 1
    assert summary["median_error"] is None
    assert summary["requests"] == summary["passes"] == len(pairs)


def test_whole_texts_score_as_in_lm_eval(lm: Path, arm: Run) -> None:
    """Texts that fit into a block; windows of longer ones are cut otherwise, on purpose."""
    theirs, ours = hflm(lm, add_bos_token=False), BellmaskLM(run=arm)
    texts = ["the cat sat on the mat.", "a", "then the old dog ran under the new tree."]
    requests = [ask("loglikelihood_rolling", (t,), doc) for doc, t in enumerate(texts)]
    expected = theirs.loglikelihood_rolling(requests, disable_tqdm=True)
    assert ours.loglikelihood_rolling(requests) == pytest.approx(expected, rel=1e-5)


def test_an_empty_text_has_probability_one(masked: Run) -> None:
    assert BellmaskLM(run=masked).loglikelihood_rolling([ask("r", ("",))]) == [0.0]


def write_salad(folder: Path) -> Path:
    """Documents of PIQA and LAMBADA in words the models know."""
    draw = random.Random(5)
    words = "the a cat dog sat ran on under mat tree and then saw old new red".split()

    def some(count: int) -> str:
        return " ".join(draw.choices(words, k=count))

    piqa = [
        {"goal": some(4), "sol1": some(n % 3 + 1), "sol2": some(n % 2 + 1), "label": n % 2}
        for n in range(12)
    ]
    lambada = [{"text": some(8)} for _ in range(8)]
    for name, records in (("piqa", piqa), ("lambada", lambada)):
        text = "\n".join(json.dumps(record) for record in records)
        (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")
    return folder


def test_whole_tasks_as_with_lm_evals_own_model(lm: Path, arm: Run, tmp_path: Path) -> None:
    names = write_overlays(tmp_path / "o", write_salad(tmp_path), tmp_path, ["piqa", "lambada"])
    where: dict[str, Any] = {"include": tmp_path / "o", "bootstraps": 50}
    theirs = evaluate_tasks(hflm(lm, add_bos_token=True), names, **where)
    found = evaluate_tasks(BellmaskLM(run=arm), names, **where)
    assert list(found["results"]) == ["piqa", "lambada_openai"]
    for task, expected in theirs["results"].items():
        numbers = {name: value for name, value in expected.items() if isinstance(value, float)}
        assert len(numbers) == 4, "two metrics with their errors"
        for name, value in numbers.items():
            assert found["results"][task][name] == pytest.approx(value, rel=1e-4), name
    assert 0 < found["results"]["piqa"]["acc,none"] < 1


def test_windows_of_a_long_continuation_are_one(
    masked: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = BellmaskLM(run=masked, draws=4)
    requests = scored([("the cat", " sat on the old red mat"), ("the cat", " s")])
    asks = [model.scorer.asks(*r.args, noise=noise_number(r)) for r in requests]
    assert [len(own) for own in asks] == [3, 1]
    sums = [sum(s.log_probability for s in model.scorer.score(own)) for own in asks]
    monkeypatch.setattr(model.scorer, "is_greedy", lambda *_, **__: [True, False, True, True])
    found = model.loglikelihood(requests)
    assert [value for value, _ in found] == pytest.approx(sums, abs=1e-5)
    assert [is_it for _, is_it in found] == [False, True]


# --- noise -----------------------------------------------------------------------------------

LONG = [" sat on the", " ran under", " and then saw", " the old red"]


def long_requests() -> list[Instance]:
    """Four choices of four documents: all drawn, none exact."""
    return [
        ask("loglikelihood", ("a cat", choice), doc, idx)
        for doc in range(4)
        for idx, choice in enumerate(LONG)
    ]


def test_scores_depend_on_neither_order_nor_batch_nor_global_seeds(masked: Run) -> None:
    requests = long_requests()
    model = BellmaskLM(run=masked, draws=3)
    expected = model.loglikelihood(requests)
    assert model.noise_summary()["t"]["exact_share"] == 0
    assert model.noise_summary()["t"]["median_error"] > 0
    place = list(range(len(requests)))
    random.Random(2).shuffle(place)
    torch.manual_seed(1)
    np.random.seed(1)  # noqa: NPY002
    random.seed(1)
    small = BellmaskLM(run=masked, draws=3, batch_tokens=20)
    shuffled = small.loglikelihood([requests[n] for n in place])
    for n, (value, is_it) in zip(place, shuffled, strict=True):
        assert (value, is_it) == (pytest.approx(expected[n][0], abs=1e-5), expected[n][1])
    other = BellmaskLM(run=masked, draws=3, seed=1).loglikelihood(requests)
    assert all(abs(a[0] - b[0]) > 1e-4 for a, b in zip(other, expected, strict=True))


def test_choices_of_a_document_share_their_noise(masked: Run) -> None:
    twice = [ask("loglikelihood", ("a cat", LONG[0]), doc, idx) for doc in (0, 1) for idx in (0, 1)]
    twice.append(ask("loglikelihood", ("a cat", LONG[0]), 0, task="another"))
    (a, _), (b, _), (c, _), (d, _), (e, _) = BellmaskLM(run=masked, draws=2).loglikelihood(twice)
    assert (a, c) == (b, d), "the same choice twice in a document"
    assert len({a, c, e}) == 3, "documents and tasks draw apart"
    # choices of one length get the same masks, unless they are told not to
    pair = [ask("loglikelihood", ("a cat", text), 0, n) for n, text in enumerate(LONG[1:3])]
    common, apart = (
        BellmaskLM(run=masked, draws=2, common=is_common).loglikelihood(pair)
        for is_common in (True, False)
    )
    assert common != apart
    unnamed = [ask("loglikelihood", ("a cat", LONG[0]), None) for _ in range(2)]
    first, second = BellmaskLM(run=masked, draws=2).loglikelihood(unnamed)
    assert first == second


# --- arguments -------------------------------------------------------------------------------


def test_by_name_and_arguments_as_lm_eval_does(masked: Run, tmp_path: Path) -> None:
    given = {"device": "cuda:0", "batch_size": 1, "max_batch_size": None}
    kind = get_model("bellmask")
    text = f"run={masked.folder},draws=4,checkpoint=30,common=False,estimator=strata"
    model = kind.create_from_arg_string(text, given)
    assert isinstance(model, BellmaskLM)
    assert model.run.folder == masked.folder
    assert model.device.type in ("cpu", "cuda")
    assert model.scorer.estimator == Estimator("strata", 4, is_common=False)
    assert get_model("hf").__name__ == "HFLM", "the other models are still there"
    for wrong, message in [
        ("drws=4", "did you mean 'draws'"),
        ("draws=many", "draws"),
        ("draws=0", "at least 1"),
        ("estimator=extract", "exact"),
        ("checkpoint=7", "7"),
        ("gap=0", "gap"),
        ("rule=first_hitting,steps=3", "no steps"),
    ]:
        with pytest.raises(UserError, match=message):
            kind.create_from_arg_string(f"run={masked.folder},{wrong}", given)
    with pytest.raises(UserError, match="run=FOLDER"):
        kind.create_from_arg_string("draws=4", given)
    with pytest.raises(UserError, match="--apply_chat_template"):
        model.apply_chat_template([{"role": "user", "content": "hello"}])


def test_options_are_those_of_the_parts_they_speak_to() -> None:
    kinds = typing.get_type_hints(RequestOptions)
    assert typing.get_args(kinds["estimator"]) == KINDS
    assert kinds["rule"] == typing.get_type_hints(Sampling)["rule"]
    options, estimator = parse_arguments({"steps": None}), Estimator()
    assert options == RequestOptions()
    assert (options.estimator, options.draws) == (estimator.kind, estimator.draws)
    assert (options.longest_exact, options.common) == (estimator.longest_exact, True)
