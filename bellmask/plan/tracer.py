"""Every operation of a piece of code: floating-point operations, bytes moved, bytes alive.

Works on real tensors and on those that have shapes only.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

_NO_KERNEL = frozenset(
    "empty empty_like empty_strided new_empty new_empty_strided _unsafe_view detach "
    "lift_fresh _local_scalar_dense sym_size is_same_size".split()
)
_BY_INDEX = frozenset(["embedding", "index_select", "gather"])
"""Read as much as they write, not the whole table."""


@dataclass(frozen=True)
class Kernel:
    """One operation on the device."""

    name: str
    flops: int
    """Of matrix products; elementwise work is counted as bytes."""
    num_bytes: int
    """Read and written."""
    is_backward: bool = False


@dataclass
class Trace:
    """What happened."""

    kernels: Counter[Kernel] = field(default_factory=Counter)
    kept: int = 0
    """Bytes alive between the forward and the backward pass, weights and gradients aside."""
    peak: int = 0
    """Most bytes alive at any moment, weights and gradients aside."""

    @property
    def flops(self) -> int:
        """Of all matrix products."""
        return sum(kernel.flops * number for kernel, number in self.kernels.items())

    @property
    def forward_flops(self) -> int:
        """Those before the backward pass began; the head's gradients are formed there too."""
        return sum(k.flops * number for k, number in self.kernels.items() if not k.is_backward)

    @property
    def num_bytes(self) -> int:
        """Moved by all kernels."""
        return sum(kernel.num_bytes * number for kernel, number in self.kernels.items())

    def with_more_blocks(self, one_more: Trace, number: int) -> Trace:
        """This trace with ``number`` further blocks, each what ``one_more`` has over it."""
        block = Counter(one_more.kernels)
        block.subtract(self.kernels)
        assert min(block.values()) >= 0, "blocks differ"
        kernels = self.kernels + Counter({k: n * number for k, n in block.items()})
        return Trace(
            kernels,
            self.kept + number * (one_more.kept - self.kept),
            self.peak + number * (one_more.peak - self.peak),
        )


def _attention_flops(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> int:
    return sdpa_flop_count(query.shape, key.shape, value.shape)


def _attention_backward_flops(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any
) -> int:
    return sdpa_backward_flop_count(grad.shape, query.shape, key.shape, value.shape)


def _product_flops(total: Tensor, left: Tensor, right: Tensor, *_: Any, **__: Any) -> int:
    return 2 * left.shape[0] * left.shape[1] * right.shape[1]


_OWN_RULES: dict[str, Callable[..., int]] = {
    "_scaled_dot_product_flash_attention_for_cpu": _attention_flops,
    "_scaled_dot_product_flash_attention_for_cpu_backward": _attention_backward_flops,
    "addmm_": _product_flops,
}
"""torch's counter knows attention by the kernels of GPUs only, and no product in place."""


class Tracer(TorchDispatchMode):
    """Notes every operation while it is on; memory of ``known`` tensors is not counted."""

    def __init__(self, known: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.trace = Trace()
        self.is_backward = False
        self._alive = 0
        self._known = {tensor.untyped_storage()._cdata for tensor in known}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation and note it."""
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        name = func._overloadpacket.__name__
        if name == "device":
            return out
        if name in _NO_KERNEL or func.is_view:
            if name.startswith(("empty", "new_empty")):
                self._look(out)
            return out
        self._look(out)
        flops = self._flops(func, name, args, kwargs, out)
        size = _bytes_of(out) * 2 if name in _BY_INDEX else _bytes_of((args, kwargs, out))
        self.trace.kernels[Kernel(name, flops, size, self.is_backward)] += 1
        return out

    @staticmethod
    def _flops(func: Any, name: str, args: Any, kwargs: Any, out: Any) -> int:
        if name in _OWN_RULES:
            return _OWN_RULES[name](*args, **kwargs)
        rule = flop_registry.get(func._overloadpacket)
        return 0 if rule is None else int(rule(*args, **kwargs, out_val=out))

    def _look(self, out: Any) -> None:
        """Count memory that is new, until it goes."""
        for tensor in tensors_of(out):
            storage = tensor.untyped_storage()
            key, size = storage._cdata, storage.nbytes()
            if key in self._known:
                continue
            self._known.add(key)
            self._alive += size
            self.trace.peak = max(self.trace.peak, self._alive)
            weakref.finalize(storage, self._forget, key, size)

    def _forget(self, key: int, size: int) -> None:
        self._known.discard(key)
        self._alive -= size

    def begin_backward(self) -> None:
        """What is alive now was kept for the backward pass."""
        self.trace.kept = self._alive
        self.is_backward = True


def tensors_of(tree: Any) -> list[Tensor]:
    """The tensors in a nest of lists and dicts."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _bytes_of(tree: Any) -> int:
    """Bytes that must be read or written; what is repeated by its strides counts once."""
    return sum(
        min(t.numel() * t.element_size(), t.untyped_storage().nbytes()) for t in tensors_of(tree)
    )
