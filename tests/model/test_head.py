from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from bellmask.model import head
from bellmask.model.head import cross_entropy_rows, cross_entropy_sum


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
