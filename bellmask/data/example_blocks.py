"""Examples → blocks on disk, in training and validation.

Rows (:mod:`bellmask.data.example_rows`) lie like those of text (:mod:`bellmask.data.blocks`), and
``bytes.bin`` has the bytes of each row's response. Documents (a conversation is one) are in a keyed
random order, so that the last part of them is a fair sample: a mix of tasks is not split by task.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from bellmask.config.options import DataOptions, SftOptions
from bellmask.data.blocks import Blocks, open_blocks, read_card, rows_per_shard, shard_path
from bellmask.data.example_rows import ExampleRules, canvas_length, encode_example, encode_examples
from bellmask.data.examples import open_examples
from bellmask.data.messages import ExampleSource
from bellmask.data.prepare import LoadedData, one_at_a_time, writable_cache
from bellmask.data.templates import PromptEncoder, Template, make_template
from bellmask.data.tokenizer import Tokenizer
from bellmask.data.writing import OnProgress
from bellmask.utils.errors import UserError
from bellmask.utils.files import is_whole, whole_folder
from bellmask.utils.rng import hash_counters, stream_key

__all__ = [
    "ExampleRules",
    "canvas_length",
    "encode_example",
    "example_counts",
    "load_example_blocks",
    "prepare_examples",
]

VERSION = 2
"""Part of every cache key; raise it when rows or counts would come out differently."""
IN_CONVERSATIONS = "answers in conversations"
"""The count of rows whose example came with roles."""
EXAMPLES_AT_ONCE = 1024


def load_example_blocks(
    data: DataOptions,
    sft: SftOptions,
    tokenizer: Tokenizer,
    chat_template: str | None = None,
    on_progress: OnProgress | None = None,
    bos_first: bool = False,
) -> LoadedData:
    """Training and validation rows, prepared now or taken from the cache.

    Of ``data`` the block length, the cache and the held-out share are read.
    """
    if sft.train is None:
        raise UserError("sft.train is not given: which examples?")
    rules = ExampleRules(data.block_length, sft.round_to, sft.template, bos_first)
    _check(rules, tokenizer)
    template = make_template(sft.template, tokenizer, chat_template)
    cache = writable_cache(data)
    sources = [open_examples(name, sft, cache) for name in (sft.train, sft.valid) if name]
    if len(sources) == 2 and sources[0].identity == sources[1].identity:
        raise UserError(
            f"sft.valid={sft.valid!r} holds the same examples as sft.train; leave it out"
        )
    made = [prepare_examples(s, tokenizer, template, rules, cache, on_progress) for s in sources]
    counts = example_counts(read_card(made[0][1]))
    if len(made) == 2:
        return LoadedData(made[0][0], made[1][0], counts=counts)
    train, valid = _split(*made[0], data.valid_fraction, sft.train)
    return LoadedData(train, valid, counts=counts)


def _check(rules: ExampleRules, tokenizer: Tokenizer) -> None:
    if rules.round_to < 1:
        raise UserError(f"sft.round_to={rules.round_to} must be at least 1")
    if rules.block_length <= rules.round_to:
        raise UserError(
            f"data.block_length={rules.block_length} has no room for a prompt and a response of "
            f"sft.round_to={rules.round_to} tokens; make it longer, or --sft.round-to smaller"
        )
    if tokenizer.eos_id < 0:
        raise UserError("examples end with EOS, which symbols do not have; use another tokenizer")


def prepare_examples(
    source: ExampleSource,
    tokenizer: Tokenizer,
    template: Template,
    rules: ExampleRules,
    cache: Path,
    on_progress: OnProgress | None = None,
) -> tuple[Blocks, Path]:
    """The rows of a source and their folder, from the cache if their fingerprint is there."""
    parts = [source.identity, tokenizer.fingerprint, template.identity, asdict(rules), VERSION]
    key = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
    folder = cache / "blocks" / key[:24]
    if not (folder / "card.json").exists():
        with one_at_a_time(folder):
            if not folder.exists():
                _prepare(
                    folder, key, source, PromptEncoder(tokenizer, template), rules, on_progress
                )
    return open_blocks(folder, key), folder


def example_counts(card: dict[str, Any]) -> dict[str, int]:
    """What became of the examples, from a folder's card: rows, drops and why, tasks' shares."""
    counts: dict[str, Any] = {
        "rows": card.get("num_blocks"),
        "documents": card.get("num_documents"),
    }
    more = card.get("counts")
    counts |= more if isinstance(more, dict) else {"counts": None}
    if not all(map(is_whole, counts.values())):
        raise UserError("the data card of the examples is damaged; delete the data cache")
    return counts


def _split(blocks: Blocks, folder: Path, fraction: float, name: str) -> tuple[Blocks, Blocks]:
    """All but the last rows, and those; between documents, so that none is in both."""
    border = len(blocks) - max(1, round(len(blocks) * fraction))
    while border > 0 and blocks.documents[border] == blocks.documents[border - 1]:
        border -= 1
    if border < 1:
        raise UserError(
            f"sft.train={name!r} has {len(blocks)} example(s) of {len(set(blocks.documents))} "
            "document(s): too few to hold some out; give more, or --sft.valid"
        )
    size = np.fromfile(folder / "bytes.bin", dtype=np.int64)
    train, valid = blocks.slice(0, border), blocks.slice(border, len(blocks))
    return (
        replace(train, num_bytes=float(size[:border].sum())),
        replace(valid, num_bytes=float(size[border:].sum())),
    )


# --- writing ---------------------------------------------------------------------------------


def _prepare(
    folder: Path,
    key: str,
    source: ExampleSource,
    encoder: PromptEncoder,
    rules: ExampleRules,
    on_progress: OnProgress | None,
) -> None:
    """Write rows as they are read, then once more in their order; the folder appears when whole."""
    counts: Counter[str] = Counter()
    dtype = np.dtype(np.uint16 if encoder.tokenizer.num_tokens < 2**16 else np.uint32)
    with whole_folder(folder, "prepared examples") as scratch:
        draft = scratch / "draft.bin"
        columns = _draft(draft, dtype, source, encoder, rules, counts, on_progress)
        if not columns.size:
            reasons = ", ".join(f"{name}: {n}" for name, n in sorted(counts.items())) or "none read"
            raise UserError(
                f"{source.name} gives no example that fits data.block_length="
                f"{rules.block_length} ({reasons})"
            )
        key_D = hash_counters(stream_key(0, "examples"), torch.from_numpy(columns[1]))
        order = torch.argsort(key_D, stable=True).numpy()
        drafted = np.memmap(draft, dtype=dtype, mode="r").reshape(-1, rules.block_length)
        per_shard = rows_per_shard(rules.block_length)
        for number, start in enumerate(range(0, len(order), per_shard)):
            drafted[order[start : start + per_shard]].tofile(shard_path(scratch, number))
        for name, column in zip(("lengths", "documents", "starts", "bytes"), columns, strict=True):
            column[order].tofile(scratch / f"{name}.bin")
        draft.unlink()
        card = _card(key, source, encoder.tokenizer, rules, columns, counts)
        text = json.dumps({**card, "dtype": dtype.name}, indent=1, ensure_ascii=False) + "\n"
        (scratch / "card.json").write_text(text, encoding="utf-8")


def _draft(
    path: Path,
    dtype: np.dtype[Any],
    source: ExampleSource,
    encoder: PromptEncoder,
    rules: ExampleRules,
    counts: Counter[str],
    on_progress: OnProgress | None,
) -> NDArray[np.int64]:
    """Rows in the order they are read; (length, document, start, bytes of response) of each."""
    marks: list[tuple[int, int, int, int]] = []
    size = 0
    examples = source.read(counts)
    with path.open("wb") as stream:
        while batch := list(itertools.islice(examples, EXAMPLES_AT_ONCE)):
            rows = encode_examples(batch, encoder, rules, counts)
            for (_, example), (row, text) in zip(batch, rows, strict=True):
                if row is not None:
                    counts.update([IN_CONVERSATIONS] if example.is_conversation else [])
                    stream.write(row.ids.astype(dtype).tobytes())
                    marks.append((row.length, row.document, row.start, len(text.encode())))
                    size += marks[-1][3]
            if on_progress:
                on_progress(batch[-1][0] + 1, size, len(marks))
    return np.array(marks, dtype=np.int64).reshape(-1, 4).T.copy()


def _card(
    key: str,
    source: ExampleSource,
    tokenizer: Tokenizer,
    rules: ExampleRules,
    columns: NDArray[np.int64],
    counts: Counter[str],
) -> dict[str, Any]:
    lengths, documents, starts, size = columns
    return {
        "fingerprint": key,
        "source": source.name,
        "kind": "examples",
        "origin": source.origin,
        "identity": source.identity,
        "num_blocks": len(lengths),
        "block_length": rules.block_length,
        "num_documents": len(np.unique(documents)),
        "num_tokens": int(lengths.sum()),
        "num_response_tokens": int((lengths - starts).sum()),
        "num_bytes": int(size.sum()),
        "has_starts": True,
        "counts": dict(sorted(counts.items())),
        "round_to": rules.round_to,
        "template": rules.template,
        "bos_first": rules.bos_first,
        "tokenizer_fingerprint": tokenizer.fingerprint,
        "num_token_kinds": tokenizer.num_tokens,
        "rows_per_shard": rows_per_shard(rules.block_length),
        "examples_version": VERSION,
    }
