"""One optimization step, in the order of the paper: times, masks, prediction, weights, update.

B batch, L block length, N masked rows. Noise is keyed by (seed, step) and a sample's place in the
global batch, so 1 process, 2 processes and accumulation see the same times and masks.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from bellmask.diffusion.frameworks import Framework, Mdm
from bellmask.train.parallel import full_tensor, gradient_sync, local_tensor, replicate
from bellmask.train.planning import Microbatch, StepPlan, StepPlanner
from bellmask.utils.distributed import autocast
from bellmask.utils.rng import stream_key, torch_seed


# Paper: Eq. 6
def microbatch_loss(
    model: nn.Module, batch: Microbatch, framework: Framework, mask_id: int, device: torch.device
) -> tuple[Tensor, int, float]:
    """(sum of w(t) * cross-entropy over scored rows, number of them, largest weight)."""
    x0_BL, u_BL, context_B = batch.x0_BL, batch.u_BL, batch.context_B
    where: dict[str, Any] = {"mask_id": mask_id, "is_real_BL": batch.is_maskable_BL}
    if context_B is not None:
        problem = framework.given(x0_BL, context_B, u_BL, **where)
    elif isinstance(framework, Mdm):
        problem = framework.training(x0_BL, batch.t_B, u_BL, **where)
    else:
        problem = framework.every_context(x0_BL, u_BL, **where)
    rows_N, weight_N, largest = problem.rows_N, None, 1.0
    if batch.weight_B is not None:
        weight_N = batch.weight_B[rows_N // x0_BL.shape[1]].float()
        largest = float(weight_N.max()) if len(rows_N) else 0.0
        weight_N = weight_N.to(device)
    mask = None if framework.is_causal else batch.attention_mask()
    return problem.ask(model, device, mask=mask, weight_N=weight_N), len(rows_N), largest


@dataclass(frozen=True)
class StepResult:
    """What one step measured."""

    loss: float
    """The objective, normalized: sum of w ce / (M c)."""
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
    """Forward, backward and gradient of one optimizer step (the update itself is the trainer's)."""

    def __init__(
        self,
        model: nn.Module,
        planner: StepPlanner,
        framework: Framework,
        *,
        mask_id: int,
        clip: float = 0.0,
        precision: torch.dtype = torch.float32,
    ) -> None:
        self.model, self.planner, self.framework = model, planner, framework
        self.mask_id, self.clip, self.precision = mask_id, clip, precision
        self.world = planner.world
        self.replica = replicate(model, self.world)
        self._has_buckets = self.replica is model or self.world.size == 2
        # on a CPU another thread would only compete for cores
        self.plan = planner if self.world.device.type == "cpu" else Prefetch(planner)

    def __call__(self, step: int) -> StepResult:
        """Leave the step's clipped gradient in the parameters; measure the loss."""
        plan, device = self.plan(step), self.world.device
        if not self._has_buckets:
            self._build_buckets(step, plan.microbatches[0])
        # DDP and FSDP2 average over processes, and what is wanted is the sum
        to_backward = plan.scale * self.world.size
        total = torch.zeros((), dtype=torch.float64, device=device)  # read once: no wait in between
        num_masked, largest = 0, 0.0
        for number, batch in enumerate(plan.microbatches, start=1):
            with gradient_sync(self.replica, number == len(plan.microbatches)):
                loss_sum, count, weight = self._forward(step, batch)
                (loss_sum * to_backward).backward()
            total += loss_sum.detach()
            num_masked += count
            largest = max(largest, weight)
        sums = torch.stack([total, torch.full_like(total, num_masked)])
        sums = self.world.all_reduce_sum(sums).cpu()
        largest = self.world.all_reduce_max(largest)
        norm = self._clip_gradient()
        return StepResult(
            float(sums[0]) * plan.scale,
            norm,
            0 < self.clip < norm,
            int(sums[1]),
            plan.num_maskable,
            largest,
        )

    def _build_buckets(self, step: int, batch: Microbatch) -> None:
        """A pass whose gradient is dropped, before the first step of a process.

        DDP groups gradients anew after its first backward pass, in the order they came. With more
        than two processes the groups decide in which order numbers are added up: without this the
        first step after a resume would be rounded otherwise than in a run that was not stopped.
        """
        self._forward(step, batch)[0].backward()
        self.model.zero_grad()
        self._has_buckets = True

    def _clip_gradient(self) -> float:
        """The gradient's norm over all processes, before it is clipped."""
        parameters = [p for p in self.model.parameters() if p.grad is not None]
        norm = full_tensor(nn.utils.get_total_norm([p.grad for p in parameters]))  # type: ignore[misc]
        value = float(norm)  # read once: a GPU is waited for
        if 0 < self.clip < value:
            nn.utils.clip_grads_with_norm_(parameters, self.clip, norm)
        return value

    def _forward(self, step: int, batch: Microbatch) -> tuple[Tensor, int, float]:
        key = stream_key(self.planner.options.seed, "dropout", step, batch.first)
        torch.manual_seed(torch_seed(key))
        device = self.world.device
        with autocast(device, self.precision):
            return microbatch_loss(self.replica, batch, self.framework, self.mask_id, device)

    def first_bad(self) -> str:
        """The first weight or gradient that is not finite, in words; empty when all are."""
        for what, read in (("weight", lambda p: p), ("gradient", lambda p: p.grad)):
            for name, parameter in self.model.named_parameters():
                value = read(parameter)
                if value is not None and not bool(torch.isfinite(local_tensor(value)).all()):
                    return f"; the first {what} that is not finite: {name}"
        return ""


class Prefetch:
    """A planner whose next plan is made in a thread, where steps come in order.

    Plans are functions of the step alone, so preparing early changes nothing but the time.
    """

    def __init__(self, make: Callable[[int], StepPlan]) -> None:
        self._make = make
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="prefetch")
        self._next: tuple[int, Future[StepPlan]] | None = None

    def __call__(self, step: int) -> StepPlan:
        """``make(step)``; begins with ``make(step + 1)`` before it returns."""
        is_ready = self._next is not None and self._next[0] == step
        made = self._next[1].result() if is_ready and self._next else self._make(step)
        self._next = step + 1, self._thread.submit(self._make, step + 1)
        return made
