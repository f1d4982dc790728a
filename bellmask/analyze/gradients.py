"""The effect of distant tokens on the learning signal: two measurements on gradients (Sec. 3.3).

Evaluation mode, no weight on the loss, all parameters; also for embedding, trunk and head
separately. An untrained model is the control: its similarities are high for trivial reasons (its
trunk does not use the context yet, and with a zero head it gets no gradient at all).

L block length, P parameters of a part.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

from bellmask.analyze.base import Analysis, RunsOptions
from bellmask.data.blocks import Blocks
from bellmask.report.figures import COLORS, draw_intervals, finish_axes, new_figure
from bellmask.storage.build import build_model
from bellmask.storage.loading import LoadOptions
from bellmask.storage.runs import NamedRun, check_all_maskable, open_runs
from bellmask.utils.distributed import to_float64
from bellmask.utils.errors import UserError, check_least, refuse
from bellmask.utils.progress import Progress
from bellmask.utils.rng import shuffle, stream_key, uniform
from bellmask.utils.stats import Estimate, plus_minus
from bellmask.utils.table import Table

# Paper: Table 1
PAPER_RADIUS = {"4": 0.108, "8": 0.463, "16": 0.685, "32": 0.839, "128": 0.935}
# Paper: Table 2
PAPER_ADDITIVITY = {"2": 0.999, "4": 0.997, "8": 0.994, "16": 0.985, "32": 0.976}
"""Tables 1 and 2: LM1B, 1M steps; keys as JSON has them."""
Similarities = dict[int, dict[str, float]]
"""Setting → part of the model → cosine similarity."""


# Gradients under different masks of the same row, and how alike they are

PARTS = ("whole", "embedding", "trunk", "head")
"""The trunk is all that is neither embedding nor head."""


def gradient(
    model: nn.Module, x0_BL: Tensor, is_masked_BL: Tensor, scored: Tensor, mask_id: int
) -> dict[str, Tensor]:
    """Gradient of the sum of cross-entropies at the flat indices ``scored``, part by part."""
    x_BL = torch.where(is_masked_BL, mask_id, x0_BL)
    rate_B = is_masked_BL.float().mean(1)  # the time, under the linear schedule
    parameters = dict(model.named_parameters())
    with torch.enable_grad():
        loss = model(x_BL, scored, x0_BL.flatten()[scored], t_B=rate_B)
    gradients = torch.autograd.grad(loss, list(parameters.values()), materialize_grads=True)
    parts: dict[str, list[Tensor]] = {part: [] for part in PARTS}
    for name, values in zip(parameters, gradients):
        own = name.partition(".")[0]
        for part in ("whole", own if own in PARTS else "trunk"):
            parts[part].append(values.flatten())
    return {part: torch.cat(values) for part, values in parts.items()}


def cosines(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> dict[str, float]:
    """Cosine similarity of each part, in float64; nan where one of the two is zero."""
    found = {}
    for part in PARTS:
        a, b = to_float64(left[part]), to_float64(right[part])
        found[part] = float(a @ b / (a.norm() * b.norm()))
    return found


# Options, each with its measurement on one row


@dataclass(frozen=True, kw_only=True)
class GradientOptions(RunsOptions, LoadOptions):
    """Gradients of masked models."""

    draws: int = 128
    """Number of sequences, each with its own masks; use at least 64."""


@dataclass(frozen=True, kw_only=True)
class RadiusOptions(GradientOptions):
    """Does masking tokens far from a mask change its gradient? Table 1, Finding 3 (Sec. 3.3).

    Cosine similarity between the gradient of a masked token's cross-entropy before and after 8 more
    tokens within a radius are masked. Low for small radii and high for large ones: only nearby
    tokens matter to what is learned. Masked runs only.

    Examples:
    bellmask analyze gradient-radius runs/base

    bellmask analyze gradient-radius runs/base --radii 4 8 16 --draws 256
    """

    radii: tuple[int, ...] = (4, 8, 16, 32, 128)
    """Radii; a radius beyond the block means the whole block."""
    masks: int = 8
    """Number of tokens masked in addition to the center."""

    @property
    def margin(self) -> int:
        """Distance of a center from both ends, so that the smallest radius has all neighbors."""
        return max(4, math.ceil(self.masks / 2))

    def row_length(self) -> int:
        """Tokens that a row needs; UserError for radii with too few positions for the masks."""
        if self.masks < 1 or not self.radii or 2 * min(self.radii) < self.masks:
            raise UserError(f"--radii must each have room for --masks {self.masks} around a center")
        return 2 * self.margin + 1

    # Paper: Table 1
    def similarities(self, model: nn.Module, x0_L: Tensor, mask_id: int, key: int) -> Similarities:
        """cos(g({c}), g({c} and 8 more)) for a random center c of the row, at each radius."""
        length = len(x0_L)
        spread = float(uniform(key, torch.arange(1)))
        center = self.margin + int(spread * (length - 2 * self.margin))
        alone = torch.zeros(1, length, dtype=torch.bool, device=x0_L.device)
        alone[0, center] = True
        scored = torch.tensor([center], device=x0_L.device)
        before, found = gradient(model, x0_L[None], alone, scored, mask_id), {}
        for radius in self.radii:
            inside = range(max(0, center - radius), min(length, center + radius + 1))
            near = [place for place in inside if place != center]
            order = shuffle(stream_key(key, "radius", radius), len(near))
            more = alone.clone()
            more[0, [near[i] for i in order[: self.masks]]] = True
            after = gradient(model, x0_L[None], more, scored, mask_id)
            found[radius] = cosines(before, after)
        return found


@dataclass(frozen=True, kw_only=True)
class AdditivityOptions(GradientOptions):
    """Is the gradient of k masks together the sum of k gradients of one mask each? Table 2
    (Sec. 3.3).

    Cosine similarity between the two. Near one, rows with a single mask carry no signal beyond that
    of a row with many masks. Masked runs only.

    Examples:
    bellmask analyze gradient-additivity runs/base

    bellmask analyze gradient-additivity runs/base --counts 2 4 8 --draws 256
    """

    counts: tuple[int, ...] = (2, 4, 8, 16, 32)
    """Numbers of masks."""

    def row_length(self) -> int:
        """Tokens that a row needs; UserError for counts below 1."""
        if not self.counts or min(self.counts) < 1:
            raise UserError("--counts must be at least 1")
        return max(self.counts)

    # Paper: Table 2
    def similarities(self, model: nn.Module, x0_L: Tensor, mask_id: int, key: int) -> Similarities:
        """cos(sum of single-mask gradients, gradient of the joint mask), by number of masks."""
        length, found = len(x0_L), {}
        for count in self.counts:
            places = shuffle(stream_key(key, "count", count), length)[:count].to(x0_L.device)
            single = torch.zeros(count, length, dtype=torch.bool, device=x0_L.device)
            single[torch.arange(count), places] = True
            rows = torch.arange(count, device=x0_L.device) * length + places
            apart = gradient(model, x0_L.expand(count, -1), single, rows, mask_id)
            joint = gradient(model, x0_L[None], single.any(0, keepdim=True), places, mask_id)
            found[count] = cosines(apart, joint)
        return found


# Measurement


def _measure(options: RadiusOptions | AdditivityOptions, progress: Progress) -> dict[str, Any]:
    least = options.row_length()
    check_least(options, draws=2)
    runs = open_runs(options.runs)
    check_all_maskable(runs, "this analysis of gradients")
    for run in runs:
        _check(run, least)
    progress.start(2 * len(runs) * options.draws)
    found = []
    for run in runs:
        loaded = options.load(run.folder)
        train, valid = loaded.blocks()
        loaded.check_same_data(train)
        rows = _rows(valid, options.draws, least)
        fresh = build_model(run.config, loaded.tokenizer.num_tokens).to(loaded.device).eval()
        models = ((loaded.model, f"step {loaded.step}", loaded.step), (fresh, "untrained", 0))
        for model, name, step in models:
            values = []
            for number, row in enumerate(rows):
                key = stream_key(options.seed, "gradients", number)
                x0_L, mask_id = row.to(loaded.device), loaded.tokenizer.mask_id
                values.append(options.similarities(model, x0_L, mask_id, key))
                progress.advance()
            whose = {"name": f"{run.name}, {name}", "run": run.folder.name, "step": step}
            found.append({**whose, "rows": _summary(values)})
    about: dict[str, Any] = {"kind": "additivity", "paper": PAPER_ADDITIVITY}
    if isinstance(options, RadiusOptions):
        about = {"kind": "radius", "masks": options.masks, "paper": PAPER_RADIUS}
    return {**about, "models": found, "block_length": runs[0].config.data.block_length}


def _check(run: NamedRun, least: int) -> None:
    config = run.config
    is_timed = config.model.modulation == "time" and config.schedule.name != "linear"
    length = config.data.block_length
    problems = {
        "is a causal model; this analysis needs masked ones": config.framework.name != "mdm",
        "restricts attention to documents": config.data.document_attention,
        "is time-conditioned with a schedule other than linear": is_timed,
        f"has blocks of {length} tokens; this analysis needs {least}": length < least,
    }
    refuse(problems, f"{run.folder} ")


def _rows(blocks: Blocks, draws: int, least: int) -> list[Tensor]:
    """Rows that are long enough, spread over the text, without padding; repeated if few."""
    lengths = blocks.row_lengths(slice(None))
    index = (lengths >= least).nonzero().squeeze(1)
    if not len(index):
        raise UserError(f"no validation block has {least} tokens")
    stride = max(1, len(index) // draws)
    picked = index[torch.arange(draws) * stride % len(index)]
    tokens = blocks.rows(picked)
    return [row[:length] for row, length in zip(tokens, lengths[picked].tolist())]


def _summary(draws: Sequence[Similarities]) -> list[dict[str, Any]]:
    """Mean and standard error over draws, for each setting and part; None where undefined."""
    found = []
    for setting in draws[0]:
        row: dict[str, Any] = {"setting": setting}
        for part in PARTS:
            values = [v for draw in draws if not math.isnan(v := draw[setting][part])]
            mean = Estimate.over_seeds(values) if values else None
            value, error = (mean.value, mean.se) if mean else (None, None)
            row[part] = {"mean": value, "se": error, "draws": len(values)}
        found.append(row)
    return found


# Tables


def _tables(numbers: dict[str, Any]) -> list[Table]:
    what, number = ("radius r", 1) if numbers["kind"] == "radius" else ("number of masks", 2)
    tables = []
    for model in numbers["models"]:
        rows = []
        for row in model["rows"]:
            cells = [plus_minus(row[part]["mean"], row[part]["se"], 3) for part in PARTS]
            paper = plus_minus(numbers["paper"].get(str(row["setting"])), None, 3)
            rows.append([str(row["setting"]), *cells, paper])
        title = f"{model['name']}: cosine similarity ± standard error (Table {number})"
        tables.append(Table(f"{title}; -: no gradient", [what, *PARTS, "paper, 1M steps"], rows))
    return tables


# Figure


def gradients_figure(numbers: Mapping[str, Any]) -> Figure:
    """Similarity against the radius or number of masks: one panel per model, a line per part, the
    paper's numbers dashed.
    """
    models, paper, x_label = numbers["models"], numbers["paper"], "number of masks"
    if numbers["kind"] == "radius":
        x_label = f"radius r, {numbers['masks']} tokens masked within it"
    figure, panels = new_figure(1.5 + 3.6 * len(models), 3.9, len(models), sharey=True)
    for model, axes in zip(models, panels):
        for part, color in zip(PARTS, COLORS):
            found = [(n, row[part]) for n, row in enumerate(model["rows"])]
            found = [(n, point) for n, point in found if point["mean"] is not None]
            if found:
                x, points = zip(*found)
                values, errors = ([point[key] for point in points] for key in ("mean", "se"))
                label, style = ("whole model", "o-") if part == "whole" else (part, "o:")
                draw_intervals(axes, x, values, errors, fmt=style, color=color, label=label)
        settings = [str(row["setting"]) for row in model["rows"]]
        known = [(n, paper[s]) for n, s in enumerate(settings) if s in paper]
        if known:
            axes.plot(*zip(*known), "k--", linewidth=1, label="paper (LM1B, 1M steps)")
        axes.set_xticks(range(len(settings)), settings)
        finish_axes(axes, x_label, title=model["name"])
    panels[0].set_ylabel("cosine similarity (95 % interval)")
    panels[0].legend(fontsize=8)
    return figure


_COMMON = (_measure, _tables, gradients_figure, "gradients")
# Paper: Table 1, Finding 3
GRADIENT_RADIUS = Analysis("gradient-radius", RadiusOptions, *_COMMON)
# Paper: Table 2, Finding 3
GRADIENT_ADDITIVITY = Analysis("gradient-additivity", AdditivityOptions, *_COMMON)
