"""``bellmask plan``: options and devices → what the run needs, of :func:`plan`.

Seconds are computed from the devices' data sheets, or from microbatches that are timed here. Bytes
come from :mod:`bellmask.plan.memory`, operations from :mod:`bellmask.plan.tracer`.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from bellmask.config.command_line import PresetOptions, parse_run_command, resolve
from bellmask.config.config import RunConfig
from bellmask.model.head import pick_loss_kernel, using_loss_kernel
from bellmask.plan.devices import DEVICES, Cluster, Device, parse_devices
from bellmask.plan.memory import (
    USABLE,
    Checkpoints,
    Cost,
    DataSize,
    Holding,
    Memory,
    checkpoint_sizes,
    data_size,
    fit,
    show_bytes,
    split_batch,
    trace_cost,
    world_of,
)
from bellmask.plan.network import Parameters, Planned, count, plan_network, real_network
from bellmask.plan.tracer import (
    TracedKernel,
    Update,
    inputs,
    masked_share,
    scored_rows,
    trace_microbatch,
    trace_update,
)
from bellmask.storage.build import build_objective
from bellmask.train.optim import Ema, Optimizer
from bellmask.train.parallel import Layout, pick_layout, recompute_blocks
from bellmask.utils.console import print_plain_table, progress_bar
from bellmask.utils.distributed import (
    autocast,
    check_compiler,
    has_native_bfloat16,
    pick_device,
    pick_precision,
)
from bellmask.utils.errors import UserError
from bellmask.utils.files import write_text
from bellmask.utils.libraries import first_line

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


def communicate(
    parameters: Parameters,
    layout: Layout,
    cluster: Cluster,
    *,
    microbatches: int,
    gathered_bytes: int,
    reduced_bytes: int,
) -> Communication:
    """``gathered_bytes`` and ``reduced_bytes`` are those of one weight and one gradient."""
    share, copies = layout.processes_per_copy, layout.copies
    gradients = reduced_bytes * parameters.trained
    if not layout.is_sharded:
        once = gather_seconds(4 * parameters.trained, copies, cluster, is_spread=False)
        return Communication(0.0, 0.0, 2 * once, is_hidden=False)
    calls = parameters.num_blocks + 1
    each = gather_seconds(
        gathered_bytes * parameters.total / calls, share, cluster, is_spread=False
    )
    # blocks are gathered for both passes, what is outside them once
    gathering = microbatches * each * (2 * calls - 1)
    reducing = calls * gather_seconds(gradients / calls, share, cluster, is_spread=False)
    fills_machines = share % cluster.machine_size == 0 or cluster.machines == 1
    between = 0.0
    if copies > 1:
        once = gather_seconds(
            gradients / share, copies, cluster, is_spread=fills_machines and cluster.machines > 1
        )
        between = 2 * once
    return Communication(gathering, reducing, between, is_hidden=True)


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


def probe(config: RunConfig, microbatch: int) -> ProbeResult:
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
    return ProbeResult(str(device), size, passes / size, updates, flops)


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


# The plan


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
    """Everything the planner says."""

    config: RunConfig
    cluster: Cluster
    layout: Layout
    precision: str
    efficiency: float
    microbatch: int
    microbatches: int
    """Per step and process."""
    parameters: Parameters
    flops: Flops
    memory: Memory
    largest_microbatch: int | None
    advice: tuple[str, ...]
    """What to change where it does not fit."""
    checkpoints: Checkpoints
    data: DataSize
    timing: Timing
    measured: ProbeResult | None
    notes: tuple[str, ...]
    assumptions: tuple[str, ...]

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
        if not self.data.rows:
            return None
        return self.config.train.batch_size * self.config.train.steps / self.data.rows

    @property
    def utilisation(self) -> float:
        """FLOP/s of matrix products over the devices' peak."""
        peak = self.cluster.device.peak(self.precision) * self.cluster.size
        return self.flops.training * self.tokens_per_step / self.timing.step / peak

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        found = {
            field.name: _plain(getattr(self, field.name))
            for field in dataclasses.fields(self)
            if field.name not in ("config", "cluster")
        }
        found["options"] = self.config.resolved().to_dict()
        found["devices"] = str(self.cluster)
        found["tokens_per_step"], found["tokens"] = self.tokens_per_step, self.tokens
        found["epochs"], found["utilisation"] = self.epochs, self.utilisation
        found["memory"] |= {"total": self.memory.total, "fits": self.memory.fits}
        found["checkpoints"] |= {"total": self.checkpoints.total}
        timing = self.timing
        found["timing"] |= {"step": timing.step, "hours": timing.hours, "exposed": timing.exposed}
        found["device_hours"] = timing.hours * self.cluster.size
        return found


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    return value


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
        cluster = local_cluster(config, cluster)
    asked = config.train.precision
    precision = cluster.device.precision if asked == "auto" else str(asked)
    cluster.device.peak(precision)
    microbatch, microbatches = split_batch(config, cluster.size)
    layout = pick_layout(config.scale, world_of(cluster))
    planned = plan_network(config)
    parameters = count(planned.network)
    try:
        update = trace_update(planned)
        cost = trace_cost(planned, microbatch, precision, layout)
    except (RuntimeError, TypeError, AttributeError) as error:
        if not planned.is_causal_lm:
            raise
        raise UserError(f"this causal LM cannot be planned: {first_line(error)}") from None
    holding = Holding(parameters, update, layout, precision, config.scale.reduce, microbatches > 1)
    memory, largest, advice = fit(planned, holding, cost.work, cluster, microbatch)
    measured = probe(config, microbatch) if is_probed else None
    timing = _timing(config, cluster, holding, cost, measured, microbatch, efficiency)
    tokens_per_step = config.train.batch_size * config.data.block_length
    return Plan(
        config,
        cluster,
        layout,
        precision,
        efficiency,
        microbatch,
        microbatches,
        parameters,
        _flops(planned, cost, precision, microbatch),
        memory,
        largest,
        tuple(advice),
        checkpoint_sizes(config, parameters, update, tokens_per_step),
        data_size(config, planned.num_tokens),
        timing,
        measured,
        planned.notes,
        tuple(_assumptions(config, cluster, layout, efficiency, measured)),
    )


def _flops(planned: Planned, cost: Cost, precision: str, microbatch: int) -> Flops:
    length, size = planned.config.data.block_length, cost.sizes[0]
    forward = trace_microbatch(planned, size, precision, is_training=False).flops
    training = cost.at(microbatch, lambda trace: trace.flops) / (microbatch * length)
    return Flops(forward / (size * length), training, masked_share(planned.config))


def _timing(
    config: RunConfig,
    cluster: Cluster,
    holding: Holding,
    cost: Cost,
    measured: ProbeResult | None,
    microbatch: int,
    efficiency: float,
) -> Timing:
    device, layout = cluster.device, holding.layout
    share = config.train.batch_size // cluster.size
    microbatches = share // microbatch
    if measured is not None:
        passes, update = measured.row_seconds * share, measured.update_seconds
        source = "measured here"
    else:
        precision = holding.precision
        ideal = cost.at(microbatch, lambda trace: ideal_seconds(trace.kernels, device, precision))
        number = cost.at(microbatch, lambda trace: trace.kernels.total())
        passes = microbatches * device_seconds(ideal, number, device, efficiency)
        update = _update_seconds(holding.update, cluster, layout, efficiency)
        source = "data sheet"
    communication = communicate(
        holding.parameters,
        layout,
        cluster,
        microbatches=microbatches,
        gathered_bytes=2 if holding.precision == "bfloat16" else 4,
        reduced_bytes=2 if holding.precision == config.scale.reduce == "bfloat16" else 4,
    )
    return Timing(passes, update, communication, config.train.steps, source)


def _update_seconds(update: Update, cluster: Cluster, layout: Layout, efficiency: float) -> float:
    """Each process updates its part; Muon's products are of whole matrices everywhere."""
    device = cluster.device
    products = Counter({k: n for k, n in update.kernels.items() if k.flops})
    others = update.kernels - products
    ideal = ideal_seconds(products, device, device.precision)
    ideal += ideal_seconds(others, device, device.precision) / layout.processes_per_copy
    return device_seconds(ideal, update.kernels.total(), device, efficiency)


def _assumptions(
    config: RunConfig,
    cluster: Cluster,
    layout: Layout,
    efficiency: float,
    measured: ProbeResult | None,
) -> list[str]:
    device = cluster.device
    found = []
    if measured is None:
        found.append(
            f"kernels at {efficiency:.0%} of the data sheet's speeds (--efficiency), at least "
            f"{1e6 * LAUNCH_SECONDS:.0f} us per kernel on a GPU; --probe measures this machine"
        )
        if config.train.compile:
            found.append("compiled blocks are counted as if they were not: expect less time")
    if cluster.size > 1:
        hops = ", ".join(f"{1e6 * t:.0f} us per hop ({where})" for where, t in HOP_SECONDS.items())
        found.append(
            f"links at {LINK_SHARE:.0%} of {device.link / 1e9:g} GB/s in a machine and "
            f"{device.network / 1e9:g} GB/s per device between machines, {hops}; "
            + ("hidden behind the passes" if layout.is_sharded else "after the backward pass")
        )
    found.append("validation, saving and waiting for data are not in the time")
    if config.sft.train is not None:
        found.append("every row has block_length tokens, all of them maskable: an upper bound")
    if config.start.anneal_steps > 1:
        found.append("attention counted as open: the mask of the annealing steps is left out")
    if not device.is_gpu and measured is None:
        found.append("CPU is a server of about 16 cores; yours may be very different: --probe")
    return found


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


def print_plan(plan: Plan, name: str) -> None:
    """All tables, then what was assumed."""
    _network(plan, name)
    _memory(plan)
    _storage(plan)
    _time(plan)
    for note in plan.notes:
        print(f"note: {note}")
    for assumption in plan.assumptions:
        print(f"assumed: {assumption}")


def _network(plan: Plan, name: str) -> None:
    p, flops = plan.parameters, plan.flops
    rows = [
        ["parameters", f"{p.total:,}", ""],
        ["  trained", f"{p.trained:,}", ""],
        ["  embedding", f"{p.embedding:,}", ""],
        ["  blocks", f"{p.blocks:,}", f"{p.num_blocks} blocks"],
        ["  head", f"{p.head:,}", "and the norm before it"],
        ["FLOPs per token, forward", show_count(flops.forward), "matrix products"],
        ["FLOPs per token, training", show_count(flops.training), _repeated(plan)],
        ["rows that meet the head", f"{flops.masked_share:.1%}", "mean over the time law"],
    ]
    print_plain_table(f"{name} on {plan.cluster}", ["network", "", ""], rows)


def _repeated(plan: Plan) -> str:
    mode = plan.config.scale.recompute
    return "" if mode == "none" else f"with what recompute={mode} repeats"


def _memory(plan: Plan) -> None:
    memory = plan.memory
    rows = [[part.name, show_bytes(part.num_bytes), part.note] for part in memory.parts]
    limit = f"of {show_bytes(memory.capacity)}, {USABLE:.0%} of which tensors may fill"
    rows.append(["together", show_bytes(memory.total), limit])
    if memory.host_bytes:
        note = "per process, in the machine's memory, during a save"
        rows.append(["copy for a checkpoint", show_bytes(memory.host_bytes), note])
    title = f"memory per device, {plan.precision}, sharding {plan.layout}"
    print_plain_table(title, ["for", "", ""], rows)
    if memory.fits:
        print(f"fits; largest microbatch that does: {plan.largest_microbatch}")
    else:
        print(f"does not fit; try: {'; '.join(plan.advice)}")


def _storage(plan: Plan) -> None:
    kept, data = plan.checkpoints, plan.data
    each = show_bytes(kept.each)
    average = ", moving average" if plan.config.optim.ema else ""
    rows = [
        ["one checkpoint", each, "weights, optimizer" + average],
        ["all of them", show_bytes(kept.total), f"{kept.kept} kept, 1 being written"],
    ]
    size = "unknown" if data.num_bytes is None else show_bytes(data.num_bytes)
    rows.append(["prepared data", size, data.source])
    rows.append(["tokens per step", f"{plan.tokens_per_step:,}", _step(plan)])
    rows.append(["tokens in all", show_count(plan.tokens), f"{plan.config.train.steps:,} steps"])
    if plan.epochs is not None:
        rows.append(["epochs", f"{plan.epochs:.3g}", f"of {plan.data.rows:,} rows"])
    print_plain_table("storage and data", ["", "", ""], rows)


def _step(plan: Plan) -> str:
    length = plan.config.data.block_length
    devices = f"{plan.cluster.size} device" + "s" * (plan.cluster.size > 1)
    return f"{devices} x {plan.microbatches} x {plan.microbatch} rows of {length}"


def _time(plan: Plan) -> None:
    timing, told = plan.timing, plan.timing.communication
    hidden = "hidden as far as possible" if told.is_hidden else "nothing hides it"
    speed = plan.tokens_per_step / timing.step
    rows = [
        ["forward and backward", show_seconds(timing.passes), timing.source],
        ["update", show_seconds(timing.update), "clipping, optimizer, average"],
        ["communication", show_seconds(told.total), hidden],
        ["  not hidden", show_seconds(timing.exposed), ""],
        ["one step", show_seconds(timing.step), f"{show_count(speed)} tokens/s"],
        ["share of peak", f"{plan.utilisation:.1%}", "matrix products over the data sheet"],
        ["the whole run", show_seconds(timing.hours * 3600), _device_hours(plan)],
    ]
    if plan.measured is not None:
        rows[5] = ["share of peak", f"{_of_matmul(plan):.1%}", "of a large product alone, here"]
    print_plain_table("expected time", ["", "", ""], rows)


def _of_matmul(plan: Plan) -> float:
    """Matrix products of the passes over what the device does in one large product."""
    assert plan.measured is not None
    flops = plan.flops.training * plan.config.data.block_length
    return flops / plan.measured.row_seconds / plan.measured.matmul_flops


def _device_hours(plan: Plan) -> str:
    hours = plan.timing.hours * plan.cluster.size
    return f"{hours:,.0f} device hours" if hours >= 10 else f"{hours:.2g} device hours"


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
