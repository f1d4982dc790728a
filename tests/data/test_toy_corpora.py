"""Toy corpora: the same rows everywhere, refused where they make no sense, trained end to end."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import stats

from bellmask.cli import run_command
from bellmask.data.prepare import load_data, make_tokenizer
from bellmask.data.tokenizer import SymbolTokenizer, from_description
from bellmask.data.toy import ToySource
from bellmask.data.toy_corpora import NUM_ROWS, TOYS, toy_blocks, toy_source
from bellmask.data.vocabularies import load_tokenizer
from bellmask.errors import UserError
from bellmask.options import DataOptions

SYMBOLS = SymbolTokenizer(8)


def toy(train: str, length: int = 4, **more) -> DataOptions:
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
    found, expected = toy_source(toy(name)), SOURCES[name]
    assert found.length == 4
    for field in ("initial_S", "transition_SS", "emission_SV"):
        torch.testing.assert_close(getattr(found, field), getattr(expected, field))


@pytest.mark.parametrize("name", SOURCES)
def test_rows_have_the_frequencies_of_the_source(name):
    """Pairs of neighbours, in the middle and over the whole row, in both splits."""
    source = SOURCES[name]
    train, valid = toy_blocks(toy(name), SYMBOLS)
    for blocks in (train, valid):
        for places in ([1, 2], [0, 3]):
            rows = blocks.rows(slice(None))[:, places]
            counts = np.bincount((rows @ torch.tensor([8, 1])).numpy(), minlength=64)
            x = torch.full((64, 4), 8)
            x[:, places] = torch.cartesian_prod(torch.arange(8), torch.arange(8))
            expected = len(blocks) * source.log_probability(x).exp().numpy()
            is_common = expected >= 5
            found = [np.append(n[is_common], n[~is_common].sum()) for n in (counts, expected)]
            found = [n if expected.min() < 5 else n[:-1] for n in found]
            assert stats.chisquare(*found).pvalue > 1e-4


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


def test_default_numbers_may_be_written_out():
    short, full = (toy_blocks(toy(name), SYMBOLS)[0] for name in ("toy:local", "toy:local:0.50"))
    assert short.fingerprint == full.fingerprint
    np.testing.assert_array_equal(short.tokens, full.tokens)


def test_whatever_changes_the_rows_changes_the_fingerprint(monkeypatch):
    names = ["toy:sticky", "toy:sticky:0.7", "toy:local", "toy:local:0.7", "toy:order2"]
    variants = [toy(name, length) for name in names for length in (2, 3)]
    blocks = [part for options in variants for part in toy_blocks(options, SYMBOLS)]
    monkeypatch.setattr("bellmask.data.toy_corpora.FORMAT", 2)
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
    ("options", "message"),
    [
        (toy("toy:stick"), "did you mean 'sticky'"),
        (toy("toy:"), "unknown toy corpus ''"),
        (toy("toy:sticky:1"), "the stay of toy:sticky is a number from 0 to 0.999"),
        (toy("toy:local:1.1"), "the locality of toy:local is a number from 0 to 1; write"),
        (toy("toy:local:-0.1"), "locality"),
        (toy("toy:local:nan"), "locality"),
        (toy("toy:local:"), "locality"),
        (toy("toy:local:a"), "locality"),
        (toy("toy:order2:1"), "toy:order2 takes no number"),
        (toy("toy:sticky", from_files="x"), "leave out --data.from$"),
        (toy("toy:sticky", valid="x"), "leave out --data.valid$"),
        (toy("toy:sticky", mixture=("ptb=0.3",)), "--data.mixture"),
        (toy("toy:sticky", packing="unpacked", wrap=False), "--data.packing, --data.wrap$"),
        (toy("toy:sticky", insert_eos=True), "--data.insert-eos"),
        (toy("toy:sticky", document_attention=True), "--data.document-attention"),
        (toy("toy:sticky", valid_fraction=0.1), "--data.valid-fraction"),
        (toy("toy:sticky", remainder="keep", pads="noised"), "--data.remainder, --data.pads"),
        (toy("toy:sticky", documents="line", column="a"), "--data.documents, --data.column"),
        (toy("toy:sticky", detokenizer="none"), "--data.detokenizer"),
    ],
    ids=str,
)
def test_what_makes_no_sense_is_refused(options, message):
    with pytest.raises(UserError, match=message):
        load_data(options, SYMBOLS)


def test_the_vocabulary_must_fit():
    for name in ("bytes", "symbols:7"):
        options = replace(toy("toy:sticky"), tokenizer=name)
        with pytest.raises(UserError, match=f"8 symbols; give .*symbols:8, not {name}"):
            load_data(options, make_tokenizer(options))


def test_a_toy_has_no_text(tmp_path):
    """As part of a mixture, as validation text, for a vocabulary."""
    text = tmp_path / "text.txt"
    text.write_text("abc " * 100)
    plain = DataOptions(train=str(text), cache=str(tmp_path), block_length=4)
    bad = [
        replace(plain, mixture=("toy:sticky=0.3",)),
        replace(plain, valid="toy:sticky"),
        replace(plain, train="toy:sticky", tokenizer="bpe:300"),
    ]
    for options in bad:
        with pytest.raises(UserError, match="toy:sticky has no text"):
            load_data(options, make_tokenizer(options))


@pytest.mark.parametrize("command", ["data show", "prepare"])
@pytest.mark.parametrize("more", [[], ["--data.tokenizer", "symbols:8"], ["--split", "valid"]])
def test_there_is_nothing_to_prepare_or_to_show(command, more, capsys, tmp_path):
    code = run_command([*command.split(), "toy:sticky", "--data.cache", str(tmp_path), *more])
    assert code == 2
    assert capsys.readouterr().err.count("toy:sticky has no text to read, prepare or show") == 1


def test_symbols_are_letters_and_white_space_is_skipped():
    assert SYMBOLS.encode("abc\n ha").tolist() == [0, 1, 2, 7, 0]
    assert SYMBOLS.encode("").tolist() == []
    assert [ids.tolist() for ids in SYMBOLS.encode_batch(["b", "cc"])] == [[1], [2, 2]]
    everything = np.arange(9)
    assert SYMBOLS.decode(everything) == "abcdefgh␣"
    with pytest.raises(UserError, match="letters abcdefgh, not 'i'"):
        SYMBOLS.encode("abi")


def test_no_symbol_is_special_but_the_mask():
    assert SYMBOLS.num_tokens == SYMBOLS.mask_id == 8
    assert not {SYMBOLS.eos_id, SYMBOLS.bos_id} & set(range(9))
    assert 0 <= SYMBOLS.pad_id < 8


def test_a_description_makes_the_tokenizer_again():
    again = from_description(json.loads(json.dumps(SYMBOLS.description())))
    assert isinstance(again, SymbolTokenizer)
    assert (again.fingerprint, again.num_tokens) == (SYMBOLS.fingerprint, 8)
    assert SymbolTokenizer(7).fingerprint != SYMBOLS.fingerprint


def test_symbol_tokenizers_by_name(tmp_path):
    assert load_tokenizer("symbols:52", tmp_path).num_tokens == 52
    for name in ("symbols:0", "symbols:53"):
        with pytest.raises(UserError, match="must be from 1 to 52"):
            load_tokenizer(name, tmp_path)
    for name in ("symbols:", "symbols:x", "symbols:-1"):
        with pytest.raises(UserError, match="write symbols:8 for 8 symbols"):
            load_tokenizer(name, tmp_path)


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
        with pytest.raises(UserError, match="symbols:3 has no EOS"):
            load_data(replace(options, **bad), make_tokenizer(options))


def test_train_evaluate_and_generate(tmp_path, capsys):
    out = str(tmp_path / "run")
    words = f"train tiny --data.train toy:local:0.5 --data.tokenizer symbols:8 --out {out}"
    small = "--data.block-length 8 --train.steps 2 --train.batch-size 4 --validation.blocks 8"
    cache = ["--data.cache", str(tmp_path / "cache")]
    assert run_command([*words.split(), *small.split(), *cache]) == 0
    assert run_command(["evaluate", out, "--blocks", "8"]) == 0
    report = json.loads((tmp_path / "run" / "evaluation" / "evaluation.json").read_text())
    assert 1 < report["nll"] < 4
    text = tmp_path / "rows.txt"
    text.write_text("abcdabcdabcdabcd\n" * 4)
    assert run_command(["evaluate", out, "--data", str(text), "--blocks", "2"]) == 0
    capsys.readouterr()
    assert run_command(["generate", out, "--num", "3"]) == 0
    rows = [word for word in capsys.readouterr().out.split() if word.isalpha()]
    assert [len(row) for row in rows] == [8, 8, 8]
    assert set("".join(rows)) <= set("abcdefgh")


def test_every_toy_takes_the_default_of_its_number():
    for name, one in TOYS.items():
        assert (one.default is None) == (name in ("order2", "hidden"))
