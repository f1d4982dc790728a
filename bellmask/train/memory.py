"""The memory that a run will need, by a trace of one microbatch and one update of its network.

Tensors have shapes and no memory, and the real code runs on them: the network's forward and
backward pass, autocast, recomputation, optimizer. So the planner has no formulas per architecture.
Nothing is downloaded: causal LMs come from a local folder, or from the table here. The head's loss
is the chunked kernel, because other kernels are opaque; they do the same work.

B batch, L block length, N scored rows.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from bellmask.config.config import RunConfig
from bellmask.config.options import ModelOptions, OptimOptions
from bellmask.config.presets import PRESETS, preset
from bellmask.data.readers import cache_folder
from bellmask.data.tokenizers import VOCABULARIES, Tokenizer, bpe_size, load_tokenizer
from bellmask.model import pretrained
from bellmask.model.causal_lm import ARCHITECTURES, read_architecture
from bellmask.model.head import CHUNK_ROWS
from bellmask.storage.build import Network, build_model, build_objective
from bellmask.storage.checkpoint import saves_in_background
from bellmask.train.parallel import Layout, pick_layout, recompute_blocks
from bellmask.train.planning import is_automatic, microbatch_sizes, split_batch
from bellmask.train.setup import Start, check_length, open_start
from bellmask.train.trainer import TrainState
from bellmask.utils.distributed import CPU, World, autocast, device_memory, pick_precision
from bellmask.utils.errors import UserError
from bellmask.utils.libraries import quiet

# The start of a run, without downloads


def plan_start(config: RunConfig) -> tuple[Start, int]:
    """The start of a training, and V; weights that are not available are only described."""
    name = config.start.model
    folder = Path(name or ".")
    if name is None or any((folder / file).exists() for file in ("run.json", "tokenizer.json")):
        start = open_start(config)
        if start.tokenizer is not None:
            return start, start.tokenizer.num_tokens
        num_tokens = count_tokens(config)
        if start.backbone is not None:
            sizes = {**start.backbone.language_model, "vocab_size": num_tokens}
            start = replace(start, backbone=pretrained.Backbone(sizes))
        return start, num_tokens
    is_local = folder.is_file() or (folder / "config.json").exists()  # a Hugging Face config.json
    last = name.rsplit("/", 1)[-1]
    if not is_local and folder.parts[:1] == ("runs",) and last in PRESETS:
        before, num_tokens = plan_start(preset(last))
        backbone, model = before.backbone, before.config.model
        note = f"{name} does not exist yet: planned as the result of the preset {last}"
    elif is_local or last in ARCHITECTURES:
        backbone, _ = read_architecture(name if is_local else last)
        model = ModelOptions(backbone="causal_lm")
        num_tokens = backbone.language_model["vocab_size"]
        check_length(config, backbone, name)
        note = f"{name}: planned from its sizes; nothing was downloaded"
    else:
        raise _not_here(f"start.model={name}", ARCHITECTURES)
    near = config.model.local_conv or model.local_conv
    config = replace(config, model=replace(model, dropout=config.model.dropout, local_conv=near))
    return Start(config, backbone=backbone, notes=(note,)), num_tokens


def _not_here(given: str, known: Iterable[str]) -> UserError:
    return UserError(
        f"{given}: planning downloads nothing; give a local folder, {', '.join(known)}"
    )


def count_tokens(config: RunConfig) -> int:
    """V of the tokenizer in the options, without downloading or learning one."""
    name = config.data.tokenizer
    size = bpe_size(name) if name.startswith("bpe:") else VOCABULARIES.get(name)
    if size is not None:
        return size
    if ":" not in name and not Path(name).exists():
        raise _not_here(f"data.tokenizer={name}", ["bpe:N", *VOCABULARIES])
    return load_tokenizer(name, cache_folder(config.data.cache)).num_tokens


# The network, with shapes only or with random weights


@dataclass(frozen=True)
class PlannedNetwork:
    """A network to count on."""

    config: RunConfig
    """With what the start decides filled in."""
    network: Network
    num_tokens: int
    notes: tuple[str, ...]
    masked_share: float
    is_weighted: bool
    """True when rows of the loss have weights."""
    mode: contextlib.AbstractContextManager[Any]
    """Within: tensors have shapes and no memory."""


def plan_network(
    config: RunConfig, *, is_real: bool = False, known: tuple[Start, int] | None = None
) -> PlannedNetwork:
    """The network that the options describe; ``is_real``: with random weights.

    ``known``: the start and V of a run that has opened them already.
    """
    start, num_tokens = known or plan_start(config)
    config, backbone, dropout = start.config, start.backbone, start.config.model.dropout
    mode = contextlib.nullcontext() if is_real else FakeTensorMode(allow_non_fake_inputs=True)
    if backbone is not None and not is_real:
        # fused attention keeps nothing for its dropout; this would unfuse it
        sizes = backbone.language_model
        rates = [rate for rate in pretrained.dropout_rates(sizes) if rate.startswith("att")]
        backbone = pretrained.Backbone({**sizes, **dict.fromkeys(rates, 0.0)})
    with torch.device("cpu" if is_real else "meta"):
        network = build_model(config, num_tokens, backbone)
    if not is_real:
        with mode:
            network.to_empty(device="cpu")
            if backbone is not None:
                network.language_model.tie_weights()  # type: ignore[operator, union-attr]
    network.loss_kernel = "chunked"
    if dropout and not is_real:  # as on GPUs: a CPU's generator would give numbers
        network._draw_kept = lambda *_: [None, None]  # type: ignore[method-assign, assignment]
    recompute_blocks(network.block_modules(), config.scale.recompute)
    loss = (masked_share(config), not build_objective(config).is_unweighted)
    return PlannedNetwork(config, network, num_tokens, start.notes, *loss, mode)


@dataclass(frozen=True)
class Parameters:
    """Parameter counts by part."""

    total: int
    trained: int
    embedding: int
    """Look-up tables, the mask's row and the time's embedding."""
    blocks: int
    head: int
    """And the norm before it; 0 beyond that norm where the head is the embedding itself."""
    num_blocks: int
    largest_block: int
    tensors: int


def count(network: Network) -> Parameters:
    """By part: embedding, blocks, the rest."""
    named = dict(network.named_parameters())
    tables = {id(m.weight) for m in network.modules() if isinstance(m, nn.Embedding)}
    tables |= {id(named[n]) for n in named if n.startswith(("mask_row", "time_embedding."))}
    inside = [sum(p.numel() for p in block.parameters()) for block in network.block_modules()]
    total = sum(p.numel() for p in named.values())
    trained = sum(p.numel() for p in named.values() if p.requires_grad)
    embedding = sum(p.numel() for p in named.values() if id(p) in tables)
    parts = (embedding, sum(inside), total - embedding - sum(inside))
    return Parameters(total, trained, *parts, len(inside), max(inside, default=0), len(named))


# Every operation of a piece of code: floating-point operations, bytes moved, bytes alive

_NO_KERNEL = frozenset(
    "empty empty_like empty_strided new_empty new_empty_strided _unsafe_view detach "
    "lift_fresh _local_scalar_dense sym_size is_same_size device".split()
)
_BY_INDEX = ("embedding", "index_select", "gather")
"""Read as much as they write, not the whole table."""
_aten = torch.ops.aten
_FLASH = "_scaled_dot_product_flash_attention"
_COUNTED_AS = {_aten.addmm_: _aten.addmm} | {
    getattr(_aten, f"{_FLASH}_for_cpu{end}"): getattr(_aten, _FLASH + end)
    for end in ("", "_backward")
}
"""torch's counter knows attention by the kernels of GPUs only, and no product in place."""


class TracedKernel(NamedTuple):
    """One operation on the device."""

    flops: int
    """Of matrix products; elementwise work is counted as bytes."""
    num_bytes: int
    """Read and written."""


class Tracer(TorchDispatchMode):
    """Records every operation while active; memory of ``known`` tensors is not counted."""

    def __init__(self, known: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.kernels: Counter[TracedKernel] = Counter()
        self.alive = self.peak = self.kept = 0
        """Bytes at this moment, the most there were, and those between the two passes."""
        self._known = {tensor.untyped_storage()._cdata for tensor in known}

    @property
    def flops(self) -> int:
        """Of all matrix products."""
        return sum(kernel.flops * number for kernel, number in self.kernels.items())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation and record it."""
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        for storage in (tensor.untyped_storage() for tensor in _tensors(out)):
            key, size = storage._cdata, storage.nbytes()
            if key not in self._known:  # new memory counts until it is freed
                self._known.add(key)
                self.alive += size
                self.peak = max(self.peak, self.alive)
                weakref.finalize(storage, self._forget, key, size)
        packet, name = func._overloadpacket, func._overloadpacket.__name__
        if name not in _NO_KERNEL and not func.is_view:
            rule = flop_registry.get(_COUNTED_AS.get(packet, packet))
            flops = 0 if rule is None else int(rule(*args, **kwargs, out_val=out))
            size = 2 * _bytes_of(out) if name in _BY_INDEX else _bytes_of((args, kwargs, out))
            self.kernels[TracedKernel(flops, size)] += 1
        return out

    def _forget(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.alive -= size


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _bytes_of(tree: Any) -> int:
    """Bytes that must be read or written; what is repeated by its strides counts once."""
    return sum(min(t.nbytes, t.untyped_storage().nbytes()) for t in _tensors(tree))


# The passes of a microbatch

NUM_LEVELS = 1 << 14
"""Points at which the mean mask rate of a law is summed."""
TRACED_ROWS = 1024
"""Scored rows of the smaller of the two microbatches that are traced; more is on a straight line
through them (the head's chunks are full by then)."""


def masked_share(config: RunConfig) -> float:
    """E[1 - alpha(t)] under the times that are drawn; 1 for causal frameworks."""
    if config.framework.name != "mdm":
        return 1.0
    objective = build_objective(config)
    levels = (torch.arange(NUM_LEVELS, dtype=torch.float64) + 0.5) / NUM_LEVELS
    return float((1 - objective.schedule.alpha(objective.times(levels))).mean())


def scored_rows(planned: PlannedNetwork, batch_size: int) -> int:
    """N of a microbatch, rounded: only these rows meet the head and the last block's MLP."""
    length = planned.config.data.block_length - planned.network.first_maskable
    return max(1, round(planned.masked_share * batch_size * length))


def inputs(planned: PlannedNetwork, batch_size: int) -> dict[str, Any]:
    """Arguments of a training call, of the right shapes."""
    config, num_rows = planned.config, scored_rows(planned, batch_size)
    length = config.data.block_length
    given: dict[str, Any] = {
        "x_BL": torch.zeros(batch_size, length, dtype=torch.long),
        "rows_N": torch.ones(num_rows, dtype=torch.long),
        "targets_N": torch.zeros(num_rows, dtype=torch.long),
        "weight_N": torch.ones(num_rows) if planned.is_weighted else None,
    }
    if config.framework.name == "mdm":
        given["t_B"] = torch.full((batch_size,), 0.5)
        # rows that are padded, or hold several documents that may not see one another
        is_padded = config.data.packing == "unpacked" or config.sft.train is not None
        is_padded &= config.data.pads == "ignored"
        if config.data.document_attention:
            given["mask"] = torch.zeros(batch_size, length, dtype=torch.long)
        elif is_padded:
            given["mask"] = torch.ones(batch_size, 1, 1, length, dtype=torch.bool)
    elif config.model.backbone == "dit":
        shape = (batch_size, length) if config.framework.name == "aoarm" else (length,)
        places = torch.zeros(shape, dtype=torch.long)
        given |= {"positions": places, "target_positions": places}
    return given


def trace_microbatch(
    planned: PlannedNetwork,
    batch_size: int,
    precision: str,
    *,
    is_sharded: bool = False,
    is_training: bool = True,
) -> Tracer:
    """A forward and a backward pass with allocated gradients, or an evaluation pass.

    ``is_sharded``: weights come gathered in the type of the products, as FSDP2 gives them.
    """
    network, dtype = planned.network, getattr(torch, precision)
    trained = [p for p in network.parameters() if p.requires_grad and is_training]
    with planned.mode, torch.set_grad_enabled(is_training):
        given = inputs(planned, batch_size)
        if not is_training:
            given |= {"weight_N": None, "reduce": False}
        _cast(network, dtype if is_sharded else torch.float32)
        for parameter in trained:
            parameter.grad = torch.empty_like(parameter)
        held = [*network.parameters(), *network.buffers(), *(p.grad for p in trained)]
        known = _tensors([held, given])
        with Tracer(known) as tracer:
            with autocast(CPU, dtype):
                loss = network(**given)
            tracer.kept = tracer.alive
            if is_training:
                loss.backward()
        network.zero_grad()
        _cast(network, torch.float32)
    return tracer


def _cast(network: Network, dtype: torch.dtype) -> None:
    for parameter in network.parameters():
        parameter.data = parameter.data.to(dtype)


@dataclass(frozen=True)
class MicrobatchCost:
    """A microbatch of any size, on the straight line through two traced ones."""

    sizes: tuple[int, int]
    traces: tuple[Tracer, Tracer]

    def at(self, size: int, read: Callable[[Tracer], float]) -> float:
        """The value at a microbatch size."""
        low, high = (read(trace) for trace in self.traces)
        slope = (high - low) / (self.sizes[1] - self.sizes[0])
        return slope * size + (low - slope * self.sizes[0])


def trace_cost(
    planned: PlannedNetwork, microbatch: int, precision: str, *, is_sharded: bool
) -> MicrobatchCost:
    small = max(1, -(-TRACED_ROWS // scored_rows(planned, 1)))
    sizes = (small, 2 * small) if microbatch > 2 * small else (max(1, microbatch // 2), microbatch)
    sizes = (1, 2) if sizes[0] == sizes[1] else sizes
    low, high = (trace_microbatch(planned, n, precision, is_sharded=is_sharded) for n in sizes)
    return MicrobatchCost(sizes, (low, high))


def flops_per_token(start: Start, tokenizer: Tokenizer, precision: torch.dtype) -> float:
    """Operations of training on one token; what is repeated to save memory is not counted."""
    config = replace(start.config, scale=replace(start.config.scale, recompute="none"))
    start = replace(start, config=config, backbone=start.backbone_for(tokenizer))
    with quiet("this network cannot be traced"):
        planned = plan_network(config, known=(start, tokenizer.num_tokens))
        size = -(-TRACED_ROWS // scored_rows(planned, 1))
        traced = trace_microbatch(planned, size, str(precision).removeprefix("torch."))
    return traced.flops / (size * config.data.block_length)


# The update


def update(state: TrainState, options: OptimOptions) -> None:
    """Norm, clipping, optimizer and moving average; needs gradients."""
    trained = [p for p in state.model.parameters() if p.grad is not None]
    if options.clip:
        nn.utils.clip_grad_norm_(trained, options.clip)
    else:
        nn.utils.get_total_norm([p.grad for p in trained if p.grad is not None])
    state.optimizer.step(0.0)
    if state.ema is not None:
        state.ema.update(1)


@dataclass(frozen=True)
class Update:
    """One optimizer step, with the moving average."""

    kernels: Counter[TracedKernel]
    optimizer_bytes: int
    average_bytes: int
    num_tensors: int
    """In a checkpoint: weights, optimizer state, average."""


def trace_update(planned: PlannedNetwork) -> Update:
    """Work and memory of one update."""
    options = planned.config.optim
    with planned.mode:
        state = TrainState.begin(planned.network, options)
        for parameter in planned.network.parameters():
            parameter.grad = torch.empty_like(parameter) if parameter.requires_grad else None
        tensors = state.tensors()  # the optimizer's are created on access
        with Tracer(planned.network.parameters()) as tracer:
            update(state, options)
        state.optimizer.zero_grad()
    sizes: Counter[str] = Counter()
    for name, tensor in tensors.items():
        sizes[name.split(".")[0]] += tensor.nbytes
    return Update(tracer.kernels, sizes["optimizer"], sizes["ema"], len(tensors))


# The estimate: what a device holds, and the largest microbatch that fits

USABLE = 0.92
"""Share of a device's memory that tensors may take; the rest is for the driver, communication
buffers and gaps between tensors."""
GATHERED_BLOCKS = 2
"""Blocks whose weights are whole at once under FSDP2: the one at work and the next."""
MOST_REPLICATED = 1_000_000_000
"""Parameters above which ``--scale.sharding auto`` shards also where copies would fit."""


@dataclass(frozen=True)
class MemoryEstimate:
    """A run on one of its devices."""

    config: RunConfig
    world: World
    capacity: float
    """Bytes of the device."""
    precision: str
    layout: Layout
    network: PlannedNetwork
    cost: MicrobatchCost
    parameters: Parameters
    update: Update

    @property
    def share(self) -> int:
        """Rows of a step on one process."""
        return self.config.train.batch_size // self.world.size

    def memory(self, microbatch: int) -> dict[str, Any]:
        """What the device holds at a microbatch size, and what it has.

        ``host_bytes``: the copy in the machine's own memory while a checkpoint is written beside
        training.
        """
        p, update, held_by = self.parameters, self.update, self.layout.processes_per_copy
        cut = f"1/{held_by} of" if held_by > 1 else "all of"
        state = {
            "weights": (4 * p.total, f"{p.total:,}, float32"),
            "gradients": (4 * p.trained, f"{p.trained:,}, float32"),
            "optimizer": (update.optimizer_bytes, "its state"),
            "moving average": (update.average_bytes, "it"),
        }
        parts = {k: (-(-size // held_by), f"{cut} {of}") for k, (size, of) in state.items() if size}
        saved = sum(size for name, (size, _) in parts.items() if name != "gradients")
        if self.layout.is_sharded:
            parts |= self._gathered(microbatch)
        rows = scored_rows(self.network, microbatch)
        number_bytes = 6 if self.precision == "bfloat16" else 4  # products, and them in float32
        logits = min(CHUNK_ROWS, rows) * self.network.num_tokens * number_bytes
        kept = round(self.cost.at(microbatch, lambda trace: trace.kept))
        peak = round(self.cost.at(microbatch, lambda trace: trace.peak))
        parts |= {
            "activations": (kept, f"of {microbatch} rows, saved for the backward pass"),
            "head's logits": (logits, f"{CHUNK_ROWS} rows at a time"),
            "other work": (max(0, peak - kept - logits), "at the peak of a microbatch"),
        }
        total, capacity = sum(size for size, _ in parts.values()), self.capacity
        is_copied = saves_in_background(self.config.checkpoint.saving, self.world)
        named = [{"name": k, "num_bytes": size, "note": note} for k, (size, note) in parts.items()]
        found = {"parts": named, "capacity": capacity, "host_bytes": saved if is_copied else 0}
        return {**found, "total": total, "fits": total <= USABLE * capacity}

    def _gathered(self, microbatch: int) -> dict[str, tuple[int, str]]:
        """FSDP2: weights that are whole for a while, and gradients before they are cut."""
        p, (weight_bytes, gradient_bytes) = self.parameters, self._sharded_bytes
        root, size = p.total - p.blocks, gradient_bytes * p.trained
        whole = root + min(GATHERED_BLOCKS, p.num_blocks) * p.largest_block
        note = f"embedding, head and {GATHERED_BLOCKS} of {p.num_blocks} blocks, {self.precision}"
        found = {"gathered weights": (weight_bytes * whole, note)}
        if microbatch < self.share:
            note = "unsharded until the last microbatch of a step"
            return found | {"accumulated gradients": (size, note)}
        size = round(size / p.total * (root + p.largest_block))
        return found | {"gradients before sharding": (size, "embedding, head and one block")}

    @property
    def _sharded_bytes(self) -> tuple[int, int]:
        """Of one weight that is gathered, and of one gradient that is added up (FSDP2)."""
        is_short = self.precision == "bfloat16" and self.layout.is_sharded
        return 2 if is_short else 4, 2 if is_short and self.config.scale.reduce != "float32" else 4

    def largest_microbatch(self) -> int | None:
        """The largest divisor of a process's rows that fits; None: not even one row."""
        sizes = microbatch_sizes(self.config.train, self.world.size)
        return next((size for size in sizes if self.memory(size)["fits"]), None)

    @property
    def microbatch(self) -> int:
        """As the options say; ``auto`` is the largest that fits, and 1 where none does."""
        if is_automatic(self.config.train, self.world.device):
            return self.largest_microbatch() or 1
        return split_batch(self.config.train, self.world.size)

    @property
    def fits(self) -> bool:
        return bool(self.memory(self.microbatch)["fits"])


def estimate_memory(
    config: RunConfig,
    world: World,
    capacity: float,
    precision: str,
    known: tuple[Start, int] | None = None,
) -> MemoryEstimate:
    """The estimate of a run on devices of ``capacity`` bytes; ``known`` as for plan_network."""
    network, made = plan_network(config, known=known), None
    where = config, world, capacity, precision
    microbatch = split_batch(config.train, world.size)
    is_pretrained = isinstance(network.network, pretrained.PretrainedDenoiser)
    with quiet("this causal LM cannot be planned" if is_pretrained else ""):
        update, parameters = trace_update(network), count(network.network)
        for is_large in (parameters.total > MOST_REPLICATED, True):
            layout = pick_layout(config.scale, world, is_large=is_large)
            if made is None or layout != made.layout:
                cost = trace_cost(network, microbatch, precision, is_sharded=layout.is_sharded)
                made = MemoryEstimate(*where, layout, network, cost, parameters, update)
            if made.fits:
                break
    assert made is not None
    return made


def estimate_here(start: Start, tokenizer: Tokenizer, world: World) -> MemoryEstimate:
    """The estimate of a training on the smallest of its devices, the same on all processes."""
    sharers = world.machine_size if world.device.type == "cpu" else 1
    capacity = -world.all_reduce_max(-device_memory(world.device) / sharers)
    precision = str(pick_precision(start.config.train.precision, world.device))
    known = replace(start, backbone=start.backbone_for(tokenizer)), tokenizer.num_tokens
    precision = precision.removeprefix("torch.")
    return estimate_memory(start.config, world, capacity, precision, known)


def first_that_runs(sizes: Sequence[int], attempt: Callable[[int], None], world: World) -> int:
    """The first microbatch that no process runs out of memory with; each is at most half the last.

    ``attempt`` must not communicate: a process that runs out of memory would keep others waiting.
    """
    while sizes:
        size, is_out = sizes[0], False
        try:
            attempt(size)
        except RuntimeError as error:  # OutOfMemoryError, but a plain one on a Mac's GPU
            if not isinstance(error, torch.OutOfMemoryError) and "out of memory" not in str(error):
                raise
            is_out = True
        if not world.any(is_out):
            return size
        if torch.accelerator.is_available():
            torch.accelerator.empty_cache()
        sizes = [smaller for smaller in sizes if smaller <= size // 2]
    raise UserError(
        "out of memory with a single row per forward pass; use --scale.recompute block, "
        "--scale.sharding full on several devices, or a smaller --data.block-length"
    )
