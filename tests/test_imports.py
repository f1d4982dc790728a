"""Imports go one way: a folder uses what stands before it, and `diffusion` uses torch alone."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import bellmask

PACKAGE = Path(bellmask.__file__).parent
ORDER = [
    {"utils"},
    {"config"},
    {"diffusion", "model", "data", "report"},
    {"storage"},
    {"generate"},
    {"evaluate"},
    {"train"},
    {"exchange"},
    {"run", "plan"},
    {"analyze", "compare", "integrations"},
    {"cli", "__init__", "__main__"},
]
"""docs/architecture.md says the same in words."""
HEIGHT = {folder: height for height, folders in enumerate(ORDER) for folder in folders}
MODULES = {
    ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(PACKAGE.rglob("*.py"))
    if "hub_code" not in path.parts  # is copied into exports, and imports nothing of ours
}


def imported_names(path: Path) -> Iterator[str]:
    """Dotted names of all imports, also those inside functions; not those for the type checker."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for_types = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if node in for_types:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports give the whole path"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def modules_used(path: Path) -> set[str]:
    """Modules of the package, packages among them; its version may be read from anywhere."""
    found = set()
    for name in imported_names(path):
        if name == "bellmask.__version__":
            continue
        while name and name not in MODULES:
            name = name.rpartition(".")[0]
        found |= {name} if name else set()
    return found


def folder_of(module: str) -> str:
    return module.split(".")[1] if "." in module else "__init__"


def test_every_folder_has_its_place():
    assert {folder_of(name) for name in MODULES} == set(HEIGHT)
    assert len(list(PACKAGE.glob("*.py"))) <= 5, "a feature belongs into a folder"


@pytest.mark.parametrize("module", MODULES)
def test_imports_go_one_way(module):
    used = modules_used(MODULES[module])
    upward = [name for name in used if HEIGHT[folder_of(name)] > HEIGHT[folder_of(module)]]
    assert not upward, "move what both need to the lower folder; see docs/architecture.md"


def test_no_module_needs_itself():
    """Also not by way of others, in the order in which modules can be imported one by one."""
    left = {name: modules_used(path) for name, path in MODULES.items()}
    while ready := [name for name, used in left.items() if not used & left.keys()]:
        for name in ready:
            del left[name]
    assert not left, "these import one another"


def test_diffusion_uses_torch_alone():
    allowed = {*sys.stdlib_module_names, "torch", "__future__"}
    for path in (PACKAGE / "diffusion").glob("*.py"):
        others = {n.split(".")[0] for n in imported_names(path) if "bellmask.diffusion" not in n}
        assert others <= allowed, path.name


def test_help_of_options_needs_no_torch():
    """Importing it takes longer than all else that the overview and `train --help` do."""
    code = (
        "import sys; from bellmask.cli import run_command\n"
        "for words in ('--help', 'train --help', 'config show tiny', 'presets'):\n"
        "    try: code = run_command(words.split())\n"
        "    except SystemExit as end: code = end.code\n"
        "    assert not code, words\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)
