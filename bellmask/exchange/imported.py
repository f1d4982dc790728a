"""A checkpoint of mdlm or duo as a run folder of ours, which every command then takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

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
from bellmask.exchange.mdlm import (
    Shape,
    check_layout,
    drop_rotary,
    find_shape,
    plain_names,
    to_ours,
)
from bellmask.exchange.weights import Stored, read_checkpoint
from bellmask.storage.checkpoint import FORMAT, CheckpointStore
from bellmask.storage.loading import local_folder, map_ids, read_own_tokenizer
from bellmask.storage.run_folder import write_description
from bellmask.train.metrics import Window
from bellmask.utils.distributed import World
from bellmask.utils.errors import UserError, look_up
from bellmask.utils.files import check_free, is_number, is_whole, whole_folder

Format = Literal["mdlm", "duo"]

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
    weights: Literal["auto", "ema", "raw"] = "auto"


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
    state |= {"tokens": 0, "seconds": 0.0, "nll": None, "window": Window().state()}
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
