"""Clean text of a Wikipedia dump: markup, pages, the cuts between splits, and the fetch."""

from __future__ import annotations

import gzip
import hashlib
import io
import itertools
import json
import tarfile
from dataclasses import replace
from shutil import copytree

import pytest
from commands import refuses, succeeds

from bellmask.config.options import DataOptions
from bellmask.data.corpora import CORPORA, InWheel, open_corpus
from bellmask.data.prepare import load_data
from bellmask.data.readers import DOCUMENT_RULES, Wheel
from bellmask.data.tokenizers import ByteTokenizer
from bellmask.data.wikipedia import LEAST_CHARACTERS, articles, clean_wikitext
from bellmask.utils.errors import UserError

MARKUP = {
    "'''Bold''' and ''italic'', ''''both''''": "Bold and italic, both",
    "a [[target|text]], [[plain]]s, [[:Category:Shown]]": "a text, plains, Category:Shown",
    "[[Mercury (planet)|]] and [[Help:Links|]]": "Mercury and Links",
    "[[CSI: Miami]] is kept": "CSI: Miami is kept",
    "end\n[[Category:Gone]]\n[[de:Weg]]\n[[zh-min-nan:X]]\n[[simple:X]]": "end",
    "a[[Image:x.png|thumb|A [[link|caption]] of [[file]]]] b [[File:y.jpg]]c": "a b c",
    "unpaired [[one and [[two|second]] and ]] three": "unpaired one and second and three",
    "{{Box|a={{inner|{{deep}}}}|b=[[x]]}}Text {{cite}}.": "Text.",
    "unclosed {{one, {{two}} done": "unclosed {{one, done",
    "a\n{| class=x\n! head\n|-\n| {|\n| in\n|}\n|}\nb": "a\nb",
    "a\n{| broken\n|-\n| cell\n! head\nb": "a\nb",
    "x<!-- hidden [[ {{ -->y<!-- open": "xy",
    "a<ref name=b>c</ref>, d<ref name=b />. <math>x^2</math>": "a, d.",
    "<gallery>\nImage:x.png\n</gallery>\n<timeline>\nz\n</timeline>\nafter": "after",
    "one<br />two <b>three</b> H<sub>2</sub>O <span style='a'>four</span>": (
        "one\ntwo three H2O four"
    ),
    "see [http://a.org/b the site], [http://a.org] and http://a.org/c.": "see the site, and.",
    "(mail mailto:a@b.c) [ftp://x y]": "(mail) y",
    "== Life ==\n===Early===\n= Top =\n==560== In this year": "Life\nEarly\nTop\n560 In this year",
    "* one\n** two\n# three\n: four\n; five: six\n----\n preformatted": (
        "one\ntwo\nthree\nfour\nfive: six\npreformatted"
    ),
    "a&nbsp;b &ndash; c &amp;amp; d &lt;tag&gt; 1 < 2": "a b \u2013 c &amp; d <tag> 1 < 2",
    "Bern ({{IPA|x}}) is ( , a) city , of () note  ; main() too .": (
        "Bern is (a) city, of note; main() too."
    ),
    "__NOTOC__\n\n\nÜber 日本\n\n...\n": "Über 日本",
}


@pytest.mark.parametrize(("markup", "text"), MARKUP.items())
def test_markup_becomes_text(markup, text):
    assert clean_wikitext(markup) == text


def test_unpaired_marks_in_great_number_are_no_trouble():
    """Takes seconds; it would take hours if a rule began anew at every mark."""
    parts = "{{ [[ ]] [http:// [[a|( <math> <!-- <ref \n{| , (( == http://. '' &lt; <p"
    for part in [*parts.split(" "), "[http://a b", "( ,", "[[a|b ", " ,;"]:
        assert "word" in clean_wikitext("word\n" + part * 50_000)
        assert "word" in clean_wikitext("word\n" + part * 20_000 + "]]" * 20_000)


FILLER = "Plain words that make it long enough. " * 4


def page(title, text, end="  </page>\n"):
    head = f"  <page>\n    <title>{title}</title>\n    <id>1</id>\n"
    return f'{head}      <text xml:space="preserve">{text}</text>\n{end}'


def clean(title):
    return f"{title}\n{FILLER.strip()}"


def test_later_dumps_name_namespace_and_redirects_by_elements():
    kept = page("Hund", FILLER).replace("<id>", "<ns>0</ns><id>")
    others = [page("Kategorie:Hund", FILLER).replace("<id>", "<ns>14</ns><id>")]
    others.append(kept.replace("<id>", '<redirect title="Haushund" /><id>'))
    assert list(articles("".join([*others, kept]).splitlines(keepends=True))) == [clean("Hund")]


def test_only_articles_are_kept():
    dump = "<mediawiki>\n  <siteinfo>\n  </siteinfo>\n" + "".join(
        [
            page("AT&amp;T", f"&lt;!-- x --&gt;{FILLER}&amp;ndash; '''end'''"),
            page("Old", "#redirect [[New]] " + FILLER),
            page("Wikipedia:About", FILLER),
            page("User talk:Me", FILLER),
            page("Stub", "x" * (LEAST_CHARACTERS - 1)),
            page("Batman: Year One", FILLER),
            page("Empty", "").replace("></text>", " />"),
            page("Cut off", FILLER, end=""),
        ]
    )
    found = list(articles(io.StringIO(dump)))
    assert found == [clean("AT&T") + " \u2013 end", clean("Batman: Year One")]
    pieces = DOCUMENT_RULES["wikipage"](io.StringIO(dump))
    assert [piece.text for piece in pieces] == found


# --- splits, and where the text comes from ---------------------------------------------------

PAGES = [page(f"Ä {name}", FILLER) for name in ("one", "two", "three", "four")]
DUMP = ("<mediawiki>\n" + "".join(PAGES) + page("Cut", FILLER, end="")).encode()
ENDS = list(itertools.accumulate(len(part.encode()) for part in ["<mediawiki>\n", *PAGES]))
MEMBER = "bellmask_testdata-1.0/data/enwik8.gz"


@pytest.fixture
def sdist(tmp_path, monkeypatch):
    """A small enwik8 in an sdist that pip finds; its code must not be run."""
    path = tmp_path / "index" / "bellmask_testdata-1.0.tar.gz"
    path.parent.mkdir()
    backend = '[build-system]\nrequires = ["hatchling"]\nbuild-backend = "hatchling.build"\n'
    files = {
        "pyproject.toml": backend.encode(),
        "setup.py": b"raise SystemExit('was run')",
        "PKG-INFO": b"Metadata-Version: 2.1\nName: bellmask-testdata\nVersion: 1.0\n",
        "data/enwik8.gz": gzip.compress(DUMP),
    }
    with tarfile.open(path, "w:gz") as archive:
        for name, content in files.items():
            info = tarfile.TarInfo(f"bellmask_testdata-1.0/{name}")
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    wheel = Wheel("bellmask-testdata", "1.0", digest, is_sdist=True)
    part = InWheel(wheel, MEMBER, hashlib.sha256(DUMP).hexdigest())
    # one byte into page two, which is train's; exactly where page four begins
    first, second, end = ENDS[1] + 1, ENDS[3], len(DUMP)
    spans = {"train": (0, first), "valid": (first, second), "test": (second, end)}
    corpus = replace(CORPORA["enwik8_text"], splits=dict.fromkeys(spans, part), spans=spans)
    monkeypatch.setitem(CORPORA, "enwik8_text", corpus)
    monkeypatch.setitem(CORPORA, "enwik8", replace(CORPORA["enwik8"], splits={"train": part}))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(path.parent))
    return path


def read(options, split, cache):
    source, _ = open_corpus(options, split, cache)
    return source.identity, [piece.text for piece in source.read()]


def test_an_article_is_in_the_split_in_which_its_page_begins(sdist, tmp_path):
    expected = {"train": ["one", "two"], "valid": ["three"], "test": ["four"]}
    (tmp_path / "enwik8").write_bytes(DUMP)
    (tmp_path / "own.gz").write_bytes(gzip.compress(DUMP))
    cache, identities = tmp_path / "cache", {}
    for place in (None, tmp_path / "enwik8", tmp_path / "own.gz"):
        options = DataOptions(train="enwik8_text", from_files=place and str(place))
        for split, names in expected.items():
            identity, texts = read(options, split, cache)
            assert texts == [clean(f"Ä {name}") for name in names]
            assert identities.setdefault(split, identity) == identity
        if place is None:
            sdist.rename(sdist.with_suffix(".away"))  # from the cache from now on
            assert read(options, "train", cache)[1]
            assert read(DataOptions(train="enwik8"), "train", cache)[1] == [DUMP.decode()]
            sdist.with_suffix(".away").rename(sdist)
    assert len({*identities.values()}) == 3
    (tmp_path / "enwik8").write_bytes(DUMP[:-1])
    with pytest.raises(UserError, match="is not enwik8_text: SHA-256"):
        read(replace(options, from_files=str(tmp_path / "enwik8")), "train", cache)


def test_an_sdist_with_another_hash_is_refused(sdist, tmp_path):
    wheel = Wheel("bellmask-testdata", "1.0", "0" * 64, is_sdist=True)
    with pytest.raises(
        UserError, match=r"cannot download bellmask-testdata.*save it as .*\.tar\.gz"
    ):
        wheel.fetch(tmp_path)
    assert not list((tmp_path / "wheels").iterdir())


def test_validation_reads_the_split_that_is_asked_for(sdist, tmp_path):
    base = DataOptions(train="enwik8_text", block_length=8, cache=str(tmp_path))
    tokenizer = ByteTokenizer()
    valid = load_data(base, tokenizer)
    test = load_data(replace(base, valid_split="test"), tokenizer)
    assert valid.train.fingerprint == test.train.fingerprint
    begins = [tokenizer.decode(data.valid.rows(slice(0, 1))[0].numpy()) for data in (valid, test)]
    assert begins == ["Ä three"[:7], "Ä four\n"[:7]]


def test_evaluate_takes_a_split(sdist, zoo, tmp_path, monkeypatch):
    monkeypatch.setenv("BELLMASK_CACHE", str(tmp_path))
    few = ("--blocks", 4, "--draws", 2, "--out", tmp_path / "out")
    run = copytree(zoo / "base", tmp_path / "base")
    seen = []
    for split in ("valid", "test"):
        succeeds("evaluate", run, "--data", "enwik8_text", "--split", split, *few)
        seen.append(json.loads((tmp_path / "out/evaluation.json").read_text()))
    assert [report["data"] for report in seen] == ["enwik8_text, valid", "enwik8_text, test"]
    assert seen[0]["data_fingerprint"] != seen[1]["data_fingerprint"]
    config = json.loads((run / "config.json").read_text())
    for train, words in (("enwik8_text", "has changed"), ("text.txt", "no test split")):
        config["data"]["train"] = train  # trained on other text: found, then refused
        (run / "config.json").write_text(json.dumps(config))
        assert words in refuses("evaluate", run, "--split", "test", *few, names="")


@pytest.mark.parametrize(
    "given",
    [
        {"train": "a.txt"},
        {"train": "openwebtext"},
        {"train": "enwik8"},
        {"train": "wikitext2", "from_files": "a.txt"},
        {"train": "wikitext2", "valid": "a.txt"},
        {"train": "toy:sticky", "tokenizer": "symbols:8"},
    ],
)
def test_a_test_split_that_is_not_there_is_refused(tmp_path, given):
    options = DataOptions(cache=str(tmp_path), valid_split="test", **given)
    with pytest.raises(UserError, match=r"no test split.*--data\.valid PATH"):
        load_data(options, ByteTokenizer())


# --- the real ones ---------------------------------------------------------------------------


def test_the_first_megabyte_of_enwik8(shared_file):
    with gzip.open(shared_file("enwik8/enwik8.gz")) as stream:
        text = stream.read(1_000_000).decode(errors="ignore")
    found = list(articles(io.StringIO(text)))
    assert found[0].startswith("Anarchism\nAnarchism originated as a term of abuse")
    joined = "\n".join(found)
    assert 600_000 < len(joined) < 800_000
    assert not any(mark in joined for mark in ("[[", "]]", "{{", "''", "&nbsp;", "&quot;", "<ref"))


def test_wikitext2_has_60_test_articles(fetched):
    """And two formulas that look like headings: " = 1 henry and capacitance C = "."""
    part = CORPORA["wikitext2"].splits["test"]
    content = fetched(lambda cache: part.wheel.read(part.member, cache))
    assert hashlib.sha256(content).hexdigest() == part.sha256
    found = [piece.text for piece in DOCUMENT_RULES["article"](io.StringIO(content.decode()))]
    assert len(found) - sum(text.startswith(" = 1 ") for text in found) == 60
