"""Benchmark corpora back to plain text, by the rules that published perplexities assume.

LM1B, PTB, WikiText, LAMBADA and scientific papers come as spaced tokens ("it 's here ."). The
perplexities of the SEDD and MDLM line of work are over text rejoined by fixed string rules, so
the rules are part of the benchmark: they are kept as published, blemishes included (each noted at
its row), and in the published order. A detokenizer is a pure function of one document; it takes
any text, and applying it twice is not always the same as once (a second pass may pair a closing
quote with the next opening one).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from functools import partial

from bellmask.utils.errors import look_up

DetokenizeRule = tuple[str | re.Pattern[str], str] | Callable[[str], str]
"""(what to find, what to put there), or a function where a row cannot say it."""


def _rejoin(text: str, rules: Iterable[DetokenizeRule]) -> str:
    """The text after each rule in turn, every rule over the whole text."""
    for rule in rules:
        if not isinstance(rule, tuple):
            text = rule(text)
            continue
        found, put = rule
        text = text.replace(found, put) if isinstance(found, str) else found.sub(put, text)
    return text


def _close_up(marks: str) -> list[DetokenizeRule]:
    """No space before these marks where a space follows: ``a , b`` becomes ``a, b``."""
    return [(f" {mark} ", f"{mark} ") for mark in marks]


def _unspace(left: str, right: str) -> DetokenizeRule:
    """Drops one space at either inner side of a pair that has both, innermost pairs only."""
    inside = f"[^{re.escape(left + right)}]+"
    pair = re.compile(f"{re.escape(left)} ({inside}) {re.escape(right)}")
    return pair, rf"{left}\1{right}"


def _strip_inside(left: str, right: str) -> DetokenizeRule:
    """Drops all white space at the inner sides of a pair, from an opening to the next closing.

    A function because the one regex that says it backtracks quadratically over long white space.
    """
    pair = re.compile(f"{re.escape(left)}([^{re.escape(right)}]*){re.escape(right)}")
    return lambda text: pair.sub(lambda match: f"{left}{match[1].strip()}{right}", text)


# One Billion Word, one sentence; nothing but spaces is taken away.
_LM1B: tuple[DetokenizeRule, ...] = (
    # Addresses first: the rules for " : " and " / " would leave "http:// example.com".
    ("http : / / ", "http://"),
    ("https : / / ", "https://"),
    # Suffixes ("it 's") before pairs of single quotes, which they would otherwise close.
    (re.compile(r" '(?=\w)"), "'"),
    # A full stop closes up only after a spaced plain word: "4.4 % ." and "( so ) ." stay, and so
    # does every other one of "x . y . z .", whose shared spaces are taken. Two rows, because the
    # second finds the space that the first has given back.
    (re.compile(r"( \w+) \. "), r"\1. "),
    (re.compile(r"( \w+) \.$"), r"\1."),
    *_close_up("?"),
    (re.compile(r" \?$"), "?"),
    *_close_up("!"),
    (re.compile(r" !$"), "!"),
    *_close_up(",:;"),
    (" / ", "/"),
    # After the marks, which need the space that a closing quote or bracket has before it.
    _unspace('"', '"'),
    _unspace("'", "'"),
    _unspace("(", ")"),
    _unspace("[", "]"),
    ("$ ", "$"),
    ("£ ", "£"),
)

# WikiText-2 and -103. One published rule is left out: it was meant for years ("' 90"), but matches
# only between two slashes, where it would write its own pattern into the text.
_WIKITEXT: tuple[DetokenizeRule, ...] = (
    # Plural possessives; it also takes the space before a quotation that follows an "s".
    ("s '", "s'"),
    (" @-@ ", "-"),
    (" @,@ ", ","),
    (" @.@ ", "."),
    # Before the newline rules: a line's last mark is closed up because a space follows it.
    *_close_up(":;.!?,"),
    _strip_inside("(", ")"),
    _strip_inside("[", "]"),
    _strip_inside("{", "}"),
    _strip_inside('"', '"'),
    # Apostrophes pair up like quotes: "dogs' and cats' tails" loses the space before "and".
    _strip_inside("'", "'"),
    # Longest first, or "= = = =" would become "== ==".
    ("= = = =", "===="),
    ("= = =", "==="),
    ("= =", "=="),
    (" ° ", "°"),
    (" \n", "\n"),
    ("\n ", "\n"),
    # One pass: of "N N N" with shared spaces every other one is left, unlike in PTB.
    (" N ", " 1 "),
    (" 's", "'s"),
)

# Penn Treebank: contractions, numbers as 1, unknown words as a question mark.
_PTB: tuple[DetokenizeRule, ...] = (
    (" 's", "'s"),
    ("s ' ", "s' "),
    (" n't", "n't"),
    (" \n ", "\n"),
    ("\\/", "/"),
    # N stands for any number. The space after it is not taken: it may precede the next N.
    (re.compile(r" N(?= )"), " 1"),
    # After the numbers: the text has "$ N" and "# N".
    ("$ 1", "$1"),
    ("# 1", "#1"),
    ("<unk>", "?"),
)


# Paper: App. C.1: LM1B
DETOKENIZERS: dict[str, tuple[DetokenizeRule, ...]] = {
    "none": (),  # AG News and OpenWebText are not tokenized
    "lm1b": _LM1B,
    "ptb": _PTB,
    "wikitext": _WIKITEXT,
    # OpenAI's form: straight double quotes, stripped, after a newline
    "lambada": (("\u201c", '"'), ("\u201d", '"'), lambda text: "\n" + text.strip()),
    # arXiv and PubMed articles
    "scientific_papers": (*_WIKITEXT, *_LM1B),
}


def detokenizer(name: str) -> Callable[[str], str]:
    """The detokenizer of that name; an unknown one is an error that lists them."""
    return partial(_rejoin, rules=look_up("detokenizer", name, DETOKENIZERS))
