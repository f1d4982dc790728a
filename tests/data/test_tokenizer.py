"""Ids: the mask last, specials apart, and text that looks like a special is only text."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bellmask.data.tokenizer import (
    ByteTokenizer,
    FastTokenizer,
    Tokenizer,
    from_description,
    from_transformers,
)
from bellmask.data.vocabularies import load_tokenizer
from bellmask.errors import UserError

SHARED = Path(os.environ.get("BELLMASK_TEST_DATA", Path(__file__).parents[3] / "shared" / "data"))


@settings(deadline=None, derandomize=True)
@given(st.text())
def test_bytes_give_any_text_back(text: str) -> None:
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode(text)
    assert len(ids) == len(text.encode())
    assert tokenizer.decode(ids) == text


def test_specials_are_distinct_and_shown_or_left_out() -> None:
    tokenizer = ByteTokenizer()
    mask = tokenizer.num_tokens
    assert len({mask, tokenizer.eos_id, tokenizer.bos_id, tokenizer.pad_id}) == 4
    assert max(tokenizer.eos_id, tokenizer.bos_id, tokenizer.pad_id) < mask
    ids = np.array([tokenizer.bos_id, 104, 105, mask, tokenizer.eos_id, tokenizer.pad_id])
    assert tokenizer.decode(ids) == "hi␣"


@pytest.fixture(scope="module")
def wordpiece(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A BERT-like tokenizer whose mask sits in the middle of the vocabulary."""
    from transformers import BertTokenizer

    folder = tmp_path_factory.mktemp("wordpiece")
    words = ["[PAD]", "[UNK]", "[CLS]", "[MASK]", "[SEP]", "the", "cat", "sat", "##s", "end"]
    (folder / "vocab.txt").write_text("\n".join(words) + "\n")
    BertTokenizer(vocab={word: i for i, word in enumerate(words)}).save_pretrained(folder)
    return folder


def test_a_mask_in_the_middle_changes_places_with_the_last_id(wordpiece: Path) -> None:
    tokenizer = from_transformers(str(wordpiece))
    assert isinstance(tokenizer, FastTokenizer)
    assert tokenizer.num_tokens == 9
    ids = tokenizer.encode("the cats sat end")
    assert ids.tolist() == [5, 6, 8, 7, 3], "end has moved from the last place to the mask's"
    assert ids.max() < tokenizer.num_tokens
    assert tokenizer.decode(ids) == "the cats sat end"
    assert tokenizer.decode(np.array([5, 9, 6])) == "the␣cat"
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == (2, 4, 0)


def test_a_mask_without_a_pad_still_goes_last(tmp_path: Path) -> None:
    from transformers import BertTokenizer

    words = ["[UNK]", "[CLS]", "[MASK]", "[SEP]", "the", "end"]
    vocabulary = {word: i for i, word in enumerate(words)}
    BertTokenizer(vocab=vocabulary, pad_token=None).save_pretrained(tmp_path)
    tokenizer = from_transformers(str(tmp_path))
    assert (tokenizer.num_tokens, tokenizer.pad_id) == (6, 5)
    assert tokenizer.encode("the end").tolist() == [4, 2]
    assert tokenizer.decode(np.array([4, 6, 2])) == "the␣end"


def test_another_vocabulary_has_another_fingerprint(wordpiece: Path, tmp_path: Path) -> None:
    from transformers import BertTokenizer

    words = ["[PAD]", "[UNK]", "[CLS]", "[MASK]", "[SEP]", "the", "dog", "sat", "##s", "end"]
    BertTokenizer(vocab={word: i for i, word in enumerate(words)}).save_pretrained(tmp_path)
    a, b = from_transformers(str(wordpiece)), from_transformers(str(tmp_path))
    assert a.fingerprint != b.fingerprint
    assert a.fingerprint == from_transformers(str(wordpiece)).fingerprint


def test_a_tokenizer_without_pad_gets_one_of_its_own(tmp_path: Path) -> None:
    folder = SHARED / "stories260K"
    if not folder.exists():
        pytest.skip(f"needs the stories260K tokenizer, which is not at {folder}")
    tokenizer = load_tokenizer(str(folder), tmp_path)
    assert tokenizer.num_tokens == 513
    specials = {tokenizer.pad_id, tokenizer.eos_id, tokenizer.num_tokens}
    assert len(specials) == 3
    text = "Once upon a time, there was a cat."
    assert tokenizer.decode(tokenizer.encode(text)).strip() == text


def test_missing_tokenizers_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no tokenizer folder"):
        load_tokenizer(str(tmp_path / "none"), tmp_path)
    with pytest.raises(UserError, match="cannot load tokenizer"):
        load_tokenizer(str(tmp_path), tmp_path)


@pytest.mark.parametrize("text", ["[MASK]", "the [MASK] cat", "[SEP][CLS][PAD]", "[MASK"])
def test_the_names_of_specials_inside_a_text_are_text(wordpiece: Path, text: str) -> None:
    tokenizer = from_transformers(str(wordpiece))
    specials = {tokenizer.mask_id, tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id}
    for ids in (tokenizer.encode(text), *tokenizer.encode_batch([text, text])):
        assert len(ids)
        assert not specials & set(ids.tolist())


def test_the_mask_is_the_id_after_all_tokens(wordpiece: Path) -> None:
    for tokenizer in (ByteTokenizer(), from_transformers(str(wordpiece))):
        assert tokenizer.mask_id == tokenizer.num_tokens


@settings(deadline=None, derandomize=True, max_examples=50)
@given(st.lists(st.text(st.sampled_from("thecats end[]"), max_size=12), max_size=5))
def test_a_batch_is_encoded_like_its_texts(wordpiece: Path, texts: list[str]) -> None:
    for tokenizer in (ByteTokenizer(), from_transformers(str(wordpiece))):
        batch = tokenizer.encode_batch(texts)
        assert [ids.tolist() for ids in batch] == [tokenizer.encode(t).tolist() for t in texts]


def test_a_described_tokenizer_is_made_again(wordpiece: Path) -> None:
    tokenizers: list[Tokenizer] = [ByteTokenizer(), from_transformers(str(wordpiece))]
    for tokenizer in tokenizers:
        again = from_description(json.loads(json.dumps(tokenizer.description())))
        assert again.fingerprint == tokenizer.fingerprint
        assert again.num_tokens == tokenizer.num_tokens
        specials = (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id)
        assert (again.bos_id, again.eos_id, again.pad_id) == specials
        text = "the cats [MASK] sat end"
        assert again.encode(text).tolist() == tokenizer.encode(text).tolist()
    with pytest.raises(UserError, match="unknown kind of tokenizer: 'words'"):
        from_description({"kind": "words"})


def test_a_pad_that_is_the_eos_or_the_mask_is_replaced() -> None:
    from tokenizers import Tokenizer as Inner
    from tokenizers import models

    vocabulary = {"a": 0, "<eos>": 1, "<mask>": 2, "b": 3}
    for pad in (1, 2, None):
        inner = Inner(models.WordLevel(vocabulary, unk_token="a"))
        tokenizer = FastTokenizer(inner, eos=1, pad=pad, mask=2)
        ids = {tokenizer.pad_id, tokenizer.eos_id, tokenizer.mask_id}
        assert len(ids) == 3
        assert (tokenizer.num_tokens, tokenizer.pad_id) == (4, 3)
        assert tokenizer.encode("b").tolist() == [2], "b has taken the mask's place"
        assert tokenizer.decode(np.array([2, 3, 4])) == "b␣"
