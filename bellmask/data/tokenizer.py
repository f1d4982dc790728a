"""Text to ids and back: the sole owner of vocabulary size, mask id and special ids.

Ids 0 .. V-1 are tokens that can be predicted; the mask is always id V, the last row of the
embedding, and the head has no row for it. A tokenizer whose own mask sits elsewhere (BERT's is
103) has that id swapped with its last one. Pad, EOS and mask are never the same id.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from bellmask.errors import UserError

Ids = NDArray[np.int64]


class Tokenizer(Protocol):
    """What the rest of the package knows of a tokenizer."""

    num_tokens: int
    """V: ids that can be predicted; also the id of the mask."""
    bos_id: int
    eos_id: int
    pad_id: int
    fingerprint: str
    """Changes when any text would be encoded differently."""

    def encode(self, text: str) -> Ids:
        """Ids of a text, without special tokens."""
        ...

    def decode(self, ids: Ids) -> str:
        """Text of ids; specials are left out, a mask is shown as ␣."""
        ...

    def byte_lengths(self) -> NDArray[np.int64]:
        """Bytes of text each of the V tokens stands for; 0 for special tokens."""
        ...


MASK_SIGN = "␣"


class ByteTokenizer:
    """UTF-8 bytes: 256 values, EOS, BOS and pad."""

    num_tokens = 259
    eos_id = 256
    bos_id = 257
    pad_id = 258
    fingerprint = "bytes-1"

    def encode(self, text: str) -> Ids:
        """The text's UTF-8 bytes."""
        return np.frombuffer(text.encode("utf-8"), dtype=np.uint8).astype(np.int64)

    def decode(self, ids: Ids) -> str:
        """Bytes that are not UTF-8 become the replacement character."""
        pieces = []
        for token in ids.tolist():
            if token == self.num_tokens:
                pieces.append(MASK_SIGN.encode())
            elif token < 256:
                pieces.append(bytes([token]))
        return b"".join(pieces).decode("utf-8", errors="replace")

    def byte_lengths(self) -> NDArray[np.int64]:
        """One for bytes, zero for specials."""
        return (np.arange(self.num_tokens) < 256).astype(np.int64)


class HuggingFaceTokenizer:
    """Any Hugging Face tokenizer, from a folder or by name; needs the extra ``hf``."""

    def __init__(self, source: str) -> None:
        try:
            from transformers import AutoTokenizer
        except ImportError:
            raise UserError(
                f"tokenizer {source!r} needs transformers: pip install 'bellmask[hf]'"
            ) from None
        try:
            self._inner = AutoTokenizer.from_pretrained(source)
        except (OSError, ValueError) as error:
            reason = str(error).strip().splitlines()[0]
            raise UserError(
                f"cannot load tokenizer {source!r} ({reason}); give 'bytes' or a folder that holds "
                "tokenizer.json with --data.tokenizer"
            ) from None
        size = len(self._inner)
        mask = self._inner.mask_token_id
        self._swap = (mask, size - 1) if mask is not None else None
        self.num_tokens = size - 1 if mask is not None else size
        eos = self._first(self._inner.eos_token_id, self._inner.sep_token_id)
        if eos is None:
            raise UserError(f"tokenizer {source!r} has neither an EOS nor a SEP token")
        bos = self._first(self._inner.bos_token_id, self._inner.cls_token_id, eos)
        pad = self._inner.pad_token_id
        if pad is None or pad in (eos, mask):
            pad, self.num_tokens = self.num_tokens, self.num_tokens + 1
        self.eos_id, self.bos_id, self.pad_id = self._ours(eos), self._ours(bos), self._ours(pad)
        self.fingerprint = self._hash()

    @staticmethod
    def _first(*candidates: int | None) -> int | None:
        return next((c for c in candidates if c is not None), None)

    def _ours(self, theirs: int | None) -> int:
        assert theirs is not None
        if self._swap and theirs in self._swap:
            return self._swap[0] + self._swap[1] - theirs
        return theirs

    def _exchange(self, ids: Ids) -> Ids:
        """Swap the mask with the last id; its own inverse."""
        if not self._swap:
            return ids
        a, b = self._swap
        return np.where(ids == a, b, np.where(ids == b, a, ids))

    def _hash(self) -> str:
        state = {
            "vocabulary": sorted(self._inner.get_vocab().items()),
            "swap": self._swap,
            "specials": (self.bos_id, self.eos_id, self.pad_id),
        }
        backend = getattr(self._inner, "backend_tokenizer", None)
        text = json.dumps(state) + (backend.to_str() if backend is not None else "")
        return hashlib.sha256(text.encode()).hexdigest()

    def encode(self, text: str) -> Ids:
        """Ids of a text, without special tokens."""
        ids = self._inner.encode(text, add_special_tokens=False, verbose=False)
        return self._exchange(np.asarray(ids, dtype=np.int64))

    def decode(self, ids: Ids) -> str:
        """Runs of tokens as text; masks shown, other specials left out."""
        special = {self.bos_id, self.eos_id, self.pad_id}
        pieces: list[str] = []
        run: list[int] = []
        for token in [*ids.tolist(), self.num_tokens]:
            if token != self.num_tokens:
                if token not in special:
                    run.append(token)
                continue
            theirs = self._exchange(np.asarray(run, dtype=np.int64)).tolist()
            pieces.append(str(self._inner.decode(theirs)) if run else "")
            run = []
        return MASK_SIGN.join(pieces)

    def byte_lengths(self) -> NDArray[np.int64]:
        """Bytes of each token's own text (a WordPiece continuation without its ##)."""
        special = {self.bos_id, self.eos_id, self.pad_id}
        lengths = np.zeros(self.num_tokens, dtype=np.int64)
        for token in range(min(self.num_tokens, len(self._inner))):
            if token not in special:
                theirs = self._exchange(np.asarray([token]))
                pieces = [str(self._inner.convert_ids_to_tokens(int(theirs[0])))]
                text = self._inner.convert_tokens_to_string(pieces)
                lengths[token] = len(text.encode("utf-8"))
        return lengths


VOCABULARIES = {"bytes": 259, "bert-base-uncased": 30521, "gpt2": 50258}
"""V of the tokenizers that presets name, so that a model can be planned without loading them."""


def load_tokenizer(name: str) -> Tokenizer:
    """``bytes``, or a Hugging Face tokenizer from a folder or by name."""
    if name == "bytes":
        return ByteTokenizer()
    if ("/" in name or "." in name) and not Path(name).exists():
        raise UserError(f"there is no tokenizer folder {name}; give 'bytes', a folder or a name")
    return HuggingFaceTokenizer(name)
