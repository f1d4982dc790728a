"""One optimization step, in the order of the paper: times, masks, prediction, weights, update.

B batch, L block length, N masked rows. Noise is keyed by (seed, step) and a sample's place in the
global batch, so 1 process, 2 processes and accumulation see the same times and masks.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from bellmask.diffusion.frameworks import Framework, Mdm, Problem
from bellmask.train.parallel import full_tensor, gradient_sync, local_tensor, replicate
from bellmask.train.planning import Microbatch, StepPlan, StepPlanner
from bellmask.utils.distributed import autocast
from bellmask.utils.rng import stream_key, torch_seed

T = TypeVar("T")


# Paper: Eq. 6
@dataclass(frozen=True)
class Pass:
    """A microbatch, ready for a forward pass."""

    first: int
    """Where it stands in the global batch: what its dropout noise is keyed by."""
    problem: Problem
    mask: Tensor | None
    weight_N: Tensor | None
    largest_weight: float

    @staticmethod
    def of(batch: Microbatch, framework: Framework, mask_id: int) -> Pass:
        """Mask the tokens, find the scored rows and their weights."""
        x0_BL, u_BL, context_B = batch.x0_BL, batch.u_BL, batch.context_B
        where: dict[str, Any] = {"mask_id": mask_id, "is_real_BL": batch.is_maskable_BL}
        if context_B is not None:
            problem = framework.given(x0_BL, context_B, u_BL, **where)
        elif isinstance(framework, Mdm):
            problem = framework.training(x0_BL, batch.t_B, u_BL, **where)
        else:
            problem = framework.every_context(x0_BL, u_BL, **where)
        if problem.t_B is not None:
            problem = replace(problem, t_B=problem.t_B.float())
        rows_N, weight_N, largest = problem.rows_N, None, 1.0
        if batch.weight_B is not None:
            weight_N = batch.weight_B[rows_N // x0_BL.shape[1]].float()
            largest = float(weight_N.max()) if len(rows_N) else 0.0
        mask = None if framework.is_causal else batch.attention_mask()
        return Pass(batch.first, problem, mask, weight_N, largest)

    def pinned(self) -> Pass:
        """In pinned memory, for copies that do not block."""
        mask, weight = (x if x is None else x.pin_memory() for x in (self.mask, self.weight_N))
        problem = self.problem.map(Tensor.pin_memory)
        return replace(self, problem=problem, mask=mask, weight_N=weight)

    def loss(self, model: nn.Module, device: torch.device) -> Tensor:
        """Sum of w(t) * cross-entropy over scored rows."""
        return self.problem.ask(model, device, mask=self.mask, weight_N=self.weight_N)


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
    wants_stop: bool = False
    """Some process is to stop."""
    clock: float = 0.0
    """Seconds of training by the main process's clock, when the step began."""
    bad_gradient: str = ""
    """The first parameter whose gradient is not finite."""

    @property
    def is_finite(self) -> bool:
        """False where an update would spoil the weights."""
        return math.isfinite(self.loss) and math.isfinite(self.gradient_norm)


@dataclass(frozen=True)
class PendingStep:
    """A step that the device may still be working on."""

    step: int
    num_maskable: int
    is_bad: Tensor | None
    """True, on the device, where an update would spoil the weights; None: :meth:`read` first."""
    read: Callable[[], StepResult]
    """Waits for the device."""


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
        # not on a Mac's GPU, whose fused AdamW ignores found_inf: the host must skip a bad update
        self.reads_late = self.world.device.type not in ("cpu", "mps")
        """The host runs a step ahead of the device, and never waits for the step it begins."""
        # on a CPU another thread would only compete for cores
        self.plan = Prefetch(self._prepare) if self.reads_late else self._prepare
        self.wants_stop: Callable[[], bool] = lambda: False
        """True if this process should stop; the step's result tells all processes."""
        self.clock: Callable[[], float] = lambda: 0.0
        """This process's time; the result tells the main one's to all."""

    def _prepare(self, step: int) -> tuple[StepPlan, list[Pass]]:
        """Everything that does not need the network, pinned where the device is a GPU."""
        plan, device = self.planner(step), self.world.device
        passes = [Pass.of(m, self.framework, self.mask_id) for m in plan.microbatches]
        if device.type == "cuda":
            with torch.cuda.device(device):  # a thread begins with the first one
                passes = [each.pinned() for each in passes]
        return plan, passes

    def __call__(self, step: int) -> StepResult:
        """Leave the step's clipped gradient in the parameters; measure the loss."""
        return self.begin(step).read()

    def begin(self, step: int) -> PendingStep:
        """The same without waiting for what is measured."""
        (plan, passes), world = self.plan(step), self.world
        if not self._has_buckets:
            self._build_buckets(step, passes[0])
        # DDP and FSDP2 average over processes, and what is wanted is the sum
        to_backward = plan.scale * world.size
        # loss, masked tokens, processes that want to stop, the main one's time, then each process's
        # largest weight; assigned one by one on a device, each number would wait for it
        dtype = torch.float32 if world.device.type == "mps" else torch.float64  # a Mac's has none
        known = torch.zeros(4 + world.size, dtype=dtype)
        known[1] = sum(len(each.problem.rows_N) for each in passes)
        known[2] = self.wants_stop()
        known[3] = self.clock() if world.is_main else 0.0
        known[4 + world.rank] = max(each.largest_weight for each in passes)
        if world.device.type == "cuda":
            known = known.pin_memory()
        sums = known.to(world.device, non_blocking=True)
        for number, each in enumerate(passes, start=1):
            with gradient_sync(self.replica, number == len(passes)):
                loss_sum = self._forward(step, each)
                (loss_sum * to_backward).backward()
            sums[0].add_(loss_sum.detach())
        sums, (names, norm, first_bad) = world.all_reduce_sum(sums), self._clip_gradient()
        numbers = torch.cat([norm.to(dtype)[None], sums, first_bad.to(dtype)[None]])
        is_bad, event = None, None
        if self.reads_late:
            is_bad = ~numbers[:2].isfinite().all()
            numbers = numbers.to("cpu", non_blocking=True)
        if world.device.type == "cuda":  # the copy may not be done yet
            event = torch.cuda.Event()
            event.record()

        def read() -> StepResult:
            if event is not None:
                event.synchronize()
            norm, loss, num_masked, num_stopping, clock, *largest, first_bad = numbers.tolist()
            return StepResult(
                loss * plan.scale,
                norm,
                0 < self.clip < norm,
                int(num_masked),
                plan.num_maskable,
                max(largest),
                num_stopping > 0,
                clock,
                "" if math.isfinite(norm) else names[int(first_bad)],
            )

        return PendingStep(step, plan.num_maskable, is_bad, read)

    def _build_buckets(self, step: int, first: Pass) -> None:
        """A pass whose gradient is dropped, before the first step of a process.

        DDP groups gradients anew after its first backward pass, in the order they came. With more
        than two processes the groups decide in which order numbers are added up: without this the
        first step after a resume would be rounded otherwise than in a run that was not stopped.
        """
        self._forward(step, first).backward()
        self.model.zero_grad()
        self._has_buckets = True

    def _clip_gradient(self) -> tuple[list[str], Tensor, Tensor]:
        """Names of gradients, their norm over all processes before they are clipped, and the number
        of the first that is not finite.
        """
        named = {n: p for n, p in self.model.named_parameters() if p.grad is not None}
        parameters = named.values()
        norms = full_tensor(torch.stack(torch._foreach_norm([p.grad for p in parameters])))  # type: ignore[misc]
        norm = torch.linalg.vector_norm(norms)
        # where each is finite, what they add up to may not be, and that has no name
        first_bad = torch.cat([norms, norm[None]]).isfinite().long().argmin()
        # where the norm is known already, gradients that need no clipping are left alone
        if self.clip and (self.reads_late or self.clip < float(norm)):
            nn.utils.clip_grads_with_norm_(parameters, self.clip, norm)
        return [*named, ""], norm, first_bad

    def _forward(self, step: int, each: Pass) -> Tensor:
        key = stream_key(self.planner.options.seed, "dropout", step, each.first)
        torch.manual_seed(torch_seed(key))
        with autocast(self.world.device, self.precision):
            return each.loss(self.replica, self.world.device)

    def first_bad(self, result: StepResult) -> str:
        """The first weight or gradient that is not finite, in words; empty when all are."""
        what, found = "gradient", result.bad_gradient
        for name, parameter in self.model.named_parameters():
            if not bool(torch.isfinite(local_tensor(parameter)).all()):
                what, found = "weight", name
                break
        return found and f"; the first {what} that is not finite: {found}"


class Prefetch(Generic[T]):
    """A planner whose next plan is made in a thread, where steps come in order.

    Plans are functions of the step alone, so preparing early changes nothing but the time.
    """

    def __init__(self, make: Callable[[int], T]) -> None:
        self._make = make
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="prefetch")
        self._next: tuple[int, Future[T]] | None = None

    def __call__(self, step: int) -> T:
        """``make(step)``; begins with ``make(step + 1)`` before it returns."""
        is_ready = self._next is not None and self._next[0] == step
        made = self._next[1].result() if is_ready and self._next else self._make(step)
        self._next = step + 1, self._thread.submit(self._make, step + 1)
        return made
