"""Any bytes in the files that commands leave for one another, any text in pages and tables."""

from __future__ import annotations

import html
import io
import json
import re

import numpy as np
import pytest
from fuzz_tools import SIZES, TAKEN, as_json, damaged, fuzz, json_files, texts
from hypothesis import strategies as st

from bellmask.evaluate.judge_endpoint import BadBody, ChatRequest, read_reply
from bellmask.evaluate.judge_prompts import read_alpaca
from bellmask.evaluate.likelihood import Likelihood
from bellmask.generate.generate import SideBySide
from bellmask.generate.trace import Change, Trace, TracedSample, load_trace, render_trace_page
from bellmask.utils.console import visible, visible_lines
from bellmask.utils.errors import UserError
from bellmask.utils.table import Table, in_latex

STEPS = [
    {"number": 1, "t": 0.5, "calls": 1, "set": [[1, " b"]], "unset": []},
    {"number": 3, "t": 0.0, "calls": 2, "set": [[1, "c"]], "unset": [1]},
]
SAMPLE = {"tokens": ["a", None], "num_steps": 3, "text": "a c"}
TRACE = {
    "version": 1,
    "title": "run",
    "settings": {"rule": "ancestral", "steps": 3},
    "num_calls": 2,
    "samples": [{**SAMPLE, "steps": STEPS}],
}


def traces(path):
    """A trace that is taken can be shown, and its page written."""

    def check(content):
        path.write_bytes(content)
        trace = load_trace(path)
        render_trace_page(trace).encode()
        for sample in trace.samples:
            assert len(sample.at(sample.num_steps)) == len(sample.at(2)) == len(sample.tokens)

    return json_files(TRACE) | st.just(as_json(TRACE)), check


def as_npz(arrays):
    stream = io.BytesIO()
    np.savez(stream, **arrays)
    return stream.getvalue()


DRAW = np.random.default_rng(1)
ARRAYS = {
    "length_B": np.array([4, 4, 4]),
    "level_B": DRAW.random(3),
    "count_BR": np.array([[2, 1], [3, 4], [1, 1]]),
    "ce_BR": DRAW.random((3, 2)),
    "document_B": np.array([0, 1, 2]),
    "num_bytes": np.float64(12.0),
    "fingerprint": np.str_("x"),
    "is_causal": np.bool_(False),
    "is_exact": np.bool_(False),
}


def evaluations(path):
    """What is taken has a summary."""
    whole = as_npz(ARRAYS)
    shapes = st.sampled_from([(), (0,), (3,), (3, 2), (3, 0), (2, 3), (1, 1, 1)])
    kinds = st.sampled_from([np.int64, np.float64, np.float32, np.bool_, "U3", "S2", "M8[s]"])
    other = st.tuples(st.sampled_from(list(ARRAYS)), st.builds(np.zeros, shapes, kinds))
    others = other.map(lambda pair: as_npz({**ARRAYS, pair[0]: pair[1]}))

    def check(content):
        path.write_bytes(content)
        try:
            found = Likelihood.load(path)
        except (OSError, ValueError) as error:
            raise UserError(str(error)) from None
        assert np.isfinite(found.nll)
        assert found.block_nll.shape == found.length_B.shape

    return st.one_of(st.just(whole), damaged(whole), others, st.binary()), check


REQUEST = ChatRequest("judge", (("user", "a or b?"),), logprobs=5)


CHOICE = {
    "message": {"content": "m", "role": "assistant"},
    "finish_reason": "stop",
    "logprobs": {"content": [{"top_logprobs": [{"token": "m", "logprob": -0.1}]}]},
}
BODY = {"choices": [CHOICE], "usage": {"prompt_tokens": 3, "completion_tokens": 1}}


def judge_replies(path):
    """What an endpoint sends is a reply, or a body that is asked for again."""

    def check(content):
        body = content.decode("utf-8", "replace")
        try:
            reply = read_reply(body, REQUEST)
        except BadBody as bad:
            raise UserError(str(bad)) from None
        reply.text.encode()
        json.dumps(reply.top_logprobs, allow_nan=False).encode()
        read_alpaca(reply.text, reply.top_logprobs)

    error = {"error": {"message": "no", "code": "bad"}}
    return json_files(BODY) | json_files(error) | st.just(as_json(BODY)), check


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("target", [traces, evaluations, judge_replies])
def test_any_file_is_taken_or_refused(target, size, tmp_path):
    inputs, check = target(tmp_path / "file")
    fuzz(20 * size, inputs, check)


# --- pages and tables ------------------------------------------------------------------------


def pages(title, key, token, text):
    steps = [Change(1, 0.5, 1, [(1, token)], [])]
    sample = TracedSample([token, None], steps, text, 2)
    both = SideBySide([token], {f"1 {title}": [[text]], f"2 {key}": [[token + text]]}, text)
    return render_trace_page(Trace(title, {key: text}, 1, [sample])), both.page()


@pytest.mark.parametrize("size", SIZES)
def test_any_text_in_a_page_is_text(size):
    """The same tags and attributes as with harmless text, and every text found again."""

    def tags(page):
        return re.findall(r"<[^>]*>", page)

    plain = [tags(page) for page in pages("title", "key", "token", "text")]

    def check(four):
        found = pages(*four)
        assert [tags(page) for page in found] == plain
        for page in map(html.unescape, found):
            assert visible(four[0]) in page
            assert visible(four[1]) in page
            assert visible_lines(four[3]) in page

    fuzz(15 * size, st.tuples(texts, texts, texts, texts), check, TAKEN)


def cells_of(line):
    """A row of a Markdown table as GitHub reads it: bars not behind a backslash end cells."""
    found = re.findall(r"((?:\\.|[^|\\])*)\|", line)
    return [re.sub(r"\\([\\|<(])", r"\1", cell).strip() for cell in found[1:]]


@pytest.mark.parametrize("size", SIZES)
def test_any_text_in_a_table_is_one_cell(size):
    def check(rows):
        lines = Table("", ["a|b", "c\nd"], rows).markdown().split("\n")
        assert len(lines) == len(rows) + 3
        assert cells_of(lines[0]) == ["a|b", "c d"]
        for line, row in zip(lines[2:], rows):
            assert not re.search(r"(?<!\\)<[A-Za-z/!?]|\]\(", line)
            for cell, text in zip(cells_of(line), row, strict=True):
                whole = visible_lines(text).replace("\n", " ").strip()
                assert cell.replace("\\", "") == whole.replace("\\", "")
                made = in_latex(text)
                signs = r"\\(text[a-z]+\{\}|[&%$#_{}])|\$\\pm\$|\$\^\\dagger\$|\{[\[*]\}"
                assert not set(re.sub(signs, "", made)) & set("&%$#_{}~^\\<>|[*\n")

    rows = st.lists(st.tuples(texts, texts), min_size=1, max_size=3)
    fuzz(15 * size, rows, check, TAKEN)
