"""Bytes of a run: on each device by what they are for, on disk, and whether they fit."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from bellmask.config.config import RunConfig
from bellmask.config.options import Interval
from bellmask.data.corpora import find_policy
from bellmask.model.head import CHUNK_ROWS
from bellmask.plan.devices import GIB, Cluster
from bellmask.plan.network import Parameters, Planned, plan_network
from bellmask.plan.tracer import (
    OpTrace,
    Update,
    prepare_tracing,
    scored_rows,
    trace_microbatch,
)
from bellmask.storage.checkpoint import saves_in_background
from bellmask.train.parallel import Layout, pick_layout
from bellmask.utils.distributed import World
from bellmask.utils.errors import UserError

# Bytes on each device

FLOAT32 = 4
USABLE = 0.92
"""Share of a device's memory that tensors may take; the rest is for the driver, communication
buffers and gaps between tensors."""
GATHERED_BLOCKS = 2
"""Blocks whose weights are whole at once under FSDP2: the one at work and the next."""
_SAVED = ("weights", "optimizer", "moving average")
"""Parts that are in a checkpoint."""


@dataclass(frozen=True)
class MemoryPart:
    """One use of a device's memory."""

    name: str
    num_bytes: int
    note: str = ""


@dataclass(frozen=True)
class MicrobatchMemory:
    """What a microbatch needs besides weights, affine in its size."""

    kept_per_block: float
    """Activations of one row, bytes."""
    kept_always: float
    """What is kept whatever the size: copies of weights in the type of the products, mostly."""
    peak_per_block: float
    peak_always: float

    def kept(self, microbatch: int) -> int:
        """Activations and copies between the two passes."""
        return round(self.kept_per_block * microbatch + self.kept_always)

    def working(self, microbatch: int) -> int:
        """What comes on top of that at the worst moment."""
        peak = self.peak_per_block * microbatch + self.peak_always
        return max(0, round(peak) - self.kept(microbatch))


@dataclass(frozen=True)
class Memory:
    """A device's memory in use, and what it has."""

    parts: tuple[MemoryPart, ...]
    capacity: float
    host_bytes: int
    """Copy in the machine's own memory while a checkpoint is written beside training."""

    @property
    def total(self) -> int:
        """All parts."""
        return sum(part.num_bytes for part in self.parts)

    @property
    def fits(self) -> bool:
        """True when tensors leave room for the rest."""
        return self.total <= USABLE * self.capacity


def logits_bytes(num_tokens: int, num_rows: int, precision: str) -> int:
    """One chunk of the head's logits: as multiplied, and in float32."""
    product = 2 if precision == "bfloat16" else 0
    return min(CHUNK_ROWS, num_rows) * num_tokens * (FLOAT32 + product)


@dataclass(frozen=True)
class Holding:
    """What is held whatever the microbatch: weights, gradients, state."""

    parameters: Parameters
    update: Update
    layout: Layout
    precision: str
    reduce: str
    """Type in which sharded gradients are added up."""
    is_accumulating: bool
    """More than one microbatch per step."""

    def parts(self) -> list[MemoryPart]:
        """Each divided by the processes that share a copy."""
        p, share = self.parameters, self.layout.processes_per_copy
        cut = f"1/{share} of" if share > 1 else "all of"
        found = [
            MemoryPart("weights", -(-FLOAT32 * p.total // share), f"{cut} {p.total:,}, float32"),
            MemoryPart(
                "gradients", -(-FLOAT32 * p.trained // share), f"{cut} {p.trained:,}, float32"
            ),
            MemoryPart("optimizer", -(-self.update.optimizer_bytes // share), f"{cut} its state"),
        ]
        if self.update.average_bytes:
            found.append(
                MemoryPart("moving average", -(-self.update.average_bytes // share), cut + " it")
            )
        return found + (self._gathered() if self.layout.is_sharded else [])

    def _gathered(self) -> list[MemoryPart]:
        """FSDP2: weights that are whole for a while, and gradients before they are cut."""
        p = self.parameters
        size = 2 if self.precision == "bfloat16" else FLOAT32
        root = p.total - p.blocks
        whole = root + min(GATHERED_BLOCKS, p.num_blocks) * p.largest_block
        note = f"embedding, head and {GATHERED_BLOCKS} of {p.num_blocks} blocks, {self.precision}"
        found = [MemoryPart("gathered weights", size * whole, note)]
        reduced = 2 if size == 2 and self.reduce == "bfloat16" else FLOAT32
        if self.is_accumulating:
            note = "whole while a step has microbatches to come"
            return [*found, MemoryPart("accumulated gradients", reduced * p.trained, note)]
        uncut = round(reduced * p.trained / p.total * (root + p.largest_block))
        return [*found, MemoryPart("gradients not yet cut", uncut, "embedding, head and one block")]


def device_memory(
    holding: Holding,
    work: MicrobatchMemory,
    microbatch: int,
    logits: int,
    capacity: float,
    *,
    copies: bool,
) -> Memory:
    """All parts at a microbatch size."""
    kept, working = work.kept(microbatch), work.working(microbatch)
    parts = [
        *holding.parts(),
        MemoryPart("activations", kept, f"of {microbatch} rows, kept for the backward pass"),
        MemoryPart("head's logits", logits, f"{CHUNK_ROWS} rows at a time"),
        MemoryPart("other work", max(0, working - logits), "at the worst moment of a microbatch"),
    ]
    state = sum(part.num_bytes for part in parts if part.name in _SAVED)
    return Memory(tuple(parts), capacity, state if copies else 0)


def largest_microbatch(
    holding: Holding, work: MicrobatchMemory, logits: int, capacity: float, share: int
) -> int | None:
    """The largest divisor of a process's share of the batch that fits; None: not even one row."""
    low = [d for d in range(1, math.isqrt(share) + 1) if share % d == 0]
    for size in sorted({*low, *(share // d for d in low)}, reverse=True):
        whole = replace(holding, is_accumulating=size < share)
        if device_memory(whole, work, size, logits, capacity, copies=False).fits:
            return size
    return None


def show_bytes(count: float) -> str:
    """``12.3 GiB``."""
    for unit, size in (("TiB", 1024 * GIB), ("GiB", GIB), ("MiB", 2**20)):
        if count >= size:
            return f"{count / size:,.1f} {unit}"
    return f"{count / 1024:,.1f} KiB"


# Bytes on disk: checkpoints by the retention rules, and prepared data where its size is known

BYTES_PER_NAME = 330
"""A tensor's name and shape in a checkpoint's headers, about."""
BYTES_PER_ROW = 16
"""Length and document number beside each prepared row."""


@dataclass(frozen=True)
class Checkpoints:
    """What a run leaves on disk."""

    each: int
    kept: int
    """Most that are there at once."""

    @property
    def total(self) -> int:
        """With the one that is being written."""
        return self.each * (self.kept + 1)


def checkpoint_sizes(
    config: RunConfig, parameters: Parameters, update: Update, tokens_per_step: int
) -> Checkpoints:
    """Weights, optimizer and average in float32, and how many of them the rules keep."""
    each = 4 * parameters.total + update.optimizer_bytes + update.average_bytes
    each += BYTES_PER_NAME * update.num_tensors
    options, steps = config.checkpoint, config.train.steps
    interval = Interval.parse(options.every)
    per_save = {"steps": interval.amount, "tokens": interval.amount / tokens_per_step}
    every = per_save.get(interval.unit, 1.0)  # by the clock: as many as the rules can keep
    made = math.ceil(steps / every) if every else 1  # the last step is always saved
    made += len(options.keep_steps)
    kept = options.keep_last + int(options.keep_best) + len(options.keep_steps)
    if options.keep_every:
        kept += steps // options.keep_every
    return Checkpoints(each, min(kept, made))


@dataclass(frozen=True)
class Known:
    """How large a corpus is."""

    documents: int
    tokens: float
    """With one EOS per document."""
    source: str


LM1B_SENTENCES = 30_301_028
LM1B_TOKENS_PER_SENTENCE = 28.62 + 1
CORPUS_SIZES: dict[tuple[str, str], Known] = {
    ("lm1b", "bert-base-uncased"): Known(
        LM1B_SENTENCES,
        LM1B_SENTENCES * LM1B_TOKENS_PER_SENTENCE,
        "published number of sentences, times 28.6 tokens and EOS (mean of 12,216 held-out ones)",
    ),
    ("openwebtext", "gpt2"): Known(
        7_913_769,
        9_040_017_095 * 7_913_769 / 8_013_769,
        "published count of GPT-2 tokens, less 100,000 documents for validation",
    ),
    ("fineweb_edu", "gpt2"): Known(9_672_101, 10e9, "the sample is made to hold 10 B GPT-2 tokens"),
}
EXAMPLE_COUNTS = {"tasks": (210_000, "App. C.1"), "sharegpt": (103_000, "App. C.1")}


@dataclass(frozen=True)
class DataSize:
    """Prepared training rows."""

    rows: int | None
    num_bytes: int | None
    source: str


def data_size(config: RunConfig, num_tokens: int) -> DataSize:
    """From the tables above; None where nothing is known before the data is prepared."""
    length = config.data.block_length
    row_bytes = length * (2 if num_tokens < 2**16 else 4) + BYTES_PER_ROW
    if config.sft.train is not None:
        name = config.sft.train.partition(":")[0]
        rows, source = EXAMPLE_COUNTS.get(name, (None, ""))
        if rows is None:
            return DataSize(None, None, f"{config.sft.train}: known after it is prepared")
        return DataSize(rows, rows * (row_bytes + 8), f"examples: {source}")
    data = config.data
    tokenizer = data.tokenizer if config.start.model is None else _family(config.start.model)
    known = CORPUS_SIZES.get((data.train, tokenizer))
    if known is None or data.mixture or data.from_files:
        return DataSize(None, None, f"{data.train} in {tokenizer}: 'bellmask data show' counts it")
    policy = find_policy(data, data.train)
    rows = known.documents
    if data.packing == "packed":
        rows = int(known.tokens / (length - (2 if policy.wrap else 0)))
    return DataSize(rows, rows * row_bytes, known.source)


def _family(model: str) -> str:
    """Whose tokenizer a causal LM has, where its name says so."""
    return "gpt2" if model.rsplit("/", 1)[-1].startswith("gpt2") else model


# Whether a run fits its devices, the largest microbatch that does, and what to change otherwise

TRACED_ROWS = 1024
"""Scored rows of the smaller of the two microbatches that are traced; more is on a straight line
through them (the head's chunks are full by then)."""


@dataclass(frozen=True)
class Cost:
    """A microbatch of any size, on the straight line through two traced ones."""

    sizes: tuple[int, int]
    traces: tuple[OpTrace, OpTrace]

    def line(self, read: Callable[[OpTrace], float]) -> tuple[float, float]:
        """(per row, constant)."""
        low, high = (read(trace) for trace in self.traces)
        slope = (high - low) / (self.sizes[1] - self.sizes[0])
        return slope, low - slope * self.sizes[0]

    def at(self, size: int, read: Callable[[OpTrace], float]) -> float:
        """The value at a microbatch size."""
        slope, constant = self.line(read)
        return slope * size + constant

    @property
    def work(self) -> MicrobatchMemory:
        """Memory."""
        kept, peak = self.line(lambda trace: trace.kept), self.line(lambda trace: trace.peak)
        return MicrobatchMemory(*kept, *peak)


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
    planned: Planned, holding: Holding, work: MicrobatchMemory, cluster: Cluster, microbatch: int
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
