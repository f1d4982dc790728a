"""Prompts from files: beginnings to continue, or canvases with gaps."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from bellmask.errors import UserError


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
    """Prompts of a file: one per line, or JSONL with {"prompt": ...} or {"canvas": ...}.

    In a text file blank lines and lines that begin with # are skipped. JSONL is told by the name
    (.jsonl, .json).
    """
    if not path.is_file():
        raise UserError(f"there is no file of prompts {path}")
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text: {error.reason} at byte {error.start}") from None
    is_json = path.suffix.lower() in (".jsonl", ".json")
    prompts = []
    for number, line in enumerate(lines, start=1):
        line = line.removesuffix("\r")
        if line.strip() and (is_json or not line.lstrip().startswith("#")):
            prompts.append(_read_json(line, f"{path}, line {number}") if is_json else Prompt(line))
    if not prompts:
        raise UserError(f"{path} holds no prompts; write one per line")
    return prompts


def _read_json(line: str, where: str) -> Prompt:
    try:
        content = json.loads(line)
    except json.JSONDecodeError as error:
        raise UserError(f"{where} is not JSON: {error.msg} at column {error.colno}") from None
    keys = set(content) if isinstance(content, dict) else set()
    if len(keys & {"prompt", "canvas"}) != 1:
        raise UserError(f'{where}: write {{"prompt": "..."}} or {{"canvas": "... [MASK*8] ..."}}')
    if unknown := keys - {"prompt", "canvas"}:
        raise UserError(f"{where}: {min(unknown)!r} is not known; allowed are prompt or canvas")
    (key,) = keys
    if not isinstance(content[key], str) or not content[key]:
        raise UserError(f"{where}: {key!r} must be a text that is not empty")
    return Prompt(**{key: content[key]})
