"""Scorers against a slow reference that asks for one token at a time, and published numbers."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bellmask.assemble import train_run
from bellmask.config import RunConfig
from bellmask.data.wheels import cache_folder
from bellmask.errors import UserError
from bellmask.evaluate.load_scorer import load_scorer
from bellmask.evaluate.scorers import ArmRun, is_counted, join_documents
from bellmask.run import Run, load_run
from bellmask.smollm2 import SMOLLM2

SHARED = Path(os.environ.get("BELLMASK_TEST_DATA", Path(__file__).parents[3] / "shared" / "data"))
STORIES = SHARED / "stories260K"
TEXTS = [
    "Once upon a time, there was a little girl named Lily.",
    "She saw a dog.",
    "The sun was bright, and the cat ran under the tree to play with its ball all day.",
]
needs_stories = pytest.mark.skipif(not STORIES.exists(), reason="the small story model is not here")


@pytest.fixture(scope="module")
def stories() -> Any:
    if not STORIES.exists():
        pytest.skip("the small story model is not here")
    return load_scorer(str(STORIES), device="cpu")


def token_nll(ids: Sequence[int]) -> list[float]:
    """-log p of each token but the first, each from a forward pass over its own prefix alone."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(str(STORIES), dtype=torch.float32).eval()
    found = []
    with torch.no_grad():
        for n in range(1, len(ids)):
            logits = model(torch.tensor([list(ids[:n])])).logits[0, -1].double()
            found.append(float(torch.logsumexp(logits, 0) - logits[ids[n]]))
    return found


def encode(text: str) -> list[int]:
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(STORIES / "tokenizer.json")).encode(text).ids


def test_a_text_is_scored_token_by_token_from_bos(stories: Any) -> None:
    scores = stories.score([[text] for text in TEXTS])
    for text, score in zip(TEXTS, scores):
        ids = encode(text)
        expected = token_nll([1, *ids])
        assert score.ids == ids
        assert score.num_tokens == len(ids)
        assert score.nll == pytest.approx(math.fsum(expected), rel=1e-5)
        assert not score.is_cut


def test_published_value_on_its_own_kind_of_text(stories: Any) -> None:
    """1.408 nats per token on the first 100 stories, with BOS, cut at 512."""
    path = SHARED / "tinystories" / "tinystories.sample.txt"
    texts = [story.strip() for story in path.read_text().split("<|endoftext|>")][:100]
    scores = stories.score([[text] for text in texts], batch_size=16)
    total, count = sum(s.nll for s in scores), sum(s.num_tokens for s in scores)
    assert total / count == pytest.approx(1.408, abs=0.002)


@pytest.mark.parametrize("batch_size", [1, 2, 8])
def test_batches_do_not_matter(stories: Any, batch_size: int) -> None:
    samples = [[text] for text in [*TEXTS, "", TEXTS[0] * 3, "a", TEXTS[1]]]
    alone = [stories.score([sample])[0] for sample in samples]
    told: list[int] = []
    together = stories.score(samples, batch_size=batch_size, on_batch=told.append)
    assert [s.ids for s in together] == [s.ids for s in alone]
    assert [s.num_tokens for s in together] == [s.num_tokens for s in alone]
    np.testing.assert_allclose([s.nll for s in together], [s.nll for s in alone], rtol=1e-5)
    assert told == sorted(told)
    assert told[-1] == len(samples)


def test_of_the_eos_between_documents_the_first_counts(stories: Any) -> None:
    documents = ["Lily saw a dog.", "The cat ran.", "He was sad."]
    parts = [encode(text) for text in documents]
    row = [1, *parts[0], 2, *parts[1], 2, *parts[2]]
    nll = token_nll(row)
    second = 1 + len(parts[0]) + 1 + len(parts[1])
    assert row[second] == 2
    (score,) = stories.score([documents])
    assert score.num_tokens == len(row) - 2, "neither BOS nor the second EOS"
    assert score.nll == pytest.approx(math.fsum(nll) - nll[second - 1], rel=1e-5)
    assert score.ids == [*parts[0], *parts[1], *parts[2]]


def test_which_tokens_count() -> None:
    assert is_counted([9, 1, 2, 3], eos=7).tolist() == [False, True, True, True]
    assert is_counted([9, 1, 7, 3, 7, 7], eos=7).tolist() == [False, True, True, True, False, False]
    # BOS is the same sign: it is the first EOS, as in the public codes
    assert is_counted([7, 1, 7, 3], eos=7).tolist() == [False, True, False, True]
    assert is_counted([1, 7, 3], eos=None).tolist() == [False, True, True]
    assert is_counted([7, 1, 7], eos=7, num_given=0).tolist() == [True, True, False]
    assert join_documents([[1, 2], [], [3]], 7) == [1, 2, 7, 7, 3]
    assert join_documents([[1, 2], [3]], None) == [1, 2, 3]


def test_without_bos_the_first_token_is_not_counted(tmp_path: Path) -> None:
    if not STORIES.exists():
        pytest.skip("the small story model is not here")
    folder = tmp_path / "no-bos"
    shutil.copytree(STORIES, folder)
    options = json.loads((folder / "tokenizer_config.json").read_text())
    del options["bos_token"]
    (folder / "tokenizer_config.json").write_text(json.dumps(options))
    scorer = load_scorer(str(folder), device="cpu")
    (score,) = scorer.score([[TEXTS[1]]])
    ids = encode(TEXTS[1])
    assert score.num_tokens == len(ids) - 1
    assert score.nll == pytest.approx(math.fsum(token_nll(ids)), rel=1e-5)
    assert score.ids == ids
    assert "not scored" in scorer.rule
    assert scorer.name == "no-bos"


@needs_stories
def test_beyond_the_context_a_text_is_cut() -> None:
    scorer = load_scorer(str(STORIES), device="cpu", context=10)
    long, short = scorer.score([[TEXTS[2]], ["The cat"]])
    ids = encode(TEXTS[2])[:9]
    assert long.is_cut
    assert long.ids == ids
    assert long.nll == pytest.approx(math.fsum(token_nll([1, *ids])), rel=1e-5)
    assert not short.is_cut
    assert load_scorer(str(STORIES), device="cpu", context=4096).context == 512, "its own limit"


def test_texts_too_short_do_not_count_and_signs_are_text(stories: Any) -> None:
    scores = stories.score([[""], ["", ""], []])
    assert [(s.nll, s.num_tokens) for s in scores] == [(0.0, 0)] * 3
    (one,) = stories.score([["."]])
    assert one.num_tokens == (len(one.ids) if len(one.ids) >= 2 else 0)
    (spelt,) = stories.score([["a</s>b"]])
    assert 2 not in spelt.ids
    assert len(spelt.ids) >= 5
    assert stories.score([]) == []


@pytest.fixture(scope="module", params=[False, True], ids=["plain rows", "wrapped rows"])
def arm_run(
    request: pytest.FixtureRequest,
    small_config: Callable[..., RunConfig],
    tmp_path_factory: pytest.TempPathFactory,
) -> Run:
    folder = tmp_path_factory.mktemp("runs") / "arm"
    options = ["--framework", "arm", "--data.wrap", str(request.param), "--optim.lr", "0.02"]
    train_run(small_config(*options), folder, is_quiet=True)
    return load_run(folder, device="cpu")


def arm_nll(run: Run, ids: list[int]) -> list[float]:
    """-log p of each token, each from a pass over its own prefix; slot 0 is the begin sign."""
    found = []
    with torch.no_grad():
        for n, token in enumerate(ids):
            x = torch.tensor([[run.tokenizer.mask_id, *ids[:n]]])
            logits = run.model(
                x,
                torch.tensor([n]),
                positions=torch.arange(n + 1)[None],
                target_positions=torch.arange(1, n + 2)[None],
            )[0].double()
            found.append(float(torch.logsumexp(logits, 0) - logits[token]))
    return found


def test_an_arm_scores_pieces_of_its_block_from_the_begin_sign(arm_run: Run) -> None:
    texts = ["the cat sat", "the old dog ran under the new tree and saw a red sun.", "a", ""]
    begin = [arm_run.tokenizer.bos_id] if arm_run.is_wrapped else []
    size = 16 - len(begin)
    scorer = ArmRun(arm_run, context=1024)
    for batch_size in (1, 4):
        scores = scorer.score([[text] for text in texts], batch_size=batch_size)
        for text, score in zip(texts[:2], scores):
            ids = list(text.encode())
            expected = [
                nll
                for start in range(0, len(ids), size)
                for nll in arm_nll(arm_run, begin + ids[start : start + size])[len(begin) :]
            ]
            assert score.num_tokens == len(ids) == len(expected)
            assert score.nll == pytest.approx(math.fsum(expected), rel=1e-5)
        assert [s.num_tokens for s in scores[2:]] == [0, 0]
    assert scorer.context == 16


def test_an_arm_counts_the_first_eos_only(arm_run: Run) -> None:
    begin = [arm_run.tokenizer.bos_id] if arm_run.is_wrapped else []
    eos = arm_run.tokenizer.eos_id
    row = [*begin, *b"cat", eos, *b"dog", eos, *b"sun"]
    nll = arm_nll(arm_run, row)
    (score,) = ArmRun(arm_run, context=1024).score([["cat", "dog", "sun"]])
    assert score.num_tokens == 10
    assert score.nll == pytest.approx(math.fsum(nll[len(begin) :]) - nll[len(begin) + 7], rel=1e-5)


def test_the_arms_own_likelihood_agrees(arm_run: Run) -> None:
    """Another road to the same number, where rows have no frame."""
    if arm_run.is_wrapped:
        pytest.skip("a text alone has no frame")
    text = "the moon was old and then the cat ran."
    (score,) = ArmRun(arm_run, context=1024).score([[text]])
    assert score.nll == pytest.approx(arm_run.nll([text])[0].nll, rel=1e-6)


def test_an_arm_is_found_by_its_folder_and_others_are_refused(
    arm_run: Run, small_config: Callable[..., RunConfig], tmp_path: Path
) -> None:
    assert isinstance(load_scorer(str(arm_run.folder)), ArmRun)
    train_run(small_config("--train.steps", "1"), tmp_path / "mdm", is_quiet=True)
    with pytest.raises(UserError, match="is a mdm run; a scorer must be an ARM"):
        load_scorer(str(tmp_path / "mdm"))


def test_what_cannot_be_loaded_is_said_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"cannot load scorer .* give --scorer smollm2") as caught:
        load_scorer(str(tmp_path / "empty"))
    assert "\n" not in str(caught.value)
    with pytest.raises(UserError, match="there is no folder"):
        load_scorer(str(tmp_path / "none"))
    with pytest.raises(UserError, match="--context must be at least 2"):
        load_scorer("gpt2-large", context=1)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install 'bellmask\[gguf\]'"):
        load_scorer("smollm2", cache=str(tmp_path))
    assert not list(tmp_path.rglob("*.whl"))


@pytest.mark.long
def test_smollm2_by_wheel_finds_plain_english_likely() -> None:
    """2.248 nats per token: transformers alone, on the packed file, with <|endoftext|> in front."""
    stories = SHARED / "tinystories" / "tinystories.sample.txt"
    if not SMOLLM2.path(cache_folder()).exists() or not stories.exists():
        pytest.skip("the wheel of SmolLM2 or the stories are not here")
    pytest.importorskip("gguf")
    scorer = load_scorer("smollm2", device="cpu")
    english = stories.read_text(encoding="utf-8").split("<|endoftext|>")[1].strip()
    words = english.split()
    plain, mixed = scorer.score([[english], [" ".join(words[::2] + words[1::2])]])
    assert plain.num_tokens == 175
    assert plain.nll / plain.num_tokens == pytest.approx(2.2482, abs=0.001)
    assert mixed.nll > 1.5 * plain.nll


@pytest.fixture(scope="module")
def small_gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """GPT-2's architecture and signs (BOS is EOS) with random weights and letters as tokens."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

    letters = ["<|endoftext|>", "?", *"abcdefgh "]
    inner = Tokenizer(models.WordLevel({c: i for i, c in enumerate(letters)}, unk_token="?"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    sign = "<|endoftext|>"
    folder = tmp_path_factory.mktemp("gpt2") / "small-gpt2"
    PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token=sign, eos_token=sign, unk_token="?"
    ).save_pretrained(folder)
    torch.manual_seed(3)
    config = GPT2Config(
        vocab_size=11, n_positions=24, n_embd=8, n_layer=2, n_head=2, initializer_range=0.8
    )
    GPT2LMHeadModel(config).save_pretrained(folder)
    return folder


def test_gpt2_counts_as_the_public_codes_do(small_gpt2: Path) -> None:
    """The given BOS is the first EOS, so no later one counts; positions end at 24."""
    from transformers import GPT2LMHeadModel

    model = GPT2LMHeadModel.from_pretrained(small_gpt2).eval()
    scorer = load_scorer(str(small_gpt2), device="cpu")
    assert scorer.context == 24
    samples = [["abba cab", "dad", "a"], ["hgfedcba" * 4], ["ha"]]
    row = [0, *(2 + "abcdefgh ".index(c) for c in "abba cab"), 0, 5, 2, 5, 0, 2]
    expected = 0.0
    with torch.no_grad():
        for n in range(1, len(row)):
            if row[n] != 0:
                logits = model(torch.tensor([row[:n]])).logits[0, -1].double()
                expected += float(torch.logsumexp(logits, 0) - logits[row[n]])
    first, long, short = scorer.score(samples, batch_size=3)
    assert first.num_tokens == 12
    assert first.nll == pytest.approx(expected, rel=1e-5)
    assert (long.num_tokens, long.is_cut) == (23, True)
    assert (short.num_tokens, short.is_cut) == (2, False)
