"""Low-rank updates of a pretrained backbone (LoRA), by peft; needs the extra ``lora``."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn

from bellmask.model.pretrained import PretrainedDenoiser
from bellmask.utils.errors import UserError


def add_lora(model: PretrainedDenoiser, rank: int, alpha: float) -> None:
    """Freeze the language model and put updates of ``rank`` beside its linear maps, in place.

    The head is left alone; the mask's row stays trainable, as nothing has taught it before.
    """
    try:
        import peft
    except ImportError:
        raise UserError("--start.lora-rank needs peft: pip install 'bellmask[lora]'") from None
    inner = model.language_model
    for parameter in inner.parameters():
        parameter.requires_grad_(False)
    config = peft.LoraConfig(
        r=rank,
        lora_alpha=alpha,  # type: ignore[arg-type]
        lora_dropout=0.0,
        target_modules=_linear_names(inner),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Conv1D of GPT-2: it corrects the setting itself
        peft.inject_adapter_in_model(config, inner)


def _linear_names(inner: Any) -> list[str]:
    """Last names of the linear maps inside blocks (GPT-2 calls them Conv1D)."""
    head = inner.get_output_embeddings()
    found = {
        name.rsplit(".", 1)[-1]
        for name, part in inner.named_modules()
        if part is not head and (isinstance(part, nn.Linear) or type(part).__name__ == "Conv1D")
    }
    return sorted(found)


@torch.no_grad()
def merge_lora(model: PretrainedDenoiser) -> None:
    """Add the updates to the weights and take the adapters away, in place."""
    if not any("lora_" in name for name, _ in model.language_model.named_parameters()):
        return
    from peft.tuners.lora import LoraLayer

    for name, part in list(model.language_model.named_modules()):
        if isinstance(part, LoraLayer):
            part.merge()
            above, _, last = name.rpartition(".")
            setattr(model.language_model.get_submodule(above), last, part.get_base_layer())
    for parameter in model.language_model.parameters():
        parameter.requires_grad_(True)
