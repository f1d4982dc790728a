"""``bellmask plan``: options and devices → what the run needs, of :func:`plan`.

Operations and bytes come from :mod:`bellmask.train.memory`. Seconds are computed from the devices'
data sheets, or from microbatches that are timed here.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.filesize import decimal

from bellmask.config.command_line import PresetOptions, parse_run_command, resolve
from bellmask.config.config import RunConfig, override
from bellmask.config.options import DataOptions, Interval
from bellmask.config.presets import preset
from bellmask.data.corpora import find_policy
from bellmask.data.readers import HubSplit, find_files, hub_address
from bellmask.data.tasks import task_counts
from bellmask.train import memory
from bellmask.train.memory import USABLE, MemoryEstimate, Parameters, TracedKernel, Update
from bellmask.utils import distributed
from bellmask.utils.console import announced
from bellmask.utils.distributed import DEVICES, Device
from bellmask.utils.errors import UserError, look_up
from bellmask.utils.files import count_of, write_json
from bellmask.utils.table import Table

Section = dict[str, Any]
"""A part of the plan, written as JSON and shown on the screen."""

# Machines with several devices


@dataclass(frozen=True)
class Cluster:
    """Machines of equal devices, one process on each device."""

    device: Device
    machine_size: int
    machines: int = 1

    @property
    def world(self) -> distributed.World:
        """What a process on this cluster would know."""
        device, size = "cuda" if self.device.is_gpu else "cpu", self.machine_size * self.machines
        return distributed.World(0, size, torch.device(device), machine_size=self.machine_size)

    def __str__(self) -> str:
        inside = f"{self.machine_size}x{self.device.name}"
        return inside if self.machines == 1 else f"{self.machines}x{inside}"


def parse_devices(text: str) -> Cluster:
    """``H100``, ``4xH100``, or ``16x8xH100`` for 16 machines of 8; names in any case."""
    match = re.fullmatch(r"(?:(?:(\d+)x)?(\d+)x)?([A-Za-z0-9][A-Za-z0-9-]*)", text.strip())
    machines, machine_size = ((match and count_of(match[n] or "1")) or 0 for n in (1, 2))
    if match is None or not 1 <= machines * machine_size <= 10**6:
        example = "write 4xH100, or 16x8xH100 for 16 machines of 8"
        raise UserError(f"--devices {text!r}: {example}, with at most 1,000,000 devices")
    by_name = {name.lower(): name for name in DEVICES}
    device = look_up("device", by_name.get(match[3].lower(), match[3]), DEVICES)
    return Cluster(device, machine_size, machines)


# Bytes on disk: checkpoints by the retention rules, and prepared data if its size is known

BYTES_PER_NAME = 330
"""A tensor's name and shape in a checkpoint's headers, about."""
BYTES_PER_ROW = 16
"""Length and document number of each prepared row."""
# (repository, configuration): documents, tokens with one EOS per document, V of the tokenizer that
# counted them (0: about). LM1B: the published number of sentences, times 28.62 tokens (mean of
# 12,216 held-out ones) and EOS. OpenWebText: the published count of GPT-2 tokens, less 100,000
# documents for validation. FineWeb-Edu: made to hold so many GPT-2 tokens; the larger sample in
# about ten times the documents of the smaller one.
CORPUS_SIZES = {
    ("dvruette/lm1b", None): (30_301_028, 30_301_028 * (28.62 + 1), 30_521),
    ("Skylion007/openwebtext", None): (7_913_769, 9_040_017_095 * 7_913_769 / 8_013_769, 50_258),
    ("HuggingFaceFW/fineweb-edu", "sample-10BT"): (9_672_101, 10e9, 0),
    ("HuggingFaceFW/fineweb-edu", "sample-100BT"): (96_721_010, 100e9, 0),
}
PACKED_FILES = (".gz", ".xz", ".zst", ".parquet", ".arrow")
"""Files whose size does not tell how much text they hold."""


def checkpoint_sizes(config: RunConfig, parameters: Parameters, update: Update) -> Section:
    """Weights, optimizer and average in float32, and how many of them the rules keep."""
    each = 4 * parameters.total + update.optimizer_bytes + update.average_bytes
    each += BYTES_PER_NAME * update.num_tensors
    options, steps = config.checkpoint, config.train.steps
    interval = Interval.parse(options.every)
    tokens_per_step = config.train.batch_size * config.data.block_length
    per_save = {"steps": interval.amount, "tokens": interval.amount / tokens_per_step}
    every = per_save.get(interval.unit, 1.0)  # by the clock: as many as the rules can keep
    made = int(-(-steps // every)) if every else 1  # the last step is always saved
    by_step = steps // options.keep_every if options.keep_every else 0
    kept = min(options.keep_last + options.keep_best + by_step, made) + len(options.keep_steps)
    return {"each": each, "kept": kept, "total": each * (kept + 1)}  # one is being written


def bytes_per_token(num_tokens: int) -> float:
    """About, of English: measured 2.1 with a BPE of 512 tokens, 3.0 with 2048, 3.9 with 8192."""
    return 1.0 if num_tokens <= 259 else min(4.0, math.log2(num_tokens) / 2 - 2.5)


def text_size(data: DataOptions, num_tokens: int) -> tuple[int | None, float, str]:
    """(documents, tokens with EOS, how they are known) of a text that is not read; 0: unknown."""
    policy, name = find_policy(data, data.train), data.from_files or data.train
    part = hub_address(name) or (None if data.from_files else policy.splits.get("train"))
    each = bytes_per_token(num_tokens)
    if isinstance(part, HubSplit) and part.split == "train":
        known = CORPUS_SIZES.get((part.repository, part.config), (None, 0.0, 0))
        documents, tokens, counted_with = known
        if num_tokens == counted_with:
            return documents, tokens, "published counts of documents and tokens"
        return documents, tokens * 4 / each, "estimated from published counts"
    with contextlib.suppress(UserError):  # no such files here
        paths = find_files(name) if part is None and not policy.spans else []
        if not any(path.suffix in PACKED_FILES for path in paths):
            size = sum(path.stat().st_size for path in paths)
            return None, size / each, "estimated from the size of the files"
    return None, 0.0, ""


def data_size(config: RunConfig, num_tokens: int) -> Section:
    """Prepared training rows; None where nothing is known before the data is prepared."""
    data, sft, rows = config.data, config.sft, None
    row_bytes = data.block_length * (2 if num_tokens < 2**16 else 4) + BYTES_PER_ROW
    source = "estimated from App. C.1's counts of examples"
    if sft.train is not None:
        row_bytes += 8
        if sft.train == "tasks":
            rows = sum(task_counts(sft.counts).values())
        elif sft.train == preset("sft_sharegpt").sft.train and sft.turns == "first":
            rows = 103_000
    elif not data.mixture:
        rows, tokens, source = text_size(data, num_tokens)
        if data.packing == "packed":
            wrapping = 2 if find_policy(data, data.train).wrap else 0
            rows = int(tokens / (data.block_length - wrapping))
    if not rows:
        return {"rows": None, "num_bytes": None, "source": "unknown until it is prepared"}
    return {"rows": rows, "num_bytes": rows * row_bytes, "source": source}


# Seconds per step: kernels at a fraction of the data sheet's speed, launches, communication
#
# A kernel takes as long as its matrix products or its memory traffic would, whichever is longer, at
# the peak and bandwidth of the data sheet; the sum over kernels is divided by one number, the
# efficiency. This accounts for small networks and short rows, which are limited by elementwise
# operations.

EFFICIENCY = 0.2
"""Share of the data sheet's speeds that a run reaches from start to end. A single value for all
devices and networks, fitted to the paper's three runs (docs/scaling.md)."""
LAUNCH_SECONDS = 6e-6
"""Time to launch one kernel; a device cannot be faster than its launches."""
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


# Paper: App. C.1: hardware and hours
def device_seconds(ideal: float, num_kernels: float, device: Device, efficiency: float) -> float:
    """Work at the assumed efficiency, or the launches where those take longer."""
    launches = num_kernels * LAUNCH_SECONDS if device.is_gpu else 0.0
    return max(ideal / efficiency, launches)


def gather_seconds(size: float, group: int, cluster: Cluster, *, is_spread: bool = False) -> float:
    """A ring over ``group`` processes in which each ends up with ``size`` bytes.

    ``is_spread``: one process of each machine, as the copies of a hybrid layout; else machines are
    filled one after another, and all devices of a machine share the work between machines.
    """
    if group == 1:
        return 0.0
    machines = group if is_spread else -(-group // cluster.machine_size)
    speed = cluster.device.link
    if machines > 1:
        speed = min(speed, cluster.device.network * (1 if is_spread else cluster.machine_size))
    hops = HOP_SECONDS["machine"] * (group - machines) + HOP_SECONDS["network"] * (machines - 1)
    return size * (group - 1) / group / (speed * LINK_SHARE) + hops


# The plan


@dataclass(frozen=True)
class Plan(MemoryEstimate):
    """A run on its devices, and everything the planner says of it."""

    cluster: Cluster
    efficiency: float

    def advice(self) -> tuple[str, ...]:
        """What to change if it does not fit: options tried in order."""
        if self.fits:
            return ()
        block, full = "--scale.recompute block", "--scale.sharding full"
        if self.config.scale.shard_size is not None:
            full += " --scale.shard-size None"
        for options in ("", block, full, f"{full} {block}"):
            config = override(self.config, options.split())
            known = self.world, self.capacity, self.precision
            if size := memory.estimate_memory(config, *known).largest_microbatch():
                return (f"{options} --train.microbatch-size {size}".strip(),)
        return ("more devices, or devices with more memory: no option makes it fit",)

    def timing(self) -> Section:
        """Seconds of a step, and the hours of all, without validation and saving."""
        device, steps, size = self.cluster.device, self.config.train.steps, self.microbatch
        calls, is_hidden, at = self._communication(), self.layout.is_sharded, self.cost.at
        ideal = at(size, lambda trace: ideal_seconds(trace.kernels, device, self.precision))
        number = at(size, lambda trace: trace.kernels.total())
        passes = self.share // size * device_seconds(ideal, number, device, self.efficiency)
        # each process updates its part; Muon's products are of whole matrices everywhere
        kernels = self.update.kernels
        products = Counter({k: n for k, n in kernels.items() if k.flops})
        ideal = ideal_seconds(kernels - products, device, device.precision)
        ideal /= self.layout.processes_per_copy
        ideal += ideal_seconds(products, device, device.precision)
        update = device_seconds(ideal, kernels.total(), device, self.efficiency)
        exposed = max(0.0, sum(calls.values()) - (passes if is_hidden else 0.0))
        step = passes + update + exposed
        found = {"passes": passes, "update": update, "exposed": exposed, "step": step}
        found |= {"steps": steps, "hours": step * steps / 3600}
        return {**found, "source": "data sheet", "communication": {**calls, "is_hidden": is_hidden}}

    def _communication(self) -> dict[str, float]:
        """Seconds per step of collective calls on one process.

        FSDP2 hides them behind the passes as far as those last; otherwise gradients are added up
        after the backward pass.
        """
        p, layout, cluster = self.parameters, self.layout, self.cluster
        share, calls = layout.processes_per_copy, p.num_blocks + 1
        weight_bytes, gradient_bytes = self._sharded_bytes
        # blocks are gathered for both passes, what is outside them once
        each = gather_seconds(weight_bytes * p.total / calls, share, cluster)
        gathering = self.share // self.microbatch * each * (2 * calls - 1)
        gradients = gradient_bytes * p.trained
        reducing = calls * gather_seconds(gradients / calls, share, cluster)
        # copies that fill machines meet one process of each
        fills = layout.is_sharded and cluster.machines > 1 and share % cluster.machine_size == 0
        between = 2 * gather_seconds(gradients / share, layout.copies, cluster, is_spread=fills)
        return {"gathering": gathering, "reducing": reducing, "between_copies": between}

    def assumptions(self) -> list[str]:
        """Assumptions behind the numbers."""
        found = [
            f"speed of kernels {self.efficiency:.0%} of the data sheet's, of links "
            f"{LINK_SHARE:.0%} of the data sheet's",
            "the time excludes validation, saving and waiting for data",
        ]
        if self.config.sft.train is not None:
            found.append("every row has block_length tokens, all of them maskable: an upper bound")
        return found

    def to_dict(self) -> Section:
        config, size, timing = self.config, self.cost.sizes[0], self.timing()
        length, batch_size = config.data.block_length, config.train.batch_size
        tokens, num_devices = batch_size * length, self.cluster.world.size
        data = data_size(config, self.network.num_tokens)
        forward = memory.trace_microbatch(self.network, size, self.precision, is_training=False)
        training = self.cost.at(self.microbatch, lambda trace: trace.flops)
        training /= self.microbatch * length
        peak = self.cluster.device.peak(self.precision) * num_devices
        flops = {"forward": forward.flops / (size * length), "training": training}
        epochs = batch_size * timing["steps"] / data["rows"] if data["rows"] else None
        notes = list(self.network.notes)
        if epochs is not None and epochs > 1:
            about = "about " if data["source"].startswith("estimated") else ""
            notes.append(f"warning: the run reads its data {about}{epochs:,.1f} times")
        as_they_are = ("precision", "efficiency", "microbatch")
        return {name: getattr(self, name) for name in as_they_are} | {
            "devices": str(self.cluster),
            "options": config.resolved().to_dict(),
            "layout": asdict(self.layout),
            "microbatches": self.share // self.microbatch,
            "parameters": asdict(self.parameters),
            "flops": {**flops, "masked_share": self.network.masked_share},
            "memory": self.memory(self.microbatch),
            "largest_microbatch": self.largest_microbatch(),
            "advice": self.advice(),
            "checkpoints": checkpoint_sizes(config, self.parameters, self.update),
            "data": data,
            "timing": timing,
            "notes": notes,
            "assumptions": self.assumptions(),
            "tokens_per_step": tokens,
            "tokens": tokens * timing["steps"],
            "epochs": epochs,
            "utilization": training * tokens / timing["step"] / peak,
            "device_hours": timing["hours"] * num_devices,
        }


# Paper: App. C.1: hardware and hours
def plan(config: RunConfig, devices: str | Cluster, *, efficiency: float = EFFICIENCY) -> Plan:
    """The plan of a run on devices."""
    if not 0 < efficiency <= 1:
        raise UserError(f"--efficiency {efficiency} must be above 0 and at most 1")
    cluster = parse_devices(devices) if isinstance(devices, str) else devices
    config = config.check()
    asked = config.train.precision
    precision = cluster.device.precision if asked == "auto" else asked
    cluster.device.peak(precision)  # rejects a type without hardware units
    found = memory.estimate_memory(config, cluster.world, cluster.device.memory, precision)
    return Plan(**vars(found), cluster=cluster, efficiency=efficiency)


# A plan on the screen


def print_plan(told: Section, name: str) -> None:
    """The figures, memory part by part, then what was assumed."""
    p, flops, timing, memory = (told[k] for k in ("parameters", "flops", "timing", "memory"))
    saved, data = told["checkpoints"], told["data"]
    seconds = [f"{timing[part]:.3g} s" for part in ("passes", "update", "exposed")]
    hours = ((timing["hours"], "h"), (told["device_hours"], "device hours"))
    size = f"{decimal(data['num_bytes'])}, " if data["num_bytes"] else ""
    rows = {
        "parameters": f"{p['total']:,}, {p['trained']:,} of them trained",
        "FLOPs per token": f"{flops['forward']:.3g} forward, {flops['training']:.3g} training",
        "checkpoints": f"{saved['kept']} of {decimal(saved['each'])}, and 1 being written",
        "prepared data": size + data["source"],
        "tokens": f"{told['tokens_per_step']:,} per step, {told['tokens']:,} in total",
        "microbatches": f"{told['microbatches']} of {told['microbatch']} rows per device and step",
        "epochs": "unknown" if told["epochs"] is None else f"{told['epochs']:.3g}",
        "one step": f"{timing['step']:.3g} s, {told['utilization']:.1%} of peak",
        "passes, update, communication": f"{', '.join(seconds)} ({timing['source']})",
        "all steps": ", ".join(
            f"{n:,.0f} {of}" if n >= 100 else f"{n:.3g} {of}" for n, of in hours
        ),
    }
    Table(f"{name} on {told['devices']}", ["", ""], [*rows.items()]).print()
    parts = [[p["name"], decimal(p["num_bytes"]), p["note"]] for p in memory["parts"]]
    limit = f"of {decimal(int(memory['capacity']))}, {USABLE:.0%} usable by tensors"
    parts.append(["together", decimal(memory["total"]), limit])
    notes = [f"does not fit; try: {text}" for text in told["advice"]]
    notes = notes or [f"fits; largest microbatch that fits: {told['largest_microbatch']}"]
    notes += told["notes"] + [f"assumed: {text}" for text in told["assumptions"]]
    Table(f"memory per device, {told['precision']}", ["for", "", ""], parts, notes).print()


# ``bellmask plan``: the needs of a run, before it starts.


@dataclass(frozen=True, kw_only=True)
class PlanOptions(PresetOptions):
    """Estimate what a run needs: parameters, FLOPs, memory per device, storage and time.

    Nothing is downloaded or trained, and no GPU is needed. Options of 'bellmask train' can follow.

    Examples:
    bellmask plan lm1b --devices 2xH200

    bellmask plan owt --devices 4xH100 --train.microbatch-size 32

    bellmask plan cpt_gpt2_large --devices 4xB200 --scale.recompute selective

    bellmask plan owt --devices 8x8xH100 --model.num-layers 32 --model.width 4096 --model.num-heads
    32 --data.block-length 4096 --scale.sharding full --scale.recompute block
    """

    devices: str
    """4xH100, or 16x8xH100 for 16 machines of 8. Known: B200, H200, H100, H100-PCIe, H800, A100,
    A100-40GB, MI300X, L40S, A6000, 4090, V100, CPU."""
    efficiency: float = EFFICIENCY
    """Fraction of the data sheet's speed that a run reaches from start to end. The paper's three
    runs are close to the default; compiled and tuned runs reach more."""
    out: str | None = None
    """JSON file for all numbers; "fits" in "memory" says whether the run fits (the exit code is 0
    either way)."""


def main(args: Sequence[str]) -> int:
    options, rest = parse_run_command(PlanOptions, args, command="plan")
    name, config = resolve(options, rest, "bellmask plan")
    with announced("tracing a step"):
        told = plan(config, options.devices, efficiency=options.efficiency).to_dict()
    print_plan(told, name)
    if options.out is not None:
        write_json(Path(options.out), told)
        print(f"numbers: {options.out}")
    return 0
