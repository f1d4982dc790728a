"""A run folder, an exported folder or a name on the hub → :class:`Loaded`: a model and its config.

The parts: loading; the fingerprint of a loaded run; exported folders, the order of their rows and
the weights of causal LMs in them, both ways (``bellmask export`` uses these too); the hub.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from bellmask.config.config import RunConfig
from bellmask.data.blocks import Blocks
from bellmask.data.corpora import find_policy
from bellmask.data.prepare import load_inputs
from bellmask.data.tokenizers import FastTokenizer, Ids, Tokenizer
from bellmask.diffusion.frameworks import Framework
from bellmask.model.pretrained import Backbone, PretrainedDenoiser
from bellmask.model.transformer import hash_weights
from bellmask.storage.build import Network, build_framework, build_stored
from bellmask.storage.checkpoint import CheckpointStore, load_tensors, read_state
from bellmask.storage.run_folder import read_backbone, read_config, read_description, read_tokenizer
from bellmask.utils.console import announced
from bellmask.utils.distributed import World, pick_device, pick_precision
from bellmask.utils.errors import UserError, look_up
from bellmask.utils.files import is_whole
from bellmask.utils.libraries import first_line, import_optional

logger = logging.getLogger(__name__)
Weights = Literal["auto", "ema", "raw"]


@dataclass(frozen=True)
class Loaded:
    """A run's options, tokenizer and weights at one checkpoint."""

    folder: Path
    config: RunConfig
    step: int
    tokenizer: Tokenizer
    model: Network
    framework: Framework
    device: torch.device
    backbone: Backbone | None = None
    """Of a run on a causal LM."""

    @property
    def precision(self) -> torch.dtype:
        """Of matrix products: what a training with the run's options has on this device."""
        return pick_precision(self.config.train.precision, self.device)

    def blocks(self) -> tuple[Blocks, Blocks]:
        """The run's training and validation blocks."""
        data = load_inputs(self.config, self.tokenizer, self.backbone)
        return data.train, data.valid

    def check_same_data(self, train: Blocks) -> None:
        """Reject text that differs from the run's training text."""
        if read_description(self.folder).get("train_fingerprint") != train.fingerprint:
            raise UserError(f"the text of {self.folder} has changed since it was trained")

    @property
    def is_wrapped(self) -> bool:
        """True when the run's rows begin with BOS and end with EOS."""
        if self.config.sft.train is not None:
            return False
        return find_policy(self.config.data, self.config.data.train).wrap


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """Which weights of a model to use, and where: a part of the options of commands."""

    checkpoint: str = "latest"
    """latest, best, or a step."""
    weights: Weights = "auto"
    """auto: the moving average if there is one, else raw."""
    device: str = "auto"
    """auto, cpu, cuda, mps, ..."""

    def load(self, model: str | Path) -> Loaded:
        """A run folder, an exported folder, or OWNER/NAME on the hub."""
        with announced(f"loading {model}"):
            return load(model, checkpoint=self.checkpoint, weights=self.weights, device=self.device)


def load(
    name: str | Path, *, checkpoint: str = "latest", weights: Weights = "auto", device: str = "auto"
) -> Loaded:
    """Load a run folder, a folder that ``bellmask export --format hf`` wrote, or OWNER/NAME.

    ``checkpoint``: latest, best or a step; ``weights``: "auto" takes the moving average where there
    is one, "raw" the trained weights. An export holds one checkpoint's weights of one kind;
    requesting others is an error.
    """
    look_up("weights", weights, dict.fromkeys(get_args(Weights)))
    folder = local_folder(str(name))
    if not folder.exists():
        raise UserError(f"there is no folder {folder}")
    is_run = (folder / "checkpoints").exists()
    if not is_run and not is_export(folder) and (folder / MODEL).exists():
        how = f"bellmask train cpt --start.model {name}, or bellmask import {name} --format mdlm"
        raise UserError(f"{name} is not a run: adapt a causal LM with {how}")
    own = OWN if is_export(folder) else ""
    if not (folder / own / "config.json").exists():
        raise UserError(f"{folder} is not a run folder: it has no config.json")
    config = read_config(folder, own)
    if own:
        config = replace(config, data=replace(config.data, cache=None))  # not the export's
        place, step = folder, _exported_step(folder, checkpoint, weights)
    else:
        place = CheckpointStore(folder / "checkpoints", config.checkpoint, World()).find(checkpoint)
        step = read_state(place)["step"]
    tokenizer = read_tokenizer(folder, own)
    backbone = read_backbone(folder, own)
    if backbone is None and config.model.backbone == "causal_lm":
        raise UserError(f"{folder} is damaged: {Path(own) / 'backbone.json'} is missing")
    model = build_stored(place, config, tokenizer.num_tokens, backbone)
    if own:
        _fill(model, folder, tokenizer)
    else:
        if weights == "ema" and not config.optim.ema:
            raise UserError(f"{folder} has no moving average (optim.ema is 0); use raw weights")
        kind = "model" if weights == "raw" or not config.optim.ema else "ema"
        load_tensors(place, {f"{kind}.{n}": p.detach() for n, p in model.named_parameters()})
    target = pick_device(device)
    logger.debug("%s: weights of step %d on %s", folder, step, target)
    model, framework = model.to(target).eval(), build_framework(config)
    return Loaded(folder, config, step, tokenizer, model, framework, target, backbone)


# The fingerprint of a run: part of the key under which its answers are cached.


def run_fingerprint(run: Loaded) -> list[Any]:
    """Everything that determines a run's output for given tokens, and how a causal LM formats
    turns.
    """
    config = run.config.resolved()
    network = [asdict(config.model), None if run.backbone is None else asdict(run.backbone)]
    order = [asdict(config.framework), asdict(config.schedule)]
    weights = [run.tokenizer.fingerprint, hash_weights(run.model), config.train.precision]
    return [weights, network, order]


# Exported folders.
#
# One holds ``model.safetensors`` with rows in the tokenizer's own order, and the files that a run
# needs: ``run.json``, ``bellmask/config.json``, ``bellmask/tokenizer.json`` and, of a run on a
# causal LM, ``bellmask/backbone.json``.

OWN = "bellmask"
"""The subfolder of an export for data that transformers has no file for."""
MODEL = "model.safetensors"
OWN_TENSORS = "mask_row.safetensors"
"""In the subfolder: tensors that the plain causal LM of an ARM cannot store."""


def is_export(folder: Path) -> bool:
    """True for what ``bellmask export --format hf`` wrote."""
    return (folder / OWN / "config.json").exists()


def read_own_tokenizer(folder: Path) -> Tokenizer | None:
    """The tokenizer of a run folder or an export; None for any other path."""
    if is_export(folder):
        return read_tokenizer(folder, OWN)
    return read_tokenizer(folder) if (folder / "run.json").exists() else None


def _exported_step(folder: Path, checkpoint: str, weights: str) -> int:
    """The step of an export, if it has the requested checkpoint and weights."""
    about = read_description(folder)
    step, kind = about.get("step", 0), about.get("weights", "raw")
    if not is_whole(step) or not isinstance(kind, str):
        raise UserError(f"{folder / 'run.json'} is damaged: its step or kind of weights is invalid")
    if checkpoint not in ("latest", str(step)):
        raise UserError(f"{folder} is an export of step {step}; it has no checkpoint {checkpoint}")
    if weights not in ("auto", kind):
        raise UserError(f"{folder} is an export of the {kind} weights; it has no {weights} weights")
    return step


def _fill(model: Network, folder: Path, tokenizer: Tokenizer) -> None:
    """Copy the weights in, rows back in our order."""
    path, more = folder / MODEL, folder / OWN / OWN_TENSORS
    stored = read_safetensors(path)[0] | (read_safetensors(more)[0] if more.exists() else {})
    stored = _by_our_names(stored, model, tokenizer)
    wanted = {name: tuple(p.shape) for name, p in model.named_parameters()}
    if {name: tuple(tensor.shape) for name, tensor in stored.items()} != wanted:
        raise UserError(f"{path} does not match {OWN}/config.json")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(stored[name])


def read_safetensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors of a file, and its metadata."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(path), framework="pt") as stream:
            tensors = {name: stream.get_tensor(name) for name in stream.keys()}  # noqa: SIM118
            return tensors, stream.metadata() or {}
    except (SafetensorError, OSError, ValueError, RuntimeError, KeyError, TypeError) as error:
        raise UserError(f"cannot read {path}: {error}") from None


# Which row of another project's embedding belongs to which of our tokens.
#
# Ours has the mask last, and may have a pad that the tokenizer lacks. Theirs has the tokenizer's
# mask id (BERT's is 103) or, without one, the id after all tokens (GPT-2).


@dataclass(frozen=True)
class IdMap:
    """Their ids of our tokens."""

    tokens_V: Ids
    """Of each token that can be predicted; -1 where they have no such row."""
    mask: int
    size: int
    """Their rows, the mask's included."""

    @property
    def ours(self) -> Ids:
        """Our ids of the rows that both have, without the mask."""
        return np.flatnonzero(self.tokens_V >= 0)

    @property
    def theirs(self) -> Ids:
        """Their ids of the same rows, in the same order."""
        return self.tokens_V[self.ours]

    def completed(self) -> Ids:
        """An id for each of our V + 1 rows: theirs, and new ones at the end for what they lack."""
        ids = np.append(self.tokens_V, self.mask)
        is_new = ids < 0
        ids[is_new] = self.size + np.arange(is_new.sum())
        return ids


def map_ids(tokenizer: Tokenizer) -> IdMap:
    """The map for a tokenizer, with mdlm's rule for the mask id."""
    if not isinstance(tokenizer, FastTokenizer):
        num_tokens = tokenizer.num_tokens
        return IdMap(np.arange(num_tokens), num_tokens, num_tokens + 1)
    *tokens, mask = tokenizer.original_ids.tolist()
    size = max(*tokens, mask) + 1
    if mask < 0:
        mask, size = size, size + 1
    return IdMap(np.array(tokens, dtype=np.int64), mask, size)


# Weights of a run on a causal LM as an export stores them, and back, to the bit.
#
# Of a masked model: every parameter under its own name, rows in the tokenizer's order. Tokens
# without a row in the causal LM (the mask, an added pad) get one that is never predicted; the
# mask's embedding is stored separately, in ``mask_row``. For an ARM: the causal LM's own
# parameters, unchanged.

INNER = "language_model."
MASK_ROW = "mask_row"


def silent_ids(model: PretrainedDenoiser, tokenizer: Tokenizer) -> list[int]:
    """Exported ids that have no logit: the mask's, and a pad's that the causal LM lacks."""
    return sorted(map_ids(tokenizer).completed()[model.num_logits :].tolist())


def float_parameters(module: torch.nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().float().cpu() for name, p in module.named_parameters()}


def masked_weights(model: PretrainedDenoiser, tokenizer: Tokenizer) -> dict[str, Tensor]:
    """Every parameter once (tied ones too), rows where the tokenizer has their tokens."""
    order = torch.from_numpy(map_ids(tokenizer).completed())
    with_rows, added_pads = order[: model.num_logits], order[model.num_logits : -1]
    embedding = model.language_model.get_input_embeddings().weight
    tensors = float_parameters(model)
    for name in _names_by_token(model):
        rows = tensors[name].new_zeros(len(order), *tensors[name].shape[1:])
        rows[with_rows] = tensors[name]
        if model.get_parameter(name) is embedding:
            rows[added_pads] = tensors[name][0]  # what the run reads in their place
        tensors[name] = rows
    return tensors


def _by_our_names(
    stored: dict[str, Tensor], model: Network, tokenizer: Tokenizer
) -> dict[str, Tensor]:
    """The tensors of an export by our names, rows in our order."""
    order = torch.from_numpy(map_ids(tokenizer).completed())
    rows = {"embedding.weight": order, "head.weight": order[:-1], "head.bias": order[:-1]}
    if isinstance(model, PretrainedDenoiser):
        if model.is_causal:
            return {name if name == MASK_ROW else INNER + name: t for name, t in stored.items()}
        rows = dict.fromkeys(_names_by_token(model), order[: model.num_logits])
    return {
        name: t[rows[name]] if name in rows and len(t) == len(order) else t
        for name, t in stored.items()
    }


def _names_by_token(model: PretrainedDenoiser) -> set[str]:
    """Parameters that have one row for each token."""
    inner = model.language_model
    head = inner.get_output_embeddings()
    rows: Iterable[Tensor | None] = (inner.get_input_embeddings().weight, head.weight, head.bias)
    wanted = {id(part) for part in rows if part is not None}
    return {name for name, p in model.named_parameters() if id(p) in wanted}


# The hub: folders by OWNER/NAME.

_NAME = re.compile(r"[A-Za-z0-9][\w.\-]*/[\w.\-]+")


def is_hub_name(text: str) -> bool:
    return _NAME.fullmatch(text) is not None


def hub_library() -> Any:
    """The package huggingface_hub; a UserError says how to get it."""
    return import_optional("huggingface_hub", "the hub", "hf")


def local_folder(name: str) -> Path:
    """A path, or the local copy of a hub repository, downloaded if necessary.

    Where there is a folder OWNER, OWNER/NAME is a path, and a misspelled one is not looked up on
    the hub.
    """
    path = Path(name)
    if path.exists() or path.parent.is_dir() or not is_hub_name(name):
        return path
    library = hub_library()
    try:
        return Path(library.snapshot_download(repo_id=name))
    except Exception as error:  # no network, no such name, no access: the user can fix all of them
        words = f"there is no {name}, here or on the hub ({first_line(error)}); check the name and"
        raise UserError(f"{words} the network, and 'hf auth login' for private models") from None
