"""``bellmask export``: a run as a Hugging Face folder, or as a file in mdlm's layout.

The folder holds weights, config, tokenizer, code and card; it can be pushed to the hub.
"""

from __future__ import annotations

import copy
import json
import string
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import tyro
from torch import Tensor

from bellmask import __version__
from bellmask.config.command_line import parse_command
from bellmask.data.tokenizers import (
    ByteTokenizer,
    FastTokenizer,
    SymbolTokenizer,
    Tokenizer,
)
from bellmask.exchange.card import exported_options, model_card
from bellmask.exchange.mdlm import METADATA, OPTIONS, from_ours, write_safetensors
from bellmask.model.pretrained import PretrainedDenoiser, merge_lora
from bellmask.storage.loading import (
    MODEL,
    OWN,
    OWN_TENSORS,
    Loaded,
    LoadOptions,
    causal_weights,
    hub_library,
    is_hub_name,
    map_ids,
    mask_row,
    masked_weights,
    silent_ids,
)
from bellmask.storage.run_folder import read_description, write_backbone
from bellmask.utils.errors import UserError
from bellmask.utils.files import check_free, whole_file, whole_folder, write_text
from bellmask.utils.libraries import first_line


@dataclass(frozen=True, kw_only=True)
class ExportOptions(LoadOptions):
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
    device: str = "cpu"
    """Where the weights are read to."""
    push: str | None = None
    """OWNER/NAME: upload the folder to the hub too (hf only; log in with 'hf auth login')."""
    private: bool = False
    """With --push: a repository that only its owners see."""


# What cannot be exported.


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


def check_causal_export(run: Loaded, format: str) -> None:
    """Refuse what cannot be said of a run on a causal LM."""
    if format == "mdlm":
        kind = run.backbone.language_model.get("model_type") if run.backbone else "causal_lm"
        raise UserError(
            f"{run.folder} is a Hugging Face causal LM ({kind}); mdlm's layout is for our own "
            "trunk: use --format hf"
        )
    if run.config.framework.name == "arm" and _has_mask(run):
        raise UserError(
            f"{run.folder} is an ARM whose tokenizer has a mask of its own, for which the model "
            "has no row; it cannot be exported as a plain causal LM"
        )


def _has_mask(run: Loaded) -> bool:
    """True where the wrapped tokenizer itself has a mask."""
    words = run.tokenizer
    return isinstance(words, FastTokenizer) and bool(words.original_ids[words.mask_id] >= 0)


# mdlm's file.


def export_mdlm(run: Loaded, out: Path) -> None:
    """One safetensors file in mdlm's layout, with the prefix that its Lightning module has."""
    check_exportable(run, "mdlm")
    config = run.config
    theirs = from_ours(_parameters(run), config.model.num_layers, map_ids(run.tokenizer))
    flat = config.flat()
    about = {theirs: flat[option] for theirs, option in OPTIONS.items()}
    about |= {"time_conditioning": config.model.modulation == "time"}
    about |= {"wrap": run.is_wrapped, "step": run.step}
    tensors = {f"backbone.{name}": tensor for name, tensor in theirs.items()}
    with whole_file(out, "the weights") as scratch:
        write_safetensors(tensors, scratch, **{METADATA: json.dumps(about)})


def _parameters(run: Loaded) -> dict[str, Tensor]:
    return {name: p.detach().float().cpu() for name, p in run.model.named_parameters()}


# The Hugging Face folder.

CODE = ("configuration_bellmask.py", "modeling_bellmask.py")
_KEPT = (
    "id parameters num_tokens mask_id tokenizer_fingerprint train_fingerprint valid_fingerprint "
    "train_blocks valid_blocks unigram_nll response_tokens has_turns imported_from"
).split()
"""What run.json says of the model; what it says of the machine stays at home."""


@dataclass(frozen=True)
class ModelFiles:
    """The model's part of an export; tokenizer, options and card come on top."""

    tensors: dict[str, Tensor]
    config: dict[str, Any]
    """config.json."""
    code: tuple[str, ...]
    """Files of hub_code."""
    ids: SpecialIds
    num_ids: int
    """Entries of the exported tokenizer."""
    chat_template: str | None = None
    own: dict[str, Tensor] = field(default_factory=dict)
    """Tensors that bellmask alone reads."""


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


def _trunk_files(run: Loaded) -> ModelFiles:
    """Of our own trunk."""
    return ModelFiles(
        _hf_weights(run),
        _hf_config(run),
        CODE,
        special_ids(run.tokenizer),
        run.tokenizer.num_tokens + 1,
    )


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


def _write_json(path: Path, content: dict[str, Any]) -> None:
    write_text(path, json.dumps(content, indent=1) + "\n")


# What an export of a run on a causal LM holds.
#
# A masked model becomes ``AutoModelForMaskedLM`` with code of its own, an ARM the plain
# ``AutoModelForCausalLM`` that it is. Low-rank updates are merged.

CAUSAL_CODE = "modeling_bellmask_causal.py"
_CAUSAL_MODULE = CAUSAL_CODE.removesuffix(".py")


def causal_files(run: Loaded) -> ModelFiles:
    """The files of a masked model, or of an ARM."""
    model = _merged(run)
    return _arm_files(run, model) if model.is_causal else _masked_files(run, model)


def _merged(run: Loaded) -> PretrainedDenoiser:
    """The run's network with low-rank updates added to its weights; the run stays as it is."""
    assert isinstance(run.model, PretrainedDenoiser)
    if not run.config.start.lora_rank:
        return run.model
    model = copy.deepcopy(run.model)
    merge_lora(model)
    return model


def _masked_files(run: Loaded, model: PretrainedDenoiser) -> ModelFiles:
    ids, num_ids = special_ids(run.tokenizer), run.tokenizer.num_tokens + 1
    config = {
        "model_type": "bellmask_causal",
        "architectures": ["BellmaskCausalForMaskedLM"],
        "auto_map": {
            "AutoConfig": f"{_CAUSAL_MODULE}.BellmaskCausalConfig",
            "AutoModelForMaskedLM": f"{_CAUSAL_MODULE}.BellmaskCausalForMaskedLM",
        },
        "text_config": {**_inner_config(run, model), "vocab_size": num_ids},
        "is_shifted": True,
        "has_windows": model.has_windows,
        "mask_token_id": ids.mask,
        "silent_token_ids": silent_ids(model, run.tokenizer),
        "pad_token_id": ids.pad,
        "bos_token_id": ids.bos,
        "eos_token_id": ids.eos,
        "dtype": "float32",
    }
    tensors = masked_weights(model, run.tokenizer)
    return ModelFiles(tensors, config, (CAUSAL_CODE,), ids, num_ids, _template(run))


def _arm_files(run: Loaded, model: PretrainedDenoiser) -> ModelFiles:
    """Our ids are the tokenizer's own here; a pad that the model has no row for is left out."""
    found, num_ids = special_ids(run.tokenizer), model.num_logits
    has_pad = found.pad is not None and run.tokenizer.pad_id < num_ids
    ids = SpecialIds(found.bos, found.eos, run.tokenizer.pad_id if has_pad else None, None)
    config = {
        **_inner_config(run, model),
        "architectures": [type(model.language_model).__name__],
        "vocab_size": num_ids,
        "pad_token_id": ids.pad,
        "bos_token_id": ids.bos,
        "eos_token_id": ids.eos,
        "dtype": "float32",
    }
    tensors = causal_weights(model)
    return ModelFiles(tensors, config, (), ids, num_ids, _template(run), mask_row(model))


def _inner_config(run: Loaded, model: PretrainedDenoiser) -> dict[str, Any]:
    """The causal LM's config as the run began with it, with the dropout that it trained with."""
    assert run.backbone is not None
    made = model.language_model.config
    return {
        name: getattr(made, name, value) if isinstance(value, float) else value
        for name, value in run.backbone.language_model.items()
    }


def _template(run: Loaded) -> str | None:
    return None if run.backbone is None else run.backbone.chat_template


# Our tokenizers as the files that ``AutoTokenizer`` loads.
#
# Ids are the wrapped tokenizer's own, so GPT-2's and BERT's files stay what they are; the mask, and
# a pad where there is none, are added at the end. Nothing is put around a text: the ids are those
# that the model was trained on. Written with ``tokenizers`` alone: transformers is not needed.

_NAMES = {
    "bos": ("<bos>", "[BOS]", "<|bos|>"),
    "eos": ("<eos>", "[EOS]", "<|eos|>"),
    "pad": ("<pad>", "[PAD]", "<|pad|>"),
    "mask": ("<mask>", "[MASK]", "<|mask|>"),
}
"""What a special token may be called that the vocabulary has no name for; the first free one."""


@dataclass(frozen=True)
class SpecialIds:
    """Ids as the exported model and tokenizer have them; None where there is no such token."""

    bos: int | None
    eos: int | None
    pad: int | None
    mask: int | None


def special_ids(tokenizer: Tokenizer) -> SpecialIds:
    """The special tokens in the exported order."""
    order = map_ids(tokenizer).completed()
    if isinstance(tokenizer, SymbolTokenizer):
        return SpecialIds(None, None, None, int(order[tokenizer.mask_id]))
    ours = (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id, tokenizer.mask_id)
    return SpecialIds(*(int(order[number]) for number in ours))


def write_tokenizer(
    tokenizer: Tokenizer,
    folder: Path,
    max_length: int,
    ids: SpecialIds,
    num_ids: int,
    chat_template: str | None = None,
) -> None:
    """tokenizer.json and tokenizer_config.json, with ``num_ids`` entries, the mask included."""
    inner = _inner(tokenizer)
    names = _add_specials(inner, ids)
    size = inner.get_vocab_size(with_added_tokens=True)
    if size != num_ids:
        raise UserError(
            f"the tokenizer's vocabulary has gaps: {size} entries where the model has {num_ids} "
            "rows, the mask's included; it cannot be exported"
        )
    write_text(folder / "tokenizer.json", inner.to_str(pretty=True) + "\n")
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,
        **{f"{role}_token": name for role, name in names.items()},
    }
    if (unknown := getattr(inner.model, "unk_token", None)) is not None:
        config["unk_token"] = unknown
    if chat_template is not None:
        config["chat_template"] = chat_template
    write_text(folder / "tokenizer_config.json", json.dumps(config, indent=1) + "\n")


def _inner(tokenizer: Tokenizer) -> Any:
    """A ``tokenizers.Tokenizer`` that encodes as ours does, in its own ids."""
    from tokenizers import Tokenizer as Inner

    if isinstance(tokenizer, FastTokenizer):
        tree = json.loads(tokenizer.description()["inner"])
        tree["post_processor"] = None  # nothing around a text
        return Inner.from_str(json.dumps(tree))
    if isinstance(tokenizer, ByteTokenizer):
        return _byte_inner()
    if isinstance(tokenizer, SymbolTokenizer):
        return _symbol_inner(tokenizer.num_tokens)
    raise UserError(f"a {type(tokenizer).__name__} has no form that transformers can load")


def _byte_inner() -> Any:
    """Every byte is a token: byte-level BPE without a merge."""
    from tokenizers import Tokenizer as Inner
    from tokenizers import decoders, models, pre_tokenizers

    inner = Inner(models.BPE(vocab=_byte_letters(), merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    return inner


def _byte_letters() -> dict[str, int]:
    """The letter that byte-level tokenizers write for each byte: itself where it can be printed,
    else one of the letters from number 256 on.
    """
    printed = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printed]
    letters = {chr(byte): byte for byte in printed}
    return letters | {chr(256 + place): byte for place, byte in enumerate(others)}


def _symbol_inner(num_tokens: int) -> Any:
    from tokenizers import Tokenizer as Inner
    from tokenizers import decoders, models, pre_tokenizers

    letters = {letter: i for i, letter in enumerate(string.ascii_letters[:num_tokens])}
    inner = Inner(models.BPE(vocab=letters, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    inner.decoder = decoders.Fuse()
    return inner


def _add_specials(inner: Any, ids: SpecialIds) -> dict[str, str]:
    """Name every special token; those that the vocabulary lacks are added, lowest id first."""
    from tokenizers import AddedToken

    names: dict[str, str] = {}
    found = {role: number for role, number in vars(ids).items() if number is not None}
    for role, number in sorted(found.items(), key=lambda item: item[1]):
        name = inner.id_to_token(number)
        if name is None:
            free = [n for n in _NAMES[role] if inner.token_to_id(n) is None]
            name = free[0] if free else f"<|bellmask {role}|>"
        inner.add_special_tokens([AddedToken(name, special=True, normalized=False)])
        if inner.token_to_id(name) != number:
            raise UserError(f"the tokenizer has no room for a {role} token at id {number}")
        names[role] = name
    return names


# The command.


def _check_export(options: ExportOptions, out: Path) -> None:
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
    known = read_description(loaded.folder).get("weights")
    if known is not None:
        return str(known)
    return "raw" if weights == "raw" or not loaded.config.optim.ema else "ema"


def push_folder(folder: Path, name: str, *, is_private: bool = False, api: Any = None) -> str:
    """Upload a whole folder as one commit to a model repository; its address."""
    if not is_hub_name(name):
        raise UserError(f"--push takes OWNER/NAME, not {name!r}")
    api = api or hub_library().HfApi()
    try:
        made = api.create_repo(name, repo_type="model", private=is_private, exist_ok=True)
        api.upload_folder(
            repo_id=name,
            folder_path=str(folder),
            repo_type="model",
            commit_message="Exported with bellmask",
        )
    except Exception as error:  # the export stays; only the upload must be done again
        raise UserError(
            f"{folder} is written, but could not be pushed to {name} ({first_line(error)}); log in "
            f"with 'hf auth login' and try: hf upload {name} {folder}"
        ) from None
    return str(made)


def main(args: Sequence[str]) -> int:
    """Export, and push where asked."""
    options = parse_command(ExportOptions, args, command="export")
    out = Path(options.out)
    _check_export(options, out)
    check_free(out, "the export", is_file=options.format == "mdlm")
    loaded = options.load(options.run)
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
        print(f"pushing to {options.push} ...", file=sys.stderr)
        address = push_folder(out, options.push, is_private=options.private)
        print(f"pushed: {address}")
    return 0
