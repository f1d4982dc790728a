"""A plan on the screen."""

from __future__ import annotations

from bellmask.plan.memory import USABLE, show_bytes
from bellmask.plan.planner import Plan
from bellmask.utils.console import print_plain_table


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
