"""Real microbatches of the run on this machine's device, timed."""

from __future__ import annotations

import os
import re
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from bellmask.config.config import RunConfig
from bellmask.model.head import pick_loss_kernel, using_loss_kernel
from bellmask.plan.devices import DEVICES, Cluster, Device
from bellmask.plan.network import real_network
from bellmask.plan.trace import inputs, scored_rows
from bellmask.storage.build import build_objective
from bellmask.train.optim import Ema, Optimizer
from bellmask.train.recompute import recompute_blocks
from bellmask.utils.console import progress_bar
from bellmask.utils.distributed import (
    autocast,
    check_compiler,
    has_native_bfloat16,
    pick_device,
    pick_precision,
)
from bellmask.utils.errors import UserError

ROUNDS = 4
"""Timed microbatches, after one that warms up; the median counts."""
MOST_TOKENS = {"cpu": 4096, "cuda": 65_536}
"""A microbatch is cut to about this many tokens to be measured."""
MATMUL = {"cpu": 1024, "cuda": 8192}
"""Size of the square product that tells the device's own speed."""


@dataclass(frozen=True)
class Measured:
    """What the device does."""

    device: str
    microbatch: int
    """Rows of the measured microbatches."""
    row_seconds: float
    """Forward and backward, per row."""
    update_seconds: float
    """Optimizer and average."""
    matmul_flops: float
    """FLOP/s of a large matrix product, alone."""


def local_device(option: str = "auto") -> Device:
    """The data sheet of this machine's device; UserError for a GPU that is not in the table."""
    device = pick_device(option)
    if device.type == "cpu":
        cpu, size = DEVICES["CPU"], os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        short = 2 * cpu.float32 if has_native_bfloat16(device) else None  # at least twice as fast
        return replace(cpu, memory=float(size), bfloat16=short)
    name = torch.cuda.get_device_name(device)
    for known in sorted(DEVICES.values(), key=lambda d: -len(d.name)):
        pattern = rf"(?<![a-z0-9]){known.name.lower()}(?![0-9])"  # GH200 is no H200
        if re.search(pattern, name.lower().replace(" ", "-")):
            memory = float(torch.cuda.get_device_properties(device).total_memory)
            return replace(known, memory=memory)  # there are kinds with less than the sheet's
    raise UserError(f"this machine's GPU, {name}, is not in the table; give --devices")


def local_cluster(config: RunConfig, cluster: Cluster) -> Cluster:
    """The same of the device that is here, with its own memory; UserError for another one."""
    here = local_device(config.train.device)
    if here.name != cluster.device.name:
        raise UserError(
            f"--probe measures this machine's device, {here.name}, and the plan is for "
            f"{cluster.device.name}: leave --probe out, or plan for {here.name}"
        )
    return replace(cluster, device=here)


def probe(config: RunConfig, microbatch: int) -> Measured:
    """Time microbatches and updates of the run, with random weights and tokens."""
    device = pick_device(config.train.device)
    config, network, _ = real_network(config)
    network = network.to(device).train()
    recompute_blocks(network.block_modules(), config.scale.recompute)
    if config.train.compile:
        check_compiler(device)
        network.compile_blocks()
    most = max(1, MOST_TOKENS[device.type] // config.data.block_length)
    size = min(microbatch, most)
    rows = scored_rows(config, size, network.first_maskable)
    is_weighted = not build_objective(config).is_unweighted
    given = inputs(config, size, rows, is_weighted=is_weighted)
    given = {k: v if v is None else v.to(device) for k, v in given.items()}
    precision = pick_precision(config.train.precision, device)
    kernel = pick_loss_kernel(config.scale.loss, device, precision)

    def microbatches() -> None:
        with autocast(device, precision), using_loss_kernel(kernel):
            loss = network(**given)
        loss.backward()

    optimizer = Optimizer(network, config.optim)
    average = Ema(network, config.optim.ema) if config.optim.ema else None

    def update() -> None:
        trained = [p for p in network.parameters() if p.requires_grad]
        torch.nn.utils.clip_grad_norm_(trained, config.optim.clip or float("inf"))
        optimizer.step(0.0)
        if average is not None:
            average.update(1)

    with progress_bar("probing", "microbatches", 2 * (ROUNDS + 1)) as show:
        passes = _median(microbatches, device, lambda done: show(done))
        updates = _median(update, device, lambda done: show(ROUNDS + 1 + done))
    flops = _matmul_speed(device, precision)
    return Measured(str(device), size, passes / size, updates, flops)


def _median(work: Callable[[], None], device: torch.device, show: Callable[[int], None]) -> float:
    times = []
    for number in range(ROUNDS + 1):
        started = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - started)
        show(number + 1)
    return statistics.median(times[1:])


def _matmul_speed(device: torch.device, dtype: torch.dtype) -> float:
    size = MATMUL[device.type]
    a = torch.ones(size, size, device=device, dtype=dtype)
    seconds = _median(lambda: (a @ a, None)[1], device, lambda _: None)
    return 2 * size**3 / seconds
