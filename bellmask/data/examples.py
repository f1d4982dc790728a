"""Examples for fine-tuning: opened by name, turned into rows, stored as blocks.

They come from files, the hub, the task mix, ShareGPT or toy tasks. Every source yields (document,
example) pairs in a fixed order; see
:class:`bellmask.data.chat_templates.ExampleSource`.
"""

from __future__ import annotations

import html
import itertools
import re
import string
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch

from bellmask.config.options import DataOptions, SftOptions
from bellmask.data import blocks as block_files
from bellmask.data import chat_templates as chat
from bellmask.data.blocks import BlockFolder, Blocks, LoadedData, Row
from bellmask.data.chat_templates import Example, ExampleSource, Message, Numbered, PromptEncoder
from bellmask.data.readers import Record, is_word, open_records, text_of
from bellmask.data.tasks import open_tasks
from bellmask.data.tokenizers import Ids, Tokenizer
from bellmask.utils.errors import UserError, look_up
from bellmask.utils.files import count_of, sanitize, whole_folder
from bellmask.utils.progress import NO_PROGRESS, Progress
from bellmask.utils.rng import IndexPermutation, hash_counters, stream_key

# Examples by name.


def open_examples(source: str, counts: tuple[str, ...] = ()) -> ExampleSource:
    """The examples that ``--sft.train`` or ``--sft.valid`` names, not read yet.

    ``counts`` (``--sft.counts``) is for the task mix.
    """
    kind, sign, rest = source.partition(":")
    if source == "tasks":
        return open_tasks(None, counts)
    if kind in ("tasks", *_OPENERS) and sign and not Path(source).exists():
        if not rest:
            raise UserError(f"{source!r}: a value after {kind}: is missing")
        return open_tasks(rest, counts) if kind == "tasks" else _OPENERS[kind](rest)
    if is_word(source):
        kinds = ".jsonl, .json or .parquet file, tasks, tasks:FOLDER, hub:OWNER/NAME, sharegpt:FILE"
        raise UserError(f"unknown examples {source!r} (a {kinds}, toy:copy, toy:reverse, toy:sums)")
    return example_files(source)


def turns(messages: Sequence[Message]) -> tuple[Example, ...]:
    """A conversation as one example per assistant turn, what came before as its prompt."""
    return tuple(
        Example(tuple(messages[: place + 1]), is_conversation=True)
        for place, message in enumerate(messages)
        if message.role == "assistant" and place > 0
    )


def first_answers(source: ExampleSource) -> ExampleSource:
    """Only the first answer of each conversation; other examples are unchanged."""

    def read(counts: Counter[str]) -> Iterator[Numbered]:
        return (numbered for numbered in source.read(counts) if numbered[1].is_first_answer)

    return replace(source, identity=f"{source.identity}/first answers", read=read)


# Cleaning of conversations: ShareGPT's, and any list of turns with roles.
#
# Tidying (:func:`tidy`), in this order:
#
# - roles get one name each (human, user; gpt, chatgpt, bing, bard, assistant, model; system); a
#   conversation with any other role is left out;
# - empty turns go;
# - turns before the first human one go, but a system message at the start stays; later ones go;
# - turns of one side in a row become one, a blank line between: a person who writes twice before
#   the answer, or an answer that was continued;
# - what follows the last answer goes;
# - a conversation in which nobody answers is left out.
#
# ShareGPT's pages were saved from a browser. :func:`clean_text` removes known artifacts: buttons
# and page marks ("Copy code", "2 / 2"), wrappers (div, span, p, br) and entities, never inside
# code. Each reason is counted.

ROLES: dict[str, chat.Role] = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "bing", "bard", "assistant", "model"), "assistant"),
    "system": "system",
}
OUT = "left out: "
"""Prefix of the names of counts of dropped conversations."""

_FENCE = re.compile(r"(```.*?(?:```|\Z)|`[^`\n]+`)", re.DOTALL)
_COPY_CODE = re.compile(r"(```[^\S\n]*[\w+#.-]*?)\s?Copy code[^\S\n]*")
_WRAPPER = re.compile(r"</?(?:div|span|p)(?:\s[^<>]*)?/?>|<br\s*/?>", re.IGNORECASE)
_COPY_CHARS = re.compile(r"^[^\S\n]*Copy\d+ chars / \d+ words[^\S\n]*\n?", re.MULTILINE)
_ENTITY = re.compile(r"&(?:lt|gt|amp|quot|nbsp|#39|#x27);")
_PAGE_MARK = re.compile(r"(?:\n[^\S\n]*\d{1,3} / \d{1,3}|(?<=[.!?:)\"'])\s*(\d{1,3}) / \1)\s*\Z")


def clean_text(text: str, role: chat.Role) -> str:
    """A turn without artifacts of the page around it; code is not changed.

    A page mark ends a person's text: "n / m" on a line of its own, "n / n" after a sentence.
    """
    text = _COPY_CODE.sub(r"\1\n", text).replace("\r\n", "\n")
    parts = _FENCE.split(text)
    parts[::2] = [_clean_prose(part) for part in parts[::2]]
    text = "".join(parts)
    return (_PAGE_MARK.sub("", text) if role == "user" else text).strip()


def _clean_prose(text: str) -> str:
    text = _COPY_CHARS.sub("", text)
    text = _WRAPPER.sub(lambda found: "\n" if "br" in found[0].lower() else "", text)
    return _ENTITY.sub(lambda found: html.unescape(found[0]).replace("\xa0", " "), text)


def tidy(
    said: Iterable[tuple[str, str]],
    counts: Counter[str],
    clean: Callable[[str, chat.Role], str] = lambda text, role: text,
) -> tuple[Message, ...]:
    """(role, text) pairs as a conversation: system?, then user and assistant in turn; or nothing.

    ``counts`` receives the reason for a dropped conversation, and the numbers of dropped and joined
    turns.
    """
    kept: list[Message] = []
    for name, text in said:
        role = ROLES.get(name.strip().lower())
        if role is None:
            counts[f"{OUT}role {name!r} is unknown"] += 1
            return ()
        _add(kept, Message(role, clean(text, role)), counts)
    while kept and kept[-1].role != "assistant":
        kept.pop()
        counts["turns without an answer"] += 1
    if not kept:
        counts[f"{OUT}nobody answers"] += 1
    return tuple(kept)


def _add(kept: list[Message], new: Message, counts: Counter[str]) -> None:
    """Append a turn, or drop it, or join it to the previous one."""
    has_begun = any(message.role == "user" for message in kept)
    if not new.text.strip():
        counts["turns empty"] += 1
    elif new.role == "assistant" and not has_begun:
        counts["turns before the first question"] += 1
    elif new.role == "system" and kept:
        counts["turns of the system on the way"] += 1
    elif kept and kept[-1].role == new.role:
        kept[-1] = Message(new.role, f"{kept[-1].text}\n\n{new.text}")
        counts["turns joined to the one before"] += 1
    else:
        kept.append(new)


def clean_conversation(record: Record, counts: Counter[str]) -> tuple[Message, ...]:
    """One ShareGPT record ({"conversations": [{"from", "value"}]}) tidied and cleaned."""
    listed = record.get("conversations", record.get("items"))
    if not isinstance(listed, Sequence) or not all(isinstance(turn, dict) for turn in listed):
        counts[f"{OUT}no list of turns"] += 1
        return ()
    values = [(str(turn.get("from")), turn.get("value")) for turn in listed]
    said = [(name, sanitize(text) if isinstance(text, str) else "") for name, text in values]
    return tidy(said, counts, clean_text)


# Paper: App. C.1: fine-tuning
def open_sharegpt(address: str) -> ExampleSource:
    """One example per answer; all examples of a conversation are one document."""
    source = open_records(address, f"sharegpt:{address}")

    def read(counts: Counter[str]) -> Iterator[Numbered]:
        numbers: dict[str, int] = {}
        for place, record in enumerate(source.read()):
            counts["conversations"] += 1
            # long conversations were cut into parts with the ids ID_0, ID_7, ...
            name = re.sub(r"_\d+\Z", "", str(record.get("id") or "")) or f"\n{place}"
            number = numbers.setdefault(name, len(numbers))
            for example in turns(clean_conversation(record, counts)):
                yield number, example

    return ExampleSource(source.name, f"sharegpt-1/{source.identity}", read, source.origin)


# Records → examples.

PAIRS = {"prompt": "response", "instruction": "output", "question": "answer"}
"""Column of the prompt → column of the response. ``input``, if any, follows an instruction."""
LISTS = {"messages": ("role", "content"), "conversations": ("from", "value")}
"""Column of the turns → keys of (role, text) in a turn."""


def examples_of(record: Record, counts: Counter[str], place: str) -> tuple[Example, ...]:
    """The examples of a record: one, or one per assistant turn; none if it has no response."""
    for column, (role, text) in LISTS.items():
        if column in record:
            listed = record[column]
            if not isinstance(listed, list) or not all(isinstance(turn, dict) for turn in listed):
                raise UserError(f"{place}: {column!r} is not a list of turns with roles")
            said = [(str(turn.get(role)), text_of(turn, text, place)) for turn in listed]
            return turns(tidy(said, counts))
    for asked, answered in PAIRS.items():
        if asked in record and answered in record:
            prompt, response = (text_of(record, column, place) for column in (asked, answered))
            extra = text_of(record, "input", place) if asked == "instruction" else ""
            prompt = f"{prompt}\n\n{extra}" if extra.strip() else prompt
            if not response.strip():
                counts["left out: no response"] += 1
                return ()
            return (Example.plain(prompt, response),)
    allowed = [f"{asked} and {answered}" for asked, answered in PAIRS.items()]
    raise UserError(
        f"{place} has the columns {', '.join(map(str, record)) or '(none)'}; an example needs "
        f"{', or '.join([*allowed, *LISTS])}"
    )


def example_files(address: str) -> ExampleSource:
    """Examples of local files (path or glob) or of a data set on the hub, by their columns."""
    source = open_records(address, address)

    def read(counts: Counter[str]) -> Iterator[Numbered]:
        for number, record in enumerate(source.read()):
            place = f"{source.name}, record {number + 1}"
            for example in examples_of(record, counts, place):
                yield number, example

    return ExampleSource(source.name, f"records-1/{source.identity}", read, source.origin)


# ``toy:...``: tasks that a model of 260 thousand parameters learns on a CPU in some thousand steps.
#
#     toy:copy[:SIZE]      Copy: k f a z / Answer:        k f a z
#     toy:reverse[:SIZE]   Reverse: k f a z / Answer:     z a f k
#     toy:sums[:SIZE]      Sum: 3 7 + 4 5 / Answer:       8 2
#
# (the slash is a line break). Letters and digits are separated, so that bytes and any BPE use one
# token for each. SIZE is the number of letters (default: 4 to 8), or of digits of both numbers
# (default 2). With bytes, copy and reverse fit rows of 64 tokens by default.
#
# There are 20 000 examples, or as many as there are different ones, and no prompt occurs twice: the
# n-th is read off the n-th value of a keyed permutation. So held-out examples never occur in
# training.

NUM_EXAMPLES = 20_000
VERSION = 1
"""Part of the identity; raise it when examples would come out differently."""


TOY_TASKS = {
    "copy": ("Copy", (4, 5, 6, 7, 8), 12),
    "reverse": ("Reverse", (4, 5, 6, 7, 8), 12),
    "sums": ("Sum", (2,), 9),
}
"""Title, alternating default sizes, and the largest size: up to it, all prompts can be numbered
in 64 bits."""


def _toy_questions(kind: str, size: int, most: int) -> list[tuple[str, str]]:
    """Distinct questions and answers of one size, in a keyed order: all, or the first ``most``."""
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
    kind, sign, size = name.partition(":")
    title, sizes, most = look_up("toy task", kind, TOY_TASKS)
    if sign:
        if not 1 <= (count_of(size) or 0) <= most:
            raise UserError(f"toy:{name}: the size after toy:{kind} is a number from 1 to {most}")
        sizes = (int(size),)

    def read(counts: Counter[str]) -> Iterator[Numbered]:
        each = -(-NUM_EXAMPLES // len(sizes))
        columns = [_toy_questions(kind, size, each) for size in sizes]
        in_turn = itertools.chain.from_iterable(zip(*columns, strict=True))
        for number, (question, answer) in enumerate(itertools.islice(in_turn, NUM_EXAMPLES)):
            prompt = f"{title}: {' '.join(question)}\nAnswer:"
            yield number, Example.plain(prompt, " ".join(answer))

    return ExampleSource(f"toy:{name}", f"toy-examples-{VERSION}/{kind}/{sizes}", read, {})


_OPENERS = {"sharegpt": open_sharegpt, "toy": open_toy}


# One example → one row: the prompt is given, response and EOS can be masked.
#
# A row is [BOS], prompt, response, EOS up to a multiple of ``round_to`` tokens (one at least), pads
# up to the block length. So the part to fill depends on the example alone, never on its batch.
# ``Row.start`` is the number of prompt tokens, ``Row.length`` that of prompt and filled response;
# pads are neither attended, masked nor scored. Prompt and response are encoded separately: no token
# spans both. A prompt too long for the block loses its oldest tokens; a response that does not fit
# with one token before it is left out and counted.


@dataclass(frozen=True)
class ExampleRules:
    """Everything except the template that determines how an example becomes a row."""

    block_length: int
    round_to: int = 32
    template: chat.Kind = "auto"
    bos_first: bool = False


# Paper: App. C.1: fine-tuning
def encode_examples(
    examples: Iterable[Numbered], encoder: PromptEncoder, rules: ExampleRules, counts: Counter[str]
) -> Iterator[Row | None]:
    """The row of each example, encoded together; None where a response does not fit."""
    numbers, kept = zip(*examples)
    tokenizer = encoder.tokenizer
    prompts = [encoder.template.parts(e.prompt_messages, e.is_conversation) for e in kept]
    texts = [chat.response_after(chat.join(p), e.response) for p, e in zip(prompts, kept)]
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
        raise UserError(f"data.block_length must be above sft.round_to={rules.round_to}")
    encoder = PromptEncoder(tokenizer, chat.make_template(sft.template, tokenizer, chat_template))
    cache = block_files.writable_cache(data)
    sources = [open_examples(name, sft.counts) for name in (sft.train, sft.valid) if name]
    if sft.turns == "first":
        sources = [first_answers(source) for source in sources]
    if len({source.identity for source in sources}) < len(sources):
        raise UserError(f"sft.valid={sft.valid!r} has the same examples as sft.train; omit it")

    def prepare(source: ExampleSource) -> tuple[Blocks, dict[str, int]]:
        """Rows, and statistics of the examples: rows, drops with reasons, tasks."""
        parts = [source.identity, tokenizer.fingerprint, encoder.template.identity]
        key = [*parts, asdict(rules), EXAMPLES_VERSION]
        place = BlockFolder(cache, key, source, tokenizer, rules.block_length)
        blocks = place.blocks(lambda: _write(place, encoder, rules, progress))
        card = block_files.read_card(place.path)
        counts = {"rows": len(blocks), "documents": card["num_documents"], **card["counts"]}
        # the EOS fill is scored and has no bytes: bits per byte would depend on round_to
        return replace(blocks, num_bytes=0.0), counts

    (blocks, counts), *others = map(prepare, sources)
    if others:
        return LoadedData(blocks, others[0][0], counts=counts)
    name = f"sft.train={sft.train!r}"
    parts = block_files.hold_out(blocks, data.valid_fraction, name, whole_documents=True)
    return LoadedData(*parts, counts=counts)


def _write(
    place: BlockFolder, encoder: PromptEncoder, rules: ExampleRules, progress: Progress
) -> None:
    """Write rows as they are read, then in their order; the folder appears when complete."""
    source, dtype = place.source, place.dtype
    counts: Counter[str] = Counter()
    marks: list[tuple[int, int, int]] = []
    with whole_folder(place.path, "prepared examples") as scratch:
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
            raise UserError(f"no example of {source.name} fits data.block_length ({reasons})")
        columns = np.array(marks, dtype=np.int64).T
        documents = torch.from_numpy(columns[1].copy())
        order = torch.argsort(hash_counters(stream_key(0, "examples"), documents), stable=True)
        drafted = np.memmap(draft, dtype=dtype, mode="r").reshape(-1, rules.block_length)
        for number, rows in enumerate(order.split(place.per_shard)):
            drafted[rows.numpy()].tofile(block_files.shard_path(scratch, number))
        for name, column in zip(("lengths", "documents", "starts"), columns, strict=True):
            column[order.numpy()].tofile(scratch / f"{name}.bin")
        draft.unlink()
        place.write_card(
            scratch,
            num_blocks=len(marks),
            num_documents=len(documents.unique()),
            num_bytes=0,
            has_starts=True,
            counts=dict(sorted(counts.items())),
        )
