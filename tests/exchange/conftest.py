"""Small tokenizers, and runs and exports made once: nobody writes into them."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from pretrained_tools import learn_bpe

from bellmask.config.config import RunConfig
from bellmask.config.options import DataOptions, ModelOptions, OptimOptions, TrainOptions
from bellmask.data.tokenizers import ByteTokenizer, FastTokenizer, SymbolTokenizer
from bellmask.storage.build import build_model
from bellmask.storage.checkpoint import CheckpointStore
from bellmask.storage.run_folder import write_description
from bellmask.utils.distributed import World

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[MASK]", "[SEP]", "the", "cat", "sat", "##s", "on", "mat"]


def bert_like():
    """The mask in the middle of the vocabulary, a pad at its beginning."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

    vocabulary = {word: i for i, word in enumerate(WORDS)}
    inner = Tokenizer(models.WordPiece(vocab=vocabulary, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    inner.decoder = decoders.WordPiece(prefix="##")
    inner.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 4)]
    )
    return FastTokenizer(inner, eos=4, bos=2, pad=0, mask=3)


def byte_level_bpe(*specials):
    """With EOS, BOS and pad first, as bellmask learns them; or like GPT-2, EOS last and no pad."""
    inner = learn_bpe("the cat sat on the mat. the cats sat" * 4, 265, list(specials))
    if specials:
        return FastTokenizer(inner, eos=0, bos=1, pad=2)
    inner.add_special_tokens(["<|endoftext|>"])
    return FastTokenizer(inner, eos=inner.token_to_id("<|endoftext|>"))


TOKENIZERS = {
    "bytes": ByteTokenizer,
    "bpe": lambda: byte_level_bpe("<eos>", "<bos>", "<pad>"),
    "bert-like": bert_like,
    "gpt2-like": byte_level_bpe,
    "symbols": lambda: SymbolTokenizer(5),
}
SMALL = ModelOptions(num_layers=2, width=16, num_heads=2, dropout=0.0)


def write_run(folder, kind, sections):
    """A run folder whose weights, and other averaged ones, are random: nothing is near zero."""
    tokenizer = TOKENIZERS[kind]()
    config = RunConfig(
        data=DataOptions(train="wikitext2", tokenizer="bytes", block_length=12),
        model=SMALL,
        optim=OptimOptions(ema=0.9),
        train=TrainOptions(steps=7),
    )
    config = replace(config, **sections).check()
    network = build_model(config, tokenizer.num_tokens)
    draw = torch.Generator().manual_seed(5)
    tensors = {
        f"{which}.{name}": torch.randn(p.shape, generator=draw) / math.sqrt(p.shape[-1])
        for which in ("model", "ema")
        for name, p in network.named_parameters()
    }
    about = {"tokenizer_fingerprint": tokenizer.fingerprint, "train_fingerprint": "none"}
    write_description(folder, config, tokenizer, about, {})
    state = {"format": 1, "step": 7, "tokens": 0, "seconds": 0.0, "nll": None, "window": {}}
    CheckpointStore(folder / "checkpoints", config.checkpoint, World()).save(7, tensors, state)
    return folder


@pytest.fixture(scope="session")
def run_of(tmp_path_factory):
    """``run_of("bert-like", model=...)``: a run folder of random weights on that tokenizer."""
    made = {}

    def find(kind, **sections):
        key = (kind, repr(sections))
        if key not in made:
            made[key] = write_run(tmp_path_factory.mktemp("runs") / "run", kind, sections)
        return made[key]

    return find


@pytest.fixture(autouse=True)
def _seeded():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        yield
