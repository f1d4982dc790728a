"""``bellmask import``: a checkpoint in the published layout of mdlm and duo as a run folder.

The parts: the options; the map between their parameters and ours, both ways (``bellmask export``
uses it too); weights in files; the run folder; the command itself.
"""

from __future__ import annotations

import pickle
import re
import sys
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import torch.nn.functional as F
import tyro
from torch import Tensor

from bellmask.config.command_line import parse_command
from bellmask.config.config import RunConfig
from bellmask.config.options import (
    CheckpointOptions,
    DataOptions,
    LawOptions,
    ModelOptions,
    ObjectiveOptions,
    OptimOptions,
    TrainOptions,
)
from bellmask.data.corpora import IMPORTED
from bellmask.data.readers import cache_folder
from bellmask.data.tokenizers import Tokenizer, load_tokenizer
from bellmask.model.transformer import CONDITION_WIDTH, NUM_SINUSOIDS
from bellmask.storage.checkpoint import FORMAT, CheckpointStore
from bellmask.storage.loading import (
    IdMap,
    Weights,
    local_folder,
    map_ids,
    read_own_tokenizer,
)
from bellmask.storage.run_folder import write_description
from bellmask.train.metrics import Window
from bellmask.utils.distributed import World
from bellmask.utils.errors import UserError, look_up
from bellmask.utils.files import (
    check_free,
    inside,
    is_number,
    is_whole,
    load_json,
    read_json,
    whole_folder,
)
from bellmask.utils.table import Table

Format = Literal["mdlm", "duo"]


@dataclass(frozen=True)
class ImportOptions:
    """Make a run folder of a checkpoint in the published layout of mdlm and duo.

    evaluate, generate and analyze then take it like any run (evaluate with --data: the training
    text is not here).

    Examples:
    bellmask import kuleshov-group/mdlm-owt --format mdlm --out runs/mdlm-owt

    bellmask import weights.pt --format duo --heads 12 --out runs/duo-lm1b

    bellmask import model.safetensors --format mdlm --tokenizer runs/bell --out runs/back
    """

    checkpoint: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="CHECKPOINT")]
    """A .safetensors file, a torch file of weights, a folder with config.json beside the weights,
    or OWNER/NAME on the hub."""
    format: Format
    """Whose recipe the rows follow. Both share the layout; they differ in how LM1B is packed."""
    out: str
    """Run folder to make."""
    tokenizer: str | None = None
    """gpt2, bert-base-uncased, a folder with a Hugging Face tokenizer, or a run folder. Default: by
    the rows of the embedding (50258: gpt2, 30522: bert-base-uncased)."""
    heads: int | None = None
    """Attention heads; default: as config.json or the rotary buffer says."""
    block_length: int | None = None
    """Tokens per row; default: config.json's model_length, else 1024 for gpt2, 128 for BERT."""
    time_input: bool = False
    """The model was trained with time conditioning: keep it. Known where config.json is there."""
    weights: Weights = "auto"
    """auto: the moving average beside the trained weights where the file has one. ema: insist on
    it. raw: the trained weights alone."""


# Their parameters and ours.
#
# Their network is our backbone with other names: RoPE of base 10 000 by halves, queries, keys and
# values packed as (three, heads, size), layer norms with weight only. What differs:
#
# - AdaLN is always there. A model without time input is fed sigma = 0, so its AdaLN gives
#   constants, which are our modulation vectors. Back, the constants become AdaLN's bias and all
#   weights of the time's way are zero: the same function, though not the numbers that were trained.
# - The mask has a row in the embedding where the tokenizer has it, and one in the head, whose logit
#   nobody reads: ours has none.
# - A pad that only our tokenizer has gets a row whose probability is exactly zero.

Tensors = Mapping[str, Tensor]

NEVER = -1e6
"""The logit of what must not be predicted (mdlm's own minus infinity): exp of it is zero."""

_BLOCK = {
    "norm1.weight": "attention_norm.weight",
    "attn_qkv.weight": "qkv.weight",
    "attn_out.weight": "attention_out.weight",
    "norm2.weight": "mlp_norm.weight",
    "mlp.0.weight": "mlp_in.weight",
    "mlp.0.bias": "mlp_in.bias",
    "mlp.2.weight": "mlp_out.weight",
    "mlp.2.bias": "mlp_out.bias",
}
_TIME = {
    "sigma_map.mlp.0.weight": "time_embedding.into.weight",
    "sigma_map.mlp.0.bias": "time_embedding.into.bias",
    "sigma_map.mlp.2.weight": "time_embedding.out.weight",
    "sigma_map.mlp.2.bias": "time_embedding.out.bias",
}
_EMBEDDING, _HEAD = "vocab_embed.embedding", "output_layer.linear"


@dataclass(frozen=True)
class Shape:
    """The sizes of one of their networks."""

    num_layers: int
    width: int
    mlp_width: int
    condition: int
    """Width of the time's embedding."""
    vocabulary: int
    """Rows of the embedding, the mask's included."""

    def layout(self) -> dict[str, tuple[int, ...]]:
        """Every parameter and its shape, in the order in which their module registers them."""
        width, hidden, condition = self.width, self.mlp_width, self.condition
        shapes: dict[str, tuple[int, ...]] = {
            _EMBEDDING: (self.vocabulary, width),
            "sigma_map.mlp.0.weight": (condition, NUM_SINUSOIDS),
            "sigma_map.mlp.0.bias": (condition,),
            "sigma_map.mlp.2.weight": (condition, condition),
            "sigma_map.mlp.2.bias": (condition,),
        }
        for number in range(self.num_layers):
            block: dict[str, tuple[int, ...]] = {
                "norm1.weight": (width,),
                "attn_qkv.weight": (3 * width, width),
                "attn_out.weight": (width, width),
                "norm2.weight": (width,),
                "mlp.0.weight": (hidden, width),
                "mlp.0.bias": (hidden,),
                "mlp.2.weight": (width, hidden),
                "mlp.2.bias": (width,),
                "adaLN_modulation.weight": (6 * width, condition),
                "adaLN_modulation.bias": (6 * width,),
            }
            shapes |= {f"blocks.{number}.{name}": shape for name, shape in block.items()}
        return shapes | {
            "output_layer.norm_final.weight": (width,),
            f"{_HEAD}.weight": (self.vocabulary, width),
            f"{_HEAD}.bias": (self.vocabulary,),
            "output_layer.adaLN_modulation.weight": (2 * width, condition),
            "output_layer.adaLN_modulation.bias": (2 * width,),
        }


def plain_names(stored: Tensors) -> dict[str, Tensor]:
    """Without what Lightning, torch.compile and DDP put before the names."""
    found: dict[str, Tensor] = {}
    for name, tensor in stored.items():
        plain = name.replace("_orig_mod.", "").removeprefix("module.").removeprefix("backbone.")
        if plain in found:
            raise UserError(f"the checkpoint holds {plain} twice, once as {name}")
        found[plain] = tensor
    return found


def drop_rotary(weights: Tensors) -> tuple[dict[str, Tensor], int | None]:
    """The weights without RoPE's buffers, and the size of a head if a buffer tells it."""
    head_size = None
    kept = {}
    for name, tensor in weights.items():
        if "rotary_emb." not in name:
            kept[name] = tensor
        elif name.endswith("inv_freq"):
            head_size = 2 * tensor.numel()
    return kept, head_size


def find_shape(weights: Tensors) -> Shape:
    """The sizes, checked against every tensor; one error lists all that does not fit."""
    needed = (_EMBEDDING, "sigma_map.mlp.0.weight", "blocks.0.mlp.0.weight")
    absent = [name for name in needed if name not in weights or weights[name].ndim != 2]
    if absent:
        held = ", ".join(sorted(weights)[:8]) or "nothing"
        raise UserError(
            f"this is not a checkpoint in mdlm's layout: no matrix {', '.join(absent)} among its "
            f"{len(weights)} tensors (it begins with {held}). Their autoregressive models have no "
            "sigma_map; they are not masked diffusion and cannot be imported"
        )
    numbers = [int(m[1]) for m in map(re.compile(r"blocks\.([0-9]{1,6})\.").match, weights) if m]
    vocabulary, width = weights[_EMBEDDING].shape
    shape = Shape(
        num_layers=min(max(numbers) + 1, len(weights)),  # a missing one is named, not a million
        width=width,
        mlp_width=len(weights["blocks.0.mlp.0.weight"]),
        condition=len(weights["sigma_map.mlp.0.weight"]),
        vocabulary=vocabulary,
    )
    check_layout(weights, shape)
    return shape


def check_layout(weights: Tensors, shape: Shape) -> None:
    """Refuse weights with missing, extra or misshapen tensors, naming all of them."""
    wanted = shape.layout()
    problems = []
    for name, size in wanted.items():
        if name not in weights:
            problems.append(f"  missing: {name} {list(size)}")
        elif tuple(weights[name].shape) != size:
            problems.append(f"  {name} is {list(weights[name].shape)}, not {list(size)}")
    problems += [f"  not known: {name}" for name in weights if name not in wanted]
    if problems:
        raise UserError(
            f"{len(problems)} tensors do not fit mdlm's layout of {shape.num_layers} blocks of "
            f"width {shape.width}; nothing was imported:\n" + "\n".join(problems)
        )


def to_ours(weights: Tensors, shape: Shape, ids: IdMap, *, has_time: bool) -> dict[str, Tensor]:
    """Our parameters, float32; with ``has_time`` AdaLN stays, else it is folded into constants."""
    if has_time and shape.condition != CONDITION_WIDTH:
        raise UserError(
            f"the time's embedding is {shape.condition} wide, and only {CONDITION_WIDTH} can keep "
            "its time input; without it any width can be imported"
        )
    theirs = {name: tensor.detach().float() for name, tensor in weights.items()}
    found = {ours: theirs[name] for name, ours in _renamed(shape.num_layers).items()}
    if has_time:
        found |= {ours: theirs[name] for name, ours in _TIME.items()}
    condition = constant_condition(theirs)
    for name, ours in _modulations(shape.num_layers).items():
        linear = {part: theirs[f"{name}.{part}"] for part in ("weight", "bias")}
        if has_time:
            found |= {f"{ours}.linear.{part}": tensor for part, tensor in linear.items()}
        else:
            folded = linear["weight"].double() @ condition + linear["bias"].double()
            found[f"{ours}.vectors"] = folded.float().view(-1, shape.width)
    return found | _rows_to_ours(theirs, ids)


def from_ours(tensors: Tensors, num_layers: int, ids: IdMap) -> dict[str, Tensor]:
    """Their parameters, float32: what :func:`to_ours` makes ours of again, exactly."""
    ours = {name: tensor.detach().float() for name, tensor in tensors.items()}
    width, mlp_width = ours["final_norm.weight"].numel(), ours["blocks.0.mlp_in.bias"].numel()
    shape = Shape(num_layers, width, mlp_width, CONDITION_WIDTH, ids.size)
    found = {name: torch.zeros(size) for name, size in shape.layout().items()}
    found |= {name: ours[mine] for name, mine in _renamed(num_layers).items()}
    found |= {name: ours[mine] for name, mine in _TIME.items() if mine in ours}
    for name, mine in _modulations(num_layers).items():
        if f"{mine}.vectors" in ours:  # constants: a bias behind weights of zero
            found[f"{name}.bias"] = ours[f"{mine}.vectors"].flatten()
        else:
            found |= {
                f"{name}.{part}": ours[f"{mine}.linear.{part}"] for part in ("weight", "bias")
            }
    return found | _rows_from_ours(ours, ids)


def constant_condition(theirs: Tensors) -> Tensor:
    """What AdaLN is fed at sigma = 0, float64: cosines of 0, sines of 0, two layers, SiLU."""
    waves = torch.cat([torch.ones(NUM_SINUSOIDS // 2), torch.zeros(NUM_SINUSOIDS // 2)]).double()
    layers = [
        (theirs[f"sigma_map.mlp.{n}.weight"].double(), theirs[f"sigma_map.mlp.{n}.bias"].double())
        for n in (0, 2)
    ]
    for weight, bias in layers:
        waves = F.silu(weight @ waves + bias)
    return waves


def _renamed(num_layers: int) -> dict[str, str]:
    """Their names and ours of what needs no change."""
    blocks = {
        f"blocks.{number}.{theirs}": f"blocks.{number}.{ours}"
        for number in range(num_layers)
        for theirs, ours in _BLOCK.items()
    }
    return blocks | {"output_layer.norm_final.weight": "final_norm.weight"}


def _modulations(num_layers: int) -> dict[str, str]:
    blocks = {f"blocks.{n}.adaLN_modulation": f"blocks.{n}.modulation" for n in range(num_layers)}
    return blocks | {"output_layer.adaLN_modulation": "final_modulation"}


def _rows_to_ours(theirs: Tensors, ids: IdMap) -> dict[str, Tensor]:
    embedding, weight = theirs[_EMBEDDING], theirs[f"{_HEAD}.weight"]
    num_tokens, width = len(ids.tokens_V), embedding.shape[1]
    found = {
        "embedding.weight": torch.zeros(num_tokens + 1, width),
        "head.weight": torch.zeros(num_tokens, width),
        "head.bias": torch.full((num_tokens,), NEVER),
    }
    found["embedding.weight"][ids.ours] = embedding[ids.theirs]
    found["embedding.weight"][num_tokens] = embedding[ids.mask]
    found["head.weight"][ids.ours] = weight[ids.theirs]
    found["head.bias"][ids.ours] = theirs[f"{_HEAD}.bias"][ids.theirs]
    return found


def _rows_from_ours(ours: Tensors, ids: IdMap) -> dict[str, Tensor]:
    width = ours["head.weight"].shape[1]
    found = {
        _EMBEDDING: torch.zeros(ids.size, width),
        f"{_HEAD}.weight": torch.zeros(ids.size, width),
        f"{_HEAD}.bias": torch.full((ids.size,), NEVER),
    }
    found[_EMBEDDING][ids.theirs] = ours["embedding.weight"][ids.ours]
    found[_EMBEDDING][ids.mask] = ours["embedding.weight"][-1]
    found[f"{_HEAD}.weight"][ids.theirs] = ours["head.weight"][ids.ours]
    found[f"{_HEAD}.bias"][ids.theirs] = ours["head.bias"][ids.ours]
    return found


# Weights in files, read without running anything that a file holds.
#
# safetensors files, torch files (tensors and plain values only), and folders as Hugging Face has
# them, with config.json beside the weights. A Lightning file may also hold the moving average of
# the weights, as a list in the order of the parameters.

METADATA = "bellmask"
"""Key of a safetensors file's metadata under which our export leaves what the layout cannot say."""
_WEIGHT_FILES = ("model.safetensors", "pytorch_model.bin")


@dataclass(frozen=True)
class Stored:
    """What a checkpoint file or folder holds."""

    source: Path
    weights: dict[str, Tensor]
    shadow: list[Tensor] | None = None
    """The moving average, in the order of the parameters."""
    decay: float | None = None
    step: int = 0
    options: dict[str, Any] = field(default_factory=dict)
    """What config.json (or our own metadata) says of the model."""


def read_checkpoint(path: Path) -> Stored:
    """Read a file or folder; a UserError says what is wrong with it."""
    if path.is_dir():
        return _read_folder(path)
    if not path.exists():
        raise UserError(f"there is no checkpoint {path}; give a file, a folder or OWNER/NAME")
    if path.suffix == ".safetensors":
        weights, options = _read_safetensors(path)
        return Stored(path, weights, step=options.get("step", 0), options=options)
    return _from_torch(path, _read_torch(path))


def _read_folder(folder: Path) -> Stored:
    options = _read_json(folder / "config.json") if (folder / "config.json").exists() else {}
    index = folder / "model.safetensors.index.json"
    if index.exists():
        weights: dict[str, Tensor] = {}
        for shard in _shards(index):
            weights |= _read_safetensors(shard)[0]
        return Stored(folder, weights, options=options)
    for name in _WEIGHT_FILES:
        if (folder / name).exists():
            found = read_checkpoint(folder / name)
            merged = {**found.options, **options}
            return Stored(folder, found.weights, found.shadow, found.decay, found.step, merged)
    raise UserError(f"{folder} holds no weights: neither {' nor '.join(_WEIGHT_FILES)} is there")


def _shards(index: Path) -> list[Path]:
    """The files that an index names, all of its own folder."""
    named = _read_json(index).get("weight_map")
    if not isinstance(named, dict) or not all(isinstance(n, str) for n in named.values()):
        raise UserError(f"{index} does not say which file holds which weights")
    return [inside(index.parent, name, str(index)) for name in sorted(set(named.values()))]


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = read_json(path)
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {path}: {error}") from None
    if not isinstance(found, dict):
        raise UserError(f"{path} must hold an object, not {type(found).__name__}")
    return found


def _read_safetensors(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(path), framework="pt") as stream:
            weights = {name: stream.get_tensor(name) for name in stream.keys()}  # noqa: SIM118
            options = load_json((stream.metadata() or {}).get(METADATA, "{}"))
    except (SafetensorError, OSError, ValueError, RuntimeError, KeyError, TypeError) as error:
        raise UserError(f"cannot read {path}: {error}") from None
    if not isinstance(options, dict) or not is_whole(options.get("step", 0)):
        raise UserError(f"{path}: what it says of its model under {METADATA!r} is damaged")
    return weights, options


def write_safetensors(tensors: Mapping[str, Tensor], path: Path, **metadata: str) -> None:
    """Write a file that others may read as the umask says (the library's are the owner's only)."""
    from safetensors.torch import save_file

    path.touch()
    mode = path.stat().st_mode
    kept = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(kept, path, metadata={"format": "pt", **metadata})
    path.chmod(mode)


def _read_torch(path: Path) -> Any:
    try:
        _refuse_packed(path)
        return torch.load(path, map_location="cpu", weights_only=True)
    except UserError:
        raise
    except Exception as error:  # a file that is none fails in many ways
        if isinstance(error, pickle.UnpicklingError) and zipfile.is_zipfile(path):
            raise UserError(
                f"{path} holds Python objects beside its weights, and opening those could run any "
                "code. If you trust the file, save the weights alone where its project is "
                "installed:\n"
                f"  c = torch.load({path.name!r}, map_location='cpu', weights_only=False)\n"
                "  torch.save({k: c[k] for k in ('state_dict', 'ema', 'global_step') if k in c}, "
                "'weights.pt')\nand import weights.pt"
            ) from None
        reason = str(error).split(".")[0] or "it ends too early"
        raise UserError(f"{path} is not a torch file, or a damaged one: {reason}") from None


def _refuse_packed(path: Path) -> None:
    """torch stores its files unpacked; a packed one may grow a thousandfold when it is read."""
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            size = sum(info.file_size for info in archive.infolist())
        if size > path.stat().st_size:
            raise UserError(f"{path} is packed, which torch's files never are: not read")


def _from_torch(path: Path, content: Any) -> Stored:
    if not isinstance(content, Mapping):
        raise UserError(f"{path} holds a {type(content).__name__}, not weights by name")
    inner = next((content[k] for k in ("state_dict", "model") if k in content), content)
    inner = inner if isinstance(inner, Mapping) else {}
    weights = {k: v for k, v in inner.items() if isinstance(v, Tensor) and isinstance(k, str)}
    if not weights:
        raise UserError(f"{path} holds no tensors by name")
    average = content.get("ema") if inner is not content else None
    shadow, decay = None, None
    if isinstance(average, Mapping) and average.get("shadow_params") is not None:
        shadow, decay = average["shadow_params"], average.get("decay")
    step = content.get("global_step", 0) if inner is not content else 0
    is_right = shadow is None or isinstance(shadow, list | tuple)
    is_right &= is_whole(step) and (decay is None or (is_number(decay) and 0 <= decay <= 1))
    if not is_right or not all(map(_is_plain, [*weights.values(), *(shadow or ())])):
        raise UserError(f"{path} is damaged: its tensors, step or moving average are none")
    return Stored(path, weights, None if shadow is None else list(shadow), decay, step)


def _is_plain(value: Any) -> bool:
    """Numbers that are all in the file: not sparse, not without memory, none read repeatedly."""
    if not isinstance(value, Tensor) or value.layout != torch.strided or value.is_quantized:
        return False
    is_here = value.device.type == "cpu"
    return is_here and value.numel() * value.element_size() <= value.untyped_storage().nbytes()


# A checkpoint of mdlm or duo as a run folder of ours, which every command then takes.

VOCABULARIES = {50_258: "gpt2", 30_522: "bert-base-uncased"}
"""Rows of their embeddings, by which a published model's tokenizer is known."""
LENGTHS = {"gpt2": 1024, "bert-base-uncased": 128}
"""Block lengths of their OpenWebText and LM1B recipes."""


@dataclass(frozen=True)
class ImportRequest:
    """What the user says of a checkpoint; None where the files may tell."""

    format: Format = "mdlm"
    tokenizer: str | None = None
    heads: int | None = None
    block_length: int | None = None
    has_time: bool = False
    weights: Weights = "auto"


@dataclass(frozen=True)
class Imported:
    """What was read, checked and mapped; nothing is written yet."""

    origin: str
    """Where it came from: a name on the hub, or a file's or folder's name."""
    stored: Stored
    config: RunConfig
    tokenizer: Tokenizer
    model: dict[str, Tensor]
    ema: dict[str, Tensor] | None

    @property
    def num_parameters(self) -> int:
        """Of the model as it is here."""
        return sum(tensor.numel() for tensor in self.model.values())


def read_import(source: str, request: ImportRequest) -> Imported:
    """Read and check everything; a UserError names all that does not fit."""
    look_up("format", request.format, {"mdlm": 0, "duo": 0})
    stored = read_checkpoint(local_folder(source))
    _check_kind(stored)
    weights, head_size = drop_rotary(plain_names(stored.weights))
    shape = find_shape(weights)
    shadow = _shadow(stored, shape, request.weights)
    name, tokenizer = _find_tokenizer(request.tokenizer, shape)
    config = _config(request, stored, shape, head_size, name, tokenizer)
    has_time = config.model.modulation == "time"
    ids = map_ids(tokenizer)
    model = to_ours(weights, shape, ids, has_time=has_time)
    ema = to_ours(shadow, shape, ids, has_time=has_time) if shadow else None
    origin = Path(source).name if Path(source).exists() else source
    return Imported(origin, stored, config, tokenizer, model, ema)


def write_import(imported: Imported, out: Path) -> None:
    """The run folder, whole or not at all."""
    config, tokenizer, step = imported.config, imported.tokenizer, imported.stored.step
    description = {
        "imported_from": imported.origin,
        "parameters": imported.num_parameters,
        "num_tokens": tokenizer.num_tokens,
        "mask_id": tokenizer.mask_id,
        "tokenizer_fingerprint": tokenizer.fingerprint,
    }
    tensors = {f"model.{name}": tensor for name, tensor in imported.model.items()}
    tensors |= {f"ema.{name}": tensor for name, tensor in (imported.ema or {}).items()}
    state: dict[str, Any] = {"format": FORMAT, "mask_id": tokenizer.mask_id, "step": step}
    state |= {"tokens": 0, "seconds": 0.0, "nll": None, "window": asdict(Window())}
    with whole_folder(out, "the run") as folder:
        write_description(folder, config, tokenizer, description, {})
        CheckpointStore(folder / "checkpoints", config.checkpoint, World()).save(
            step, tensors, state
        )


def import_checkpoint(
    source: str,
    out: str | Path,
    request: ImportRequest | None = None,
    on_stage: Callable[[str], None] = lambda _: None,
) -> Imported:
    """Make a run folder of a file, a folder or a hub repository in mdlm's layout."""
    check_free(Path(out), "the run")
    on_stage(f"reading {source}")
    imported = read_import(source, request or ImportRequest())
    on_stage(f"writing {out}")
    write_import(imported, Path(out))
    return imported


def _check_kind(stored: Stored) -> None:
    """Refuse what says of itself that it is another kind of model."""
    kind = str(stored.options.get("model_type", "mdlm")).lower()
    if kind != "mdlm":
        raise UserError(
            f"{stored.source} is a {kind} model by its config.json, not mdlm: only masked "
            "diffusion in mdlm's layout can be imported (duo's own models replace tokens by "
            "other tokens instead of a mask; its mdlm baselines are fine)"
            + ("; load this one with bellmask.load" if kind == "bellmask" else "")
        )


def _shadow(stored: Stored, shape: Shape, which: str) -> dict[str, Tensor] | None:
    """The moving average by name, checked; None where there is none or it is not wanted."""
    look_up("weights", which, {"auto": 0, "ema": 0, "raw": 0})
    if which == "raw" or (which == "auto" and stored.shadow is None):
        return None
    if stored.shadow is None:
        raise UserError(f"{stored.source} holds no moving average; leave --weights ema out")
    names = list(shape.layout())
    if len(stored.shadow) != len(names):
        raise UserError(
            f"the moving average in {stored.source} has {len(stored.shadow)} tensors, the model "
            f"{len(names)}; take the trained weights with --weights raw"
        )
    shadow = dict(zip(names, stored.shadow, strict=True))
    check_layout(shadow, shape)
    return shadow


def _find_tokenizer(name: str | None, shape: Shape) -> tuple[str, Tokenizer]:
    if name is None:
        name = VOCABULARIES.get(shape.vocabulary)
    if name is None:
        raise UserError(
            f"the embedding has {shape.vocabulary} rows, neither GPT-2's 50258 nor BERT's 30522: "
            "say with --tokenizer which one the model was trained with"
        )
    tokenizer = read_own_tokenizer(Path(name)) or load_tokenizer(name, cache_folder(None))
    size = map_ids(tokenizer).size
    if size != shape.vocabulary:
        raise UserError(
            f"tokenizer {name} needs an embedding of {size} rows with its mask, and this one has "
            f"{shape.vocabulary}; give the tokenizer the model was trained with by --tokenizer"
        )
    return name, tokenizer


def _config(
    request: ImportRequest,
    stored: Stored,
    shape: Shape,
    head_size: int | None,
    name: str,
    tokenizer: Tokenizer,
) -> RunConfig:
    """The options of a run that would train such a model: their recipe, base objective."""
    options = stored.options
    length = request.block_length or _number(options, "model_length") or LENGTHS.get(name)
    if length is None:
        raise UserError("how long the model's rows are is not in the file; give --block-length")
    has_time = request.has_time or bool(options.get("time_conditioning", False))
    step = max(1, stored.step)
    average = 0.0 if stored.shadow is None or request.weights == "raw" else stored.decay or 0.9999
    return RunConfig(
        data=_data_options(request.format, options, name, length, tokenizer),
        model=ModelOptions(
            num_layers=shape.num_layers,
            width=shape.width,
            num_heads=_num_heads(request.heads, options, shape, head_size),
            mlp_ratio=_mlp_ratio(shape),
            dropout=_share(options, "dropout", ModelOptions.dropout),
            modulation="time" if has_time else "constant",
            time_input="sigma" if has_time else "stretched",
        ),
        law=LawOptions("uniform"),
        objective=ObjectiveOptions("nelbo"),
        optim=OptimOptions(ema=average),
        train=TrainOptions(steps=step),
        checkpoint=CheckpointOptions(keep_steps=(stored.step,) if stored.step else ()),
    ).check()


def _data_options(
    format: Format, options: dict[str, Any], name: str, length: int, tokenizer: Tokenizer
) -> DataOptions:
    """How their rows look: wrapped, packed; but mdlm's LM1B has a sentence per padded row."""
    is_padded = format == "mdlm" and name == "bert-base-uncased"
    recipe: dict[str, Any] = {
        "wrap": tokenizer.eos_id >= 0,
        "packing": "unpacked" if is_padded else "packed",
        "pads": "noised" if is_padded else "ignored",
    }
    kinds = {"wrap": (True, False), "packing": ("packed", "unpacked")}
    for key, allowed in (kinds | {"pads": ("ignored", "noised")}).items():
        if key in options and options[key] not in allowed:
            raise UserError(f"config.json says {key}={options[key]!r:.40}: none of {allowed}")
    recipe |= {key: options[key] for key in recipe if key in options}
    return DataOptions(train=IMPORTED, tokenizer=name, block_length=length, **recipe)


def _num_heads(
    given: int | None, options: dict[str, Any], shape: Shape, head_size: int | None
) -> int:
    """From the command, RoPE's buffer or config.json, which must agree."""
    told = {
        "--heads": given,
        "the file's rotary buffer": shape.width // head_size if head_size else None,
        "what the file or its config.json says": _number(options, "n_heads"),
    }
    known = {where: number for where, number in told.items() if number is not None}
    if not known:
        raise UserError(
            "how many heads the attention has is not in the file; give --heads "
            "(their small model has 12, medium 16)"
        )
    if len(set(known.values())) > 1:
        said = ", ".join(f"{number} by {where}" for where, number in known.items())
        raise UserError(f"the number of heads is not clear: {said}")
    return next(iter(known.values()))


def _number(options: dict[str, Any], key: str) -> int | None:
    """A count that config.json may hold."""
    value = options.get(key)
    if value is not None and not is_whole(value, 1):
        raise UserError(f"config.json says {key}={value!r}, which must be a count of 1 or more")
    return value


def _share(options: dict[str, Any], key: str, otherwise: float) -> float:
    """A share that config.json may hold."""
    value = options.get(key, otherwise)
    if not is_number(value) or not 0 <= value < 1:
        raise UserError(f"config.json says {key}={value!r:.40}, which must be in [0, 1)")
    return value


def _mlp_ratio(shape: Shape) -> int:
    if shape.mlp_width % shape.width:
        raise UserError(
            f"the MLP is {shape.mlp_width} wide, no multiple of the model's {shape.width}"
        )
    return shape.mlp_width // shape.width


# The command.


def _say(stage: str) -> None:
    print(f"{stage} ...", file=sys.stderr)


def _show(imported: Imported, out: str) -> None:
    model, data = imported.config.model, imported.config.data
    size = sum(t.numel() * t.element_size() for t in imported.stored.weights.values())
    average = "trained weights" if imported.ema is None else "trained weights, moving average"
    time = {"constant": "none (AdaLN folded into constants)", "time": "kept (sigma)"}
    Table(
        f"imported {imported.origin}",
        ["quantity", "value"],
        [
            ["tensors read", f"{len(imported.stored.weights)} ({size / 1e6:,.1f} MB)"],
            ["blocks, width, heads", f"{model.num_layers}, {model.width}, {model.num_heads}"],
            ["tokenizer", f"{data.tokenizer}, {imported.tokenizer.num_tokens:,} tokens"],
            ["row length", f"{data.block_length}"],
            ["time input", time[model.modulation]],
            ["weights", average],
            ["step", f"{imported.stored.step:,}"],
            ["parameters here", f"{imported.num_parameters:,}"],
        ],
    ).print()
    print(f"run folder {out}; measure it with: bellmask evaluate {out} --data TEXT")


def main(args: Sequence[str]) -> int:
    """Import, say what was read."""
    options = parse_command(ImportOptions, args, command="import")
    for name, value in (("--heads", options.heads), ("--block-length", options.block_length)):
        if value is not None and value < 1:
            raise UserError(f"{name} must be at least 1, got {value}")

    request = ImportRequest(
        format=options.format,
        tokenizer=options.tokenizer,
        heads=options.heads,
        block_length=options.block_length,
        has_time=options.time_input,
        weights=options.weights,
    )
    imported = import_checkpoint(options.checkpoint, options.out, request, on_stage=_say)
    _show(imported, options.out)
    return 0
