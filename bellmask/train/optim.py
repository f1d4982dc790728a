"""Optimizers and their parameter groups, learning-rate curves, moving average of weights."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from bellmask.config.options import OptimOptions
from bellmask.train.parallel import full_tensor, local_tensor

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
NEWTON_SCHULZ_STEPS = 5


# Paper: App. C.1: optimizer
def learning_rate(options: OptimOptions, step: int, num_steps: int) -> float:
    """The rate of update number ``step`` (from 0): linear warm-up from zero, then the curve."""
    if step < options.warmup_steps:
        return options.lr * (step + 1) / options.warmup_steps
    if options.curve == "constant":
        return options.lr
    share = (step - options.warmup_steps) / max(1, num_steps - 1 - options.warmup_steps)
    cosine = (1 + math.cos(math.pi * min(1.0, share))) / 2
    return options.final_lr + (options.lr - options.final_lr) * cosine


def orthogonalize(matrix: Tensor, dtype: torch.dtype) -> Tensor:
    """The nearest orthogonal matrix, roughly: five quintic Newton-Schulz iterations."""
    a, b, c = NEWTON_SCHULZ
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = (matrix.T if is_tall else matrix).to(dtype)
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if is_tall else x


class Muon(torch.optim.Optimizer):
    """Momentum, orthogonalized, scaled to the size of AdamW's updates, for weight matrices.

    Same updates as ``torch.optim.Muon(adjust_lr_fn="match_rms_adamw")``, but the iteration runs in
    float32 on CPUs, where bfloat16 products can take hundreds of times longer.
    """

    def __init__(
        self, params: Iterable[nn.Parameter], lr: float, momentum: float, weight_decay: float
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    found_inf: Tensor | None = None
    """As AdamW has it: not 0, on the device, where there must be no update."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One update of every matrix that has a gradient."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)

    def _update(self, parameter: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        gradient, average = parameter.grad, state["momentum_buffer"]
        assert gradient is not None
        self._assign(average, average.lerp(gradient, 1 - group["momentum"]))
        lookahead = full_tensor(gradient.lerp(average, group["momentum"]))  # Nesterov
        dtype = torch.bfloat16 if parameter.device.type == "cuda" else torch.float32
        update = orthogonalize(lookahead, dtype).to(parameter.dtype)
        if isinstance(parameter, DTensor):  # every process has the whole update: take its part
            mesh, placements = parameter.device_mesh, parameter.placements
            update = distribute_tensor(update, mesh, placements, src_data_rank=None)
        rate = group["lr"] * 0.2 * math.sqrt(max(parameter.shape))
        shrunk = parameter * (1 - group["lr"] * group["weight_decay"])
        self._assign(parameter, shrunk.add_(update, alpha=-rate))

    def _assign(self, target: Tensor, value: Tensor) -> None:
        target, value = local_tensor(target), local_tensor(value)
        if self.found_inf is not None:
            value = torch.where(self.found_inf > 0, target, value)
        target.copy_(value)


def is_hidden_matrix(name: str, parameter: Tensor) -> bool:
    """True for the weight matrices inside blocks, which Muon takes; not for modulation.

    Blocks are the only numbered parts, also of the causal LMs of transformers ("h.0", "layers.0").
    """
    is_in_block = any(part.isdecimal() for part in name.split("."))
    return is_in_block and is_matrix(name, parameter)


def is_matrix(name: str, parameter: Tensor) -> bool:
    """True for what multiplies; not for norms, biases and modulation."""
    return parameter.ndim == 2 and "modulation" not in name


# Paper: App. C.1: optimizer
class Optimizer:
    """AdamW, or Muon and AdamW, behind one step; its state is addressed by parameter name."""

    def __init__(self, model: nn.Module, options: OptimOptions) -> None:
        tables = {id(part.weight) for part in model.modules() if isinstance(part, nn.Embedding)}
        decayed, others, for_muon = [], [], []
        self.names: dict[Tensor, str] = {}
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad:
                continue
            self.names[parameter] = name
            if options.name == "muon" and is_hidden_matrix(name, parameter):
                for_muon.append(parameter)
            elif is_matrix(name, parameter) and id(parameter) not in tables:
                decayed.append(parameter)
            else:
                others.append(parameter)
        groups = [
            {"params": decayed, "weight_decay": options.weight_decay},
            {"params": others, "weight_decay": 0.0},
        ]
        self.parts: list[torch.optim.Optimizer] = [
            torch.optim.AdamW(
                [group for group in groups if group["params"]],
                lr=options.lr,
                betas=options.betas,
                eps=options.eps,
                fused=True,
            )
        ]
        if for_muon:
            muon = Muon(for_muon, options.lr, options.momentum, options.weight_decay)
            self.parts.append(muon)

    def step(self, lr: float, is_bad: Tensor | None = None) -> None:
        """One update at a learning rate; none where ``is_bad``, which is not read on the host."""
        for part in self.parts:
            part.found_inf = None if is_bad is None else is_bad.float()  # type: ignore[attr-defined]
            for group in part.param_groups:
                group["lr"] = lr
            part.step()

    def zero_grad(self) -> None:
        for part in self.parts:
            part.zero_grad(set_to_none=True)

    def tensors(self) -> dict[str, Tensor]:
        """All state as ``{"<parameter>.<quantity>": tensor}``; created with zeros if need be."""
        found: dict[str, Tensor] = {}
        for part in self.parts:
            averages = ["momentum_buffer"] if isinstance(part, Muon) else ["exp_avg", "exp_avg_sq"]
            for parameter in (p for group in part.param_groups for p in group["params"]):
                state = part.state[parameter]
                if not state and not isinstance(part, Muon):
                    state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
                if averages[0] not in state:
                    state |= {key: torch.zeros_like(parameter) for key in averages}
                name = self.names[parameter]
                found |= {f"{name}.{key}": value for key, value in state.items()}
        return found


class Ema:
    """Moving average of weights with warm-up: decay min(d, (1 + n) / (10 + n)) at update n."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self.named = dict(model.named_parameters())
        self.shadow = {name: p.detach().clone() for name, p in self.named.items()}

    @torch.no_grad()
    def update(self, num_updates: int, is_bad: Tensor | None = None) -> None:
        """Move toward the current weights after update number ``num_updates`` (from 1).

        Not where ``is_bad``, which is not read on the host.
        """
        decay = min(self.decay, (1 + num_updates) / (10 + num_updates))
        averages = list(map(local_tensor, self.shadow.values()))
        weights = list(map(local_tensor, self.named.values()))
        if is_bad is None:
            torch._foreach_lerp_(averages, weights, 1 - decay)
        else:  # in place: differences would take the memory of another copy of the weights
            share = torch.where(is_bad, 0.0, 1 - decay)
            torch._foreach_lerp_(averages, weights, [share] * len(weights))

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Within: the model has the averaged weights."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        for name, parameter in self.named.items():  # in place: FSDP2 knows the memory
            weight, average = local_tensor(parameter), local_tensor(self.shadow[name])
            before = weight.clone()
            weight.copy_(average)
            average.copy_(before)
