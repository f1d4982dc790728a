"""Any options, configs, prompts, examples, texts, templates, canvases: taken, or one UserError."""

from __future__ import annotations

import contextlib
import gzip
import io
import lzma
from collections import Counter

import pyarrow
import pyarrow.parquet
import pytest
from commands import bellmask
from fuzz_tools import SIZES, TAKEN, as_json, changed, damaged, fuzz, json_files, texts, values
from hypothesis import strategies as st

from bellmask.config.config import RunConfig, load_config, override
from bellmask.config.presets import PRESETS, preset, tiny
from bellmask.data.chat_templates import Message, Template, join
from bellmask.data.examples import example_files
from bellmask.data.readers import DOCUMENT_RULES, read_file
from bellmask.data.tokenizers import ByteTokenizer
from bellmask.evaluate.judge_prompts import read_tasks
from bellmask.generate.generate import read_prompts, read_questions
from bellmask.generate.sampler import LONGEST, canvas_from_pieces, read_gaps
from bellmask.storage.build import build_objective

# --- options ---------------------------------------------------------------------------------

VALUES = [
    "", "0", "-1", "1", "3", "0.5", "1e9", "1e-9", "nan", "inf", "-inf", "None", "true", "x", "ü",
    "gaussian", "dirac", "uniform", "bell", "nelbo", "cosine", "middle_flat", "never", "5 min",
    "10M tokens", "[1, 2]", "{}", "--", "-", "a b", "=", "auto", "cuda", "muon", "1 2 3",
]  # fmt: skip
OPTIONS = [f"--{name.replace('_', '-')}" for name in RunConfig().flat()]
OPTIONS += ["--law", "--schedule", "--objective", "--optimizer", "--lw", "--", "-x", "--law.nu"]
COMMANDS = [
    ["config", "show", "tiny"], ["config", "diff", "tiny"], ["config"], ["presets"], ["generate"],
    ["generate", "nowhere"], ["evaluate", "nowhere"], ["chat", "nowhere"], ["report", "trace"],
    ["report", "nowhere"], ["export", "nowhere"], ["import", "nowhere"], ["compare"], ["judge"],
    ["analyze"], ["data", "show"], ["lm-eval"], ["train", "nowhere"], ["prepare", "nowhere"], [],
]  # fmt: skip
MORE = [
    "--num", "--length", "--canvas", "--prompts", "--out", "--format", "--steps", "--help", "-1",
    "--trace", "--config", "--law", "--train.steps", "--rule", "--frames", "--split", "--seeds",
]  # fmt: skip


def settle(config):
    config.check()
    build_objective(config)


def options(folder):
    value = st.sampled_from(VALUES).map(lambda text: text.split(" ")) | texts.map(lambda t: [t])
    pair = st.tuples(st.sampled_from(OPTIONS), value | st.just([])).map(lambda p: [p[0], *p[1]])
    arguments = st.lists(pair, min_size=1, max_size=4).map(lambda pairs: sum(pairs, []))  # noqa: RUF017
    inputs = st.tuples(st.sampled_from(list(PRESETS)), arguments)
    return inputs, lambda pair: settle(override(preset(pair[0]), pair[1]))


def config_files(folder):
    whole = tiny().to_dict()
    plain = as_json(whole)
    odd = damaged(plain) | changed(whole).map(as_json) | st.binary() | st.just(plain)
    inputs = st.one_of(
        st.tuples(st.just(".json"), odd),
        st.tuples(
            st.just(".toml"),
            damaged(b"[train]\nsteps = 3\n[law]\nname = 'dirac'\nmu = 0.3\n") | st.binary(),
        ),
        st.tuples(texts.map(lambda text: f".{text[:9]}"), st.just(plain)),
    )

    def check(pair):
        path = folder / "config"
        with contextlib.suppress(OSError, ValueError):  # a name that no file can have
            path = folder / f"config{pair[0]}"
            path.write_bytes(pair[1])
        settle(load_config(path))

    return inputs, check


@pytest.mark.parametrize("size", SIZES)
def test_any_command_line_ends_with_an_exit_code(size, tmp_path, monkeypatch):
    """A missing run makes all of these quick; nothing is fetched and nothing written."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    word = st.sampled_from([*MORE, *VALUES, *OPTIONS]) | texts
    codes = set()

    def check(pair):
        said = bellmask(*pair[0], *pair[1])
        codes.add(said.code)
        assert "Traceback" not in said.err
        assert (said.code == 2) == said.err.startswith("error: ")
        assert said.code == 0 or "\x1b" not in said.err, "steers the terminal"

    fuzz(12 * size, st.tuples(st.sampled_from(COMMANDS), st.lists(word, max_size=4)), check, TAKEN)
    assert codes == {0, 2}
    assert not list(tmp_path.iterdir())


# --- text ------------------------------------------------------------------------------------


def lines_of(*wholes):
    """JSON lines: changed ones, any objects, any bytes; some whole ones among them."""
    whole = st.sampled_from([as_json(tree) for tree in wholes])
    line = st.one_of(whole, *(changed(tree).map(as_json) for tree in wholes), values.map(as_json))
    some = st.lists(line, min_size=1, max_size=3).map(b"\n".join)
    return st.one_of(whole, some, some.flatmap(damaged), st.binary())


def encoded(text):
    return text.encode("utf-8", "surrogatepass")


SAID = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]


def prompt_files(folder):
    """Taken ones are text that any tokenizer takes."""
    whole = lines_of({"prompt": "The "}, {"canvas": "a [MASK*3]"}, {"messages": SAID[:1], "id": 3})
    inputs = st.tuples(st.sampled_from(["p.txt", "p.jsonl"]), whole | texts.map(encoded))

    def check(pair):
        path = folder / pair[0]
        path.write_bytes(pair[1])
        given = [text for prompt in read_prompts(path) for text in prompt.values()]
        for text in [*given, *(question.text for question in read_questions(path))]:
            assert len(ByteTokenizer().encode(text))

    return inputs, check


def example_and_task_files(folder):
    """For fine-tuning and for the judge."""
    wholes = [
        {"prompt": "a", "response": "b"},
        {"instruction": "a", "input": "c", "output": "b"},
        {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
        {"goal": "a", "sol1": "b", "sol2": "c", "label": 1},
        {"messages": SAID},
    ]

    def check(content):
        path = folder / "examples.jsonl"
        path.write_bytes(content)
        for _, one in example_files(str(path)).read(Counter()):
            join(Template("plain").parts(one.messages, one.is_conversation)).encode()
        read_tasks(path)

    return lines_of(*wholes) | json_files(wholes), check


TEMPLATES = [
    "{% for m in messages %}<|{{ m.role }}|>{{ m['content'] }}{% endfor %}",
    "{{ bos_token }}{{ messages | tojson }}{% if add_generation_prompt %}>{% endif %}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}", "{{ messages.__init__.__globals__ }}",
    "{{ raise_exception('no') }}", "{% include 'x' %}", "{% import 'os' as os %}", "{{ 1 / 0 }}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "{{ messages.append(1) }}", "\ud800",
    "{{ self._TemplateReference__context }}", "{{ [].pop() }}", "{{ " + "(" * 500 + "}}",
    "{% for i in range(10) %}" * 30 + "{% endfor %}" * 30, "{{ range(10 ** 9) }}",
]  # fmt: skip


def chat_templates(folder):
    whole = st.sampled_from(TEMPLATES)
    mixed = whole.flatmap(lambda t: damaged(encoded(t))).map(lambda b: b.decode("utf-8", "replace"))
    joined = st.lists(whole | texts, max_size=3).map("".join)

    def check(pair):
        template = Template("chat", pair[0], "<s>", "</s>")
        said = (Message("user", pair[1]), Message("assistant", "b"), Message("user", "c"))
        text = "".join(part.text for part in template.parts(said, is_conversation=True))
        assert "<class '" not in text, "left the sandbox"
        assert "__globals__" not in text or "__globals__" in pair[0]

    return st.tuples(st.one_of(whole, mixed, joined, texts), texts), check


def canvases(folder):
    """A canvas is as long as its pieces, and never longer than memory allows."""
    odd = ["[MASK]", "[MASK*0007]", f"[MASK*{LONGEST}]", f"[MASK*{'9' * 5000}]", "[MASK*٣]"]
    gap = st.integers(0, 40).map(lambda n: f"[MASK*{n}]") | st.sampled_from(odd)

    def check(text):
        canvas = canvas_from_pieces(ByteTokenizer(), read_gaps(text))
        assert 0 < len(canvas) <= LONGEST + 10_000
        assert ByteTokenizer().mask_id in canvas

    joined = st.lists(gap | texts, min_size=1, max_size=4).map("".join)
    return st.one_of(texts, joined, gap.map("a {} b".format)), check


PACK = {"": bytes, ".gz": gzip.compress, ".xz": lzma.compress}
PACK[".zst"] = lambda content: pyarrow.compress(content, "zstd", asbytes=True)


def text_files(folder):
    parquet = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table({"text": ["a", None, "b"]}), parquet)
    wholes = {
        ".txt": b"One line.\n\n = Heading = \n\nTwo, \xc3\xa9.\r\n<|endoftext|>\n",
        ".jsonl": as_json({"text": "a"}) + b"\n" + as_json({"text": ["b", "c"]}),
        ".csv": b'text,other\n"a ""b""",c\n',
        ".parquet": parquet.getvalue(),
    }

    def of_kind(kind, packing):
        pack = PACK[packing]
        whole = pack(wholes[kind])
        content = st.one_of(
            st.just(whole), damaged(whole), damaged(wholes[kind]).map(pack), st.binary()
        )
        return st.tuples(st.just(kind + packing), content)

    def check(pair):
        path = folder / f"corpus{pair[0]}"
        path.write_bytes(pair[1])
        reads = [(rule, "text") for rule in DOCUMENT_RULES]
        for rule, column in [*reads, *(("line", c) for c in ("0", "other", "²", "0+1"))]:
            for piece in read_file(path, rule=DOCUMENT_RULES[rule], column=column):
                piece.text.encode()

    kinds = st.sampled_from([(kind, packing) for kind in wholes for packing in PACK])
    return kinds.flatmap(lambda p: of_kind(p[0], "" if p[0] == ".parquet" else p[1])), check


TARGETS = [options, config_files, prompt_files, example_and_task_files, chat_templates, canvases]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("target", [*TARGETS, text_files], ids=lambda target: target.__name__)
def test_any_input_is_taken_or_refused(target, size, tmp_path):
    inputs, check = target(tmp_path)
    fuzz(20 * size, inputs, check)
