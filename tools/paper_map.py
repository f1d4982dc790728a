"""Write the module column of docs/paper-map.md from marks in the code.

A mark is a comment above a function, class or constant: ``# Paper: Eq. 4, Lemma A.2``. Run this
after adding, moving or removing one; a test checks that the page is up to date. Text after "; " in
a cell is written by hand.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "paper-map.md"
MARK = re.compile(r"^ *# Paper: (.+)$")
NAMES = re.compile(r"(?:`[^`]+\.py: [^`]+`(?:, )?)*")


def definitions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[int, str]]:
    """(first line, name) of every class, function, method and constant."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            yield min([node.lineno, *(d.lineno for d in node.decorator_list)]), prefix + node.name
            if isinstance(node, ast.ClassDef):
                yield from definitions(node, f"{prefix}{node.name}.")
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            yield node.lineno, prefix + ast.unparse(target)


def marks(root: Path = ROOT) -> dict[str, dict[str, list[str]]]:
    """Item of the paper -> file -> names of what is marked with it."""
    found: dict[str, dict[str, list[str]]] = {}
    for path in sorted([*root.glob("bellmask/**/*.py"), *root.glob("evidence/*.py")]):
        text = path.read_text(encoding="utf-8")
        lines = text.splitlines()
        if not any(map(MARK.match, lines)):
            continue
        names = dict(definitions(ast.parse(text)))
        for number, line in enumerate(lines, start=1):
            if mark := MARK.match(line):
                below = number
                while lines[below].lstrip().startswith("#"):
                    below += 1
                if below + 1 not in names:
                    raise SystemExit(f"{path}:{number}: a mark belongs right above a definition")
                for item in mark[1].split(", "):
                    file = path.relative_to(root).as_posix()
                    found.setdefault(item, {}).setdefault(file, []).append(names[below + 1])
    return found


def page(text: str, found: dict[str, dict[str, list[str]]]) -> str:
    """The page with its module column as the marks say."""
    left, lines = set(found), []
    for line in text.splitlines():
        cells = line.split(" | ")
        items = cells[0].removeprefix("| ").split(", ")
        if len(cells) == 5 and (set(items) & set(found) or NAMES.match(cells[2])[0]):
            files: dict[str, list[str]] = {}
            for item in items:
                left.discard(item)
                for file, names in found.get(item, {}).items():
                    files[file] = list(dict.fromkeys([*files.get(file, []), *names]))
            made = (
                ", ".join(f"`{file}: {', '.join(names)}`" for file, names in files.items()) or "-"
            )
            rest = NAMES.sub("", cells[2], count=1).removeprefix("-")
            line = " | ".join([*cells[:2], (made or "-") + rest, *cells[3:]])
        lines.append(line)
    if left:
        raise SystemExit(f"marks of items that docs/paper-map.md lacks: {', '.join(sorted(left))}")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8"), marks()), encoding="utf-8")
