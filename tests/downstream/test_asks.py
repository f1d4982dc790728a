"""Texts as asks: cut as lm-eval cuts them, in windows where they do not fit."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace

import pytest
from pretrained_tools import make_tokenizer

from bellmask.data.tokenizer import ByteTokenizer, FastTokenizer, Tokenizer
from bellmask.downstream.asks import Ask, AskMaker, Score, add_up
from bellmask.errors import UserError

BOS = (257,)


@pytest.fixture(scope="module")
def pieces(text_file: Path) -> Tokenizer:
    """Byte-level BPE: where a text is cut changes its tokens."""
    inner = make_tokenizer(text_file.read_text(encoding="utf-8")).backend_tokenizer
    return FastTokenizer(inner, eos=inner.token_to_id("<|end|>"))


def byte_maker(block: int, begin: tuple[int, ...] = ()) -> AskMaker:
    return AskMaker(ByteTokenizer(), block, begin)


def text_of(tokens: tuple[int, ...]) -> str:
    return bytes(token for token in tokens if token < 256).decode()


@pytest.mark.parametrize(
    ("context", "continuation"),
    [
        ("the cat", " sat on the mat"),
        ("the cat ", "sat"),
        ("the cat \n\t ", "sat"),
        ("the cat", "sat"),
        ("the c", "at sat."),
        ("   ", "the dog"),
        (" the", "  dog"),
        ("the\u00a0\u2003", "dog"),
        ("na\u00efve \U0001f600", "\U0001f680 then"),
        ("a combining e", "\u0301 sign"),
        ("the cat <|end|>", " ran"),
        ("line\r\n", "line\r\n"),
        ("the", " "),
    ],
)
def test_tokens_are_cut_as_the_harness_cuts_them(
    pieces: Tokenizer, context: str, continuation: str
) -> None:
    model = pytest.importorskip("lm_eval.api.model", reason="lm-eval is not installed")
    stub = SimpleNamespace(backend="causal", tok_encode=lambda text: pieces.encode(text).tolist())
    before, target = model.TemplateLM._encode_pair(stub, context, continuation)
    made = AskMaker(pieces, 64, ()).asks(context, continuation, noise=5)
    assert made == [Ask(tuple(before), tuple(target), (), 5)]


def test_the_cut_matters_to_these_tokens(pieces: Tokenizer) -> None:
    maker = AskMaker(pieces, 64, ())
    (moved,) = maker.asks("the cat ", "sat")
    assert moved.target == maker.encode(" sat") != maker.encode("sat")


def test_without_a_context_all_is_scored_behind_the_begin_sign() -> None:
    assert byte_maker(16, BOS).asks("", "cat") == [Ask(BOS, tuple(b"cat"))]
    assert byte_maker(16).asks("", "cat") == [Ask((), tuple(b"cat"))]
    assert byte_maker(16, BOS).asks("  ", "cat") == [Ask(BOS, tuple(b"  cat"))]


@pytest.mark.parametrize(("context", "continuation"), [("the", ""), ("th", "e")])
def test_a_continuation_without_tokens_is_refused(
    pieces: Tokenizer, context: str, continuation: str
) -> None:
    """The second: both together are as many tokens as the context alone."""
    maker = AskMaker(pieces, 64, ())
    assert len(maker.encode(context + continuation)) == len(maker.encode(context))
    with pytest.raises(UserError, match="has no tokens: nothing to score"):
        maker.asks(context, continuation)


def test_lone_surrogates_are_question_marks() -> None:
    assert byte_maker(16).asks("a", "\ud83db") == [Ask(tuple(b"a"), tuple(b"?b"))]


# --- windows -----------------------------------------------------------------------------------


def test_the_oldest_context_goes_and_the_begin_sign_stays() -> None:
    assert byte_maker(8, BOS).asks("abcdefgh", "xyz") == [Ask((257, *b"efgh"), tuple(b"xyz"))]
    assert byte_maker(8).asks("abcdefgh", "xyz") == [Ask(tuple(b"defgh"), tuple(b"xyz"))]


@pytest.mark.parametrize("begin", [(), BOS])
def test_what_barely_fits_is_one_ask(begin: tuple[int, ...]) -> None:
    most = 8 - len(begin)
    text = "abcdefgh"[:most]
    assert byte_maker(8, begin).asks("ctx", text) == [Ask(begin, tuple(text.encode()))]
    (fits,) = byte_maker(8, begin).asks("ctx", text[: most - 3])
    assert fits == Ask((*begin, *b"ctx"), tuple(text[: most - 3].encode()))
    assert len(byte_maker(8, begin).asks("ctx", text + "i")) > 1


def test_windows_by_hand() -> None:
    """Halves of a block, each after as much as fits of what precedes it."""
    made = byte_maker(8, BOS).asks("ctx", "abcdefghij", after="!?", noise=3)
    assert made == [
        Ask((257, *b"ctx"), tuple(b"abcd"), (), 3),
        Ask((257, *b"bcd"), tuple(b"efgh"), (), 3),
        Ask((257, *b"fgh"), tuple(b"ij"), tuple(b"!?"), 3),
    ]
    assert all(ask.length <= 8 for ask in made)


@pytest.mark.parametrize("block", [2, 3, 8, 9])
@pytest.mark.parametrize("begin", [(), BOS])
@pytest.mark.parametrize("length", [1, 7, 8, 9, 40])
def test_every_token_is_scored_once(block: int, begin: tuple[int, ...], length: int) -> None:
    text = "".join(chr(97 + place % 26) for place in range(length))
    made = byte_maker(block, begin).asks("some context", text, after="what follows")
    assert "".join(text_of(ask.target) for ask in made) == text
    for ask in made:
        assert 1 <= ask.length <= block
        assert ask.given[: len(begin)] == begin
        start = "some context" + text
        assert text_of(ask.given + ask.target) in start
        assert "what follows".startswith(text_of(ask.after))
    assert not any(ask.after for ask in made[:-1])


def test_what_follows_gets_half_of_the_room_or_what_the_context_leaves() -> None:
    maker = byte_maker(16, BOS)
    (full,) = maker.asks("abcdefghijklmnop", "xyz", after="0123456789")
    assert full == Ask((257, *b"klmnop"), tuple(b"xyz"), tuple(b"012345"))
    (short,) = maker.asks("ab", "xyz", after="0123456789abc")
    assert short == Ask((257, *b"ab"), tuple(b"xyz"), tuple(b"0123456789"))
    (no_after,) = maker.asks("abcdefghijklmnop", "xyz", after="0")
    assert no_after == Ask((257, *b"fghijklmnop"), tuple(b"xyz"), tuple(b"0"))


def test_a_begin_sign_in_the_text_is_not_doubled() -> None:
    maker = byte_maker(8, BOS)
    assert maker.before((257, 1, 2), 8) == (257, 1, 2)
    assert maker.before((257, 1, 2, 3), 3) == (257, 2, 3)


def test_rolling_takes_the_whole_text() -> None:
    maker = byte_maker(8, BOS)
    assert maker.rolling("") == []
    assert maker.rolling("abcdefg") == [Ask(BOS, tuple(b"abcdefg"))]
    assert maker.rolling(" abcdefghi", noise=2) == [
        Ask(BOS, tuple(b" abc"), (), 2),
        Ask((257, *b"abc"), tuple(b"defg"), (), 2),
        Ask((257, *b"bcdefg"[-5:]), tuple(b"hi"), (), 2),
    ]


def test_scores_of_windows_add_up() -> None:
    one, two = Score(-3.0, 0.5, 4, 16, False), Score(-2.0, 0.0, 3, 7, True)
    assert add_up([one, two]) == Score(-5.0, 0.5, 7, 23, False)
    assert add_up([two, two]).is_exact
    assert add_up([one, one]).error == 1.0
    assert math.isnan(add_up([one, Score(-1.0, math.nan, 1, 1, False)]).error)
