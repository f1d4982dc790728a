"""Traces: replaying the changes gives every row of every step; damaged files are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Inner
from tokenizers import decoders, models, pre_tokenizers

from bellmask.data.tokenizer import ByteTokenizer, FastTokenizer, SymbolTokenizer
from bellmask.errors import UserError
from bellmask.generate.steps import Step, TokenTexts, to_all
from bellmask.generate.trace import Recorder, load_trace

MASK = 4
"""Of four symbols a, b, c, d."""
LENGTH = 5
ROWS = st.lists(st.integers(0, MASK), min_size=LENGTH, max_size=LENGTH)


@st.composite
def histories(draw: st.DrawFn) -> list[list[list[list[int]]]]:
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


def record(batches: list[list[list[list[int]]]], *, interleave: bool, restart: bool) -> Recorder:
    """Send the histories through one tensor per batch that is changed in place, as samplers do."""
    recorder, first = Recorder(SymbolTokenizer(4)), 0
    streams = []
    for steps in batches:
        x_BL = torch.tensor(steps[0])
        streams.append([(steps, number, x_BL, first) for number in range(len(steps))])
        first += 0 if restart else len(steps[0])
    events = [event for stream in streams for event in stream]
    if interleave:
        longest = max(map(len, streams))
        events = [stream[n] for n in range(longest) for stream in streams if n < len(stream)]
    for steps, number, x_BL, start in events:
        x_BL[:] = torch.tensor(steps[number])
        num_steps = len(steps) - 1
        recorder(Step(number, num_steps, 2 * number, 1 - number / (num_steps + 1), start, x_BL))
    return recorder


@given(histories(), st.booleans(), st.booleans())
@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_replay_gives_every_row_of_every_step(
    tmp_path: Path, batches: list[list[list[list[int]]]], interleave: bool, restart: bool
) -> None:
    """With several batches, tokens that change and tokens that are masked again."""
    interleave = interleave and not restart
    path = tmp_path / "trace.json"
    recorder = record(batches, interleave=interleave, restart=restart)
    assert recorder.save(path, "t", {"steps": 3}) == load_trace(path)
    trace = load_trace(path)
    histories = [[rows[r] for rows in steps] for steps in batches for r in range(len(steps[0]))]
    assert len(trace.samples) == len(histories)
    assert trace.num_calls == sum(2 * (len(steps) - 1) for steps in batches)
    for sample, history in zip(trace.samples, histories, strict=True):
        assert sample.num_steps == len(history) - 1
        assert sample.given == [token != MASK for token in history[0]]
        assert sample.text == "".join("abcd␣"[token] for token in history[-1])
        changed = [n for n in range(1, len(history)) if history[n] != history[n - 1]]
        assert [change.number for change in sample.steps] == changed
        assert all(change.calls == 2 * change.number for change in sample.steps)
        for number, row in enumerate(history):
            assert sample.at(number) == [None if i == MASK else "abcd"[i] for i in row]
            assert sample.since(number) == [since(history, number, i) for i in range(LENGTH)]
            assert sample.remasked(number) == [losses(history, number, i) for i in range(LENGTH)]


def since(history: list[list[int]], number: int, position: int) -> int | None:
    """Walk back while the token is the same; None where it is masked or was given."""
    token = history[number][position]
    if token == MASK:
        return None
    while number and history[number - 1][position] == token:
        number -= 1
    return number or None


def losses(history: list[list[int]], number: int, position: int) -> int:
    column = "".join("m" if row[position] == MASK else "t" for row in history[: number + 1])
    return column.count("tm")


def test_only_changes_are_kept() -> None:
    x = torch.full((1, 100), MASK)
    recorder = Recorder(SymbolTokenizer(4))
    seen: list[int] = []
    on_step = to_all(recorder, lambda step: seen.append(step.number))
    on_step(Step(0, 1000, 0, 1.0, 0, x))
    for number in range(1, 1001):
        if number % 10 == 0:
            x[0, number // 10 - 1] = 1
        on_step(Step(number, 1000, number, 1 - number / 1000, 0, x))
    (sample,) = recorder.trace("t").samples
    assert seen == list(range(1001))
    assert [(c.number, c.t, c.set, c.unset) for c in sample.steps[:2]] == [
        (10, 0.99, [(0, "b")], []),
        (20, 0.98, [(1, "b")], []),
    ]
    assert len(sample.steps) == 100


def test_finished_texts_may_be_given_since_runs_cut_them() -> None:
    recorder = record([[[[0, 1, 2, 3, 0]]]], interleave=False, restart=False)
    assert recorder.trace("t", texts=["abc"]).samples[0].text == "abc"
    with pytest.raises(ValueError, match="zip"):
        recorder.trace("t", texts=["a", "b"])


def word_pieces() -> FastTokenizer:
    words = "[UNK] [CLS] [SEP] [PAD] [MASK] a the cat sat ##s ##ting . , ' s ##".split()
    inner = Inner(models.WordPiece(vocab={w: i for i, w in enumerate(words)}, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    inner.decoder = decoders.WordPiece(prefix="##")
    return FastTokenizer(inner, bos=1, eos=2, pad=3, mask=4)


def byte_pairs() -> FastTokenizer:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: number for number, letter in enumerate(["<eos>", *letters, "Ġc", "at"])}
    inner = Inner(models.BPE(vocab=vocabulary, merges=[("Ġ", "c"), ("a", "t")]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    return FastTokenizer(inner, eos=0)


def texts(tokenizer: Any, ids: Any) -> list[str]:
    text_of = TokenTexts(tokenizer)
    return [text_of(int(token)) for token in ids]


def test_tokens_have_the_text_they_have_inside_a_text() -> None:
    assert texts(ByteTokenizer(), b"a\n") == ["a", "\n"]
    assert texts(ByteTokenizer(), "aé".encode()) == ["a", "\\xc3", "\\xa9"]
    assert texts(ByteTokenizer(), [255, 256, 257, 258]) == ["\\xff", "<eos>", "<bos>", "<pad>"]
    assert texts(SymbolTokenizer(4), [0, 3]) == ["a", "d"]
    words = word_pieces()
    assert texts(words, words.encode("the cats satting.")) == [
        " the", " cat", "s", " sat", "ting", "."
    ]  # fmt: skip
    assert texts(words, [words.bos_id, words.eos_id, words.pad_id]) == ["<bos>", "<eos>", "<pad>"]
    assert words.decode(np.array([5, 4])) == "a", "## took the mask's place; it has no text"
    assert texts(words, [4]) == ["�"]
    pairs = byte_pairs()
    assert texts(pairs, pairs.encode("a cat é")) == ["a", " c", "at", " ", "�", "�"]
    assert texts(pairs, [pairs.eos_id]) == ["<eos>"]


@pytest.mark.parametrize("make", [ByteTokenizer, word_pieces, byte_pairs])
def test_texts_of_tokens_make_the_whole_text(make: Callable[[], Any]) -> None:
    tokenizer = make()
    ids = tokenizer.encode("a cat sat, the cats satting.")
    assert "".join(texts(tokenizer, ids)).lstrip() == tokenizer.decode(np.asarray(ids))


def good() -> dict[str, Any]:
    step = {"number": 1, "t": 0.5, "calls": 1, "set": [[1, "b"]], "unset": [0]}
    sample = {"given": [True, False], "tokens": ["a", None], "steps": [step], "text": "ab"}
    return {
        "version": 1,
        "title": "t",
        "settings": {},
        "num_calls": 1,
        "samples": [{**sample, "num_steps": 2}],
    }


def change(path: str, value: Any) -> Callable[[dict[str, Any]], None]:
    """Put a value at ``samples.0.steps``; ... takes it away."""

    def apply(content: dict[str, Any]) -> None:
        place: Any = content
        *way, last = [int(key) if key.isdigit() else key for key in path.split(".")]
        for key in way:
            place = place[key]
        if value is ...:
            del place[last]
        else:
            place[last] = value

    return apply


STEP = "samples.0.steps.0"
DAMAGES: list[tuple[str, Any, str]] = [
    ("version", ..., "no 'version'"),
    ("version", 2, "version 2; this bellmask reads version 1"),
    ("title", 3, "'title' of the file must be a text"),
    ("settings", [], "'settings' of the file must be an object"),
    ("num_calls", -1, "'num_calls' of the file must be a whole number"),
    ("num_calls", True, "'num_calls' of the file must be a whole number"),
    ("samples", [], "no samples"),
    ("samples.0", 7, "sample 0 must be an object"),
    ("samples.0.text", ..., "sample 0 has no 'text'"),
    ("samples.0.tokens", [], "'tokens' of sample 0"),
    ("samples.0.tokens.1", 5, "'tokens' of sample 0"),
    ("samples.0.given", [True], "'given' of sample 0"),
    ("samples.0.given.1", True, "'given' of sample 0"),
    ("samples.0.num_steps", 0, "step 1 of sample 0 is out of order"),
    (STEP, None, "a step of sample 0 must be an object"),
    (f"{STEP}.number", 0, "step 0 of sample 0 is out of order"),
    (f"{STEP}.number", 3, "step 3 of sample 0 is out of order"),
    (f"{STEP}.calls", 1.5, "'calls' of a step of sample 0"),
    (f"{STEP}.t", ..., "'t' of step 1 of sample 0"),
    (f"{STEP}.t", 1.5, "'t' of step 1 of sample 0"),
    (f"{STEP}.t", float("nan"), "'t' of step 1 of sample 0"),
    (f"{STEP}.set.0", [2, "x"], "'set' of step 1 of sample 0"),
    (f"{STEP}.set.0", [-1, "x"], "'set' of step 1 of sample 0"),
    (f"{STEP}.set.0", [1, None], "'set' of step 1 of sample 0"),
    (f"{STEP}.set.0", "ab", "'set' of step 1 of sample 0"),
    (f"{STEP}.unset", [2], "there is no position 2"),
    (f"{STEP}.unset", [1], "masks position 1, which is masked"),
    (f"{STEP}.unset", [0, 0], "masks position 0, which is masked"),
]


@pytest.mark.parametrize(("path", "value", "message"), DAMAGES)
def test_a_damaged_trace_is_refused(tmp_path: Path, path: str, value: Any, message: str) -> None:
    content, file = good(), tmp_path / "x.json"
    file.write_text(json.dumps(content))
    assert load_trace(file).samples[0].at(1) == [None, "b"]
    change(path, value)(content)
    file.write_text(json.dumps(content))
    with pytest.raises(UserError, match="is not a trace") as error:
        load_trace(file)
    assert message in str(error.value)
    assert str(file) in str(error.value)


def test_steps_must_come_in_order(tmp_path: Path) -> None:
    content, file = good(), tmp_path / "x.json"
    steps = content["samples"][0]["steps"]
    steps.append({**steps[0], "unset": []})
    file.write_text(json.dumps(content))
    with pytest.raises(UserError, match="step 1 of sample 0 is out of order"):
        load_trace(file)
    steps[1]["number"] = 2
    file.write_text(json.dumps(content))
    assert load_trace(file).samples[0].num_steps == 2


def test_other_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no trace"):
        load_trace(tmp_path / "none.json")
    with pytest.raises(UserError, match="there is no trace"):
        load_trace(tmp_path)
    for content in (b"", b"{", b"\xff\xfe", b"[1]", b"null"):
        (tmp_path / "x").write_bytes(content)
        with pytest.raises(UserError, match="is not a trace"):
            load_trace(tmp_path / "x")
