"""Texts side by side: prompts read or refused by line, tables that fit, pages without holes."""

from __future__ import annotations

import io
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from rich.console import Console

from bellmask.errors import UserError
from bellmask.generate.prompts import Prompt, read_prompts
from bellmask.report.side_by_side import SideBySide, show_side_by_side

HOSTILE = "The <script>alert('x')</script> [bold]x[/bold] ``` ```` & \x1b[31m\u202e"


def file(folder: Path, name: str, content: str | bytes) -> Path:
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def test_a_text_file_has_a_prompt_per_line(tmp_path: Path) -> None:
    path = file(tmp_path, "p.txt", "\ufeffThe war \r\n\n  # no\n#no\n  Once # yes\n \t \n日本")
    assert read_prompts(path) == [Prompt("The war "), Prompt("  Once # yes"), Prompt("日本")]
    assert read_prompts(file(tmp_path, "q", '{"prompt": "a"}')) == [Prompt('{"prompt": "a"}')]


def test_json_lines_have_prompts_or_canvases(tmp_path: Path) -> None:
    lines = '{"prompt": "a\\nb"}\n\n{"canvas": "# [MASK*3] b"}\n'
    found = read_prompts(file(tmp_path, "p.jsonl", lines))
    assert found == [Prompt("a\nb"), Prompt(canvas="# [MASK*3] b")]
    assert (found[0].canvas, found[1].prompt) == (None, None)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("p.jsonl", '{"prompt": "a"}\n{"prompt": }', "line 2 is not JSON: Expecting value"),
        ("p.jsonl", '\n\n["a"]', "line 3: write"),
        ("p.jsonl", "{}", "line 1: write"),
        ("p.jsonl", '{"prompt": "a", "canvas": "b"}', "line 1: write"),
        ("p.jsonl", '{"prompt": "a", "seed": 1}', "line 1: 'seed' is not known"),
        ("p.jsonl", '{"prompt": 3}', "line 1: 'prompt' must be a text"),
        ("p.jsonl", '{"canvas": ""}', "line 1: 'canvas' must be a text that is not empty"),
        ("p.jsonl", "# a", "line 1 is not JSON"),
        ("p.txt", "# a\n\n", "holds no prompts"),
        ("p.txt", b"a\xff", "is not UTF-8 text"),
    ],
)
def test_bad_lines_are_named(tmp_path: Path, name: str, content: str | bytes, message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        read_prompts(file(tmp_path, name, content))
    with pytest.raises(UserError, match="there is no file of prompts"):
        read_prompts(tmp_path / "none")


@pytest.fixture
def table() -> SideBySide:
    texts = [
        [["The war is long and wide and there is more to say of it", HOSTILE], ["Dear me sir"]],
        [["The war ended", "x\n```\nscript\n````"], ["Dear my sir"]],
    ]
    return SideBySide(["base", "bell"], ["The war ", "Dear [MASK*3] sir"], texts, "t", "64 steps")


def shown(table: SideBySide, width: int) -> str:
    console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
    table.show(console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_table_fits_the_screen(table: SideBySide) -> None:
    for width in (100, 64, 40, 20):
        text = shown(table, width)
        assert max(map(len, text.splitlines())) <= width
        assert not set("\x1b\u202e") & set(text), "no control codes from texts"
        words = re.sub(r"[^a-z]", "", text)
        assert "[bold]x[/bold]" in text or width < 40, "nothing in a text is markup"
        assert words.count("longandwide") == (1 if width < 60 else words.count("longandwide"))
    wide, narrow = shown(table, 100), shown(table, 40)
    assert any("base" in line and "bell" in line for line in wide.splitlines())
    assert not any("base" in line and "bell" in line for line in narrow.splitlines())
    assert [narrow.count(name) for name in ("base", "bell")] == [3, 3], "each text has its run"
    assert wide.rstrip().endswith("64 steps")


class Tags(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.boxes: list[str] = []
        self.given: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        assert not any("//" in (value or "") or name.startswith("on") for name, value in attrs)
        if tag == "pre":
            self.boxes.append("")
            self.given.append("")

    def handle_endtag(self, tag: str) -> None:
        self.tags.append("/" + tag)

    def handle_data(self, data: str) -> None:
        if "pre" in self.tags[-2:] or self.tags[-2:] == ["span", "/span"]:
            self.boxes[-1] += data
            if self.tags[-1] == "span":
                self.given[-1] += data


def test_the_page_has_every_text_and_no_markup_of_theirs(table: SideBySide) -> None:
    page = Tags(table.page())
    assert "script" not in page.tags
    expected = [text for prompt in (0, 1) for run in (0, 1) for text in table.texts[run][prompt]]
    cleaned = [text.replace("\x1b", "·").replace("\u202e", "·") for text in expected]
    assert page.boxes == cleaned
    assert page.given == ["The war ", "", "The war ", "", "", ""]


def test_fences_of_the_markdown_hold(table: SideBySide) -> None:
    lines, inside, found = table.markdown().splitlines(), "", []
    for line in lines:
        if inside:
            if line == inside:
                inside = ""
            else:
                found.append(line)
        elif opened := re.fullmatch(r"(`{3,})text", line):
            inside = opened[1]
        else:
            assert "script" not in line
    assert not inside
    assert HOSTILE.replace("\x1b", "·").replace("\u202e", "·") in found
    assert found[0] == "The war "
    assert len(found) == 8 + 3


def test_files_are_written_and_equal_names_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "new"
    show_side_by_side([""], {"a": [["x"]], "b": [["y"]]}, folder)
    assert sorted(path.name for path in folder.iterdir()) == ["comparison.html", "comparison.md"]
    out = capsys.readouterr().out
    assert "(nothing given)" in out
    assert str(folder / "comparison.html") in out
    with pytest.raises(UserError, match="the same name"):
        SideBySide(["a", "a"], ["p"], [[["x"]], [["y"]]])
    with pytest.raises(UserError, match="is a file"):
        show_side_by_side(["p"], {"a": [["x"]]}, folder / "comparison.md")
