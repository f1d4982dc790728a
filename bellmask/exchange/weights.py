"""Weights in files, read without running anything that a file holds.

safetensors files, torch files (tensors and plain values only), and folders as Hugging Face has
them, with config.json beside the weights. A Lightning file may also hold the moving average of the
weights, as a list in the order of the parameters.
"""

from __future__ import annotations

import json
import pickle
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from bellmask.errors import UserError

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
        shards = sorted(set(_read_json(index).get("weight_map", {}).values()))
        weights: dict[str, Tensor] = {}
        for shard in shards:
            weights |= _read_safetensors(folder / shard)[0]
        return Stored(folder, weights, options=options)
    for name in _WEIGHT_FILES:
        if (folder / name).exists():
            found = read_checkpoint(folder / name)
            merged = {**found.options, **options}
            return Stored(folder, found.weights, found.shadow, found.decay, found.step, merged)
    raise UserError(f"{folder} holds no weights: neither {' nor '.join(_WEIGHT_FILES)} is there")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
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
            options = json.loads((stream.metadata() or {}).get(METADATA, "{}"))
    except (SafetensorError, OSError, ValueError) as error:
        raise UserError(f"cannot read {path}: {error}") from None
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
    import torch

    try:
        return torch.load(path, map_location="cpu", weights_only=True)
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


def _from_torch(path: Path, content: Any) -> Stored:
    if not isinstance(content, Mapping):
        raise UserError(f"{path} holds a {type(content).__name__}, not weights by name")
    inner = next((content[k] for k in ("state_dict", "model") if k in content), content)
    weights = {k: v for k, v in inner.items() if isinstance(v, Tensor)}
    if not weights:
        raise UserError(f"{path} holds no tensors by name")
    average = content.get("ema") if inner is not content else None
    shadow, decay = None, None
    if isinstance(average, Mapping) and average.get("shadow_params"):
        shadow, decay = list(average["shadow_params"]), average.get("decay")
    step = content.get("global_step", 0) if inner is not content else 0
    return Stored(path, weights, shadow, decay, int(step))
