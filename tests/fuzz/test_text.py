"""Any bytes in prompts, examples, corpora, templates and canvases: read, or one UserError."""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import lzma
from collections import Counter
from pathlib import Path

import pytest
from fuzz_tools import (
    REFUSED,
    SIZES,
    TAKEN,
    as_json,
    changed,
    damaged,
    fuzz,
    json_files,
    texts,
    values,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Inner
from tokenizers import models, pre_tokenizers, trainers

from bellmask.data.example_files import example_files
from bellmask.data.formats import RULES, read_file
from bellmask.data.messages import Message
from bellmask.data.task_files import questions
from bellmask.data.tasks import TASKS
from bellmask.data.templates import Template
from bellmask.data.tokenizer import ByteTokenizer, FastTokenizer
from bellmask.errors import UserError
from bellmask.generate.canvas import LONGEST, canvas_from_text
from bellmask.generate.prompts import read_prompts, read_questions
from bellmask.judge.benchmarks import read_tasks

pyarrow = pytest.importorskip("pyarrow")
pytest.importorskip("jinja2")


def lines_of(*wholes: object) -> st.SearchStrategy[bytes]:
    """JSON lines: changed ones, any objects, any bytes; some whole ones among them."""
    whole = st.sampled_from([as_json(tree) for tree in wholes])
    line = st.one_of(whole, *(changed(tree).map(as_json) for tree in wholes), values.map(as_json))
    some = st.lists(line, min_size=1, max_size=3).map(b"\n".join)
    return st.one_of(whole, some, some.flatmap(damaged), st.binary())


TALK = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
ASKED = {
    "messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "a"}],
    "id": 3,
}


@pytest.mark.parametrize("size", SIZES)
def test_prompt_files(size: int, tmp_path: Path) -> None:
    """Taken ones are text that any tokenizer and any file takes."""
    whole = lines_of({"prompt": "The "}, {"canvas": "a [MASK*3]"}, ASKED)
    inputs = st.tuples(st.sampled_from(["p.txt", "p.jsonl"]), whole | texts.map(encoded))
    tokenizer = ByteTokenizer()

    def check(pair: tuple[str, bytes]) -> None:
        path = tmp_path / pair[0]
        path.write_bytes(pair[1])
        for read in (read_questions, read_prompts):
            for one in read(path):
                assert one.text
                tokenizer.encode(one.text)

    assert fuzz("prompt files", size, inputs, check) == {TAKEN, REFUSED}


def encoded(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


@pytest.mark.parametrize("size", SIZES)
def test_example_files(size: int, tmp_path: Path) -> None:
    """For fine-tuning, for the judge, and as records of downstream tasks."""
    wholes = [
        {"prompt": "a", "response": "b"},
        {"instruction": "a", "input": "c", "output": "b"},
        {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
        {"goal": "a", "sol1": "b", "sol2": "c", "label": 1},
        {"question": "q", "choices": {"text": ["a", "b"], "label": ["A", "B"]}, "answerKey": "B"},
        TALK,
    ]
    inputs = lines_of(*wholes) | json_files(wholes)

    def check(content: bytes) -> None:
        path = tmp_path / "examples.jsonl"
        path.write_bytes(content)
        for example in example_files(str(path)):
            assert example.response.strip() == example.response.encode().decode().strip()
            Template("plain").prompt(example).encode()
        read_tasks(path)

    assert fuzz("example files", size, inputs, check) == {TAKEN, REFUSED}


@pytest.mark.parametrize("task", TASKS)
def test_records_of_other_tasks_are_refused(task: str) -> None:
    """Objects that have nothing, or other things than expected, under a task's columns."""
    odd = [{}, {"label": "9" * 5000}, {"choices": []}, {"text": 3}, {"ctx": None, "endings": "x"}]
    for record in odd:
        with contextlib.suppress(UserError):  # a story may be told in one word
            assert all(q is None or q.example for q in questions(task, iter([record])))


TEMPLATES = [
    "{% for m in messages %}<|{{ m.role }}|>{{ m['content'] }}{% endfor %}",
    "{{ bos_token }}{{ messages | tojson }}{% if add_generation_prompt %}>{% endif %}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}", "{{ messages.__init__.__globals__ }}",
    "{{ raise_exception('no') }}", "{% include 'x' %}", "{% import 'os' as os %}", "{{ 1 / 0 }}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "{{ messages.append(1) }}", "\ud800",
    "{{ self._TemplateReference__context }}", "{{ [].pop() }}", "{{ " + "(" * 500 + "}}",
    "{% for i in range(10) %}" * 30 + "{% endfor %}" * 30, "{{ range(10 ** 9) }}",
]  # fmt: skip


@pytest.mark.parametrize("size", SIZES)
def test_chat_templates(size: int) -> None:
    whole = st.sampled_from(TEMPLATES)
    mixed = whole.flatmap(lambda t: damaged(encoded(t))).map(lambda b: b.decode("utf-8", "replace"))
    joined = st.lists(whole | texts, max_size=3).map("".join)
    inputs = st.tuples(st.one_of(whole, mixed, joined, texts), texts)

    def check(pair: tuple[str, str]) -> None:
        template = Template("chat", pair[0], "<s>", "</s>")
        said = (Message("user", pair[1]), Message("assistant", "b"), Message("user", "c"))
        parts = template.parts(said, is_conversation=True)
        text = "".join(part.text for part in parts)
        assert "<class '" not in text, "left the sandbox"
        assert "__globals__" not in text or "__globals__" in pair[0]

    assert fuzz("chat templates", size, inputs, check) == {TAKEN, REFUSED}


def learned() -> FastTokenizer:
    inner = Inner(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<eos>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    inner.train_from_iterator(["a text of a few words"], trainer)
    return FastTokenizer(inner, eos=0)


@pytest.mark.parametrize("size", SIZES)
def test_canvases(size: int) -> None:
    """A canvas is as long as its pieces, and never longer than memory allows."""
    tokenizers = [ByteTokenizer(), learned()]
    gap = st.integers(0, 40).map(lambda n: f"[MASK*{n}]") | st.sampled_from(
        ["[MASK]", "[MASK*0007]", f"[MASK*{LONGEST}]", f"[MASK*{'9' * 5000}]", "[MASK*٣]"]
    )
    inputs = st.one_of(texts, st.lists(gap | texts, min_size=1, max_size=4).map("".join))

    def check(text: str) -> None:
        for tokenizer in tokenizers:
            canvas = canvas_from_text(tokenizer, text)
            assert 0 < len(canvas) <= LONGEST + 10_000
            assert not canvas.is_given_L.all()

    assert fuzz("canvases", size, inputs, check) == {TAKEN, REFUSED}


def packed(content: bytes, suffix: str) -> bytes:
    if suffix == ".zst":
        zstandard = pytest.importorskip("zstandard")
        return zstandard.ZstdCompressor().compress(content)
    packers = {".gz": gzip.compress, ".xz": lzma.compress}
    return packers[suffix](content) if suffix in packers else content


def parquet(texts: list[str | None]) -> bytes:
    import pyarrow.parquet

    stream = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), stream)
    return stream.getvalue()


@pytest.mark.parametrize("size", SIZES)
def test_text_files(size: int, tmp_path: Path) -> None:
    plain = b"One line.\n\n = Heading = \n\nTwo, \xc3\xa9.\r\n<|endoftext|>\n"
    rows = as_json({"text": "a"}) + b"\n" + as_json({"text": ["b", "c"]})
    table = b'text,other\n"a ""b""",c\n'
    wholes = {".txt": plain, ".jsonl": rows, ".csv": table, ".parquet": parquet(["a", None, "b"])}

    def of_kind(kind: str, packing: str) -> st.SearchStrategy[tuple[str, bytes]]:
        whole = packed(wholes[kind], packing)
        inner = damaged(wholes[kind]).map(lambda content: packed(content, packing))
        content = st.one_of(st.just(whole), damaged(whole), inner, st.binary())
        return st.tuples(st.just(kind + packing), content)

    packings = st.sampled_from(["", ".gz", ".xz", ".zst"])
    inputs = st.tuples(st.sampled_from(list(wholes)), packings).flatmap(
        lambda pair: of_kind(pair[0], pair[1] if pair[0] != ".parquet" else "")
    )

    def check(pair: tuple[str, bytes]) -> None:
        path = tmp_path / f"corpus{pair[0]}"
        path.write_bytes(pair[1])
        for rule in RULES:
            for piece in read_file(path, rule=rule, column="text"):
                piece.text.encode()
        for column in ("0", "other", "²", "0+1"):
            list(read_file(path, rule="line", column=column))

    assert fuzz("text files", size, inputs, check) == {TAKEN, REFUSED}


def test_hostile_values_are_really_drawn() -> None:
    """Half characters, endless numbers and nesting; else the tests above try nothing."""
    seen = Counter[str]()
    signs = ("\\ud", "NaN", "[[[[[", "0" * 20, "\\u001b")

    @settings(max_examples=150, derandomize=True, database=None, deadline=None)
    @given(values)
    def look(tree: object) -> None:
        text = json.dumps(tree)
        seen.update(sign for sign in signs if sign in text)

    look()
    assert len(seen) == len(signs), seen
