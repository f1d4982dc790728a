"""The network of a run without its weights: tensors that have shapes and no memory.

Everything that is planned is read off this network, so the planner knows no formula for any
architecture. Nothing is fetched: causal LMs come from a local folder, or from the table here.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from bellmask.config.config import RunConfig, load_config
from bellmask.config.options import ModelOptions
from bellmask.config.presets import PRESETS, preset
from bellmask.data.readers import cache_folder
from bellmask.data.tokenizers import (
    MOST_TOKENS,
    SMALLEST_BPE,
    VOCABULARIES,
    load_tokenizer,
)
from bellmask.model.causal_lm import read_architecture, read_causal_lm
from bellmask.model.pretrained import Backbone, PretrainedDenoiser, add_lora, from_architecture
from bellmask.storage.build import Network, build_model
from bellmask.storage.run_folder import read_backbone, read_description
from bellmask.train.setup import check_length
from bellmask.utils.errors import UserError
from bellmask.utils.files import count_of, is_whole
from bellmask.utils.libraries import import_transformers, quiet


def _gpt2(num_layers: int, width: int, num_heads: int) -> dict[str, Any]:
    return {"model_type": "gpt2", "n_layer": num_layers, "n_embd": width, "n_head": num_heads}


KNOWN_MODELS: dict[str, dict[str, Any]] = {
    "gpt2": _gpt2(12, 768, 12),
    "gpt2-medium": _gpt2(24, 1024, 16),
    "gpt2-large": _gpt2(36, 1280, 20),
    "gpt2-xl": _gpt2(48, 1600, 25),
    "smollm2": {
        "model_type": "llama",
        "num_hidden_layers": 30,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "vocab_size": 49_152,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
    },
}
"""Causal LMs whose sizes are known without fetching them, by the last part of their name."""


@dataclass(frozen=True)
class Planned:
    """A network to count on."""

    config: RunConfig
    """With what the start decides filled in."""
    network: Network
    num_tokens: int
    mode: FakeTensorMode
    notes: tuple[str, ...] = ()

    @property
    def is_causal_lm(self) -> bool:
        """True for a Hugging Face backbone."""
        return isinstance(self.network, PretrainedDenoiser)


def plan_network(config: RunConfig) -> Planned:
    """The network that the options describe, with shapes only."""
    config, num_tokens, backbone, notes = _describe(config)
    if backbone is not None:
        check_length(config, backbone, config.start.model or str(config.start.architecture))
    with torch.device("meta"), torch.random.fork_rng(devices=[]):
        network = build(config, num_tokens, backbone)
    mode = FakeTensorMode()
    with mode:
        _replace_tensors(network)
    return Planned(config, network, num_tokens, mode, tuple(notes))


def _replace_tensors(network: nn.Module) -> None:
    """Tensors of device meta by ones that pass for a CPU's; tied weights stay tied."""
    made: dict[int, nn.Parameter] = {}
    for part in network.modules():
        for name, p in part._parameters.items():
            if p is not None:
                if id(p) not in made:
                    made[id(p)] = nn.Parameter(torch.empty(p.shape, dtype=p.dtype), p.requires_grad)
                part._parameters[name] = made[id(p)]
        for name, b in part._buffers.items():
            if b is not None:
                part._buffers[name] = torch.empty(b.shape, dtype=b.dtype)


def real_network(config: RunConfig) -> tuple[RunConfig, Network, int]:
    """The same with random weights, to be measured."""
    config, num_tokens, backbone, _ = _describe(config)
    with torch.random.fork_rng(devices=[]):
        return config, build(config, num_tokens, backbone), num_tokens


def build(config: RunConfig, num_tokens: int, backbone: Backbone | None) -> Network:
    """As :func:`bellmask.storage.build.build_model`, without the probe that needs numbers."""
    if backbone is None:
        return build_model(config, num_tokens)
    inner = from_architecture(backbone.language_model, config.model.dropout)
    network = PretrainedDenoiser(inner, num_tokens, is_causal=config.framework.name != "mdm")
    if config.start.lora_rank:
        add_lora(network, config.start.lora_rank, config.start.lora_alpha)
    return network.train()


def _describe(config: RunConfig) -> tuple[RunConfig, int, Backbone | None, list[str]]:
    """(config, V, causal LM, notes), of whatever the run starts from."""
    start = config.start
    if start.model is not None:
        return _from_model(config, start.model)
    num_tokens = count_tokens(config)
    if start.architecture is None:
        return config, num_tokens, None, []
    backbone, _ = read_architecture(start.architecture)
    values = {**backbone.language_model, "vocab_size": num_tokens}
    return _as_causal_lm(config), num_tokens, Backbone(values), []


def _as_causal_lm(config: RunConfig) -> RunConfig:
    return replace(config, model=ModelOptions(backbone="causal_lm", dropout=config.model.dropout))


def _from_model(config: RunConfig, name: str) -> tuple[RunConfig, int, Backbone | None, list[str]]:
    known = KNOWN_MODELS.get(name.rsplit("/", 1)[-1])
    folder = Path(name)
    if (folder / "run.json").exists():
        return _from_run(config, folder)
    if (folder / "config.json").exists():
        return _from_folder(config, folder)
    if known is not None:
        with quiet():
            made = import_transformers("a plan").AutoConfig.for_model(**known).to_dict()
        values = json.loads(json.dumps(made, default=str))
        note = f"the sizes of {name} are those of a table; nothing was fetched"
        return _as_causal_lm(config), int(values["vocab_size"]), Backbone(values), [note]
    before = Path(name).name
    if Path(name).parts[:1] == ("runs",) and before in PRESETS:
        told = _describe(preset(before))
        model = replace(told[0].model, dropout=config.model.dropout)
        note = f"{name} is not there yet: planned as what the preset {before} will leave"
        return replace(config, model=model), told[1], told[2], [*told[3], note]
    raise UserError(
        f"start.model={name}: planning fetches nothing; give a local folder that holds its "
        f"config.json, a run folder, or one of {', '.join(KNOWN_MODELS)}"
    )


def _from_run(config: RunConfig, folder: Path) -> tuple[RunConfig, int, Backbone | None, list[str]]:
    theirs, about = load_config(folder / "config.json"), read_description(folder)
    model = replace(theirs.model, dropout=config.model.dropout)
    num_tokens: Any = about.get("num_tokens")
    if not is_whole(num_tokens, 1) or num_tokens > MOST_TOKENS:
        raise UserError(f"{folder / 'run.json'} says no number of tokens")
    return replace(config, model=model), num_tokens, read_backbone(folder), []


def _from_folder(
    config: RunConfig, folder: Path
) -> tuple[RunConfig, int, Backbone | None, list[str]]:
    if (folder / "tokenizer.json").exists():
        tokenizer, backbone = read_causal_lm(str(folder))
        return _as_causal_lm(config), tokenizer.num_tokens, backbone, []
    backbone, _ = read_architecture(str(folder))
    num_tokens = int(backbone.language_model["vocab_size"])
    note = f"{folder} has no tokenizer: all {num_tokens:,} rows of its embedding count as tokens"
    return _as_causal_lm(config), num_tokens, backbone, [note]


def count_tokens(config: RunConfig) -> int:
    """V of the tokenizer that the options name, without fetching or learning one."""
    name = config.data.tokenizer
    kind, _, size = name.partition(":")
    if name in VOCABULARIES:
        return VOCABULARIES[name]
    if kind in ("bpe", "symbols") and size.isdecimal():
        least = SMALLEST_BPE if kind == "bpe" else 1
        if not least <= (count_of(size) or 0) <= MOST_TOKENS:
            raise UserError(f"data.tokenizer={kind}:N needs N from {least} to {MOST_TOKENS:,}")
        return int(size)
    if not Path(name).exists():
        raise UserError(
            f"data.tokenizer={name}: planning fetches nothing; give a local folder, bpe:N, or one "
            f"of {', '.join(VOCABULARIES)}"
        )
    return load_tokenizer(name, cache_folder(config.data.cache)).num_tokens


@contextlib.contextmanager
def holding(network: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Within: the weights are of another type, as FSDP2 gathers them."""
    before = [(part, dict(part._parameters)) for part in network.modules()]
    made: dict[int, nn.Parameter] = {}  # tied weights stay tied
    for part, own in before:
        for name, p in own.items():
            if p is not None and p.dtype != dtype:
                if id(p) not in made:
                    made[id(p)] = nn.Parameter(torch.empty_like(p, dtype=dtype), p.requires_grad)
                part._parameters[name] = made[id(p)]
    try:
        yield
    finally:
        for part, own in before:
            part._parameters.update(own)


@contextlib.contextmanager
def shallow(network: Network, num_blocks: int) -> Iterator[None]:
    """Within: the network has its last blocks only."""
    blocks = network.block_modules()
    owners = (
        (part, name)
        for part in network.modules()
        for name, child in part._modules.items()
        if isinstance(child, nn.ModuleList) and list(child) == blocks
    )
    owner, name = next(owners, (None, ""))
    if owner is None:
        raise UserError("this causal LM has no list of blocks: it cannot be planned")
    whole = getattr(owner, name)
    setattr(owner, name, nn.ModuleList(blocks[-num_blocks:]))
    try:
        yield
    finally:
        setattr(owner, name, whole)


@dataclass(frozen=True)
class Parameters:
    """How many numbers the network has, and where."""

    total: int
    trained: int
    embedding: int
    blocks: int
    head: int
    """And the norm before it; 0 beyond that norm where the head is the embedding itself."""
    num_blocks: int
    largest_block: int
    tensors: int


def count(network: Network) -> Parameters:
    """By part: look-up tables (with the mask's row and the time's embedding), blocks, the rest."""
    blocks = network.block_modules()
    inside = [sum(p.numel() for p in block.parameters()) for block in blocks]
    tables = {id(m.weight) for m in network.modules() if isinstance(m, nn.Embedding)}
    first = ("mask_row", "time_embedding.")
    embedding = sum(
        p.numel()
        for name, p in network.named_parameters()
        if id(p) in tables or name.startswith(first)
    )
    total = sum(p.numel() for p in network.parameters())
    trained = sum(p.numel() for p in network.parameters() if p.requires_grad)
    return Parameters(
        total,
        trained,
        embedding,
        sum(inside),
        total - embedding - sum(inside),
        len(blocks),
        max(inside, default=0),
        len(list(network.parameters())),
    )
