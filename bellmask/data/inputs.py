"""What a run reads: blocks of text, or prompts with responses, as its network can be asked them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from bellmask.config.config import RunConfig
from bellmask.config.options import SftOptions
from bellmask.data.blocks import Blocks
from bellmask.data.prepare import LoadedData, load_data
from bellmask.data.tokenizers import Tokenizer
from bellmask.model.pretrained import Backbone
from bellmask.utils.progress import NO_PROGRESS, Progress

RESPONSES_LOOKED_AT = 10_000


def load_inputs(
    config: RunConfig,
    tokenizer: Tokenizer,
    backbone: Backbone | None = None,
    progress: Progress = NO_PROGRESS,
) -> LoadedData:
    """Training and validation blocks; where a causal LM predicts, position 0 is given."""
    first = 0 if config.model.backbone == "dit" else 1
    if config.sft.train is None:
        data = load_data(config.data, tokenizer, progress)
    else:
        from bellmask.data.examples import load_example_blocks  # only fine-tuning needs it

        template = None if backbone is None else backbone.chat_template
        data = load_example_blocks(
            config.data, config.sft, tokenizer, template, progress, bos_first=first == 1
        )
        # the EOS fill is scored and has no bytes: bits per byte would depend on round_to
        bare = [replace(part, num_bytes=0.0) for part in (data.train, data.valid)]
        data = replace(data, train=bare[0], valid=bare[1])
    return replace(data, train=data.train.starting_at(first), valid=data.valid.starting_at(first))


def describe_blocks(
    config: RunConfig, train: Blocks, valid: Blocks, counts: Mapping[str, int]
) -> dict[str, Any]:
    """What run.json says of the data; of responses, how long a gap generation should leave.

    ``counts`` are those of :class:`bellmask.data.prepare.LoadedData`.
    """
    about: dict[str, Any] = {
        "train_fingerprint": train.fingerprint,
        "valid_fingerprint": valid.fingerprint,
        "train_blocks": len(train),
        "valid_blocks": len(valid),
    }
    if config.sft.train is not None:
        sizes = train.num_maskable(slice(0, RESPONSES_LOOKED_AT)).float()
        about["has_turns"] = _has_turns(config.sft, counts)
        about["response_tokens"] = int(sizes.quantile(0.9, interpolation="higher"))
    return about


def _has_turns(sft: SftOptions, counts: Mapping[str, int]) -> bool:
    """Roles were marked: by the template in all rows, or in at least half of them."""
    from bellmask.data.examples import IN_CONVERSATIONS

    if sft.template == "auto":
        return 2 * counts.get(IN_CONVERSATIONS, 0) >= counts["rows"]
    return sft.template == "chat"
