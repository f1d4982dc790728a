"""The live view: what is masked, new, changed and masked again; where it goes; how fast."""

from __future__ import annotations

import io
import re

import pytest
import torch
from rich.console import Console
from rich.text import Text

from bellmask.data.tokenizer import ByteTokenizer
from bellmask.errors import UserError
from bellmask.generate.steps import Step
from bellmask.report.tokens import plain_ascii, reveal_colours, visible
from bellmask.report.watch import STYLES, Watch

BYTES = ByteTokenizer()


def ids(*rows: str) -> torch.Tensor:
    """Bytes; _ is a masked position."""
    return torch.tensor([[259 if c == ord("_") else c for c in row.encode()] for row in rows])


def step(number: int, *rows: str, num_steps: int = 4, first: int = 0) -> Step:
    return Step(number, num_steps, number, 1 - number / num_steps, first, ids(*rows))


def screen(*, width: int = 80, height: int = 24, is_terminal: bool = True) -> Console:
    return Console(
        file=io.StringIO(),
        width=width,
        height=height,
        force_terminal=is_terminal,
        color_system="truecolor" if is_terminal else None,
        highlight=False,
        _environ={"TERM": "xterm"},
    )


def written(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def lines(watch: Watch, height: int | None = -1) -> list[Text]:
    """The latest frame."""
    assert watch._frame is not None
    shown = watch.render(watch._frame, height).renderables
    assert all(isinstance(line, Text) for line in shown)
    return shown  # type: ignore[return-value]


def kinds(line: Text) -> str:
    """The kind of each character, by its first letter (M: masked again)."""
    names = {style: name for name, style in STYLES.items()}
    letters = {"remasked": "M", **{name: name[0] for name in STYLES if name != "remasked"}}
    found = ["o"] * len(line.plain)
    for span in line.spans:
        for place in range(span.start, span.end):
            found[place] = letters[names[str(span.style)]]
    return "".join(found)


def test_each_kind_of_position_looks_different() -> None:
    assert len(set(STYLES.values())) == len(STYLES)
    watch = Watch(BYTES, fps=0, console=screen())
    for frame in (step(0, "ab______"), step(1, "abcd____"), step(2, "abX_e___")):
        watch(frame)
    head, line = lines(watch)
    assert line.plain == "abX▓e░░░"
    assert kinds(line) == "ggcMnmmm"
    assert head.plain.startswith("step 2 of 4   33% unmasked  t 0.500  2 calls  ━━━━━━━━┈┈┈")
    watch(step(3, "abX_e___"))
    assert lines(watch)[1].plain == "abX░e░░░"
    assert kinds(lines(watch)[1]) == "ggomommm"


def test_the_sampler_may_change_its_rows_afterwards() -> None:
    watch, x = Watch(BYTES, fps=0, console=screen()), ids("____")
    watch(Step(0, 2, 0, 1.0, 0, x))
    x[0, 1] = ord("b")
    watch(Step(1, 2, 1, 0.5, 0, x))
    x[0, 2] = ord("c")
    assert kinds(lines(watch)[1]) == "mnmm"
    watch(Step(2, 2, 2, 0.0, 0, x))
    assert kinds(lines(watch)[1]) == "monm"


def test_every_position_keeps_its_place_and_no_line_is_too_wide() -> None:
    watch = Watch(BYTES, fps=0, console=screen(width=7))
    watch(step(0, "_" * 20))
    watch(step(1, "a word and more text"[:20]))
    assert [line.plain for line in lines(watch)[1:]] == ["a word ", "and mor", "e text"]
    watch(step(2, "x_______________\n___"))
    assert [line.plain for line in lines(watch)[1:]] == ["x▓▓▓▓▓▓", "▓▓▓▓▓▓▓", "▓▓↵▓▓▓"]


def test_samples_are_stacked_as_far_as_they_fit() -> None:
    watch = Watch(BYTES, fps=0, console=screen(width=10, height=11))
    watch(step(0, *["_" * 15] * 5, first=8))
    shown = [line.plain for line in lines(watch)]
    assert shown[1:] == ["sample 8", "░" * 10, "░" * 5, "sample 9", "░" * 10, "░" * 5,
                         "... 3 more samples"]  # fmt: skip
    assert len(lines(watch, height=None)) == 1 + 5 * 3, "without a screen all are there"
    watch(step(0, "_" * 200))
    shown = [line.plain for line in lines(watch)]
    assert len(shown) == 9 <= 11 - 2
    assert shown[-1] == "... 13 more lines"
    watch(step(0, *["_" * 200] * 3))
    assert lines(watch)[-1].plain == "... 14 more lines and 2 more samples"


def test_a_terminal_gets_one_view_that_is_redrawn() -> None:
    console = screen()
    with Watch(BYTES, fps=0, console=console, title="bell") as watch:
        for frame in (step(0, "____"), step(1, "a___"), step(2, "abcd")):
            watch(frame)
    text = written(console)
    assert "\x1b[1A" in text, "the cursor goes up"
    assert "bell  step 2 of 4" in re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)
    assert text.rstrip().endswith("\x1b[?25h"), "the cursor is shown again"


def test_the_last_frame_can_be_taken_away() -> None:
    sizes = []
    for keep_last in (True, False):
        console = screen()
        with Watch(BYTES, fps=0, console=console, keep_last=keep_last) as watch:
            watch(step(0, "____"))
        sizes.append(written(console).count("\x1b[2K"))
    assert sizes[1] > sizes[0]


def test_a_pipe_gets_plain_frames_now_and_then() -> None:
    console = screen(is_terminal=False)
    with Watch(BYTES, fps=5, console=console, sleep=lambda _: pytest.fail("it waits")) as watch:
        for number in range(101):
            watch(step(number, "a" * number + "_" * (100 - number), num_steps=100))
        for number in range(4):  # the second batch stops early
            watch(step(number, "b" * number + "_" * (10 - number), num_steps=100, first=1))
    text = written(console)
    assert "\x1b" not in text
    numbers = [int(found) for found in re.findall(r"step (\d+) of", text)]
    assert numbers == [0, 13, 25, 38, 50, 63, 75, 88, 100, 0, 3]
    assert "a" * 80 in text
    assert text.rstrip().endswith("bbb" + "░" * 7)


def test_few_steps_are_all_printed_once() -> None:
    console = screen(is_terminal=False)
    with Watch(BYTES, console=console) as watch:
        for number in range(4):
            watch(step(number, "a" * number + "_" * (3 - number), num_steps=3))
    assert re.findall(r"step (\d+) of", written(console)) == ["0", "1", "2", "3"]
    console = screen(is_terminal=False)
    with Watch(BYTES, console=console) as watch:
        watch(step(0, "a_"))
        watch(step(0, "b_"))
    assert re.findall("[ab]░", written(console)) == ["a░", "b░"], "each batch has its own frames"


def test_steps_are_held_until_they_have_been_seen() -> None:
    clock, waits = [0.0], []

    def sleep(seconds: float) -> None:
        waits.append(round(seconds, 6))
        clock[0] += seconds

    watch = Watch(BYTES, fps=4, console=screen(), clock=lambda: clock[0], sleep=sleep)
    for number, took in enumerate((0.0, 0.05, 0.05, 3.0)):
        clock[0] += took
        watch(step(number, "____"))
    assert waits == [0.0, 0.2, 0.2, 0.0], "a slow model is not held up"
    with pytest.raises(UserError, match="--fps"):
        Watch(BYTES, fps=-1)


def test_control_codes_of_a_text_never_reach_the_screen() -> None:
    assert visible("a\x1b[31m\n\t\x00\u202eé日") == "a·[31m↵⇥··é日"
    console = screen(is_terminal=False)
    with Watch(BYTES, console=console) as watch:
        watch(step(0, "\x1b\x07[b]\xff"))
    assert not set("\x1b\x07") & set(written(console))
    assert "··[b]\\xc3\\xbf" in written(console), "nor is [b] markup"


def test_a_screen_that_knows_ascii_only() -> None:
    class Ascii(io.StringIO):
        encoding = "ascii"

    file = Ascii()
    console = Console(file=file, width=80, height=24, force_terminal=False, highlight=False)
    with Watch(BYTES, console=console) as watch:
        watch(step(0, "a_\n"))
        watch(step(1, "__\n"))
    assert file.getvalue().isascii()
    assert "a_/" in file.getvalue()
    assert "#_/" in file.getvalue()
    assert plain_ascii("é░") == "\\xe9_"


def test_texts_can_be_read_on_every_colour() -> None:
    def luminance(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        parts = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return sum(weight * p for weight, p in zip((0.2126, 0.7152, 0.0722), parts))

    for pair in reveal_colours():
        dark, light = sorted(map(luminance, pair))
        assert (light + 0.05) / (dark + 0.05) >= 4.5, "WCAG AA"
    assert reveal_colours()[0] == ("#440154", "#ffffff"), "viridis begins so"
    assert reveal_colours()[-1] == ("#fde725", "#000000")
