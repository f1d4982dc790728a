"""Canvases: what is given stays, what is a gap is masked, what cannot be is refused."""

import pytest
import torch

from bellmask.data.tokenizer import ByteTokenizer
from bellmask.errors import UserError
from bellmask.generate.canvas import (
    Canvas,
    canvas_from_pieces,
    canvas_from_prefix,
    canvas_from_text,
    empty_canvas,
)

BYTES = ByteTokenizer()
GAP = -1


def shown(canvas: Canvas) -> list[int]:
    """Bytes and gaps."""
    assert canvas.mask_id == 259
    assert canvas.ids_L.dtype == torch.int64
    return [GAP if token == 259 else token for token in canvas.ids_L.tolist()]


def test_gaps_in_text_are_masks_of_the_given_length():
    canvas = canvas_from_text(BYTES, "The [MASK*3] sat [MASK].")
    assert shown(canvas) == [*b"The ", GAP, GAP, GAP, *b" sat ", GAP, *b"."]
    assert canvas.is_given_L.tolist() == [True] * 4 + [False] * 3 + [True] * 5 + [False, True]
    assert len(canvas) == 14


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[MASK]", [GAP]),
        ("[MASK*12]", [GAP] * 12),
        ("[MASK][MASK*2]", [GAP] * 3),
        ("[MASK]é", [GAP, 0xC3, 0xA9]),
        ("a[MASK", None),
        ("a[MASK*]b", None),
        ("[mask]", None),
        ("[MASK*]x[MASK]", None),
        ("\n[MASK] ", [10, GAP, 32]),
    ],
)
def test_only_whole_gap_signs_are_gaps(text, expected):
    if expected is None:
        with pytest.raises(UserError, match="gap"):
            canvas_from_text(BYTES, text)
    else:
        assert shown(canvas_from_text(BYTES, text)) == expected


def test_pieces_are_texts_and_numbers_of_tokens():
    canvas = canvas_from_pieces(BYTES, [2, "The ", 3, "ü", 1])
    assert shown(canvas) == [GAP] * 2 + [*b"The "] + [GAP] * 3 + [*"ü".encode()] + [GAP]


def test_text_that_looks_like_a_gap_is_text_in_pieces():
    assert shown(canvas_from_pieces(BYTES, ["[MASK]", 1])) == [*b"[MASK]", GAP]


def test_a_prefix_is_followed_by_a_gap_up_to_the_length():
    assert shown(canvas_from_prefix(BYTES, "abc", 7)) == [*b"abc"] + [GAP] * 4
    assert shown(canvas_from_prefix(BYTES, "abc", 4)) == [*b"abc", GAP]
    assert shown(canvas_from_prefix(BYTES, "", 2)) == [GAP] * 2


def test_an_empty_canvas_has_nothing_given():
    assert shown(empty_canvas(BYTES, 5)) == [GAP] * 5


def test_a_repeated_canvas_is_a_copy():
    canvas = canvas_from_prefix(BYTES, "ab", 4)
    rows = canvas.repeat(3)
    assert rows.tolist() == [[97, 98, 259, 259]] * 3
    rows[0] = 0
    assert shown(canvas) == [97, 98, GAP, GAP]
    assert rows[1].tolist() == [97, 98, 259, 259]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: canvas_from_text(BYTES, "no gap here"), "no gap.*MASK"),
        (lambda: canvas_from_text(BYTES, ""), "no gap"),
        (lambda: canvas_from_text(BYTES, "a [MASK*0] b"), "at least one token, got 0"),
        (lambda: canvas_from_pieces(BYTES, ["a", 0]), "at least one token, got 0"),
        (lambda: canvas_from_pieces(BYTES, [-2]), "at least one token, got -2"),
        (lambda: canvas_from_pieces(BYTES, []), "empty"),
        (lambda: canvas_from_pieces(BYTES, [""]), "empty"),
        (lambda: canvas_from_prefix(BYTES, "abc", 3), "3 tokens, the canvas 3"),
        (lambda: canvas_from_prefix(BYTES, "abcd", 3), "4 tokens, the canvas 3"),
        (lambda: canvas_from_prefix(BYTES, "", 0), "nothing is left"),
    ],
)
def test_what_cannot_be_a_canvas_is_the_users_error(make, message):
    with pytest.raises(UserError, match=message):
        make()
