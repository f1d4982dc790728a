"""Another project's network written down plainly, small tokenizers, runs with random weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bellmask.build import build_model
from bellmask.config import RunConfig
from bellmask.data.tokenizer import ByteTokenizer, FastTokenizer, SymbolTokenizer, Tokenizer
from bellmask.options import DataOptions, ModelOptions, OptimOptions, TrainOptions
from bellmask.runfolder import write_description
from bellmask.train.checkpoint import CheckpointStore
from bellmask.train.distributed import World


def _with(**children: Any) -> nn.Module:
    """A module that is nothing but its children and parameters, in this order."""
    module = nn.Module()
    for name, child in children.items():
        setattr(module, name, child)
    return module


def _matrix(*size: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(*size) / math.sqrt(size[-1]))


def _linear(rows: int, columns: int, bias: bool = True) -> nn.Module:
    parts = {"weight": _matrix(rows, columns)}
    return _with(**parts, **({"bias": nn.Parameter(torch.randn(rows) * 0.3)} if bias else {}))


def _mlp(first: nn.Module, last: nn.Module) -> nn.Module:
    return nn.Sequential(first, nn.Identity(), last)


class PublishedNetwork(nn.Module):
    """mdlm's parameters by name and in order, all random, and its forward pass in slow steps.

    One row, one head and one pair of coordinates at a time; rotations as complex numbers.
    """

    def __init__(self, vocabulary: int, mask: int, *, layers: int = 2, width: int = 16) -> None:
        super().__init__()
        self.mask, self.heads, self.width = mask, 2, width
        self.vocab_embed = _with(embedding=_matrix(vocabulary, width))
        self.sigma_map = _with(mlp=_mlp(_linear(128, 256), _linear(128, 128)))
        self.rotary_emb = nn.Module()
        size = width // self.heads
        rate = 1e4 ** -(torch.arange(0, size, 2).float() / size)
        self.rotary_emb.register_buffer("inv_freq", rate)
        self.blocks = nn.ModuleList(
            _with(
                norm1=_with(weight=nn.Parameter(1 + torch.randn(width) * 0.3)),
                attn_qkv=_linear(3 * width, width, bias=False),
                attn_out=_linear(width, width, bias=False),
                norm2=_with(weight=nn.Parameter(1 + torch.randn(width) * 0.3)),
                mlp=_mlp(_linear(4 * width, width), _linear(width, 4 * width)),
                adaLN_modulation=_linear(6 * width, 128),
            )
            for _ in range(layers)
        )
        self.output_layer = _with(
            norm_final=_with(weight=nn.Parameter(1 + torch.randn(width) * 0.3)),
            linear=_linear(vocabulary, width),
            adaLN_modulation=_linear(2 * width, 128),
        )

    @torch.no_grad()
    def log_probabilities(self, row: list[int], time: float | None) -> Tensor:
        """[L, V] of one row of their ids; ``time`` None is a model without time input."""
        sigma = 0.0 if time is None else -math.log(1 - (1 - 1e-3) * time)
        c = self._condition(sigma)
        x = self.vocab_embed.embedding[row]
        for block in self.blocks:
            shift1, scale1, gate1, shift2, scale2, gate2 = _apply(block.adaLN_modulation, c).split(
                self.width
            )
            inner = self._norm(x, block.norm1.weight) * (1 + scale1) + shift1
            x = x + gate1 * self._attention(block, inner)
            inner = self._norm(x, block.norm2.weight) * (1 + scale2) + shift2
            h = _apply(block.mlp[0], inner)
            h = h / 2 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (h + 0.044715 * h**3)))
            x = x + gate2 * _apply(block.mlp[2], h)
        shift, scale = _apply(self.output_layer.adaLN_modulation, c).split(self.width)
        x = self._norm(x, self.output_layer.norm_final.weight) * (1 + scale) + shift
        logits = _apply(self.output_layer.linear, x)
        logits[:, self.mask] -= 1e6
        return logits - logits.exp().sum(1, keepdim=True).log()

    def _condition(self, sigma: float) -> Tensor:
        angles = [sigma * 1e4 ** (-i / 128) for i in range(128)]
        waves = torch.tensor([math.cos(a) for a in angles] + [math.sin(a) for a in angles])
        first, last = self.sigma_map.mlp[0], self.sigma_map.mlp[2]
        return _silu(_apply(last, _silu(_apply(first, waves))))

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        centred = x - x.mean(1, keepdim=True)
        return centred / (centred.pow(2).mean(1, keepdim=True) + 1e-5).sqrt() * weight

    def _attention(self, block: nn.Module, x: Tensor) -> Tensor:
        packed = _apply(block.attn_qkv, x)
        size, outputs = self.width // self.heads, []
        for head in range(self.heads):
            q, k, v = (
                packed[:, (part * self.heads + head) * size :][:, :size] for part in range(3)
            )
            q, k = self._turn(q), self._turn(k)
            score = torch.real(q @ k.conj().T) / math.sqrt(size)
            share = score.exp() / score.exp().sum(1, keepdim=True)
            outputs.append(share @ v)
        return _apply(block.attn_out, torch.cat(outputs, dim=1))

    def _turn(self, x: Tensor) -> Tensor:
        """Coordinates i and i + E/2 as one complex number, turned by position * rate."""
        half = x.shape[1] // 2
        angle = torch.arange(len(x))[:, None] * self.rotary_emb.inv_freq
        return torch.complex(x[:, :half], x[:, half:]) * torch.polar(torch.ones(()), angle)


def _apply(linear: nn.Module, x: Tensor) -> Tensor:
    out = x @ linear.weight.T
    return out + linear.bias if hasattr(linear, "bias") else out


def _silu(x: Tensor) -> Tensor:
    return x / (1 + (-x).exp())


WORDS = ["[PAD]", "[UNK]", "[CLS]", "[MASK]", "[SEP]", "the", "cat", "sat", "##s", "on", "mat"]


def bert_like() -> FastTokenizer:
    """The mask in the middle of the vocabulary, a pad at its beginning."""
    from tokenizers import Tokenizer as Inner
    from tokenizers import decoders, models, pre_tokenizers, processors

    vocabulary = {word: i for i, word in enumerate(WORDS)}
    inner = Inner(models.WordPiece(vocab=vocabulary, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    inner.decoder = decoders.WordPiece(prefix="##")
    inner.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 4)]
    )
    return FastTokenizer(inner, eos=4, bos=2, pad=0, mask=3)


def gpt2_like() -> FastTokenizer:
    """Byte-level BPE whose last token is EOS and BOS; neither a pad nor a mask."""
    return _bpe(specials=[])


def own_bpe() -> FastTokenizer:
    """Byte-level BPE with EOS, BOS and pad first, as bellmask learns them; no mask."""
    return _bpe(specials=["<eos>", "<bos>", "<pad>"])


def _bpe(specials: list[str]) -> FastTokenizer:
    from tokenizers import Tokenizer as Inner
    from tokenizers import decoders, models, pre_tokenizers, trainers

    inner = Inner(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=265,
        special_tokens=specials,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    inner.train_from_iterator(["the cat sat on the mat. the cats sat"] * 4, trainer)
    if specials:
        return FastTokenizer(inner, eos=0, bos=1, pad=2)
    inner.add_special_tokens(["<|endoftext|>"])
    return FastTokenizer(inner, eos=inner.token_to_id("<|endoftext|>"))


TOKENIZERS: dict[str, Callable[[], Tokenizer]] = {
    "bytes": ByteTokenizer,
    "bpe": own_bpe,
    "bert-like": bert_like,
    "gpt2-like": gpt2_like,
    "symbols": lambda: SymbolTokenizer(5),
}


def write_run(
    folder: Path, tokenizer: Tokenizer, model: ModelOptions | None = None, **sections: Any
) -> Path:
    """A run folder whose weights, and other averaged ones, are random: nothing is near zero."""
    small = ModelOptions(num_layers=2, width=16, num_heads=2, dropout=0.0)
    config = RunConfig(
        data=DataOptions(train="wikitext2", tokenizer="bytes", block_length=12),
        model=model or small,
        optim=OptimOptions(ema=0.9),
        train=TrainOptions(steps=7),
    )
    config = replace(config, **sections).check()
    network = build_model(config, tokenizer.num_tokens)
    draw = torch.Generator().manual_seed(5)
    tensors = {
        f"{kind}.{name}": torch.randn(p.shape, generator=draw) / math.sqrt(p.shape[-1])
        for kind in ("model", "ema")
        for name, p in network.named_parameters()
    }
    about = {"tokenizer_fingerprint": tokenizer.fingerprint, "train_fingerprint": "none"}
    write_description(folder, config, tokenizer, about, {})
    state = {"format": 1, "step": 7, "tokens": 0, "seconds": 0.0, "nll": None, "window": {}}
    CheckpointStore(folder / "checkpoints", config.checkpoint, World()).save(7, tensors, state)
    return folder


@pytest.fixture(scope="session")
def tools() -> SimpleNamespace:
    """What the tests of this folder share."""
    return SimpleNamespace(
        PublishedNetwork=PublishedNetwork, TOKENIZERS=TOKENIZERS, write_run=write_run
    )


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        yield
