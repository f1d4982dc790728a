"""Seconds of a step: kernels at a share of the data sheet's speeds, launches, communication.

A kernel takes as long as its matrix products or its memory traffic would, whichever is longer, at
the peak and bandwidth of the data sheet; the sum over kernels is divided by one number, the
efficiency. Small networks at short lengths are slow for the right reason then: their elementwise
work moves bytes that no matrix product hides.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from bellmask.plan.devices import Cluster, Device
from bellmask.plan.network import Parameters
from bellmask.plan.tracer import Kernel
from bellmask.train.sharding import Layout

EFFICIENCY = 0.2
"""Share of the data sheet's speeds that a run reaches from start to end. Chosen once, for all
devices and networks, so that the paper's three runs come out (docs/scaling.md)."""
LAUNCH_SECONDS = 6e-6
"""What the host needs to start one kernel; a device cannot be faster than its launches."""
LINK_SHARE = 0.7
"""Share of a link's or network's data sheet speed that collective calls reach."""
HOP_SECONDS = {"machine": 2e-6, "network": 8e-6}
"""Latency of one hop of a ring, inside a machine and between two."""


def ideal_seconds(kernels: Counter[Kernel], device: Device, precision: str) -> float:
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
