"""Pages of the documentation that are made when it is built: README, changelog, command reference.

mkdocs calls :func:`on_files` (``hooks`` in mkdocs.yml).
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from bellmask.cli import COMMANDS, help_text

ROOT = Path(__file__).parents[1]


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are not in docs/."""
    made = {
        "index.md": _from_root("README.md"),
        "changelog.md": _from_root("CHANGELOG.md"),
        "reference.md": reference(),
    }
    for name, text in made.items():
        files.append(File.generated(config, name, content=text))
    return files


def _from_root(name: str) -> str:
    """A page of the project's folder, its links as seen from docs/; files beside it are named."""
    text = (ROOT / name).read_text(encoding="utf-8").replace("docs/", "")
    text = text.replace("(CHANGELOG.md)", "(changelog.md)")
    return re.sub(r"\[([^]]+)\]\((?:CITATION|CONTRIBUTING)[^)]*\)", r"\1", text)


def reference() -> str:
    """Every command's help."""
    os.environ["COLUMNS"] = "100"
    parts = ["# Command reference", "What `bellmask COMMAND --help` prints."]
    for name in COMMANDS:
        text = re.sub(r"\x1b\[[0-9;]*m", "", help_text(name)).strip()
        parts += [f"## {name}", f"```text\n{text}\n```"]
    return "\n\n".join(parts) + "\n"
