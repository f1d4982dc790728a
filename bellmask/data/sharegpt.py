"""Conversations made fit to learn from: ShareGPT's, and any list of turns with roles.

Tidying (:func:`tidy`), in this order:
- roles get one name each (human, user; gpt, chatgpt, bing, bard, assistant, model; system); a
  conversation with any other role is left out;
- empty turns go;
- turns before the first human one go, but a system message at the start stays; later ones go;
- turns of one side in a row become one, a blank line between: a person who writes twice before the
  answer, or an answer that was continued;
- what follows the last answer goes;
- a conversation in which nobody answers is left out.

ShareGPT's pages were saved from a browser. :func:`clean_text` takes out what is known to have come
along: buttons and page marks ("Copy code", "2 / 2"), wrappers (div, span, p, br) and entities,
never inside code. Each reason is counted.
"""

from __future__ import annotations

import html
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from bellmask.data.messages import ExampleSource, Message, Numbered, Role, turns

if TYPE_CHECKING:
    from bellmask.data.example_files import RecordSource

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


def clean_conversation(record: dict[str, Any], counts: Counter[str]) -> tuple[Message, ...]:
    """One ShareGPT record ({"conversations": [{"from", "value"}]}) tidied and cleaned."""
    listed = record.get("conversations", record.get("items"))
    if not isinstance(listed, Sequence) or not all(isinstance(turn, dict) for turn in listed):
        counts[f"{OUT}no list of turns"] += 1
        return ()
    said = [(str(turn.get("from")), _text(turn.get("value"))) for turn in listed]
    return tidy(said, counts, clean_text)


def _text(value: Any) -> str:
    return value.encode("utf-8", "replace").decode("utf-8") if isinstance(value, str) else ""


def conversation_id(record: dict[str, Any]) -> str:
    """The id without its part number: long conversations were cut into ``ID_0``, ``ID_7``, ..."""
    return re.sub(r"_\d+\Z", "", str(record.get("id") or ""))


def from_sharegpt(source: RecordSource) -> ExampleSource:
    """One example per answer; parts of one conversation are one document."""

    def read(counts: Counter[str]) -> Iterator[Numbered]:
        numbers: dict[str, int] = {}
        for place, record in enumerate(source.read()):
            counts["conversations"] += 1
            name = conversation_id(record) or f"\n{place}"
            number = numbers.setdefault(name, len(numbers))
            for example in turns(clean_conversation(record, counts)):
                yield number, example

    return ExampleSource(source.name, f"sharegpt-1/{source.identity}", read, source.origin)
