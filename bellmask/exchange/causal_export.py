"""What an export of a run on a causal LM holds.

A masked model becomes ``AutoModelForMaskedLM`` with code of its own, an ARM the plain
``AutoModelForCausalLM`` that it is. Low-rank updates are merged.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from bellmask.data.tokenizers import FastTokenizer
from bellmask.exchange.hf_tokenizer import SpecialIds, special_ids
from bellmask.model.pretrained import PretrainedDenoiser, merge_lora
from bellmask.storage.loading import Loaded, causal_weights, mask_row, masked_weights, silent_ids
from bellmask.utils.errors import UserError

CAUSAL_CODE = "modeling_bellmask_causal.py"
_NAMES = CAUSAL_CODE.removesuffix(".py")


@dataclass(frozen=True)
class ModelFiles:
    """The model's part of an export; tokenizer, options and card come on top."""

    tensors: dict[str, Tensor]
    config: dict[str, Any]
    """config.json."""
    code: tuple[str, ...]
    """Files of hub_code."""
    ids: SpecialIds
    num_ids: int
    """Entries of the exported tokenizer."""
    chat_template: str | None = None
    own: dict[str, Tensor] = field(default_factory=dict)
    """Tensors that bellmask alone reads."""


def check_causal_export(run: Loaded, format: str) -> None:
    """Refuse what cannot be said of a run on a causal LM."""
    if format == "mdlm":
        kind = run.backbone.language_model.get("model_type") if run.backbone else "causal_lm"
        raise UserError(
            f"{run.folder} is a Hugging Face causal LM ({kind}); mdlm's layout is for our own "
            "trunk: use --format hf"
        )
    if run.config.framework.name == "arm" and _has_mask(run):
        raise UserError(
            f"{run.folder} is an ARM whose tokenizer has a mask of its own, for which the model "
            "has no row; it cannot be exported as a plain causal LM"
        )


def _has_mask(run: Loaded) -> bool:
    """True where the wrapped tokenizer itself has a mask."""
    words = run.tokenizer
    return isinstance(words, FastTokenizer) and bool(words.original_ids[words.mask_id] >= 0)


def causal_files(run: Loaded) -> ModelFiles:
    """The files of a masked model, or of an ARM."""
    model = _merged(run)
    return _arm_files(run, model) if model.is_causal else _masked_files(run, model)


def _merged(run: Loaded) -> PretrainedDenoiser:
    """The run's network with low-rank updates added to its weights; the run stays as it is."""
    assert isinstance(run.model, PretrainedDenoiser)
    if not run.config.start.lora_rank:
        return run.model
    model = copy.deepcopy(run.model)
    merge_lora(model)
    return model


def _masked_files(run: Loaded, model: PretrainedDenoiser) -> ModelFiles:
    ids, num_ids = special_ids(run.tokenizer), run.tokenizer.num_tokens + 1
    config = {
        "model_type": "bellmask_causal",
        "architectures": ["BellmaskCausalForMaskedLM"],
        "auto_map": {
            "AutoConfig": f"{_NAMES}.BellmaskCausalConfig",
            "AutoModelForMaskedLM": f"{_NAMES}.BellmaskCausalForMaskedLM",
        },
        "text_config": {**_inner_config(run, model), "vocab_size": num_ids},
        "is_shifted": True,
        "has_windows": model.has_windows,
        "mask_token_id": ids.mask,
        "silent_token_ids": silent_ids(model, run.tokenizer),
        "pad_token_id": ids.pad,
        "bos_token_id": ids.bos,
        "eos_token_id": ids.eos,
        "dtype": "float32",
    }
    tensors = masked_weights(model, run.tokenizer)
    return ModelFiles(tensors, config, (CAUSAL_CODE,), ids, num_ids, _template(run))


def _arm_files(run: Loaded, model: PretrainedDenoiser) -> ModelFiles:
    """Our ids are the tokenizer's own here; a pad that the model has no row for is left out."""
    found, num_ids = special_ids(run.tokenizer), model.num_logits
    has_pad = found.pad is not None and run.tokenizer.pad_id < num_ids
    ids = SpecialIds(found.bos, found.eos, run.tokenizer.pad_id if has_pad else None, None)
    config = {
        **_inner_config(run, model),
        "architectures": [type(model.language_model).__name__],
        "vocab_size": num_ids,
        "pad_token_id": ids.pad,
        "bos_token_id": ids.bos,
        "eos_token_id": ids.eos,
        "dtype": "float32",
    }
    tensors = causal_weights(model)
    return ModelFiles(tensors, config, (), ids, num_ids, _template(run), mask_row(model))


def _inner_config(run: Loaded, model: PretrainedDenoiser) -> dict[str, Any]:
    """The causal LM's config as the run began with it, with the dropout that it trained with."""
    assert run.backbone is not None
    made = model.language_model.config
    return {
        name: getattr(made, name, value) if isinstance(value, float) else value
        for name, value in run.backbone.language_model.items()
    }


def _template(run: Loaded) -> str | None:
    return None if run.backbone is None else run.backbone.chat_template
