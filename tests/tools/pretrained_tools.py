"""What the tests of pretrained backbones share: tiny causal LMs of five architectures."""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from bellmask.config.config import RunConfig
from bellmask.config.options import SftOptions, TrainOptions
from bellmask.data.blocks import Blocks, Row
from bellmask.diffusion.frameworks import Mdm
from bellmask.diffusion.objectives import Bell
from bellmask.model.pretrained import PretrainedDenoiser
from bellmask.train.planning import StepPlanner
from bellmask.train.step import TrainStep
from bellmask.utils.distributed import World
from bellmask.utils.libraries import quiet

SIZES = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
KINDS = {
    "gpt2": {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64},
    "llama": {**SIZES, "num_key_value_heads": 2},
    "qwen2": {**SIZES, "num_key_value_heads": 2},
    "qwen3": {**SIZES, "num_key_value_heads": 2, "head_dim": 8},
    "gpt_neox": SIZES,
}
WINDOWS = {
    "qwen2": {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
    "mistral": {**SIZES, "num_key_value_heads": 2, "sliding_window": 8},
}
V = 37
L, BATCH = 16, 8
SFT = {"sft": SftOptions(train="toy:copy")}
PAD = V - 1
"""Only pads have this id here, and only prompts and first tokens the ids from PROMPT on."""
PROMPT = V - 6
each_kind = pytest.mark.parametrize("kind", KINDS)


def make_config(kind, num_tokens=V, **more):
    """A small Hugging Face config without dropout."""
    from transformers import AutoConfig

    rates = {name: 0.0 for name in ("resid_pdrop", "embd_pdrop", "attn_pdrop") if kind == "gpt2"}
    ids = {"bos_token_id": 0, "eos_token_id": 0}
    values = {"vocab_size": num_tokens, **ids, **rates, **KINDS.get(kind, {}), **more}
    return AutoConfig.for_model(kind, **values)


def make_lm(config, *, attention="sdpa", seed=0):
    """A causal LM with weights large enough that every token and every edge matters."""
    from transformers import AutoModelForCausalLM

    with quiet():
        model = AutoModelForCausalLM.from_config(
            copy.deepcopy(config), attn_implementation=attention, dtype=torch.float32
        )
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=draw)
            center = 1.0 if "norm" in name.lower() or ".ln_" in name else 0.0
            center = 0.0 if name.endswith("bias") else center
            parameter.copy_(center + 0.3 * noise)
    return model.eval()


def make_denoiser(kind, *, is_causal=False, **more):
    model = PretrainedDenoiser(make_lm(make_config(kind, **more)), V, is_causal=is_causal)
    torch.manual_seed(1)
    torch.nn.init.normal_(model.mask_row)
    return model.eval()


def eager_states(model, x_BL, is_seen):
    """Final states by the plain softmax of transformers' eager attention with an added mask.

    The rows are looked up by hand: the mask's is the last.
    """
    inner = model.language_model
    twin = make_lm(inner.config, attention="eager")
    twin.load_state_dict(inner.state_dict())
    rows = torch.cat([inner.get_input_embeddings().weight, model.mask_row[None]])
    added = torch.zeros(is_seen.shape).masked_fill(~is_seen, -1e30)
    given = {"inputs_embeds": rows[x_BL], "attention_mask": added}
    return twin.base_model(**given, use_cache=False).last_hidden_state


def token_rows(count, length, seed=3):
    return torch.randint(0, V, (count, length), generator=torch.Generator().manual_seed(seed))


def learn_bpe(text, size, names):
    """Byte-level BPE learned from a text, special tokens first."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=names, initial_alphabet=alphabet, show_progress=False
    )
    inner.train_from_iterator([text], trainer)
    return inner


def make_tokenizer(text, size=300, **specials):
    """The same as a Hugging Face tokenizer without a pad."""
    from transformers import PreTrainedTokenizerFast

    inner = learn_bpe(text, size, ["<|end|>", *specials.values()])
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|end|>", **specials)


def save_lm(folder, kind, text, seed=0, **specials):
    """A small causal LM and its tokenizer, as ``from_pretrained`` reads them."""
    tokenizer = make_tokenizer(text, **specials)
    with quiet():
        make_lm(make_config(kind, len(tokenizer)), seed=seed).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    return folder


def examples(count=24, *, is_sft=True):
    """Prompt (ids PROMPT ..), response (ids below), pads (PAD)."""
    draw, rows = np.random.default_rng(3), []
    for n in range(count):
        start = int(draw.integers(1, 6)) if is_sft else 1
        length = int(draw.integers(start + 1, L + 1)) if is_sft else L
        ids = np.full(L, PAD)
        ids[:start] = draw.integers(PROMPT, PAD, start)
        ids[start:length] = draw.integers(0, PROMPT, length - start)
        rows.append(Row(ids, length, n, start))
    return Blocks.from_rows(rows)


def make_planner(sections, objective=None, *, world=None, microbatch=None, blocks=None, **options):
    settings = TrainOptions(batch_size=BATCH, microbatch_size=microbatch, seed=5)
    settings = replace(settings, **options)
    world, objective = world or World(), objective or Bell()
    config = RunConfig(train=settings, **sections)
    return StepPlanner(blocks or examples(), objective, config, world)


def make_step(model, planner):
    return TrainStep(model, planner, Mdm(), mask_id=V)


class Recorder(nn.Module):
    """Notes what is asked of it."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def forward(self, x, rows, targets, **_):
        self.calls.append((x, rows, targets))
        return torch.zeros((), requires_grad=True)
