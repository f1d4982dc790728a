"""``stories:FILE``: questions whose answer stands in the story, for text like TinyStories.

A prompt is "Story: ", the story's first sentences (up to about 60 words), "Question: ..." and
"Answer:". Three kinds are asked, each only where a careful pattern leaves one answer:

    name   "a little girl named Lily"     What is the girl's name?      Lily
    kind   "a little car named Beep"      What is Beep?                 a car
    love   "Max loved to run and play."   What did Max love to do?      run and play

Questions on one story are one document, so that no story is both trained and validated on.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator

from bellmask.data.messages import Example, ExampleSource, Numbered
from bellmask.data.sources import file_source

MOST_WORDS = 60
"""Sentences are taken while the story told so far has no more words."""
VERSION = 1
"""Part of the identity; raise it when questions would come out differently."""

_SENTENCE = re.compile(r"[^.!?]*[.!?]+[\"'\u201d\u2019]*\s*")
_NAMED = re.compile(r"\b([a-z]+) (?:named|called) ([A-Z][a-z]+)\b(?!'|-| [A-Z])")
_PAIRED = re.compile(r"\s*(?:,|and)\s*(?:and\s+)?[A-Z]")
_LOVED = re.compile(r"(?:(?<=[.!?] )|^)([A-Z][a-z]+) (loved|liked) to ([a-z][a-z ]*)\.")
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
    found = []
    for match in _NAMED.finditer(text):
        is_plain = match[1] not in _NOT_KINDS and match[2] not in _NOT_NAMES
        if is_plain and not _PAIRED.match(text, match.end()):
            found.append((match[1], match[2]))
    return found


def _is_single(kind: str, text: str) -> bool:
    """True when a story speaks of one such being only: 'boy' once with a or another, no 'boys'."""
    words = re.findall(r"[a-z]+", text.lower())
    begun = re.findall(
        rf"\b(?:a|an|another|two|three)\b(?: [a-z,]+){{0,3}}? {kind}\b", text.lower()
    )
    return f"{kind}s" not in words and len(begun) <= 1


def ask_name(text: str) -> Iterator[tuple[str, str]]:
    """What somebody is called, where one being of the kind has a name."""
    named = _named(text)
    kinds = Counter(kind for kind, _ in named)
    for kind, name in named:
        if kinds[kind] == 1 and _is_single(kind, text):
            yield f"What is the {kind}'s name?", name


def ask_kind(text: str) -> Iterator[tuple[str, str]]:
    """What somebody with a name is."""
    named = _named(text)
    names = Counter(name for _, name in named)
    for kind, name in named:
        if names[name] == 1 and kind not in _RELATIONS and not kind.endswith("s"):
            yield f"What is {name}?", f"{'an' if kind[0] in 'aeiou' else 'a'} {kind}"


def ask_love(text: str) -> Iterator[tuple[str, str]]:
    """What somebody loved or liked to do, where it is said once, in one plain sentence."""
    found = _LOVED.findall(text)
    names = Counter(re.findall(r"\b([A-Z][a-z]+) (?:also |always )?(?:loved|liked)\b", text))
    others = re.search(r"\b(?:He|She|It|They|he|she|it|they) (?:also )?(?:loved|liked) to\b", text)
    for name, verb, what in found:
        is_plain = name not in _NOT_NAMES and _UNCLEAR.search(what) is None
        if names[name] == 1 and others is None and is_plain:
            yield f"What did {name} {verb[:-1]} to do?", what.strip()


KINDS: dict[str, Callable[[str], Iterator[tuple[str, str]]]] = {
    "name": ask_name,
    "kind": ask_kind,
    "love": ask_love,
}


def questions(story: str) -> Iterator[tuple[str, Example]]:
    """(kind of question, example) for all that can be asked of a story."""
    text = opening(story)
    for kind, ask in KINDS.items():
        for question, answer in ask(text):
            yield kind, Example.plain(f"Story: {text}\nQuestion: {question}\nAnswer:", answer)


def open_stories(pattern: str) -> ExampleSource:
    """Questions on the stories of files; in plain text ``<|endoftext|>`` lines stand between."""
    source = file_source(pattern, rule="endoftext", column="text")

    def read(counts: Counter[str]) -> Iterator[Numbered]:
        number, held = 0, ""
        for piece in source.pieces():
            held += piece.text
            if piece.is_end:
                for kind, example in questions(held):
                    counts[f"questions of kind {kind}"] += 1
                    yield number, example
                number, held = number + 1, ""
        counts["stories"] += number

    identity = f"stories-{VERSION}/{source.identity}"
    return ExampleSource(f"stories:{pattern}", identity, read, source.origin)
