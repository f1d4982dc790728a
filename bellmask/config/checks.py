"""Checks of options, alone and in combination, before anything starts.

Each message says what was given, what is allowed and what to change. Ranges, and options that
depend on others, are declared on the fields (:class:`bellmask.config.options.Marks`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from bellmask.config.options import TIMELESS, DataOptions, Interval, band_ends

if TYPE_CHECKING:
    from bellmask.config.config import Option, RunConfig

FROM_START = "start"
"""``data.tokenizer`` of a run whose tokenizer came with the weights."""
MOST = 2**53
"""Limit of integers; options that could exhaust memory have lower limits."""


def find_problems(
    config: RunConfig, values: Mapping[str, Any], options: Iterable[Option]
) -> list[str]:
    """All problems of a config, one sentence each."""
    found = [problem for option in options for problem in _marked(option, values)]
    for find in (_start, _causal_lm, _data, _model, _times, _train):
        found += find(config)
    return found


def _marked(option: Option, values: Mapping[str, Any]) -> Iterator[str]:
    """Violations of an option's declared limits."""
    name, marks, value = option.path, option.marks, values[option.path]
    given = f"{name}={value!s:.40}"
    for item in value if isinstance(value, list) else [value]:
        if isinstance(item, str) and "\0" in item:
            yield f"{name}={item!r} holds a null character"
        if type(item) not in (int, float):
            continue
        most = min(marks.at_most, MOST) if type(item) is int else marks.at_most
        if not (marks.at_least <= item <= most and marks.above < item < marks.below):
            bounds = {"at least": marks.at_least, "above": marks.above, "below": marks.below}
            bounds["at most"] = most if item > MOST else marks.at_most
            known = {word: bound for word, bound in bounds.items() if abs(bound) < math.inf}
            allowed = [f"{word} {bound:,}" for word, bound in known.items()]
            yield f"{given} must be {' and '.join(allowed) or 'a finite number'}"
    if value == option.default:
        return
    if need := marks.belongs_to(values):
        name, has_values, _ = need.partition("=")
        yield f"{given} needs {need}" + (f", not {values[name]}" if has_values else "")
    if marks.not_with and values[marks.not_with]:
        yield f"{given} cannot be combined with {marks.not_with}={values[marks.not_with]}"


def _start(config: RunConfig) -> Iterator[str]:
    """Problems with the initial weights and with fine-tuning."""
    start, sft, tokenizer = config.start, config.sft, config.data.tokenizer
    name = config.framework.name
    if start.model is not None and start.architecture is not None:
        yield "start.model has its own architecture; omit start.architecture"
    if "" in (start.model, start.architecture):
        yield "start.model and start.architecture must not be empty; omit them instead"
    if start.fresh and start.mask_token is not None:
        yield "start.mask_token needs pretrained weights; it cannot be combined with start.fresh"
    if start.model is None and tokenizer == FROM_START:
        yield "data.tokenizer=start needs start.model"
    if start.model is not None and tokenizer not in (DataOptions.tokenizer, FROM_START):
        yield f"data.tokenizer={tokenizer}: start.model provides the tokenizer; omit this option"
    if start.model is None and start.architecture is None:
        if start.anneal_steps != 1:
            yield "start.anneal_steps is for causal LMs: it needs start.model or start.architecture"
        if config.model.backbone != "dit":
            yield f"model.backbone={config.model.backbone} needs start.model or start.architecture"
        if sft.train is not None and name != "mdm":
            yield f"sft.train needs framework mdm, not {name}"
    if sft.counts and "tasks" not in [
        str(examples).split(":")[0] for examples in (sft.train, sft.valid)
    ]:
        yield "sft.counts needs --sft.train tasks"


def _causal_lm(config: RunConfig) -> Iterator[str]:
    """Options that a pretrained backbone does not support."""
    if config.model.backbone != "causal_lm" and config.start.architecture is None:
        return
    name, tokenizer = config.framework.name, config.data.tokenizer
    if name not in ("mdm", "arm"):
        yield f"framework {name} needs the built-in DiT; a causal LM can be mdm or arm"
    if config.model.modulation != "constant":
        yield "model.modulation=time needs the built-in DiT: a causal LM takes no times"
    if config.model.local_conv and name != "mdm":
        yield f"model.local_conv on a causal LM is for framework mdm, not {name}"
    if config.data.pads == "noised":
        yield "data.pads=noised needs the built-in DiT"
    if tokenizer.startswith("symbols:"):
        yield f"data.tokenizer={tokenizer} has no BOS, which a causal LM needs"
    if config.data.block_length < 2:
        yield "a causal LM needs data.block_length of at least 2"


def _data(config: RunConfig) -> Iterator[str]:
    data = config.data
    if data.wrap and data.block_length < 3:
        yield f"data.wrap needs data.block_length of at least 3, got {data.block_length}"
    if data.document_attention and data.insert_eos is False:
        yield "data.document_attention separates documents by EOS: it needs data.insert_eos"


def _model(config: RunConfig) -> Iterator[str]:
    width, heads, near = config.model.width, config.model.num_heads, config.model.local_conv
    if near and near % 2 == 0:
        yield f"model.local_conv={near} must be odd: 3, 5, ..."
    is_own = config.start.model is None and config.start.architecture is None
    if is_own and heads >= 1 and (width % heads or (width // heads) % 2):
        good = [h for h in range(1, min(width, 64) + 1) if width % (2 * h) == 0]
        yield (
            f"model.width={width} must be an even multiple of model.num_heads={heads}; "
            f"heads that fit this width: {', '.join(map(str, good)) or 'none'}"
        )


def _times(config: RunConfig) -> Iterator[str]:
    """Problems with laws, schedules and objectives."""
    framework, law, name = config.framework.name, config.law, config.objective.name
    given = {"law": law, "schedule": config.schedule, "objective": config.objective}
    if framework != "mdm" and given != TIMELESS:
        yield f"framework {framework} has no times: omit --law, --schedule and --objective"
    if law.name == "dirac" and law.mu is not None and not 0 < law.mu <= 1:
        yield f"law dirac needs 0 < law.mu <= 1 (at 0 nothing is masked), got {law.mu}"
    low, high = band_ends(law)
    if law.name == "band" and low >= high:
        yield f"law.low={low} must be below law.high={high}"
    if law.name == "progress" and name != "bell":
        yield f"law progress is for objective bell, not {name}: it changes while training"
    if law.name == "dirac" and name in ("nelbo", "importance"):
        yield f"objective {name} needs a density, and dirac has none; use objective bell"
    if name == "importance" and config.schedule.name != "linear":
        yield f"objective importance is defined for the linear schedule, not {config.schedule.name}"


def _train(config: RunConfig) -> Iterator[str]:
    train = config.train
    size = train.microbatch_size
    if isinstance(size, int) and size > 0 and train.batch_size % size:
        batch = f"train.batch_size={train.batch_size}"
        yield f"{batch} is not a multiple of train.microbatch_size={size}"
    if not re.fullmatch(r"auto|cpu|mps|cuda(:\d+)?", train.device):
        yield f"train.device={train.device!r} must be auto, cpu, cuda, cuda:N or mps"
    for name, text in (
        ("validation.every", config.validation.every),
        ("validation.samples_every", config.validation.samples_every),
        ("checkpoint.every", config.checkpoint.every),
    ):
        try:
            Interval.parse(text)
        except ValueError as error:
            yield f"{name}: {error}"
