"""Real texts and vocabularies, where the machine has them, and a hub that can be filled."""

from __future__ import annotations

import pytest
from hub_tools import install_hub

from bellmask.data.tokenizers import bert_tokenizer, gpt2_tokenizer


@pytest.fixture(scope="session")
def gpt2(fetched):
    return fetched(gpt2_tokenizer)


@pytest.fixture(scope="session")
def bert(fetched):
    return fetched(bert_tokenizer)


@pytest.fixture
def hub(monkeypatch):
    return install_hub(monkeypatch, [])
