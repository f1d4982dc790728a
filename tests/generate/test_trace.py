"""Traces: replaying the changes gives every row of every step; damaged files are refused."""

import itertools
import json

import numpy as np
import pytest
import torch
from commands import refuses, succeeds
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Inner
from tokenizers import decoders, models, pre_tokenizers

from bellmask.data.tokenizers import ByteTokenizer, FastTokenizer, SymbolTokenizer
from bellmask.generate.sampler import Step, token_texts
from bellmask.generate.trace import Recorder, load_trace
from bellmask.utils.errors import UserError

MASK = 4
"""Of four symbols a, b, c, d."""
LENGTH = 5
ROWS = st.lists(st.integers(0, MASK), min_size=LENGTH, max_size=LENGTH)


@st.composite
def histories(draw):
    """[batch][step][row][position]: anything may follow anything, also nothing at all."""
    batches = []
    for _ in range(draw(st.integers(1, 3))):
        num_rows, num_steps = draw(st.integers(1, 3)), draw(st.integers(0, 5))
        steps = [[draw(ROWS) for _ in range(num_rows)]]
        for _ in range(num_steps):
            stays = draw(st.booleans())
            steps.append(steps[-1] if stays else [draw(ROWS) for _ in range(num_rows)])
        batches.append(steps)
    return batches


def record(batches):
    """Send the histories through one tensor per batch that is changed in place, as samplers do."""
    recorder = Recorder(SymbolTokenizer(4))
    for steps in batches:
        x_BL, last = torch.tensor(steps[0]), len(steps) - 1
        for number, rows in enumerate(steps):
            x_BL[:] = torch.tensor(rows)
            recorder(Step(number, last, 2 * number, 1 - number / len(steps), 0, x_BL))
    return recorder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("traces")


@given(batches=histories())
@settings(max_examples=25, deadline=None, derandomize=True, database=None)
def test_replay_gives_every_row_of_every_step(folder, batches):
    """With several batches, tokens that change and tokens that are masked again."""
    histories = [[rows[r] for rows in steps] for steps in batches for r in range(len(steps[0]))]
    texts = [f"text {number}" for number in range(len(histories))]
    trace = record(batches).trace("t", {"steps": 3}, texts)
    trace.save(folder / "trace.json")
    assert load_trace(folder / "trace.json") == trace
    assert trace.num_calls == sum(2 * (len(steps) - 1) for steps in batches)
    assert [sample.text for sample in trace.samples] == texts
    for sample, history in zip(trace.samples, histories, strict=True):
        assert sample.num_steps == len(history) - 1
        changed = [n for n in range(1, len(history)) if history[n] != history[n - 1]]
        assert [change.number for change in sample.steps] == changed
        for change in sample.steps:
            assert change.calls == 2 * change.number
            assert change.t == pytest.approx(1 - change.number / len(history))
        for number, row in enumerate(history):
            assert sample.at(number) == [
                (None if token == MASK else "abcd"[token], *facts(history, number, i))
                for i, token in enumerate(row)
            ]


def facts(history, number, position):
    """(the step in which it got its token, how often it was masked again), by walking back."""
    column = [row[position] for row in history[: number + 1]]
    num_remasked = sum(b == MASK != a for a, b in itertools.pairwise(column))
    while number and column[number - 1] == column[number]:
        number -= 1
    return number, num_remasked


# tokens as texts


def word_pieces():
    words = "[UNK] [CLS] [SEP] [PAD] [MASK] a the cat sat ##s ##ting . , ' s ##".split()
    inner = Inner(models.WordPiece(vocab={w: i for i, w in enumerate(words)}, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    inner.decoder = decoders.WordPiece(prefix="##")
    return FastTokenizer(inner, bos=1, eos=2, pad=3, mask=4)


def texts(tokenizer, ids):
    return list(map(token_texts(tokenizer), map(int, ids)))


def test_tokens_have_the_text_they_have_inside_a_text():
    assert texts(ByteTokenizer(), "a\né".encode()) == ["a", "\n", "\\xc3", "\\xa9"]
    assert texts(ByteTokenizer(), [255, 256, 257, 258]) == ["\\xff", "<eos>", "<bos>", "<pad>"]
    assert texts(SymbolTokenizer(4), [0, 3]) == ["a", "d"]
    words = word_pieces()
    expected = [" the", " cat", "s", " sat", "ting", "."]
    assert texts(words, words.encode("the cats satting.")) == expected
    assert texts(words, [words.bos_id, words.eos_id, words.pad_id]) == ["<bos>", "<eos>", "<pad>"]
    assert words.decode(np.array([5, 4])) == "a", "## took the mask's place; it has no text"
    assert texts(words, [4]) == ["�"]


# damaged files


def good():
    step = {"number": 1, "t": 0.5, "calls": 1, "set": [[1, "b"]], "unset": [0]}
    sample = {"tokens": ["a", None], "steps": [step], "text": "ab"}
    samples = [{**sample, "num_steps": 2}]
    return {"version": 1, "title": "t", "settings": {}, "num_calls": 1, "samples": samples}


STEP = "samples.0.steps.0"
DAMAGES = [  # where, the value put there
    ("version", 2),
    ("settings", []),
    ("samples", []),
    ("samples.0", 7),
    ("samples.0.tokens", []),
    ("samples.0.tokens.1", 5),
    (STEP, None),
    ("samples.0.steps", [good()["samples"][0]["steps"][0]] * 2),
    (f"{STEP}.number", 0),
    (f"{STEP}.number", 3),
    (f"{STEP}.t", float("nan")),
    (f"{STEP}.set.0", [2, "x"]),
    (f"{STEP}.set.0", [1, None]),
    (f"{STEP}.unset", [2]),
]


@pytest.mark.parametrize(("path", "value"), DAMAGES)
def test_a_damaged_trace_is_refused(tmp_path, path, value):
    content, file = good(), tmp_path / "x.json"
    place = content
    *way, last = [int(key) if key.isdigit() else key for key in path.split(".")]
    for key in way:
        place = place[key]
    place[last] = value
    file.write_text(json.dumps(content))
    with pytest.raises(UserError, match=str(file)):
        load_trace(file)


# from a run to its trace to the page and the strip


def test_watch_trace_and_report(zoo, tmp_path):
    file = tmp_path / "four.json"
    command = f"generate {zoo / 'bell'} --num 3 --batch-size 2 --steps 8 --format jsonl".split()
    told = succeeds(*command, "--prefix", "the ", "--watch", "--trace", file)
    assert told.out == succeeds(*command, "--prefix", "the ").out, "watching changes nothing"
    rows = [json.loads(line) for line in told.out.splitlines()]
    for sample, row in zip(load_trace(file).samples, rows, strict=True):
        assert (sample.text, sample.num_steps) == (row["text"], 8)
        for position, token in zip(sample.at(8), row["ids"], strict=True):
            assert token >= 128 or position.text == chr(token)
    succeeds("report", "trace", file, "--out", tmp_path / "new", "--frames", "3")
    assert {path.suffix for path in (tmp_path / "new").iterdir()} == {".html", ".png", ".svg"}


def test_a_report_of_a_trace_refuses_what_it_cannot_show(tmp_path):
    file, new = tmp_path / "trace.json", tmp_path / "new"
    file.write_text(json.dumps(good()))
    (tmp_path / "bad").write_bytes(b"\xff\xfe")
    for name in ("bad", "none.json"):
        refuses("report", "trace", tmp_path / name, "--out", new, names=name)
    refuses("report", "trace", file, "--out", new, "--sample", 1, names="--sample")
    refuses("report", "trace", file, "--out", new, "--frames", 1, names="--frames")
    refuses("report", "trace", file, "--out", file, names="trace.json")
    assert not new.exists()
