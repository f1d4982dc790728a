"""One optimization step, in the order of the paper: when, what is seen, predict, weigh, update.

B batch, L block length, N masked rows. Noise is keyed by (seed, step) and a sample's place in the
global batch, so 1 process, 2 processes and accumulation see the same times and masks.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor, nn

from bellmask.diffusion.frameworks import Framework
from bellmask.diffusion.objectives import Objective
from bellmask.train.parallel import (
    add_up_next_gradient,
    full_tensor,
    is_sharded,
    local_tensor,
)
from bellmask.train.planning import Microbatch, StepPlanner
from bellmask.utils.distributed import World, autocast
from bellmask.utils.rng import stream_key, torch_seed


def microbatch_loss(
    model: nn.Module,
    batch: Microbatch,
    framework: Framework,
    objective: Objective,
    mask_id: int,
    device: torch.device,
) -> tuple[Tensor, int, float]:
    """(sum of w(t) * cross-entropy over scored rows, number of them, largest weight)."""
    if batch.count_B is None:
        problem = framework.training(
            batch.x0_BL, batch.t_B, batch.u_BL, mask_id=mask_id, is_real_BL=batch.is_maskable_BL
        )
    else:
        context_B = batch.num_maskable_B - batch.count_B
        problem = framework.given(
            batch.x0_BL, context_B, batch.u_BL, mask_id=mask_id, is_real_BL=batch.is_maskable_BL
        )
    rows_N = problem.rows_N
    weight_N, largest = None, 1.0
    weight_B = batch.factor_B
    if batch.count_B is None and not objective.is_unweighted:
        weight_B = objective.weight(batch.t_B)
        weight_B = weight_B if batch.factor_B is None else weight_B * batch.factor_B
    if weight_B is not None:
        weight_N = weight_B[rows_N // batch.x0_BL.shape[1]].float()
        largest = float(weight_N.max()) if len(rows_N) else 0.0
        weight_N = weight_N.to(device)
    mask = None if framework.is_causal else batch.attention_mask()
    return problem.ask(model, device, mask=mask, weight_N=weight_N), len(rows_N), largest


@dataclass(frozen=True)
class StepResult:
    """What one step measured."""

    loss: float
    """The objective, normalised: sum of w ce / (M c)."""
    gradient_norm: float
    is_clipped: bool
    num_masked: int
    num_maskable: int
    largest_weight: float

    @property
    def is_finite(self) -> bool:
        """False where an update would spoil the weights."""
        return math.isfinite(self.loss) and math.isfinite(self.gradient_norm)


class TrainStep:
    """Forward, backward and gradient of one optimiser step (the update itself is the trainer's)."""

    def __init__(
        self,
        model: nn.Module,
        planner: StepPlanner,
        world: World,
        *,
        mask_id: int,
        divide_by_c: bool,
        clip: float,
        precision: torch.dtype,
    ) -> None:
        self.model, self.planner, self.world = model, planner, world
        self.mask_id, self.clip, self.precision = mask_id, clip, precision
        self.c = planner.objective.normaliser if divide_by_c else 1.0
        # on a CPU another thread would only be in the way
        self.plan = planner if world.device.type == "cpu" else Ahead(planner)

    def __call__(self, step: int) -> StepResult:
        """Leave the step's clipped gradient in the parameters; measure the loss."""
        plan = self.plan(step)
        scale = 1 / max(1, plan.normaliser) / self.c
        # FSDP2 takes the mean over processes, and what is wanted is the sum
        to_backward = scale * (self.world.size if is_sharded(self.model) else 1)
        device = self.world.device
        total = torch.zeros((), dtype=torch.float64, device=device)  # read once: no wait in between
        num_masked, largest = 0, 0.0
        for number, batch in enumerate(plan.microbatches, start=1):
            add_up_next_gradient(self.model, number == len(plan.microbatches))
            loss_sum, count, weight = self._forward(step, batch)
            (loss_sum * to_backward).backward()
            total += loss_sum.detach()
            num_masked += count
            largest = max(largest, weight)
        sums = torch.stack([total, torch.full_like(total, num_masked)])
        sums = self.world.all_reduce_sum(sums).cpu()
        largest = self.world.all_reduce_max(largest)
        loss = float(sums[0]) * scale
        norm = self._clip_gradient()
        is_clipped = 0 < self.clip < norm
        return StepResult(loss, norm, is_clipped, int(sums[1]), plan.num_maskable, largest)

    def _clip_gradient(self) -> float:
        """The gradient's norm over all processes, before it is clipped."""
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        if not is_sharded(self.model):
            self.world.all_reduce_gradients(parameters)
        norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        norm = full_tensor(norm)
        value = float(norm)  # read once: a GPU is waited for
        if 0 < self.clip < value:
            nn.utils.clip_grads_with_norm_(parameters, self.clip, norm)
        return value

    def _forward(self, step: int, batch: Microbatch) -> tuple[Tensor, int, float]:
        seed = self.planner.options.seed
        torch.manual_seed(torch_seed(stream_key(seed, "dropout", step, batch.first)))
        with autocast(self.world.device, self.precision):
            return microbatch_loss(
                self.model,
                batch,
                self.planner.framework,
                self.planner.objective,
                self.mask_id,
                self.world.device,
            )

    def first_bad(self) -> str:
        """The first weight or gradient that is not finite, in words; empty when all are."""
        for what, read in (("weight", lambda p: p), ("gradient", lambda p: p.grad)):
            for name, parameter in self.model.named_parameters():
                value = read(parameter)
                if value is not None and not bool(torch.isfinite(local_tensor(value)).all()):
                    return f"; the first {what} that is not finite: {name}"
        return ""


# The next step's data and noise, prepared in a thread while the current step is computed.
#
# Plans are functions of the step alone, so preparing early changes nothing but the time.

T = TypeVar("T")


class Ahead(Generic[T]):
    """A function of the step, evaluated one step early where steps are asked for in order."""

    def __init__(self, make: Callable[[int], T]) -> None:
        self._make = make
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ahead")
        self._step = -1
        self._next: Future[T] | None = None

    def __call__(self, step: int) -> T:
        """``make(step)``; begins with ``make(step + 1)`` before it returns."""
        is_ready = self._next is not None and self._step == step
        made = self._next.result() if is_ready and self._next else self._make(step)
        self._step, self._next = step + 1, self._thread.submit(self._make, step + 1)
        return made
