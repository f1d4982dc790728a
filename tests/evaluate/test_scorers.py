"""Scorers against a slow reference that asks for one token at a time, and published numbers."""

from __future__ import annotations

import json
import math
import os
import shutil
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from counted_progress import Counted

from bellmask import load
from bellmask.data.readers import cache_folder
from bellmask.evaluate.scorers import ArmRun, is_counted, join_documents, load_scorer
from bellmask.model.causal_lm import SMOLLM2
from bellmask.utils.errors import UserError

SHARED = Path(os.environ.get("BELLMASK_TEST_DATA", Path(__file__).parents[3] / "shared" / "data"))
STORIES = SHARED / "stories260K"
TEXTS = [
    "Once upon a time, there was a little girl named Lily.",
    "She saw a dog.",
    "The sun was bright, and the cat ran under the tree to play with its ball all day.",
]


def surprise(logits_V, token):
    return float(torch.logsumexp(logits_V.double(), 0) - logits_V[token].double())


@torch.no_grad()
def token_nll(model, ids):
    """-log p of each token but the first, each from a forward pass over its own prefix alone."""
    return [
        surprise(model(torch.tensor([ids[:n]])).logits[0, -1], ids[n]) for n in range(1, len(ids))
    ]


# a published model of stories


@pytest.fixture(scope="module")
def stories():
    if not STORIES.exists():
        pytest.skip("the small story model is not here")
    return load_scorer(str(STORIES), device="cpu")


@cache
def story_model():
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(str(STORIES), dtype=torch.float32).eval()


def encode(text):
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(STORIES / "tokenizer.json")).encode(text).ids


def expect(score, row, ids, num_tokens, is_cut=False):
    """The sum over a row of which the first token is given."""
    assert score.nll == pytest.approx(math.fsum(token_nll(story_model(), row)), rel=1e-5)
    assert (score.ids, score.num_tokens, score.is_cut) == (ids, num_tokens, is_cut)


def test_a_text_is_scored_token_by_token_from_bos_and_cut_at_the_context(stories):
    for text, score in zip(TEXTS, stories.score([[text] for text in TEXTS])):
        ids = encode(text)
        expect(score, [1, *ids], ids, len(ids))
    short = load_scorer(str(STORIES), device="cpu", context=10)
    cut, whole = short.score([[TEXTS[2]], ["The cat"]])
    ids = encode(TEXTS[2])[:9]
    expect(cut, [1, *ids], ids, 9, is_cut=True)
    assert not whole.is_cut
    assert load_scorer(str(STORIES), device="cpu", context=4096).context == 512, "its own limit"


@pytest.mark.long
def test_published_value_on_its_own_kind_of_text(stories):
    """1.408 nats per token on the first 100 stories, with BOS, cut at 512."""
    path = SHARED / "tinystories" / "tinystories.sample.txt"
    texts = [story.strip() for story in path.read_text().split("<|endoftext|>")][:100]
    scores = stories.score([[text] for text in texts], batch_size=16)
    total, count = sum(s.nll for s in scores), sum(s.num_tokens for s in scores)
    assert total / count == pytest.approx(1.408, abs=0.002)


@pytest.mark.parametrize("batch_size", [1, 2, 8])
def test_batches_do_not_matter(stories, batch_size):
    samples = [[text] for text in [*TEXTS, "", TEXTS[0] * 3, "a", TEXTS[1]]]
    alone, progress = [stories.score([sample])[0] for sample in samples], Counted()
    together = stories.score(samples, batch_size=batch_size, progress=progress)
    assert [(s.ids, s.num_tokens) for s in together] == [(s.ids, s.num_tokens) for s in alone]
    np.testing.assert_allclose([s.nll for s in together], [s.nll for s in alone], rtol=1e-5)
    assert progress.done == len(samples)


def test_of_the_eos_between_documents_the_first_counts(stories):
    documents = ["Lily saw a dog.", "The cat ran.", "He was sad."]
    parts = [encode(text) for text in documents]
    row = [1, *parts[0], 2, *parts[1], 2, *parts[2]]
    nll = token_nll(story_model(), row)
    second = 1 + len(parts[0]) + 1 + len(parts[1])
    (score,) = stories.score([documents])
    assert score.num_tokens == len(row) - 2, "neither BOS nor the second EOS"
    assert score.nll == pytest.approx(math.fsum(nll) - nll[second - 1], rel=1e-5)
    assert score.ids == [*parts[0], *parts[1], *parts[2]]


def test_without_bos_the_first_token_is_not_counted(stories, tmp_path):
    folder = shutil.copytree(STORIES, tmp_path / "no-bos")
    options = json.loads((folder / "tokenizer_config.json").read_text())
    del options["bos_token"]
    (folder / "tokenizer_config.json").write_text(json.dumps(options))
    ids = encode(TEXTS[1])
    (score,) = load_scorer(str(folder), device="cpu").score([[TEXTS[1]]])
    expect(score, ids, ids, len(ids) - 1)


def test_texts_too_short_do_not_count_and_signs_are_text(stories):
    scores = stories.score([[""], ["", ""], []])
    assert [(s.nll, s.num_tokens) for s in scores] == [(0.0, 0)] * 3
    (one,) = stories.score([["."]])
    assert one.num_tokens == (len(one.ids) if len(one.ids) >= 2 else 0)
    (spelt,) = stories.score([["a</s>b"]])
    assert 2 not in spelt.ids
    assert len(spelt.ids) >= 5
    assert stories.score([]) == []


def test_which_tokens_count():
    for ids, eos, counted in (
        ([9, 1, 2, 3], 7, [False, True, True, True]),
        ([9, 1, 7, 3, 7, 7], 7, [False, True, True, True, False, False]),
        # BOS is the same sign: it is the first EOS, as in the public codes
        ([7, 1, 7, 3], 7, [False, True, False, True]),
        ([1, 7, 3], None, [False, True, True]),
    ):
        assert is_counted(ids, eos).tolist() == counted
    assert is_counted([7, 1, 7], eos=7, num_given=0).tolist() == [True, True, False]
    assert join_documents([[1, 2], [], [3]], 7) == [1, 2, 7, 7, 3]
    assert join_documents([[1, 2], [3]], None) == [1, 2, 3]


@pytest.fixture(scope="module")
def small_gpt2(tmp_path_factory):
    """GPT-2's architecture and signs (BOS is EOS) with random weights and letters as tokens."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

    sign = "<|endoftext|>"
    letters = [sign, "?", *"abcdefgh "]
    inner = Tokenizer(models.WordLevel({c: i for i, c in enumerate(letters)}, unk_token="?"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    folder = tmp_path_factory.mktemp("gpt2") / "small-gpt2"
    signs = {"bos_token": sign, "eos_token": sign, "unk_token": "?"}
    PreTrainedTokenizerFast(tokenizer_object=inner, **signs).save_pretrained(folder)
    torch.manual_seed(3)
    config = GPT2Config(
        vocab_size=11, n_positions=24, n_embd=8, n_layer=2, n_head=2, initializer_range=0.8
    )
    GPT2LMHeadModel(config).save_pretrained(folder)
    return folder


def test_gpt2_counts_as_the_public_codes_do(small_gpt2):
    """The given BOS is the first EOS, so no later one counts; positions end at 24."""
    from transformers import GPT2LMHeadModel

    model = GPT2LMHeadModel.from_pretrained(small_gpt2).eval()
    scorer = load_scorer(str(small_gpt2), device="cpu")
    assert scorer.context == 24
    row = [0, *(2 + "abcdefgh ".index(c) for c in "abba cab"), 0, 5, 2, 5, 0, 2]
    nll = token_nll(model, row)
    expected = math.fsum(value for value, token in zip(nll, row[1:]) if token != 0)
    samples = [["abba cab", "dad", "a"], ["hgfedcba" * 4], ["ha"]]
    first, long, short = scorer.score(samples, batch_size=3)
    assert first.num_tokens == 12
    assert first.nll == pytest.approx(expected, rel=1e-5)
    assert (long.num_tokens, long.is_cut) == (23, True)
    assert (short.num_tokens, short.is_cut) == (2, False)


# ARM runs


@pytest.fixture(scope="module", params=["plain", "wrapped", "causal LM"])
def arm(request, zoo):
    """(run, what its rows begin with): on our own trunk, and on a causal LM that needs BOS."""
    run = load(zoo / ("gpt2" if request.param == "causal LM" else "arm"))
    if request.param == "wrapped":
        run = replace(run, config=replace(run.config, data=replace(run.config.data, wrap=True)))
    return run, [] if request.param == "plain" else [run.tokenizer.bos_id]


@torch.no_grad()
def arm_nll(run, begin, ids):
    """-log p of each token after ``begin``, each from a pass over its own prefix."""
    if run.model.first_maskable:
        return token_nll(run.model.language_model, begin + ids)
    found, row = [], begin + ids
    for n, token in enumerate(row):  # slot 0 is the begin sign
        x, places = torch.tensor([[run.tokenizer.mask_id, *row[:n]]]), torch.arange(n + 1)[None]
        logits = run.model(x, torch.tensor([n]), positions=places, target_positions=places + 1)
        found.append(surprise(logits[0], token))
    return found[len(begin) :]


def test_an_arm_scores_pieces_of_its_block_from_the_begin_sign(arm):
    run, begin = arm
    texts = ["the cat sat", "the old dog ran under the new tree and saw a red sun.", "a", ""]
    size, scorer = 16 - len(begin), ArmRun(run, context=1024)
    assert scorer.context == 16
    for batch_size in (1, 4):
        scores = scorer.score([[text] for text in texts], batch_size=batch_size)
        for text, score in zip(texts[:2], scores):
            ids = list(text.encode())
            pieces = [ids[start : start + size] for start in range(0, len(ids), size)]
            expected = math.fsum(nll for piece in pieces for nll in arm_nll(run, begin, piece))
            assert score.num_tokens == len(ids)
            assert score.nll == pytest.approx(expected, rel=1e-5)
            if run.model.first_maskable == len(begin):  # the run's own likelihood has no frame
                assert run.nll([text])[0].nll == pytest.approx(score.nll, rel=1e-5)
        assert [s.num_tokens for s in scores[2:]] == [0, 0]


def test_an_arm_counts_the_first_eos_only(arm):
    run, begin = arm
    nll = arm_nll(run, begin, [*b"cat", run.tokenizer.eos_id, *b"dog", run.tokenizer.eos_id, *b"a"])
    (score,) = ArmRun(run, context=1024).score([["cat", "dog", "a"]])
    assert score.num_tokens == 8
    assert score.nll == pytest.approx(math.fsum(nll) - nll[7], rel=1e-5)


def test_scorers_are_found_by_their_folders_and_others_refused(zoo, tmp_path, monkeypatch):
    assert isinstance(load_scorer(str(zoo / "arm"), context=2), ArmRun)
    (tmp_path / "empty").mkdir()
    for name, more, words in (
        (zoo / "bell", {}, "mdm"),
        (tmp_path / "empty", {}, "--scorer"),
        (tmp_path / "none", {}, "none"),
        ("gpt2-large", {"context": 1}, "--context"),
    ):
        with pytest.raises(UserError, match=words):
            load_scorer(str(name), **more)

    def offline(name):
        raise OSError(f"no network for {name}")

    monkeypatch.setattr("bellmask.evaluate.scorers.check_shards", offline)
    with pytest.raises(UserError, match="no network for owner/name"):
        load_scorer("owner/name")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"bellmask\[gguf\]"):
        load_scorer("smollm2", cache=str(tmp_path))
    assert not list(tmp_path.rglob("*.whl"))


@pytest.mark.long
def test_smollm2_by_wheel_finds_plain_english_likely():
    """2.248 nats per token: transformers alone, on the packed file, with <|endoftext|> in front."""
    path = SHARED / "tinystories" / "tinystories.sample.txt"
    if not SMOLLM2.path(cache_folder()).exists() or not path.exists():
        pytest.skip("the wheel of SmolLM2 or the stories are not here")
    pytest.importorskip("gguf")
    scorer = load_scorer("smollm2", device="cpu")
    english = path.read_text(encoding="utf-8").split("<|endoftext|>")[1].strip()
    words = english.split()
    plain, mixed = scorer.score([[english], [" ".join(words[::2] + words[1::2])]])
    assert plain.num_tokens == 175
    assert plain.nll / plain.num_tokens == pytest.approx(2.2482, abs=0.001)
    assert mixed.nll > 1.5 * plain.nll
