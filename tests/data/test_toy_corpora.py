"""Toy corpora: the same rows everywhere, refused where they make no sense, trained end to end."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from commands import refuses, succeeds
from scipy import stats

from bellmask.config.options import DataOptions
from bellmask.data.prepare import load_data, make_tokenizer
from bellmask.data.tokenizers import SymbolTokenizer
from bellmask.data.toys import NUM_ROWS, ToySource, toy_blocks, toy_source
from bellmask.utils.errors import UserError

SYMBOLS = SymbolTokenizer(8)


def toy(train, length=4, **more):
    return DataOptions(train=train, tokenizer="symbols:8", block_length=length, **more)


SOURCES = {
    "toy:sticky": ToySource.sticky(8, 4, stay=0.8),
    "toy:sticky:0.25": ToySource.sticky(8, 4, stay=0.25),
    "toy:order2": ToySource.order_two(8, 4),
    "toy:hidden": ToySource.hidden(8, 4),
    "toy:local": ToySource.local(8, 4, locality=0.5),
    "toy:local:0": ToySource.local(8, 4, locality=0.0),
    "toy:local:1": ToySource.local(8, 4, locality=1.0),
}


@pytest.mark.parametrize("name", SOURCES)
def test_a_name_and_a_number_say_which_source(name):
    """Also the frequencies of neighbors, in the middle and over the whole row, in both splits."""
    found, source = toy_source(toy(name)), SOURCES[name]
    for field in ("initial_S", "transition_SS", "emission_SV"):
        torch.testing.assert_close(getattr(found, field), getattr(source, field))
    for blocks in toy_blocks(toy(name), SYMBOLS):
        for places in ([1, 2], [0, 3]):
            rows = blocks.rows(slice(None))[:, places]
            counts = np.bincount((rows @ torch.tensor([8, 1])).numpy(), minlength=64)
            x = torch.full((64, 4), 8)
            x[:, places] = torch.cartesian_prod(torch.arange(8), torch.arange(8))
            expected = len(blocks) * source.log_probability(x).exp().numpy()
            is_common = expected >= 5
            tables = [np.append(n[is_common], n[~is_common].sum()) for n in (counts, expected)]
            tables = [n if expected.min() < 5 else n[:-1] for n in tables]
            assert stats.chisquare(*tables).pvalue > 1e-4


def test_blocks_are_in_memory_each_row_a_document():
    data = load_data(toy("toy:hidden", 6), make_tokenizer(toy("toy:hidden", 6)))
    assert (data.sizes, data.weights) == ((), ())
    for blocks, count in ((data.train, 1 << 18), (data.valid, 4096)):
        assert len(blocks) == count
        assert blocks.block_length == 6
        assert not blocks.is_padded
        assert blocks.documents.tolist() == list(range(count))
        assert blocks.num_bytes == 0
        assert blocks.tokens.max() == 7


def test_rows_are_the_same_everywhere():
    """Golden rows: a change needs a new FORMAT."""
    golden = {
        "toy:sticky": ("cfffahhhhhhh", "ccdddddhffff"),
        "toy:order2": ("eaacgedfbefc", "gghgbhfahdbg"),
        "toy:hidden": ("hhhhahhhhahh", "ffffeeegggab"),
        "toy:local:0.5": ("ggdfccgfbcbf", "gfbfgedcaadd"),
    }
    found = {
        name: tuple(SYMBOLS.decode(b.tokens[-1]) for b in toy_blocks(toy(name, 12), SYMBOLS))
        for name in golden
    }
    assert found == golden


def test_whatever_changes_the_rows_changes_the_fingerprint(monkeypatch):
    monkeypatch.setitem(NUM_ROWS, "train", 60)
    names = ["toy:sticky", "toy:sticky:0.7", "toy:local", "toy:local:0.7", "toy:order2"]
    variants = [toy(name, length) for name in names for length in (2, 3)]
    blocks = [part for options in variants for part in toy_blocks(options, SYMBOLS)]
    written_out = toy_blocks(toy("toy:local:0.50", 2), SYMBOLS)[0]
    assert written_out.fingerprint == toy_blocks(toy("toy:local", 2), SYMBOLS)[0].fingerprint
    monkeypatch.setattr("bellmask.data.toys.FORMAT", 2)
    blocks += toy_blocks(toy("toy:sticky", 2), SYMBOLS)
    monkeypatch.setitem(NUM_ROWS, "train", 50)
    blocks.append(toy_blocks(toy("toy:sticky", 2), SYMBOLS)[0])
    assert len({one.fingerprint for one in blocks}) == len(blocks) == 23


def test_training_and_validation_rows_are_drawn_apart():
    """Row by row they agree as often as any two symbols do."""
    train, valid = toy_blocks(toy("toy:sticky", 24), SYMBOLS)
    for first in (0, 4096, len(train) - 4096):
        same = (train.tokens[first : first + 4096] == valid.tokens).mean(1)
        assert same.mean() == pytest.approx(1 / 8, abs=5 * same.std() / 64)


@pytest.mark.parametrize(
    ("name", "more", "words"),
    [
        ("toy:stick", {}, "'sticky'"),
        ("toy:", {}, "''"),
        ("toy:sticky:1", {}, "stay of toy:sticky"),
        ("toy:local:1.1", {}, "locality of toy:local"),
        ("toy:local:-0.1", {}, "locality"),
        ("toy:local:", {}, "locality"),
        ("toy:order2:1", {}, "toy:order2"),
        ("toy:sticky", {"from_files": "x"}, "--data.from$"),
        ("toy:sticky", {"mixture": ("ptb=0.3",)}, "--data.mixture"),
        ("toy:sticky", {"packing": "unpacked", "wrap": False}, "--data.packing, --data.wrap$"),
        ("toy:sticky", {"tokenizer": "bytes"}, "symbols:8, not bytes"),
        ("toy:sticky", {"tokenizer": "symbols:7"}, "symbols:8, not symbols:7"),
        ("toy:sticky", {"tokenizer": "bpe:300"}, "toy:sticky has no text"),
        ("{text}", {"mixture": ("toy:sticky=0.3",)}, "toy:sticky has no text"),
        ("{text}", {"valid": "toy:sticky"}, "toy:sticky has no text"),
    ],
)
def test_what_makes_no_sense_is_refused(tmp_path, name, more, words):
    (tmp_path / "text.txt").write_text("abc " * 100)
    options = replace(toy(name.format(text=tmp_path / "text.txt")), cache=str(tmp_path))
    options = replace(options, tokenizer="symbols:8" if name.startswith("toy") else "bytes")
    options = replace(options, **more)
    with pytest.raises(UserError, match=words):
        load_data(options, make_tokenizer(options))


@pytest.mark.parametrize("command", [["data", "show"], ["prepare"]])
def test_there_is_nothing_to_prepare_or_to_show(command, tmp_path):
    words = [*command, "toy:sticky", "--data.cache", tmp_path]
    refuses(*words, names="toy:sticky")
    refuses(*words, "--data.tokenizer", "symbols:8", "--split", "valid", names="toy:sticky")


def test_text_in_symbols_has_no_ends_of_documents(tmp_path):
    (tmp_path / "a.txt").write_text("abcabc\nabc")
    options = DataOptions(
        train=str(tmp_path / "a.txt"),
        tokenizer="symbols:3",
        block_length=3,
        documents="line",
        valid_fraction=0.3,
        cache=str(tmp_path),
    )
    data = load_data(options, make_tokenizer(options))
    assert data.train.rows(slice(None)).tolist() == [[0, 1, 2]] * 2
    assert data.valid.rows(slice(None)).tolist() == [[0, 1, 2]]
    for bad in ({"wrap": True}, {"packing": "unpacked"}, {"document_attention": True}):
        with pytest.raises(UserError, match="symbols:3"):
            load_data(replace(options, **bad), make_tokenizer(options))


def test_a_run_on_symbols_is_evaluated_and_generates(zoo, tmp_path):
    text = tmp_path / "rows.txt"
    text.write_text("abcdabcdabcdabcd\n" * 4)
    for data in ([], ["--data", text]):
        out = tmp_path / f"out{len(data)}"
        succeeds("evaluate", zoo / "toy", "--blocks", 2, *data, "--out", out)
        assert 0 < json.loads((out / "evaluation.json").read_text())["nll"] < 4
    said = succeeds("generate", zoo / "toy", "--num", 3)
    rows = [word for word in said.out.split() if word.isalpha()]
    assert [len(row) for row in rows] == [8, 8, 8]
    assert set("".join(rows)) <= set("abcdefgh")
