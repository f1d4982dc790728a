"""The animated page and the strip: nothing fetched, text escaped, a browser replays as we do."""

from __future__ import annotations

import json
import random
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch

from bellmask.data.tokenizer import ByteTokenizer
from bellmask.errors import UserError
from bellmask.generate.steps import Step
from bellmask.generate.trace import Change, Recorder, Sample, Trace
from bellmask.report.plots import save_figure
from bellmask.report.tokens import colour_of
from bellmask.report.trace_page import render_trace_page
from bellmask.report.trace_strip import chosen_steps, lay_out, strip_figure

HOSTILE = "</script><script>alert('x')</script><!-- & <img src=http://x.test/y.png> \"quoted\""
HOSTILE += "longword" * 20
VOID = {"meta", "link", "input"}


class Page(HTMLParser):
    """Elements with their attributes and texts; complains about tags that do not match."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str], list[str]]] = []
        self.open: list[int] = []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}, []))
        if tag not in VOID:
            self.open.append(len(self.elements) - 1)

    def handle_endtag(self, tag: str) -> None:
        assert self.elements[self.open.pop()][0] == tag

    def handle_data(self, data: str) -> None:
        if self.open:
            self.elements[self.open[-1]][2].append(data)

    def texts(self, tag: str) -> list[str]:
        return ["".join(texts) for name, _, texts in self.elements if name == tag]

    def embedded(self) -> dict[str, Any]:
        return json.loads(self.texts("script")[0])


def remasking_trace(title: str = "a trace") -> Trace:
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
    return recorder.trace(title, {"steps": 20})


@pytest.fixture(scope="module")
def trace() -> Trace:
    trace = remasking_trace()
    assert max(trace.samples[2].remasked(20)) > 1
    return trace


@pytest.fixture(scope="module")
def hostile() -> Trace:
    change = Change(1, 0.0, 1, [(1, HOSTILE), (2, "\x1b\u202e$x^{2$\n")], [])
    sample = Sample([True, False, False], [HOSTILE, None, None], [change], HOSTILE + "\x00\nb", 1)
    return Trace(HOSTILE, {HOSTILE: HOSTILE}, 1, [sample])


def test_nothing_is_fetched(trace: Trace, hostile: Trace) -> None:
    for one in (trace, hostile):
        page = Page(render_trace_page(one))
        assert [tag for tag, _, _ in page.elements].count("script") == 2
        for tag, attributes, _ in page.elements:
            assert tag not in ("iframe", "object", "embed", "img", "video", "base", "form")
            for name, value in attributes.items():
                assert not name.startswith("on")
                assert "//" not in value
                assert name not in ("src", "href") or value == "data:,"
        code = page.texts("style")[0] + page.texts("script")[1]
        assert not re.search(r"@import|url\(|https?:|fetch\(|innerHTML|eval\(", code)
        policy = [a["content"] for _, a, _ in page.elements if a.get("http-equiv")]
        assert policy[0].startswith("default-src 'none'")


def test_text_from_outside_is_escaped(hostile: Trace) -> None:
    content = render_trace_page(hostile)
    page = Page(content)
    assert page.texts("title") == page.texts("h1") == [HOSTILE]
    assert page.texts("td") == [HOSTILE, HOSTILE]
    assert page.texts("pre") == [f"{HOSTILE}·\nb"]
    assert not re.search(r"[\x00-\x08\x0b-\x1f\u202e]", content), "no control characters"
    (sample,) = page.embedded()["samples"]
    assert sample["tokens"] == [HOSTILE, None, None]
    assert sample["last"] == [HOSTILE, HOSTILE, "··$x^{2$↵\n"]
    assert content.count("</script>") == 2
    assert not set("<>&") & set(page.texts("script")[0]), "nothing there can be taken for markup"


def test_the_page_holds_the_whole_trace(trace: Trace) -> None:
    page = Page(render_trace_page(trace, first=2))
    embedded = page.embedded()
    assert embedded["first"] == 2
    assert [s["num_steps"] for s in embedded["samples"]] == [20] * 3
    assert [s["given"] for s in embedded["samples"]] == [s.given for s in trace.samples]
    for shown, sample in zip(embedded["samples"], trace.samples, strict=True):
        assert [(c["number"], c["t"], c["calls"], c["unset"]) for c in shown["steps"]] == [
            (c.number, c.t, c.calls, c.unset) for c in sample.steps
        ]
    assert len(page.texts("pre")) == 3
    assert "3 samples of 40 tokens, 40 network calls in all." in page.texts("p")


def test_frames_go_from_the_canvas_to_the_end() -> None:
    assert chosen_steps(100, 6) == [0, 20, 40, 60, 80, 100]
    assert chosen_steps(3, 9) == [0, 1, 2, 3], "never one twice"
    assert chosen_steps(0, 4) == [0]
    with pytest.raises(UserError, match="--frames"):
        chosen_steps(10, 1)


def test_places_do_not_depend_on_the_frame() -> None:
    changes = [Change(1, 0.5, 1, [(0, "long"), (2, "xx")], []), Change(2, 0.0, 2, [(0, "s")], [])]
    sample = Sample([False] * 4, [None] * 4, changes, "", 2)
    places = [(p.line, p.column, p.width) for p in lay_out(sample, columns=6, lines=9)]
    assert places == [(0, 0, 4), (0, 4, 1), (1, 0, 2), (1, 2, 1)], "a line is never overfull"
    assert len(lay_out(sample, columns=6, lines=1)) == 2
    assert [p.width for p in lay_out(sample, columns=3, lines=9)] == [3, 1, 2, 1]


def test_the_strip_shows_tokens_in_the_colour_of_their_step(trace: Trace, tmp_path: Path) -> None:
    figure = strip_figure(trace, 1, frames=5)
    axes, sample = figure.axes[0], trace.samples[1]
    labels = [text.get_text() for text in axes.texts if text.get_text().startswith("step")]
    gaps = [i for i in range(40) if not sample.given[i]]
    shares = [
        sum(sample.at(n)[i] is not None for i in gaps) / len(gaps) for n in (0, 5, 10, 15, 20)
    ]
    steps = zip((0, 5, 10, 15, 20), shares)
    assert labels == [f"step {n}: {share:.0%}" for n, share in steps]
    assert [text.get_text() for text in figure.texts] == ["a trace, sample 1"]
    boxes = [c for c in axes.collections if type(c).__name__ == "PatchCollection"]
    assert [len(c.get_facecolor()) for c in boxes] == [40] * 5
    for number, box in zip((0, 5, 10, 15, 20), boxes, strict=True):
        found = ["#" + "".join(f"{round(255 * p):02x}" for p in c[:3]) for c in box.get_facecolor()]
        texts, since = sample.at(number), sample.since(number)
        expected = [
            "#d3d6db" if text is None else "#ffffff" if n is None else colour_of(n, 20)[0]
            for text, n in zip(texts, since, strict=True)
        ]
        assert found == expected
    paths = save_figure(figure, tmp_path / "strip")
    assert [path.suffix for path in paths] == [".png", ".svg"]
    assert "http://" not in re.sub(r'xmlns[^=]*="[^"]*"|"http://[^"]*"', "", paths[1].read_text())


def test_a_strip_of_any_text_can_be_drawn(hostile: Trace, tmp_path: Path) -> None:
    """Signs that the font lacks, dollars, texts longer than a line or than the picture."""
    change = Change(1, 0.0, 1, [(i, "日本 $a_{b$ 😀"[i % 11] * 9) for i in range(300)], [])
    sample = Sample([False] * 300, [None] * 300, [change], "x", 1)
    odd = Trace("$title_{ 日" + "x" * 200, {}, 1, [sample, sample])
    for number, one in enumerate((hostile, odd)):
        save_figure(strip_figure(one, frames=2), tmp_path / str(number))
    title = strip_figure(odd).texts[0].get_text()
    assert title.endswith("..., sample 0 (the first 108 of 300 tokens)")
    with pytest.raises(UserError, match="--sample must be from 0 to 1, got 2"):
        strip_figure(odd, 2)


BROWSER = shutil.which("chromium") or shutil.which("chromium-browser")
FLAGS = "--headless --no-sandbox --disable-gpu --disable-dev-shm-usage --hide-scrollbars"
FRAME = """<!doctype html><html><body style="margin:0">
<iframe src="page.html{where}" style="border:0;width:{width}px;height:2000px"></iframe>
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
    wide: [...inner.querySelectorAll("body *")].filter(e =>
      e.getBoundingClientRect().right > {width} + 1).map(e => e.tagName),
  }});
}}, {wait});
</script></body></html>
"""


def browse(folder: Path, trace: Trace, where: str, width: int = 1280, wait: int = 500) -> Any:
    """What a browser has made of the page after so many (virtual) milliseconds."""
    assert BROWSER is not None
    (folder / "page.html").write_text(render_trace_page(trace), encoding="utf-8")
    (folder / "frame.html").write_text(FRAME.format(where=where, width=width, wait=wait))
    done = subprocess.run(
        [BROWSER, *FLAGS.split(), f"--user-data-dir={folder / 'profile'}", "--dump-dom",
         "--enable-logging=stderr", "--v=0", "--allow-file-access-from-files",
         "--window-size=1280,2000", f"--virtual-time-budget={wait + 2000}",
         (folder / "frame.html").as_uri()],
        capture_output=True,
        text=True,
        timeout=180,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "CONSOLE" not in done.stderr, done.stderr
    (found,) = [a["data-found"] for _, a, _ in Page(done.stdout).elements if "data-found" in a]
    return json.loads(found)


needs_browser = pytest.mark.skipif(
    BROWSER is None, reason="needs chromium or chromium-browser on the PATH"
)


def rgb(colour: str) -> str:
    return "rgb({}, {}, {})".format(*(int(colour[i : i + 2], 16) for i in (1, 3, 5)))


@pytest.mark.long
@needs_browser
@pytest.mark.parametrize(("number", "step"), [(0, 0), (0, 4), (1, 11), (2, 14), (2, 20)])
def test_a_browser_replays_as_we_do(trace: Trace, tmp_path: Path, number: int, step: int) -> None:
    found = browse(tmp_path, trace, f"#sample={number}&step={step}")
    sample = trace.samples[number]
    texts, since, again = sample.at(step), sample.since(step), sample.remasked(step)
    now = {c.number: c for c in sample.steps}.get(step)
    for i, (names, shown, background, ink) in enumerate(found["spans"]):
        kinds = set(names.split())
        assert ("masked" in kinds) == (texts[i] is None)
        assert ("given" in kinds) == sample.given[i]
        assert ("new" in kinds) == (now is not None and i in dict(now.set))
        assert ("again" in kinds) == (now is not None and i in now.unset)
        assert ("was" in kinds) == (texts[i] is not None and again[i] > 0)
        if texts[i] is not None:
            assert shown == texts[i].replace("\n", "↵\n").replace("\x00", "·")
        if since[i] is not None:
            assert (background, ink) == tuple(map(rgb, colour_of(since[i], 20)))
    gaps = [text for text, given in zip(texts, sample.given) if not given]
    share = round(100 * sum(text is not None for text in gaps) / len(gaps))
    assert found["now"].startswith(f"step {step} of 20 · {share} % unmasked · ")
    assert (f" · {sum(again)} masked again" in found["now"]) == (sum(again) > 0)
    assert (" · t " in found["now"]) == (now is not None or step == 0)
    assert found["slider"] == str(step)
    assert found["play"] == "▶ Play"


@pytest.mark.long
@needs_browser
def test_the_page_plays_by_itself_and_stops_at_the_end(trace: Trace, tmp_path: Path) -> None:
    halfway = browse(tmp_path, trace, "", wait=4000)
    assert 0 < int(halfway["slider"]) < 20
    assert halfway["play"] == "⏸ Pause"
    finished = browse(tmp_path, trace, "", wait=15000)
    assert finished["slider"] == "20"
    assert finished["play"] == "▶ Play"


@pytest.mark.long
@needs_browser
@pytest.mark.parametrize("width", [1280, 400])
def test_it_fits_a_desktop_and_a_phone(
    trace: Trace, hostile: Trace, tmp_path: Path, width: int
) -> None:
    for one in (trace, hostile):
        found = browse(tmp_path, one, "#step=1", width)
        assert found["page"] <= width
        assert found["wide"] == []
