"""docs/paper-map.md has every item of the paper, and commands that would be accepted."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from commands import succeeds
from paper_map import PAGE as PATH
from paper_map import marks, page

from bellmask.analyze.base import ANALYSES
from bellmask.compare.variants import SUFFIXES, SUITES, check_shared, parse_variants
from bellmask.config.presets import PRESETS

ROOT = Path(__file__).parents[1]
PAGE = PATH.read_text(encoding="utf-8")
QUOTED = list(dict.fromkeys(re.sub(r"\s+", " ", s) for s in re.findall(r"`([^`]+)`", PAGE)))
"""What stands in backticks, each once."""
COUNTS = {"Eq.": 34, "Fig.": 13, "Table": 9, "Finding": 3}
STATEMENTS = "Prop. 3.1, Def. 4.1, Prop. 4.2, Def. 4.3, Prop. 4.4, Lemma A.1, Lemma A.2, "
STATEMENTS += "Lemma B.1, Lemma B.3, Lemma B.5, Lemma B.6"
PAPERS_RUNS = ("lm1b", "lm1b_unpacked", "owt")


def check_run(preset, options):
    """A preset and options of a run: they exist and go together."""
    succeeds("config", "show", preset, *options)


def check_command(command, *args):
    """The command line would be accepted; nothing is run."""
    own = {"train": ["--out"], "plan": ["--devices"], "compare": ["--suite", "--seeds", "--grid"]}
    if command not in own or "cpt_sft" in args:
        suite = [f"--suite={args[i + 1]}" for i, arg in enumerate(args) if arg == "--suite"]
        words = [arg for arg in args[:1] if command in ("analyze", "judge", "data", "config")]
        described = succeeds(command, *words, *suite, "--help").text
        options = [arg for arg in args if arg.startswith("--") and arg != "--suite"]
        assert all(option.partition("=")[0] in described for option in options), options
        return
    taken, rest = {}, list(args)
    for name in own[command]:
        if name in rest:
            at = rest.index(name)
            taken[name], rest[at : at + 2] = rest[at + 1], []
    end = next((i for i, arg in enumerate(rest) if arg.startswith("--")), len(rest))
    preset, texts, options = rest[0], rest[1:end], rest[end:]
    if command == "compare":
        parse_variants(SUITES[taken["--suite"]] if "--suite" in taken else texts)
        check_shared(options)
    check_run(preset, options)


@pytest.mark.parametrize("text", [text for text in QUOTED if text.startswith("bellmask ")])
def test_commands_would_be_accepted(text):
    check_command(*shlex.split(text)[1:])


@pytest.mark.parametrize("text", [text for text in QUOTED if text[0] in "-_+"])
def test_options_and_names_exist(text):
    if text.startswith("--"):
        check_run("small_base", shlex.split(text))
    elif text.startswith("+"):
        assert text[1:] in SUFFIXES
    else:
        assert all(name + text in PRESETS for name in PAPERS_RUNS)


def test_the_module_column_is_up_to_date():
    assert page(PAGE, marks()) == PAGE, "run: python tools/paper_map.py"


def test_a_mark_names_what_is_below_it(tmp_path):
    """Also after a renaming; a mark for an item without a row, or above nothing, is an error."""
    code = tmp_path / "bellmask" / "laws.py"
    code.parent.mkdir()
    marked = "# Paper: Eq. 1, Fig. 2\n    # why\n    @cache\n    def new(self):\n        pass\n"
    code.write_text(f"class A:\n    {marked}")
    found = marks(tmp_path)
    assert found == {item: {"bellmask/laws.py": ["A.new"]} for item in ("Eq. 1", "Fig. 2")}
    before = [
        "| Eq. 1 | a | `bellmask/laws.py: A.old`; more | - | - |",
        "| Fig. 2 | b | - | - | - |",
    ]
    after = ["| Eq. 1 | a | `bellmask/laws.py: A.new`; more | - | - |"]
    after += ["| Fig. 2 | b | `bellmask/laws.py: A.new` | - | - |"]
    assert page("\n".join(before), found).splitlines() == after
    assert page(before[0], {}) == "| Eq. 1 | a | -; more | - | - |\n"
    with pytest.raises(SystemExit, match="Fig"):
        page(before[0], found)
    code.write_text("# Paper: Eq. 1\nprint()\n")
    with pytest.raises(SystemExit, match="above a definition"):
        marks(tmp_path)


def test_every_item_of_the_paper_has_one_row():
    rows = [line.strip("|").split("|") for line in PAGE.splitlines() if line.startswith("|")]
    items = [item.strip() for row in rows for item in row[0].split(", ")]
    for kind, count in COUNTS.items():
        numbered = sorted(item for item in items if item.startswith(f"{kind} "))
        assert numbered == sorted(f"{kind} {number + 1}" for number in range(count))
    assert set(STATEMENTS.split(", ")) <= set(items)
    for analysis in ANALYSES:
        assert f"`bellmask analyze {analysis}" in PAGE, analysis
    for suite in SUITES:
        assert f"--suite {suite}" in PAGE or f"`{suite}`" in PAGE, suite


@pytest.mark.parametrize("page", sorted((ROOT / "docs").rglob("*.md")), ids=lambda page: page.name)
def test_files_that_pages_name_exist(page):
    folders = "bellmask|tests|evidence|benchmarks|examples"
    named = re.findall(rf"`((?:{folders})/[\w/]+\.py)", page.read_text(encoding="utf-8"))
    assert {name for name in named if not (ROOT / name).exists()} == set()
