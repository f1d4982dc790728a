"""What is measured: our step, evaluation and sampling, and a plain implementation's.

Every subject runs in its own process, so allocator settings and peak memory are its own; the parent
lets them take turns, one unit of work each, so that noise of the machine affects all equally.
"""

from __future__ import annotations

import multiprocessing
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import torch
from reference import ReferenceStep, log_probabilities
from torch import Tensor

from bellmask.config.config import RunConfig
from bellmask.config.options import ModelOptions, OptimOptions, TrainOptions
from bellmask.data.blocks import Blocks, Row
from bellmask.diffusion.frameworks import Mdm
from bellmask.diffusion.objectives import Bell, Nelbo, Objective
from bellmask.evaluate.likelihood import evaluate
from bellmask.generate.sampler import SamplingDenoiser, generate, uniform_grid
from bellmask.model.transformer import Denoiser
from bellmask.train.optim import Ema, Optimizer
from bellmask.train.parallel import parallelize, plan_parallel
from bellmask.train.planning import StepPlanner
from bellmask.train.step import PendingStep, TrainStep
from bellmask.utils.distributed import CPU, World
from bellmask.utils.libraries import keep_freed_memory

SAMPLES, SAMPLE_STEPS = 4, 16


@dataclass(frozen=True)
class Size:
    """A model and its batch."""

    name: str
    model: ModelOptions
    vocabulary: int
    length: int
    batch: int

    @property
    def tokens(self) -> int:
        """Tokens per step."""
        return self.batch * self.length


TINY = Size("tiny", ModelOptions(3, 64, 4, dropout=0.0), 259, 64, 32)
SMALL = Size("small", ModelOptions(4, 128, 4, dropout=0.1), 2048, 128, 32)
PAPER = Size("paper", ModelOptions(12, 768, 12, dropout=0.1), 30522, 128, 8)
OBJECTIVES: dict[str, Callable[[], Objective]] = {
    "bell": Bell,
    "nelbo": lambda: Nelbo(time_floor=1e-3),
}


def random_blocks(size: Size, count: int) -> Blocks:
    draw = np.random.default_rng(0)
    rows = (
        Row(draw.integers(0, size.vocabulary, size.length), size.length, n) for n in range(count)
    )
    return Blocks.from_rows(rows)


def make_planner(size: Size, objective: str, device: torch.device = CPU) -> StepPlanner:
    config = RunConfig(train=TrainOptions(batch_size=size.batch))
    blocks = random_blocks(size, max(64, size.batch))
    return StepPlanner(blocks, OBJECTIVES[objective](), config, World(device=device))


def our_training(
    size: Size,
    objective: str,
    is_compiled: bool = False,
    device: torch.device = CPU,
    optim: OptimOptions | None = None,
) -> Callable[[int], None]:
    planner = make_planner(size, objective, device)
    options = planner.config.with_options({"objective": objective, "train.compile": is_compiled})
    parallel = plan_parallel(options, planner.world)
    model = parallelize(Denoiser(size.model, size.vocabulary), parallel, device)
    optimizer, ema = Optimizer(model, optim or OptimOptions()), Ema(model, 0.9999)
    how = {"mask_id": size.vocabulary, "clip": 1.0, "precision": parallel.precision}
    step = TrainStep(model, planner, Mdm(), **how)

    waiting: list[PendingStep] = []

    def run(number: int) -> None:
        waiting.append(step.begin(number))
        optimizer.step(3e-4, waiting[-1].is_bad)
        optimizer.zero_grad()
        ema.update(number + 1, waiting[-1].is_bad)
        if len(waiting) > step.reads_late:  # on a GPU the step before, as in a training
            waiting.pop(0).read()

    return run


def plain_training(size: Size, objective: str) -> Callable[[int], None]:
    planner = make_planner(size, objective)
    step = ReferenceStep(size.model, size.vocabulary)

    def run(number: int) -> None:
        (batch,) = planner(number).microbatches
        weight = planner.objective.weight(batch.t_B).float()
        step(batch.x0_BL, batch.u_BL, batch.t_B.float(), weight)

    return run


def our_evaluation(size: Size, objective: str) -> Callable[[int], None]:
    blocks = random_blocks(size, size.batch)
    model = Denoiser(size.model, size.vocabulary).eval()

    def run(number: int) -> None:
        evaluate(model, blocks, mask_id=size.vocabulary, seed=number, batch_size=size.batch)

    return run


def plain_evaluation(size: Size, objective: str) -> Callable[[int], None]:
    planner = make_planner(size, "nelbo")
    step = ReferenceStep(size.model, size.vocabulary)
    step.model.eval()

    @torch.no_grad()
    def run(number: int) -> None:
        (batch,) = planner(number).microbatches
        weight = planner.objective.weight(batch.t_B).float()
        step.loss(batch.x0_BL, batch.u_BL, batch.t_B.float(), weight)

    return run


def our_sampling(size: Size, objective: str) -> Callable[[int], None]:
    model = Denoiser(size.model, size.vocabulary).eval()
    canvas = torch.full((SAMPLES, size.length), size.vocabulary)

    def run(number: int) -> None:
        generate(
            SamplingDenoiser(model, size.vocabulary),
            canvas,
            uniform_grid(SAMPLE_STEPS),
            seed=number,
        )

    return run


def plain_sampling(size: Size, objective: str) -> Callable[[int], None]:
    """Ancestral steps as written down: all probabilities of all positions, at every step."""
    model = ReferenceStep(size.model, size.vocabulary).model.eval()
    mask_id = size.vocabulary

    @torch.no_grad()
    def run(number: int) -> None:
        torch.manual_seed(number)
        x: Tensor = torch.full((SAMPLES, size.length), mask_id)
        for k in range(SAMPLE_STEPS):
            t, s = 1 - k / SAMPLE_STEPS, 1 - (k + 1) / SAMPLE_STEPS
            weight = log_probabilities(model(x), x, mask_id).exp() * (t - s)
            weight[:, :, mask_id] = s
            noise = -torch.log(torch.rand(weight.shape, dtype=torch.float64) + 1e-20)
            drawn = (weight.double() / noise).argmax(-1)
            x = torch.where(x == mask_id, drawn, x)

    return run


SUBJECTS: dict[str, Callable[..., Callable[[int], None]]] = {
    "our training": our_training,
    "our training, compiled": lambda *given: our_training(*given, is_compiled=True),
    "our training, Muon": lambda *given: our_training(*given, optim=OptimOptions("muon")),
    "plain training": plain_training,
    "plain training, our allocator": plain_training,
    "our evaluation": our_evaluation,
    "plain evaluation": plain_evaluation,
    "our sampling": our_sampling,
    "plain sampling": plain_sampling,
}


def resident_bytes(field: str) -> int:
    """VmRSS or VmHWM of this process; the latter is the peak so far."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def serve(pipe: Connection, subject: str, size: Size, objective: str, threads: int) -> None:
    """The child: build the subject, then do one unit of work per number received."""
    torch.set_num_threads(threads)
    if subject.startswith("our") or "our allocator" in subject:
        keep_freed_memory()
    before = resident_bytes("VmRSS")
    work = SUBJECTS[subject](size, objective)
    while (number := pipe.recv()) is not None:
        started = time.perf_counter()
        work(number)
        pipe.send(time.perf_counter() - started)
    pipe.send(resident_bytes("VmHWM") - before)


class Subject:
    """A child process that does one unit of work on request."""

    def __init__(self, name: str, size: Size, objective: str = "bell") -> None:
        self.pipe, other = multiprocessing.Pipe()
        context = multiprocessing.get_context("spawn")
        given = (other, name, size, objective, torch.get_num_threads())
        self.process = context.Process(target=serve, args=given, daemon=True)
        self.process.start()
        self.seconds: list[float] = []

    def work(self, number: int) -> None:
        """One unit of work; the first one warms up."""
        self.pipe.send(number)
        seconds = self.pipe.recv()
        if number:
            self.seconds.append(seconds)

    def finish(self) -> float:
        """End the process; its peak memory above an idle one, in bytes."""
        self.pipe.send(None)
        peak = self.pipe.recv()
        self.process.join()
        return float(peak)


def take_turns(names: list[str], size: Size, rounds: int, objective: str = "bell") -> list[Subject]:
    """Let the subjects work in turn; returns them with their times."""
    subjects = [Subject(name, size, objective) for name in names]
    for number in range(rounds + 1):
        for subject in subjects:
            subject.work(number)
    return subjects
