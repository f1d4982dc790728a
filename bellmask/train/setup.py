"""Where a run's network, tokenizer and first weights come from: nowhere, a run, or a causal LM."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from bellmask.config.checks import FROM_START
from bellmask.config.config import RunConfig, load_config
from bellmask.config.options import ModelOptions, StartOptions
from bellmask.data.tokenizers import Tokenizer
from bellmask.model.causal_lm import NAME as SMOLLM2
from bellmask.model.causal_lm import (
    fill_from_causal_lm,
    fingerprint,
    read_architecture,
    read_causal_lm,
    smollm2_folder,
)
from bellmask.model.pretrained import Backbone, PretrainedDenoiser, dropout_rates, merge_lora
from bellmask.storage.build import Network
from bellmask.storage.loading import load, local_folder, read_own_tokenizer
from bellmask.storage.run_folder import read_backbone, read_tokenizer
from bellmask.utils.errors import UserError


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
    notes: tuple[str, ...] = ()
    """What a person should know: options that do not apply to this start."""

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
        before, backbone = load_config(folder / "config.json"), read_backbone(folder)
        if backbone is None:
            _check_model(config, before.model, folder)
        return _begin(
            config,
            before.model,
            backbone,
            read_tokenizer(folder),
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
    path = Path(options.model)
    if path.parts[:1] == ("runs",) and not path.exists():
        raise UserError(
            f"there is no run folder {path}; train that stage first, for a preset of that name "
            f"with: bellmask train {path.name} --out {path}"
        )
    found = local_folder(options.model)
    if (found / "run.json").exists():
        return _from_run(config, found)
    return _from_causal_lm(config, str(found) if found.exists() else options.model)


def _fill_again(config: RunConfig, network: Network) -> None:
    """A run that was stopped before its first checkpoint begins once more."""
    fill = open_start(config).fill
    if fill is not None:
        fill(network)


def _begin(
    config: RunConfig,
    model: ModelOptions,
    backbone: Backbone | None,
    tokenizer: Tokenizer | None,
    fill: Callable[[Network], None] | None,
    fingerprint: str = "",
) -> Start:
    """A start whose config says what the network really is.

    On our own trunk that is ``model`` with the run's own dropout. Of a causal LM only dropout can
    be chosen, where it has any.
    """
    notes = []
    dropout = config.model.dropout
    if backbone is not None:
        model = ModelOptions(backbone="causal_lm")
        if replace(config.model, dropout=model.dropout, backbone=model.backbone) != model:
            notes.append("of the --model options only dropout applies to a causal LM")
        if dropout and not dropout_rates(backbone.language_model):
            notes.append("this causal LM has no dropout: model.dropout does not apply")
            dropout = 0.0
    name = config.data.tokenizer if config.start.model is None else FROM_START
    adopted = replace(
        config,
        model=replace(model, dropout=dropout),
        data=replace(config.data, tokenizer=name),
    )
    return Start(adopted.check(), tokenizer, backbone, fill, fingerprint, tuple(notes))


def _from_architecture(config: RunConfig, name: str) -> Start:
    """A Hugging Face config with random weights, sized for the run's own tokenizer later."""
    backbone, mark = read_architecture(name)
    check_length(config, backbone, name)
    return _begin(config, config.model, backbone, None, None, mark)


def check_length(config: RunConfig, backbone: Backbone, name: str) -> None:
    """Refuse rows that are longer than a causal LM has positions for."""
    length = config.data.block_length
    for key in ("max_position_embeddings", "n_positions"):  # GPT-2 calls it the second
        limit = backbone.language_model.get(key)
        if isinstance(limit, int) and length > limit:
            raise UserError(
                f"data.block_length={length} is longer than {name} can read: {limit} at most"
            )


def _from_run(config: RunConfig, folder: Path) -> Start:
    """Another run's backbone, tokenizer and weights (moving average where it has one)."""
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

    backbone = source.backbone
    if backbone is not None:
        check_length(config, backbone, str(folder))
    mark = hashlib.sha256((folder / "run.json").read_bytes()).hexdigest()
    return _begin(config, theirs.model, backbone, own, fill, f"{mark}/{source.step}")


def _check_own_trunk(config: RunConfig, theirs: RunConfig, folder: Path) -> None:
    """What weights of our own trunk cannot be used for."""
    name = config.framework.name
    if theirs.framework.name != name:
        raise UserError(
            f"start.model={folder} is {theirs.framework.name}, this run {name}: on our own trunk "
            "weights go only to the same framework; pretrain with --start.architecture to adapt "
            "an ARM"
        )
    _check_model(config, theirs.model, folder)
    if config.start.lora_rank or config.start.anneal_steps != 1:
        raise UserError(
            f"start.model={folder} has our own trunk: --start.lora-rank and --start.anneal-steps "
            "are for causal LMs"
        )
    if config.sft.train is not None and name != "mdm":
        raise UserError(f"prompts and responses are for framework mdm, not {name}")


def _check_model(config: RunConfig, theirs: ModelOptions, folder: Path) -> None:
    """Of our own trunk all but dropout is decided by the weights."""
    given = config.model
    if given not in [replace(m, dropout=given.dropout) for m in (ModelOptions(), theirs)]:
        raise UserError(f"{folder} has other --model options; leave them out here")


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
    tokenizer, backbone = read_causal_lm(path)
    check_length(config, backbone, path)

    def fill(network: Network) -> None:
        assert isinstance(network, PretrainedDenoiser)
        fill_from_causal_lm(network, path, tokenizer, config.start.mask_token)

    return _begin(config, config.model, backbone, tokenizer, fill, fingerprint(path))
