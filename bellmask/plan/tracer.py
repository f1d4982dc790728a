"""One microbatch and one update of a run, traced on tensors that have no memory.

The real code runs: the network's forward and backward pass, autocast, recomputation, optimizer.
The head's loss is our chunked kernel: inside others' nothing can be seen, and they do as much.

B batch, L block length, N scored rows.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from bellmask.config.config import RunConfig
from bellmask.model.head import using_loss_kernel
from bellmask.plan.network import Planned, holding, shallow
from bellmask.storage.build import build_objective
from bellmask.train.optim import Ema, Optimizer
from bellmask.train.parallel import recompute_blocks
from bellmask.utils.distributed import CPU, autocast

# Every operation of a piece of code: floating-point operations, bytes moved, bytes alive
#
# Works on real tensors and on those that have shapes only.

_NO_KERNEL = frozenset(
    "empty empty_like empty_strided new_empty new_empty_strided _unsafe_view detach "
    "lift_fresh _local_scalar_dense sym_size is_same_size".split()
)
_BY_INDEX = frozenset(["embedding", "index_select", "gather"])
"""Read as much as they write, not the whole table."""


@dataclass(frozen=True)
class TracedKernel:
    """One operation on the device."""

    name: str
    flops: int
    """Of matrix products; elementwise work is counted as bytes."""
    num_bytes: int
    """Read and written."""
    is_backward: bool = False


@dataclass
class OpTrace:
    """What happened."""

    kernels: Counter[TracedKernel] = field(default_factory=Counter)
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

    def with_more_blocks(self, one_more: OpTrace, number: int) -> OpTrace:
        """This trace with ``number`` further blocks, each what ``one_more`` has over it."""
        block = Counter(one_more.kernels)
        block.subtract(self.kernels)
        assert min(block.values()) >= 0, "blocks differ"
        kernels = self.kernels + Counter({k: n * number for k, n in block.items()})
        return OpTrace(
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
        self.trace = OpTrace()
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
        self.trace.kernels[TracedKernel(name, flops, size, self.is_backward)] += 1
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


# The passes of a microbatch, and the update

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
NUM_LEVELS = 1 << 14
"""Points at which the mean mask rate of a law is summed."""


def masked_share(config: RunConfig) -> float:
    """E[1 - alpha(t)] under the times that are drawn; 1 for causal frameworks."""
    if config.framework.name != "mdm":
        return 1.0
    objective = build_objective(config)
    levels = (torch.arange(NUM_LEVELS, dtype=torch.float64) + 0.5) / NUM_LEVELS
    return float((1 - objective.schedule.alpha(objective.times(levels))).mean())


def scored_rows(config: RunConfig, batch_size: int, first_maskable: int) -> int:
    """N of a microbatch, rounded: only these rows meet the head and the last block's MLP."""
    length = config.data.block_length - first_maskable
    return max(1, round(masked_share(config) * batch_size * length))


def inputs(
    config: RunConfig, batch_size: int, num_rows: int, *, is_weighted: bool
) -> dict[str, Any]:
    """Arguments of a training call, of the right shapes."""
    length = config.data.block_length
    given: dict[str, Any] = {
        "x_BL": torch.zeros(batch_size, length, dtype=torch.long),
        "rows_N": torch.zeros(num_rows, dtype=torch.long) + 1,
        "targets_N": torch.zeros(num_rows, dtype=torch.long),
        "weight_N": None,
        "mask": _mask(config, batch_size, length),
    }
    if is_weighted:
        given["weight_N"] = torch.ones(num_rows)
    if config.framework.name == "mdm":
        given["t_B"] = torch.full((batch_size,), 0.5)
    elif config.model.backbone == "dit":
        shape = (batch_size, length) if config.framework.name == "aoarm" else (length,)
        given["positions"] = torch.zeros(shape, dtype=torch.long)
        given["target_positions"] = torch.zeros(shape, dtype=torch.long)
    return given


def _mask(config: RunConfig, batch_size: int, length: int) -> Tensor | None:
    """Where rows are padded or hold several documents that may not see one another."""
    if config.framework.name != "mdm":
        return None
    if config.data.document_attention:
        return torch.ones(batch_size, 1, length, length, dtype=torch.bool)
    is_padded = config.data.packing == "unpacked" or config.sft.train is not None
    if is_padded and config.data.pads == "ignored":
        return torch.ones(batch_size, 1, 1, length, dtype=torch.bool)
    return None


TRACED_BLOCKS = 2
"""All blocks do the same (but the last one, which leaves rows out): a few are traced."""


def trace_microbatch(
    planned: Planned,
    batch_size: int,
    precision: str,
    *,
    is_sharded: bool = False,
    is_training: bool = True,
) -> OpTrace:
    """A forward and a backward pass, with gradients that are there already; or evaluation's pass.

    ``is_sharded``: weights come gathered in the type of the products, as FSDP2 gives them.
    """
    config, network = planned.config, planned.network
    rows = scored_rows(config, batch_size, network.first_maskable)
    is_weighted = not build_objective(config).is_unweighted
    dtype = DTYPES[precision]

    def trace() -> OpTrace:
        gathered = dtype if is_sharded else torch.float32
        with planned.mode, holding(network, gathered), using_loss_kernel("chunked"):
            given = inputs(config, batch_size, rows, is_weighted=is_weighted)
            return (trace_call if is_training else trace_evaluation)(network, given, dtype)

    depth = len(network.block_modules())
    if depth <= TRACED_BLOCKS + 1:
        return trace()
    with shallow(network, TRACED_BLOCKS):
        fewer = trace()
    with shallow(network, TRACED_BLOCKS + 1):
        one_more = trace()
    return fewer.with_more_blocks(one_more, depth - TRACED_BLOCKS)


def trace_evaluation(network: Any, given: dict[str, Any], dtype: torch.dtype) -> OpTrace:
    """The forward pass alone, without gradients."""
    known = [*network.parameters(), *network.buffers(), *tensors_of(given)]
    given = {name: value for name, value in given.items() if name != "weight_N"}
    with torch.no_grad(), Tracer(known) as tracer, autocast(CPU, dtype):
        network(**given, reduce=False)
    return tracer.trace


def trace_call(network: Any, given: dict[str, Any], dtype: torch.dtype) -> OpTrace:
    """The passes of a call, with tensors of any kind."""
    trained = [p for p in network.parameters() if p.requires_grad]
    for parameter in trained:
        parameter.grad = torch.empty_like(parameter)
    gradients = [p.grad for p in trained if p.grad is not None]
    known = [*network.parameters(), *network.buffers(), *gradients, *tensors_of(given)]
    with Tracer(known) as tracer:
        with autocast(CPU, dtype):
            loss = network(**given)
        tracer.begin_backward()
        loss.backward()
    for parameter in trained:
        parameter.grad = None
    return tracer.trace


def prepare_tracing(planned: Planned, recompute: str) -> None:
    """Dropout as GPUs draw it (a CPU's generator gives numbers, and here are none), recomputation
    as the options say.
    """
    network = planned.network
    rate = planned.config.model.dropout
    if not planned.is_causal_lm and rate:

        def draw(shape: Any, like: Tensor) -> list[Tensor | None]:
            return [torch.rand(tuple(shape), device=like.device) >= rate for _ in range(2)]

        network._draw_kept = draw  # type: ignore[method-assign, assignment]
    if planned.is_causal_lm:
        _fuse_attention_dropout(network)
    recompute_blocks(network.block_modules(), recompute)


def _fuse_attention_dropout(network: nn.Module) -> None:
    """Fused attention keeps nothing for its dropout; without this it would be traced unfused."""
    for part in network.modules():
        for name in ("attn_dropout", "attention_dropout"):
            found = getattr(part, name, None)
            if isinstance(found, nn.Dropout):
                found.p = 0.0
            elif isinstance(found, float):
                setattr(part, name, 0.0)


@dataclass(frozen=True)
class Update:
    """One optimizer step, with the moving average."""

    kernels: Counter[TracedKernel]
    optimizer_bytes: int
    average_bytes: int
    num_tensors: int
    """In a checkpoint: weights, optimizer state, average."""


def trace_update(planned: Planned) -> Update:
    """Norm, clipping, optimizer and average."""
    config, network = planned.config, planned.network
    with planned.mode:
        optimizer = Optimizer(network, config.optim)
        state = optimizer.tensors()
        average = Ema(network, config.optim.ema) if config.optim.ema else None
        trained = [p for p in network.parameters() if p.requires_grad]
        for parameter in trained:
            parameter.grad = torch.empty_like(parameter)
        with Tracer(network.parameters()) as tracer:
            norm = nn.utils.get_total_norm([p.grad for p in trained if p.grad is not None])
            if config.optim.clip:
                nn.utils.clip_grads_with_norm_(trained, config.optim.clip, norm)
            optimizer.step(config.optim.lr)
            if average is not None:
                average.update(1)
        optimizer.zero_grad()
        shadow = [] if average is None else list(average.shadow.values())
    size = sum(t.numel() * t.element_size() for t in state.values())
    held = sum(t.numel() * t.element_size() for t in shadow)
    tensors = len(list(network.parameters())) + len(state) + len(shadow)
    return Update(tracer.trace.kernels, size, held, tensors)
