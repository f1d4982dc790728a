"""Memory and storage against real tensors, saved activations and real checkpoint folders."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from bellmask.assemble import train_run
from bellmask.config import RunConfig, override
from bellmask.model.loss_kernels import using_loss_kernel
from bellmask.plan.devices import Cluster, Device
from bellmask.plan.fitting import split_batch
from bellmask.plan.memory import Holding, Work, device_memory, largest_microbatch
from bellmask.plan.network import Parameters, count, plan_network, real_network
from bellmask.plan.planner import plan
from bellmask.plan.sizes import checkpoint_sizes, data_size
from bellmask.plan.trace import (
    Update,
    inputs,
    prepare_tracing,
    scored_rows,
    trace_microbatch,
    trace_update,
)
from bellmask.presets import preset, tiny
from bellmask.train.optim import Ema, Optimizer
from bellmask.train.recompute import recompute_blocks
from bellmask.train.sharding import Layout
from bellmask.train.trainer import TrainState


def options(text: str, start: RunConfig | None = None) -> RunConfig:
    return override(start or tiny(), text.split()).check()


def saved_bytes(config: RunConfig, batch: int, recompute: str) -> int:
    """What autograd itself keeps between the passes: every storage once, weights aside."""
    config, network, _ = real_network(config)
    network.train()
    recompute_blocks(network.block_modules(), recompute)
    given = inputs(
        config, batch, scored_rows(config, batch, network.first_maskable), is_weighted=False
    )
    held = {t.untyped_storage()._cdata for t in [*network.parameters(), *network.buffers()]}
    held |= {t.untyped_storage()._cdata for t in given.values() if t is not None}
    kept: dict[int, torch.Tensor] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage()._cdata] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t), using_loss_kernel("chunked"):
        loss = network(**given)
    size = sum(t.untyped_storage().nbytes() for key, t in kept.items() if key not in held)
    loss.backward()
    return size


@pytest.mark.parametrize(
    ("shape", "recompute"),
    [
        ("", "none"),
        ("--model.dropout 0.1", "none"),
        ("--model.modulation time", "none"),
        ("--start.architecture gpt2-tiny", "none"),
        ("", "block"),
    ],
)
def test_activations_are_what_autograd_saves(shape: str, recompute: str) -> None:
    """Within 5 %: the planner also counts what is merely alive then, rotation tables say."""
    config = options(shape)
    planned = plan_network(config)
    prepare_tracing(planned, recompute)
    found = trace_microbatch(planned, 8, "float32").kept
    assert found == pytest.approx(saved_bytes(config, 8, recompute), rel=0.05)


def test_recomputation_keeps_block_inputs_or_products() -> None:
    """block: one hidden state per block. selective: also all matrix products and attention."""
    config = options("--model.num-layers 2")
    batch, length, width = 16, config.data.block_length, config.model.width
    kept = {}
    for mode in ("none", "block", "selective"):
        slopes = []
        for depth in (1, 2):  # the last block sees fewer rows: the one before it is counted
            planned = plan_network(options(f"--model.num-layers {depth}"))
            prepare_tracing(planned, mode)
            slopes.append(trace_microbatch(planned, batch, "float32").kept)
        kept[mode] = slopes[1] - slopes[0]
    state = batch * length * width * 4
    assert kept["block"] == pytest.approx(state, rel=0.02)
    # input, qkv (3), attention and its sums, its output, MLP in (4) and out
    sums = batch * length * config.model.num_heads * 4
    assert kept["selective"] == pytest.approx(11 * state + sums, rel=0.1)
    assert kept["block"] < kept["selective"] < kept["none"]


def test_weights_gradients_optimizer_and_average_are_real_bytes() -> None:
    for text in ("", "--optimizer muon", "--optim.ema 0"):
        config = options(text)
        planned = plan_network(config)
        update = trace_update(planned)
        holding = Holding(
            count(planned.network), update, Layout(1, 1, ""), "float32", "float32", False
        )
        found = {part.name: part.num_bytes for part in holding.parts()}
        _, network, _ = real_network(config)
        average = Ema(network, config.optim.ema) if config.optim.ema else None
        state = TrainState(network, Optimizer(network, config.optim), average)
        sizes = dict.fromkeys(("model", "optimizer", "ema"), 0)
        for name, tensor in state.tensors().items():
            sizes[name.split(".")[0]] += tensor.nbytes
        assert found["weights"] == found["gradients"] == sizes["model"]
        assert found["optimizer"] == sizes["optimizer"]
        assert found.get("moving average", 0) == sizes["ema"]


def test_a_checkpoint_has_the_planned_size(
    small_config: Callable[..., RunConfig], tmp_path: Path
) -> None:
    config = small_config(
        *"--model.num-layers 3 --model.width 64 --model.num-heads 4 --train.steps 2".split()
    )
    train_run(config, tmp_path / "run", is_quiet=True)
    (folder,) = (tmp_path / "run" / "checkpoints").glob("step-*")
    real = sum(file.stat().st_size for file in folder.iterdir())
    planned = plan_network(config)
    found = checkpoint_sizes(config, count(planned.network), trace_update(planned), 1024)
    assert found.each == pytest.approx(real, rel=0.02)


SOME = Parameters(1000, 1000, 100, 800, 100, 8, 100, 10)
STATE = Update({}, 8000, 4000, 40)  # type: ignore[arg-type]


def parts_of(layout: Layout, *, accumulates: bool, precision: str = "bfloat16") -> dict[str, int]:
    holding = Holding(SOME, STATE, layout, precision, "float32", accumulates)
    return {part.name: part.num_bytes for part in holding.parts()}


def test_sharding_divides_state_and_gathers_weights() -> None:
    none = parts_of(Layout(4, 1, ""), accumulates=False)
    assert none == {"weights": 4000, "gradients": 4000, "optimizer": 8000, "moving average": 4000}
    full = parts_of(Layout(1, 4, ""), accumulates=False)
    assert {name: full[name] * 4 for name in none} == none
    assert full["gathered weights"] == 2 * (200 + 2 * 100)
    assert full["gradients not yet cut"] == 4 * (200 + 100)
    hybrid = parts_of(Layout(2, 2, ""), accumulates=True, precision="float32")
    assert {name: hybrid[name] * 2 for name in none} == none
    assert hybrid["gathered weights"] == 4 * 400
    assert hybrid["accumulated gradients"] == 4000


def test_the_largest_microbatch_fits_and_the_next_does_not() -> None:
    holding = Holding(SOME, STATE, Layout(1, 1, ""), "float32", "float32", False)
    work = Work(1000, 500, 1100, 600)
    for capacity in (25_000, 40_000, 200_000):
        size = largest_microbatch(holding, work, 50, capacity, 64)
        assert size is not None
        assert device_memory(holding, work, size, 50, capacity, copies=False).fits
        if size < 64:
            assert not device_memory(holding, work, 2 * size, 50, capacity, copies=False).fits
    assert largest_microbatch(holding, work, 50, 1000, 64) is None
    memory = device_memory(holding, work, 8, 50, 1e9, copies=True)
    assert memory.total == 20_000 + (8 * 1100 + 600)
    assert memory.host_bytes == 16_000


def test_kept_checkpoints_follow_the_rules() -> None:
    def kept(text: str) -> int:
        config = options(f"--train.steps 1000 {text}")
        return checkpoint_sizes(config, SOME, STATE, 2048).kept

    assert kept("--checkpoint.every never --checkpoint.no-keep-best") == 1
    assert kept("--checkpoint.every 100steps") == 3
    assert kept("--checkpoint.every 10minutes") == 3
    assert kept("--checkpoint.every 100steps --checkpoint.keep-every 200") == 8
    assert kept("--checkpoint.every 204800tokens --checkpoint.keep-steps 50 60") == 5


def test_data_sizes_where_they_are_known() -> None:
    packed = data_size(preset("lm1b"), 30_521)
    assert packed.rows == int(30_301_028 * 29.62 / 126)
    assert packed.num_bytes == packed.rows * (128 * 2 + 16)
    assert data_size(preset("lm1b_unpacked"), 30_521).rows == 30_301_028
    owt = data_size(preset("owt"), 50_258)
    assert owt.rows is not None
    assert 8.8e9 < owt.rows * 1022 < 9.04e9
    assert data_size(preset("sft_tasks"), 50_257).rows == 210_000
    unknown = data_size(tiny(), 259)
    assert unknown.rows is None
    assert "data show" in unknown.source


def cluster_of(memory: float, number: int = 4) -> Cluster:
    small = Device("small", 1e12, 1e12, 1e11, memory, 1e10, 1e9)
    return Cluster(small, number)


def test_what_does_not_fit_gets_advice_that_does() -> None:
    config = options("--scale.sharding none --train.batch-size 128")
    state = 16 * count(plan_network(config).network).total + 4 * 259 * 512
    told = plan(config, cluster_of(2 * state))
    assert not told.memory.fits
    assert told.advice == (f"--train.microbatch-size {told.largest_microbatch}",)
    assert plan(override(config, told.advice[0].split()), told.cluster).memory.fits


@pytest.mark.long
@pytest.mark.parametrize("before", ["none", "hybrid --scale.shard-size 2"])
def test_what_does_not_fit_at_all_is_sharded(before: str) -> None:
    config = options(f"--scale.sharding {before} --data.block-length 16 --model.mlp-ratio 8")
    state = 16 * count(plan_network(config).network).total
    told = plan(config, cluster_of((0.95 if before == "none" else 0.5) * state, 8))
    assert told.largest_microbatch is None
    assert "--scale.sharding full" in told.advice[0]
    assert plan(override(config, told.advice[0].split()), told.cluster).memory.fits


def test_batches_that_cannot_be_divided() -> None:
    config = options("--train.batch-size 32 --train.microbatch-size 8")
    assert split_batch(config, 2) == (8, 2)
    with pytest.raises(ValueError, match="not a multiple of 3 devices"):
        split_batch(config, 3)
    with pytest.raises(ValueError, match="microbatch_size=8"):
        split_batch(config, 8)
    assert split_batch(options("--train.batch-size 32"), 4) == (8, 1)
