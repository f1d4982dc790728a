"""``bellmask.load``: a run folder, an exported folder, or a name on the hub, as a :class:`Run`.

An exported folder holds ``model.safetensors`` with rows in the tokenizer's own order, and beside it
what a run needs: ``run.json``, ``bellmask/config.json``, ``bellmask/tokenizer.json`` and, of a run
on a causal LM, ``bellmask/backbone.json``.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from bellmask.build import build_framework, build_stored
from bellmask.config.config import load_config
from bellmask.data.tokenizers import Tokenizer
from bellmask.exchange.causal_weights import from_export
from bellmask.exchange.hub import local_folder
from bellmask.exchange.vocabulary import map_ids
from bellmask.model.pretrained import PretrainedDenoiser
from bellmask.run import Run, Weights, load_run
from bellmask.runfolder import read_backbone, read_description, read_tokenizer
from bellmask.utils.distributed import pick_device
from bellmask.utils.errors import UserError
from bellmask.utils.files import is_whole

OWN = "bellmask"
"""The subfolder of an export that holds what transformers has no file for."""
MODEL = "model.safetensors"
OWN_TENSORS = "mask_row.safetensors"
"""In the subfolder: what the model of an ARM on a causal LM has no place for."""


def load(
    name: str | Path,
    *,
    checkpoint: str = "latest",
    weights: Weights = "auto",
    device: str = "auto",
) -> Run:
    """Load a run folder, a folder that ``bellmask export --format hf`` wrote, or OWNER/NAME.

    An export holds one checkpoint's weights of one kind; asking it for others is an error.
    """
    folder = local_folder(str(name))
    if is_export(folder):
        return _load_export(folder, checkpoint, weights, device)
    if folder.exists() and not (folder / "checkpoints").exists() and (folder / MODEL).exists():
        raise UserError(
            f"{name} holds weights, but not of bellmask; a causal LM becomes a masked model with: "
            f"bellmask train cpt_tiny --start.model {name}; mdlm's layout is read by: bellmask "
            f"import {name} --format mdlm --out FOLDER"
        )
    return load_run(folder, checkpoint=checkpoint, weights=weights, device=device)


def is_export(folder: Path) -> bool:
    """True for what ``bellmask export --format hf`` wrote."""
    return (folder / OWN / "config.json").exists()


def read_own_tokenizer(folder: Path) -> Tokenizer | None:
    """The tokenizer of a run folder or an export; None for any other path."""
    if is_export(folder):
        return read_tokenizer(folder, OWN)
    return read_tokenizer(folder) if (folder / "run.json").exists() else None


def _load_export(folder: Path, checkpoint: str, weights: str, device: str) -> Run:
    about = read_description(folder)
    step, kind = about.get("step", 0), about.get("weights", "raw")
    if not is_whole(step) or not isinstance(kind, str):
        raise UserError(f"{folder / 'run.json'} is damaged: its step or kind of weights is none")
    if checkpoint not in ("latest", str(step)):
        raise UserError(f"{folder} is an export of step {step}; it has no checkpoint {checkpoint}")
    if weights not in ("auto", kind):
        raise UserError(f"{folder} is an export of the {kind} weights; it has no {weights} ones")
    config = load_config(folder / OWN / "config.json")
    config = replace(config, data=replace(config.data, cache=None))  # never somebody else's
    tokenizer = read_tokenizer(folder, OWN)
    backbone = read_backbone(folder, OWN)
    if backbone is None and config.model.backbone == "causal_lm":
        raise UserError(f"{folder} is damaged: {OWN}/backbone.json is missing")
    model = build_stored(folder, config, tokenizer.num_tokens, backbone)
    _fill(model, folder, tokenizer)
    target = pick_device(device)
    return Run(
        folder,
        config,
        step,
        tokenizer,
        model.to(target).eval(),
        build_framework(config),
        target,
        backbone,
    )


def _fill(model: torch.nn.Module, folder: Path, tokenizer: Tokenizer) -> None:
    """Copy the weights in, rows back in our order."""
    path, more = folder / MODEL, folder / OWN / OWN_TENSORS
    stored = _read(path) | (_read(more) if more.exists() else {})
    if isinstance(model, PretrainedDenoiser):
        stored = from_export(stored, model, tokenizer)
    else:
        stored = _in_our_order(stored, tokenizer)
    wanted = {name: tuple(p.shape) for name, p in model.named_parameters()}
    if {name: tuple(tensor.shape) for name, tensor in stored.items()} != wanted:
        raise UserError(f"{path} does not hold the tensors that {OWN}/config.json describes")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(stored[name])


def _read(path: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except (SafetensorError, OSError, ValueError, RuntimeError, KeyError, TypeError) as error:
        raise UserError(f"cannot read {path}: {error}") from None


def _in_our_order(stored: dict[str, Tensor], tokenizer: Tokenizer) -> dict[str, Tensor]:
    """Of our own trunk."""
    order = torch.from_numpy(map_ids(tokenizer).completed())
    for name in ("embedding.weight", "head.weight", "head.bias"):
        if name in stored and len(stored[name]) == len(order):
            stored[name] = stored[name][order if name.startswith("embedding") else order[:-1]]
    return stored
