"""Any bytes in the files that commands leave for one another: read, or one UserError."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pytest
from fuzz_tools import REFUSED, SIZES, TAKEN, as_json, changed, damaged, fuzz, json_files, values
from hypothesis import strategies as st

from bellmask.data.blocks import open_blocks, shard_path
from bellmask.data.example_blocks import example_counts
from bellmask.errors import UserError
from bellmask.evaluate.result import Likelihood
from bellmask.generate.trace_file import load_trace
from bellmask.judge.chat import BadBody, Request, error_code, error_message, read_reply
from bellmask.judge.prompts import read_alpaca
from bellmask.judge.transcript import Transcript
from bellmask.kept import Kept
from bellmask.records import MetricsFile, read_metrics
from bellmask.report.trace_page import render_trace_page

STEPS = [
    {"number": 1, "t": 0.5, "calls": 1, "set": [[1, " b"]], "unset": []},
    {"number": 3, "t": 0.0, "calls": 2, "set": [[1, "c"]], "unset": [1]},
]
SAMPLE = {"given": [True, False], "tokens": ["a", None], "num_steps": 3, "text": "a c"}
TRACE = {
    "version": 1,
    "title": "run",
    "settings": {"rule": "ancestral", "steps": 3},
    "num_calls": 2,
    "samples": [{**SAMPLE, "steps": STEPS}],
}


@pytest.mark.parametrize("size", SIZES)
def test_traces(size: int, tmp_path: Path) -> None:
    """A trace that is taken can be shown, and its page written."""
    path = tmp_path / "trace.json"

    def check(content: bytes) -> None:
        path.write_bytes(content)
        trace = load_trace(path)
        render_trace_page(trace).encode()
        for sample in trace.samples:
            assert len(sample.at(sample.num_steps)) == len(sample.since(2)) == len(sample.tokens)

    outcomes = fuzz("traces", size, json_files(TRACE) | st.just(as_json(TRACE)), check)
    assert outcomes == {TAKEN, REFUSED}


LINE = {"kind": "train", "step": 2, "tokens": 64, "loss": 1.5, "tokens_per_second": 9.0}


@pytest.mark.parametrize("size", SIZES)
def test_metrics(size: int, tmp_path: Path) -> None:
    """Whole lines are always found, whatever stands between them; cutting back keeps them."""
    path = tmp_path / "metrics.jsonl"
    other = json_files(LINE).map(lambda line: line.replace(b"\n", b""))
    inputs = st.lists(other, max_size=3)
    whole = [{**LINE, "step": step} for step in (1, 2, 3)]

    def check(others: list[bytes]) -> None:
        lines = [line for pair in zip(map(as_json, whole), [*others, *[b""] * 3]) for line in pair]
        path.write_bytes(b"\n".join(lines))
        found = read_metrics(path)
        assert all(line in found for line in whole)
        assert all(type(line["step"]) is int for line in found)
        MetricsFile(path).cut_back(2)
        assert all(line["step"] <= 2 for line in read_metrics(path))

    assert fuzz("metrics", size, inputs, check) == {TAKEN}


def evaluation() -> bytes:
    generator = np.random.default_rng(1)
    stream = io.BytesIO()
    np.savez_compressed(
        stream,
        length_B=np.array([4, 4, 4]),
        level_B=generator.random(3),
        count_BR=np.array([[2, 1], [3, 4], [1, 1]]),
        ce_BR=generator.random((3, 2)),
        document_B=np.array([0, 1, 2]),
        num_bytes=np.float64(12.0),
        fingerprint=np.str_("x"),
        is_causal=np.bool_(False),
        is_exact=np.bool_(False),
    )
    return stream.getvalue()


@st.composite
def other_arrays(draw: st.DrawFn) -> bytes:
    """An evaluation with an array of another shape or kind."""
    with np.load(io.BytesIO(evaluation())) as stored:
        arrays = {name: stored[name] for name in stored.files}
    name = draw(st.sampled_from(list(arrays)))
    shape = draw(st.sampled_from([(), (0,), (3,), (3, 2), (3, 0), (2, 3), (1, 1, 1)]))
    kind = draw(st.sampled_from([np.int64, np.float64, np.float32, np.bool_, "U3", "S2", "M8[s]"]))
    arrays[name] = np.zeros(shape, dtype=kind)
    stream = io.BytesIO()
    np.savez(stream, **arrays)
    return stream.getvalue()


@pytest.mark.parametrize("size", SIZES)
def test_evaluations(size: int, tmp_path: Path) -> None:
    """What is taken has a summary."""
    path = tmp_path / "step.npz"
    whole = evaluation()
    inputs = st.one_of(st.just(whole), damaged(whole), other_arrays(), st.binary())

    def check(content: bytes) -> None:
        path.write_bytes(content)
        try:
            found = Likelihood.load(path)
        except (OSError, ValueError) as error:
            raise UserError(str(error)) from None
        assert np.isfinite(found.nll)
        assert found.block_nll.shape == found.length_B.shape

    assert fuzz("evaluations", size, inputs, check) == {TAKEN, REFUSED}


REQUEST = Request("judge", (("user", "a or b?"),), logprobs=5)
REPLY = {
    "key": REQUEST.key,
    "request": REQUEST.to_dict(),
    "reply": {
        "text": "m",
        "top_logprobs": {"m": -0.1, "M": -2.0},
        "prompt_tokens": 3,
        "completion_tokens": 1,
        "finish_reason": "stop",
        "is_usage_estimated": False,
    },
    "attempts": 1,
    "refused_settings": ["seed"],
}


@pytest.mark.parametrize("size", SIZES)
def test_kept_files(size: int, tmp_path: Path) -> None:
    path = tmp_path / "transcript.jsonl"
    refusal = {"key": "k", "refused": "too long"}
    line = json_files(REPLY) | changed(refusal).map(as_json) | st.just(as_json(REPLY))
    inputs = st.lists(line, max_size=3).map(b"\n".join).map(lambda text: text + b"\n")

    def check(content: bytes) -> None:
        path.write_bytes(content)
        assert all(isinstance(record["key"], str) for record in Kept(path))
        transcript = Transcript(path)
        reply = transcript.get(REQUEST)
        if reply is not None:
            read_alpaca(reply.text, reply.top_logprobs)
        assert all(map(str, transcript.refused([REQUEST]).values()))
        transcript.refused_settings([REQUEST])

    assert fuzz("kept files", size, inputs, check) == {TAKEN, REFUSED}


BODY = {
    "choices": [
        {
            "message": {"content": "m", "role": "assistant"},
            "finish_reason": "stop",
            "logprobs": {"content": [{"top_logprobs": [{"token": "m", "logprob": -0.1}]}]},
        }
    ],
    "usage": {"prompt_tokens": 3, "completion_tokens": 1},
}


@pytest.mark.parametrize("size", SIZES)
def test_judge_replies(size: int) -> None:
    """What an endpoint sends is a reply, or a body that is asked for again."""
    error = {"error": {"message": "no", "code": "bad"}}
    inputs = json_files(BODY) | json_files(error) | st.just(as_json(BODY))

    def check(content: bytes) -> None:
        body = content.decode("utf-8", "replace")
        error_message(body), error_code(body)
        try:
            reply = read_reply(body, REQUEST)
        except BadBody as bad:
            raise UserError(str(bad)) from None
        reply.text.encode()
        json.dumps(reply.top_logprobs, allow_nan=False).encode()
        read_alpaca(reply.text, reply.top_logprobs)

    assert fuzz("judge replies", size, inputs, check) == {TAKEN, REFUSED}


CARD = {
    "fingerprint": "key",
    "num_blocks": 5,
    "block_length": 4,
    "rows_per_shard": 3,
    "dtype": "uint16",
    "num_bytes": 20.0,
    "has_starts": True,
    "num_documents": 5,
    "counts": {"piqa taken": 2},
}


@pytest.mark.parametrize("size", SIZES)
def test_data_caches(size: int, tmp_path: Path) -> None:
    """Rows of a cache that is taken can all be read."""
    files = {
        shard_path(tmp_path, 0).name: np.arange(12, dtype=np.uint16).tobytes(),
        shard_path(tmp_path, 1).name: np.arange(8, dtype=np.uint16).tobytes(),
        "lengths.bin": np.full(5, 4).tobytes(),
        "documents.bin": np.arange(5).tobytes(),
        "starts.bin": np.ones(5, dtype=np.int64).tobytes(),
        "card.json": as_json(CARD),
    }
    one = st.sampled_from(sorted(files)).flatmap(
        lambda name: st.tuples(st.just(name), damaged(files[name]))
    )
    card = st.tuples(st.just("card.json"), changed(CARD).map(as_json) | values.map(as_json))
    inputs = st.one_of(one, card, st.just(("card.json", files["card.json"])))

    def check(pair: tuple[str, bytes]) -> None:
        for name, content in files.items():
            (tmp_path / name).write_bytes(pair[1] if name == pair[0] else content)
        blocks = open_blocks(tmp_path, "key")
        assert blocks.rows(slice(0, None)).shape == (5, 4)
        assert (blocks.num_maskable(slice(0, None)) >= 0).all()
        example_counts(json.loads((tmp_path / "card.json").read_text()))

    assert fuzz("data caches", size, inputs, check) == {TAKEN, REFUSED}
