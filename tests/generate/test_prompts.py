"""Questions of a file: read with all their keys, or refused by line."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from bellmask.data.messages import Message
from bellmask.errors import UserError
from bellmask.generate.prompts import Asked, read_questions


def file(folder: Path, name: str, content: str) -> Path:
    path = folder / name
    path.write_bytes(content.encode())
    return path


def test_lines_are_prompts(tmp_path: Path) -> None:
    found = read_questions(file(tmp_path, "q.txt", "\ufeffWho? \r\n\n# no\n日本?"))
    assert found == [Asked.plain("Who? "), Asked.plain("日本?")]
    assert found[0].line == {"prompt": "Who? "}
    assert found[1].text == "日本?"


def test_json_lines_keep_their_keys(tmp_path: Path) -> None:
    said = [("system", "s"), ("user", "a\nb"), ("assistant", ""), ("user", "c")]
    turns = [{"role": role, "content": text} for role, text in said]
    lines = [{"id": 3, "prompt": "a\nb"}, {"messages": turns, "tag": None}]
    one, two = read_questions(file(tmp_path, "q.jsonl", "\n\n".join(map(json.dumps, lines))))
    assert one.messages == (Message("user", "a\nb"),)
    assert not one.is_conversation
    assert (one.line, two.line) == tuple(lines)
    assert [(message.role, message.text) for message in two.messages] == said
    assert two.is_conversation
    assert two.text == "system: s\nuser: a\nb\nassistant: \nuser: c"


def turns(*roles: str) -> str:
    return json.dumps({"messages": [{"role": role, "content": "a"} for role in roles]})


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2 is not JSON"),
        ("[1]", "line 2: write"),
        ('{"canvas": "a [MASK]"}', "line 2: write"),
        ('{"prompt": "a", "messages": []}', "line 2: write"),
        ('{"prompt": "a", "sample": 1}', "'sample' is a key of the answer"),
        ('{"prompt": " "}', "'prompt' must be a text that is not empty"),
        ('{"prompt": 3}', "'prompt' must be a text"),
        ('{"messages": "a"}', "the roles are none"),
        ('{"messages": ["a"]}', "a message is"),
        ('{"messages": [{"role": "user", "content": 3}]}', "a message is"),
        ('{"messages": [{"role": "me", "content": "a"}]}', "roles are system, user, assistant"),
        (turns("user", "assistant"), "the roles are user, assistant; after a system message"),
        (turns("user", "user"), "take turns"),
        (turns("user", "system", "user"), "take turns"),
        (turns("system"), "the last word is the user's"),
        ("[" * 100_000, "line 2 cannot be read"),
    ],
)
def test_bad_lines_are_named(tmp_path: Path, line: str, message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        read_questions(file(tmp_path, "q.jsonl", f'{{"prompt": "a"}}\n{line}'))


def test_there_must_be_something_to_answer(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no prompts"):
        read_questions(file(tmp_path, "q.jsonl", "\n"))
    with pytest.raises(UserError, match="there is no file"):
        read_questions(tmp_path / "none")
    with pytest.raises(UserError, match="nothing to answer"):
        Asked.plain(" ")


def test_a_file_of_examples_can_be_asked(tmp_path: Path) -> None:
    """What was right is passed on beside the answer, under another name."""
    path = file(tmp_path, "q.jsonl", '{"prompt": "a", "response": "b", "id": 3}')
    (asked,) = read_questions(path)
    assert asked.line == {"prompt": "a", "reference": "b", "id": 3}
    assert asked.text == "a"
