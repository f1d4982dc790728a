"""Bytes on each device, by what they are for."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from bellmask.model.head import CHUNK_ROWS
from bellmask.plan.devices import GIB
from bellmask.plan.network import Parameters
from bellmask.plan.trace import Update
from bellmask.train.sharding import Layout

FLOAT32 = 4
USABLE = 0.92
"""Share of a device's memory that tensors may take; the rest is for the driver, communication
buffers and gaps between tensors."""
GATHERED_BLOCKS = 2
"""Blocks whose weights are whole at once under FSDP2: the one at work and the next."""


@dataclass(frozen=True)
class Part:
    """One use of a device's memory."""

    name: str
    num_bytes: int
    note: str = ""


@dataclass(frozen=True)
class Work:
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

    parts: tuple[Part, ...]
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

    def parts(self) -> list[Part]:
        """Each divided by the processes that share a copy."""
        p, share = self.parameters, self.layout.processes_per_copy
        cut = f"1/{share} of" if share > 1 else "all of"
        found = [
            Part("weights", -(-FLOAT32 * p.total // share), f"{cut} {p.total:,}, float32"),
            Part("gradients", -(-FLOAT32 * p.trained // share), f"{cut} {p.trained:,}, float32"),
            Part("optimizer", -(-self.update.optimizer_bytes // share), f"{cut} its state"),
        ]
        if self.update.average_bytes:
            found.append(
                Part("moving average", -(-self.update.average_bytes // share), cut + " it")
            )
        return found + (self._gathered() if self.layout.is_sharded else [])

    def _gathered(self) -> list[Part]:
        """FSDP2: weights that are whole for a while, and gradients before they are cut."""
        p = self.parameters
        size = 2 if self.precision == "bfloat16" else FLOAT32
        root = p.total - p.blocks
        whole = root + min(GATHERED_BLOCKS, p.num_blocks) * p.largest_block
        note = f"embedding, head and {GATHERED_BLOCKS} of {p.num_blocks} blocks, {self.precision}"
        found = [Part("gathered weights", size * whole, note)]
        reduced = 2 if size == 2 and self.reduce == "bfloat16" else FLOAT32
        if self.is_accumulating:
            note = "whole while a step has microbatches to come"
            return [*found, Part("accumulated gradients", reduced * p.trained, note)]
        uncut = round(reduced * p.trained / p.total * (root + p.largest_block))
        return [*found, Part("gradients not yet cut", uncut, "embedding, head and one block")]


def device_memory(
    holding: Holding, work: Work, microbatch: int, logits: int, capacity: float, *, copies: bool
) -> Memory:
    """All parts at a microbatch size."""
    kept, working = work.kept(microbatch), work.working(microbatch)
    parts = [
        *holding.parts(),
        Part("activations", kept, f"of {microbatch} rows, kept for the backward pass"),
        Part("head's logits", logits, f"{CHUNK_ROWS} rows at a time"),
        Part("other work", max(0, working - logits), "at the worst moment of a microbatch"),
    ]
    state = sum(part.num_bytes for part in parts if part.name in _SAVED)
    return Memory(tuple(parts), capacity, state if copies else 0)


_SAVED = ("weights", "optimizer", "moving average")


def largest_microbatch(
    holding: Holding, work: Work, logits: int, capacity: float, share: int
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
