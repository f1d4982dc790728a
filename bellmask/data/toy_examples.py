"""Tasks that a model of 260 thousand parameters learns on a CPU in some thousand steps.

    toy:copy[:SIZE]      Copy: k f a z / Answer:        k f a z
    toy:reverse[:SIZE]   Reverse: k f a z / Answer:     z a f k
    toy:sums[:SIZE]      Sum: 3 7 + 4 5 / Answer:       8 2

(the slash is a line break). Letters and digits stand apart, so that bytes and any BPE see one per
token. SIZE is the number of letters (default: 4 to 8), or of digits of both numbers (default 2).
With bytes, copy and reverse fit rows of 64 tokens by default.

There are 20 000 examples, or as many as there are different ones, and no prompt occurs twice: the
n-th is read off the n-th value of a keyed permutation. So whatever is held out of them has never
been trained on.
"""

from __future__ import annotations

import string
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from bellmask.data.messages import Example, ExampleSource, Numbered
from bellmask.utils.errors import UserError, look_up
from bellmask.utils.files import count_of
from bellmask.utils.rng import IndexPermutation, stream_key

NUM_EXAMPLES = 20_000
DEFAULT_LENGTHS = (4, 5, 6, 7, 8)
VERSION = 1
"""Part of the identity; raise it when examples would come out differently."""


@dataclass(frozen=True)
class _Toy:
    """A task by name: (sizes, key) → examples."""

    examples: Callable[[tuple[int, ...], str], list[Example]]
    sizes: tuple[int, ...]
    most: int
    """Largest SIZE: up to it, all prompts can be numbered in 64 bits."""


def _spaced(text: str) -> str:
    return " ".join(text)


def _distinct(count: int, most: int, *path: str | int) -> list[int]:
    """Different numbers below ``count``, in a keyed order: all, or the first ``most``."""
    order = IndexPermutation(count, stream_key(0, "toy examples", *path))
    return order(torch.arange(min(count, most))).tolist()


def _letters(number: int, size: int) -> str:
    """The word of ``size`` letters with this number."""
    word = ""
    for _ in range(size):
        number, letter = divmod(number, 26)
        word += string.ascii_lowercase[letter]
    return word


def _words(sizes: tuple[int, ...], name: str) -> list[str]:
    """Different words, the lengths in turn."""
    each = -(-NUM_EXAMPLES // len(sizes))
    columns = [
        [_letters(number, size) for number in _distinct(26**size, each, name, size)]
        for size in sizes
    ]
    return [word for row in zip(*columns, strict=True) for word in row][:NUM_EXAMPLES]


def _copy(sizes: tuple[int, ...], name: str) -> list[Example]:
    return [
        Example.plain(f"Copy: {_spaced(word)}\nAnswer:", _spaced(word))
        for word in _words(sizes, name)
    ]


def _reverse(sizes: tuple[int, ...], name: str) -> list[Example]:
    return [
        Example.plain(f"Reverse: {_spaced(word)}\nAnswer:", _spaced(word[::-1]))
        for word in _words(sizes, name)
    ]


def _sums(sizes: tuple[int, ...], name: str) -> list[Example]:
    """Both numbers have SIZE digits, the first of which is not 0 (but for SIZE 1)."""
    (size,) = sizes
    least = 10 ** (size - 1) if size > 1 else 0
    span = 10**size - least
    examples = []
    for number in _distinct(span * span, NUM_EXAMPLES, name, size):
        a, b = (least + part for part in divmod(number, span))
        prompt = f"Sum: {_spaced(str(a))} + {_spaced(str(b))}\nAnswer:"
        examples.append(Example.plain(prompt, _spaced(str(a + b))))
    return examples


TOYS = {
    "copy": _Toy(_copy, DEFAULT_LENGTHS, 12),
    "reverse": _Toy(_reverse, DEFAULT_LENGTHS, 12),
    "sums": _Toy(_sums, (2,), 9),
}


def open_toy(name: str) -> ExampleSource:
    """``toy:copy``, ``toy:reverse:6``, ``toy:sums:3``."""
    kind, sign, size = name.removeprefix("toy:").partition(":")
    toy = look_up("toy task", kind, TOYS)
    if sign and not 1 <= (count_of(size) or 0) <= toy.most:
        raise UserError(f"{name}: the size after toy:{kind} is a number from 1 to {toy.most}")
    sizes = (int(size),) if sign else toy.sizes

    def read(counts: Counter[str]) -> Iterator[Numbered]:
        yield from enumerate(toy.examples(sizes, kind))

    return ExampleSource(name, f"toy-examples-{VERSION}/{kind}/{sizes}", read, {})
