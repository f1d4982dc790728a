"""Pages for a browser and pictures: nothing fetched, texts as texts, a browser replays as we do.

Any text at all in them: ``tests/fuzz/test_reports.py``.
"""

from __future__ import annotations

import io
import json
import random
import re
import shutil
import subprocess

import pytest
import torch
from page_tools import Page
from rich.console import Console

from bellmask.data.tokenizers import ByteTokenizer
from bellmask.generate.generate import SideBySide
from bellmask.generate.sampler import Step
from bellmask.generate.trace import (
    Change,
    Recorder,
    Trace,
    TracedSample,
    lay_out,
    render_trace_page,
    strip_figure,
    strip_steps,
)
from bellmask.report.figures import save_figure
from bellmask.utils.console import reveal_color

HOSTILE = "</script><script>alert('x')</script><!-- & <img src=http://x.test/y.png> \"quoted\""
HOSTILE += "longword" * 20

# texts side by side

BOTH = SideBySide(
    ["The war ", "Dear [MASK*3] sir"],
    {
        "base": [["The war is [bold]x[/bold]", "x\n```\n\x1b[31m\u202e"], ["Dear me sir"]],
        "bell": [["The war ended", "<i>"], ["Dear my sir"]],
    },
    "64 steps",
)
MARKDOWN = [
    *["# base and bell side by side", "64 steps", "## Prompt 1", "```text\nThe war \n```"],
    *["**base**", "```text\nThe war is [bold]x[/bold]\n```", "````text\nx\n```\n·[31m·\n````"],
    *["**bell**", "```text\nThe war ended\n```", "```text\n<i>\n```", "## Prompt 2"],
]


def test_texts_side_by_side_on_the_screen_on_a_page_and_as_markdown():
    for width in (100, 40):
        console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
        BOTH.show(console)
        text = console.file.getvalue()
        assert max(map(len, text.splitlines())) <= width
        assert not set("\x1b\u202e") & set(text), "no control codes from texts"
        assert sum("base" in line and "bell" in line for line in text.splitlines()) == 2
    assert "2. Dear [MASK*3] sir" in text
    assert "[bold]" in text, "nothing in a text is markup"
    assert BOTH.markdown().split("\n\n")[:11] == MARKDOWN
    page = Page(BOTH.page())
    page.check_nothing_is_fetched()
    wanted = [text for prompt in (0, 1) for run in BOTH.runs.values() for text in run[prompt]]
    assert page.texts("pre") == [re.sub("[\x1b\u202e]", "·", text) for text in wanted]
    assert [text for text in page.texts("span") if text] == ["The war "] * 2, "given"


# the trace of a sampler


@pytest.fixture(scope="module")
def trace():
    """Two batches of random bytes, with tokens that change and are masked again."""
    draw, recorder = random.Random(5), Recorder(ByteTokenizer())
    for first, num_rows in ((0, 2), (2, 1)):
        x_BL = torch.full((num_rows, 40), 259)
        x_BL[:, :3] = torch.tensor(list(b"<b>"))
        recorder(Step(0, 20, 0, 1.0, first, x_BL))
        for number in range(1, 21):
            for row in range(num_rows):
                for place in draw.sample(range(3, 40), 5 if number % 3 else 0):
                    masks = [259] * (5 if number <= 15 else 0)
                    x_BL[row, place] = draw.choice([*b"ab <&\n\x00", 0xC3, *masks])
            recorder(Step(number, 20, number, 1 - number / 20, first, x_BL))
    found = recorder.trace("a trace", {"steps": 20}, ["one", "two", "three"])
    assert max(position.num_remasked for position in found.samples[2].at(20)) > 1
    return found


@pytest.fixture(scope="module")
def hostile():
    """Also signs that the font lacks, dollars, texts longer than a line or than the picture."""
    change = Change(1, 0.0, 1, [(1, HOSTILE), (2, "\x1b\u202e$x^{2$\n")], [])
    change.set.extend((i, "日本 $a_{b$ 😀"[i % 11] * 9) for i in range(3, 200))
    sample = TracedSample([HOSTILE] + [None] * 199, [change], HOSTILE + "\x00\nb", 1)
    return Trace(HOSTILE, {HOSTILE: HOSTILE}, 1, [sample])


def test_the_page_holds_the_whole_trace_and_fetches_nothing(trace, hostile):
    for one in (trace, hostile):
        content = render_trace_page(one)
        page = Page(content)
        page.check_nothing_is_fetched()
        assert len(page.texts("script")) == content.count("</script>") == 2
        code = page.texts("style")[0] + page.texts("script")[1]
        assert not re.search(r"@import|url\(|https?:|fetch\(|innerHTML|eval\(", code)
        assert not re.search(r"[\x00-\x08\x0b-\x1f\u202e]", content), "no control characters"
    page = Page(render_trace_page(trace, first=2))
    embedded = json.loads(page.texts("script")[0])
    assert embedded["first"] == 2
    for shown, sample in zip(embedded["samples"], trace.samples, strict=True):
        assert shown["steps"] == [[0, 1, 0], *([c.number, c.t, c.calls] for c in sample.steps)]
        numbers = [[past[1:] for past in position] for position in shown["positions"]]
        assert numbers == [[[*past[1:]] for past in position] for position in sample.history()]


def test_frames_and_places_of_a_strip():
    assert strip_steps(100, 6) == [0, 20, 40, 60, 80, 100]
    assert strip_steps(3, 9) == [0, 1, 2, 3], "never one twice"
    assert strip_steps(0, 4) == [0]
    changes = [Change(1, 0.5, 1, [(0, "long"), (2, "xx")], []), Change(2, 0.0, 2, [(0, "s")], [])]
    sample = TracedSample([None] * 4, changes, "", 2)
    assert lay_out(sample, columns=5, lines=9) == [(0, 0, 4), (0, 4, 1), (1, 0, 2), (1, 2, 1)], (
        "a line is never overfull"
    )
    assert len(lay_out(sample, columns=6, lines=1)) == 2
    assert [width for _, _, width in lay_out(sample, columns=3, lines=9)] == [3, 1, 2, 1]


def test_a_strip_shows_tokens_in_the_color_of_their_step(trace):
    figure = strip_figure(trace, 1, frames=5)
    axes, sample, numbers = figure.axes[0], trace.samples[1], (0, 5, 10, 15, 20)
    labels = [text.get_text() for text in axes.texts if text.get_text().startswith("step")]
    boxes = [c for c in axes.collections if type(c).__name__ == "PatchCollection"]
    for number, label, box in zip(numbers, labels, boxes, strict=True):
        positions = sample.at(number)
        gaps = [p.text for p, token in zip(positions, sample.tokens) if token is None]
        assert label == f"step {number}: {sum(t is not None for t in gaps) / len(gaps):.0%}"
        found = ["#" + "".join(f"{round(255 * p):02x}" for p in c[:3]) for c in box.get_facecolor()]
        assert found == [
            "#d3d6db" if p.text is None else reveal_color(p.since, 20)[0] if p.since else "#ffffff"
            for p in positions
        ]


def test_a_strip_of_any_text_can_be_drawn(hostile, tmp_path):
    figure = strip_figure(hostile, frames=2)
    texts = [text.get_text() for text in figure.axes[0].texts]
    assert any(re.search(r"\(the first \d+ of 200 tokens\)$", text) for text in texts)
    paths = save_figure(figure, tmp_path / "strip")
    assert 'href="http' not in paths[1].read_text(encoding="utf-8")


BROWSER = shutil.which("chromium") or shutil.which("chromium-browser")
FLAGS = "--headless --no-sandbox --disable-gpu --disable-dev-shm-usage --hide-scrollbars --v=0 "
FLAGS += "--dump-dom --enable-logging=stderr --allow-file-access-from-files --window-size=1280,2000"
FRAME = """<!doctype html><html><body style="margin:0">
<iframe src="page.html{where}" style="border:0;width:400px;height:2000px"></iframe>
<script>
setTimeout(() => {{
  const inner = document.querySelector("iframe").contentDocument;
  const style = element => inner.defaultView.getComputedStyle(element);
  document.body.dataset.found = JSON.stringify({{
    now: inner.getElementById("now").textContent,
    play: inner.getElementById("play").textContent,
    slider: inner.getElementById("slider").value,
    spans: [...inner.querySelectorAll("#text span")].map(span =>
      [span.className, span.textContent, style(span).backgroundColor, style(span).color]),
    page: inner.documentElement.scrollWidth,
  }});
}}, 500);
</script></body></html>
"""


def browse(folder, trace, where):
    """What a browser has made of the page, on a phone's screen."""
    (folder / "page.html").write_text(render_trace_page(trace), encoding="utf-8")
    (folder / "frame.html").write_text(FRAME.format(where=where))
    more = [f"--user-data-dir={folder / 'profile'}", "--virtual-time-budget=2500"]
    command = [BROWSER, *FLAGS.split(), *more, (folder / "frame.html").as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr
    assert "CONSOLE" not in done.stderr, done.stderr
    (found,) = [a["data-found"] for _, a, _ in Page(done.stdout).elements if "data-found" in a]
    return json.loads(found)


def rgb(color):
    return "rgb({}, {}, {})".format(*(int(color[i : i + 2], 16) for i in (1, 3, 5)))


@pytest.mark.long
@pytest.mark.skipif(BROWSER is None, reason="needs chromium on the PATH")
@pytest.mark.parametrize(("number", "step"), [(0, 0), (1, 11), (2, 20)])
def test_a_browser_replays_as_we_do(trace, tmp_path, number, step):
    found = browse(tmp_path, trace, f"#sample={number}&step={step}")
    sample = trace.samples[number]
    now = {c.number: c for c in sample.steps}.get(step, Change(step, 0.0, 0, [], []))
    positions = sample.at(step)
    for i, (names, shown, background, ink) in enumerate(found["spans"]):
        (text, since, again), is_given = positions[i], sample.tokens[i] is not None
        kinds = {
            "masked": text is None,
            "given": is_given,
            "new": i in dict(now.set),
            "again": i in now.unset,
            "was": text is not None and again > 0,
        }
        assert set(names.split()) == {kind for kind, is_there in kinds.items() if is_there}
        if text is not None:
            assert shown == text.replace("\n", "↵\n").replace("\x00", "·")
            if since:
                assert (background, ink) == tuple(map(rgb, reveal_color(since, 20)))
    gaps = [p.text for p, token in zip(positions, sample.tokens) if token is None]
    share = round(100 * sum(text is not None for text in gaps) / len(gaps))
    num_remasked = sum(p.num_remasked for p in positions)
    assert found["now"].startswith(f"step {step} of 20 · {share} % unmasked · ")
    assert (f" · {num_remasked} masked again" in found["now"]) == (num_remasked > 0)
    assert (found["slider"], found["play"]) == (str(step), "▶ Play")
    assert found["page"] <= 400
