"""report.html: fetches nothing, runs nothing, escapes everything, holds the results' numbers."""

import json
import re
from collections import Counter

import pytest
from page_tools import Page

from bellmask.compare.compare import from_runs
from bellmask.compare.report import curves_figure, render_page
from bellmask.compare.results import summarize

HOSTILE = "<script>alert('x')</script> & <img src=http://x.test/y.png> \"quoted\""


@pytest.fixture(scope="module")
def results(zoo):
    entries, reference, *_ = from_runs([zoo / "base", zoo / "bell"])
    return json.loads(json.dumps(summarize(entries, reference)))


@pytest.fixture(scope="module")
def html(results):
    """The page of two runs, with markup wherever text comes from outside."""
    changed = json.loads(json.dumps(results))
    bell = changed["variants"].pop("bell")
    bell["samples"] = [HOSTILE, "a\x00\x1b[31m\r\u202e\ufffd" + "</pre>" + "long" * 300]
    bell["options"] = {"law.name": HOSTILE}
    changed["variants"][HOSTILE] = bell
    changed["data"]["train"] = changed["options"]["data"]["train"] = HOSTILE
    return render_page(changed, HOSTILE)


def test_nothing_is_fetched_nothing_runs_and_every_reference_finds_its_element(html):
    page, wanted = Page(html), set()
    page.check_nothing_is_fetched()
    assert not page.texts("script")
    ids = Counter(attributes["id"] for _, attributes, _ in page.elements if "id" in attributes)
    for _, attributes, _ in page.elements:
        for name, value in attributes.items():
            wanted |= set(re.findall(r"url\(#([^)]+)\)", value))
            if name in ("href", "xlink:href") and value.startswith("#"):
                wanted.add(value[1:])
    assert not re.search(r"@import|//|url\((?!#)", "".join(page.texts("style")))
    assert max(ids.values()) == 1
    assert wanted
    assert wanted <= ids.keys()
    assert sum(tag == "svg" for tag, _, _ in page.elements) == 4


def test_text_from_outside_is_escaped_and_numbers_are_those_of_the_results(html, results):
    page = Page(html)
    assert page.texts("title") == page.texts("h1") == [HOSTILE]
    for tag in ("pre", "td", "b", "p"):
        assert any(HOSTILE in text for text in page.texts(tag)), tag
    assert any("</pre>longlong" in text for text in page.texts("pre")), "a sample ends no box"
    assert not re.search(r"[\x00-\x08\x0b-\x1f\u202e]", html), "no control characters"
    cells = page.texts("td")
    for variant in results["variants"].values():
        assert f"{variant['nll']:.4f}" in cells
    gap = results["variants"]["bell"]["comparison"]["gap"]
    assert any(cell.startswith(f"{gap:+.4f}") for cell in cells)


def test_the_arrow_points_at_the_step_of_arrival(results):
    changed = json.loads(json.dumps(results))
    changed["variants"]["bell"]["comparison"]["speed_up"] = {"mean": 4.0}
    changed["progress"]["below_unigram"] = 1.0
    arrow = next(text for text in curves_figure(changed).axes[0].texts if hasattr(text, "xy"))
    assert arrow.xy[0] == pytest.approx(results["steps"] / 4)
