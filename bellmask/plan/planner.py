"""Options and devices → what the run needs: the planner's one entry, :func:`plan`."""

from __future__ import annotations

import dataclasses
from collections import Counter
from dataclasses import dataclass
from typing import Any

from bellmask.config.config import RunConfig
from bellmask.plan.devices import Cluster, parse_devices
from bellmask.plan.fitting import Cost, fit, split_batch, trace_cost, world_of
from bellmask.plan.memory import Holding, Memory
from bellmask.plan.network import Parameters, Planned, count, plan_network
from bellmask.plan.probe import Measured, local_cluster, probe
from bellmask.plan.sizes import Checkpoints, DataSize, checkpoint_sizes, data_size
from bellmask.plan.timing import (
    EFFICIENCY,
    HOP_SECONDS,
    LAUNCH_SECONDS,
    LINK_SHARE,
    Timing,
    communicate,
    device_seconds,
    ideal_seconds,
)
from bellmask.plan.trace import Update, masked_share, trace_microbatch, trace_update
from bellmask.train.sharding import Layout, pick_layout
from bellmask.utils.errors import UserError
from bellmask.utils.libraries import first_line


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
    measured: Measured | None
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
    measured: Measured | None,
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
    measured: Measured | None,
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
