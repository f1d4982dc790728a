"""Fingerprints and rows of every kind of data are those stored in ``golden.json``.

Users' caches and stored runs are found by these fingerprints: what changes them needs a new version
number in the code (``PACKER_VERSION``, ``EXAMPLES_VERSION``, ``FORMAT``, ...), and then
``python tests/data/test_golden.py`` in the project's folder stores them anew.
"""

from __future__ import annotations

import hashlib
import io
import json
import tempfile
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hub_tools import install_hub

from bellmask.config.options import DataOptions, SftOptions
from bellmask.data import toys
from bellmask.data.corpora import CORPORA, InWheel, open_corpus
from bellmask.data.examples import clean_text, load_example_blocks, tidy
from bellmask.data.prepare import load_data, prepare
from bellmask.data.readers import DOCUMENT_RULES
from bellmask.data.tasks import TaskQuestion, passages, scored_questions, take
from bellmask.data.tokenizers import ByteTokenizer, SymbolTokenizer

GOLDEN = Path(__file__).with_name("golden.json")
BYTES = ByteTokenizer()
ROWS = [
    {
        "text": f"= A {i} =\n",
        "sentence": f"it 's {i} N <unk> .",
        "article": f"( a ) , {i} = = b = =",
        "prompt": f"p{i}",
        "response": f"r{i} <b> &amp;",
    }
    for i in range(60)
]
SAID = [
    {"from": "human", "value": "Why? 1 / 1"},
    {"from": "gpt", "value": "<div>So &amp; so</div>"},
]
TEXT = "".join(f"line {i} it 's a test , isn 't it ?\n\n" for i in range(200))
TEXTS = [
    {"train": "a.txt"},
    {"train": "c.jsonl"},
    {"train": "d.csv", "column": "1+2"},
    {"train": "d.csv", "column": "body"},
    {"train": "a.txt", "documents": "line", "wrap": True, "remainder": "keep"},
    {"train": "a.txt", "packing": "unpacked", "documents": "paragraph", "detokenizer": "lm1b"},
    {"train": "a.txt", "packing": "unpacked", "documents": "line", "wrap": True},
    {"train": "a.txt", "insert_eos": False},
    {"train": "a.txt", "valid": "ptb"},
    {"train": "wikitext103", "from_files": "c.jsonl"},
    {"train": "ag_news", "from_files": "d.csv"},
    {"train": "lm1b", "from_files": "a.txt"},
    {"train": "hub:me/set"},
    {"train": "hub:me/set:conf:test", "column": "article"},
    {"train": "a.txt", "mixture": ("c.jsonl=0.3", "lm1b=0.1")},
]
TOYS = "toy:sticky toy:sticky:0.3 toy:order2 toy:hidden toy:local toy:local:1".split()
EXAMPLES = "toy:copy:2 toy:sums:1 toy:reverse c.jsonl hub:me/set talks.jsonl "
EXAMPLES += "sharegpt:talks.jsonl tasks:tasks"
COUNTS = "piqa=9 lambada=0 hellaswag=0 triviaqa=0 openbookqa=0 social_iqa=0 winogrande=30".split()


def texts_of(kind, text):
    """What a stored text becomes: its key is "KIND TEXT"."""
    if kind == "turns":  # "h:hello" is what a human says
        sides, counts = {"h": "human", "g": "ChatGPT", "s": "system", "x": "critic"}, Counter()
        kept = tidy([(sides[turn[0]], turn[2:]) for turn in text.split()], counts)
        return [[(one.role, one.text) for one in kept], counts]
    if kind == "documents":
        rule, _, text = text.partition(" ")
        return [one.text for one in DOCUMENT_RULES[rule](io.StringIO(text, newline="\n"))]
    return [clean_text(text, role) for role in ("user", "assistant")]


def write_files():
    talks = [{"id": f"a{i}_0", "conversations": SAID * 2} for i in range(20)]
    Path("tasks/winogrande").mkdir(parents=True)
    options = {"option1": "one ", "option2": "two"}
    lines = {
        "c.jsonl": ROWS,
        "talks.jsonl": talks,
        "tasks/piqa.jsonl": [
            {"goal": f"do {i} ", "sol1": "a", "sol2": "b", "label": i % 3 - 1} for i in range(30)
        ],
        "tasks/winogrande/a.jsonl": [
            {"sentence": f"{i} _ is", "answer": str(i % 2 + 1), **options} for i in range(9)
        ],
    }
    for name, rows in lines.items():
        Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path("a.txt").write_text(TEXT)
    Path("d.csv").write_text("0,t one,body\n" * 40)


def rows_of(blocks):
    """Fingerprint, bytes and a hash of all that the rows hold."""
    arrays = (blocks.rows(slice(None)), blocks.lengths, blocks.documents)
    content = b"".join(np.asarray(array, dtype=np.int64).tobytes() for array in arrays)
    content += blocks.row_starts(slice(None)).numpy().tobytes()
    digest = hashlib.sha256(content).hexdigest()[:16]
    return [blocks.fingerprint[:16], len(blocks), round(blocks.num_bytes, 6), digest]


def parts_of(data):
    return [rows_of(data.train), rows_of(data.valid), data.sizes, data.weights, dict(data.counts)]


def everything(monkeypatch):
    write_files()
    install_hub(monkeypatch, ROWS)
    monkeypatch.setattr(toys, "NUM_ROWS", {"train": 512, "valid": 64})
    few = replace(CORPORA["openwebtext"], holdout=10, num_documents=60)
    monkeypatch.setitem(CORPORA, "openwebtext", few)
    base = DataOptions(block_length=16, cache="cache")
    found = {}
    for given in TEXTS:
        found[str(given)] = parts_of(load_data(replace(base, **given), BYTES))
    for name, corpus in CORPORA.items():
        for split, part in corpus.splits.items():
            if not isinstance(part, InWheel):
                options = replace(base, train=name)
                source, policy = open_corpus(options, split, Path("cache"))
                about = [source.name, source.identity[:16], source.origin, policy.license]
                found[f"{name} {split}"] = [*about, rows_of(prepare(options, BYTES, split))]
    for name in TOYS:
        options = replace(base, train=name, tokenizer="symbols:8")
        found[name] = parts_of(load_data(options, SymbolTokenizer(8)))
    for name in EXAMPLES.split():
        for bos_first in (False, True):
            options, sft = replace(base, block_length=320), SftOptions(name, counts=tuple(COUNTS))
            data = load_example_blocks(options, sft, BYTES, bos_first=bos_first)
            found[f"examples {name} {bos_first}"] = parts_of(data)
    blocks = prepare(replace(base, train="a.txt"), BYTES, "train")
    parts = [blocks.spread(7), blocks.slice(3, 9), blocks.starting_at(1)]
    parts.append(blocks.slice(2, 50).starting_at(1).slice(1, 20).spread(3))
    found["parts"] = [rows_of(part) for part in parts]
    novel = " ".join(f"word{n} {'and ' * (n % 9)}end{'x' * n} ." for n in range(80))
    found["passages"] = [one["text"][:20] for one in passages({"text": novel}, 3)]
    items = [TaskQuestion(str(n), "a") for n in range(50)]
    found["draw"] = [question.prompt for question in take("piqa", items, 9)]
    asked = [{"goal": "g", "sol1": "a", "sol2": "b", "label": 0}] * 50
    found["limit"] = list(scored_questions("piqa", asked, 9))
    for key in json.loads(GOLDEN.read_text()):
        kind, _, text = key.partition(" ")
        if kind in ("turns", "documents", "page"):
            found[key] = texts_of(kind, text)
    return json.loads(json.dumps(found))


def test_everything_is_as_it_was(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found, stored = everything(monkeypatch), json.loads(GOLDEN.read_text())
    assert {name for name in found | stored if found.get(name) != stored.get(name)} == set()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        stored = everything(patch)
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(stored[name])}" for name in sorted(stored))
    GOLDEN.write_text(f"{{\n{lines}\n}}\n")
