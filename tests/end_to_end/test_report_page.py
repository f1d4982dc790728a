"""report.html: fetches nothing, runs nothing, escapes everything, fits a desktop and a phone."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from bellmask.assemble import train_run
from bellmask.compare.comparison import from_runs
from bellmask.compare.results import summarize
from bellmask.config import RunConfig
from bellmask.report.page import render_page

HOSTILE = "<script>alert('x')</script> & <img src=http://x.test/y.png> \"quoted\""
VOID = {"meta", "link", "br", "img", "hr", "input"}


class Page(HTMLParser):
    """Elements, ids and texts of a page; complains about tags that do not match."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.open: list[str] = []
        self.text: list[tuple[str, str]] = []
        self.feed(text)
        self.close()
        assert not self.open, f"never closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names = [name for name, _ in attrs]
        assert len(names) == len(set(names)), f"<{tag}> has an attribute twice: {names}"
        self.elements.append((tag, {name: value or "" for name, value in attrs}))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag, f"</{tag}> closes something else"

    def handle_data(self, data: str) -> None:
        self.text.append((self.open[-1] if self.open else "", data))

    def texts(self, tag: str) -> list[str]:
        return [text for inside, text in self.text if inside == tag]


@pytest.fixture(scope="module")
def results(
    small_config: Callable[..., RunConfig], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """A real comparison of two runs with two seeds."""
    root = tmp_path_factory.mktemp("runs")
    options = "--train.steps 8 --validation.every 2 --validation.samples-every 8 --log.every 1"
    folders = []
    for law in ("--objective nelbo --law uniform", "--objective bell --law gaussian"):
        for seed in (1, 2):
            folders.append(root / f"{law.split()[1]}-{seed}")
            words = f"{options} {law} --train.seed {seed}".split()
            train_run(small_config(*words), folders[-1], is_quiet=True)
    entries, reference = from_runs(folders)
    return json.loads(json.dumps(summarize(entries, reference)))


@pytest.fixture(scope="module")
def hostile(results: dict[str, Any]) -> dict[str, Any]:
    """The same with markup wherever text comes from outside."""
    changed = json.loads(json.dumps(results))
    bell = changed["variants"].pop("bell")
    bell["samples"] = [HOSTILE, "a\x00\x1b[31m\r\u202e\ufffd" + "</pre>" + "long" * 300]
    bell["options"] = {"law.name": HOSTILE}
    changed["variants"][HOSTILE] = bell
    changed["data"]["train"] = HOSTILE
    changed["options"]["data"]["train"] = HOSTILE
    return changed


@pytest.fixture(scope="module")
def html(results: dict[str, Any]) -> str:
    return render_page(results, "base & bell")


@pytest.fixture(scope="module")
def hostile_html(hostile: dict[str, Any]) -> str:
    return render_page(hostile, HOSTILE)


@pytest.fixture(params=["plain", "hostile"])
def page(request: pytest.FixtureRequest, html: str, hostile_html: str) -> Page:
    return Page({"plain": html, "hostile": hostile_html}[request.param])


def test_nothing_is_fetched_and_nothing_runs(page: Page) -> None:
    for tag, attributes in page.elements:
        assert tag not in ("script", "iframe", "object", "embed", "img", "video", "base", "form")
        for name, value in attributes.items():
            assert not name.startswith("on"), f"<{tag} {name}>"
            if name.startswith("xmlns") or name in ("rdf:resource", "aria-label"):
                continue  # names and words, which no browser fetches
            assert "//" not in value, f"<{tag} {name}={value!r}>"
            if name in ("src", "href", "xlink:href", "data", "action", "srcset"):
                assert value.startswith(("#", "data:")), f"<{tag} {name}={value!r}>"
    for style in page.texts("style"):
        assert "@import" not in style
        assert "//" not in style
        assert not re.search(r"url\((?!#)", style)


def test_ids_are_unique_and_every_reference_finds_its_element(page: Page) -> None:
    ids = Counter(attributes["id"] for _, attributes in page.elements if "id" in attributes)
    assert len(ids) > 20
    assert [name for name, count in ids.items() if count > 1] == []
    wanted = set()
    for _, attributes in page.elements:
        for name, value in attributes.items():
            wanted |= set(re.findall(r"url\(#([^)]+)\)", value))
            if name in ("href", "xlink:href") and value.startswith("#"):
                wanted.add(value[1:])
    assert wanted
    assert wanted <= ids.keys()


def test_figures_scale_and_speak(page: Page, results: dict[str, Any]) -> None:
    figures = [attributes for tag, attributes in page.elements if tag == "svg"]
    assert len(figures) == 2 + len(results["variants"])
    for attributes in figures:
        x, y, width, height = map(float, attributes["viewbox"].split())
        assert (x, y) == (0, 0)
        assert width > 0 < height
        assert attributes["role"] == "img"
        assert len(attributes["aria-label"]) > 3
    assert [a for tag, a in page.elements if tag == "meta" and a.get("name") == "viewport"]
    assert page.elements[0] == ("html", {"lang": "en"})


def test_text_from_outside_is_escaped(hostile_html: str, hostile: dict[str, Any]) -> None:
    page = Page(hostile_html)
    assert page.texts("title") == [HOSTILE]
    assert page.texts("h1") == [HOSTILE]
    samples = page.texts("pre")
    assert HOSTILE in samples
    assert any(HOSTILE in text for text in page.texts("td"))
    assert any(HOSTILE in text for text in page.texts("b"))
    assert any(HOSTILE in text for text in page.texts("p"))
    assert any("</pre>longlong" in text for text in samples), "a sample cannot end its box"
    assert not re.search(r"[\x00-\x08\x0b-\x1f\u202e]", hostile_html), "no control characters"


def test_numbers_of_the_page_are_those_of_the_results(html: str, results: dict[str, Any]) -> None:
    cells = Page(html).texts("td")
    for name, variant in results["variants"].items():
        assert name in cells
        assert f"{variant['nll']:.4f}" in cells
    compared = results["variants"]["bell"]["comparison"]
    assert f"{compared['gap']:+.4f} ± {compared['gap_se_over_seeds']:.4f}" in cells
    for below, begin, end in ((1.0, "bell ", "2 paired seeds."), (-1.0, "base has not", "longer.")):
        progress = {"below_unigram": below, "share_to_arm": None}
        page = Page(render_page({**results, "progress": progress}, "A title"))
        (lead,) = [text for text in page.texts("p") if "base" in text and "bell" in text]
        assert lead.startswith(begin)
        assert lead.endswith(end)


MEASURE = """
<script>
addEventListener("error", event => { document.body.dataset.error = String(event.message); });
addEventListener("load", () => {
  const size = element => {
    const box = element.getBoundingClientRect();
    return [Math.round(box.width), Math.round(box.height), Math.round(box.right)];
  };
  const scrollers = [...document.querySelectorAll(".scroll")];
  document.body.dataset.measured = JSON.stringify({
    inner: innerWidth,
    page: document.documentElement.scrollWidth,
    body: document.body.scrollWidth,
    figures: [...document.querySelectorAll("figure svg")].map(size),
    scrollers: scrollers.map(size),
    hidden: scrollers.filter(e => e.scrollWidth > e.clientWidth
      && getComputedStyle(e).overflowX !== "auto").length,
    samples: [...document.querySelectorAll("pre")].map(size),
    cut: [...document.querySelectorAll("pre")].filter(e => e.scrollWidth > e.clientWidth).length,
    wide: [...document.querySelectorAll("body *")].filter(e => !e.closest(".scroll")
      && e.getBoundingClientRect().right > innerWidth + 1).map(e => e.tagName),
  });
});
</script>
"""

FRAME = """<!doctype html><html><body style="margin:0">
<iframe src="page.html" style="border:0;width:{width}px;height:4000px"></iframe>
<script>
addEventListener("load", () => {{
  const inner = document.querySelector("iframe").contentDocument.body.dataset;
  document.body.dataset.measured = inner.measured || "";
}});
</script></body></html>
"""
"""A browser's window has a smallest width; a frame can be as narrow as a phone."""

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser")
FLAGS = "--headless --no-sandbox --disable-gpu --disable-dev-shm-usage --hide-scrollbars"


def browse(folder: Path, file: str, *more: str) -> tuple[str, str]:
    """(DOM after loading, what was logged)."""
    assert BROWSER is not None
    profile = f"--user-data-dir={folder / 'profile'}"
    done = subprocess.run(
        [BROWSER, *FLAGS.split(), profile, "--enable-logging=stderr", "--v=0",
         "--allow-file-access-from-files", "--virtual-time-budget=10000", *more,
         (folder / file).as_uri()],
        capture_output=True,
        text=True,
        timeout=180,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


@pytest.mark.long
@pytest.mark.skipif(BROWSER is None, reason="needs chromium or chromium-browser on the PATH")
@pytest.mark.parametrize("width", [1280, 400])
@pytest.mark.parametrize("kind", ["plain", "hostile"])
def test_a_browser_shows_it(
    kind: str, width: int, html: str, hostile_html: str, tmp_path: Path
) -> None:
    content = {"plain": html, "hostile": hostile_html}[kind]
    (tmp_path / "page.html").write_text(content.replace("</body>", f"{MEASURE}</body>"))
    (tmp_path / "frame.html").write_text(FRAME.format(width=width))
    dom, log = browse(tmp_path, "frame.html", "--window-size=1280,4000", "--dump-dom")
    assert "CONSOLE" not in log, log
    found = [attributes for tag, attributes in Page(dom).elements if "data-measured" in attributes]
    measured = json.loads(found[0]["data-measured"])
    assert measured["inner"] == width
    assert "error" not in found[0]
    assert len(measured["figures"]) == 4
    for w, h, _ in measured["figures"]:
        assert w > 100
        assert h > 50
    assert measured["page"] <= width
    assert measured["body"] <= width
    assert measured["wide"] == [], "nothing sticks out but what scrolls by itself"
    assert measured["hidden"] == 0
    assert measured["cut"] == 0, "long words of samples are broken"
    assert all(right <= width for _, _, right in measured["scrollers"] + measured["samples"])
    (tmp_path / "untouched.html").write_text(content)
    picture = tmp_path / "picture.png"
    _, log = browse(
        tmp_path, "untouched.html", "--window-size=1280,4000", f"--screenshot={picture}"
    )
    assert "CONSOLE" not in log, log
    assert picture.stat().st_size > 20_000
