"""``bellmask plan``: options and devices → what the run needs, of :func:`plan`.

Operations and bytes come from :mod:`bellmask.plan.tracer`. Seconds are computed from the devices'
data sheets, or from microbatches that are timed here.
"""

from __future__ import annotations

import json
import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from bellmask.config.command_line import PresetOptions, parse_run_command, resolve
from bellmask.config.config import RunConfig
from bellmask.config.options import Interval
from bellmask.data.corpora import find_policy
from bellmask.model.head import CHUNK_ROWS, pick_loss_kernel
from bellmask.model.pretrained import PretrainedDenoiser
from bellmask.plan import tracer
from bellmask.plan.devices import GIB, Cluster, Device, local_device, parse_devices
from bellmask.plan.tracer import Parameters, TracedKernel, Update
from bellmask.storage.build import build_objective
from bellmask.storage.checkpoint import saves_in_background
from bellmask.train.parallel import Layout, pick_layout
from bellmask.utils.distributed import (
    World,
    autocast,
    check_compiler,
    pick_device,
    pick_precision,
)
from bellmask.utils.errors import UserError
from bellmask.utils.files import write_text
from bellmask.utils.libraries import first_line
from bellmask.utils.progress import progress_bar
from bellmask.utils.table import Table

# Bytes on disk: checkpoints by the retention rules, and prepared data where its size is known

BYTES_PER_NAME = 330
"""A tensor's name and shape in a checkpoint's headers, about."""
BYTES_PER_ROW = 16
"""Length and document number beside each prepared row."""
CORPUS_SIZES: dict[tuple[str, str], tuple[int, float, str]] = {
    ("lm1b", "bert-base-uncased"): (
        30_301_028,
        30_301_028 * (28.62 + 1),
        "published number of sentences, times 28.6 tokens and EOS (mean of 12,216 held-out ones)",
    ),
    ("openwebtext", "gpt2"): (
        7_913_769,
        9_040_017_095 * 7_913_769 / 8_013_769,
        "published count of GPT-2 tokens, less 100,000 documents for validation",
    ),
    ("fineweb_edu", "gpt2"): (9_672_101, 10e9, "the sample is made to hold 10 B GPT-2 tokens"),
}
"""(corpus, tokenizer): documents, tokens with one EOS per document, where the numbers are from."""
EXAMPLE_COUNTS = {"tasks": 210_000, "sharegpt": 103_000}
"""App. C.1."""


@dataclass(frozen=True)
class Checkpoints:
    """What a run leaves on disk."""

    each: int
    kept: int
    """Most that are there at once."""
    total: int
    """With the one that is being written."""


def checkpoint_sizes(config: RunConfig, parameters: Parameters, update: Update) -> Checkpoints:
    """Weights, optimizer and average in float32, and how many of them the rules keep."""
    each = 4 * parameters.total + update.optimizer_bytes + update.average_bytes
    each += BYTES_PER_NAME * update.num_tensors
    options, steps = config.checkpoint, config.train.steps
    interval = Interval.parse(options.every)
    tokens_per_step = config.train.batch_size * config.data.block_length
    per_save = {"steps": interval.amount, "tokens": interval.amount / tokens_per_step}
    every = per_save.get(interval.unit, 1.0)  # by the clock: as many as the rules can keep
    made = math.ceil(steps / every) if every else 1  # the last step is always saved
    kept = options.keep_last + int(options.keep_best)
    if options.keep_every:
        kept += steps // options.keep_every
    kept = min(kept, made) + len(options.keep_steps)
    return Checkpoints(each, kept, each * (kept + 1))


@dataclass(frozen=True)
class DataSize:
    """Prepared training rows; None where nothing is known before the data is prepared."""

    rows: int | None
    num_bytes: int | None
    source: str


def data_size(config: RunConfig, num_tokens: int) -> DataSize:
    """From the tables above."""
    data, examples, model = config.data, config.sft.train, config.start.model
    row_bytes = data.block_length * (2 if num_tokens < 2**16 else 4) + BYTES_PER_ROW
    if examples is not None:
        number = EXAMPLE_COUNTS.get(examples.partition(":")[0])
        if number is None:
            return DataSize(None, None, f"{examples}: known after it is prepared")
        return DataSize(number, number * (row_bytes + 8), "examples: App. C.1")
    tokenizer = data.tokenizer if model is None else model
    if model is not None and model.rsplit("/", 1)[-1].startswith("gpt2"):
        tokenizer = "gpt2"
    known = CORPUS_SIZES.get((data.train, tokenizer))
    if known is None or data.mixture or data.from_files:
        return DataSize(None, None, f"{data.train} in {tokenizer}: 'bellmask data show' counts it")
    rows, tokens, source = known
    if data.packing == "packed":
        wrapping = 2 if find_policy(data, data.train).wrap else 0
        rows = int(tokens / (data.block_length - wrapping))
    return DataSize(rows, rows * row_bytes, source)


# Seconds of a step: kernels at a share of the data sheet's speeds, launches, communication
#
# A kernel takes as long as its matrix products or its memory traffic would, whichever is longer, at
# the peak and bandwidth of the data sheet; the sum over kernels is divided by one number, the
# efficiency. Small networks at short lengths are slow for the right reason then: their elementwise
# work moves bytes that no matrix product hides.

EFFICIENCY = 0.2
"""Share of the data sheet's speeds that a run reaches from start to end. Chosen once, for all
devices and networks, so that the paper's three runs come out (docs/scaling.md)."""
LAUNCH_SECONDS = 6e-6
"""What the host needs to start one kernel; a device cannot be faster than its launches."""
LINK_SHARE = 0.7
"""Share of a link's or network's data sheet speed that collective calls reach."""
HOP_SECONDS = {"machine": 2e-6, "network": 8e-6}
"""Latency of one hop of a ring, inside a machine and between two."""


def ideal_seconds(kernels: Counter[TracedKernel], device: Device, precision: str) -> float:
    """The kernels one after another at the data sheet's full speeds."""
    peak = device.peak(precision)
    return sum(
        number * max(kernel.flops / peak, kernel.num_bytes / device.bandwidth)
        for kernel, number in kernels.items()
    )


def device_seconds(ideal: float, num_kernels: float, device: Device, efficiency: float) -> float:
    """Work at the assumed efficiency, or the launches where those take longer."""
    launches = num_kernels * LAUNCH_SECONDS if device.is_gpu else 0.0
    return max(ideal / efficiency, launches)


def gather_seconds(num_bytes: float, group: int, cluster: Cluster, *, is_spread: bool) -> float:
    """A ring over ``group`` processes in which each ends up with ``num_bytes``.

    ``is_spread``: one process of each machine, as the copies of a hybrid layout; else machines are
    filled one after another, and all devices of a machine share the work between machines.
    """
    if group == 1:
        return 0.0
    device = cluster.device
    machines = group if is_spread else -(-group // cluster.machine_size)
    speed = device.link
    if machines > 1:
        speed = min(speed, device.network * (1 if is_spread else cluster.machine_size))
    inside = 0 if is_spread else group - machines
    hops = HOP_SECONDS["machine"] * inside + HOP_SECONDS["network"] * (machines - 1)
    return num_bytes * (group - 1) / group / (speed * LINK_SHARE) + hops


@dataclass(frozen=True)
class Communication:
    """Seconds per step of all collective calls on one process."""

    gathering: float
    """Weights, twice per microbatch (FSDP2); hidden behind the passes as far as those last."""
    reducing: float
    """Gradients over the processes of a copy; hidden likewise."""
    between_copies: float
    """Gradients over copies: hidden under FSDP2, after the backward pass otherwise."""
    is_hidden: bool

    @property
    def total(self) -> float:
        """All of it."""
        return self.gathering + self.reducing + self.between_copies


@dataclass(frozen=True)
class Timing:
    """A step, and a whole run of them."""

    passes: float
    """Forward and backward of all microbatches, seconds per step."""
    update: float
    """Clipping, optimizer, moving average."""
    communication: Communication
    steps: int
    source: str
    """Where the seconds come from."""

    @property
    def exposed(self) -> float:
        """Communication that nothing hides."""
        told = self.communication
        return max(0.0, told.total - self.passes) if told.is_hidden else told.total

    @property
    def step(self) -> float:
        """Seconds per step."""
        return self.passes + self.update + self.exposed

    @property
    def hours(self) -> float:
        """The run, without validation and saving."""
        return self.step * self.steps / 3600


# Real microbatches of the run on this machine's device, timed

ROUNDS = 4
"""Timed microbatches, after one that warms up; the median counts."""
MOST_TOKENS = {"cpu": 4096, "cuda": 65_536}
"""A microbatch is cut to about this many tokens to be measured."""
MATMUL = {"cpu": 1024, "cuda": 8192}
"""Size of the square product that tells the device's own speed."""


@dataclass(frozen=True)
class ProbeResult:
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


def probe(config: RunConfig, microbatch: int) -> ProbeResult:
    """Time microbatches and updates of the run, with random weights and tokens."""
    device = pick_device(config.train.device)
    planned = tracer.plan_network(config, is_real=True)
    config, network = planned.config, planned.network.to(device)
    if config.train.compile:
        check_compiler(device)
        network.compile_blocks()
    size = min(microbatch, max(1, MOST_TOKENS[device.type] // config.data.block_length))
    rows = tracer.scored_rows(config, size, network.first_maskable)
    is_weighted = not build_objective(config).is_unweighted
    given = tracer.inputs(config, size, rows, is_weighted=is_weighted)
    given = {k: v if v is None else v.to(device) for k, v in given.items()}
    precision = pick_precision(config.train.precision, device)
    network.loss_kernel = pick_loss_kernel(config.scale.loss, device, precision)
    square = torch.ones((MATMUL[device.type],) * 2, device=device, dtype=precision)

    def passes() -> None:
        with autocast(device, precision):
            loss = network(**given)
        loss.backward()

    def median(work: Callable[[], Any]) -> float:
        times = []
        for _ in range(ROUNDS + 1):
            started = time.perf_counter()
            work()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            times.append(time.perf_counter() - started)
        return statistics.median(times[1:])

    with progress_bar("probing", "measurements", 3) as progress:
        seconds = []
        for work in (passes, tracer.Updater(network, config.optim), lambda: square @ square):
            seconds.append(median(work))
            progress.advance()
    flops = 2 * MATMUL[device.type] ** 3 / seconds[2]
    return ProbeResult(str(device), size, seconds[0] / size, seconds[1], flops)


# The plan

USABLE = 0.92
"""Share of a device's memory that tensors may take; the rest is for the driver, communication
buffers and gaps between tensors."""
GATHERED_BLOCKS = 2
"""Blocks whose weights are whole at once under FSDP2: the one at work and the next."""


@dataclass(frozen=True)
class MemoryPart:
    """One use of a device's memory."""

    name: str
    num_bytes: int
    note: str


@dataclass(frozen=True)
class Memory:
    """A device's memory in use, and what it has."""

    parts: tuple[MemoryPart, ...]
    capacity: float
    host_bytes: int
    """Copy in the machine's own memory while a checkpoint is written beside training."""
    total: int
    fits: bool
    """True when tensors leave room for the rest."""


@dataclass(frozen=True)
class Flops:
    """Of matrix products, per token of the batch."""

    forward: float
    """Without the head's gradients."""
    training: float
    """Forward, backward and whatever is computed again."""
    masked_share: float


@dataclass(frozen=True)
class Plan:
    """A run on its devices, and everything the planner says of it."""

    config: RunConfig
    cluster: Cluster
    layout: Layout
    precision: str
    efficiency: float
    microbatch: int
    network: tracer.PlannedNetwork
    parameters: Parameters
    update: Update
    cost: tracer.MicrobatchCost
    measured: ProbeResult | None = None

    @property
    def share(self) -> int:
        """Rows of a step on one process."""
        return self.config.train.batch_size // self.cluster.size

    @property
    def microbatches(self) -> int:
        """Per step and process."""
        return self.share // self.microbatch

    @property
    def tokens_per_step(self) -> int:
        """Of all processes."""
        return self.config.train.batch_size * self.config.data.block_length

    @property
    def tokens(self) -> int:
        """Of the whole run."""
        return self.tokens_per_step * self.config.train.steps

    @property
    def epochs(self) -> float | None:
        """Passes over the training rows, where their number is known."""
        rows = self.data.rows
        return self.config.train.batch_size * self.config.train.steps / rows if rows else None

    @property
    def utilisation(self) -> float:
        """FLOP/s of matrix products over the devices' peak."""
        peak = self.cluster.device.peak(self.precision) * self.cluster.size
        return self.flops.training * self.tokens_per_step / self.timing.step / peak

    @property
    def device_hours(self) -> float:
        """Of all devices."""
        return self.timing.hours * self.cluster.size

    @property
    def notes(self) -> tuple[str, ...]:
        """What was taken for granted of the start."""
        return self.network.notes

    @property
    def checkpoints(self) -> Checkpoints:
        """On disk."""
        return checkpoint_sizes(self.config, self.parameters, self.update)

    @property
    def data(self) -> DataSize:
        """On disk."""
        return data_size(self.config, self.network.num_tokens)

    @cached_property
    def flops(self) -> Flops:
        """As traced."""
        length, size = self.config.data.block_length, self.cost.sizes[0]
        forward = tracer.trace_microbatch(
            self.network, size, self.precision, is_training=False
        ).flops
        training = self.cost.at(self.microbatch, lambda trace: trace.flops)
        share = tracer.masked_share(self.config)
        return Flops(forward / (size * length), training / (self.microbatch * length), share)

    @cached_property
    def memory(self) -> Memory:
        """Of one device."""
        return self.memory_at(self.microbatch)

    def memory_at(self, microbatch: int) -> Memory:
        """The same at another microbatch size."""
        p, held_by = self.parameters, self.layout.processes_per_copy
        cut = f"1/{held_by} of" if held_by > 1 else "all of"

        def state(name: str, num_bytes: int, note: str) -> MemoryPart:
            return MemoryPart(name, -(-num_bytes // held_by), f"{cut} {note}")

        saved = [
            state("weights", 4 * p.total, f"{p.total:,}, float32"),
            state("optimizer", self.update.optimizer_bytes, "its state"),
        ]
        if self.update.average_bytes:
            saved.append(state("moving average", self.update.average_bytes, "it"))
        gradients = state("gradients", 4 * p.trained, f"{p.trained:,}, float32")
        gathered = self._gathered(microbatch) if self.layout.is_sharded else []
        rows = tracer.scored_rows(self.config, microbatch, self.network.network.first_maskable)
        product = 2 if self.precision == "bfloat16" else 0  # and the same in float32
        logits = min(CHUNK_ROWS, rows) * self.network.num_tokens * (4 + product)
        kept = round(self.cost.at(microbatch, lambda trace: trace.kept))
        peak = round(self.cost.at(microbatch, lambda trace: trace.peak))
        other, note = max(0, peak - kept - logits), "at the worst moment of a microbatch"
        work = [
            MemoryPart("activations", kept, f"of {microbatch} rows, kept for the backward pass"),
            MemoryPart("head's logits", logits, f"{CHUNK_ROWS} rows at a time"),
            MemoryPart("other work", other, note),
        ]
        parts = (saved[0], gradients, *saved[1:], *gathered, *work)
        total, capacity = sum(part.num_bytes for part in parts), self.cluster.device.memory
        copies = saves_in_background(self.config.checkpoint.saving, world_of(self.cluster))
        host_bytes = sum(part.num_bytes for part in saved) if copies else 0
        return Memory(parts, capacity, host_bytes, total, total <= USABLE * capacity)

    def _gathered(self, microbatch: int) -> list[MemoryPart]:
        """FSDP2: weights that are whole for a while, and gradients before they are cut."""
        p = self.parameters
        root = p.total - p.blocks
        whole = root + min(GATHERED_BLOCKS, p.num_blocks) * p.largest_block
        note = f"embedding, head and {GATHERED_BLOCKS} of {p.num_blocks} blocks, {self.precision}"
        weights = MemoryPart("gathered weights", self._gathered_bytes * whole, note)
        if microbatch < self.share:
            note = "whole while a step has microbatches to come"
            size = self._reduced_bytes * p.trained
            return [weights, MemoryPart("accumulated gradients", size, note)]
        size = round(self._reduced_bytes * p.trained / p.total * (root + p.largest_block))
        note = "embedding, head and one block"
        return [weights, MemoryPart("gradients not yet cut", size, note)]

    @property
    def _gathered_bytes(self) -> int:
        """Of one weight under FSDP2."""
        return 2 if self.precision == "bfloat16" else 4

    @property
    def _reduced_bytes(self) -> int:
        """Of one gradient when gradients are added up under FSDP2."""
        return 2 if self.precision == self.config.scale.reduce == "bfloat16" else 4

    @cached_property
    def largest_microbatch(self) -> int | None:
        """The largest divisor of a process's rows that fits; None: not even one row."""
        low = [d for d in range(1, math.isqrt(self.share) + 1) if self.share % d == 0]
        sizes = sorted({*low, *(self.share // d for d in low)}, reverse=True)
        return next((size for size in sizes if self.memory_at(size).fits), None)

    @cached_property
    def advice(self) -> tuple[str, ...]:
        """What to change where it does not fit: options tried one after another."""
        if self.memory.fits:
            return ()
        if self.largest_microbatch is not None:
            return (f"--train.microbatch-size {self.largest_microbatch}",)
        scale = self.config.scale
        tried: list[dict[str, Any]] = []
        if scale.recompute != "block":
            tried.append({"recompute": "block"})
        is_full = self.layout.is_sharded and self.layout.copies == 1
        if self.cluster.size > 1 and not is_full:
            full = {"sharding": "full", "shard_size": None}
            tried += [full, {**full, "recompute": "block"}]
        for change in tried:
            config = replace(self.config, scale=replace(scale, **change))
            layout = pick_layout(config.scale, world_of(self.cluster))
            network = tracer.plan_network(config)
            cost = tracer.trace_cost(network, 1, self.precision, is_sharded=layout.is_sharded)
            changed = replace(self, config=config, layout=layout, cost=cost)
            if changed.largest_microbatch is not None:
                options = [
                    f"--scale.{name.replace('_', '-')} {value}"
                    for name, value in change.items()
                    if value != getattr(scale, name)
                ]
                size = f"--train.microbatch-size {changed.largest_microbatch}"
                return (" ".join([*options, size]),)
        return ("more devices, or ones with more memory: no option here makes it fit",)

    @cached_property
    def timing(self) -> Timing:
        """Measured, or from the data sheet."""
        device = self.cluster.device
        steps, told, communication = self.config.train.steps, self.measured, self._communication()
        if told is not None:
            passes = told.row_seconds * self.share
            return Timing(passes, told.update_seconds, communication, steps, "measured here")
        size, precision = self.microbatch, self.precision
        ideal = self.cost.at(size, lambda trace: ideal_seconds(trace.kernels, device, precision))
        number = self.cost.at(size, lambda trace: trace.kernels.total())
        passes = self.microbatches * device_seconds(ideal, number, device, self.efficiency)
        # each process updates its part; Muon's products are of whole matrices everywhere
        kernels = self.update.kernels
        products = Counter({k: n for k, n in kernels.items() if k.flops})
        ideal = ideal_seconds(kernels - products, device, device.precision)
        ideal /= self.layout.processes_per_copy
        ideal += ideal_seconds(products, device, device.precision)
        update = device_seconds(ideal, kernels.total(), device, self.efficiency)
        return Timing(passes, update, communication, steps, "data sheet")

    def _communication(self) -> Communication:
        p, layout, cluster = self.parameters, self.layout, self.cluster

        def seconds(num_bytes: float, group: int, *, is_spread: bool = False) -> float:
            return gather_seconds(num_bytes, group, cluster, is_spread=is_spread)

        if not layout.is_sharded:
            between = 2 * seconds(4 * p.trained, layout.copies)
            return Communication(0.0, 0.0, between, is_hidden=False)
        share, calls = layout.processes_per_copy, p.num_blocks + 1
        each = seconds(self._gathered_bytes * p.total / calls, share)
        # blocks are gathered for both passes, what is outside them once
        gathering = self.microbatches * each * (2 * calls - 1)
        gradients = self._reduced_bytes * p.trained
        reducing = calls * seconds(gradients / calls, share)
        # copies that fill machines meet one process of each
        is_spread = cluster.machines > 1 and share % cluster.machine_size == 0
        between = 2 * seconds(gradients / share, layout.copies, is_spread=is_spread)
        return Communication(gathering, reducing, between, is_hidden=True)

    @property
    def assumptions(self) -> tuple[str, ...]:
        """What the numbers rest on."""
        device, is_probed = self.cluster.device, self.measured is not None
        hops = [f"{1e6 * t:.0f} us per hop ({where})" for where, t in HOP_SECONDS.items()]
        when = "hidden behind the passes" if self.layout.is_sharded else "after the backward pass"
        kernels = (
            f"kernels at {self.efficiency:.0%} of the data sheet's speeds (--efficiency), at least "
            f"{1e6 * LAUNCH_SECONDS:.0f} us per kernel on a GPU; --probe measures this machine"
        )
        links = (
            f"links at {LINK_SHARE:.0%} of {device.link / 1e9:g} GB/s in a machine and "
            f"{device.network / 1e9:g} GB/s per device between machines, {', '.join(hops)}; {when}"
        )
        compiled = "compiled blocks are counted as if they were not: expect less time"
        length = "every row has block_length tokens, all of them maskable: an upper bound"
        annealed = "attention counted as open: the mask of the annealing steps is left out"
        server = "CPU is a server of about 16 cores; yours may be very different: --probe"
        holds = {
            kernels: not is_probed,
            compiled: not is_probed and self.config.train.compile,
            links: self.cluster.size > 1,
            "validation, saving and waiting for data are not in the time": True,
            length: self.config.sft.train is not None,
            annealed: self.config.start.anneal_steps > 1,
            server: not is_probed and not device.is_gpu,
        }
        return tuple(text for text, is_true in holds.items() if is_true)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        told = {name: getattr(self, name) for name in _REPORTED}
        told = {k: asdict(v) if isinstance(v, _SECTIONS) else v for k, v in told.items()}
        for name in ("step", "hours", "exposed"):
            told["timing"][name] = getattr(self.timing, name)
        options = self.config.resolved().to_dict()
        return told | {"options": options, "devices": str(self.cluster)}


_SECTIONS = (Layout, Parameters, Flops, Memory, Checkpoints, DataSize, Timing, ProbeResult)
_REPORTED = (
    "layout precision efficiency microbatch microbatches parameters flops memory "
    "largest_microbatch advice checkpoints data timing measured notes assumptions tokens_per_step "
    "tokens epochs utilisation device_hours"
).split()


def plan(
    config: RunConfig,
    devices: str | Cluster,
    *,
    nodes: int | None = None,
    efficiency: float = EFFICIENCY,
    is_probed: bool = False,
) -> Plan:
    """The plan of a run on devices; ``is_probed`` measures this machine instead of assuming."""
    if not 0 < efficiency <= 1:
        raise UserError(f"--efficiency {efficiency} must be above 0 and at most 1")
    cluster = parse_devices(devices, nodes) if isinstance(devices, str) else devices
    config = config.check()
    if is_probed:
        here = local_device(config.train.device)
        if here.name != cluster.device.name:
            raise UserError(
                f"--probe measures this machine's device, {here.name}, and the plan is for "
                f"{cluster.device.name}: leave --probe out, or plan for {here.name}"
            )
        cluster = replace(cluster, device=here)  # with its own memory
    asked = config.train.precision
    precision = cluster.device.precision if asked == "auto" else str(asked)
    cluster.device.peak(precision)  # refuses a type that it has no units for
    microbatch = split_batch(config, cluster.size)
    layout = pick_layout(config.scale, world_of(cluster))
    network = tracer.plan_network(config)
    try:
        update = tracer.trace_update(network)
        cost = tracer.trace_cost(network, microbatch, precision, is_sharded=layout.is_sharded)
    except (RuntimeError, TypeError, AttributeError) as error:
        if not isinstance(network.network, PretrainedDenoiser):
            raise
        raise UserError(f"this causal LM cannot be planned: {first_line(error)}") from None
    measured = probe(config, microbatch) if is_probed else None
    chosen = (layout, precision, efficiency, microbatch)
    counted = (network, tracer.count(network.network), update, cost)
    return Plan(config, cluster, *chosen, *counted, measured)


def split_batch(config: RunConfig, num_devices: int) -> int:
    """Rows per microbatch of one process."""
    batch, size = config.train.batch_size, config.train.microbatch_size
    unit = num_devices * (size or 1)
    if batch % unit:
        near = [unit * (batch // unit + k) for k in (0, 1)]
        good = " or ".join(str(n) for n in near if n)
        raise UserError(
            f"train.batch_size={batch} is not a multiple of {num_devices} devices"
            + (f" times train.microbatch_size={size}" if size else "")
            + f"; use --train.batch-size {good}, or other devices"
        )
    return size or batch // num_devices


def world_of(cluster: Cluster) -> World:
    """What a process on these devices would know."""
    device = torch.device("cuda" if cluster.device.is_gpu else "cpu")
    return World(0, cluster.size, device, machine_size=cluster.machine_size)


# A plan on the screen


def show_count(number: float) -> str:
    """``1.23 M``."""
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number:.3g}"


def show_seconds(seconds: float) -> str:
    """The unit that suits."""
    if seconds < 1:
        return f"{1000 * seconds:.3g} ms"
    if seconds < 600:
        return f"{seconds:.3g} s"
    if seconds < 3 * 3600:
        return f"{seconds / 60:.3g} min"
    hours = seconds / 3600
    return f"{hours:,.0f} h" if hours < 1000 else f"{hours:,.0f} h ({hours / 24:,.0f} days)"


def show_bytes(count: float) -> str:
    """``12.3 GiB``."""
    for unit, size in (("TiB", 1024 * GIB), ("GiB", GIB), ("MiB", 2**20)):
        if count >= size:
            return f"{count / size:,.1f} {unit}"
    return f"{count / 1024:,.1f} KiB"


def print_plan(plan: Plan, name: str) -> None:
    """All tables, then what was assumed."""
    config, p, flops = plan.config, plan.parameters, plan.flops
    mode, steps = config.scale.recompute, config.train.steps
    repeated = "" if mode == "none" else f"with what recompute={mode} repeats"
    rows = [
        ["parameters", f"{p.total:,}", ""],
        ["  trained", f"{p.trained:,}", ""],
        ["  embedding", f"{p.embedding:,}", ""],
        ["  blocks", f"{p.blocks:,}", f"{p.num_blocks} blocks"],
        ["  head", f"{p.head:,}", "and the norm before it"],
        ["FLOPs per token, forward", show_count(flops.forward), "matrix products"],
        ["FLOPs per token, training", show_count(flops.training), repeated],
        ["rows that meet the head", f"{flops.masked_share:.1%}", "mean over the time law"],
    ]
    Table(f"{name} on {plan.cluster}", ["network", "", ""], rows).print()

    memory = plan.memory
    limit = f"of {show_bytes(memory.capacity)}, {USABLE:.0%} of which tensors may fill"
    rows = [[part.name, show_bytes(part.num_bytes), part.note] for part in memory.parts]
    rows.append(["together", show_bytes(memory.total), limit])
    if memory.host_bytes:
        note = "per process, in the machine's memory, during a save"
        rows.append(["copy for a checkpoint", show_bytes(memory.host_bytes), note])
    title = f"memory per device, {plan.precision}, sharding {plan.layout}"
    Table(title, ["for", "", ""], rows).print()
    if memory.fits:
        print(f"fits; largest microbatch that does: {plan.largest_microbatch}")
    else:
        print(f"does not fit; try: {'; '.join(plan.advice)}")

    saved, data = plan.checkpoints, plan.data
    average = ", moving average" if config.optim.ema else ""
    size = "unknown" if data.num_bytes is None else show_bytes(data.num_bytes)
    devices = f"{plan.cluster.size} device" + "s" * (plan.cluster.size > 1)
    step = f"{devices} x {plan.microbatches} x {plan.microbatch} rows of {config.data.block_length}"
    rows = [
        ["one checkpoint", show_bytes(saved.each), "weights, optimizer" + average],
        ["all of them", show_bytes(saved.total), f"{saved.kept} kept, 1 being written"],
        ["prepared data", size, data.source],
        ["tokens per step", f"{plan.tokens_per_step:,}", step],
        ["tokens in all", show_count(plan.tokens), f"{steps:,} steps"],
    ]
    if plan.epochs is not None:
        rows.append(["epochs", f"{plan.epochs:.3g}", f"of {data.rows:,} rows"])
    Table("storage and data", ["", "", ""], rows).print()

    timing, told = plan.timing, plan.timing.communication
    hidden = "hidden as far as possible" if told.is_hidden else "nothing hides it"
    speed = f"{show_count(plan.tokens_per_step / timing.step)} tokens/s"
    peak = [f"{plan.utilisation:.1%}", "matrix products over the data sheet"]
    if plan.measured is not None:
        here = flops.training * config.data.block_length / plan.measured.row_seconds
        peak = [f"{here / plan.measured.matmul_flops:.1%}", "of a large product alone, here"]
    hours = plan.device_hours
    rows = [
        ["forward and backward", show_seconds(timing.passes), timing.source],
        ["update", show_seconds(timing.update), "clipping, optimizer, average"],
        ["communication", show_seconds(told.total), hidden],
        ["  not hidden", show_seconds(timing.exposed), ""],
        ["one step", show_seconds(timing.step), speed],
        ["share of peak", *peak],
        [
            "the whole run",
            show_seconds(timing.hours * 3600),
            f"{hours:,.0f} device hours" if hours >= 10 else f"{hours:.2g} device hours",
        ],
    ]
    Table("expected time", ["", "", ""], rows).print()
    for note in plan.notes:
        print(f"note: {note}")
    for assumption in plan.assumptions:
        print(f"assumed: {assumption}")


# ``bellmask plan``: what a run will need, before it is started.


@dataclass(frozen=True, kw_only=True)
class PlanOptions(PresetOptions):
    """Print what a run needs: parameters, FLOPs, memory per device, storage and time.

    Nothing is fetched or trained, and no GPU is needed. Any option of 'bellmask train' can follow.

    Examples:
    bellmask plan lm1b --devices 2xH200

    bellmask plan owt --devices 4xH100 --train.microbatch-size 32

    bellmask plan cpt_gpt2_large --devices 4xB200 --scale.recompute selective

    bellmask plan tiny --probe

    bellmask plan owt --devices 8x8xH100 --model.num-layers 32 --model.width 4096 --model.num-heads
    32 --data.block-length 4096 --scale.sharding full --scale.recompute block
    """

    devices: str | None = None
    """4xH100, or 16x8xH100 for 16 machines of 8. Default with --probe: this machine's device.
    Known: B200, H200, H100, H100-PCIe, H800, A100, A100-40GB, MI300X, L40S, A6000, 4090, V100,
    CPU."""
    nodes: int | None = None
    """Number of machines, each with --devices."""
    probe: bool = False
    """Time a few real microbatches on this machine's device and plan with those."""
    efficiency: float = EFFICIENCY
    """Share of the data sheet's speeds that kernels reach from start to end. The paper's three runs
    lie around the default; compiled and tuned runs reach more."""
    out: str | None = None
    """JSON file for all numbers; "fits" of "memory" says whether the run fits (the exit code is 0
    also where it does not)."""


def main(args: Sequence[str]) -> int:
    """Plan and print."""
    options, rest = parse_run_command(PlanOptions, args, command="plan")
    name, config = resolve(options, rest, "bellmask plan")
    if options.devices is None and not options.probe:
        raise UserError("bellmask plan needs --devices, as in --devices 4xH100 (or --probe)")
    out = None if options.out is None else Path(options.out)
    if out is not None and not out.parent.is_dir():
        raise UserError(f"--out {out}: there is no folder {out.parent}")
    made = plan(
        config,
        options.devices or local_device(config.train.device).name,
        nodes=options.nodes,
        efficiency=options.efficiency,
        is_probed=options.probe,
    )
    print_plan(made, name)
    if out is not None:
        write_text(out, json.dumps(made.to_dict(), indent=1) + "\n")
        print(f"numbers: {out}")
    return 0
