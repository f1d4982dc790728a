"""Our training step, evaluation and sampling against a plain implementation (reference.py).

Both work in turn, one unit each, and medians are compared as ratios. Utilization is the arithmetic
of a step, 6 N_trunk T + 6 V D N_masked + 12 L D layers T floating-point operations, per second,
over the rate of matrix products measured in the same run at the shapes of the model. Memory is the
peak of the resident set above an idle process, weights and optimizer included.

With ``--gpu`` only our training step, on the GPU: the paper's network, both objectives, compiled
and not, with model FLOPs utilization by the GPU's data sheet and the peak of its memory.

usage: python benchmarks/step.py [--rounds N] [--sizes tiny small paper] [--compiled]
       python benchmarks/step.py --gpu [--batch N] [--rounds N]
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import replace

import torch
from subjects import PAPER, SMALL, TINY, Size, Subject, our_training, take_turns

from bellmask.utils.distributed import find_device, pick_precision
from bellmask.utils.table import Table

SIZES = {size.name: size for size in (TINY, SMALL, PAPER)}


def trunk_parameters(size: Size) -> int:
    """Weights of the matrix products inside blocks."""
    options = size.model
    return options.num_layers * (4 + 2 * options.mlp_ratio) * options.width**2


def step_flops(size: Size) -> float:
    """Arithmetic of a training step at mask rate one half."""
    options, tokens = size.model, size.tokens
    trunk = 6 * trunk_parameters(size) * tokens
    head = 6 * size.vocabulary * options.width * tokens / 2
    attention = 12 * size.length * options.width * options.num_layers * tokens
    return trunk + head + attention


def gemm_rate(size: Size, repeats: int = 5) -> float:
    """Operations per second of the step's own matrix products, forward and backward, alone."""
    width, tokens = size.model.width, size.tokens
    layers, hidden = size.model.num_layers, size.model.mlp_ratio * size.model.width
    shapes = [
        (tokens, width, 3 * width, layers),
        (tokens, width, width, layers),
        (tokens, width, hidden, layers),
        (tokens, hidden, width, layers),
        (tokens // 2, width, size.vocabulary, 1),
    ]
    seconds = flops = 0.0
    for rows, inner, outer, count in shapes:
        x, w, g = torch.randn(rows, inner), torch.randn(outer, inner), torch.randn(rows, outer)
        times = []
        for _ in range(repeats):
            started = time.perf_counter()
            x @ w.T, g @ w, g.T @ x
            times.append(time.perf_counter() - started)
        seconds += count * statistics.median(times)
        flops += count * 6.0 * rows * inner * outer
    return flops / seconds


def ratio(ours: Subject, other: Subject) -> str:
    """Median of the ratios of neighboring turns."""
    return f"{statistics.median(b / a for a, b in zip(ours.seconds, other.seconds)):.2f}x"


def training_row(size: Size, objective: str, rounds: int, is_compiled: bool) -> list[str]:
    names = ["our training", "plain training", "plain training, our allocator"]
    if is_compiled:
        names[0] = "our training, compiled"
    before = gemm_rate(size)
    ours, plain, shared = subjects = take_turns(names, size, rounds, objective)
    rate = (before + gemm_rate(size)) / 2
    median = statistics.median(ours.seconds)
    memory = [subject.finish() / 2**20 for subject in subjects]
    return [
        f"{size.name}, {objective}" + (", compiled" if is_compiled else ""),
        f"{median * 1e3:.0f}",
        f"{statistics.median(plain.seconds) * 1e3:.0f}",
        ratio(ours, plain),
        ratio(ours, shared),
        f"{size.tokens / median:,.0f}",
        f"{step_flops(size) / median / rate:.0%}",
        f"{rate / 1e9:.0f}",
        f"{memory[0]:.0f} / {memory[1]:.0f} ({memory[0] / memory[1]:.0%})",
    ]


def other_row(size: Size, what: str, rounds: int) -> list[str]:
    ours, plain = take_turns([f"our {what}", f"plain {what}"], size, rounds)
    seconds = [statistics.median(s.seconds) for s in (ours, plain)]
    memory = [s.finish() / 2**20 for s in (ours, plain)]
    times = [f"{s * 1e3:.0f}" for s in seconds]
    return [
        f"{size.name}, {what}",
        *times,
        ratio(ours, plain),
        f"{memory[0]:.0f} / {memory[1]:.0f}",
    ]


def gpu_row(size: Size, objective: str, is_compiled: bool, rounds: int) -> list[str]:
    device = torch.device("cuda", torch.cuda.current_device())
    work = our_training(size, objective, is_compiled, device)
    for number in range(5):  # compiles, and fills the allocator's pools
        work(number)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    started = time.perf_counter()
    for number in range(5, 5 + rounds):
        work(number)
    torch.cuda.synchronize()
    seconds = (time.perf_counter() - started) / rounds
    sheet = find_device(torch.cuda.get_device_name())
    precision = str(pick_precision("auto", device)).removeprefix("torch.")
    rate = step_flops(size) / seconds
    return [
        f"{objective}, {precision}" + (", compiled" if is_compiled else ""),
        f"{seconds * 1e3:.1f}",
        f"{size.tokens / seconds:,.0f}",
        "unknown" if sheet is None else f"{rate / sheet.peak(precision):.0%}",
        f"{torch.cuda.max_memory_allocated() / 2**30:.1f}",
    ]


def measure_gpu(size: Size, rounds: int) -> None:
    """Our step on this machine's GPU."""
    if not torch.cuda.is_available():
        raise SystemExit(
            "benchmarks/step.py --gpu: torch finds no GPU here; run it where there is one"
        )
    ways = [(objective, is_compiled) for objective in ("bell", "nelbo") for is_compiled in (0, 1)]
    rows = [gpu_row(size, objective, bool(way), rounds) for objective, way in ways]
    title = f"one training step, {size.batch} x {size.length}, {torch.cuda.get_device_name()}"
    Table(title, ["objective", "ms", "tokens/s", "MFU", "peak GiB"], rows).print()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--compiled", action="store_true", help="also with torch.compile")
    parser.add_argument("--gpu", action="store_true", help="our step on the GPU")
    parser.add_argument("--batch", type=int, default=256, help="rows of a step with --gpu")
    given = parser.parse_args()
    if given.gpu:
        measure_gpu(replace(PAPER, batch=given.batch), given.rounds)
        return
    training, others = [], []
    for size in (SIZES[name] for name in given.sizes):
        rounds = max(3, given.rounds // 3) if size is PAPER else given.rounds
        for objective in ("bell", "nelbo"):
            training.append(training_row(size, objective, rounds, False))
        if given.compiled:
            training.append(training_row(size, "bell", rounds, True))
        for what in ("evaluation", "sampling"):
            others.append(other_row(size, what, max(3, rounds // 3)))
    threads = f"{torch.get_num_threads()} threads"
    columns = ["size, objective", "ours ms", "plain ms", "ratio", "same allocator", "our tokens/s"]
    columns += ["utilization", "GFLOP/s", "peak MiB ours / plain"]
    Table(f"one training step, medians, {threads}", columns, training).print()
    columns = ["size", "ours ms", "plain ms", "ratio", "peak MiB ours / plain"]
    Table(f"one batch evaluated; 4 samples in 16 steps, {threads}", columns, others).print()


if __name__ == "__main__":
    main()
