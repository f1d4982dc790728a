"""Weights of a run on a causal LM as an export stores them, and back, to the bit.

Of a masked model: every parameter under its own name, rows in the tokenizer's order. What the
causal LM has no row for (the mask, a pad that was added) gets one that is never predicted; the
mask's embedding stays apart, in ``mask_row``. Of an ARM: the causal LM's own parameters, as they
are.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from bellmask.data.tokenizers import Tokenizer
from bellmask.exchange.vocabulary import map_ids
from bellmask.model.pretrained import PretrainedDenoiser

INNER = "language_model."
MASK_ROW = "mask_row"


def silent_ids(model: PretrainedDenoiser, tokenizer: Tokenizer) -> list[int]:
    """Exported ids that have no logit: the mask's, and a pad's that the causal LM lacks."""
    return sorted(map_ids(tokenizer).completed()[model.num_logits :].tolist())


def masked_weights(model: PretrainedDenoiser, tokenizer: Tokenizer) -> dict[str, Tensor]:
    """Every parameter once (tied ones too), rows where the tokenizer has their tokens."""
    order = torch.from_numpy(map_ids(tokenizer).completed())
    with_rows, added_pads = order[: model.num_logits], order[model.num_logits : -1]
    embedding = model.language_model.get_input_embeddings().weight
    by_token, tensors = _names_by_token(model), {}
    for name, parameter in model.named_parameters():
        value = parameter.detach().float().cpu()
        if name in by_token:
            rows = value.new_zeros(len(order), *value.shape[1:])
            rows[with_rows] = value
            if parameter is embedding:
                rows[added_pads] = value[0]  # what the run reads in their place
            value = rows
        tensors[name] = value
    return tensors


def causal_weights(model: PretrainedDenoiser) -> dict[str, Tensor]:
    """The causal LM's own parameters."""
    inner = model.language_model
    return {name: p.detach().float().cpu() for name, p in inner.named_parameters()}


def mask_row(model: PretrainedDenoiser) -> dict[str, Tensor]:
    """What a causal LM has no place for: an ARM never reads it, a masked run may begin with it."""
    return {MASK_ROW: model.mask_row.detach().float().cpu()}


def from_export(
    stored: dict[str, Tensor], model: PretrainedDenoiser, tokenizer: Tokenizer
) -> dict[str, Tensor]:
    """The tensors of an export by our names, rows in our order."""
    if model.is_causal:
        return {name if name == MASK_ROW else INNER + name: t for name, t in stored.items()}
    order = torch.from_numpy(map_ids(tokenizer).completed())
    by_token = _names_by_token(model)
    return {
        name: t[order[: model.num_logits]] if name in by_token and len(t) == len(order) else t
        for name, t in stored.items()
    }


def _names_by_token(model: PretrainedDenoiser) -> set[str]:
    """Parameters that have one row for each token."""
    inner = model.language_model
    head = inner.get_output_embeddings()
    rows: Iterable[Tensor | None] = (inner.get_input_embeddings().weight, head.weight, head.bias)
    wanted = {id(part) for part in rows if part is not None}
    return {name for name, p in model.named_parameters() if id(p) in wanted}
