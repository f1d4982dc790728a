"""Our tokenizers as the files that ``AutoTokenizer`` loads.

Ids are the wrapped tokenizer's own, so GPT-2's and BERT's files stay what they are; the mask, and a
pad where there is none, are added at the end. Nothing is put around a text: the ids are those that
the model was trained on. Written with ``tokenizers`` alone: transformers is not needed.
"""

from __future__ import annotations

import json
import string
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bellmask.data.tokenizers import (
    ByteTokenizer,
    FastTokenizer,
    SymbolTokenizer,
    Tokenizer,
)
from bellmask.storage.loading import map_ids
from bellmask.utils.errors import UserError
from bellmask.utils.files import write_text

_NAMES = {
    "bos": ("<bos>", "[BOS]", "<|bos|>"),
    "eos": ("<eos>", "[EOS]", "<|eos|>"),
    "pad": ("<pad>", "[PAD]", "<|pad|>"),
    "mask": ("<mask>", "[MASK]", "<|mask|>"),
}
"""What a special token may be called that the vocabulary has no name for; the first free one."""


@dataclass(frozen=True)
class SpecialIds:
    """Ids as the exported model and tokenizer have them; None where there is no such token."""

    bos: int | None
    eos: int | None
    pad: int | None
    mask: int | None


def special_ids(tokenizer: Tokenizer) -> SpecialIds:
    """The special tokens in the exported order."""
    order = map_ids(tokenizer).completed()
    if isinstance(tokenizer, SymbolTokenizer):
        return SpecialIds(None, None, None, int(order[tokenizer.mask_id]))
    ours = (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id, tokenizer.mask_id)
    return SpecialIds(*(int(order[number]) for number in ours))


def write_tokenizer(
    tokenizer: Tokenizer,
    folder: Path,
    max_length: int,
    ids: SpecialIds,
    num_ids: int,
    chat_template: str | None = None,
) -> None:
    """tokenizer.json and tokenizer_config.json, with ``num_ids`` entries, the mask included."""
    inner = _inner(tokenizer)
    names = _add_specials(inner, ids)
    size = inner.get_vocab_size(with_added_tokens=True)
    if size != num_ids:
        raise UserError(
            f"the tokenizer's vocabulary has gaps: {size} entries where the model has {num_ids} "
            "rows, the mask's included; it cannot be exported"
        )
    write_text(folder / "tokenizer.json", inner.to_str(pretty=True) + "\n")
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,
        **{f"{role}_token": name for role, name in names.items()},
    }
    if (unknown := getattr(inner.model, "unk_token", None)) is not None:
        config["unk_token"] = unknown
    if chat_template is not None:
        config["chat_template"] = chat_template
    write_text(folder / "tokenizer_config.json", json.dumps(config, indent=1) + "\n")


def _inner(tokenizer: Tokenizer) -> Any:
    """A ``tokenizers.Tokenizer`` that encodes as ours does, in its own ids."""
    from tokenizers import Tokenizer as Inner

    if isinstance(tokenizer, FastTokenizer):
        tree = json.loads(tokenizer.description()["inner"])
        tree["post_processor"] = None  # nothing around a text
        return Inner.from_str(json.dumps(tree))
    if isinstance(tokenizer, ByteTokenizer):
        return _byte_inner()
    if isinstance(tokenizer, SymbolTokenizer):
        return _symbol_inner(tokenizer.num_tokens)
    raise UserError(f"a {type(tokenizer).__name__} has no form that transformers can load")


def _byte_inner() -> Any:
    """Every byte is a token: byte-level BPE without a merge."""
    from tokenizers import Tokenizer as Inner
    from tokenizers import decoders, models, pre_tokenizers

    inner = Inner(models.BPE(vocab=_byte_letters(), merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    return inner


def _byte_letters() -> dict[str, int]:
    """The letter that byte-level tokenizers write for each byte: itself where it can be printed,
    else one of the letters from number 256 on.
    """
    printed = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printed]
    letters = {chr(byte): byte for byte in printed}
    return letters | {chr(256 + place): byte for place, byte in enumerate(others)}


def _symbol_inner(num_tokens: int) -> Any:
    from tokenizers import Tokenizer as Inner
    from tokenizers import decoders, models, pre_tokenizers

    letters = {letter: i for i, letter in enumerate(string.ascii_letters[:num_tokens])}
    inner = Inner(models.BPE(vocab=letters, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    inner.decoder = decoders.Fuse()
    return inner


def _add_specials(inner: Any, ids: SpecialIds) -> dict[str, str]:
    """Name every special token; those that the vocabulary lacks are added, lowest id first."""
    from tokenizers import AddedToken

    names: dict[str, str] = {}
    found = {role: number for role, number in vars(ids).items() if number is not None}
    for role, number in sorted(found.items(), key=lambda item: item[1]):
        name = inner.id_to_token(number)
        if name is None:
            free = [n for n in _NAMES[role] if inner.token_to_id(n) is None]
            name = free[0] if free else f"<|bellmask {role}|>"
        inner.add_special_tokens([AddedToken(name, special=True, normalized=False)])
        if inner.token_to_id(name) != number:
            raise UserError(f"the tokenizer has no room for a {role} token at id {number}")
        names[role] = name
    return names
