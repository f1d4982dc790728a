"""A run as a Hugging Face folder: weights, config, tokenizer, code, card; and as mdlm's file."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bellmask import __version__
from bellmask.exchange.card import model_card
from bellmask.exchange.causal_export import ModelFiles, causal_files, check_causal_export
from bellmask.exchange.exported_options import exported_options
from bellmask.exchange.hf_tokenizer import special_ids, write_tokenizer
from bellmask.exchange.mdlm import from_ours
from bellmask.exchange.weights import METADATA, write_safetensors
from bellmask.storage.loading import MODEL, OWN, OWN_TENSORS, Loaded, map_ids
from bellmask.storage.run_folder import read_description, write_backbone
from bellmask.utils.errors import UserError
from bellmask.utils.files import whole_file, whole_folder, write_text

CODE = ("configuration_bellmask.py", "modeling_bellmask.py")
_KEPT = (
    "id parameters num_tokens mask_id tokenizer_fingerprint train_fingerprint valid_fingerprint "
    "train_blocks valid_blocks unigram_nll response_tokens has_turns imported_from"
).split()
"""What run.json says of the model; what it says of the machine stays at home."""


def check_exportable(run: Loaded, format: str) -> None:
    """Refuse, before anything is written, what the format cannot say."""
    framework, model = run.config.framework.name, run.config.model
    if model.backbone == "causal_lm":
        check_causal_export(run, format)
        return
    if framework != "mdm":
        raise UserError(
            f"{run.folder} is a causal model (framework {framework}) on our own trunk; only masked "
            "diffusion models (framework mdm) can be exported so far"
        )
    if format != "mdlm":
        return
    if model.modulation == "time" and model.time_input != "sigma":
        raise UserError(
            f"{run.folder} feeds its time embedding with 1000 t, and mdlm's is fed with sigma; "
            "only models trained with --model.time-input sigma, or without time input, fit"
        )
    if model.modulation == "time" and run.config.schedule.name != "linear":
        raise UserError(
            f"{run.folder} was told times of the {run.config.schedule.name} schedule; mdlm's "
            "layout is read with the linear one"
        )
    if model.mlp_ratio != 4:
        raise UserError(f"mdlm's MLP is 4 widths wide; {run.folder} has {model.mlp_ratio}")
    if run.config.data.document_attention:
        raise UserError(f"{run.folder} keeps attention inside documents, which mdlm does not")


def export_mdlm(run: Loaded, out: Path) -> None:
    """One safetensors file in mdlm's layout, with the prefix that its Lightning module has."""
    check_exportable(run, "mdlm")
    config = run.config
    theirs = from_ours(_parameters(run), config.model.num_layers, map_ids(run.tokenizer))
    about = {
        "n_heads": config.model.num_heads,
        "model_length": config.data.block_length,
        "time_conditioning": config.model.modulation == "time",
        "dropout": config.model.dropout,
        "wrap": run.is_wrapped,
        "packing": config.data.packing,
        "pads": config.data.pads,
        "step": run.step,
    }
    tensors = {f"backbone.{name}": tensor for name, tensor in theirs.items()}
    with whole_file(out, "the weights") as scratch:
        write_safetensors(tensors, scratch, **{METADATA: json.dumps(about)})


def export_hugging_face(run: Loaded, out: Path, *, weights: str, name: str | None = None) -> None:
    """A folder that ``bellmask.load`` and ``AutoModelForMaskedLM`` (with remote code) load; of an
    ARM on a causal LM one for ``AutoModelForCausalLM``.

    ``weights`` says which the run was loaded with: "ema" or "raw"; ``name`` is what the card calls
    the model, by default the folder.
    """
    check_exportable(run, "hf")
    is_causal_lm = run.config.model.backbone == "causal_lm"
    parts = causal_files(run) if is_causal_lm else _trunk_files(run)
    with whole_folder(out, "the export") as folder:
        write_safetensors(parts.tensors, folder / MODEL)
        _write_json(folder / "config.json", parts.config)
        write_tokenizer(
            run.tokenizer,
            folder,
            run.config.data.block_length,
            parts.ids,
            parts.num_ids,
            parts.chat_template,
        )
        for file in parts.code:
            code = files("bellmask.exchange").joinpath("hub_code", file)
            write_text(folder / file, code.read_text(encoding="utf-8"))
        _write_own(run, folder, parts, weights=weights, is_pushed=name is not None)
        write_text(folder / "README.md", model_card(run, name or out.name, weights=weights))


def _write_own(
    run: Loaded, folder: Path, parts: ModelFiles, *, weights: str, is_pushed: bool
) -> None:
    """What bellmask reads beside the model."""
    own = folder / OWN
    own.mkdir()
    _write_json(own / "config.json", exported_options(run.config, is_pushed=is_pushed))
    _write_json(own / "tokenizer.json", run.tokenizer.description())
    if run.backbone is not None:
        write_backbone(own, run.backbone)
    if parts.own:
        write_safetensors(parts.own, own / OWN_TENSORS)
    about = read_description(run.folder)
    kept = {name: about[name] for name in _KEPT if name in about}
    more = {"bellmask": __version__, "step": run.step, "weights": weights}
    _write_json(folder / "run.json", {**kept, **more})


def _trunk_files(run: Loaded) -> ModelFiles:
    """Of our own trunk."""
    return ModelFiles(
        _hf_weights(run),
        _hf_config(run),
        CODE,
        special_ids(run.tokenizer),
        run.tokenizer.num_tokens + 1,
    )


def _write_json(path: Path, content: dict[str, Any]) -> None:
    write_text(path, json.dumps(content, indent=1) + "\n")


def _parameters(run: Loaded) -> dict[str, Tensor]:
    return {name: p.detach().float().cpu() for name, p in run.model.named_parameters()}


def _hf_weights(run: Loaded) -> dict[str, Tensor]:
    """Our parameters with rows in the tokenizer's order, and a row of zeros for the mask's logit,
    which the exported model never reads.
    """
    order = torch.from_numpy(map_ids(run.tokenizer).completed())
    tensors = _parameters(run)
    head = tensors["head.weight"]
    tensors["head.weight"] = torch.cat([head, torch.zeros_like(head[:1])])
    tensors["head.bias"] = torch.cat([tensors["head.bias"], torch.zeros(1)])
    for name in ("embedding.weight", "head.weight", "head.bias"):
        rows = torch.empty_like(tensors[name])
        rows[order] = tensors[name]
        tensors[name] = rows
    return tensors


def _hf_config(run: Loaded) -> dict[str, Any]:
    model, ids = run.config.model, special_ids(run.tokenizer)
    return {
        "model_type": "bellmask",
        "architectures": ["BellmaskForMaskedLM"],
        "auto_map": {
            "AutoConfig": "configuration_bellmask.BellmaskConfig",
            "AutoModelForMaskedLM": "modeling_bellmask.BellmaskForMaskedLM",
        },
        "vocab_size": run.tokenizer.num_tokens + 1,
        "hidden_size": model.width,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "intermediate_size": model.mlp_ratio * model.width,
        "max_position_embeddings": run.config.data.block_length,
        "modulation": model.modulation,
        "time_input": model.time_input,
        "schedule": run.config.schedule.name,
        "mask_token_id": ids.mask,
        "pad_token_id": ids.pad,
        "bos_token_id": ids.bos,
        "eos_token_id": ids.eos,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    }
