"""Weights in files, read without running anything that a file holds.

safetensors files, torch files (tensors and plain values only), and folders as Hugging Face has
them, with config.json beside the weights. A Lightning file may also hold the moving average of the
weights, as a list in the order of the parameters.
"""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bellmask.utils.errors import UserError
from bellmask.utils.files import inside, is_number, is_whole, load_json, read_json

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
