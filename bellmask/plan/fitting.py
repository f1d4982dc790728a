"""Whether a run fits its devices, the largest microbatch that does, and what to change else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from bellmask.config.config import RunConfig
from bellmask.plan.devices import Cluster
from bellmask.plan.memory import (
    Holding,
    Memory,
    Work,
    device_memory,
    largest_microbatch,
    logits_bytes,
)
from bellmask.plan.network import Planned, plan_network
from bellmask.plan.trace import prepare_tracing, scored_rows, trace_microbatch
from bellmask.plan.tracer import Trace
from bellmask.storage.checkpoint import saves_in_background
from bellmask.train.sharding import Layout, pick_layout
from bellmask.utils.distributed import World
from bellmask.utils.errors import UserError

TRACED_ROWS = 1024
"""Scored rows of the smaller of the two microbatches that are traced; more is on a straight line
through them (the head's chunks are full by then)."""


@dataclass(frozen=True)
class Cost:
    """A microbatch of any size, on the straight line through two traced ones."""

    sizes: tuple[int, int]
    traces: tuple[Trace, Trace]

    def line(self, read: Callable[[Trace], float]) -> tuple[float, float]:
        """(per row, constant)."""
        low, high = (read(trace) for trace in self.traces)
        slope = (high - low) / (self.sizes[1] - self.sizes[0])
        return slope, low - slope * self.sizes[0]

    def at(self, size: int, read: Callable[[Trace], float]) -> float:
        """The value at a microbatch size."""
        slope, constant = self.line(read)
        return slope * size + constant

    @property
    def work(self) -> Work:
        """Memory."""
        kept, peak = self.line(lambda trace: trace.kept), self.line(lambda trace: trace.peak)
        return Work(*kept, *peak)


def split_batch(config: RunConfig, num_devices: int) -> tuple[int, int]:
    """(rows per microbatch, microbatches) of one process."""
    batch, given = config.train.batch_size, config.train.microbatch_size
    if batch % num_devices:
        near = [num_devices * (batch // num_devices + k) for k in (0, 1)]
        good = " or ".join(str(n) for n in near if n)
        raise UserError(
            f"train.batch_size={batch} is not a multiple of {num_devices} devices; "
            f"use --train.batch-size {good}, or other devices"
        )
    share = batch // num_devices
    size = given or share
    if share % size:
        raise UserError(
            f"{batch} rows over {num_devices} devices are {share} each, which is not a multiple of "
            f"train.microbatch_size={size}"
        )
    return size, share // size


def world_of(cluster: Cluster) -> World:
    """What a process on these devices would know."""
    device = torch.device("cuda" if cluster.device.is_gpu else "cpu")
    return World(0, cluster.size, device, machine_size=cluster.machine_size)


def trace_cost(planned: Planned, microbatch: int, precision: str, layout: Layout) -> Cost:
    """Two microbatches, traced."""
    prepare_tracing(planned, planned.config.scale.recompute)
    rows = scored_rows(planned.config, 1, planned.network.first_maskable)
    small = max(1, -(-TRACED_ROWS // rows))
    sizes = (small, 2 * small) if microbatch > 2 * small else (max(1, microbatch // 2), microbatch)
    sizes = (1, 2) if sizes[0] == sizes[1] else sizes
    low, high = (
        trace_microbatch(planned, size, precision, is_sharded=layout.is_sharded) for size in sizes
    )
    return Cost(sizes, (low, high))


def fit(
    planned: Planned, holding: Holding, work: Work, cluster: Cluster, microbatch: int
) -> tuple[Memory, int | None, list[str]]:
    """(a device's memory, the largest microbatch that fits, options that make it fit)."""
    config = planned.config
    logits = _logits(planned, microbatch, holding.precision)
    capacity = cluster.device.memory
    copies = saves_in_background(config.checkpoint.saving, world_of(cluster))
    memory = device_memory(holding, work, microbatch, logits, capacity, copies=copies)
    share = config.train.batch_size // cluster.size
    largest = largest_microbatch(holding, work, logits, capacity, share)
    if memory.fits:
        return memory, largest, []
    if largest is not None:
        return memory, largest, [f"--train.microbatch-size {largest}"]
    return memory, largest, [_advice(config, cluster, holding)]


def _logits(planned: Planned, microbatch: int, precision: str) -> int:
    rows = scored_rows(planned.config, microbatch, planned.network.first_maskable)
    return logits_bytes(planned.num_tokens, rows, precision)


def _advice(config: RunConfig, cluster: Cluster, holding: Holding) -> str:
    """Options under which one row fits, tried one after another."""
    tried: list[dict[str, Any]] = []
    if config.scale.recompute != "block":
        tried.append({"recompute": "block"})
    is_full = holding.layout.is_sharded and holding.layout.copies == 1
    if cluster.size > 1 and not is_full:
        full = {"sharding": "full", "shard_size": None}
        tried += [full, {**full, "recompute": "block"}]
    share = config.train.batch_size // cluster.size
    for change in tried:
        changed = replace(config, scale=replace(config.scale, **change))
        planned = plan_network(changed)
        layout = pick_layout(changed.scale, world_of(cluster))
        work = trace_cost(planned, 1, holding.precision, layout).work
        logits = _logits(planned, share, holding.precision)
        parts = replace(holding, layout=layout)
        size = largest_microbatch(parts, work, logits, cluster.device.memory, share)
        if size is not None:
            options = [
                f"--scale.{name.replace('_', '-')} {value}"
                for name, value in change.items()
                if value != getattr(config.scale, name)
            ]
            return " ".join([*options, f"--train.microbatch-size {size}"])
    return "more devices, or ones with more memory: no option here makes it fit"
