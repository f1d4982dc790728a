from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bellmask.data.tokenizer import ByteTokenizer, HuggingFaceTokenizer, load_tokenizer
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
    tokenizer = load_tokenizer(str(wordpiece))
    assert isinstance(tokenizer, HuggingFaceTokenizer)
    assert tokenizer.num_tokens == 9
    ids = tokenizer.encode("the cats sat end")
    assert ids.tolist() == [5, 6, 8, 7, 3], "end has moved from the last place to the mask's"
    assert ids.max() < tokenizer.num_tokens
    assert tokenizer.decode(ids) == "the cats sat end"
    assert tokenizer.decode(np.array([5, 9, 6])) == "the␣cat"
    assert tokenizer.encode("[MASK]").tolist() == [tokenizer.num_tokens]
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == (2, 4, 0)


def test_a_mask_without_a_pad_still_goes_last(tmp_path: Path) -> None:
    from transformers import BertTokenizer

    words = ["[UNK]", "[CLS]", "[MASK]", "[SEP]", "the", "end"]
    vocabulary = {word: i for i, word in enumerate(words)}
    BertTokenizer(vocab=vocabulary, pad_token=None).save_pretrained(tmp_path)
    tokenizer = load_tokenizer(str(tmp_path))
    assert (tokenizer.num_tokens, tokenizer.pad_id) == (6, 5)
    ids = tokenizer.encode("the [MASK] end")
    assert ids.tolist() == [4, 6, 2]
    assert tokenizer.decode(ids) == "the␣end"


def test_another_vocabulary_has_another_fingerprint(wordpiece: Path, tmp_path: Path) -> None:
    from transformers import BertTokenizer

    words = ["[PAD]", "[UNK]", "[CLS]", "[MASK]", "[SEP]", "the", "dog", "sat", "##s", "end"]
    BertTokenizer(vocab={word: i for i, word in enumerate(words)}).save_pretrained(tmp_path)
    a, b = load_tokenizer(str(wordpiece)), load_tokenizer(str(tmp_path))
    assert a.fingerprint != b.fingerprint
    assert a.fingerprint == load_tokenizer(str(wordpiece)).fingerprint


def test_a_tokenizer_without_pad_gets_one_of_its_own() -> None:
    folder = SHARED / "stories260K"
    if not folder.exists():
        pytest.skip(f"needs the stories260K tokenizer, which is not at {folder}")
    tokenizer = load_tokenizer(str(folder))
    assert tokenizer.num_tokens == 513
    specials = {tokenizer.pad_id, tokenizer.eos_id, tokenizer.num_tokens}
    assert len(specials) == 3
    text = "Once upon a time, there was a cat."
    assert tokenizer.decode(tokenizer.encode(text)).strip() == text


def test_missing_tokenizers_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no tokenizer folder"):
        load_tokenizer(str(tmp_path / "none"))
    with pytest.raises(UserError, match="cannot load tokenizer"):
        load_tokenizer(str(tmp_path))
