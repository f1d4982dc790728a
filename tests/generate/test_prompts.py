"""Canvases and questions: what is given stays, gaps are masked, what cannot be is refused."""

import json
import re

import pytest
import torch

from bellmask.data.example_files import Message
from bellmask.data.tokenizers import ByteTokenizer
from bellmask.diffusion.frameworks import Mdm, any_order, arm, sigma_arm
from bellmask.generate.canvas import (
    begin_canvas,
    canvas_from_pieces,
    canvas_from_prefix,
    canvas_from_text,
    empty_canvas,
    frame_canvas,
)
from bellmask.generate.generate import PromptQuestion, read_questions
from bellmask.utils.errors import UserError

BYTES = ByteTokenizer()
GAP = -1


def shown(canvas):
    """Bytes and gaps."""
    assert canvas.mask_id == 259
    assert canvas.ids_L.dtype == torch.int64
    return [GAP if token == 259 else token for token in canvas.ids_L.tolist()]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The [MASK*3] sat [MASK].", [*b"The ", GAP, GAP, GAP, *b" sat ", GAP, *b"."]),
        ("[MASK*12]", [GAP] * 12),
        ("[MASK][MASK*2]", [GAP] * 3),
        ("[MASK]é", [GAP, 0xC3, 0xA9]),
        ("\n[MASK] ", [10, GAP, 32]),
    ],
)
def test_gaps_in_text_are_masks_of_the_given_length(text, expected):
    canvas = canvas_from_text(BYTES, text)
    assert shown(canvas) == expected
    assert canvas.is_given_L.tolist() == [token != GAP for token in expected]
    assert len(canvas) == len(expected)


def test_canvases_of_pieces_prefixes_and_nothing():
    found = shown(canvas_from_pieces(BYTES, [2, "The ", 3, "ü", 1]))
    assert found == [GAP] * 2 + [*b"The "] + [GAP] * 3 + [*"ü".encode()] + [GAP]
    assert shown(canvas_from_pieces(BYTES, ["[MASK]", 1])) == [*b"[MASK]", GAP]
    assert shown(canvas_from_prefix(BYTES, "abc", 7)) == [*b"abc"] + [GAP] * 4
    assert shown(canvas_from_prefix(BYTES, "abc", 4)) == [*b"abc", GAP]
    assert shown(empty_canvas(BYTES, 5)) == [GAP] * 5
    canvas = canvas_from_prefix(BYTES, "ab", 4)
    rows = canvas.repeat(3)
    rows[0] = 0
    assert shown(canvas) == [97, 98, GAP, GAP]
    assert rows[1:].tolist() == [[97, 98, 259, 259]] * 2


def test_what_stands_before_and_behind_a_canvas():
    """BOS and EOS; a fixed order takes only what comes first in it."""
    canvas, (bos, eos) = canvas_from_prefix(BYTES, "ab", 3), (257, 256)
    assert shown(begin_canvas(canvas, BYTES)) == [bos, 97, 98, GAP]
    late, early = (sigma_arm(torch.tensor(order)) for order in ([1, 0, 2], [0, 2, 1]))
    for framework, begin, end in (
        (Mdm(), bos, eos),
        (any_order(), bos, eos),
        (arm(5), bos, GAP),
        (early, bos, GAP),
        (late, GAP, GAP),
    ):
        assert shown(frame_canvas(canvas, BYTES, framework)) == [begin, 97, 98, GAP, end]


@pytest.mark.parametrize(
    ("make", "given", "names"),
    [
        (canvas_from_text, ["no gap here"], "no gap"),
        (canvas_from_text, ["a[MASK"], "gap"),
        (canvas_from_text, ["[MASK*]x[MASK]"], r"\[MASK\*\]"),
        (canvas_from_text, ["[mask]"], r"\[mask\]"),
        (canvas_from_text, ["a [MASK*0] b"], "got 0"),
        (canvas_from_pieces, [[-2]], "got -2"),
        (canvas_from_pieces, [[""]], "empty"),
        (canvas_from_prefix, ["abc", 3], "3 tokens, the canvas 3"),
        (canvas_from_prefix, ["", 0], "canvas 0"),
    ],
)
def test_what_cannot_be_a_canvas_is_the_users_error(make, given, names):
    with pytest.raises(UserError, match=names):
        make(BYTES, *given)


# questions of a file


@pytest.fixture
def read(tmp_path):
    def read(name, content):
        (tmp_path / name).write_bytes(content.encode())
        return read_questions(tmp_path / name)

    return read


def test_lines_are_prompts(read):
    found = read("q.txt", "\ufeffWho? \r\n\n# no\n日本?")
    assert found == [PromptQuestion.plain("Who? "), PromptQuestion.plain("日本?")]
    assert found[0].line == {"prompt": "Who? "}
    assert found[1].text == "日本?"


def test_json_lines_keep_their_keys(read):
    said = [("system", "s"), ("user", "a\nb"), ("assistant", ""), ("user", "c")]
    turns = [{"role": role, "content": text} for role, text in said]
    lines = [{"id": 3, "prompt": "a\nb"}, {"messages": turns, "tag": None}]
    one, two = read("q.jsonl", "\n\n".join(map(json.dumps, lines)))
    assert one.messages == (Message("user", "a\nb"),)
    assert (one.is_conversation, two.is_conversation) == (False, True)
    assert (one.line, two.line) == tuple(lines)
    assert [(message.role, message.text) for message in two.messages] == said
    assert two.text == "system: s\nuser: a\nb\nassistant: \nuser: c"
    # of a file of examples, what was right is passed on under another name
    (asked,) = read("q.jsonl", '{"prompt": "a", "response": "b", "id": 3}')
    assert (asked.text, asked.line) == ("a", {"prompt": "a", "reference": "b", "id": 3})


def turns(*roles):
    return json.dumps({"messages": [{"role": role, "content": "a"} for role in roles]})


@pytest.mark.parametrize(
    ("line", "names"),
    [
        ("{", "line 2"),
        ("[1]", "line 2"),
        ('{"canvas": "a [MASK]"}', "line 2"),
        ('{"prompt": "a", "messages": []}', "line 2"),
        ('{"prompt": "a", "sample": 1}', "'sample'"),
        ('{"prompt": " "}', "'prompt'"),
        ('{"prompt": 3}', "'prompt'"),
        ('{"messages": "a"}', "roles are none"),
        ('{"messages": ["a"]}', "message"),
        ('{"messages": [{"role": "user", "content": 3}]}', "message"),
        ('{"messages": [{"role": "me", "content": "a"}]}', "roles"),
        (turns("user", "assistant"), "user, assistant"),
        (turns("user", "user"), "user, user"),
        (turns("user", "system", "user"), "user, system, user"),
        (turns("system"), "system"),
        ("[" * 100_000, "line 2"),
    ],
)
def test_bad_lines_are_named(read, line, names):
    with pytest.raises(UserError, match=re.escape(names)):
        read("q.jsonl", f'{{"prompt": "a"}}\n{line}')


def test_there_must_be_something_to_answer(read, tmp_path):
    with pytest.raises(UserError, match=r"q\.jsonl"):
        read("q.jsonl", "\n")
    with pytest.raises(UserError, match="none"):
        read_questions(tmp_path / "none")
    with pytest.raises(UserError, match="prompt"):
        PromptQuestion.plain(" ")
