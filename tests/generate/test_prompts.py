"""Canvases and questions: what is given stays, gaps are masked, what cannot be is refused."""

import json
import re

import pytest
import torch

from bellmask.data.chat_templates import Message
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
from bellmask.generate.generate import Prompt, read_prompts, read_questions
from bellmask.utils.errors import UserError

BYTES = ByteTokenizer()
GAP = -1


def shown(canvas):
    """Bytes and gaps."""
    assert canvas.mask_id == 259
    assert canvas.ids_L.dtype == torch.int64
    return [GAP if token == 259 else token for token in canvas.ids_L.tolist()]


def test_gaps_in_text_are_masks_of_the_given_length():
    for text, expected in {
        "The [MASK*3] sat [MASK].": [*b"The ", GAP, GAP, GAP, *b" sat ", GAP, *b"."],
        "[MASK][MASK*012]": [GAP] * 13,
        "\n[MASK]é": [10, GAP, 0xC3, 0xA9],
    }.items():
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


# prompts and questions of a file


@pytest.fixture
def read(tmp_path):
    """``read(read_prompts, "p.txt", content)``; without content there is no file."""

    def read(reader, name, content):
        if content is not None:
            content = content if isinstance(content, bytes) else content.encode()
            (tmp_path / name).write_bytes(content)
        return reader(tmp_path / name)

    return read


def test_lines_are_prompts(read):
    text = "\ufeffThe war \r\n\n  # no\n#no\n  Once # yes\n \t \n日本"
    lines = ["The war ", "  Once # yes", "日本"]
    assert read(read_prompts, "p.txt", text) == [Prompt(line) for line in lines]
    found = read(read_questions, "p.txt", text)
    assert [question.line for question in found] == [{"prompt": line} for line in lines]
    assert [(q.text, q.messages) for q in found] == [(n, (Message("user", n),)) for n in lines]
    found = read(read_prompts, "p.jsonl", '{"prompt": "a\\nb"}\n\n{"canvas": "# [MASK*3] b"}\n')
    assert found == [Prompt("a\nb"), Prompt("# [MASK*3] b", is_canvas=True)]


def test_json_lines_keep_their_keys(read):
    said = [("system", "s"), ("user", "a\nb"), ("assistant", ""), ("user", "c")]
    turns = [{"role": role, "content": text} for role, text in said]
    lines = [{"id": 3, "prompt": "a\nb"}, {"messages": turns, "tag": None}]
    one, two = read(read_questions, "q.jsonl", "\n\n".join(map(json.dumps, lines)))
    assert one.messages == (Message("user", "a\nb"),)
    assert (one.is_conversation, two.is_conversation) == (False, True)
    assert (one.line, two.line) == tuple(lines)
    assert [(message.role, message.text) for message in two.messages] == said
    assert two.text == "system: s\nuser: a\nb\nassistant: \nuser: c"
    # of a file of examples, what was right is passed on under another name
    (asked,) = read(read_questions, "q.jsonl", '{"prompt": "a", "response": "b", "id": 3}')
    assert asked.line == {"prompt": "a", "reference": "b", "id": 3}


def turns(*roles):
    return json.dumps({"messages": [{"role": role, "content": "a"} for role in roles]})


BAD = [  # of both, of prompts, of questions
    *[(reader, line, "line 2") for reader in (read_prompts, read_questions) for line in
      ("{", "[1]", "{}", '{"prompt": "a", "canvas": "b", "messages": []}', "[" * 100_000)],
    (read_prompts, '{"prompt": "a", "seed": 1}', "'seed'"),
    (read_prompts, '{"prompt": 3}', "'prompt'"),
    (read_prompts, '{"canvas": ""}', "'canvas'"),
    (read_questions, '{"canvas": "a [MASK]"}', "line 2"),
    (read_questions, '{"prompt": "a", "sample": 1}', "'sample'"),
    (read_questions, '{"prompt": " "}', "'prompt'"),
    (read_questions, '{"prompt": 3}', "'prompt'"),
    (read_questions, '{"messages": "a"}', "roles are none"),
    (read_questions, '{"messages": ["a"]}', "message"),
    (read_questions, '{"messages": [{"role": "user", "content": 3}]}', "message"),
    (read_questions, '{"messages": [{"role": "me", "content": "a"}]}', "roles"),
    (read_questions, turns("user", "assistant"), "user, assistant"),
    (read_questions, turns("user", "user"), "user, user"),
    (read_questions, turns("user", "system", "user"), "user, system, user"),
    (read_questions, turns("system"), "system"),
]  # fmt: skip


@pytest.mark.parametrize(("reader", "line", "names"), BAD)
def test_bad_lines_are_named(read, reader, line, names):
    with pytest.raises(UserError, match=re.escape(names)):
        read(reader, "q.jsonl", f'{{"prompt": "a"}}\n{line}')


@pytest.mark.parametrize("reader", [read_prompts, read_questions])
def test_files_without_prompts_are_refused(read, reader):
    for content, names in (("# a\n\n", "no prompts"), (b"a\xff", "UTF-8"), (None, "none.txt")):
        with pytest.raises(UserError, match=names):
            read(reader, "none.txt" if content is None else "p.txt", content)
