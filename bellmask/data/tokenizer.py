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
        self._number_ids(source)
        self.fingerprint = self._hash()

    def _number_ids(self, source: str) -> None:
        """Ours are theirs, but for the mask, which goes last, and a pad, which may be new."""
        inner, size = self._inner, len(self._inner)
        mask = inner.mask_token_id
        eos = inner.eos_token_id if inner.eos_token_id is not None else inner.sep_token_id
        if eos is None:
            raise UserError(f"tokenizer {source!r} has neither an EOS nor a SEP token")
        bos = inner.bos_token_id if inner.bos_token_id is not None else inner.cls_token_id
        pad = inner.pad_token_id if inner.pad_token_id not in (eos, mask) else None
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

    def _hash(self) -> str:
        state = {
            "vocabulary": sorted(self._inner.get_vocab().items()),
            "specials": (self.bos_id, self.eos_id, self.pad_id, self.num_tokens),
        }
        backend = getattr(self._inner, "backend_tokenizer", None)
        text = json.dumps(state) + (backend.to_str() if backend is not None else "")
        return hashlib.sha256(text.encode()).hexdigest()

    def encode(self, text: str) -> Ids:
        """Ids of a text, without special tokens."""
        ids = self._inner.encode(text, add_special_tokens=False, verbose=False)
        return self._ours[np.asarray(ids, dtype=np.int64)]

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
            theirs = self._theirs[np.asarray(run, dtype=np.int64)].tolist()
            pieces.append(str(self._inner.decode(theirs)) if run else "")
            run = []
        return MASK_SIGN.join(pieces)


VOCABULARIES = {"bytes": 259, "bert-base-uncased": 30521, "gpt2": 50258}
"""V of the tokenizers that presets name, so that a model can be planned without loading them."""


def load_tokenizer(name: str) -> Tokenizer:
    """``bytes``, or a Hugging Face tokenizer from a folder or by name."""
    if name == "bytes":
        return ByteTokenizer()
    if ("/" in name or "." in name) and not Path(name).exists():
        raise UserError(f"there is no tokenizer folder {name}; give 'bytes', a folder or a name")
    return HuggingFaceTokenizer(name)
