"""``bellmask import``."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from bellmask.config.presets import parse_command
from bellmask.utils.errors import UserError

if TYPE_CHECKING:
    from bellmask.exchange.imported import Imported


@dataclass(frozen=True)
class ImportOptions:
    """Make a run folder of a checkpoint in the published layout of mdlm and duo.

    evaluate, generate and analyze then take it like any run (evaluate with --data: the training
    text is not here).

    Examples:
    bellmask import kuleshov-group/mdlm-owt --format mdlm --out runs/mdlm-owt

    bellmask import weights.pt --format duo --heads 12 --out runs/duo-lm1b

    bellmask import model.safetensors --format mdlm --tokenizer runs/bell --out runs/back
    """

    checkpoint: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="CHECKPOINT")]
    """A .safetensors file, a torch file of weights, a folder with config.json beside the weights,
    or OWNER/NAME on the hub."""
    format: Literal["mdlm", "duo"]
    """Whose recipe the rows follow. Both share the layout; they differ in how LM1B is packed."""
    out: str
    """Run folder to make."""
    tokenizer: str | None = None
    """gpt2, bert-base-uncased, a folder with a Hugging Face tokenizer, or a run folder. Default: by
    the rows of the embedding (50258: gpt2, 30522: bert-base-uncased)."""
    heads: int | None = None
    """Attention heads; default: as config.json or the rotary buffer says."""
    block_length: int | None = None
    """Tokens per row; default: config.json's model_length, else 1024 for gpt2, 128 for BERT."""
    time_input: bool = False
    """The model was trained with time conditioning: keep it. Known where config.json is there."""
    weights: Literal["auto", "ema", "raw"] = "auto"
    """auto: the moving average beside the trained weights where the file has one. ema: insist on
    it. raw: the trained weights alone."""


def import_(args: Sequence[str]) -> int:
    """Import, say what was read."""
    options = parse_command(ImportOptions, args, command="import")
    for name, value in (("--heads", options.heads), ("--block-length", options.block_length)):
        if value is not None and value < 1:
            raise UserError(f"{name} must be at least 1, got {value}")

    from bellmask.exchange.imported import ImportRequest, import_checkpoint

    request = ImportRequest(
        format=options.format,
        tokenizer=options.tokenizer,
        heads=options.heads,
        block_length=options.block_length,
        has_time=options.time_input,
        weights=options.weights,
    )
    imported = import_checkpoint(options.checkpoint, options.out, request, on_stage=_say)
    _show(imported, options.out)
    return 0


def _say(stage: str) -> None:
    print(f"{stage} ...", file=sys.stderr)


def _show(imported: Imported, out: str) -> None:
    from bellmask.utils.console import print_plain_table

    model, data = imported.config.model, imported.config.data
    size = sum(t.numel() * t.element_size() for t in imported.stored.weights.values())
    average = "trained weights" if imported.ema is None else "trained weights, moving average"
    time = {"constant": "none (AdaLN folded into constants)", "time": "kept (sigma)"}
    print_plain_table(
        f"imported {imported.origin}",
        ["quantity", "value"],
        [
            ["tensors read", f"{len(imported.stored.weights)} ({size / 1e6:,.1f} MB)"],
            ["blocks, width, heads", f"{model.num_layers}, {model.width}, {model.num_heads}"],
            ["tokenizer", f"{data.tokenizer}, {imported.tokenizer.num_tokens:,} tokens"],
            ["row length", f"{data.block_length}"],
            ["time input", time[model.modulation]],
            ["weights", average],
            ["step", f"{imported.stored.step:,}"],
            ["parameters here", f"{imported.num_parameters:,}"],
        ],
    )
    print(f"run folder {out}; measure it with: bellmask evaluate {out} --data TEXT")


