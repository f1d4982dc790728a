from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

from bellmask.model import head
from bellmask.model.head import cross_entropy_rows, cross_entropy_sum, predict
from bellmask.model.loss_kernels import using_loss_kernel


def make(rows: int, width: int = 8, vocabulary: int = 11) -> tuple[torch.Tensor, ...]:
    g = torch.Generator().manual_seed(rows)
    h = torch.randn(rows, width, generator=g).requires_grad_()
    w = torch.randn(vocabulary, width, generator=g).requires_grad_()
    b = torch.randn(vocabulary, generator=g).requires_grad_()
    y = torch.randint(vocabulary, (rows,), generator=g)
    return h, w, b, y, torch.rand(rows, generator=g) * 3


@pytest.mark.parametrize("rows", [1, 7, 512, 513, 1300])
@pytest.mark.parametrize("is_weighted", [False, True])
def test_sum_and_gradients_equal_plain_cross_entropy(rows: int, is_weighted: bool) -> None:
    h, w, b, y, weight = make(rows)
    plain = (F.cross_entropy(F.linear(h, w, b), y, reduction="none") * weight).sum()
    if not is_weighted:
        plain = F.cross_entropy(F.linear(h, w, b), y, reduction="sum")
    expected = torch.autograd.grad(plain * 0.3, (h, w, b))
    ours = cross_entropy_sum(h, w, b, y, weight if is_weighted else None)
    found = torch.autograd.grad(ours * 0.3, (h, w, b))
    torch.testing.assert_close(ours, plain, rtol=1e-6, atol=1e-5)
    for a, e in zip(found, expected, strict=True):
        torch.testing.assert_close(a, e, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("is_weighted", [False, True])
def test_no_rows_give_zero_and_a_working_backward(is_weighted: bool) -> None:
    h, w, b, y, weight = make(3)
    empty = h[:0], w, b, y[:0], weight[:0] if is_weighted else None
    loss = cross_entropy_sum(*empty)
    loss.backward()
    assert loss.item() == 0
    assert w.grad is None or not w.grad.any()


def test_rows_equal_plain_cross_entropy_across_chunks() -> None:
    h, w, b, y, _ = make(1300)
    expected = F.cross_entropy(F.linear(h, w, b), y, reduction="none")
    torch.testing.assert_close(cross_entropy_rows(h, w, b, y), expected, rtol=1e-6, atol=1e-6)
    assert cross_entropy_rows(h[:0], w, b, y[:0]).shape == (0,)


def test_a_bfloat16_sum_keeps_float32_digits() -> None:
    """Products in bfloat16, sums in float32: 600 rows would lose three digits otherwise."""
    h, w, b, y, _ = make(600)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours = cross_entropy_sum(h, w, b, y)
    ours.backward()
    logits = F.linear(h.bfloat16(), w.bfloat16(), b.bfloat16()).double()
    expected = F.cross_entropy(logits, y, reduction="sum")
    assert ours.dtype == torch.float32
    assert abs(ours.item() / expected.item() - 1) < 1e-5
    plain = F.cross_entropy(F.linear(h, w, b), y, reduction="sum")
    (full,) = torch.autograd.grad(plain, w)
    assert w.grad is not None
    assert F.cosine_similarity(w.grad.flatten(), full.flatten(), dim=0) > 0.999


class Largest(TorchDispatchMode):
    """Remembers the most numbers in any tensor that was made."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        for item in out if isinstance(out, tuple | list) else [out]:
            if isinstance(item, torch.Tensor):
                self.numel = max(self.numel, item.numel())
        return out


@pytest.mark.parametrize("is_weighted", [False, True])
def test_logits_of_all_rows_never_exist(is_weighted: bool) -> None:
    rows, vocabulary = 4 * head.CHUNK_ROWS, 50
    h, w, b, y, weight = make(rows, vocabulary=vocabulary)
    with Largest() as watch:
        cross_entropy_sum(h, w, b, y, weight if is_weighted else None).backward()
    assert watch.numel < rows * vocabulary / 2
    with Largest() as watch:
        F.cross_entropy(F.linear(h, w, b), y).backward()
    assert watch.numel >= rows * vocabulary, "the watch itself must be able to see them"


def float64_sum(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(h.double(), w.double(), b.double()), y, reduction="sum")


class Root(nn.Module):
    """The smallest model whose forward pass ends in the head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.body, self.head = nn.Linear(8, 16), nn.Linear(16, 11)

    def forward(self, x_ND: Tensor, y_N: Tensor) -> Tensor:
        return predict(self.body(x_ND), self.head.weight, self.head.bias, y_N)


@pytest.fixture
def one_process() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("name", ["chunked", "torch"])
@pytest.mark.parametrize("is_autocast", [False, True])
def test_bfloat16_weights_in_a_sharded_root(
    name: str, is_autocast: bool, one_process: None
) -> None:
    g = torch.Generator().manual_seed(5)
    x, y = torch.randn(700, 8, generator=g), torch.randint(11, (700,), generator=g)
    plain = Root().bfloat16()
    h = plain.body(x.bfloat16())
    expected = float64_sum(h, plain.head.weight, plain.head.bias, y)
    right_w, right_b = torch.autograd.grad(expected * 0.3, (plain.head.weight, plain.head.bias))
    root = Root()
    policy = MixedPrecisionPolicy(
        torch.bfloat16, torch.float32, cast_forward_inputs=not is_autocast
    )
    mesh = dist.init_device_mesh("cpu", (1,))
    fully_shard(root, mesh=mesh, mp_policy=policy)
    with torch.autocast("cpu", torch.bfloat16, enabled=is_autocast), using_loss_kernel(name):
        loss = root(x, y)
    (loss * 0.3).backward()
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(expected.item(), rel=2e-4)
    for parameter, right in ((root.head.weight, right_w), (root.head.bias, right_b)):
        gradient = parameter.grad.full_tensor()  # type: ignore[union-attr]
        assert gradient.dtype == torch.float32
        error = (gradient - right.float()).norm() / right.float().norm()
        assert error.item() < 2**-7  # both were rounded to bfloat16 once


@pytest.mark.parametrize("rows_type", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("weights_type", [torch.float32, torch.bfloat16])
def test_rows_and_weights_of_different_types(
    rows_type: torch.dtype, weights_type: torch.dtype
) -> None:
    """A norm may leave float32 rows to bfloat16 weights; the weights decide."""
    h, w, b, y, _ = make(40)
    h, w, b = h.to(rows_type), w.to(weights_type), b.to(weights_type)
    expected = float64_sum(h.to(weights_type), w, b, y)
    loss = cross_entropy_sum(h, w, b, y)
    gradients = torch.autograd.grad(loss, (h, w, b))
    assert [g.dtype for g in gradients] == [rows_type, weights_type, weights_type]
    assert loss.item() == pytest.approx(
        expected.item(), rel=1e-6 if weights_type == torch.float32 else 2e-3
    )
    assert predict(h, w, b).dtype == weights_type
