"""Examples for fine-tuning: from records of files or the hub, and from conversations.

Records (dicts) come from JSONL, JSON, Parquet and Arrow files or the hub. A record is a prompt with
its response under one of a few well-known pairs of column names, or a list of messages with roles.
What it is, is told by its columns; anything else is refused by name.
"""

from __future__ import annotations

import html
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from bellmask.data.readers import Record, RecordSource, Source, open_records, text_of
from bellmask.utils.errors import UserError
from bellmask.utils.files import sanitize

# An example for fine-tuning: what is given (the prompt) and what is learned (the response).

Role = Literal["system", "user", "assistant"]


@dataclass(frozen=True)
class Message:
    """What one side said."""

    role: Role
    text: str


@dataclass(frozen=True)
class Example:
    """Messages of which the last, the assistant's, is the response; all before is the prompt."""

    messages: tuple[Message, ...]
    is_conversation: bool = False
    """It came with roles, so that ``--sft.template auto`` marks them."""

    @staticmethod
    def plain(prompt: str, response: str) -> Example:
        """A prompt and its response, without roles of their own."""
        return Example((Message("user", prompt), Message("assistant", response)))

    @property
    def prompt_messages(self) -> tuple[Message, ...]:
        """All but the response."""
        return self.messages[:-1]

    @property
    def response(self) -> str:
        """The text to be learned."""
        return self.messages[-1].text


def turns(messages: Sequence[Message]) -> tuple[Example, ...]:
    """A conversation as one example per assistant turn, what came before as its prompt."""
    return tuple(
        Example(tuple(messages[: place + 1]), is_conversation=True)
        for place, message in enumerate(messages)
        if message.role == "assistant" and place > 0
    )


Numbered = tuple[int, Example]
"""(document, example). A conversation's turns, or questions on one story, are one document: they
are never spread over training and validation."""


ExampleSource = Source[Numbered]
"""Its ``read`` takes a Counter, which is told what was taken and what was left out, and why."""


# Conversations made fit to learn from: ShareGPT's, and any list of turns with roles.
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
# ShareGPT's pages were saved from a browser. :func:`clean_text` takes out what is known to have
# come along: buttons and page marks ("Copy code", "2 / 2"), wrappers (div, span, p, br) and
# entities, never inside code. Each reason is counted.

ROLES: dict[str, Role] = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "bing", "bard", "assistant", "model"), "assistant"),
    "system": "system",
}
OUT = "left out: "
"""What the names of counts of conversations that were dropped begin with."""

_FENCE = re.compile(r"(```.*?(?:```|\Z)|`[^`\n]+`)", re.DOTALL)
_COPY_CODE = re.compile(r"(```[^\S\n]*[\w+#.-]*?)\s?Copy code[^\S\n]*")
_WRAPPER = re.compile(r"</?(?:div|span|p)(?:\s[^<>]*)?/?>|<br\s*/?>", re.IGNORECASE)
_COPY_CHARS = re.compile(r"^[^\S\n]*Copy\d+ chars / \d+ words[^\S\n]*\n?", re.MULTILINE)
_ENTITY = re.compile(r"&(?:lt|gt|amp|quot|nbsp|#39|#x27);")
_PAGE_MARK = re.compile(r"(?:\n[^\S\n]*\d{1,3} / \d{1,3}|(?<=[.!?:)\"'])\s*(\d{1,3}) / \1)\s*\Z")


def clean_text(text: str, role: Role) -> str:
    """A turn without what the page around it left behind; code is not touched.

    A page mark ends what a person wrote: "n / m" on a line of its own, "n / n" after a sentence.
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
    clean: Callable[[str, Role], str] = lambda text, role: text,
) -> tuple[Message, ...]:
    """(role, text) pairs as a conversation: system?, then user and assistant in turn; or nothing.

    ``counts`` is told why a conversation was left out, and how many turns were dropped or joined.
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
    """Append a turn, unless it is to be dropped or joined to the one before."""
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


def from_sharegpt(source: RecordSource) -> ExampleSource:
    """One example per answer; parts of one conversation are one document."""

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


def from_records(source: RecordSource) -> ExampleSource:
    """Examples of records by their columns."""

    def read(counts: Counter[str]) -> Iterator[Numbered]:
        for number, record in enumerate(source.read()):
            place = f"{source.name}, record {number + 1}"
            for example in examples_of(record, counts, place):
                yield number, example

    return ExampleSource(source.name, f"records-1/{source.identity}", read, source.origin)


def example_files(address: str) -> ExampleSource:
    """Examples of local files (path or glob) or of a data set on the hub."""
    return from_records(open_records(address, address))
