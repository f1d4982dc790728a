"""Our training step against a naive one, interleaved in one process: ratios of medians.

The naive step is the same model and optimiser, but it does what a straightforward implementation
does: logits of every position, log-softmax over [B, L, V], then a mask.

usage: python benchmarks/step.py [--rounds N]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from bellmask.data.blocks import Blocks
from bellmask.data.packing import Row
from bellmask.diffusion.objectives import Bell, Nelbo, Objective
from bellmask.model.transformer import Denoiser
from bellmask.options import ModelOptions, OptimOptions, TrainOptions
from bellmask.report.console import print_table
from bellmask.train.distributed import World
from bellmask.train.optim import Optimizer
from bellmask.train.step import StepPlanner, TrainStep


@dataclass(frozen=True)
class Size:
    name: str
    model: ModelOptions
    vocabulary: int
    length: int
    batch: int


SIZES = [
    Size("tiny", ModelOptions(3, 64, 4, dropout=0.0), 259, 64, 32),
    Size("small", ModelOptions(4, 128, 4, dropout=0.1), 2048, 128, 32),
    Size("paper", ModelOptions(12, 768, 12, dropout=0.1), 30521, 128, 8),
]


class Bench:
    def __init__(self, size: Size, objective: Objective) -> None:
        self.size, self.objective = size, objective
        draw = np.random.default_rng(0)
        rows = (
            Row(draw.integers(0, size.vocabulary, size.length), size.length, n) for n in range(64)
        )
        options = TrainOptions(batch_size=size.batch)
        self.planner = StepPlanner(Blocks.from_rows(rows), objective, options, World())
        self.models = [Denoiser(size.model, size.vocabulary) for _ in range(2)]
        self.optimizers = [Optimizer(m, OptimOptions()) for m in self.models]
        self.ours = TrainStep(
            self.models[0],
            self.planner,
            World(),
            mask_id=size.vocabulary,
            divide_by_c=True,
            clip=1.0,
            precision=torch.float32,
        )

    def our_step(self, step: int) -> None:
        self.ours(step)
        self.optimizers[0].step(1e-4)
        self.optimizers[0].zero_grad()

    def naive_step(self, step: int) -> None:
        model, plan = self.models[1], self.planner(step)
        (batch,) = plan.microbatches
        is_masked = batch.u_BL < batch.t_B[:, None]
        x = torch.where(is_masked, self.size.vocabulary, batch.x0_BL)
        log_p = model.head(model.hidden(x)).log_softmax(-1)
        ce_BL: Tensor = -log_p.gather(-1, batch.x0_BL[..., None]).squeeze(-1)
        weight = self.objective.weight(batch.t_B)[:, None].float()
        loss = (ce_BL * is_masked * weight).sum() / plan.num_maskable / self.objective.normaliser
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        self.optimizers[1].step(1e-4)
        self.optimizers[1].zero_grad()

    def times(self, rounds: int) -> list[list[float]]:
        steps: list[Callable[[int], None]] = [self.our_step, self.naive_step]
        taken: list[list[float]] = [[], []]
        for number in range(rounds + 1):
            for which, step in enumerate(steps):
                started = time.perf_counter()
                step(number)
                if number:  # the first round warms up
                    taken[which].append(time.perf_counter() - started)
        return taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    rounds = parser.parse_args().rounds
    rows = []
    for size in SIZES:
        for name, objective in (("bell", Bell()), ("nelbo", Nelbo(time_floor=1e-3))):
            count = max(3, rounds // 3) if size.name == "paper" else rounds
            ours, naive = (statistics.median(t) for t in Bench(size, objective).times(count))
            tokens = size.batch * size.length / ours
            speeds = [f"{ours * 1e3:.1f}", f"{naive * 1e3:.1f}", f"{naive / ours:.2f}x"]
            rows.append([f"{size.name}, {name}", *speeds, f"{tokens:,.0f}"])
    columns = ["size, objective", "ours (ms)", "naive (ms)", "ratio", "our tokens/s"]
    print_table(f"one training step, median, {torch.get_num_threads()} threads", columns, rows)


if __name__ == "__main__":
    main()
