"""How much the tests notice: one-line mutations of the package, and the tests that fail.

    python tools/mutations.py cover OUT           # once: the suite with coverage contexts
    python tools/mutations.py run OUT [--count 60] [--seed 0]

Every mutation changes one expression inside a function of the folders below, in a copy of the
checkout. The tests that run the changed line are run with ``-x``, those that run the fewest lines
first, for at most 120 s of CPU time. A mutation is killed when one of them fails. OUT gets
``coverage.db``, ``lastfailed`` (tests that fail without any mutation are not run) and
``mutations.json``.

Limits: code that runs only in other processes (forks, torchrun) counts as not covered, and lines
that only a shared fixture runs are tried with the first test that used it.

The draw depends on the seed, the file, the function and the changed text, not on line numbers, so
a small edit of the package leaves most of it unchanged.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

FOLDERS = ("diffusion", "model", "train", "generate", "evaluate", "compare")
LIMIT = 120
"""Seconds of CPU time, so that a busy machine gives the same verdicts."""
SWAPS: dict[type, str] = {
    ast.Add: "-", ast.Sub: "+", ast.Mult: "/", ast.Div: "*", ast.FloorDiv: "/", ast.Mod: "*",
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==",
    ast.Is: "is not", ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in",
    ast.And: "or", ast.Or: "and", ast.BitAnd: "|", ast.BitOr: "&",
}  # fmt: skip


@dataclass(frozen=True)
class Mutation:
    """One changed expression."""

    file: str
    line: int
    function: str
    before: str
    after: str
    start: int
    end: int
    """Character offsets in the file."""

    def draw(self, seed: int) -> str:
        """Its place in the order of the draw."""
        named = f"{seed}|{self.file}|{self.function}|{self.before}|{self.after}"
        return hashlib.sha256(named.encode()).hexdigest()


def _mutated(node: ast.AST, text: str) -> str | None:
    """The expression with one change, or None where there is none to make."""
    match node:
        case ast.Constant(value=bool(value)):
            return str(not value)
        case ast.Constant(value=int() | float()):
            return f"({text} + 1)"
        case ast.UnaryOp(op=ast.Not() | ast.USub()):
            return ast.unparse(node.operand)
        case ast.BinOp() if type(node.op) in SWAPS:
            operator, parts = node.op, [node.left, node.right]
        case ast.Compare() if len(node.ops) == 1:
            operator, parts = node.ops[0], [node.left, *node.comparators]
        case ast.BoolOp():
            operator, parts = node.op, node.values
        case ast.Call(func=ast.Name(id="min" | "max" | "any" | "all" as name)):
            other = {"min": "max", "max": "min", "any": "all", "all": "any"}[name]
            return other + text[len(name) :]
        case _:
            return None
    return "(" + f" {SWAPS[type(operator)]} ".join(f"({ast.unparse(p)})" for p in parts) + ")"


def _in_functions(tree: ast.Module) -> Iterator[tuple[str, ast.AST]]:
    """(function, node) for all that runs when a function is called; no messages of errors."""

    def visit(node: ast.AST, function: str) -> Iterator[tuple[str, ast.AST]]:
        if isinstance(node, ast.Raise | ast.Assert | ast.JoinedStr):
            return
        if isinstance(node, ast.AnnAssign):
            children: list[ast.AST] = [node.value] if node.value else []
        elif isinstance(node, ast.FunctionDef):
            function, children = f"{function}.{node.name}", list(node.body)
        else:
            children = list(ast.iter_child_nodes(node))
        for child in children:
            if function and not isinstance(child, ast.FunctionDef | ast.ClassDef):
                yield function, child
            yield from visit(child, function)

    yield from visit(tree, "")


def mutations_of(root: Path, file: str) -> Iterator[Mutation]:
    """All mutations of a file."""
    source = (root / file).read_text(encoding="utf-8")
    starts = [0]
    for row in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(row))
    rows = source.splitlines()

    def offset(line: int, column: int) -> int:  # ast counts bytes
        return starts[line - 1] + len(rows[line - 1].encode()[:column].decode())

    for function, node in _in_functions(ast.parse(source)):
        line, end_line = getattr(node, "lineno", None), getattr(node, "end_lineno", None)
        if line is None or line != end_line:
            continue
        start, end = offset(line, node.col_offset), offset(line, node.end_col_offset)  # type: ignore[attr-defined]
        after = _mutated(node, source[start:end])
        if after is not None:
            yield Mutation(file, line, function, source[start:end], after, start, end)


def draw(root: Path, seed: int, count: int) -> list[Mutation]:
    """The same number from every folder."""
    drawn: list[Mutation] = []
    for folder in FOLDERS:
        files = sorted((root / "bellmask" / folder).rglob("*.py"))
        if not files:
            raise SystemExit(f"bellmask/{folder} has no Python files; change FOLDERS")
        found = [m for f in files for m in mutations_of(root, str(f.relative_to(root)))]
        by_place = {m.draw(seed): m for m in reversed(found)}  # the first of equal ones
        drawn += [by_place[place] for place in sorted(by_place)[: count // len(FOLDERS)]]
    return drawn


def _environment(root: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}


def cover(root: Path, out: Path) -> None:
    """Run the suite with a context per test."""
    out.mkdir(parents=True, exist_ok=True)
    settings = out / "coveragerc"
    settings.write_text(f"[run]\nsource = bellmask\ndata_file = {out / 'coverage.db'}\n")
    pytest = [sys.executable, "-m", "pytest", "-q", "-n", "2", "--dist", "worksteal"]
    pytest += ["--cov=bellmask", f"--cov-config={settings}", "--cov-context=test"]
    pytest += ["--cov-report=term:skip-covered", "-o", f"cache_dir={out / 'cache'}"]
    subprocess.run(pytest, cwd=root, env=_environment(root))
    failed = out / "cache" / "v" / "cache" / "lastfailed"
    (out / "lastfailed").write_text(failed.read_text() if failed.exists() else "{}")


def tests_by_line(out: Path) -> dict[tuple[str, int], list[str]]:
    """(file, line): the tests that run it, those that run the fewest lines first."""
    from coverage import CoverageData

    data = CoverageData(str(out / "coverage.db"))
    data.read()
    failing = set(json.loads((out / "lastfailed").read_text()))
    found: dict[tuple[str, int], set[str]] = {}
    sizes: Counter[str] = Counter()
    for file in data.measured_files():
        for line, contexts in data.contexts_by_lineno(file).items():
            names = {context.rpartition("|")[0] for context in contexts} - failing
            names = {name for name in names if name and "\n" not in name}
            found[file[file.rindex("bellmask/") :], line] = names
            sizes.update(names)
    return {key: sorted(names, key=lambda n: (sizes[n], n)) for key, names in found.items()}


def _verdict(copy: Path, mutation: Mutation, tests: list[str]) -> str:
    """ "killed by ...", "survived", "out of time", "not covered" or "broken: ..."."""
    if not tests:
        return "not covered"
    path, chosen = copy / mutation.file, copy / "chosen-tests.txt"
    source = path.read_text(encoding="utf-8")
    chosen.write_text("\n".join(tests))
    pytest = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-m", ""]
    try:
        changed = source[: mutation.start] + mutation.after + source[mutation.end :]
        path.write_text(changed, encoding="utf-8")
        done = subprocess.run(
            [*pytest, f"@{chosen}"],
            cwd=copy,
            env=_environment(copy),
            capture_output=True,
            text=True,
            timeout=20 * LIMIT,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_CPU, (LIMIT, LIMIT)),
        )
    except subprocess.TimeoutExpired:
        return "out of time"
    finally:
        path.write_text(source, encoding="utf-8")
    lines = done.stdout.splitlines()
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    if done.returncode <= 0:
        return "out of time" if done.returncode else "survived"
    if done.returncode in (1, 2) and failed:  # 2: a file cannot be collected any more
        return f"killed by {failed[0].split(' - ')[0].split(' ', 1)[1]}"
    return f"broken: {(lines or [done.stderr])[-1]}"


def run(root: Path, out: Path, seed: int, count: int) -> None:
    """Try the drawn mutations; verdicts in OUT are reused, so use a new OUT after any change."""
    tests, results = tests_by_line(out), out / "mutations.json"
    known: dict[str, dict[str, Any]] = json.loads(results.read_text()) if results.exists() else {}
    drawn = draw(root, seed, count)
    with tempfile.TemporaryDirectory(prefix="mutations-") as folder:
        copy = Path(folder) / "main"
        ignored = shutil.ignore_patterns(".venv*", ".git", "runs", "*.egg-info", "__pycache__")
        shutil.copytree(root, copy, ignore=ignored)
        if (root.parent / "shared").exists():
            (copy.parent / "shared").symlink_to((root.parent / "shared").resolve())
        for number, mutation in enumerate(drawn, start=1):
            key = mutation.draw(seed)
            if key not in known:
                chosen = tests.get((mutation.file, mutation.line), [])
                verdict = _verdict(copy, mutation, chosen)
                known[key] = {**asdict(mutation), "tests": len(chosen), "verdict": verdict}
                results.write_text(json.dumps(known, indent=1) + "\n")
            where, verdict = f"{mutation.file}:{mutation.line}", known[key]["verdict"]
            print(number, where, mutation.before, "->", mutation.after, verdict, flush=True)
    verdicts = [known[m.draw(seed)]["verdict"].split(" by ")[0] for m in drawn]
    killed = verdicts.count("killed")
    print(f"killed {killed} of {len(drawn)} ({killed / len(drawn):.0%}); {Counter(verdicts)}")


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("action", choices=("cover", "run"))
    parser.add_argument("out", type=Path)
    parser.add_argument("--checkout", type=Path, default=Path(__file__).parents[1])
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    root, out = options.checkout.resolve(), options.out.resolve()
    if options.action == "cover":
        cover(root, out)
    else:
        run(root, out, options.seed, options.count)


if __name__ == "__main__":
    main()
