"""What the planner counts: parameters, operations and bytes, against what is really there.

Closed forms, torch's own counter of operations, what autograd saves, real tensors and folders.
"""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from bellmask.config.config import override
from bellmask.config.presets import preset, tiny
from bellmask.data.prepare import load_data
from bellmask.data.tokenizers import ByteTokenizer
from bellmask.model.causal_lm import ARCHITECTURES
from bellmask.plan.plan import Cluster, Device, Plan, checkpoint_sizes, data_size, plan
from bellmask.storage.build import build_law
from bellmask.train import memory as trace
from bellmask.train.memory import USABLE, Parameters, count, plan_network
from bellmask.train.parallel import Layout
from bellmask.train.setup import Start
from bellmask.train.train_run import train_run
from bellmask.train.trainer import TrainState

BATCH = 4
SMALL = "--model.num-layers 2 --model.width 32 --model.num-heads 2 --data.block-length 32"
LLAMA = (
    '{"model_type": "llama", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, '
    '"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 259, '
    '"max_position_embeddings": 64}'
)
GPT2 = "--start.architecture gpt2-tiny"
LONG = pytest.mark.long


def options(text):
    return override(tiny(), text.split()).check()


def recomputing(config, mode):
    return replace(config, scale=replace(config.scale, recompute=mode))


def traced(config, recompute="none", batch=BATCH, **more):
    planned = plan_network(recomputing(config, recompute))
    return trace.trace_microbatch(planned, batch, "float32", **more)


def real_call(config, recompute, batch):
    """(network, arguments) of a training call with real numbers."""
    planned = plan_network(recomputing(config, recompute), is_real=True)
    return planned.network, trace.inputs(planned, batch)


# parameters


def dit_parameters(config, num_tokens):
    """The paper's DiT, counted by hand."""
    width, hidden = config.model.width, config.model.mlp_ratio * config.model.width
    has_time = config.model.modulation == "time"

    def vectors(number):
        return number * width * (128 + 1) if has_time else number * width

    block = 4 * width**2 + 2 * width * hidden + hidden + width + 2 * width + vectors(6)
    time = (256 + 1) * 128 + (128 + 1) * 128 if has_time else 0
    ends = (num_tokens + 1 + config.model.local_conv) * width
    ends += (width + 1) * num_tokens + width + vectors(2)
    return config.model.num_layers * block + time + ends


@pytest.mark.parametrize("name", ["tiny_fast", "small_aoarm", "lm1b", "owt"])
def test_parameters_of_our_trunk(name):
    config = preset(name)
    planned = plan_network(config)
    found = count(planned.network)
    assert found.total == found.embedding + found.blocks + found.head
    assert found.total == found.trained == dit_parameters(config, planned.num_tokens)


@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("gpt2", 124_439_808),
        ("smollm2", 134_515_008),
        pytest.param("gpt2-large", 774_030_080, marks=LONG),
    ],
)
def test_pretrained_models_have_their_published_sizes(name, published):
    """And the mask's row."""
    width = ARCHITECTURES[name].get("n_embd", ARCHITECTURES[name].get("hidden_size"))
    config = options(f"--start.model somewhere/{name}")
    assert count(plan_network(config).network).total == published + width


@pytest.mark.parametrize("place", ["config.json", ""])
def test_a_config_file_is_a_model_or_an_architecture(place, tmp_path):
    """With its own vocabulary, or with that of the tokenizer, in place of a preset's model too."""
    values = {"model_type": "gpt2", "n_layer": 2, "n_embd": 32, "n_head": 2, "vocab_size": 500}
    (tmp_path / "config.json").write_text(json.dumps(values), encoding="utf-8")
    given = str(tmp_path / place)
    for name in ("tiny", "cpt"):
        planned = {
            option: plan_network(override(preset(name), [f"--start.{option}", given]).check())
            for option in ("model", "architecture")
        }
        assert [p.num_tokens for p in planned.values()] == [500, 259]
        sizes = [count(p.network).total for p in planned.values()]
        assert sizes[0] - sizes[1] == (500 - 259) * 32


# operations


def by_hand(config, num_rows):
    """(forward, training) FLOPs of the DiT: 2 per multiplication and addition of a product."""
    model, length = config.model, config.data.block_length
    tokens, width = BATCH * length, model.width
    hidden, num_tokens = model.mlp_ratio * width, 259
    qkv, out, mlp = 3 * width**2, width**2, 2 * width * hidden
    scores = 2 * tokens * length * width
    early = (model.num_layers - 1) * tokens * (qkv + out + mlp)
    last = tokens * qkv + num_rows * (out + mlp)
    head = num_rows * width * num_tokens
    linear = 2 * (early + last + head)
    attention = 2 * model.num_layers * scores
    # backward: two products for each, and for attention its scores once more
    forward, training = linear + attention, 3 * linear + attention + 5 * attention // 2
    if model.modulation == "time":
        vectors = BATCH * 128 * width * (6 * model.num_layers + 2)
        embedding = BATCH * (256 * 128 + 128 * 128)
        forward += 2 * (vectors + embedding)
        # the sinusoids need no gradient
        training += 2 * (3 * vectors + 3 * embedding - BATCH * 256 * 128)
    return forward, training


@pytest.mark.parametrize("shape", ["--law.mu 0.2", "--model.modulation time"])
def test_flops_of_our_trunk_equal_the_closed_form(shape):
    config = options(f"{SMALL} {shape}")
    rows = round(build_law(config.law).mean * BATCH * config.data.block_length)
    forward = traced(config, is_training=False).flops
    assert (forward, traced(config).flops) == by_hand(config, rows)


@pytest.mark.parametrize("recompute", ["none", "block"])
def test_flops_per_token_are_those_of_the_model(recompute):
    """What is repeated to save memory is no work of the model."""
    config = recomputing(options(f"{SMALL} --law dirac --law.mu 0.5"), recompute)
    tokens = BATCH * config.data.block_length
    tokenizer = SimpleNamespace(num_tokens=259)
    start = Start(config)
    found = trace.flops_per_token(start, tokenizer, torch.float32)
    assert found == pytest.approx(by_hand(config, tokens // 2)[1] / tokens)
    done = trace.trace_microbatch(plan_network(config), BATCH, "float32").flops
    assert (done > found * tokens) == (recompute == "block")


def product(total, left, right, *_, **__):
    """FLOPs of a product added in place, for which torch's counter has no rule."""
    return 2 * left[0] * left[1] * right[1]


@pytest.mark.parametrize(
    ("shape", "recompute"),
    [
        (f"{SMALL} --model.local-conv 5", "block"),
        (f"{SMALL} --framework arm", "none"),
        ("llama", "none"),
        pytest.param(f"{SMALL} --model.modulation time", "block", marks=LONG),
        pytest.param(GPT2, "none", marks=LONG),
        pytest.param(GPT2, "block", marks=LONG),
    ],
)
def test_flops_equal_what_is_measured(shape, recompute, tmp_path):
    """Fused attention forms its scores once more in the backward pass; plain products do not."""
    if shape == "llama":
        (tmp_path / "config.json").write_text(LLAMA)
        shape = f"--data.block-length 32 --start.architecture {tmp_path}"
    config = options(shape)
    network, given = real_call(config, recompute, BATCH)
    in_place = torch.ops.aten.addmm_
    counter = FlopCounterMode(display=False, custom_mapping={in_place: product})
    with counter, sdpa_kernel(SDPBackend.MATH):
        network(**given).backward()
    layers, width = {"gpt2": (4, 96), str(tmp_path): (3, 32)}.get(
        (config.start.architecture or "").removesuffix("-tiny"),
        (config.model.num_layers, config.model.width),
    )
    again = layers * 2 * BATCH * config.data.block_length**2 * width
    assert traced(config, recompute).flops == counter.get_total_flops() + again


@pytest.mark.long
def test_frozen_weights_have_no_gradient_to_compute(tmp_path):
    pytest.importorskip("peft")
    sizes = ARCHITECTURES["gpt2-tiny"] | {"vocab_size": 259}
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    config = options(f"--start.model {tmp_path}")
    few = replace(config, start=replace(config.start, lora_rank=2))
    a, b = (count(plan_network(each).network) for each in (config, few))
    # c_attn, c_proj, c_fc, c_proj of four blocks of width 96, rank 2, and the mask's row
    lora = 4 * 2 * ((96 + 288) + (96 + 96) + (96 + 384) + (384 + 96))
    assert (b.trained, b.total) == (lora + 96, a.total + lora)
    tokens = BATCH * config.data.block_length
    linear = 2 * tokens * 12 * 96**2 * 4
    # what is saved is one product per weight; what is added three per low-rank pair, at the first
    # block less the gradient of its input
    assert traced(few).flops == traced(config).flops - linear + 3 * 2 * tokens * lora


def test_masked_share_is_the_mean_mask_rate():
    floored = "--law uniform --objective nelbo --objective.time-floor 0.5"
    for text, share in {
        "--law.mu 0.5": 0.5,
        "--law dirac --law.mu 0.3": 0.3,
        "--law uniform --schedule polynomial": 1 / 3,
        floored: 0.75,
        "--framework arm": 1,
    }.items():
        assert trace.masked_share(options(text)) == pytest.approx(share, abs=1e-6)


# memory


@pytest.mark.parametrize(
    ("shape", "recompute"),
    [
        ("", "none"),
        (GPT2, "none"),
        pytest.param("", "block", marks=LONG),
        pytest.param("--model.dropout 0.1", "none", marks=LONG),
        pytest.param("--model.modulation time", "none", marks=LONG),
    ],
)
def test_activations_are_what_autograd_saves(shape, recompute):
    """Within 5 %: the planner also counts what is merely alive then, rotation tables say."""
    config = options(shape)
    network, given = real_call(config, recompute, 8)
    held = [*network.parameters(), *network.buffers(), *given.values()]
    held = {t.untyped_storage()._cdata for t in held if t is not None}
    kept = {}

    def note(tensor):
        kept[tensor.untyped_storage()._cdata] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
        loss = network(**given)
    size = sum(t.untyped_storage().nbytes() for key, t in kept.items() if key not in held)
    loss.backward()
    assert traced(config, recompute, 8).kept == pytest.approx(size, rel=0.05)


def test_recomputation_keeps_block_inputs_or_products():
    """block: one hidden state per block. selective: also all matrix products and attention."""
    kept, flops = {}, {}
    for mode in ("none", "block", "selective"):
        # the last block sees fewer rows: the one before it is counted
        one, two = (traced(options(f"--model.num-layers {n}"), mode, 16) for n in (1, 2))
        kept[mode], flops[mode] = two.kept - one.kept, two.flops
    config = tiny()
    tokens = 16 * config.data.block_length
    state, sums = tokens * config.model.width * 4, tokens * config.model.num_heads * 4
    assert kept["block"] == pytest.approx(state, rel=0.02)
    # input, qkv (3), attention and its sums, its output, MLP in (4) and out
    assert kept["selective"] == pytest.approx(11 * state + sums, rel=0.1)
    assert kept["block"] < kept["selective"] < kept["none"]
    assert flops["selective"] == flops["none"] < flops["block"]


SOME = Parameters(1000, 1000, 100, 800, 100, 8, 100, 10)
STATE = trace.Update({}, 8000, 4000, 40)


def plan_of(layout, config=None, *, precision="float32", capacity=1e9, **known):
    """A plan of given counts; a network of one token, so that its logits are small."""
    config = config or options("--train.batch-size 64")
    network = replace(plan_network(config), num_tokens=1)
    device = Device("small", 1e12, 1e12, 1e11, capacity, 1e10, 1e9, is_gpu=False)
    # 1100 KB per row and 600 at the worst moment, 1000 and 500 of which are kept
    traces = [
        SimpleNamespace(kept=n * 10**6 + 5 * 10**5, peak=n * 11 * 10**5 + 6 * 10**5) for n in (1, 2)
    ]
    cluster = Cluster(device, 1)
    given = {"parameters": SOME, "update": STATE, "capacity": capacity, "world": cluster.world}
    given |= {"layout": layout, "precision": precision, "efficiency": 0.2}
    cost = trace.MicrobatchCost((1, 2), traces)
    given |= {"config": config, "cluster": cluster, "network": network, "cost": cost}
    return Plan(**given | known)


def bytes_of(memory):
    return {part["name"]: part["num_bytes"] for part in memory["parts"]}


def test_weights_gradients_optimizer_and_average_are_real_bytes():
    for text in ("--optimizer muon", "--optim.ema 0"):
        config = options(f"{SMALL} {text}")
        planned = plan_network(config)
        known = {"parameters": count(planned.network), "update": trace.trace_update(planned)}
        found = bytes_of(plan_of(Layout(1, 1, ""), config, **known).memory(1))
        network = plan_network(config, is_real=True).network
        sizes = dict.fromkeys(("model", "optimizer", "ema"), 0)
        for name, tensor in TrainState.begin(network, config.optim).tensors().items():
            sizes[name.split(".")[0]] += tensor.nbytes
        assert found["weights"] == found["gradients"] == sizes["model"]
        assert found["optimizer"] == sizes["optimizer"]
        assert found.get("moving average", 0) == sizes["ema"]


def test_a_checkpoint_has_the_planned_size(small_config, tmp_path):
    config = small_config(*"--model.width 64 --model.num-heads 4 --train.steps 1".split())
    train_run(config, tmp_path / "run", is_quiet=True)
    (folder,) = (tmp_path / "run" / "checkpoints").glob("step-*")
    real = sum(file.stat().st_size for file in folder.iterdir())
    planned = plan_network(config)
    found = checkpoint_sizes(config, count(planned.network), trace.trace_update(planned))
    assert found["each"] == pytest.approx(real, rel=0.02)


def test_sharding_divides_state_and_gathers_weights():
    def parts_of(layout, *, accumulates, precision="bfloat16"):
        found = plan_of(layout, precision=precision).memory(32 if accumulates else 64)
        work = ("activations", "head's logits", "other work")
        return {name: size for name, size in bytes_of(found).items() if name not in work}

    none = parts_of(Layout(4, 1, ""), accumulates=False)
    assert none == {"weights": 4000, "gradients": 4000, "optimizer": 8000, "moving average": 4000}
    full = parts_of(Layout(1, 4, ""), accumulates=False)
    assert {name: full[name] * 4 for name in none} == none
    assert full["gathered weights"] == 2 * (200 + 2 * 100)
    assert full["gradients before sharding"] == 4 * (200 + 100)
    hybrid = parts_of(Layout(2, 2, ""), accumulates=True, precision="float32")
    assert {name: hybrid[name] * 2 for name in none} == none
    assert hybrid["gathered weights"] == 4 * 400
    assert hybrid["accumulated gradients"] == 4000


def test_the_largest_microbatch_fits_and_the_next_does_not():
    alone, cut = Layout(1, 1, ""), Layout(1, 4, "")
    for capacity in (5e6, 20e6, 200e6):
        made = plan_of(alone, capacity=capacity)
        size = made.largest_microbatch()
        assert made.memory(size)["fits"]
        assert size == 64 or not made.memory(2 * size)["fits"]
    assert plan_of(alone, capacity=1000).largest_microbatch() is None
    # a single one accumulates no gradients
    enough = (5000 + 1600 + 1200 + 64 * 1_100_000 + 600_000) / USABLE
    assert plan_of(cut, capacity=enough + 1).largest_microbatch() == 64
    background = options("--train.batch-size 64 --checkpoint.saving background")
    memory = plan_of(alone, background).memory(8)
    assert (memory["total"], memory["host_bytes"]) == (20_000 + (8 * 1_100_000 + 600_000), 16_000)


def test_kept_checkpoints_follow_the_rules():
    for kept, text in {
        1: "--checkpoint.every never --checkpoint.no-keep-best",
        3: "--checkpoint.every 10minutes",
        8: "--checkpoint.every 100steps --checkpoint.keep-every 200",
        5: "--checkpoint.every 204800tokens --checkpoint.keep-steps 50 60",
    }.items():
        config = options(f"--train.steps 1000 {text}")
        assert checkpoint_sizes(config, SOME, STATE)["kept"] == kept


def test_data_sizes_where_they_are_known():
    packed = data_size(preset("lm1b"), 30_521)
    assert packed["rows"] == int(30_301_028 * 29.62 / 126)
    assert packed["num_bytes"] == packed["rows"] * (128 * 2 + 16)
    assert data_size(preset("lm1b_unpacked"), 30_521)["rows"] == 30_301_028
    assert 8.8e9 < data_size(preset("owt"), 50_258)["rows"] * 1022 < 9.04e9
    assert data_size(preset("cpt_gpt2_large"), 50_257)["rows"] == int(100e9 / 1024)
    few = override(preset("sft_tasks"), ["--sft.counts", "triviaqa=0"])
    for config, rows in {
        preset("sft_tasks"): 210_000,
        few: 210_000 - 61_888,
        preset("sft_sharegpt"): 103_000,  # one row of each conversation
        preset("sft"): None,  # a row of every turn
        override(preset("sft_sharegpt"), ["--sft.train", "sharegpt:a.json"]): None,
        tiny(): None,
    }.items():
        assert data_size(config, 50_257)["rows"] == rows


@pytest.mark.parametrize("name", ["cpt", "cpt_7b", "cpt_gpt2_large"])
def test_adapting_reads_a_good_part_of_its_corpus_once(name):
    config = preset(name)
    rows = data_size(config, 50_257)["rows"]
    assert rows / 10 < config.train.steps * config.train.batch_size < rows


def test_data_sizes_that_are_estimated(small_config, tmp_path):
    config = small_config()
    prepared = load_data(config.data, ByteTokenizer())
    real = len(prepared.train) + len(prepared.valid)
    found = data_size(config, ByteTokenizer.num_tokens)
    assert found["rows"] == pytest.approx(real, abs=1)
    assert found["source"].startswith("estimated")
    assert data_size(config, 50_258)["rows"] == pytest.approx(real / 4, abs=1)
    (tmp_path / "a.txt.gz").write_bytes(bytes(10_000))
    for name in (tmp_path / "a.txt.gz", "no/such.txt", "hub:me/set", "toy:sticky"):
        assert data_size(options(f"--data.train {name}"), 259)["rows"] is None
    sample = "--data.train hub:HuggingFaceFW/fineweb-edu:sample-10BT --data.block-length 1000"
    assert data_size(options(sample), 49_152)["rows"] == 10**7
    assert data_size(options(sample), 2048)["rows"] == pytest.approx(10**7 * 4 / 3)


@pytest.mark.parametrize(
    ("data", "steps", "told"),
    [
        ("openwebtext", 20, []),
        ("openwebtext", 26_000_000, ["1.4 times"]),
        ("hub:HuggingFaceFW/fineweb-edu:sample-10BT", 26_000_000, ["about 1.3 times"]),
    ],
)
def test_a_run_that_repeats_its_corpus_is_warned_of(data, steps, told):
    small = f"--model.num-layers 1 --model.width 8 --model.num-heads 1 --train.steps {steps}"
    config = options(f"--data.train {data} --data.tokenizer gpt2 --train.batch-size 8 {small}")
    notes = [n for n in plan(config, "H100").to_dict()["notes"] if n.startswith("warning")]
    assert [f"the run reads its data {text}" for text in told] == [n[9:] for n in notes]


def test_auto_takes_the_largest_microbatch_that_fits():
    """On GPUs also without being asked; a number is taken as it is, whether it fits or not."""
    state = 16 * count(plan_network(options(SMALL)).network).total + 4 * 259 * 512
    for text, size in {"": 512, "--train.microbatch-size 8": 8}.items():
        made = plan(options(f"{SMALL} --train.batch-size 512 {text}"), cluster_of(1e12, 1))
        assert (made.microbatch, made.fits) == (size, True)
    made = plan(options(f"{SMALL} --train.batch-size 512"), cluster_of(8 * state, 1))
    assert made.fits
    assert not made.memory(2 * made.microbatch)["fits"]
    assert made.to_dict()["microbatches"] == 512 // made.microbatch > 1
    with_cpu = replace(made.cluster, device=replace(made.cluster.device, is_gpu=False))
    assert plan(made.config, with_cpu).microbatch == 512


def test_only_what_is_too_large_is_sharded(monkeypatch):
    config = options(SMALL)
    state = 20 * count(plan_network(config).network).total
    for memory, copies in ((1e12, 4), (state, 1)):
        assert plan(config, cluster_of(memory)).layout.copies == copies
    monkeypatch.setattr(trace, "MOST_REPLICATED", state // 20 - 1)
    assert plan(config, cluster_of(1e12)).layout.copies == 1


def cluster_of(memory, number=4):
    return Cluster(Device("small", 1e12, 1e12, 1e11, memory, 1e10, 1e9), number)


@pytest.mark.long
def test_what_does_not_fit_gets_advice_that_does():
    config = options(f"{SMALL} --scale.sharding none --train.batch-size 512")
    state = 16 * count(plan_network(config).network).total + 4 * 259 * 512
    made = plan(config, cluster_of(8 * state))
    told = made.to_dict()
    assert not told["memory"]["fits"]
    assert told["advice"] == (f"--train.microbatch-size {told['largest_microbatch']}",)
    again = plan(override(config, told["advice"][0].split()), made.cluster)
    assert again.memory(again.microbatch)["fits"]
    # not even one row fits: it is sharded
    for before, share in (("none", 0.95), ("hybrid --scale.shard-size 2", 0.5)):
        config = options(f"--scale.sharding {before} --data.block-length 16 --model.mlp-ratio 8")
        state = 16 * count(plan_network(config).network).total
        made = plan(config, cluster_of(share * state, 8))
        assert made.largest_microbatch() is None
        assert "--scale.sharding full" in made.advice()[0]
        again = plan(override(config, made.advice()[0].split()), made.cluster)
        assert again.memory(again.microbatch)["fits"]
