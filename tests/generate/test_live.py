"""Live views of sampling: what is masked, new, changed, masked again; where it goes; how fast."""

from __future__ import annotations

import io
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console

from bellmask.data.tokenizers import ByteTokenizer
from bellmask.generate.live import STYLES, AnswerView, Watch
from bellmask.generate.sampler import Step

BYTES = ByteTokenizer()


def step(number, *rows, num_steps=4, first=0):
    """Bytes; _ is a masked position, $ is EOS."""
    special = {ord("_"): BYTES.mask_id, ord("$"): BYTES.eos_id}
    ids = [[special.get(byte, byte) for byte in row.encode()] for row in rows]
    return Step(number, num_steps, number, 1 - number / num_steps, first, torch.tensor(ids))


def screen(width=80, height=24, is_terminal=True):
    return Console(
        file=io.StringIO(),
        width=width,
        height=height,
        force_terminal=is_terminal,
        color_system="truecolor" if is_terminal else None,
        highlight=False,
        _environ={"TERM": "xterm"},
    )


def plain(view):
    """The latest frame."""
    return [line.plain for line in view.render(view.frame)]


def kinds(line):
    """The kind of each character, by its first letter (M: masked again)."""
    letters = {style: "M" if name == "remasked" else name[0] for name, style in STYLES.items()}
    found = ["o"] * len(line.plain)
    for span in line.spans:
        found[span.start : span.end] = letters[str(span.style)] * (span.end - span.start)
    return "".join(found)


def test_each_kind_of_position_looks_different():
    assert len(set(STYLES.values())) == len(STYLES)
    watch = Watch(BYTES, fps=0, console=screen())
    frame = step(0, "ab______")
    for number, row in enumerate(("ab______", "abcd____", "abX_e___")):
        frame.ids_BL[:] = step(0, row).ids_BL  # in place, as samplers do
        watch(replace(frame, number=number, num_calls=number, t=1 - number / 4))
    head, line = watch.render(watch.frame)
    assert (line.plain, kinds(line)) == ("abX▓e░░░", "ggcMnmmm")
    assert head.plain.startswith("step 2 of 4   33% unmasked  t 0.500  2 calls  ━━━━━━━━┈┈┈")
    watch(step(3, "abX_e___"))
    line = watch.render(watch.frame)[1]
    assert (line.plain, kinds(line)) == ("abX░e░░░", "ggomommm")


def test_lines_and_samples_fit_the_screen():
    watch = Watch(BYTES, fps=0, console=screen(width=7))
    watch(step(0, "_" * 20))
    watch(step(1, "a word and more text"))
    assert plain(watch)[1:] == ["a word ", "and mor", "e text"]
    watch(step(2, "x_______________\n___"))
    assert plain(watch)[1:] == ["x▓▓▓▓▓▓", "▓▓▓▓▓▓▓", "▓▓↵▓▓▓"]
    samples = [line for n in range(8, 13) for line in (f"sample {n}", "░" * 10, "░" * 5)]
    for height in (18, 17):
        watch = Watch(BYTES, fps=0, console=screen(10, height))
        watch(step(0, *["_" * 15] * 5, first=8))
        if height == 17:
            assert plain(watch)[1:-1] == samples[:-2]
            assert plain(watch)[-1].startswith("... the rest")
        else:
            assert plain(watch)[1:] == samples


def test_a_pipe_gets_nothing_and_a_plain_terminal_no_signs():
    console = screen(is_terminal=False)
    with Watch(BYTES, fps=0.01, console=console) as watch:  # would wait for minutes
        for number in range(101):
            watch(step(number, "a" * number + "_" * (100 - number), num_steps=100))
    assert not console.file.getvalue()
    watch = Watch(BYTES, fps=0, console=screen())
    watch(step(0, "\x1b\x07[b]\xff"))
    assert plain(watch)[1] == "··[b]\\xc3\\xbf", "no control codes"
    file = type("Ascii", (io.StringIO,), {"encoding": "ascii"})()
    watch = Watch(BYTES, fps=0, console=Console(file=file, width=80, force_terminal=True))
    for number, (row, shown) in enumerate((("a_\n", "a_/"), ("__\n", "#_/"))):
        watch(step(number, row))
        assert plain(watch)[1] == shown


def held(monkeypatch, view, frames):
    """Seconds that a view waits before each of (row, seconds since the last one)."""
    clock, waits = [0.0], []

    def sleep(seconds):
        waits.append(round(seconds, 6))
        clock[0] += seconds

    time = SimpleNamespace(monotonic=lambda: clock[0], sleep=sleep)
    monkeypatch.setattr("bellmask.generate.live.time", time)
    shown = view(BYTES, fps=4, console=screen())
    for number, (row, took) in enumerate(frames):
        clock[0] += took
        shown(step(number, row))
    return waits


def test_steps_are_held_until_they_have_been_seen(monkeypatch):
    slow = [("____", took) for took in (0.0, 0.05, 0.05, 3.0)]
    assert held(monkeypatch, Watch, slow) == [0.0, 0.2, 0.2, 0.0], "a slow model is not held up"
    rows = ("____", "____", "a___", "a$__", "a$__", "a$_d", "a$cd")
    found = held(monkeypatch, AnswerView, [(row, 0.0) for row in rows])
    assert found == [0.0, 0.25, 0.25], "the canvas, the first letter, the end"


def answer(*rows, **size):
    view = AnswerView(BYTES, fps=0, console=screen(**size))
    for number, row in enumerate(rows):
        view(step(number, row))
    return plain(view)


def test_only_the_answer_is_shown_and_only_up_to_its_leftmost_end():
    assert answer("Hi:____") == ["░░░░", "step 0 of 4"]
    assert answer("Hi:____", "Hi:_b_$")[0] == "░b░|"
    assert answer("Hi:____", "Hi:__$d", "Hi:a_$d")[0] == "a░|", "what is behind is hidden"
    assert answer("$Hi____", "$Hiab__")[0] == "ab░░", "an EOS in the prompt ends nothing"
    assert answer("____", " a__", " ab_")[0] == "ab░", "as the finished answer, without the space"
    assert answer("x____", "xab__", "xa_c_")[0] == "a▓c░"
    assert answer("_" * 9, "abc\ndefgh", width=4) == ["abc", "defg", "h", "step 1 of 4"]
    found = answer("_" * 40, width=4, height=6)
    assert (found[:2], found[3:]) == (["░░░░"] * 2, ["step 0 of 4"]), "the third says there is more"
    assert answer("__", "a\n")[:2] == ["a", ""]


@pytest.mark.parametrize(
    ("is_terminal", "is_stopped"), [(True, False), (True, True), (False, True)]
)
def test_a_finished_answer_goes_away_and_a_stopped_one_stays(is_terminal, is_stopped):
    console = screen(is_terminal=is_terminal)
    try:
        with AnswerView(BYTES, fps=0, console=console) as view:
            view(step(0, "____"))
            if is_stopped:
                raise KeyboardInterrupt
    except KeyboardInterrupt:
        assert is_stopped
    text = console.file.getvalue()
    after = text.rpartition("\x1b[?25h")[2]
    assert after.count("\x1b[2K") == (0 if is_stopped else 2), "its lines are wiped out"
    assert bool(text) == is_terminal, "a pipe gets nothing"
