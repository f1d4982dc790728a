"""The network of a run without its weights, and one microbatch and one update of it, traced.

Tensors have shapes and no memory, and the real code runs on them: the network's forward and
backward pass, autocast, recomputation, optimizer. So the planner knows no formula for any
architecture. Nothing is fetched: causal LMs come from a local folder, or from the table here. The
head's loss is our chunked kernel: inside others' nothing can be seen, and they do as much.

B batch, L block length, N scored rows.
"""

from __future__ import annotations

import contextlib
import json
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from bellmask.config.config import RunConfig, load_config
from bellmask.config.options import ModelOptions, OptimOptions
from bellmask.config.presets import PRESETS, preset
from bellmask.data.readers import cache_folder
from bellmask.data.tokenizers import MOST_TOKENS, SMALLEST_BPE, VOCABULARIES, load_tokenizer
from bellmask.model.causal_lm import read_architecture
from bellmask.model.pretrained import Backbone, PretrainedDenoiser, add_lora, from_architecture
from bellmask.storage.build import Network, build_model, build_objective
from bellmask.storage.run_folder import read_backbone, read_description
from bellmask.train.optim import Ema, Optimizer
from bellmask.train.parallel import recompute_blocks
from bellmask.train.setup import check_length, open_start
from bellmask.utils.distributed import CPU, autocast
from bellmask.utils.errors import UserError
from bellmask.utils.files import count_of, is_whole
from bellmask.utils.libraries import import_transformers, quiet

# What a run starts from, without a download and without weights


def _gpt2(num_layers: int, width: int, num_heads: int) -> dict[str, Any]:
    return {"model_type": "gpt2", "n_layer": num_layers, "n_embd": width, "n_head": num_heads}


KNOWN_MODELS: dict[str, dict[str, Any]] = {
    "gpt2": _gpt2(12, 768, 12),
    "gpt2-medium": _gpt2(24, 1024, 16),
    "gpt2-large": _gpt2(36, 1280, 20),
    "gpt2-xl": _gpt2(48, 1600, 25),
    "smollm2": {
        "model_type": "llama",
        "num_hidden_layers": 30,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "vocab_size": 49_152,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
    },
}
"""Causal LMs whose sizes are known without fetching them, by the last part of their name."""


class PlannedStart(NamedTuple):
    """What :func:`bellmask.train.setup.open_start` would find, and V."""

    config: RunConfig
    """With what the start decides filled in."""
    num_tokens: int
    backbone: Backbone | None = None
    notes: tuple[str, ...] = ()


def plan_start(config: RunConfig) -> PlannedStart:
    """Of whatever the run starts from."""
    name = config.start.model
    if name is None:
        start, num_tokens = open_start(config), count_tokens(config)
        if start.backbone is None:
            return PlannedStart(config, num_tokens)
        sized = {**start.backbone.language_model, "vocab_size": num_tokens}
        return PlannedStart(start.config, num_tokens, Backbone(sized))
    folder, last = Path(name), name.rsplit("/", 1)[-1]
    is_local = (folder / "config.json").exists()
    if (folder / "run.json").exists():
        model = replace(load_config(folder / "config.json").model, dropout=config.model.dropout)
        found: Any = read_description(folder).get("num_tokens")
        if not is_whole(found, 1) or found > MOST_TOKENS:
            raise UserError(f"{folder / 'run.json'} says no number of tokens")
        return PlannedStart(replace(config, model=model), found, read_backbone(folder))
    if is_local and (folder / "tokenizer.json").exists():
        start = open_start(config)
        assert start.tokenizer is not None
        return PlannedStart(start.config, start.tokenizer.num_tokens, start.backbone)
    if not is_local and folder.parts[:1] == ("runs",) and folder.name in PRESETS:
        before = plan_start(preset(folder.name))
        model = replace(before.config.model, dropout=config.model.dropout)
        note = f"{name} is not there yet: planned as what the preset {folder.name} will leave"
        return before._replace(config=replace(config, model=model), notes=(*before.notes, note))
    model = ModelOptions(backbone="causal_lm", dropout=config.model.dropout)
    if is_local:
        backbone, _ = read_architecture(name)
        note = "{} has no tokenizer: all {:,} rows of its embedding count as tokens"
    elif last in KNOWN_MODELS:
        with quiet():
            made = import_transformers("a plan").AutoConfig.for_model(**KNOWN_MODELS[last])
        backbone = Backbone(json.loads(json.dumps(made.to_dict(), default=str)))
        note = "the sizes of {} are those of a table; nothing was fetched"
    else:
        raise UserError(
            f"start.model={name}: planning fetches nothing; give a local folder that holds its "
            f"config.json, a run folder, or one of {', '.join(KNOWN_MODELS)}"
        )
    rows = int(backbone.language_model["vocab_size"])
    return PlannedStart(replace(config, model=model), rows, backbone, (note.format(name, rows),))


def count_tokens(config: RunConfig) -> int:
    """V of the tokenizer that the options name, without fetching or learning one."""
    name = config.data.tokenizer
    kind, _, size = name.partition(":")
    if name in VOCABULARIES:
        return VOCABULARIES[name]
    if kind in ("bpe", "symbols") and size.isdecimal():
        least = SMALLEST_BPE if kind == "bpe" else 1
        if not least <= (count_of(size) or 0) <= MOST_TOKENS:
            raise UserError(f"data.tokenizer={kind}:N needs N from {least} to {MOST_TOKENS:,}")
        return int(size)
    if not Path(name).exists():
        raise UserError(
            f"data.tokenizer={name}: planning fetches nothing; give a local folder, bpe:N, or one "
            f"of {', '.join(VOCABULARIES)}"
        )
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
    mode: contextlib.AbstractContextManager[Any]
    """Within: tensors have shapes and no memory."""


def plan_network(config: RunConfig, *, is_real: bool = False) -> PlannedNetwork:
    """The network that the options describe; ``is_real``: with random weights, to be measured."""
    config, num_tokens, backbone, notes = plan_start(config)
    if backbone is not None:
        check_length(config, backbone, config.start.model or str(config.start.architecture))
    with torch.device("cpu" if is_real else "meta"), torch.random.fork_rng(devices=[]):
        if backbone is None:
            network: Network = build_model(config, num_tokens)
        else:  # as build_model, without the probe that needs numbers
            inner = from_architecture(backbone.language_model, config.model.dropout)
            is_causal = config.framework.name != "mdm"
            network = PretrainedDenoiser(inner, num_tokens, is_causal=is_causal)
            if config.start.lora_rank:
                add_lora(network, config.start.lora_rank, config.start.lora_alpha)
    network.train()
    mode = contextlib.nullcontext() if is_real else FakeTensorMode()
    if not is_real:
        with mode:
            _leave_meta(network)
        _draw_dropout_as_gpus_do(network, config.model.dropout)
    recompute_blocks(network.block_modules(), config.scale.recompute)
    return PlannedNetwork(config, network, num_tokens, notes, mode)


def _leave_meta(network: nn.Module) -> None:
    """Tensors of device meta by ones that pass for a CPU's; tied weights stay tied."""
    made: dict[int, nn.Parameter] = {}
    for part in network.modules():
        for name, p in part._parameters.items():
            if p is not None:
                if id(p) not in made:
                    made[id(p)] = nn.Parameter(torch.empty(p.shape, dtype=p.dtype), p.requires_grad)
                part._parameters[name] = made[id(p)]
        for name, b in part._buffers.items():
            if b is not None:
                part._buffers[name] = torch.empty(b.shape, dtype=b.dtype)


def _draw_dropout_as_gpus_do(network: Network, rate: float) -> None:
    """A CPU's generator gives numbers, and here are none.

    Fused attention keeps nothing for its dropout; with one it would be traced unfused.
    """
    if not isinstance(network, PretrainedDenoiser):

        def draw(shape: Any, like: Tensor) -> list[Tensor | None]:
            return [torch.rand(tuple(shape), device=like.device) >= rate for _ in range(2)]

        if rate:
            network._draw_kept = draw  # type: ignore[method-assign, assignment]
        return
    for part in network.modules():
        for name in ("attn_dropout", "attention_dropout"):
            found = getattr(part, name, None)
            if isinstance(found, nn.Dropout):
                found.p = 0.0
            elif isinstance(found, float):
                setattr(part, name, 0.0)


@dataclass(frozen=True)
class Parameters:
    """How many numbers the network has, and where."""

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
    first = ("mask_row", "time_embedding.")
    total = sum(p.numel() for p in named.values())
    trained = sum(p.numel() for p in named.values() if p.requires_grad)
    embedding = sum(p.numel() for n, p in named.items() if id(p) in tables or n.startswith(first))
    inside = [sum(p.numel() for p in block.parameters()) for block in network.block_modules()]
    blocks, largest = sum(inside), max(inside, default=0)
    head = total - embedding - blocks
    return Parameters(total, trained, embedding, blocks, head, len(inside), largest, len(named))


# Every operation of a piece of code: floating-point operations, bytes moved, bytes alive

_NO_KERNEL = frozenset(
    "empty empty_like empty_strided new_empty new_empty_strided _unsafe_view detach "
    "lift_fresh _local_scalar_dense sym_size is_same_size device".split()
)
_BY_INDEX = frozenset(["embedding", "index_select", "gather"])
"""Read as much as they write, not the whole table."""
_aten = torch.ops.aten
_COUNTED_AS = {
    _aten._scaled_dot_product_flash_attention_for_cpu: _aten._scaled_dot_product_flash_attention,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: (
        _aten._scaled_dot_product_flash_attention_backward
    ),
    _aten.addmm_: _aten.addmm,
}
"""torch's counter knows attention by the kernels of GPUs only, and no product in place."""


class TracedKernel(NamedTuple):
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

    def with_more_blocks(self, one_more: OpTrace, number: int) -> OpTrace:
        """This trace with ``number`` further blocks, each what ``one_more`` has over it."""
        block = Counter(one_more.kernels)
        block.subtract(self.kernels)
        assert min(block.values()) >= 0, "blocks differ"
        return OpTrace(
            self.kernels + Counter({k: n * number for k, n in block.items()}),
            self.kept + number * (one_more.kept - self.kept),
            self.peak + number * (one_more.peak - self.peak),
        )


class Tracer(TorchDispatchMode):
    """Notes every operation while it is on; memory of ``known`` tensors is not counted."""

    def __init__(self, known: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.trace = OpTrace()
        self.is_backward = False
        self.alive = 0
        """Bytes at this moment."""
        self._known = {tensor.untyped_storage()._cdata for tensor in known}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation and note it."""
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        self._note_memory(out)
        packet = func._overloadpacket
        name = packet.__name__
        if name in _NO_KERNEL or func.is_view:
            return out
        rule = flop_registry.get(_COUNTED_AS.get(packet, packet))
        flops = 0 if rule is None else int(rule(*args, **kwargs, out_val=out))
        size = _bytes_of(out) * 2 if name in _BY_INDEX else _bytes_of((args, kwargs, out))
        self.trace.kernels[TracedKernel(name, flops, size, self.is_backward)] += 1
        return out

    def _note_memory(self, out: Any) -> None:
        """Count memory that is new, until it goes."""
        for tensor in _tensors(out):
            storage = tensor.untyped_storage()
            key, size = storage._cdata, storage.nbytes()
            if key not in self._known:
                self._known.add(key)
                self.alive += size
                self.trace.peak = max(self.trace.peak, self.alive)
                weakref.finalize(storage, self._forget, key, size)

    def _forget(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.alive -= size


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _bytes_of(tree: Any) -> int:
    """Bytes that must be read or written; what is repeated by its strides counts once."""
    return sum(
        min(t.numel() * t.element_size(), t.untyped_storage().nbytes()) for t in _tensors(tree)
    )


# The passes of a microbatch

NUM_LEVELS = 1 << 14
"""Points at which the mean mask rate of a law is summed."""
TRACED_BLOCKS = 2
"""All blocks do the same (but the last one, which leaves rows out): a few are traced."""
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


def scored_rows(config: RunConfig, batch_size: int, first_maskable: int) -> int:
    """N of a microbatch, rounded: only these rows meet the head and the last block's MLP."""
    length = config.data.block_length - first_maskable
    return max(1, round(masked_share(config) * batch_size * length))


def inputs(
    config: RunConfig, batch_size: int, num_rows: int, *, is_weighted: bool
) -> dict[str, Any]:
    """Arguments of a training call, of the right shapes."""
    length, is_mdm = config.data.block_length, config.framework.name == "mdm"
    given: dict[str, Any] = {
        "x_BL": torch.zeros(batch_size, length, dtype=torch.long),
        "rows_N": torch.ones(num_rows, dtype=torch.long),
        "targets_N": torch.zeros(num_rows, dtype=torch.long),
        "weight_N": torch.ones(num_rows) if is_weighted else None,
        "mask": None,
    }
    # rows that are padded, or hold several documents that may not see one another
    is_padded = config.data.packing == "unpacked" or config.sft.train is not None
    if is_mdm and config.data.document_attention:
        given["mask"] = torch.ones(batch_size, 1, length, length, dtype=torch.bool)
    elif is_mdm and is_padded and config.data.pads == "ignored":
        given["mask"] = torch.ones(batch_size, 1, 1, length, dtype=torch.bool)
    if is_mdm:
        given["t_B"] = torch.full((batch_size,), 0.5)
    elif config.model.backbone == "dit":
        shape = (batch_size, length) if config.framework.name == "aoarm" else (length,)
        given["positions"] = torch.zeros(shape, dtype=torch.long)
        given["target_positions"] = torch.zeros(shape, dtype=torch.long)
    return given


def trace_microbatch(
    planned: PlannedNetwork,
    batch_size: int,
    precision: str,
    *,
    is_sharded: bool = False,
    is_training: bool = True,
) -> OpTrace:
    """A forward and a backward pass, with gradients that are there already; or evaluation's pass.

    ``is_sharded``: weights come gathered in the type of the products, as FSDP2 gives them.
    """
    network, dtype = planned.network, getattr(torch, precision)
    rows = scored_rows(planned.config, batch_size, network.first_maskable)
    is_weighted = not build_objective(planned.config).is_unweighted
    depth = len(network.block_modules())
    network.loss_kernel = "chunked"
    with planned.mode:
        given = inputs(planned.config, batch_size, rows, is_weighted=is_weighted)
        if not is_training:
            del given["weight_N"]
            given["reduce"] = False
        _cast(network, dtype if is_sharded else torch.float32)
        if depth <= TRACED_BLOCKS + 1:
            found = _trace_call(network, given, dtype, is_training=is_training)
        else:
            with _shallow(network, TRACED_BLOCKS):
                fewer = _trace_call(network, given, dtype, is_training=is_training)
            with _shallow(network, TRACED_BLOCKS + 1):
                one_more = _trace_call(network, given, dtype, is_training=is_training)
            found = fewer.with_more_blocks(one_more, depth - TRACED_BLOCKS)
        _cast(network, torch.float32)
    return found


def _cast(network: Network, dtype: torch.dtype) -> None:
    for parameter in network.parameters():
        parameter.data = parameter.data.to(dtype)


@contextlib.contextmanager
def _shallow(network: Network, num_blocks: int) -> Iterator[None]:
    """Within: the network has its last blocks only."""
    blocks = network.block_modules()
    lists = (part for part in network.modules() if isinstance(part, nn.ModuleList))
    owner = next((part for part in lists if list(part) == blocks), None)
    if owner is None:
        raise UserError("this causal LM has no list of blocks: it cannot be planned")
    del owner[:-num_blocks]
    try:
        yield
    finally:
        del owner[:]
        owner.extend(blocks)


def _trace_call(
    network: Network, given: dict[str, Any], dtype: torch.dtype, *, is_training: bool
) -> OpTrace:
    trained = [p for p in network.parameters() if p.requires_grad and is_training]
    for parameter in trained:
        parameter.grad = torch.empty_like(parameter)
    gradients = [p.grad for p in trained]
    known = _tensors([*network.parameters(), *network.buffers(), gradients, given])
    with torch.set_grad_enabled(is_training), Tracer(known) as tracer:
        with autocast(CPU, dtype):
            loss = network(**given)
        tracer.trace.kept, tracer.is_backward = tracer.alive, True
        if is_training:
            loss.backward()
    for parameter in trained:
        parameter.grad = None
    return tracer.trace


@dataclass(frozen=True)
class MicrobatchCost:
    """A microbatch of any size, on the straight line through two traced ones."""

    sizes: tuple[int, int]
    traces: tuple[OpTrace, OpTrace]

    def at(self, size: int, read: Callable[[OpTrace], float]) -> float:
        """The value at a microbatch size."""
        low, high = (read(trace) for trace in self.traces)
        slope = (high - low) / (self.sizes[1] - self.sizes[0])
        return slope * size + (low - slope * self.sizes[0])


def trace_cost(
    planned: PlannedNetwork, microbatch: int, precision: str, *, is_sharded: bool
) -> MicrobatchCost:
    """Two microbatches, traced."""
    rows = scored_rows(planned.config, 1, planned.network.first_maskable)
    small = max(1, -(-TRACED_ROWS // rows))
    sizes = (small, 2 * small) if microbatch > 2 * small else (max(1, microbatch // 2), microbatch)
    sizes = (1, 2) if sizes[0] == sizes[1] else sizes
    low, high = (trace_microbatch(planned, n, precision, is_sharded=is_sharded) for n in sizes)
    return MicrobatchCost(sizes, (low, high))


# The update


class Updater:
    """Norm, clipping, optimizer and moving average of a network."""

    def __init__(self, network: Network, options: OptimOptions) -> None:
        self.options = options
        self.trained = [p for p in network.parameters() if p.requires_grad]
        self.optimizer = Optimizer(network, options)
        self.average = Ema(network, options.ema) if options.ema else None

    def __call__(self) -> None:
        """Needs gradients."""
        norm = nn.utils.get_total_norm([p.grad for p in self.trained if p.grad is not None])
        if self.options.clip:
            nn.utils.clip_grads_with_norm_(self.trained, self.options.clip, norm)
        self.optimizer.step(0.0)
        if self.average is not None:
            self.average.update(1)


@dataclass(frozen=True)
class Update:
    """One optimizer step, with the moving average."""

    kernels: Counter[TracedKernel]
    optimizer_bytes: int
    average_bytes: int
    num_tensors: int
    """In a checkpoint: weights, optimizer state, average."""


def trace_update(planned: PlannedNetwork) -> Update:
    """What one takes, and what it holds."""
    network = planned.network
    with planned.mode:
        update = Updater(network, planned.config.optim)
        state = list(update.optimizer.tensors().values())
        shadow = [] if update.average is None else list(update.average.shadow.values())
        for parameter in update.trained:
            parameter.grad = torch.empty_like(parameter)
        with Tracer(network.parameters()) as tracer:
            update()
        update.optimizer.zero_grad()
    size, held = (sum(t.numel() * t.element_size() for t in each) for each in (state, shadow))
    tensors = len(list(network.parameters())) + len(state) + len(shadow)
    return Update(tracer.trace.kernels, size, held, tensors)
