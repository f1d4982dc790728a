from __future__ import annotations

import importlib.util
import inspect
import json
import os
import subprocess
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from bellmask.errors import UserError
from bellmask.model import loss_kernels
from bellmask.model.head import cross_entropy_sum
from bellmask.model.loss_kernels import KERNELS, current_kernel, pick_loss_kernel, using_loss_kernel

CPU, GPU = torch.device("cpu"), torch.device("cuda")
SCALE = 0.3
"""What sums are multiplied with before their backward pass."""


def make(rows: int, width: int, vocabulary: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    g = torch.Generator().manual_seed(rows)
    h = torch.randn(rows, width, generator=g).to(dtype).requires_grad_()
    w = (torch.randn(vocabulary, width, generator=g) * 0.3).to(dtype).requires_grad_()
    b = torch.randn(vocabulary, generator=g).to(dtype).requires_grad_()
    return h, w, b, torch.randint(vocabulary, (rows,), generator=g)


def truth(
    h: Tensor, w: Tensor, b: Tensor, y: Tensor, weight: Tensor | None = None
) -> tuple[float, tuple[Tensor, ...]]:
    """The sum and its gradients by float64 autograd, from the very numbers the kernel is given."""
    parts = [part.detach().double().requires_grad_() for part in (h, w, b)]
    ce = F.cross_entropy(F.linear(*parts), y, reduction="none")
    loss = (ce if weight is None else ce * weight.double()).sum()
    return loss.item(), torch.autograd.grad(loss * SCALE, parts)


def distance(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("name", ["chunked", "torch"])
@pytest.mark.parametrize("rows", [1, 7, 1300])
def test_every_kernel_equals_float64(name: str, rows: int) -> None:
    h, w, b, y = make(rows, 8, 11, torch.float32)
    expected, gradients = truth(h, w, b, y)
    with using_loss_kernel(name):
        loss = cross_entropy_sum(h, w, b, y)
    found = torch.autograd.grad(loss * SCALE, (h, w, b))
    assert loss.item() == pytest.approx(expected, rel=2e-6)
    for a, e in zip(found, gradients, strict=True):
        assert distance(a, e) < 2e-6


@torch.no_grad()
def bfloat16_sums(h: Tensor, w: Tensor, b: Tensor, y: Tensor, chunk: int) -> tuple[Tensor, Tensor]:
    """What the gradients of the head would be if bfloat16 numbers were added up."""
    grad_w, grad_b = torch.zeros_like(w), torch.zeros_like(b)
    for h_part, y_part in zip(h.split(chunk), y.split(chunk), strict=True):
        error = F.linear(h_part, w, b).float().softmax(1) - F.one_hot(y_part, len(b))
        grad_w += error.bfloat16().T @ h_part
        grad_b += error.sum(0).bfloat16()
    return grad_w * SCALE, grad_b * SCALE


@pytest.mark.parametrize("name", ["chunked", "torch"])
@pytest.mark.parametrize("is_weighted", [False, True])
def test_bfloat16_weights_have_gradients_summed_in_float32(
    name: str, is_weighted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """200 chunks: one rounding is 2^-9 of a number at most, 200 of them much more."""
    monkeypatch.setattr(loss_kernels, "CHUNK_ROWS", 16)
    h, w, b, y = make(3200, 16, 11, torch.bfloat16)
    weight = torch.linspace(0.5, 2, len(h)) if is_weighted else None
    expected, (_, right_w, right_b) = truth(h, w, b, y, weight)
    with using_loss_kernel(name):
        loss = cross_entropy_sum(h, w, b, y, weight)
    grad_w, grad_b = torch.autograd.grad(loss * SCALE, (w, b))
    assert [x.dtype for x in (loss, grad_w, grad_b)] == [torch.float32] + 2 * [torch.bfloat16]
    assert loss.item() == pytest.approx(expected, rel=2e-4)  # logits are bfloat16
    assert distance(grad_w, right_w) < 2**-8
    assert distance(grad_b, right_b) < 2**-8
    if not is_weighted:
        worse_w, worse_b = bfloat16_sums(h, w, b, y, 16)
        assert distance(worse_w, right_w) > 2 * 2**-8
        assert distance(worse_b, right_b) > 2 * 2**-8


def test_float32_weights_under_autocast_keep_a_float32_gradient() -> None:
    h, w, b, y = make(600, 16, 11, torch.float32)
    _, (_, right_w, _) = truth(h.bfloat16(), w.bfloat16(), b.bfloat16(), y)
    with torch.autocast("cpu", torch.bfloat16), using_loss_kernel("torch"):
        loss = cross_entropy_sum(h, w, b, y)
    (grad_w,) = torch.autograd.grad(loss * SCALE, w)
    assert loss.dtype == grad_w.dtype == torch.float32
    assert (grad_w != grad_w.bfloat16()).any()
    assert distance(grad_w, right_w) < 2**-8


# picking


def fake_liger(monkeypatch: pytest.MonkeyPatch, function: Any) -> None:
    """An installed liger-kernel with this function in it."""
    for name in ("liger_kernel", "liger_kernel.transformers"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    module = ModuleType("liger_kernel.transformers.functional")
    module.liger_fused_linear_cross_entropy = function  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)


def no_liger(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "liger_kernel", None)
    for name in ("liger_kernel.transformers", "liger_kernel.transformers.functional"):
        monkeypatch.delitem(sys.modules, name, raising=False)


def liger_signature(  # as in liger-kernel 0.8.5; the last test checks it where that is installed
    input: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    ce_weight: Tensor | None = None,
    ignore_index: int = -100,
    lse_square_scale: float = 0.0,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
    softcap: float | None = None,
    return_z_loss: bool = False,
    accum_dtype: torch.dtype | None = None,
    use_token_scaling: bool = False,
    return_token_accuracy: bool = False,
    return_predicted_tokens: bool = False,
    chunk_mem_const: int = 1,
) -> Tensor:
    raise AssertionError("this must not be called")


@pytest.mark.parametrize(
    ("option", "device", "precision", "is_installed", "expected"),
    [
        ("auto", CPU, torch.float32, True, "torch"),
        ("auto", CPU, torch.bfloat16, True, "chunked"),
        ("auto", GPU, torch.float32, False, "torch"),
        ("auto", GPU, torch.bfloat16, False, "chunked"),
        ("auto", GPU, torch.float32, True, "liger"),
        ("auto", GPU, torch.bfloat16, True, "liger"),
        ("liger", GPU, torch.bfloat16, True, "liger"),
        ("chunked", GPU, torch.bfloat16, True, "chunked"),
        ("chunked", CPU, torch.float32, True, "chunked"),
        ("torch", GPU, torch.float32, True, "torch"),
    ],
)
def test_picked(
    option: str,
    device: torch.device,
    precision: torch.dtype,
    is_installed: bool,
    expected: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake_liger(monkeypatch, liger_signature) if is_installed else no_liger(monkeypatch)
    assert pick_loss_kernel(option, device, precision) == expected


def test_refused_with_what_to_change(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_liger(monkeypatch, liger_signature)
    with pytest.raises(UserError, match=r"needs a GPU, and the device is cpu.*--scale\.loss auto"):
        pick_loss_kernel("liger", CPU, torch.float32)
    with pytest.raises(UserError, match=r"here bfloat16.*--train\.precision float32"):
        pick_loss_kernel("torch", CPU, torch.bfloat16)
    with pytest.raises(UserError, match="did you mean 'chunked'"):
        pick_loss_kernel("chunk", CPU, torch.float32)
    fake_liger(monkeypatch, lambda input, weight, target, bias, reduction: None)
    with pytest.raises(UserError, match="too old: it has no accum_dtype"):
        pick_loss_kernel("liger", GPU, torch.float32)
    assert pick_loss_kernel("auto", GPU, torch.bfloat16) == "chunked"
    no_liger(monkeypatch)
    with pytest.raises(UserError, match=r"cannot be imported.*pip install -U 'bellmask\[cuda\]'"):
        pick_loss_kernel("liger", GPU, torch.float32)


def test_a_choice_ends_with_its_block() -> None:
    assert current_kernel() is KERNELS["torch"]
    with using_loss_kernel("chunked"):
        with using_loss_kernel("liger"):
            assert current_kernel() is KERNELS["liger"]
        assert current_kernel() is KERNELS["chunked"]
    assert current_kernel() is KERNELS["torch"]
    with pytest.raises(RuntimeError, match="stopped"), using_loss_kernel("chunked"):
        raise RuntimeError("stopped")
    assert current_kernel() is KERNELS["torch"]
    with pytest.raises(UserError, match="unknown loss kernel 'auto'"), using_loss_kernel("auto"):
        pass


# liger


def test_liger_gets_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def stand_in(*args: Any, **options: Any) -> Tensor:
        call = inspect.signature(liger_signature).bind(*args, **options)
        call.apply_defaults()
        calls.append(SimpleNamespace(**call.arguments))
        one = calls[-1]
        logits = F.linear(one.input, one.weight.to(one.input), one.bias)
        return F.cross_entropy(logits.float(), one.target, reduction="sum")

    fake_liger(monkeypatch, stand_in)
    h, w, b, y = make(20, 8, 11, torch.float32)
    with using_loss_kernel("liger"):
        loss = cross_entropy_sum(h, w, b, y)
        with torch.autocast("cpu", torch.bfloat16):
            cross_entropy_sum(h, w, b, y)
        cross_entropy_sum(h.bfloat16(), w.bfloat16(), b.bfloat16(), y)
    assert loss.item() == pytest.approx(truth(h, w, b, y)[0], rel=1e-6)
    types = [(c.input.dtype, c.weight.dtype, c.bias.dtype) for c in calls]
    f, half = torch.float32, torch.bfloat16
    assert types == [(f, f, f), (half, f, half), (half, half, half)]
    for call in calls:
        assert (call.reduction, call.accum_dtype) == ("sum", torch.float32)
        assert call.label_smoothing == call.lse_square_scale == 0
        assert call.softcap is None
        assert call.target is y


def test_liger_is_not_asked_what_it_cannot_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Row weights, no rows, rows that need no gradient (it would form none of the head either)."""
    fake_liger(monkeypatch, liger_signature)
    h, w, b, y = make(20, 8, 11, torch.float32)
    weight = torch.rand(20)
    with using_loss_kernel("liger"):
        weighted = cross_entropy_sum(h, w, b, y, weight)
        empty = cross_entropy_sum(h[:0], w, b, y[:0])
        frozen = cross_entropy_sum(h.detach(), w, b, y)
    assert weighted.item() == pytest.approx(truth(h, w, b, y, weight)[0], rel=1e-6)
    empty.backward()
    assert empty.item() == 0
    (grad_w,) = torch.autograd.grad(frozen * SCALE, w)
    assert distance(grad_w, truth(h, w, b, y)[1][1]) < 1e-6


CASES = [(1, 8, 11), (7, 8, 11), (130, 24, 101)]
"""Rows, width, vocabulary; the third has 5 chunks, the last of 2 rows."""
BOUNDS = {"float32": (1e-6, 2e-6), "bfloat16": (5e-3, 1e-2), "autocast": (5e-3, 1e-2)}
"""Of the sum and of gradients, relative to float64; bfloat16 logits alone are 2^-9 away."""


def measure(kind: str, rows: int, width: int, vocabulary: int) -> dict[str, Any]:
    """Sums and gradients by liger and by our kernel, against float64."""
    dtype = torch.bfloat16 if kind == "bfloat16" else torch.float32
    h, w, b, y = make(rows, width, vocabulary, dtype)
    before = [part.detach().clone() for part in (h, w, b)]
    expected, right = truth(h, w, b, y)
    result: dict[str, Any] = {"kind": kind, "rows": rows}
    for name in ("liger", "chunked"):
        autocast = torch.autocast("cpu", torch.bfloat16, enabled=kind == "autocast")
        with autocast, using_loss_kernel(name):
            loss = cross_entropy_sum(h, w, b, y)
        found = torch.autograd.grad(loss * SCALE, (h, w, b))
        assert loss.dtype == torch.float32
        assert [g.dtype for g in found] == [dtype] * 3
        assert all(torch.equal(a, e) for a, e in zip((h, w, b), before, strict=True))
        distances = [distance(a, e) for a, e in zip(found, right, strict=True)]
        result[name] = [abs(loss.item() / expected - 1), *distances]
    return result


def test_liger_in_tritons_interpreter() -> None:
    """The real kernels, run number by number on the CPU."""
    for package in ("liger_kernel", "triton"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed (pip install 'bellmask[cuda]')")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    answer = subprocess.run(
        [sys.executable, __file__], env=environment, capture_output=True, text=True, timeout=300
    )
    assert answer.returncode == 0, answer.stderr
    told = json.loads(answer.stdout)
    assert told["parameters"] == list(inspect.signature(liger_signature).parameters)
    assert len(told["results"]) == len(CASES) * len(BOUNDS)
    for result in told["results"]:
        for_sum, for_gradients = BOUNDS[result["kind"]]
        assert result["liger"][0] < for_sum, result
        assert max(result["liger"][1:]) < for_gradients, result


if __name__ == "__main__":
    parameters = list(inspect.signature(loss_kernels._import_liger()).parameters)
    results = [measure(kind, *case) for kind in BOUNDS for case in CASES]
    print(json.dumps({"parameters": parameters, "results": results}))
