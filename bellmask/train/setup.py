"""Origin of a run's network, tokenizer and initial weights: the options, a run, or a causal LM."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from bellmask.config.checks import FROM_START
from bellmask.config.config import RunConfig
from bellmask.config.options import ModelOptions, StartOptions
from bellmask.data.prepare import LoadedData, load_inputs, make_tokenizer
from bellmask.data.tokenizers import Tokenizer
from bellmask.model import causal_lm
from bellmask.model.pretrained import Backbone, PretrainedDenoiser, dropout_rates, merge_lora
from bellmask.storage.build import Network, build_model
from bellmask.storage.loading import load, local_folder
from bellmask.storage.run_folder import read_backbone, read_config, read_tokenizer
from bellmask.utils.console import announced
from bellmask.utils.errors import UserError
from bellmask.utils.progress import progress_bar


@dataclass(frozen=True)
class Start:
    """The start of a run."""

    config: RunConfig
    """The run's, with what the start decides filled in."""
    tokenizer: Tokenizer | None = None
    """The start's own; None: the one that the data options name."""
    backbone: Backbone | None = None
    """Of a causal LM; None for the built-in DiT."""
    fill: Callable[[Network], None] | None = None
    """Sets the first weights; None: random ones."""
    fingerprint: str = ""
    """Changes when other weights would be read."""
    notes: tuple[str, ...] = ()
    """Notes for the user: options that do not apply to this start."""

    def load_data(self, *, is_quiet: bool = True) -> tuple[Tokenizer, LoadedData]:
        """The run's tokenizer, and its text, prepared if need be."""
        with announced("making the tokenizer", is_quiet=is_quiet):  # learning one may take minutes
            tokenizer = self.tokenizer or make_tokenizer(self.config.data)
        with progress_bar("preparing text", "documents", is_quiet=is_quiet) as progress:
            return tokenizer, load_inputs(self.config, tokenizer, self.backbone, progress)

    def backbone_for(self, tokenizer: Tokenizer) -> Backbone | None:
        """The causal LM, one with random weights sized for a tokenizer."""
        if self.backbone is None or self.tokenizer is not None:
            return self.backbone
        ids = {"bos_token_id": tokenizer.bos_id, "eos_token_id": tokenizer.eos_id}
        sizes = {"vocab_size": tokenizer.num_tokens, "pad_token_id": None, **ids}
        return replace(self.backbone, language_model={**self.backbone.language_model, **sizes})

    def build_model(self, tokenizer: Tokenizer) -> Network:
        """The network with its first weights."""
        backbone = self.backbone_for(tokenizer)
        return build_model(self.config, tokenizer.num_tokens, backbone, self.fill)


# Paper: App. C.1: continual pretraining
def open_start(config: RunConfig, folder: Path | None = None) -> Start:
    """The start that the options name; of a run that is already in ``folder``, as it was."""
    options = config.start
    if options.model is None and options.architecture is None:
        return Start(config)
    if folder is not None and (folder / "run.json").exists():
        return _from_before(config, folder)
    if options.architecture is not None:
        backbone, mark = causal_lm.read_architecture(options.architecture)
        return _begin(config, config.model, backbone, fingerprint=mark)
    start = _from_model(config, str(options.model))
    return replace(start, fill=None) if options.fresh else start


def _from_before(config: RunConfig, folder: Path) -> Start:
    """A run's own folder; one that was stopped before its first checkpoint begins once more."""
    before, backbone = read_config(folder), read_backbone(folder)
    if backbone is None:
        _check_model(config, before.model, folder)

    def fill(network: Network) -> None:
        again = open_start(config).fill
        if again is not None:
            again(network)

    return _begin(config, before.model, backbone, read_tokenizer(folder), fill)


def _from_model(config: RunConfig, name: str) -> Start:
    if name == causal_lm.NAME:
        return _from_causal_lm(config, str(causal_lm.smollm2_folder(config.data.cache)))
    path = Path(name)
    if path.parts[:1] == ("runs",) and not path.exists():
        raise UserError(f"there is no {path}; first: bellmask train {path.name} --out {path}")
    if path.is_file():
        raise UserError(f"start.model={name} is a file; for random weights --start.architecture")
    found = local_folder(name)
    if (found / "run.json").exists():
        return _from_run(config, found)
    return _from_causal_lm(config, str(found) if found.exists() else name)


def _begin(
    config: RunConfig,
    model: ModelOptions,
    backbone: Backbone | None,
    tokenizer: Tokenizer | None = None,
    fill: Callable[[Network], None] | None = None,
    fingerprint: str = "",
) -> Start:
    """A start whose config says what the network really is.

    For the built-in DiT that is ``model`` with the run's own dropout. Of a causal LM only dropout
    can be chosen, where it has any. Both can get a local convolution, which starts at zero.
    """
    notes = []
    dropout, near = config.model.dropout, config.model.local_conv or model.local_conv
    if model.local_conv not in (0, near):
        raise UserError(f"model.local_conv={near}: start.model has {model.local_conv}")
    if backbone is not None:
        check_length(config, backbone, str(config.start.model or config.start.architecture))
        model = ModelOptions(backbone="causal_lm")
        given = replace(config.model, dropout=model.dropout, backbone=model.backbone, local_conv=0)
        if given != model:
            notes.append("only dropout and local-conv of the --model options apply to a causal LM")
        if dropout and not dropout_rates(backbone.language_model):
            notes.append("this causal LM has no dropout: model.dropout does not apply")
            dropout = 0.0
    name = config.data.tokenizer if config.start.model is None else FROM_START
    model = replace(model, dropout=dropout, local_conv=near)
    adopted = replace(config, model=model, data=replace(config.data, tokenizer=name))
    return Start(adopted.check(), tokenizer, backbone, fill, fingerprint, tuple(notes))


def check_length(config: RunConfig, backbone: Backbone, name: str) -> None:
    """Refuse rows that are longer than a causal LM has positions for."""
    length = config.data.block_length
    for key in ("max_position_embeddings", "n_positions"):  # GPT-2 calls it the second
        limit = backbone.language_model.get(key)
        if isinstance(limit, int) and length > limit:
            raise UserError(f"data.block_length={length}: {name} has {limit} positions")


def _from_run(config: RunConfig, folder: Path) -> Start:
    """Another run's backbone, tokenizer and weights (moving average where it has one)."""
    source = load(folder, checkpoint=config.start.checkpoint)
    backbone = source.backbone
    if backbone is None:
        _check_own_trunk(config, source.config, folder)
    if config.start.mask_token is not None:
        raise UserError(f"start.mask_token: {folder} is a run, which already has a mask embedding")

    @torch.no_grad()
    def fill(network: Network) -> None:
        if isinstance(source.model, PretrainedDenoiser):
            merge_lora(source.model)
        weights = dict(source.model.named_parameters())
        for name, parameter in network.named_parameters():
            if name in weights or name != "local_conv.weight":  # that may be new
                parameter.copy_(weights[name])

    mark = f"{hashlib.sha256((folder / 'run.json').read_bytes()).hexdigest()}/{source.step}"
    return _begin(config, source.config.model, backbone, source.tokenizer, fill, mark)


def _check_own_trunk(config: RunConfig, theirs: RunConfig, folder: Path) -> None:
    """What weights of the built-in DiT cannot be used for."""
    name = config.framework.name
    if theirs.framework.name != name:
        words = f"has framework {theirs.framework.name}, not {name}, and keeps it; to adapt an ARM"
        raise UserError(f"start.model={folder} {words} pretrain with --start.architecture")
    _check_model(config, theirs.model, folder)
    if config.start.lora_rank or config.start.anneal_steps != 1:
        raise UserError("--start.lora-rank and --start.anneal-steps are for causal LMs")
    if config.sft.train is not None and name != "mdm":
        raise UserError(f"sft.train needs framework mdm, not {name}")


def _check_model(config: RunConfig, theirs: ModelOptions, folder: Path) -> None:
    """For the built-in DiT the weights decide everything but dropout and a local convolution."""
    dropout, near = config.model.dropout, config.model.local_conv
    allowed = [replace(m, dropout=dropout, local_conv=near) for m in (ModelOptions(), theirs)]
    if config.model not in allowed:
        raise UserError(f"{folder} has other --model options; omit them here")


def _from_causal_lm(config: RunConfig, path: str) -> Start:
    """A Hugging Face causal LM: its config, tokenizer and chat template now, its weights later."""
    if config.start.checkpoint != StartOptions.checkpoint:
        raise UserError(f"start.checkpoint needs a run folder, and {path} is a causal LM")
    tokenizer, backbone = causal_lm.read_causal_lm(path)

    def fill(network: Network) -> None:
        assert isinstance(network, PretrainedDenoiser)
        causal_lm.fill_from_causal_lm(network, path, tokenizer, config.start.mask_token)

    return _begin(config, config.model, backbone, tokenizer, fill, causal_lm.fingerprint(path))
