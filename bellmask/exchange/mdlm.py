"""``bellmask import``: a checkpoint in the published layout of mdlm and duo as a run folder.

The parts: the options; the map between their parameters and ours, both ways (``bellmask export``
uses it too); weights in files; the run folder; the command itself.
"""

from __future__ import annotations

import itertools
import pickle
import sys
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import torch
import torch.nn.functional as F
import tyro
from torch import Tensor

from bellmask.config.command_line import parse_command
from bellmask.config.config import RunConfig
from bellmask.data.corpora import IMPORTED
from bellmask.data.readers import cache_folder
from bellmask.data.tokenizers import Tokenizer, load_tokenizer
from bellmask.model.dit import CONDITION_WIDTH, NUM_SINUSOIDS, ROPE_BASE
from bellmask.storage import loading
from bellmask.storage.checkpoint import FORMAT, CheckpointStore
from bellmask.storage.loading import IdMap, local_folder, map_ids, read_own_tokenizer
from bellmask.storage.run_folder import describe_tokenizer, write_description
from bellmask.train.metrics import Window
from bellmask.utils.distributed import World
from bellmask.utils.errors import UserError
from bellmask.utils.files import check_free, is_whole, load_json, read_object, whole_folder
from bellmask.utils.libraries import first_line
from bellmask.utils.table import Table


@dataclass(frozen=True)
class ImportOptions:
    """Convert a checkpoint in the published format of mdlm and duo into a run folder.

    evaluate, generate and analyze accept it like any run (evaluate needs --data, since the training
    text is not included).

    Examples:
    bellmask import kuleshov-group/mdlm-owt --format mdlm --out runs/mdlm-owt

    bellmask import weights.pt --format duo --heads 12 --out runs/duo-lm1b

    bellmask import model.safetensors --format mdlm --tokenizer runs/bell --out runs/back
    """

    checkpoint: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="CHECKPOINT")]
    """A .safetensors file, a torch file of weights, a folder with config.json and weights,
    or OWNER/NAME on the hub."""
    format: Literal["mdlm", "duo"]
    """Recipe of the training rows. Both share the format; they differ in how LM1B is packed."""
    out: str
    """Run folder to create."""
    tokenizer: str | None = None
    """gpt2, bert-base-uncased, a folder with a Hugging Face tokenizer, or a run folder. Default: by
    the rows of the embedding (50258: gpt2, 30522: bert-base-uncased)."""
    heads: int | None = None
    """Attention heads; default: from config.json or the rotary buffer."""
    block_length: int | None = None
    """Tokens per row; default: model_length in the config.json next to the weights, else 1024 for
    gpt2, 128 for BERT."""
    time_input: bool = False
    """Keep the model's time conditioning; default: as in config.json if there is one."""
    weights: loading.Weights = "auto"
    """auto: the trained weights, and the moving average if the file has one. ema: fail without
    a moving average. raw: the trained weights only."""


# Their parameters and ours.
#
# mdlm's network is our backbone with other names: RoPE of base 10 000 by halves, queries, keys and
# values packed as (three, heads, size), layer norms with weight only. What differs:
#
# - AdaLN is always present. A model without time input gets sigma = 0, so its AdaLN gives
#   constants, which are our modulation vectors. On export, the constants become AdaLN's bias, and
#   all weights of the time embedding are zero: the same function, but not the trained values.
# - The mask has its tokenizer's row in the embedding, and an unused row in the head; ours has none
#   in the head.
# - A pad that only our tokenizer has gets a row whose probability is exactly zero.

Tensors = Mapping[str, Tensor]

NEVER = -1e6
"""The logit of tokens that are never predicted (as in mdlm): its exponential is zero."""

_LAYOUT = resources.files("bellmask.exchange").joinpath("mdlm.layout").read_text(encoding="utf-8")
LAYOUT = [line.split() for line in _LAYOUT.splitlines() if not line.startswith("#")]
"""Their name, ours and the axes of each parameter; * stands for the number of a block."""
_ABSENT_ROWS = {"embedding.weight": 0.0, "head.weight": 0.0, "head.bias": NEVER}
"""Parameters with a row per token, and the value of rows that the other side lacks."""

OPTIONS = {
    "n_heads": "model.num_heads",
    "model_length": "data.block_length",
    "dropout": "model.dropout",
    "wrap": "data.wrap",
    "packing": "data.packing",
    "pads": "data.pads",
}
"""Keys of config.json, or of our metadata, and the option of a run for each."""


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

    def parameters(self) -> list[tuple[str, str, tuple[int, ...]]]:
        """(their name, ours, shape) of every parameter, in their order."""
        sizes = {"V": self.vocabulary, "H": self.mlp_width, "C": self.condition, "S": NUM_SINUSOIDS}
        sizes |= {f"{n}D".lstrip("1"): n * self.width for n in (1, 2, 3, 6)}
        found = []
        for is_block, rows in itertools.groupby(LAYOUT, lambda row: "*" in row[0]):
            held = list(rows)
            for number in range(self.num_layers if is_block else 1):
                for theirs, ours, *axes in held:
                    a, b = (name.replace("*", str(number)) for name in (theirs, ours))
                    found.append((a, b, tuple(sizes[axis] for axis in axes)))
        return found

    def layout(self) -> dict[str, tuple[int, ...]]:
        """Every parameter's shape by their name."""
        return {theirs: shape for theirs, _, shape in self.parameters()}


INV_FREQ = "rotary_emb.inv_freq"
"""Their buffer of RoPE frequencies: not a parameter, but required by a strict load_state_dict."""


def rotary_rates(head_size: int) -> Tensor:
    """The buffer, [head size / 2]; in the order of their operations, so to the bit."""
    return 1.0 / ROPE_BASE ** (torch.arange(0, head_size, 2).float() / head_size)


def plain_names(stored: Tensors) -> tuple[dict[str, Tensor], int | None]:
    """Remove prefixes of Lightning, torch.compile and DDP, and RoPE buffers; return the size of a
    head too, if a buffer gives it.
    """
    found: dict[str, Tensor] = {}
    head_size = None
    for name, tensor in stored.items():
        plain = name.replace("_orig_mod.", "").removeprefix("module.").removeprefix("backbone.")
        if "rotary_emb." in plain:
            if not plain.endswith(INV_FREQ):
                continue
            head_size, found_rates = 2 * tensor.numel(), tensor.float().flatten()
            # a hundredth: they may be stored in bfloat16
            if not torch.allclose(found_rates, rotary_rates(head_size), rtol=0.01, atol=0):
                raise UserError(f"{name}: only RoPE of base {ROPE_BASE:.0f} can be imported")
        else:
            found[plain] = tensor
    return found, head_size


def find_shape(weights: Tensors) -> Shape:
    """The sizes, checked against every tensor; one error lists all that does not fit."""
    needed = ("vocab_embed.embedding", "sigma_map.mlp.0.weight", "blocks.0.mlp.0.weight")
    absent = [name for name in needed if name not in weights or weights[name].ndim != 2]
    if absent:
        raise UserError(f"not a masked model in mdlm's layout: no matrix {', '.join(absent)}")
    embedding, time, mlp = (weights[name] for name in needed)
    blocks = {name.split(".")[1] for name in weights if name.startswith("blocks.")}
    shape = Shape(len(blocks), embedding.shape[1], len(mlp), len(time), len(embedding))
    check_layout(weights, shape)
    return shape


def check_layout(weights: Tensors, shape: Shape) -> None:
    """Reject weights with missing, unexpected or misshapen tensors, and list all of them."""
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
    found = {ours: weights[name].detach().float() for name, ours, _ in shape.parameters()}
    num_tokens = len(ids.tokens_V)
    ours, theirs = [*ids.ours, num_tokens], [*ids.theirs, ids.mask]
    _move_rows(found, theirs, ours, num_tokens + 1)
    for name in ("head.weight", "head.bias"):  # the mask's logit is never used
        found[name] = found[name][:-1]
    if has_time:
        if shape.condition != CONDITION_WIDTH:
            raise UserError(f"the time's embedding must be {CONDITION_WIDTH} wide to be kept")
        return found
    # AdaLN's input at sigma = 0: cosines of 0, sines of 0, two layers, SiLU
    condition = (torch.arange(NUM_SINUSOIDS) < NUM_SINUSOIDS // 2).double()
    for layer in ("time_embedding.into", "time_embedding.out"):
        condition = F.silu(_pop_linear(found, layer, condition))
    for name in _modulations(found, ".linear.weight"):
        vectors = _pop_linear(found, f"{name}.linear", condition)
        found[f"{name}.vectors"] = vectors.float().view(-1, shape.width)
    return found


def from_ours(tensors: Tensors, num_layers: int, ids: IdMap) -> dict[str, Tensor]:
    """Their parameters, float32; :func:`to_ours` is the exact inverse."""
    found = {name: tensor.detach().float() for name, tensor in tensors.items()}
    ours, theirs = [*ids.ours, len(ids.tokens_V)], [*ids.theirs, ids.mask]
    for name in ("head.weight", "head.bias"):
        absent = torch.full_like(found[name][:1], _ABSENT_ROWS[name])
        found[name] = torch.cat([found[name], absent])
    _move_rows(found, ours, theirs, ids.size)
    for name in _modulations(found, ".vectors"):  # constants: a bias behind weights of zero
        found[f"{name}.linear.bias"] = found[f"{name}.vectors"].flatten()
    width, mlp_width = found["final_norm.weight"].numel(), found["blocks.0.mlp_in.bias"].numel()
    shape = Shape(num_layers, width, mlp_width, CONDITION_WIDTH, ids.size)
    return {
        theirs: found[ours] if ours in found else torch.zeros(size)
        for theirs, ours, size in shape.parameters()
    }


def _move_rows(
    tensors: dict[str, Tensor], source: Sequence[int], target: Sequence[int], size: int
) -> None:
    for name, absent in _ABSENT_ROWS.items():
        moved = tensors[name].new_full((size, *tensors[name].shape[1:]), absent)
        moved[target] = tensors[name][source]
        tensors[name] = moved


def _modulations(tensors: Tensors, ending: str) -> list[str]:
    return [n.removesuffix(ending) for n in tensors if n.endswith(f"modulation{ending}")]


def _pop_linear(tensors: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    """A linear map of x in float64, taken out of the tensors."""
    return tensors.pop(f"{name}.weight").double() @ x + tensors.pop(f"{name}.bias").double()


# Weights in files, read without executing anything in them.
#
# safetensors files, torch files (tensors and plain values; stand-ins for all else), and folders as
# Hugging Face has them, with config.json next to the weights. A Lightning file may also hold the
# moving average of the weights, as a list in the order of the parameters.

METADATA = "bellmask"
"""Metadata key of our safetensors exports for options that the layout cannot represent."""
_WEIGHT_FILES = ("model.safetensors", "pytorch_model.bin")


@dataclass(frozen=True)
class Stored:
    """What a checkpoint file or folder holds."""

    source: Path
    weights: dict[str, Tensor]
    shadow: Sequence[Tensor] | None = None
    """The moving average, in the order of the parameters."""
    decay: Any = None
    step: int = 0
    about: dict[str, Any] = field(default_factory=dict)
    """Description of the model in config.json (or in our metadata)."""


def read_checkpoint(path: Path) -> Stored:
    """Read a file or folder; a UserError says what is wrong with it."""
    if not path.exists():
        raise UserError(f"there is no checkpoint {path}; give a file, a folder or OWNER/NAME")
    files = [path / name for name in _WEIGHT_FILES] if path.is_dir() else [path]
    file = next((file for file in files if file.exists()), None)
    if file is None:
        raise UserError(f"{path} has no weights: neither {' nor '.join(_WEIGHT_FILES)}")
    stored = _read_safetensors(file) if file.suffix == ".safetensors" else _read_torch(file)
    tensors = [*stored.weights.values(), *(stored.shadow or ())]
    if not is_whole(stored.step) or not all(map(_is_plain, tensors)):
        raise UserError(f"{file} is damaged: its tensors, step or moving average are invalid")
    config = file.with_name("config.json")
    is_told = file.name in _WEIGHT_FILES and config.exists()
    return replace(stored, about=stored.about | (read_object(config) if is_told else {}))


def _is_plain(value: Any) -> bool:
    """Check that the file contains all numbers: not sparse, not on the meta device, not
    expanded.
    """
    if not isinstance(value, Tensor) or value.layout != torch.strided or value.is_quantized:
        return False
    is_here = value.device.type == "cpu"
    return is_here and value.numel() * value.element_size() <= value.untyped_storage().nbytes()


def _read_safetensors(path: Path) -> Stored:
    weights, metadata = loading.read_safetensors(path)
    about = dict(load_json(metadata.get(METADATA, "{}")))
    return Stored(path, weights, step=about.get("step", 0), about=about)


def write_safetensors(tensors: Mapping[str, Tensor], path: Path, **metadata: str) -> None:
    """Write a file with permissions by the umask (the library's files are private to the owner)."""
    from safetensors.torch import save_file

    path.touch()
    mode = path.stat().st_mode
    whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(whole, path, metadata={"format": "pt", **metadata})
    path.chmod(mode)


def _read_torch(path: Path) -> Stored:
    how: dict[str, Any] = {"map_location": "cpu", "weights_only": True}
    try:
        if zipfile.is_zipfile(path):  # others are of torch before 1.6
            with zipfile.ZipFile(path) as archive:
                size = sum(info.file_size for info in archive.infolist())
            if size > path.stat().st_size:  # it may grow a thousandfold
                raise UserError(f"{path} is compressed, which torch's files never are: not read")
            # mapped: optimizer states are never read
            how |= {"weights_only": False, "pickle_module": _Pickles, "mmap": True}
        content = torch.load(path, **how)
    except UserError:
        raise
    except Exception as error:  # invalid files fail in many ways
        reason = first_line(error).split(". ")[0] or "it ends too early"
        raise UserError(f"{path} is not a torch file, or a damaged one: {reason}") from None
    content = content if isinstance(content, Mapping) else {}
    inner = next((content[key] for key in ("state_dict", "model") if key in content), content)
    named = inner.items() if isinstance(inner, Mapping) else ()
    weights = {n: t for n, t in named if isinstance(t, Tensor) and isinstance(n, str)}
    if not weights:
        raise UserError(f"{path} has no tensors by name")
    if inner is content:
        return Stored(path, weights)
    average = content.get("ema")
    average = average if isinstance(average, Mapping) else {}
    shadow = average.get("shadow_params")
    shadow = shadow if isinstance(shadow, list | tuple | None) else [shadow]
    return Stored(path, weights, shadow, average.get("decay"), content.get("global_step", 0))


class _StandIn:
    """Replaces a pickled object of any class: accepts anything, stores nothing, does nothing."""

    def __new__(cls, *_: Any, **__: Any) -> _StandIn:
        return super().__new__(cls)

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def _ignore(self, *_: Any) -> None: ...

    __setitem__ = append = extend = add = _ignore  # how a pickle fills containers


_KNOWN = {
    ("collections", "OrderedDict"),
    ("torch._utils", "_rebuild_tensor_v2"),
    ("torch._utils", "_rebuild_parameter"),
}
"""What a pickle may name; every other name gives a :class:`_StandIn`."""


class _Pickles:
    """A pickle module for ``torch.load`` that imports and calls nothing but :data:`_KNOWN`.

    Lightning pickles a run's options and tokenizer beside the weights, and torch's weights-only
    loader rejects such files. This is Python's unpickler, not the one in C, which allocates memory
    for any memo index that a file names.
    """

    class Unpickler(pickle._Unpickler):
        # BUILD would set attributes, those of functions too: the state is dropped
        dispatch: ClassVar[dict[int, Any]] = {
            **pickle._Unpickler.dispatch,
            pickle.BUILD[0]: lambda self: self.stack.pop(),
        }

        def find_class(self, module: str, name: str) -> Any:
            is_known = (module, name) in _KNOWN
            return super().find_class(module, name) if is_known else _StandIn


# A checkpoint of mdlm or duo as a run folder of ours, which every command then takes.

VOCABULARIES = {50_258: "gpt2", 30_522: "bert-base-uncased"}
"""Rows of their embeddings, which identify the tokenizer of a published model."""
LENGTHS = {"gpt2": 1024, "bert-base-uncased": 128}
"""Block lengths of their OpenWebText and LM1B recipes."""


@dataclass(frozen=True)
class Imported:
    """A checkpoint that was read, checked and mapped, but not written yet."""

    origin: str
    """Source: a name on the hub, or the name of a file or folder."""
    stored: Stored
    config: RunConfig
    tokenizer: Tokenizer
    model: dict[str, Tensor]
    ema: dict[str, Tensor] | None

    @property
    def num_parameters(self) -> int:
        """The model's configuration."""
        return sum(tensor.numel() for tensor in self.model.values())


def read_import(options: ImportOptions) -> Imported:
    """Read and check everything; a UserError names all that does not fit."""
    source = options.checkpoint
    stored = read_checkpoint(local_folder(source))
    kind = str(stored.about.get("model_type", "mdlm")).lower()
    if kind != "mdlm":
        raise UserError(f"{stored.source} is a {kind} model; only mdlm's can be imported")
    weights, head_size = plain_names(stored.weights)
    shape = find_shape(weights)
    if options.weights == "raw":
        stored = replace(stored, shadow=None)
    elif options.weights == "ema" and stored.shadow is None:
        raise UserError(f"{stored.source} has no moving average; omit --weights ema")
    name, tokenizer = _find_tokenizer(options.tokenizer, shape)
    heads = _num_heads(options.heads, stored.about.get("n_heads"), shape, head_size)
    config = _config(options, stored, shape, heads, name, tokenizer)
    has_time, ids = config.model.modulation == "time", map_ids(tokenizer)
    model, ema = to_ours(weights, shape, ids, has_time=has_time), None
    if stored.shadow is not None:
        averaged = dict(zip(shape.layout(), stored.shadow))
        if len(stored.shadow) != len(weights):
            raise UserError(f"{stored.source}: its moving average does not fit; use --weights raw")
        check_layout(averaged, shape)
        ema = to_ours(averaged, shape, ids, has_time=has_time)
    origin = Path(source).name if Path(source).exists() else source
    return Imported(origin, stored, config, tokenizer, model, ema)


def _find_tokenizer(name: str | None, shape: Shape) -> tuple[str, Tokenizer]:
    name = name or VOCABULARIES.get(shape.vocabulary)
    if name is None:
        raise UserError(f"no tokenizer is known for {shape.vocabulary} rows; give --tokenizer")
    tokenizer = read_own_tokenizer(Path(name)) or load_tokenizer(name, cache_folder(None))
    size = map_ids(tokenizer).size
    if size != shape.vocabulary:
        raise UserError(f"--tokenizer {name} has {size} ids, the embedding {shape.vocabulary} rows")
    return name, tokenizer


def _num_heads(given: int | None, told: Any, shape: Shape, head_size: int | None) -> Any:
    """From the command, RoPE's buffer or config.json, which must agree."""
    counted = shape.width // head_size if head_size else None
    sources = {"--heads": given, "the rotary buffer": counted, "config.json": told}
    known = {where: number for where, number in sources.items() if number is not None}
    if not known or any(number != next(iter(known.values())) for number in known.values()):
        said = ", ".join(f"{number} by {where}" for where, number in known.items())
        raise UserError(f"the heads are unclear ({said or 'not in the file'}); give --heads")
    return next(iter(known.values()))


def _config(
    options: ImportOptions,
    stored: Stored,
    shape: Shape,
    heads: Any,
    name: str,
    tokenizer: Tokenizer,
) -> RunConfig:
    """The options of a run that would train such a model: their recipe, base objective."""
    # mdlm's LM1B has a sentence per padded row; all other rows are packed
    is_padded = options.format == "mdlm" and name == "bert-base-uncased"
    has_time = options.time_input or bool(stored.about.get("time_conditioning", False))
    told = {OPTIONS[k]: v for k, v in stored.about.items() if k in OPTIONS and v is not None}
    told |= {"model.num_heads": heads, "optim.ema": 0.0}
    if stored.shadow is not None:
        told["optim.ema"] = stored.decay or 0.9999
    if options.block_length is not None:
        told["data.block_length"] = options.block_length
    elif "data.block_length" not in told and name not in LENGTHS:
        raise UserError(f"the row length of {stored.source} is unknown; give --block-length")
    for option, value in told.items():
        if not isinstance(value, bool | int | float | str):
            raise UserError(f"{stored.source}: {option} cannot be {value!s:.40}")
    recipe = {
        "data.train": IMPORTED,
        "data.tokenizer": name,
        "data.block_length": LENGTHS.get(name),
        "data.wrap": tokenizer.eos_id >= 0,
        "data.packing": "unpacked" if is_padded else "packed",
        "data.pads": "noised" if is_padded else "ignored",
        "model.num_layers": shape.num_layers,
        "model.width": shape.width,
        "model.mlp_ratio": shape.mlp_width // shape.width,
        "model.modulation": "time" if has_time else "constant",
        "model.time_input": "sigma" if has_time else "stretched",
        "law.name": "uniform",
        "objective.name": "nelbo",
        "train.steps": max(1, stored.step),
        "checkpoint.keep_steps": (stored.step,) if stored.step else (),
    }
    return RunConfig().with_options({**recipe, **told})


def write_import(imported: Imported, out: Path) -> None:
    """The run folder, whole or not at all."""
    config, tokenizer, step = imported.config, imported.tokenizer, imported.stored.step
    description = {"imported_from": imported.origin, "parameters": imported.num_parameters}
    description |= describe_tokenizer(tokenizer)
    tensors = {f"model.{name}": tensor for name, tensor in imported.model.items()}
    tensors |= {f"ema.{name}": tensor for name, tensor in (imported.ema or {}).items()}
    state: dict[str, Any] = {"format": FORMAT, "mask_id": tokenizer.mask_id, "step": step}
    state |= {"tokens": 0, "seconds": 0.0, "nll": None, "window": asdict(Window())}
    with whole_folder(out, "the run") as folder:
        write_description(folder, config, tokenizer, description, {})
        store = CheckpointStore(folder / "checkpoints", config.checkpoint, World())
        store.save(step, tensors, state)


def main(args: Sequence[str]) -> int:
    """Import, and print a summary."""
    options = parse_command(ImportOptions, args, command="import")
    check_free(Path(options.out), "the run")
    print(f"reading {options.checkpoint} ...", file=sys.stderr)
    imported = read_import(options)
    print(f"writing {options.out} ...", file=sys.stderr)
    write_import(imported, Path(options.out))

    model, data = imported.config.model, imported.config.data
    time = {"constant": "none (AdaLN folded into constants)", "time": "kept (sigma)"}
    average = "" if imported.ema is None else ", moving average"
    rows = {
        "blocks, width, heads": f"{model.num_layers}, {model.width}, {model.num_heads}",
        "tokenizer": f"{data.tokenizer}, {imported.tokenizer.num_tokens:,} tokens",
        "row length": f"{data.block_length}",
        "time input": time[model.modulation],
        "weights": f"trained weights{average}",
        "step": f"{imported.stored.step:,}",
        "parameters": f"{imported.num_parameters:,}",
    }
    Table(f"imported {imported.origin}", ["quantity", "value"], list(rows.items())).print()
    print(f"run folder {options.out}; evaluate it: bellmask evaluate {options.out} --data TEXT")
    return 0
