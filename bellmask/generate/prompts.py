"""Prompts from files: beginnings to continue, canvases with gaps, or questions to answer.

In a text file each line is one; blank lines and lines that begin with # are skipped. JSON lines are
told by the name (.jsonl, .json).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

from bellmask.data.example_files import Message, Role
from bellmask.utils.errors import UserError
from bellmask.utils.files import load_json, sound

RESULTS = ("response", "sample", "num_tokens", "prompt_cut")
"""Keys of a line of answers; a line of questions may have any other one."""


@dataclass(frozen=True)
class Prompt:
    """What is asked: a beginning to continue, or a canvas with gaps; the other one is None."""

    prompt: str | None = None
    canvas: str | None = None

    @property
    def text(self) -> str:
        """As it was written."""
        return self.canvas or self.prompt or ""


def read_prompts(path: Path) -> list[Prompt]:
    """What a file gives to continue or to fill: lines, or {"prompt": ...} or {"canvas": ...}."""
    return [
        _prompt(line, where) if is_json else Prompt(line) for line, where, is_json in _lines(path)
    ]


@dataclass(frozen=True)
class Asked:
    """A question of a file: a prompt, or a conversation that ends with the user's words."""

    messages: tuple[Message, ...]
    is_conversation: bool = False
    line: dict[str, Any] = field(default_factory=dict)
    """All that was written, to be passed on with the answer."""

    @staticmethod
    def plain(prompt: str) -> Asked:
        """A single prompt, not empty."""
        if not prompt.strip():
            raise UserError("the prompt is empty: there is nothing to answer")
        return Asked((Message("user", prompt),), line={"prompt": prompt})

    @property
    def text(self) -> str:
        """For who reads the answer."""
        if not self.is_conversation:
            return self.messages[0].text
        return "\n".join(f"{message.role}: {message.text}" for message in self.messages)


def read_questions(path: Path) -> list[Asked]:
    """What a file asks: lines, {"prompt": ...} or {"messages": [{"role": ..., "content": ...}]}."""
    return [
        _question(line, where) if is_json else Asked.plain(line)
        for line, where, is_json in _lines(path)
    ]


def _lines(path: Path) -> Iterator[tuple[str, str, bool]]:
    """(line, where it is, whether it is JSON) of each prompt; UserError if there is none."""
    if not path.is_file():
        raise UserError(f"there is no file of prompts {path}")
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text: {error.reason} at byte {error.start}") from None
    is_json = path.suffix.lower() in (".jsonl", ".json")
    is_empty = True
    for number, line in enumerate(lines, start=1):
        line = line.removesuffix("\r")
        if line.strip() and (is_json or not line.lstrip().startswith("#")):
            is_empty = False
            yield line, f"{path}, line {number}", is_json
    if is_empty:
        raise UserError(f"{path} holds no prompts; write one per line")


def _read_json(line: str, where: str) -> dict[str, Any]:
    """The object of a line; one without keys for any other content."""
    try:
        content = load_json(line)
    except json.JSONDecodeError as error:
        raise UserError(f"{where} is not JSON: {error.msg} at column {error.colno}") from None
    except ValueError as error:  # a number without end, lists in lists in lists
        raise UserError(f"{where} cannot be read: {error}") from None
    return content if isinstance(content, dict) else {}


def _prompt(line: str, where: str) -> Prompt:
    content = _read_json(line, where)
    keys = set(content)
    if len(keys & {"prompt", "canvas"}) != 1:
        raise UserError(f'{where}: write {{"prompt": "..."}} or {{"canvas": "... [MASK*8] ..."}}')
    if unknown := keys - {"prompt", "canvas"}:
        raise UserError(f"{where}: {min(unknown)!r} is not known; allowed are prompt or canvas")
    (key,) = keys
    if not isinstance(content[key], str) or not content[key]:
        raise UserError(f"{where}: {key!r} must be a text that is not empty")
    return Prompt(**{key: sound(content[key])})


def _question(line: str, where: str) -> Asked:
    content = _read_json(line, where)
    if len(content.keys() & {"prompt", "messages"}) != 1:
        raise UserError(
            f'{where}: write {{"prompt": "..."}} or {{"messages": [{{"role": "user", "content": '
            '"..."}]}'
        )
    if "response" in content:  # a file of examples: what was right goes beside the answer
        content = {("reference" if k == "response" else k): v for k, v in content.items()}
    for name in RESULTS:
        if name in content:
            raise UserError(f"{where}: {name!r} is a key of the answer; call it otherwise")
    if "messages" in content:
        return Asked(_messages(content["messages"], where), True, content)
    if not isinstance(content["prompt"], str) or not content["prompt"].strip():
        raise UserError(f"{where}: 'prompt' must be a text that is not empty")
    return Asked((Message("user", content["prompt"]),), line=content)


def _messages(listed: Any, where: str) -> tuple[Message, ...]:
    """A system message or none, then user and assistant in turn, the user first and last."""
    turns = listed if isinstance(listed, list) else []
    for turn in turns:
        is_turn = isinstance(turn, dict) and isinstance(turn.get("content"), str)
        if not is_turn or turn.get("role") not in get_args(Role):
            raise UserError(
                f'{where}: a message is {{"role": "user", "content": "..."}}; roles are '
                f"{', '.join(get_args(Role))}"
            )
    said = tuple(Message(turn["role"], turn["content"]) for turn in turns)
    roles = [message.role for message in said]
    turn_roles = roles[1:] if roles[:1] == ["system"] else roles
    expected = ["user", "assistant"] * (len(turn_roles) // 2) + ["user"]
    if turn_roles != expected:
        raise UserError(
            f"{where}: the roles are {', '.join(roles) or 'none'}; after a system message, if any, "
            "user and assistant take turns, and the last word is the user's"
        )
    return said
