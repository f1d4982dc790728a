"""Parameters and floating-point operations against closed forms and against torch's counter."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from bellmask.build import build_law, build_model
from bellmask.config import RunConfig, override
from bellmask.model.loss_kernels import using_loss_kernel
from bellmask.model.transformer import count_parameters
from bellmask.plan.network import KNOWN_MODELS, count, plan_network, real_network
from bellmask.plan.trace import (
    inputs,
    masked_share,
    prepare_tracing,
    scored_rows,
    trace_call,
    trace_microbatch,
)
from bellmask.presets import PRESETS, preset, tiny
from bellmask.train.recompute import recompute_blocks

BATCH = 4
LLAMA = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "vocab_size": 259,
}


def options(text: str, start: RunConfig | None = None) -> RunConfig:
    return override(start or tiny(), text.split()).check()


def llama(folder: Path) -> RunConfig:
    (folder / "config.json").write_text(json.dumps(LLAMA))
    return options(f"--start.architecture {folder}")


SHAPES = {
    "mdm": "",
    "deep": "--model.num-layers 4",
    "nelbo": "--law uniform --objective nelbo",
    "early times": "--law.mu 0.2",
    "time input": "--model.modulation time",
    "gpt2": "--start.architecture gpt2-tiny",
}


def dit_parameters(config: RunConfig, num_tokens: int) -> int:
    """The paper's DiT, counted by hand."""
    width, hidden = config.model.width, config.model.mlp_ratio * config.model.width
    has_time = config.model.modulation == "time"

    def vectors(number: int) -> int:
        return number * width * (128 + 1) if has_time else number * width

    block = 4 * width**2 + 2 * width * hidden + hidden + width + 2 * width + vectors(6)
    time = (256 + 1) * 128 + (128 + 1) * 128 if has_time else 0
    ends = (num_tokens + 1) * width + (width + 1) * num_tokens + width + vectors(2)
    return config.model.num_layers * block + time + ends


SAME_NETWORK = ("_base", "_bell", "unpacked", "sigma", "_arm")


@pytest.mark.parametrize("name", [n for n in PRESETS if not any(s in n for s in SAME_NETWORK)])
def test_parameters_of_every_preset(name: str) -> None:
    config = preset(name)
    planned = plan_network(config)
    found = count(planned.network)
    assert found.total == found.embedding + found.blocks + found.head
    assert found.total == found.trained
    if config.start.model is None and config.start.architecture is None:
        assert found.total == dit_parameters(config, planned.num_tokens)
        with torch.device("meta"):
            built = build_model(config, planned.num_tokens)
        assert found.total == count_parameters(built)


def test_gpt2_sizes_are_the_published_ones() -> None:
    published = {"gpt2": 124_439_808, "gpt2-medium": 354_823_168, "gpt2-large": 774_030_080}
    for name, number in published.items():
        config = preset("cpt_gpt2_large")
        config = replace(config, start=replace(config.start, model=f"openai-community/{name}"))
        width = KNOWN_MODELS[name]["n_embd"]
        assert count(plan_network(config).network).total == number + width, "and the mask's row"


def test_smollm2_has_its_published_size() -> None:
    config = replace(tiny(), start=replace(tiny().start, model="smollm2"))
    assert count(plan_network(config).network).total == 134_515_008 + 576


def by_hand(config: RunConfig, num_rows: int) -> tuple[int, int]:
    """(forward, training) FLOPs of the DiT: 2 per multiplication and addition of a product."""
    model, length = config.model, config.data.block_length
    tokens, width = BATCH * length, model.width
    hidden, num_tokens = model.mlp_ratio * width, 259
    qkv, out, mlp = 3 * width**2, width**2, 2 * width * hidden
    scores = 2 * tokens * length * width
    early = (model.num_layers - 1) * tokens * (qkv + out + mlp)
    last = tokens * qkv + num_rows * (out + mlp)
    head = num_rows * width * num_tokens
    forward = 2 * (early + last + head + model.num_layers * scores)
    linear = 2 * (early + last + head)
    attention = 2 * model.num_layers * scores
    # backward: two products for each, and for attention its scores once more
    training = 3 * linear + attention + 5 * attention // 2
    if model.modulation == "time":
        vectors = BATCH * 128 * width * (6 * model.num_layers + 2)
        embedding = BATCH * (256 * 128 + 128 * 128)
        forward += 2 * (vectors + embedding)
        # the sinusoids need no gradient
        training += 2 * (3 * vectors + 3 * embedding - BATCH * 256 * 128)
    return forward, training


@pytest.mark.parametrize("shape", ["deep", "nelbo", "early times", "time input"])
def test_flops_of_our_trunk_equal_the_closed_form(shape: str) -> None:
    config = options(SHAPES[shape])
    planned = plan_network(config)
    prepare_tracing(planned, "none")
    share = build_law(config.law).mean + (0.0005 if shape == "nelbo" else 0)  # its smallest rate
    rows = round(share * BATCH * config.data.block_length)
    forward = trace_microbatch(planned, BATCH, "float32", is_training=False).flops
    training = trace_microbatch(planned, BATCH, "float32").flops
    assert (forward, training) == by_hand(config, rows)


def product(total: Any, left: Any, right: Any, *_: Any, **__: Any) -> int:
    """FLOPs of a product added in place, for which torch's counter has no rule."""
    return 2 * left[0] * left[1] * right[1]


def real_flops(config: RunConfig, recompute: str) -> int:
    """FLOPs that torch's counter sees on a real microbatch, with attention as plain products."""
    config, network, _ = real_network(config)
    network.train()
    recompute_blocks(network.block_modules(), recompute)
    rows = scored_rows(config, BATCH, network.first_maskable)
    given = inputs(config, BATCH, rows, is_weighted=False)
    in_place: Any = torch.ops.aten.addmm_
    counter = FlopCounterMode(display=False, custom_mapping={in_place: product})
    with counter, sdpa_kernel(SDPBackend.MATH), using_loss_kernel("chunked"):
        network(**given).backward()
    return counter.get_total_flops()


@pytest.mark.parametrize(
    ("shape", "recompute"),
    [
        ("mdm", "none"),
        ("mdm", "block"),
        pytest.param("time input", "block", marks=pytest.mark.long),
        ("gpt2", "none"),
        pytest.param("gpt2", "block", marks=pytest.mark.long),
        ("llama", "none"),
        ("arm", "none"),
    ],
)
def test_flops_equal_what_is_measured(shape: str, recompute: str, tmp_path: Path) -> None:
    """Fused attention forms its scores once more in the backward pass; plain products do not."""
    if shape == "llama":
        config = llama(tmp_path)
    elif shape == "arm":
        config = preset("tiny_arm")
    else:
        config = options(SHAPES[shape])
    planned = plan_network(config)
    prepare_tracing(planned, recompute)
    found = trace_microbatch(planned, BATCH, "float32").flops
    measured = real_flops(config, recompute)
    sizes = {"gpt2": (4, 96), "llama": (5, 32)}
    layers, width = sizes.get(shape, (config.model.num_layers, config.model.width))
    length = config.data.block_length
    again = layers * 2 * BATCH * length * length * width
    assert found == measured + again


def test_selective_recomputation_repeats_no_product() -> None:
    found = {}
    for mode in ("none", "selective", "block"):
        planned = plan_network(options("--model.num-layers 2"))
        prepare_tracing(planned, mode)
        found[mode] = trace_microbatch(planned, BATCH, "float32").flops
    assert found["selective"] == found["none"] < found["block"]


def test_frozen_weights_have_no_gradient_to_compute() -> None:
    pytest.importorskip("peft")
    config = options(SHAPES["gpt2"])
    whole = plan_network(config)
    few = plan_network(replace(config, start=replace(config.start, lora_rank=2)))
    a, b = count(whole.network), count(few.network)
    # c_attn, c_proj, c_fc, c_proj of four blocks of width 96, rank 2, and the mask's row
    lora = 4 * 2 * ((96 + 288) + (96 + 96) + (96 + 384) + (384 + 96))
    assert b.trained == lora + 96
    assert b.total == a.total + lora
    for planned in (whole, few):
        prepare_tracing(planned, "none")
    full, saved = (trace_microbatch(p, BATCH, "float32").flops for p in (whole, few))
    tokens = BATCH * config.data.block_length
    linear = 2 * tokens * 12 * 96**2 * 4
    # what is saved is one product per weight; what is added three per low-rank pair, at the first
    # block less the gradient of its input
    assert saved == full - linear + 3 * 2 * tokens * lora


def test_deep_networks_are_traced_by_a_few_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    planned = plan_network(options("--model.num-layers 5"))
    prepare_tracing(planned, "none")
    quick = trace_microbatch(planned, BATCH, "bfloat16")
    monkeypatch.setattr("bellmask.plan.trace.TRACED_BLOCKS", 5)
    assert trace_microbatch(planned, BATCH, "bfloat16") == quick


def test_masked_share_is_the_mean_mask_rate() -> None:
    assert masked_share(options("--law.mu 0.5")) == pytest.approx(0.5, abs=1e-6)
    assert masked_share(options("--law dirac --law.mu 0.3")) == pytest.approx(0.3, abs=1e-9)
    assert masked_share(options("--law uniform --schedule polynomial")) == pytest.approx(
        1 / 3, abs=1e-6
    )
    floored = options("--law uniform --objective nelbo --objective.time-floor 0.5")
    assert masked_share(floored) == pytest.approx(0.75, abs=1e-6)
    assert masked_share(preset("tiny_arm")) == 1


def test_tracing_real_tensors_gives_the_same() -> None:
    config = options("")
    planned = plan_network(config)
    prepare_tracing(planned, "none")
    shapes = trace_microbatch(planned, BATCH, "float32")
    _, network, _ = real_network(config)
    given = inputs(config, BATCH, scored_rows(config, BATCH, 0), is_weighted=False)
    with using_loss_kernel("chunked"):
        numbers = trace_call(network.train(), given, torch.float32)
    assert numbers.flops == shapes.flops
    assert numbers.kept == pytest.approx(shapes.kept, rel=0.02)
