"""``bellmask export``: a run as a Hugging Face folder, or as a file in mdlm's layout.

The folder holds weights, config, tokenizer, code and card; it can be pushed to the hub.
"""

from __future__ import annotations

import contextlib
import copy
import json
import re
import string
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import tyro
from torch import Tensor

from bellmask import __version__
from bellmask.config.command_line import parse_command
from bellmask.config.config import RunConfig
from bellmask.config.options import StartOptions
from bellmask.data.corpora import find_policy
from bellmask.data.prepare import parse_mixture
from bellmask.data.tokenizers import ByteTokenizer, FastTokenizer, SymbolTokenizer, Tokenizer
from bellmask.exchange import mdlm
from bellmask.model.pretrained import PretrainedDenoiser, merge_lora
from bellmask.model.transformer import count_parameters
from bellmask.storage import loading
from bellmask.storage.build import describe_learning
from bellmask.storage.loading import Loaded, LoadOptions, float_parameters, map_ids
from bellmask.storage.run_folder import FORMAT, read_description, read_metrics, write_backbone
from bellmask.utils import files
from bellmask.utils.errors import UserError, refuse
from bellmask.utils.files import whole_file, whole_folder, write_json, write_text
from bellmask.utils.libraries import first_line
from bellmask.utils.stats import plus_minus
from bellmask.utils.table import Table


@dataclass(frozen=True, kw_only=True)
class ExportOptions(LoadOptions):
    """Export a run as a Hugging Face folder, or as weights in mdlm's format.

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
    .safetensors file in the format of mdlm and duo, for the built-in DiT only."""
    out: str
    """Folder (hf) or .safetensors file (mdlm) to write; it must not exist yet."""
    device: str = "cpu"
    """Device to load the weights on."""
    push: str | None = None
    """Also upload the folder to OWNER/NAME on the hub (hf only; log in with 'hf auth login')."""
    private: bool = False
    """With --push: create a private repository."""


def check_exportable(run: Loaded, format: str) -> None:
    """Reject, before anything is written, models that the format cannot represent."""
    config, tokenizer = run.config, run.tokenizer
    framework, model = config.framework.name, config.model
    is_own, has_time = model.backbone != "causal_lm", model.modulation == "time"
    is_mdlm = format == "mdlm"
    has_mask = isinstance(tokenizer, FastTokenizer) and tokenizer.original_ids[-1] >= 0
    problems = {f"of framework {framework} on the built-in DiT": framework != "mdm"}
    if not is_own:
        is_arm = framework == "arm"
        problems = {
            "a causal LM: use --format hf": is_mdlm,
            "an ARM without a row for its tokenizer's mask": is_arm and has_mask,
        }
    theirs = {
        "a model without --model.time-input sigma": has_time and model.time_input != "sigma",
        f"trained on the {config.schedule.name} schedule's times, mdlm's is linear": (
            has_time and config.schedule.name != "linear"
        ),
        f"a model whose MLP is {model.mlp_ratio} widths wide; mdlm's are 4": model.mlp_ratio != 4,
        "a model with attention within documents": config.data.document_attention,
        "a model with a local convolution": model.local_conv > 0,
    }
    refuse(problems | (theirs if is_mdlm else {}), f"{run.folder} is ")


def export_mdlm(run: Loaded, out: Path) -> None:
    """One safetensors file in mdlm's layout, with the prefix that its Lightning module has."""
    check_exportable(run, "mdlm")
    config, flat = run.config, run.config.flat()
    layers, ids = config.model.num_layers, map_ids(run.tokenizer)
    theirs = mdlm.from_ours(float_parameters(run.model), layers, ids)
    theirs[mdlm.INV_FREQ] = mdlm.rotary_rates(config.model.width // config.model.num_heads)
    about = {name: flat[option] for name, option in mdlm.OPTIONS.items()}
    about |= {"wrap": run.is_wrapped, "step": run.step}
    about["time_conditioning"] = config.model.modulation == "time"
    tensors = {f"backbone.{name}": tensor for name, tensor in theirs.items()}
    with whole_file(out, "the weights") as scratch:
        mdlm.write_safetensors(tensors, scratch, **{mdlm.METADATA: json.dumps(about)})


# The Hugging Face folder.

CODE = ("exchange/hub_code/modeling_bellmask.py", "model/dit.py")
CAUSAL_CODE = ("exchange/hub_code/modeling_bellmask_causal.py", "model/dit.py")
_KEPT = (
    "id parameters num_tokens mask_id tokenizer_fingerprint train_fingerprint valid_fingerprint "
    "train_blocks valid_blocks unigram_nll response_tokens has_turns imported_from"
).split()
"""Fields of run.json that describe the model, not the machine."""

SpecialIds = dict[str, int | None]
"""Exported ids of bos, eos, pad and mask; None for missing tokens."""


@dataclass(frozen=True)
class ModelFiles:
    """The model's part of an export; tokenizer, options and card come on top."""

    tensors: dict[str, Tensor]
    config: dict[str, Any]
    """config.json, but for the special ids."""
    ids: SpecialIds
    num_ids: int
    """Entries of the exported tokenizer."""
    code: tuple[str, ...] = ()
    """Files of the package that are included."""
    own: dict[str, Tensor] = field(default_factory=dict)
    """Tensors that bellmask alone reads."""


def export_hugging_face(run: Loaded, out: Path, *, weights: str, name: str | None = None) -> None:
    """A folder that ``bellmask.load`` and ``AutoModelForMaskedLM`` (with remote code) load; of an
    ARM on a causal LM one for ``AutoModelForCausalLM``.

    ``weights`` says which the run was loaded with: "ema" or "raw"; ``name`` is what the card calls
    the model, by default the folder.
    """
    check_exportable(run, "hf")
    parts = _causal_files(run) if run.config.model.backbone == "causal_lm" else _trunk_files(run)
    options = exported_options(run.config, is_pushed=name is not None)
    about = read_description(run.folder)
    about = {key: about[key] for key in _KEPT if key in about}
    about |= {"format": FORMAT, "bellmask": __version__, "step": run.step, "weights": weights}
    special = {f"{role}_token_id": number for role, number in parts.ids.items()}
    with whole_folder(out, "the export") as folder:
        own = folder / loading.OWN
        own.mkdir()
        mdlm.write_safetensors(parts.tensors, folder / loading.MODEL)
        write_tokenizer(run, folder, parts)
        write_json(folder / "config.json", parts.config | special)
        write_json(folder / "run.json", about)
        write_json(own / "config.json", options)
        write_json(own / "tokenizer.json", run.tokenizer.description())
        if run.backbone is not None:
            write_backbone(own, run.backbone)
        if parts.own:
            mdlm.write_safetensors(parts.own, own / loading.OWN_TENSORS)
        for file in parts.code:
            code = resources.files("bellmask").joinpath(file)
            write_text(folder / code.name, code.read_text(encoding="utf-8"))
        write_text(folder / "README.md", model_card(run, name or out.name, weights=weights))


def _trunk_files(run: Loaded) -> ModelFiles:
    """Our parameters with rows in the tokenizer's order, and a row of zeros for the unused logit of
    the mask.
    """
    model, num_ids = run.config.model, run.tokenizer.num_tokens + 1
    order = torch.from_numpy(map_ids(run.tokenizer).completed())
    tensors = float_parameters(run.model)
    for name in ("embedding.weight", "head.weight", "head.bias"):
        rows = tensors[name].new_zeros(num_ids, *tensors[name].shape[1:])
        rows[order[: len(tensors[name])]] = tensors[name]
        tensors[name] = rows
    config = {
        "model_type": "bellmask",
        "architectures": ["BellmaskForMaskedLM"],
        "auto_map": {
            "AutoConfig": "modeling_bellmask.BellmaskConfig",
            "AutoModelForMaskedLM": "modeling_bellmask.BellmaskForMaskedLM",
        },
        "vocab_size": num_ids,
        "hidden_size": model.width,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "intermediate_size": model.mlp_ratio * model.width,
        "max_position_embeddings": run.config.data.block_length,
        **{name: getattr(model, name) for name in ("local_conv", "modulation", "time_input")},
        "schedule": run.config.schedule.name,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    }
    return ModelFiles(tensors, config, special_ids(run.tokenizer), num_ids, CODE)


def _causal_files(run: Loaded) -> ModelFiles:
    """Of a run on a causal LM: a masked model becomes ``AutoModelForMaskedLM`` with code of its
    own, an ARM the plain ``AutoModelForCausalLM`` that it is. Low-rank updates are merged.
    """
    assert isinstance(run.model, PretrainedDenoiser)
    assert run.backbone is not None
    model, tokenizer, ids = run.model, run.tokenizer, special_ids(run.tokenizer)
    if run.config.start.lora_rank:
        model = copy.deepcopy(model)  # the run stays as it is
        merge_lora(model)
    # the causal LM's config as the run began with it, with the dropout that it trained with
    made = model.language_model.config
    inner = {
        name: getattr(made, name, value) if isinstance(value, float) else value
        for name, value in run.backbone.language_model.items()
    }
    if model.is_causal:
        # our ids are the tokenizer's own here; a pad that the model has no row for is left out
        num_ids = model.num_logits
        pad = tokenizer.pad_id if ids["pad"] is not None and tokenizer.pad_id < num_ids else None
        config = {
            **inner,
            "architectures": [type(model.language_model).__name__],
            "vocab_size": num_ids,
            "dtype": "float32",
        }
        ids = {"bos": ids["bos"], "eos": ids["eos"], "pad": pad}
        # a causal LM has no place for it: an ARM never reads it, a masked run may begin with it
        own = {loading.MASK_ROW: model.mask_row.detach().float().cpu()}
        tensors = float_parameters(model.language_model)
        return ModelFiles(tensors, config, ids, num_ids, own=own)
    num_ids, module = tokenizer.num_tokens + 1, "modeling_bellmask_causal"
    config = {
        "model_type": "bellmask_causal",
        "architectures": ["BellmaskCausalForMaskedLM"],
        "auto_map": {
            "AutoConfig": f"{module}.BellmaskCausalConfig",
            "AutoModelForMaskedLM": f"{module}.BellmaskCausalForMaskedLM",
        },
        "text_config": {**inner, "vocab_size": num_ids},
        "is_shifted": True,
        "local_conv": run.config.model.local_conv,
        "has_windows": model.has_windows,
        "silent_token_ids": loading.silent_ids(model, tokenizer),
        "dtype": "float32",
    }
    return ModelFiles(loading.masked_weights(model, tokenizer), config, ids, num_ids, CAUSAL_CODE)


# Our tokenizers as the files that ``AutoTokenizer`` loads.
#
# Ids are those of the wrapped tokenizer, so GPT-2's and BERT's files are unchanged; the mask, and a
# pad if there is none, are added at the end. No special tokens are added to a text: the ids are
# those that the model was trained on. Written with ``tokenizers`` alone: transformers is not
# needed.


def special_ids(tokenizer: Tokenizer) -> SpecialIds:
    """The special tokens in the exported order."""
    order, roles = map_ids(tokenizer).completed(), ("bos", "eos", "pad", "mask")
    if isinstance(tokenizer, SymbolTokenizer):
        return {**dict.fromkeys(roles), "mask": int(order[tokenizer.mask_id])}
    return {role: int(order[getattr(tokenizer, f"{role}_id")]) for role in roles}


def write_tokenizer(run: Loaded, folder: Path, parts: ModelFiles) -> None:
    """tokenizer.json and tokenizer_config.json; every special token has a name in them.

    Those that the vocabulary lacks are added, lowest id first, under the first name that is free.
    """
    from tokenizers import AddedToken

    inner, names, has_gaps = _inner(run.tokenizer), {}, False
    found = {role: number for role, number in parts.ids.items() if number is not None}
    for role, number in sorted(found.items(), key=lambda item: item[1]):
        name = inner.id_to_token(number)
        if name is None:
            options = (f"<{role}>", f"[{role.upper()}]", f"<|{role}|>", f"<|bellmask {role}|>")
            name = next(option for option in options if inner.token_to_id(option) is None)
        inner.add_special_tokens([AddedToken(name, special=True, normalized=False)])
        names[f"{role}_token"] = name
        has_gaps |= inner.token_to_id(name) != number
    size = inner.get_vocab_size(with_added_tokens=True)
    if has_gaps or size != parts.num_ids:
        raise UserError(f"the vocabulary has gaps: {size} entries, and {parts.num_ids} rows")
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": run.config.data.block_length,
        "clean_up_tokenization_spaces": False,
        **names,
    }
    more = {"unk_token": getattr(inner.model, "unk_token", None)}
    more["chat_template"] = run.backbone.chat_template if run.backbone else None
    config |= {name: value for name, value in more.items() if value is not None}
    write_text(folder / "tokenizer.json", inner.to_str(pretty=True) + "\n")
    write_json(folder / "tokenizer_config.json", config)


def _inner(tokenizer: Tokenizer) -> Any:
    """A ``tokenizers.Tokenizer`` that encodes as ours does, in its own ids."""
    from tokenizers import Tokenizer as Inner
    from tokenizers import decoders, models, pre_tokenizers

    if isinstance(tokenizer, FastTokenizer):
        tree = json.loads(tokenizer.description()["inner"])
        tree["post_processor"] = None  # no special tokens around a text
        return Inner.from_str(json.dumps(tree))
    if isinstance(tokenizer, ByteTokenizer):  # byte-level BPE without a merge
        # the letter of a byte: itself where it can be printed, else one from number 256 on
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        others = [byte for byte in range(256) if chr(byte) not in alphabet]
        places = {a: ord(a) if ord(a) < 256 else others[ord(a) - 256] for a in alphabet}
        inner = Inner(models.BPE(vocab=places, merges=[]))
        inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        inner.decoder = decoders.ByteLevel()
        return inner
    letters = {letter: i for i, letter in enumerate(string.ascii_letters[: tokenizer.num_tokens])}
    inner = Inner(models.BPE(vocab=letters, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    inner.decoder = decoders.Fuse()
    return inner


# The options of a run in an export, without values specific to one machine.


def exported_options(config: RunConfig, *, is_pushed: bool) -> dict[str, Any]:
    """Ready for JSON; ``load_config`` takes it.

    The source of the weights is reduced to a name, and low-rank options are removed because the
    updates are merged. Paths of the text are kept for ``evaluate``, unless the export is pushed.
    """
    start = replace(
        config.start,
        model=start_name(config.start.model),
        architecture=start_name(config.start.architecture),
        lora_rank=StartOptions.lora_rank,
        lora_alpha=StartOptions.lora_alpha,
    )
    options = replace(config, start=start).resolved().to_dict()
    options["data"]["cache"] = None  # a folder of this machine
    if is_pushed:
        for section in ("data", "sft"):
            options[section] = {k: without_folders(v) for k, v in options[section].items()}
    return options


def start_name(path: str | None) -> str | None:
    """The last part of a folder's path; a hub name unchanged."""
    if path is not None and Path(path).exists():
        return Path(path).absolute().name
    return without_folders(path)


def without_folders(value: Any) -> Any:
    """Absolute paths as names, also those behind a kind (``sharegpt:/FILE``) and in lists."""
    if isinstance(value, list):
        return [without_folders(one) for one in value]
    is_text = isinstance(value, str)
    return re.sub(r"^(\w+:)?/(.*/)?", r"\1", value.rstrip("/")) if is_text else value


# The card: training, measurements, and how to load the model.

CARD = resources.files("bellmask.exchange").joinpath("card.md").read_text(encoding="utf-8")
MASKED = (
    "A masked diffusion language model: given text with some tokens masked, it predicts the "
    "token at every mask; text is generated by unmasking step by step. Exported with "
    "bellmask. The mask itself is never predicted."
)
SHIFTED = (
    "Its network is a causal language model with bidirectional attention. Position 0 is never "
    "predicted (its logits are meaningless), so begin rows with BOS, and pad on the right."
)
CAUSAL = "A causal language model: text is generated left to right. Exported with bellmask."
TIME = "\nPass `t` (a time per row); it defaults to the fraction of masked tokens.\n"
TUNED = (
    "It was fine-tuned on prompts and responses, which bellmask formats as in training; chat "
    "with `bellmask chat {}`, or:"
)


def model_card(run: Loaded, name: str, *, weights: str) -> str:
    is_masked, is_tuned = run.config.framework.name == "mdm", run.config.sft.train is not None
    introduction, row = CAUSAL, 'tokenizer.bos_token + "Some text"'
    if is_masked:
        introduction, row = MASKED, '"Some text " + tokenizer.mask_token * 3'
        if run.backbone is not None:
            introduction, row = f"{MASKED}\n\n{SHIFTED}", f"tokenizer.bos_token + {row}"
    use = "With bellmask, for likelihoods, samples and infilling:"
    program = 'run.sample(1, prefix="Some text "), run.nll(["Some text"])'
    return CARD.format(
        task="fill-mask" if is_masked else "text-generation",
        tag="masked-diffusion" if is_masked else "causal-lm",
        title=Path(name).name,
        introduction=introduction,
        facts=Table("", ("quantity", "value"), _facts(run, weights)).markdown(),
        measured=_measured(run),
        text=_text(run),
        auto_model="AutoModelForMaskedLM" if is_masked else "AutoModelForCausalLM",
        trust=", trust_remote_code=True" if is_masked else "",
        name=name,
        row=row,
        time=TIME if run.config.model.modulation == "time" else "",
        use=TUNED.format(name) if is_tuned else use,
        program='run.answer(["A question"])[0]' if is_tuned else program,
    )


def _facts(run: Loaded, weights: str) -> list[tuple[str, str]]:
    model, start, data = run.config.model, run.config.start, run.config.data
    sizes: list[Any] = [model.num_layers, model.width, model.num_heads]
    rows = [("parameters", f"{count_parameters(run.model):,}")]
    if isinstance(run.model, PretrainedDenoiser):
        inner = run.model.language_model.config
        names = ("num_hidden_layers", "hidden_size", "num_attention_heads")
        sizes = [getattr(inner, name, "unknown") for name in names]
        rows += [("architecture", str(inner.model_type))]
    if start.model is not None:
        rows += [("began as", str(start_name(start.model)))]
    rows += [
        ("blocks, width, heads", ", ".join(map(str, sizes))),
        ("row length", f"{data.block_length} tokens"),
        ("tokens", f"{run.tokenizer.num_tokens:,} ({Path(data.tokenizer).name})"),
        ("time input", f"yes ({model.time_input})" if model.modulation == "time" else "no"),
        ("local convolution", f"{model.local_conv} positions" if model.local_conv else "no"),
        ("steps", f"{run.step:,}"),
        ("weights", {"ema": "moving average", "raw": "as trained"}[weights]),
    ]
    if origin := read_description(run.folder).get("imported_from"):
        return [*rows, ("imported from", str(origin))]
    batch = run.config.train.batch_size
    return [
        *rows,
        ("batch", f"{batch} rows, {batch * data.block_length:,} tokens"),
        ("learning", describe_learning(run.config)),
    ]


def _measured(run: Loaded) -> str:
    """Numbers measured at this step, by text, from the files of the run folder."""
    metrics = read_metrics(run.folder / "metrics.jsonl")
    records = [("validation", one) for one in metrics if one["kind"] == "validation"]
    for path in sorted(run.folder.glob("evaluation*/evaluation.json")):
        with contextlib.suppress(UserError):  # a file of another program, or one being written
            report = files.read_object(path)
            data = str(report.get("data"))
            # preferred over a validation during training
            records += [("validation" if "the run's" in data else Path(data).name, report)]
    rows = {}
    for text, numbers in records:
        with contextlib.suppress(KeyError, TypeError, ValueError):  # not a file of ours
            if numbers["step"] == run.step:
                bits = numbers.get("bits_per_byte")
                rows[text] = (
                    text,
                    plus_minus(numbers["nll"], numbers.get("nll_se"), 4),
                    f"{numbers['perplexity']:.3f}",
                    "unknown" if bits is None else f"{bits:.4f}",
                    f"{numbers['num_blocks']} x {numbers['num_draws']}",
                )
    if not rows:
        return "Not measured at this step; run `bellmask evaluate`.\n"
    head = ("text", "NLL, nats per token", "perplexity", "bits per byte", "blocks x masks")
    return Table("", head, list(rows.values())).markdown() + (
        "\nThe NLL is an upper bound (NELBO) with fixed masks at exact context counts; ± is its "
        "standard error over documents and masks.\n"
    )


def _text(run: Loaded) -> str:
    """Title and license of each corpus; of local files the name alone."""
    data, examples = run.config.data, run.config.sft.train
    if read_description(run.folder).get("imported_from"):
        return "Unknown, because the model was imported. See its publication.\n"
    if examples is not None:
        is_public = examples.split(":")[0] in ("hub", "tasks")
        rows = [(without_folders(examples), "see the repository" if is_public else "not specified")]
    else:
        names = (data.train, *parse_mixture(data.mixture))
        policies = {name: find_policy(data, name) for name in names}
        rows = [(Path(p.title or name).name, p.license) for name, p in policies.items()]
    return Table("", ("text", "license"), rows).markdown()


# The command.


def push_folder(folder: Path, name: str, *, is_private: bool) -> str:
    """Upload a whole folder as one commit to a model repository; its address."""
    api, kind = loading.hub_library().HfApi(), {"repo_type": "model"}
    message = "Exported with bellmask"
    try:
        made = api.create_repo(name, **kind, private=is_private, exist_ok=True)
        api.upload_folder(repo_id=name, folder_path=str(folder), commit_message=message, **kind)
    except Exception as error:  # the export is kept; only the upload must be repeated
        raise UserError(
            f"{folder} is written, but could not be pushed to {name} ({first_line(error)}); log in "
            f"with 'hf auth login' and try: hf upload {name} {folder}"
        ) from None
    return str(made)


def main(args: Sequence[str]) -> int:
    """Export, and push if requested."""
    options = parse_command(ExportOptions, args, command="export")
    out, is_mdlm = Path(options.out), options.format == "mdlm"
    if is_mdlm and out.suffix != ".safetensors":
        raise UserError(f"--format mdlm writes one file: use --out NAME.safetensors, not {out}")
    if options.push is not None and (is_mdlm or not loading.is_hub_name(options.push)):
        raise UserError(f"--push takes OWNER/NAME and --format hf, got {options.push!r}")
    if options.private and options.push is None:
        raise UserError("--private needs --push")
    files.check_free(out, "the export", is_file=is_mdlm)
    loaded = options.load(options.run)
    print(f"writing {out} ...", file=sys.stderr)
    if is_mdlm:
        export_mdlm(loaded, out)
        print(f"written: {out}, weights in mdlm's layout")
        return 0
    # an export of an export has the same kind of weights
    is_raw = options.weights == "raw" or not loaded.config.optim.ema
    weights = str(read_description(loaded.folder).get("weights", "raw" if is_raw else "ema"))
    export_hugging_face(loaded, out, weights=weights, name=options.push)
    print(f"written: {out}; load it with bellmask.load({str(out)!r})")
    if options.push is not None:
        print(f"pushing to {options.push} ...", file=sys.stderr)
        print(f"pushed: {push_folder(out, options.push, is_private=options.private)}")
    return 0
