"""``bellmask export``."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from bellmask.config.presets import parse_command
from bellmask.utils.errors import UserError

if TYPE_CHECKING:
    from bellmask.storage.loading import Loaded


@dataclass(frozen=True)
class ExportOptions:
    """Write a run for others: a Hugging Face folder, or weights in mdlm's layout.

    Examples:
    bellmask export runs/bell --format hf --out exports/bell

    bellmask export runs/bell --format hf --out exports/bell --push OWNER/NAME

    bellmask export runs/cpt --format hf --out exports/cpt

    bellmask export runs/bell --format mdlm --out bell.safetensors
    """

    run: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """Run folder, an exported folder, or OWNER/NAME on the hub."""
    format: Literal["hf", "mdlm"]
    """hf: safetensors, config, tokenizer, model card and code, for AutoModelForMaskedLM and
    bellmask.load; an ARM on a causal LM becomes a plain AutoModelForCausalLM. mdlm: one
    .safetensors file in the layout of mdlm and duo, for our own trunk only."""
    out: str
    """Folder (hf) or .safetensors file (mdlm) to write; it must not exist yet."""
    checkpoint: str = "latest"
    """latest, best, or a step."""
    weights: Literal["auto", "ema", "raw"] = "auto"
    """auto: the moving average where there is one."""
    push: str | None = None
    """OWNER/NAME: upload the folder to the hub too (hf only; log in with 'hf auth login')."""
    private: bool = False
    """With --push: a repository that only its owners see."""


def export(args: Sequence[str]) -> int:
    """Export, and push where asked."""
    options = parse_command(ExportOptions, args, command="export")
    out = Path(options.out)
    _check_export(options, out)

    from bellmask.exchange.hugging_face import (
        check_exportable,
        export_hugging_face,
        export_mdlm,
    )
    from bellmask.storage.loading import load
    from bellmask.utils.files import check_free

    check_free(out, "the export", is_file=options.format == "mdlm")
    loaded = load(options.run, checkpoint=options.checkpoint, weights=options.weights, device="cpu")
    check_exportable(loaded, options.format)
    print(f"writing {out} ...", file=sys.stderr)
    if options.format == "mdlm":
        export_mdlm(loaded, out)
        print(f"written: {out}, weights in mdlm's layout")
        return 0
    kind = _kind(loaded, options.weights)
    export_hugging_face(loaded, out, weights=kind, name=options.push)
    print(f"written: {out}; load it with bellmask.load({str(out)!r})")
    if options.push is not None:
        from bellmask.storage.loading import push_folder

        print(f"pushing to {options.push} ...", file=sys.stderr)
        address = push_folder(out, options.push, is_private=options.private)
        print(f"pushed: {address}")
    return 0


def _check_export(options: ExportOptions, out: Path) -> None:
    from bellmask.storage.loading import is_hub_name

    if options.format == "mdlm" and out.suffix != ".safetensors":
        raise UserError(f"--format mdlm writes one file: give --out NAME.safetensors, not {out}")
    if options.push is not None and options.format != "hf":
        raise UserError("--push goes with --format hf: the hub wants a folder")
    if options.push is not None and not is_hub_name(options.push):
        raise UserError(f"--push takes OWNER/NAME, not {options.push!r}")
    if options.private and options.push is None:
        raise UserError("--private is about the repository that --push makes")


def _kind(loaded: Loaded, weights: str) -> str:
    """Which weights a run was loaded with."""
    from bellmask.storage.run_folder import read_description

    known = read_description(loaded.folder).get("weights")
    if known is not None:
        return str(known)
    return "raw" if weights == "raw" or not loaded.config.optim.ema else "ema"
