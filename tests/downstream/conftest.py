"""Fixtures: a masked run, and a GPT-2 as lm-eval and as bellmask know it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from pretrained_tools import make_config, make_lm, make_tokenizer

from bellmask.assemble import train_run
from bellmask.config import RunConfig
from bellmask.run import Run, load_run
from bellmask.transformers_library import quiet

Config = Callable[..., RunConfig]


@pytest.fixture(scope="session")
def masked(small_config: Config, tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("harness") / "masked"
    train_run(small_config("--train.steps", "30", "--optim.lr", "0.01"), folder, is_quiet=True)
    return load_run(folder)


@pytest.fixture(scope="session")
def lm(text_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small GPT-2 whose tokenizer writes BOS by itself, as HFLM needs to begin as our runs do."""
    from tokenizers.processors import TemplateProcessing

    folder = tmp_path_factory.mktemp("harness") / "lm"
    text = text_file.read_text(encoding="utf-8")
    tokenizer = make_tokenizer(text, bos_token="<|begin|>")
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|begin|> $A", special_tokens=[("<|begin|>", tokenizer.bos_token_id)]
    )
    ids = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    with quiet():
        make_lm(make_config("gpt2", len(tokenizer), **ids)).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def arm(lm: Path, small_config: Config, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The same weights as a run."""
    folder = tmp_path_factory.mktemp("harness") / "arm"
    options = f"--start.model {lm} --framework arm --optim.lr 0 --train.steps 1"
    config = small_config(*options.split(), "--data.block-length", "64")
    train_run(config, folder, is_quiet=True)
    return load_run(folder)


@pytest.fixture
def short_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """lm-eval without its two seconds of asking pip and the hardware what there is."""
    monkeypatch.setattr("lm_eval.evaluator.add_env_info", lambda storage: None)
