"""Where a run's network, tokenizer and first weights come from: nowhere, a run, or a causal LM."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from bellmask.build import Network
from bellmask.config import RunConfig, load_config
from bellmask.data.tokenizer import FastTokenizer, Tokenizer, from_transformers
from bellmask.errors import UserError
from bellmask.exchange.hub import local_folder
from bellmask.model.lora import merge_lora
from bellmask.model.pretrained import PretrainedDenoiser, mean_row
from bellmask.options import ModelOptions, StartOptions
from bellmask.runfolder import Backbone, read_backbone, read_tokenizer
from bellmask.smollm2 import NAME as SMOLLM2
from bellmask.smollm2 import smollm2_folder
from bellmask.start_checks import FROM_START
from bellmask.transformers_library import first_line, import_transformers, quiet

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "gpt2-tiny": {
        "model_type": "gpt2",
        "n_layer": 4,
        "n_embd": 96,
        "n_head": 4,
        "n_positions": 256,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
    }
}
"""Small causal LMs to pretrain and adapt on a laptop."""


@dataclass(frozen=True)
class Start:
    """What a run begins with."""

    config: RunConfig
    """The run's, with what the start decides filled in."""
    tokenizer: Tokenizer | None = None
    """The start's own; None: the one that the data options name."""
    backbone: Backbone | None = None
    """Of a causal LM; None for our own trunk."""
    fill: Callable[[Network], None] | None = None
    """Sets the first weights; None: random ones."""
    fingerprint: str = ""
    """Changes when other weights would be read."""

    def backbone_for(self, tokenizer: Tokenizer) -> Backbone | None:
        """The causal LM, one with random weights sized for a tokenizer."""
        if self.backbone is None or self.tokenizer is not None:
            return self.backbone
        ids = {"bos_token_id": tokenizer.bos_id, "eos_token_id": tokenizer.eos_id}
        sizes = {"vocab_size": tokenizer.num_tokens, "pad_token_id": None, **ids}
        return replace(self.backbone, language_model={**self.backbone.language_model, **sizes})


def open_start(config: RunConfig, folder: Path | None = None) -> Start:
    """The start that the options name; of a run that is already in ``folder``, as it was."""
    options = config.start
    if options.model is None and options.architecture is None:
        return Start(config)
    if folder is not None and (folder / "run.json").exists():
        before = load_config(folder / "config.json")
        model = replace(before.model, dropout=config.model.dropout)
        return Start(
            _adopt(config, model),
            read_tokenizer(folder),
            read_backbone(folder),
            lambda network: _fill_again(config, network),
        )
    start = _open(config)
    return replace(start, fill=None) if options.fresh else start


def _open(config: RunConfig) -> Start:
    options = config.start
    if options.architecture is not None:
        return _from_architecture(config, options.architecture)
    assert options.model is not None
    if options.model == SMOLLM2:
        return _from_causal_lm(config, str(smollm2_folder(config.data.cache)))
    found = local_folder(options.model)
    if (found / "run.json").exists():
        return _from_run(config, found)
    return _from_causal_lm(config, str(found) if found.exists() else options.model)


def _fill_again(config: RunConfig, network: Network) -> None:
    """A run that was stopped before its first checkpoint begins once more."""
    fill = open_start(config).fill
    if fill is not None:
        fill(network)


def _adopt(config: RunConfig, model: ModelOptions) -> RunConfig:
    """The config of a run on this backbone."""
    name = config.data.tokenizer if config.start.model is None else FROM_START
    return replace(config, model=model, data=replace(config.data, tokenizer=name)).check()


def _from_architecture(config: RunConfig, name: str) -> Start:
    """A Hugging Face config with random weights, sized for the run's own tokenizer later."""
    values = ARCHITECTURES[name] if name in ARCHITECTURES else _read_config(Path(name))
    transformers = import_transformers("--start")
    try:
        with quiet():
            made = transformers.AutoConfig.for_model(**values).to_dict()
    except Exception as error:  # unknown kinds, impossible sizes
        raise UserError(f"start.architecture={name}: {first_line(error)}") from None
    backbone = Backbone(_plain(made))
    _check_length(config, backbone, name)
    adopted = _adopt(config, replace(config.model, backbone="causal_lm"))
    return Start(adopted, None, backbone, None, json.dumps(values, sort_keys=True))


def _read_config(path: Path) -> dict[str, Any]:
    file = path / "config.json" if path.is_dir() else path
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(values["model_type"], str):
            raise ValueError("model_type is not a name")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"start.architecture: {file} is not a Hugging Face config.json "
            f"({type(error).__name__}: {error}); built in: {', '.join(ARCHITECTURES)}"
        ) from None
    return values


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    """A Hugging Face config without what belongs to one machine or one file."""
    left_out = ("_name_or_path", "quantization_config", "transformers_version", "dtype")
    kept = {k: v for k, v in values.items() if k not in left_out and not k.startswith("_")}
    return json.loads(json.dumps(kept, default=str))


def _check_length(config: RunConfig, backbone: Backbone, name: str) -> None:
    length = config.data.block_length
    for key in ("max_position_embeddings", "n_positions"):  # GPT-2 calls it the second
        limit = backbone.language_model.get(key)
        if isinstance(limit, int) and length > limit:
            raise UserError(
                f"data.block_length={length} is longer than {name} can read: {limit} at most"
            )


def _from_run(config: RunConfig, folder: Path) -> Start:
    """Another run's backbone, tokenizer and weights (moving average where it has one)."""
    from bellmask.exchange.loading import load, read_own_tokenizer

    source = load(folder, checkpoint=config.start.checkpoint)
    theirs, mine = source.config, config
    if theirs.model.backbone == "dit":
        _check_own_trunk(config, theirs, folder)
    if mine.start.mask_token is not None:
        raise UserError(f"start.mask_token: {folder} is a run, whose mask has its row already")
    own = read_own_tokenizer(folder)
    assert own is not None

    def fill(network: Network) -> None:
        _copy(source.model, network)

    model = replace(theirs.model, dropout=mine.model.dropout)
    backbone = source.backbone
    if backbone is not None:
        _check_length(config, backbone, str(folder))
    mark = hashlib.sha256((folder / "run.json").read_bytes()).hexdigest()
    return Start(_adopt(config, model), own, backbone, fill, f"{mark}/{source.step}")


def _check_own_trunk(config: RunConfig, theirs: RunConfig, folder: Path) -> None:
    """What weights of our own trunk cannot be used for."""
    name, model = config.framework.name, config.model
    if theirs.framework.name != name:
        raise UserError(
            f"start.model={folder} is {theirs.framework.name}, this run {name}: on our own trunk "
            "weights go only to the same framework; pretrain with --start.architecture to adapt "
            "an ARM"
        )
    if model not in [replace(m, dropout=model.dropout) for m in (ModelOptions(), theirs.model)]:
        raise UserError(f"start.model={folder} has other --model options; leave them out here")
    if config.start.lora_rank or config.start.anneal_steps != 1:
        raise UserError(
            f"start.model={folder} has our own trunk: --start.lora-rank and --start.anneal-steps "
            "are for causal LMs"
        )
    if config.sft.train is not None and name != "mdm":
        raise UserError(f"prompts and responses are for framework mdm, not {name}")


@torch.no_grad()
def _copy(source: Network, network: Network) -> None:
    """All weights of a run, its low-rank updates merged."""
    if isinstance(source, PretrainedDenoiser):
        merge_lora(source)
    weights = dict(source.named_parameters())
    for name, parameter in network.named_parameters():
        parameter.copy_(weights[name])


def _from_causal_lm(config: RunConfig, path: str) -> Start:
    """A Hugging Face causal LM: its config, tokenizer and chat template now, its weights later."""
    if config.start.checkpoint != StartOptions.checkpoint:
        raise UserError(f"start.checkpoint is of run folders, and {path} is a causal LM")
    transformers = import_transformers("--start")
    try:
        with quiet():
            values = transformers.AutoConfig.from_pretrained(path).to_dict()
    except Exception as error:  # no network, no such name, damaged files
        raise UserError(
            f"start.model={config.start.model}: cannot load it ({first_line(error)}); give a run "
            "folder, a folder that holds a Hugging Face causal LM, its name on the hub, or smollm2"
        ) from None
    tokenizer = from_transformers(path)
    with quiet():
        template = transformers.AutoTokenizer.from_pretrained(path).chat_template
    rows = _rows(tokenizer)
    backbone = Backbone(
        # a pad that is also EOS would never learn; ours are never looked at
        {**_plain(values), "vocab_size": len(rows), "pad_token_id": None},
        template if isinstance(template, str) else None,
    )
    _check_length(config, backbone, path)

    def fill(network: Network) -> None:
        assert isinstance(network, PretrainedDenoiser)
        _fill_from_causal_lm(network, path, rows, config.start.mask_token)

    adopted = _adopt(config, replace(config.model, backbone="causal_lm"))
    return Start(adopted, tokenizer, backbone, fill, _mark(path))


def _rows(tokenizer: FastTokenizer) -> list[int]:
    """The model's own row of each of our tokens; a pad that we added has none and comes last."""
    theirs = tokenizer.original_ids[: tokenizer.num_tokens].tolist()
    return [row for row in theirs if row >= 0]


def _load_causal_lm(path: str) -> Any:
    transformers = import_transformers("--start")
    try:
        with quiet():
            source, about = transformers.AutoModelForCausalLM.from_pretrained(
                path, dtype=torch.float32, output_loading_info=True
            )
    except Exception as error:  # no weights, damaged ones, others than the config says
        raise UserError(f"{path}: cannot load its weights ({first_line(error)})") from None
    if missing := sorted(about["missing_keys"]):
        raise UserError(f"{path}: not a whole causal LM, it has no weights {missing[0]} ...")
    return source


@torch.no_grad()
def _fill_from_causal_lm(
    network: PretrainedDenoiser, path: str, rows: list[int], mask_token: int | None
) -> None:
    source = _load_causal_lm(path)
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


def _mark(path: str) -> str:
    """A folder by the names, sizes and times of its files; another model by its name."""
    if not Path(path).is_dir():
        return path
    files = [(p.name, p.stat().st_size, p.stat().st_mtime_ns) for p in sorted(Path(path).iterdir())]
    return hashlib.sha256(repr(files).encode()).hexdigest()
