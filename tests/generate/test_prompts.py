"""Canvases and questions: what is given stays, gaps are masked, what cannot be is refused."""

import json
import re
from types import SimpleNamespace

import pytest
import torch

from bellmask.data.chat_templates import Message
from bellmask.data.tokenizers import ByteTokenizer
from bellmask.diffusion.frameworks import Mdm, any_order, arm, sigma_arm
from bellmask.generate.fill import run_canvas
from bellmask.generate.generate import read_prompts, read_questions
from bellmask.generate.sampler import LONGEST, canvas_from_pieces, read_gaps
from bellmask.utils.errors import UserError

BYTES, GAP, BOS, EOS = ByteTokenizer(), 259, 257, 256


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The [MASK*3] sat [MASK].", [*b"The ", GAP, GAP, GAP, *b" sat ", GAP, *b"."]),
        ("[MASK][MASK*012]", [GAP] * 13),
        ("\n[MASK]é", [10, GAP, 0xC3, 0xA9]),
        ("no gap here", "no gap"),
        ("a[MASK", "no gap"),
        ("[MASK*]x[MASK]", r"\[MASK\*\]"),
        ("[mask]", r"\[mask\]"),
        ("a [MASK*0] b", "got 0"),
        (f"[MASK*{LONGEST}][MASK]", "at most"),
    ],
)
def test_gaps_in_text_are_masks_of_the_given_length(text, expected):
    if isinstance(expected, str):
        with pytest.raises(UserError, match=expected):
            canvas_from_pieces(BYTES, read_gaps(text))
        return
    canvas = canvas_from_pieces(BYTES, read_gaps(text), [BOS], [EOS])
    assert canvas.tolist() == [BOS, *expected, EOS]
    rows = canvas.repeat(2, 1)
    rows[0] = 0
    assert (rows.shape, int(canvas[0]), int(rows[1, 0])) == ((2, len(canvas)), BOS, BOS)


def run_of(framework, is_wrapped=True, first_maskable=0):
    config = SimpleNamespace(data=SimpleNamespace(block_length=5))
    model = SimpleNamespace(first_maskable=first_maskable)
    return SimpleNamespace(
        tokenizer=BYTES, framework=framework, is_wrapped=is_wrapped, model=model, config=config
    )


def test_canvases_of_a_run():
    """BOS and EOS around them as in training; a fixed order takes only what comes first in it."""
    late, early = (sigma_arm(torch.tensor(order)) for order in ([1, 0, 2], [0, 2, 1]))
    for run, begin, end in (
        (run_of(Mdm()), [BOS], [EOS]),
        (run_of(any_order()), [BOS], [EOS]),
        (run_of(arm(5)), [BOS], [GAP]),
        (run_of(early), [BOS], [GAP]),
        (run_of(late), [GAP], [GAP]),
        (run_of(Mdm(), False), [], []),
        (run_of(Mdm(), False, 1), [BOS], []),
    ):
        for asked, inner in (
            ({"prefix": "ab"}, [97, 98, *[GAP] * (3 - len(begin + end))]),
            ({"length": 4}, [GAP] * (4 - len(begin + end))),
            ({"template": "a[MASK*9]"}, [97, *[GAP] * 9]),
        ):
            assert run_canvas(run, **asked).tolist() == [*begin, *inner, *end]
    for given, names in (
        ({"prefix": "abc"}, "3 tokens of 3"),
        ({"length": 2}, "no room"),
    ):
        with pytest.raises(UserError, match=names):
            run_canvas(run_of(Mdm()), **given)


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
    assert read(read_prompts, "p.txt", text) == [{"prompt": line} for line in lines]
    found = read(read_questions, "p.txt", text)
    assert [question.line for question in found] == [{"prompt": line} for line in lines]
    assert [(q.text, q.messages) for q in found] == [(n, (Message("user", n),)) for n in lines]
    found = read(read_prompts, "p.jsonl", '{"prompt": "a\\nb"}\n\n{"canvas": "# [MASK*3] b"}\n')
    assert found == [{"prompt": "a\nb"}, {"canvas": "# [MASK*3] b"}]


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


@pytest.mark.parametrize(
    ("reader", "line", "names"),
    [
        (read_prompts, "{", "line 2"),
        (read_prompts, '{"prompt": "a", "canvas": "b"}', "prompt 2"),
        (read_prompts, '{"prompt": "a", "seed": 1}', "'seed'"),
        (read_prompts, '{"prompt": 3}', "'prompt'"),
        (read_prompts, '{"canvas": " "}', "'canvas'"),
        (read_questions, '{"canvas": "a [MASK]"}', "prompt 2"),
        (read_questions, '{"prompt": "a", "sample": 1}', "'sample'"),
        (read_questions, '{"messages": "a"}', "first and last; got no messages"),
        (read_questions, '{"messages": [{"role": "user", "content": 3}]}', "message"),
        (read_questions, turns("me"), "first and last; got me"),
        (read_questions, turns("user", "assistant"), "user, assistant"),
        (read_questions, turns("user", "system", "user"), "user, system, user"),
        (read_questions, turns("system"), "system"),
    ],
)
def test_bad_lines_are_named(read, reader, line, names):
    with pytest.raises(UserError, match=re.escape(names)):
        read(reader, "q.jsonl", f'{{"prompt": "a"}}\n{line}')


def test_files_without_prompts_are_refused(read):
    for content, names in (("# a\n\n", "no prompts"), (b"a\xff", "UTF-8"), (None, "none.txt")):
        with pytest.raises(UserError, match=names):
            read(read_prompts, "none.txt" if content is None else "p.txt", content)
