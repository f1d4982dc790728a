"""Examples to fine-tune on: opened by name, made into rows, stored as blocks.

They come from files, the hub, the task mix, ShareGPT, toy tasks or stories. Every source yields
(document, example) pairs in a fixed order; see
:class:`bellmask.data.example_files.ExampleSource`.
"""

from __future__ import annotations

import itertools
import re
import string
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bellmask.config.options import DataOptions, SftOptions
from bellmask.data.blocks import (
    Blocks,
    LoadedData,
    cached_blocks,
    fingerprint_of,
    read_card,
    rows_per_shard,
    shard_path,
    token_dtype,
    writable_cache,
    write_card,
)
from bellmask.data.chat_templates import (
    Kind,
    PromptEncoder,
    join,
    make_template,
    response_after,
)
from bellmask.data.example_files import (
    Example,
    ExampleSource,
    Numbered,
    example_files,
    from_sharegpt,
)
from bellmask.data.packing import Row
from bellmask.data.readers import file_source, is_word, open_records
from bellmask.data.tasks import open_tasks
from bellmask.data.tokenizers import Ids, Tokenizer
from bellmask.utils.errors import UserError, look_up
from bellmask.utils.files import count_of, whole_folder
from bellmask.utils.progress import NO_PROGRESS, Progress
from bellmask.utils.rng import IndexPermutation, hash_counters, stream_key

# Examples by name.


def open_examples(source: str, options: SftOptions, cache: Path) -> ExampleSource:
    """The examples that ``--sft.train`` or ``--sft.valid`` names, not read yet.

    Of the options only ``counts`` is read, and only for the task mix.
    """
    kind, sign, rest = source.partition(":")
    if source == "tasks":
        return open_tasks(None, options.counts)
    if sign and kind in _OPENERS and not Path(source).exists():
        if not rest:
            raise UserError(f"{source!r}: what comes after {kind}: is missing")
        return _OPENERS[kind](rest, options)
    if is_word(source):
        raise UserError(
            f"unknown examples {source!r} (tasks, tasks:FOLDER, hub:OWNER/NAME, sharegpt:FILE, "
            "sharegpt:hub:OWNER/NAME, toy:copy, toy:reverse, toy:sums, stories:FILE, or a .jsonl, "
            ".json or .parquet file)"
        )
    return example_files(source)


_OPENERS = {
    "tasks": lambda rest, options: open_tasks(rest, options.counts),
    "sharegpt": lambda rest, options: from_sharegpt(open_records(rest, f"sharegpt:{rest}")),
    "toy": lambda rest, options: open_toy(rest),
    "stories": lambda rest, options: open_stories(rest),
}


# ``stories:FILE``: questions whose answer stands in the story, for text like TinyStories.
#
# A prompt is "Story: ", the story's first sentences (up to about 60 words), "Question: ..." and
# "Answer:". Three kinds are asked, each only where a careful pattern leaves one answer:
#
#     name   "a little girl named Lily"     What is the girl's name?      Lily
#     kind   "a little car named Beep"      What is Beep?                 a car
#     love   "Max loved to run and play."   What did Max love to do?      run and play
#
# Questions on one story are one document, so that no story is both trained and validated on.

MOST_WORDS = 60
"""Sentences are taken while the story told so far has no more words."""
STORIES_VERSION = 1
"""Part of the identity; raise it when questions would come out differently."""

_SENTENCE = re.compile(r"[^.!?]*[.!?]+[\"'\u201d\u2019]*\s*")
_NAMED = re.compile(r"\b([a-z]+) (?:named|called) ([A-Z][a-z]+)\b(?!'|-| [A-Z])")
_PAIRED = re.compile(r"\s*(?:,|and)\s*(?:and\s+)?[A-Z]")
_LOVED = re.compile(r"(?:(?<=[.!?] )|^)([A-Z][a-z]+) (loved|liked) to ([a-z][a-z ]*)\.")
_LOVERS = re.compile(r"\b([A-Z][a-z]+) (?:also |always )?(?:loved|liked)\b")
_OTHERS_LOVED = re.compile(r"\b(?:[Hh]e|[Ss]he|[Ii]t|[Tt]hey) (?:also )?(?:loved|liked) to\b")
_NOT_KINDS = frozenset("was is been were be and or it one other old him her them they who".split())
_RELATIONS = frozenset("friend brother sister neighbor neighbour cousin toy pet lab".split())
_NOT_NAMES = frozenset("Mr Mrs Ms Dr Everyone Everybody The He She It They".split())
_UNCLEAR = re.compile(r"\b(?:but|because|when|was|were|it|them|so)\b")


def opening(story: str) -> str:
    """The first whole sentences of a story, on one line."""
    taken = ""
    for sentence in _SENTENCE.findall(" ".join(story.split())):
        if len((taken + sentence).split()) > MOST_WORDS:
            break
        taken += sentence
    return taken.strip()


def _named(text: str) -> list[tuple[str, str]]:
    """(kind, name) of each being that is introduced by name, in order; [] where two share one."""
    return [
        (match[1], match[2])
        for match in _NAMED.finditer(text)
        if match[1] not in _NOT_KINDS and match[2] not in _NOT_NAMES
        if not _PAIRED.match(text, match.end())
    ]


def _is_single(kind: str, text: str) -> bool:
    """True when a story speaks of one such being only: 'boy' once with a or another, no 'boys'."""
    text = text.lower()
    begun = re.findall(rf"\b(?:a|an|another|two|three)\b(?: [a-z,]+){{0,3}}? {kind}\b", text)
    return f"{kind}s" not in re.findall(r"[a-z]+", text) and len(begun) <= 1


def questions(story: str) -> Iterator[tuple[str, Example]]:
    """(kind of question, example) for all that can be asked of a story."""
    text = opening(story)
    for kind, question, answer in _ask(text):
        yield kind, Example.plain(f"Story: {text}\nQuestion: {question}\nAnswer:", answer)


def _ask(text: str) -> Iterator[tuple[str, str, str]]:
    """(kind, question, answer)."""
    named = _named(text)
    kinds, names = (Counter(column) for column in (zip(*named) if named else ((), ())))
    for kind, name in named:
        if kinds[kind] == 1 and _is_single(kind, text):
            yield "name", f"What is the {kind}'s name?", name
    for kind, name in named:
        if names[name] == 1 and kind not in _RELATIONS and not kind.endswith("s"):
            yield "kind", f"What is {name}?", f"{'an' if kind[0] in 'aeiou' else 'a'} {kind}"
    if _OTHERS_LOVED.search(text):
        return
    lovers = Counter(_LOVERS.findall(text))
    for name, verb, what in _LOVED.findall(text):
        is_plain = name not in _NOT_NAMES and _UNCLEAR.search(what) is None
        if lovers[name] == 1 and is_plain:
            yield "love", f"What did {name} {verb[:-1]} to do?", what.strip()


def open_stories(pattern: str) -> ExampleSource:
    """Questions on the stories of files; in plain text ``<|endoftext|>`` lines stand between."""
    source = file_source(pattern, rule="endoftext", column="text")

    def read(counts: Counter[str]) -> Iterator[Numbered]:
        number, held = 0, ""
        for piece in source.read():
            held += piece.text
            if piece.is_end:
                for kind, example in questions(held):
                    counts[f"questions of kind {kind}"] += 1
                    yield number, example
                number, held = number + 1, ""
        counts["stories"] += number

    identity = f"stories-{STORIES_VERSION}/{source.identity}"
    return ExampleSource(f"stories:{pattern}", identity, read, source.origin)


# ``toy:...``: tasks that a model of 260 thousand parameters learns on a CPU in some thousand steps.
#
#     toy:copy[:SIZE]      Copy: k f a z / Answer:        k f a z
#     toy:reverse[:SIZE]   Reverse: k f a z / Answer:     z a f k
#     toy:sums[:SIZE]      Sum: 3 7 + 4 5 / Answer:       8 2
#
# (the slash is a line break). Letters and digits stand apart, so that bytes and any BPE see one per
# token. SIZE is the number of letters (default: 4 to 8), or of digits of both numbers (default 2).
# With bytes, copy and reverse fit rows of 64 tokens by default.
#
# There are 20 000 examples, or as many as there are different ones, and no prompt occurs twice: the
# n-th is read off the n-th value of a keyed permutation. So whatever is held out of them has never
# been trained on.

NUM_EXAMPLES = 20_000
VERSION = 1
"""Part of the identity; raise it when examples would come out differently."""


@dataclass(frozen=True)
class _ToyTask:
    """A task by name."""

    title: str
    sizes: tuple[int, ...]
    """Where none is given: these in turn."""
    most: int
    """Largest SIZE: up to it, all prompts can be numbered in 64 bits."""


TOY_TASKS = {
    "copy": _ToyTask("Copy", (4, 5, 6, 7, 8), 12),
    "reverse": _ToyTask("Reverse", (4, 5, 6, 7, 8), 12),
    "sums": _ToyTask("Sum", (2,), 9),
}


def _toy_questions(kind: str, size: int, most: int) -> list[tuple[str, str]]:
    """Different questions and answers of one size, in a keyed order: all, or the first ``most``."""
    least = 10 ** (size - 1) if size > 1 else 0  # of a summand: no 0 in front
    span = 10**size - least
    count = span**2 if kind == "sums" else 26**size
    order = IndexPermutation(count, stream_key(0, "toy examples", kind, size))
    found = []
    for number in order(torch.arange(min(count, most))).tolist():
        if kind == "sums":
            a, b = (least + part for part in divmod(number, span))
            found.append((f"{a}+{b}", str(a + b)))
        else:
            letters = (string.ascii_lowercase[number // 26**n % 26] for n in range(size))
            word = "".join(letters)
            found.append((word, word if kind == "copy" else word[::-1]))
    return found


def open_toy(name: str) -> ExampleSource:
    """``copy``, ``reverse:6``, ``sums:3``."""
    kind, sign, size = name.partition(":")
    toy = look_up("toy task", kind, TOY_TASKS)
    if sign and not 1 <= (count_of(size) or 0) <= toy.most:
        raise UserError(f"toy:{name}: the size after toy:{kind} is a number from 1 to {toy.most}")
    sizes = (int(size),) if sign else toy.sizes

    def read(counts: Counter[str]) -> Iterator[Numbered]:
        each = -(-NUM_EXAMPLES // len(sizes))
        columns = [_toy_questions(kind, size, each) for size in sizes]
        in_turn = itertools.chain.from_iterable(zip(*columns, strict=True))
        for number, (question, answer) in enumerate(itertools.islice(in_turn, NUM_EXAMPLES)):
            prompt = f"{toy.title}: {' '.join(question)}\nAnswer:"
            yield number, Example.plain(prompt, " ".join(answer))

    return ExampleSource(f"toy:{name}", f"toy-examples-{VERSION}/{kind}/{sizes}", read, {})


# One example → one row: the prompt is given, the response and the EOS after it can be masked.
#
# A row is [BOS], prompt, response, EOS up to a multiple of ``round_to`` tokens (one at least), pads
# up to the block length. So the part to fill depends on the example alone, never on its batch.
# ``Row.start`` is the number of prompt tokens, ``Row.length`` that of prompt and filled response;
# pads are neither attended, masked nor scored. Prompt and response are encoded apart: no token
# spans both. A prompt too long for the block loses its oldest tokens; a response that does not fit
# with one token before it is left out and counted.


@dataclass(frozen=True)
class ExampleRules:
    """Everything but the template's text that decides how an example becomes a row."""

    block_length: int
    round_to: int = 32
    template: Kind = "auto"
    bos_first: bool = False


def encode_examples(
    examples: Iterable[Numbered], encoder: PromptEncoder, rules: ExampleRules, counts: Counter[str]
) -> Iterator[Row | None]:
    """The row of each example, encoded together; None where a response does not fit."""
    numbers, kept = zip(*examples)
    tokenizer = encoder.tokenizer
    prompts = [encoder.template.parts(e.prompt_messages, e.is_conversation) for e in kept]
    texts = [response_after(join(prompt), e.response) for prompt, e in zip(prompts, kept)]
    encoded = zip(numbers, encoder.encode(prompts), tokenizer.encode_batch(texts), strict=True)
    for number, prompt, response in encoded:
        canvas = -(-(len(response) + 1) // rules.round_to) * rules.round_to  # an EOS at least
        room = rules.block_length - canvas
        if room < 1 or not len(response):
            reason = "longer than the block" if room < 1 else "without tokens"
            counts[f"left out: response {reason}"] += 1
            yield None
            continue
        given, is_cut = begin_row(prompt, room, tokenizer, rules.bos_first)
        counts.update(["prompts cut on the left"] if is_cut else [])
        padding = np.full(room - len(given), tokenizer.pad_id)
        ends = np.full(canvas - len(response), tokenizer.eos_id)
        ids = np.concatenate([given, response, ends, padding])
        yield Row(ids, len(given) + canvas, number, len(given))


def begin_row(prompt: Ids, room: int, tokenizer: Tokenizer, bos_first: bool) -> tuple[Ids, bool]:
    """(BOS if need be and the prompt, its oldest tokens dropped where there is no room; are they).

    Training and generation begin a row alike.
    """
    begins = len(prompt) > 0 and prompt[0] == tokenizer.bos_id  # a template may write it
    first = [tokenizer.bos_id] if not len(prompt) or (bos_first and not begins) else []
    is_cut = len(first) + len(prompt) > room
    if is_cut:
        first = [tokenizer.bos_id] if bos_first else first
        prompt = prompt[len(prompt) - (room - len(first)) :]
    return np.concatenate([np.array(first, dtype=np.int64), prompt]), is_cut


# Examples → blocks on disk, in training and validation.
#
# Rows lie like those of text (:mod:`bellmask.data.blocks`). Documents (a conversation is one) are
# in a keyed random order, so that the last part of them is a fair sample: a mix of tasks is not
# split by task.

EXAMPLES_VERSION = 2
"""Part of every cache key; raise it when rows or counts would come out differently."""
IN_CONVERSATIONS = "answers in conversations"
"""The count of rows whose example came with roles."""
EXAMPLES_AT_ONCE = 1024


def load_example_blocks(
    data: DataOptions,
    sft: SftOptions,
    tokenizer: Tokenizer,
    chat_template: str | None = None,
    progress: Progress = NO_PROGRESS,
    bos_first: bool = False,
) -> LoadedData:
    """Training and validation rows, prepared now or taken from the cache.

    Of ``data`` the block length, the cache and the held-out share are read.
    """
    assert sft.train is not None
    rules = ExampleRules(data.block_length, sft.round_to, sft.template, bos_first)
    if rules.block_length <= rules.round_to:
        raise UserError(
            f"data.block_length={rules.block_length} has no room for a prompt and a response of "
            f"sft.round_to={rules.round_to} tokens; make it longer, or --sft.round-to smaller"
        )
    if tokenizer.eos_id < 0:
        raise UserError("examples end with EOS, which symbols do not have; use another tokenizer")
    encoder = PromptEncoder(tokenizer, make_template(sft.template, tokenizer, chat_template))
    cache = writable_cache(data)
    sources = [open_examples(name, sft, cache) for name in (sft.train, sft.valid) if name]
    if len({source.identity for source in sources}) < len(sources):
        raise UserError(
            f"sft.valid={sft.valid!r} holds the same examples as sft.train; leave it out"
        )
    made = [_prepare(source, encoder, rules, cache, progress) for source in sources]
    blocks, counts = made[0]
    if len(made) == 2:
        return LoadedData(blocks, made[1][0], counts=counts)
    return LoadedData(*_split(blocks, data.valid_fraction, sft.train), counts=counts)


def _prepare(
    source: ExampleSource,
    encoder: PromptEncoder,
    rules: ExampleRules,
    cache: Path,
    progress: Progress,
) -> tuple[Blocks, dict[str, int]]:
    """The rows of a source, and what became of its examples: rows, drops and why, tasks' shares."""
    identities = [source.identity, encoder.tokenizer.fingerprint, encoder.template.identity]
    key = fingerprint_of([*identities, asdict(rules), EXAMPLES_VERSION])
    folder = cache / "blocks" / key[:24]
    blocks = cached_blocks(
        folder, key, lambda: _write(folder, key, source, encoder, rules, progress)
    )
    card = read_card(folder)
    counts = {"rows": len(blocks), "documents": card["num_documents"], **card["counts"]}
    # the EOS fill is scored and has no bytes: bits per byte would depend on round_to
    return replace(blocks, num_bytes=0.0), counts


def _split(blocks: Blocks, fraction: float, name: str) -> tuple[Blocks, Blocks]:
    """All but the last rows, and those; between documents, so that none is in both."""
    border = len(blocks) - max(1, round(len(blocks) * fraction))
    while border > 0 and blocks.documents[border] == blocks.documents[border - 1]:
        border -= 1
    if border < 1:
        raise UserError(
            f"sft.train={name!r} has {len(blocks)} example(s) of {len(set(blocks.documents))} "
            "document(s): too few to hold some out; give more, or --sft.valid"
        )
    return blocks.slice(0, border), blocks.slice(border, len(blocks))


def _write(
    folder: Path,
    key: str,
    source: ExampleSource,
    encoder: PromptEncoder,
    rules: ExampleRules,
    progress: Progress,
) -> None:
    """Write rows as they are read, then once more in their order; the folder appears when whole."""
    counts: Counter[str] = Counter()
    dtype, per_shard = token_dtype(encoder.tokenizer), rows_per_shard(rules.block_length)
    marks: list[tuple[int, int, int]] = []
    with whole_folder(folder, "prepared examples") as scratch:
        draft = scratch / "draft.bin"
        examples = source.read(counts)
        with draft.open("wb") as stream:
            while batch := list(itertools.islice(examples, EXAMPLES_AT_ONCE)):
                encoded = encode_examples(batch, encoder, rules, counts)
                for (_, example), row in zip(batch, encoded, strict=True):
                    if row is not None:
                        counts.update([IN_CONVERSATIONS] if example.is_conversation else [])
                        stream.write(row.ids.astype(dtype).tobytes())
                        marks.append((row.length, row.document, row.start))
                progress.advance(len(batch), f"{len(marks):,} rows")
        if not marks:
            reasons = ", ".join(f"{name}: {n}" for name, n in sorted(counts.items())) or "none read"
            raise UserError(
                f"{source.name} gives no example that fits data.block_length="
                f"{rules.block_length} ({reasons})"
            )
        columns = np.array(marks, dtype=np.int64).T
        documents = torch.from_numpy(columns[1].copy())
        order = torch.argsort(hash_counters(stream_key(0, "examples"), documents), stable=True)
        drafted = np.memmap(draft, dtype=dtype, mode="r").reshape(-1, rules.block_length)
        for number, rows in enumerate(order.split(per_shard)):
            drafted[rows.numpy()].tofile(shard_path(scratch, number))
        for name, column in zip(("lengths", "documents", "starts"), columns, strict=True):
            column[order.numpy()].tofile(scratch / f"{name}.bin")
        draft.unlink()
        card: dict[str, Any] = {
            "fingerprint": key,
            "source": source.name,
            "origin": source.origin,
            "num_blocks": len(marks),
            "block_length": rules.block_length,
            "num_documents": len(documents.unique()),
            "num_bytes": 0,
            "has_starts": True,
            "counts": dict(sorted(counts.items())),
            **asdict(rules),
            "rows_per_shard": per_shard,
            "dtype": dtype.name,
        }
        write_card(scratch, card)
