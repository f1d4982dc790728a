"""The head and its loss kernels against plain cross-entropy in float64."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from bellmask.model import head as loss_kernels
from bellmask.model.head import pick_loss_kernel, predict
from bellmask.utils.errors import UserError

CPU, GPU = torch.device("cpu"), torch.device("cuda")
FULL, HALF = torch.float32, torch.bfloat16
SCALE = 0.3
"""What sums are multiplied with before their backward pass."""
each_kernel = pytest.mark.parametrize("name", ["chunked", "torch"])


def make(rows, width=8, vocabulary=11, dtype=FULL):
    g = torch.Generator().manual_seed(rows)
    h = torch.randn(rows, width, generator=g).to(dtype).requires_grad_()
    w = (torch.randn(vocabulary, width, generator=g) * 0.3).to(dtype).requires_grad_()
    b = torch.randn(vocabulary, generator=g).to(dtype).requires_grad_()
    return h, w, b, torch.randint(vocabulary, (rows,), generator=g)


def truth(h, w, b, y, weight=None):
    """The sum and its gradients by float64 autograd, from the very numbers the kernel is given."""
    parts = [part.detach().double().requires_grad_() for part in (h, w, b)]
    ce = F.cross_entropy(F.linear(*parts), y, reduction="none")
    loss = (ce if weight is None else ce * weight.double()).sum()
    return loss.item(), torch.autograd.grad(loss * SCALE, parts)


def is_close(found, expected, error):
    return bool((found.double() - expected).norm() <= error * expected.norm())


@each_kernel
@pytest.mark.parametrize("is_weighted", [False, True])
@pytest.mark.parametrize(("rows", "extra"), [(0, 0), (1, 0), (512, 0), (1300, 0), (1300, 5)])
def test_sums_and_gradients_equal_float64(rows, extra, is_weighted, name, monkeypatch):
    """Also with ``extra`` tokens that never occur, as on a GPU."""
    monkeypatch.setattr(loss_kernels, "_num_extra", lambda *_: extra)
    h, w, b, y = make(rows)
    weight = torch.linspace(0.2, 3, rows) if is_weighted else None
    expected, gradients = truth(h, w, b, y, weight)
    loss = predict(h, w, b, y, weight, kernel=name)
    found = torch.autograd.grad(loss * SCALE, (h, w, b), allow_unused=rows == 0)
    assert loss.item() == pytest.approx(expected, rel=2e-6)
    for a, e in zip(found, gradients, strict=True):
        assert is_close(torch.zeros_like(e) if a is None else a, e, 2e-6)
    each = predict(h, w, b, y, reduce=False)
    assert (each.shape, each.dtype) == ((rows,), FULL)
    assert float((each if weight is None else each * weight).sum()) == pytest.approx(expected, 1e-5)


class Largest(TorchDispatchMode):
    """Remembers the most numbers in any tensor that was made."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for item in out if isinstance(out, tuple | list) else [out]:
            if isinstance(item, torch.Tensor):
                self.numel = max(self.numel, item.numel())
        return out


def test_what_is_compiled_is_the_same_function(monkeypatch):
    logits, y = torch.randn(50, 11), torch.arange(50) % 11
    given = y, torch.linspace(0.2, 3, 50), FULL
    expected = loss_kernels._row_errors(logits.clone(), *given)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    torch.testing.assert_close(loss_kernels._row_errors(logits, *given), expected)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's compiler of torch.jit
@pytest.mark.parametrize("is_weighted", [False, True])
def test_compiled_sums_and_gradients_equal_float64(is_weighted):
    """Whole chunks and the rest of one; no rows."""
    for rows in (1300, 512, 0):
        h, w, b, y = make(rows)
        weight = torch.linspace(0.2, 3, rows) if is_weighted else None
        expected, gradients = truth(h, w, b, y, weight)
        loss = predict(h, w, b, y, weight, kernel="compiled")
        found = torch.autograd.grad(loss * SCALE, (h, w, b))
        assert loss.item() == pytest.approx(expected, rel=1e-5)
        assert all(is_close(a, e, 1e-5) for a, e in zip(found, gradients))


@each_kernel
def test_logits_of_all_rows_never_exist(name):
    rows, vocabulary = 2048, 50
    h, w, b, y = make(rows, vocabulary=vocabulary)
    with Largest() as watch:
        predict(h, w, b, y, kernel=name).backward()
    assert watch.numel < rows * vocabulary / 2
    with Largest() as watch:
        F.cross_entropy(F.linear(h, w, b), y).backward()
    assert watch.numel >= rows * vocabulary, "the watch itself must be able to see them"


# bfloat16


@torch.no_grad()
def bfloat16_sums(h, w, b, y, chunk):
    """What the gradients of the head would be if bfloat16 numbers were added up."""
    grad_w, grad_b = torch.zeros_like(w), torch.zeros_like(b)
    for h_part, y_part in zip(h.split(chunk), y.split(chunk), strict=True):
        error = F.linear(h_part, w, b).float().softmax(1) - F.one_hot(y_part, len(b))
        grad_w += error.bfloat16().T @ h_part
        grad_b += error.sum(0).bfloat16()
    return grad_w * SCALE, grad_b * SCALE


@pytest.mark.parametrize(("is_weighted", "extra"), [(False, 0), (True, 0), (False, 5)])
def test_bfloat16_weights_have_gradients_summed_in_float32(is_weighted, extra, monkeypatch):
    """200 chunks: one rounding is 2^-9 of a number at most, 200 of them much more."""
    monkeypatch.setattr(loss_kernels, "_num_extra", lambda *_: extra)
    monkeypatch.setattr(loss_kernels, "CHUNK_ROWS", 16)
    h, w, b, y = make(3200, 16, 11, HALF)
    weight = torch.linspace(0.5, 2, len(h)) if is_weighted else None
    expected, (_, *right) = truth(h, w, b, y, weight)
    loss = predict(h, w, b, y, weight)
    found = torch.autograd.grad(loss * SCALE, (w, b))
    assert [x.dtype for x in (loss, *found)] == [FULL, HALF, HALF]
    assert loss.item() == pytest.approx(expected, rel=2e-4)  # logits are bfloat16
    assert all(is_close(a, e, 2**-8) for a, e in zip(found, right))
    if not is_weighted:
        worse = bfloat16_sums(h, w, b, y, 16)
        assert not any(is_close(a, e, 2 * 2**-8) for a, e in zip(worse, right))


@each_kernel
def test_float32_weights_under_autocast_keep_a_float32_sum_and_gradient(name):
    h, w, b, y = make(600, 16)
    expected, (_, right_w, _) = truth(h.bfloat16(), w.bfloat16(), b.bfloat16(), y)
    with torch.autocast("cpu", HALF):
        loss = predict(h, w, b, y, kernel=name)
    (grad_w,) = torch.autograd.grad(loss * SCALE, w)
    assert loss.dtype == grad_w.dtype == FULL
    assert loss.item() == pytest.approx(expected, rel=2e-4)
    assert (grad_w != grad_w.bfloat16()).any()
    assert is_close(grad_w, right_w, 2**-8)


def test_evaluation_and_sampling_keep_the_digits_of_logits_far_from_zero():
    """Those of GPT-2 are around -100, where bfloat16 has steps of 0.5."""
    h, w, b, y = make(600, 16)
    expected, _ = truth(h, w, b, y)
    with torch.autocast("cpu", HALF), torch.no_grad():
        found = predict(h, w, b - 100, y, reduce=False)
        drawn_from = predict(h, w, b - 100, lambda logits_NV: logits_NV)
        all_of_them = predict(h, w, b - 100)
        rounded = F.cross_entropy(F.linear(h, w, b - 100).float(), y, reduction="none")
    assert float(found.double().sum()) == pytest.approx(expected, rel=1e-5)
    assert float(rounded.sum()) != pytest.approx(expected, rel=1e-3)
    assert is_close(drawn_from, F.linear(h, w, b - 100), 1e-6)
    assert drawn_from.equal(all_of_them)


@pytest.mark.parametrize(("rows_type", "weights_type"), [(FULL, HALF), (HALF, FULL)])
def test_rows_and_weights_of_different_types(rows_type, weights_type):
    """A norm may leave float32 rows to bfloat16 weights; the weights decide."""
    h, w, b, y = make(40)
    h, w, b = h.to(rows_type), w.to(weights_type), b.to(weights_type)
    expected, _ = truth(h.to(weights_type), w, b, y)
    loss = predict(h, w, b, y)
    gradients = torch.autograd.grad(loss, (h, w, b))
    assert [g.dtype for g in gradients] == [rows_type, weights_type, weights_type]
    assert loss.item() == pytest.approx(expected, rel=1e-6 if weights_type == FULL else 2e-3)
    assert predict(h, w, b).dtype == FULL


# picking


def fake_liger(monkeypatch, function):
    """An installed liger-kernel with this function in it; None: not installed."""
    module = ModuleType("liger_kernel.transformers.functional")
    module.liger_fused_linear_cross_entropy = function
    for name in ("liger_kernel", "liger_kernel.transformers"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name) if function else None)
    monkeypatch.setitem(sys.modules, module.__name__, module if function else None)


LIGER = ["input", "weight", "target", "bias", "reduction", "accum_dtype"]
"""Parameters that liger-kernel 0.8.5 has among others; tests/gpu runs the real kernel."""


def new_enough(input, weight, target, bias, reduction, accum_dtype):
    raise AssertionError("this must not be called")


def too_old(input, weight, target, bias, reduction): ...


@pytest.mark.parametrize(
    ("option", "device", "precision", "function", "expected"),
    [
        ("auto", CPU, FULL, new_enough, "torch"),
        ("auto", CPU, HALF, new_enough, "chunked"),
        ("auto", GPU, FULL, None, "torch"),
        ("auto", GPU, HALF, too_old, "chunked"),
        ("auto", GPU, HALF, new_enough, "chunked"),
        ("liger", GPU, HALF, new_enough, "liger"),
        ("torch", GPU, FULL, new_enough, "torch"),
    ],
)
def test_picked(option, device, precision, function, expected, monkeypatch):
    fake_liger(monkeypatch, function)
    assert pick_loss_kernel(option, device, precision) == expected
    compiled = pick_loss_kernel(option, device, precision, is_compiled=True)
    assert compiled == ("compiled" if (option, device) == ("auto", GPU) else expected)


@pytest.mark.parametrize(
    ("option", "device", "precision", "function", "names"),
    [
        ("liger", CPU, FULL, new_enough, r"liger needs a GPU.*--scale\.loss"),
        ("torch", CPU, HALF, new_enough, r"bfloat16.*--train\.precision"),
        ("chunk", CPU, FULL, new_enough, "chunked"),
        ("liger", GPU, FULL, too_old, "accum_dtype"),
        ("liger", GPU, FULL, None, "pip install"),
    ],
)
def test_refused_with_what_to_change(option, device, precision, function, names, monkeypatch):
    fake_liger(monkeypatch, function)
    with pytest.raises(UserError, match=names):
        pick_loss_kernel(option, device, precision)


# liger


def test_liger_gets_what_it_needs(monkeypatch):
    calls = []

    def stand_in(*args, **options):
        one = SimpleNamespace(**dict(zip(LIGER, args)), **options)
        calls.append(one)
        logits = F.linear(one.input, one.weight.to(one.input), one.bias)
        return F.cross_entropy(logits.float(), one.target, reduction="sum")

    fake_liger(monkeypatch, stand_in)
    h, w, b, y = make(20)
    loss = predict(h, w, b, y, kernel="liger")
    with torch.autocast("cpu", HALF):
        predict(h, w, b, y, kernel="liger")
    assert loss.item() == pytest.approx(truth(h, w, b, y)[0], rel=1e-6)
    types = [(c.input.dtype, c.weight.dtype, c.bias.dtype) for c in calls]
    assert types == [(FULL, FULL, FULL), (HALF, FULL, HALF)]
    for call in calls:
        assert vars(call).keys() == set(LIGER)
        assert (call.reduction, call.accum_dtype) == ("sum", FULL)
        assert call.target is y


def test_liger_is_not_asked_what_it_cannot_do(monkeypatch):
    """Row weights, no rows, rows that need no gradient (it would form none of the head either)."""
    fake_liger(monkeypatch, new_enough)
    h, w, b, y = make(20)
    weight = torch.rand(20)
    weighted = predict(h, w, b, y, weight, kernel="liger")
    frozen = predict(h.detach(), w, b, y, kernel="liger")
    assert weighted.item() == pytest.approx(truth(h, w, b, y, weight)[0], rel=1e-6)
    assert predict(h[:0], w, b, y[:0], kernel="liger").item() == 0
    (grad_w,) = torch.autograd.grad(frozen * SCALE, w)
    assert is_close(grad_w, truth(h, w, b, y)[1][1], 1e-6)
