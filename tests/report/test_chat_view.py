"""The live view of one answer: only the answer, only up to its end, at a pace one can follow."""

from __future__ import annotations

import io

import pytest
import torch
from rich.console import Console

from bellmask.data.tokenizer import ByteTokenizer
from bellmask.errors import UserError
from bellmask.generate.steps import Step
from bellmask.report.chat_view import AnswerView
from bellmask.report.tokens import visible_lines
from bellmask.report.watch import STYLES

BYTES = ByteTokenizer()


def step(number: int, row: str, num_steps: int = 4) -> Step:
    """Bytes; _ is a masked position, $ is EOS."""
    special = {ord("_"): BYTES.mask_id, ord("$"): BYTES.eos_id}
    ids = torch.tensor([[special.get(byte, byte) for byte in row.encode()]])
    return Step(number, num_steps, number, 1 - number / num_steps, 0, ids)


def screen(width: int = 40, height: int = 10, is_terminal: bool = True) -> Console:
    return Console(
        file=io.StringIO(),
        width=width,
        height=height,
        force_terminal=is_terminal,
        color_system="truecolor" if is_terminal else None,
        highlight=False,
        _environ={"TERM": "xterm"},
    )


def shown(*rows: str, **size: int) -> list[str]:
    view = AnswerView(BYTES, fps=0, console=screen(**size))
    for number, row in enumerate(rows):
        view(step(number, row))
    return [line.plain for line in view.render()]


def test_only_the_answer_is_shown_and_only_up_to_its_leftmost_end() -> None:
    assert shown("Hi:____") == ["░░░░", "step 0 of 4"]
    assert shown("Hi:____", "Hi:_b_$")[0] == "░b░|"
    assert shown("Hi:____", "Hi:__$d", "Hi:a_$d")[0] == "a░|", "what is behind is hidden"
    assert shown("Hi:____", "Hi:$___")[0] == "|", "an empty answer"
    assert shown("$Hi____", "$Hiab__")[0] == "ab░░", "an EOS in the prompt ends nothing"
    assert shown("____", " a__", " ab_")[0] == "ab░", "as the finished answer, without the space"


def test_masked_new_and_masked_again_look_different() -> None:
    view = AnswerView(BYTES, fps=0, console=screen())
    for number, row in enumerate(("x____", "xab__", "xa_c_")):
        view(step(number, row))
    line = view.render()[0]
    assert line.plain == "a▓c░"
    styles = {line.plain[span.start]: str(span.style) for span in line.spans}
    expected = {"▓": STYLES["remasked"], "c": STYLES["new"], "░": STYLES["masked"]}
    assert {sign: styles[sign] for sign in expected} == expected


def test_lines_break_where_the_text_does_and_at_the_screen() -> None:
    assert shown("_" * 9, "abc\ndefgh", width=4) == ["abc", "defg", "h", "step 1 of 4"]
    assert shown("_" * 40, width=4, height=6) == ["░░░░", "░░░░", "... 8 more lines", "step 0 of 4"]
    assert shown("__", "a\n")[:2] == ["a", ""]


def test_control_codes_never_reach_the_screen() -> None:
    assert visible_lines("a\x1b[31m\nb\r\x07") == "a·[31m\nb␍·"
    console = screen()
    with AnswerView(BYTES, fps=0, console=console) as view:
        view(step(0, "_____"))
        view(step(1, "\x1b\x07[b]"))
    assert isinstance(console.file, io.StringIO)
    assert "\x07" not in console.file.getvalue()
    assert "··[b]" in "".join(line.plain for line in view.render())


def test_only_changes_that_are_seen_are_held() -> None:
    clock, waits = [0.0], []

    def sleep(seconds: float) -> None:
        waits.append(round(seconds, 6))
        clock[0] += seconds

    view = AnswerView(BYTES, fps=4, console=screen(), clock=lambda: clock[0], sleep=sleep)
    for number, row in enumerate(("____", "____", "a___", "a$__", "a$__", "a$_d", "a$cd")):
        view(step(number, row))
    assert waits == [0.0, 0.25, 0.25], "the canvas, the first letter, the end"
    assert view.seconds_waited == 0.5
    with pytest.raises(UserError, match="--fps"):
        AnswerView(BYTES, fps=-1)


@pytest.mark.parametrize("is_stopped", [False, True])
def test_a_finished_view_goes_away_and_a_stopped_one_stays(is_stopped: bool) -> None:
    console = screen()
    view = AnswerView(BYTES, fps=0, console=console)
    try:
        with view:
            view(step(0, "____"))
            if is_stopped:
                raise KeyboardInterrupt
    except KeyboardInterrupt:
        assert is_stopped
    assert isinstance(console.file, io.StringIO)
    _, _, after = console.file.getvalue().rpartition("\x1b[?25h")
    assert after.count("\x1b[2K") == (0 if is_stopped else 2), "its lines are wiped out"


def test_a_pipe_gets_nothing() -> None:
    console = screen(is_terminal=False)
    with AnswerView(BYTES, console=console) as view:
        view(step(0, "____"))
        view(step(1, "abcd"))
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue() == ""
    assert view.step is not None
    assert view.step.number == 1
