"""What distant tokens do to the learning signal: two measurements on gradients (Sec. 3.3).

Evaluation mode, no weight on the loss, all parameters; also for embedding, trunk and head apart. An
untrained model is the control: there both similarities are high for trivial reasons (its trunk does
not look at the context yet, and with a head of zeros gets no gradient at all).

L block length, P parameters of a part.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

from bellmask.analyze.base import Analysis, RunsOptions, finish_axes
from bellmask.data.blocks import Blocks
from bellmask.report.figures import COLOURS
from bellmask.storage.build import build_model
from bellmask.storage.loading import LoadOptions
from bellmask.storage.runs import NamedRun, check_all_maskable, open_runs
from bellmask.utils.errors import UserError
from bellmask.utils.progress import Progress
from bellmask.utils.rng import shuffle, stream_key, uniform
from bellmask.utils.table import Table


@dataclass(frozen=True, kw_only=True)
class GradientOptions(RunsOptions, LoadOptions):
    """Gradients of masked models."""

    draws: int = 128
    """Sequences, each with its own masks; at least 64 for a useful error."""


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
    """Radii; one beyond the block means all of it."""
    masks: int = 8
    """Tokens masked besides the centre."""


@dataclass(frozen=True, kw_only=True)
class AdditivityOptions(GradientOptions):
    """Is the gradient of k masks together the sum of k gradients of one mask each? Table 2
    (Sec. 3.3).

    Cosine similarity between the two. Near one: rows with a single mask teach nothing that a row
    with many masks does not. Masked runs only.

    Examples:
    bellmask analyze gradient-additivity runs/base

    bellmask analyze gradient-additivity runs/base --counts 2 4 8 --draws 256
    """

    counts: tuple[int, ...] = (2, 4, 8, 16, 32)
    """Numbers of masks."""


# Gradients under different masks of the same row, and how alike they are

PARTS = ("whole", "embedding", "trunk", "head")
MARGIN = 4
"""A centre is at least this far from both ends, so that radius 4 has 8 neighbours."""


def parts_of(model: nn.Module) -> dict[str, list[nn.Parameter]]:
    """Parameters by part; the trunk is all that is neither embedding nor head."""
    named = list(model.named_parameters())
    own = {
        part: [p for n, p in named if n.startswith(f"{part}.")] for part in ("embedding", "head")
    }
    rest = [p for n, p in named if not n.startswith(("embedding.", "head."))]
    return {"whole": [p for _, p in named], **own, "trunk": rest}


def gradient(
    model: nn.Module, x0_BL: Tensor, is_masked_BL: Tensor, scored: Tensor, mask_id: int
) -> dict[str, Tensor]:
    """Gradient of the sum of cross-entropies at the flat indices ``scored``, part by part."""
    x_BL = torch.where(is_masked_BL, mask_id, x0_BL)
    model.zero_grad(set_to_none=True)
    rate_B = is_masked_BL.float().mean(1)  # the time, under the linear schedule
    with torch.enable_grad():
        model(x_BL, scored, x0_BL.flatten()[scored], t_B=rate_B).backward()
    return {
        part: torch.cat([_flat(p) for p in parameters])
        for part, parameters in parts_of(model).items()
    }


def _flat(parameter: nn.Parameter) -> Tensor:
    return (torch.zeros_like(parameter) if parameter.grad is None else parameter.grad).flatten()


def cosine(left: Tensor, right: Tensor) -> float:
    """Cosine similarity in float64; nan where one of them is zero."""
    a, b = left.double(), right.double()
    norms = float(a.norm() * b.norm())
    return float(a @ b) / norms if norms > 0 else math.nan


def neighbours(centre: int, radius: int, length: int) -> list[int]:
    """Positions other than the centre within a radius, inside the block."""
    low, high = max(0, centre - radius), min(length - 1, centre + radius)
    return [i for i in range(low, high + 1) if i != centre]


def margin_of(masks: int) -> int:
    """How far a centre is from both ends, so that a radius of half as many has all neighbours."""
    return max(MARGIN, math.ceil(masks / 2))


def radius_similarities(
    model: nn.Module, x0_L: Tensor, radii: Sequence[int], masks: int, mask_id: int, key: int
) -> dict[int, dict[str, float]]:
    """cos(g({c}), g({c} and 8 more)) for a random centre c, at each radius."""
    length = len(x0_L)
    spread = float(uniform(key, torch.arange(1)))
    margin = margin_of(masks)
    centre = margin + int(spread * (length - 2 * margin))
    alone = torch.zeros(1, length, dtype=torch.bool, device=x0_L.device)
    alone[0, centre] = True
    scored = torch.tensor([centre], device=x0_L.device)
    before = gradient(model, x0_L[None], alone, scored, mask_id)
    found = {}
    for radius in radii:
        near = neighbours(centre, radius, length)
        chosen = [near[i] for i in shuffle(stream_key(key, "radius", radius), len(near))[:masks]]
        more = alone.clone()
        more[0, chosen] = True
        after = gradient(model, x0_L[None], more, scored, mask_id)
        found[radius] = {part: cosine(before[part], after[part]) for part in PARTS}
    return found


def additivity_similarities(
    model: nn.Module, x0_L: Tensor, counts: Sequence[int], mask_id: int, key: int
) -> dict[int, dict[str, float]]:
    """cos(sum of single-mask gradients, gradient of the joint mask) for each number of masks."""
    length, found = len(x0_L), {}
    for count in counts:
        places = shuffle(stream_key(key, "count", count), length)[:count].to(x0_L.device)
        single = torch.zeros(count, length, dtype=torch.bool, device=x0_L.device)
        single[torch.arange(count), places] = True
        rows = torch.arange(count, device=x0_L.device) * length + places
        apart = gradient(model, x0_L.expand(count, -1), single, rows, mask_id)
        joint = gradient(model, x0_L[None], single.any(0, keepdim=True), places, mask_id)
        found[count] = {part: cosine(apart[part], joint[part]) for part in PARTS}
    return found


# Measurement

PAPER_RADIUS = {"4": 0.108, "8": 0.463, "16": 0.685, "32": 0.839, "128": 0.935}
PAPER_ADDITIVITY = {"2": 0.999, "4": 0.997, "8": 0.994, "16": 0.985, "32": 0.976}
"""Tables 1 and 2: LM1B, 1M steps; keys as JSON has them."""
Similarities = Callable[[nn.Module, Tensor, int, int], dict[int, dict[str, float]]]


def _measure_radius(options: RadiusOptions, progress: Progress) -> dict[str, Any]:
    if options.masks < 1 or any(2 * r < options.masks for r in options.radii) or not options.radii:
        raise UserError(
            f"--radii {' '.join(map(str, options.radii))}: each must have at least --masks "
            f"{options.masks} positions around a centre, 2 per unit of radius"
        )

    def similarities(model: nn.Module, x0_L: Tensor, mask_id: int, key: int) -> Any:
        return radius_similarities(model, x0_L, options.radii, options.masks, mask_id, key)

    least = 2 * margin_of(options.masks) + 1
    found = _measure(options, progress, similarities, least)
    return {"kind": "radius", "masks": options.masks, "paper": PAPER_RADIUS, **found}


def _measure_additivity(options: AdditivityOptions, progress: Progress) -> dict[str, Any]:
    if not options.counts or min(options.counts) < 1:
        raise UserError("--counts needs numbers of masks of at least 1")

    def similarities(model: nn.Module, x0_L: Tensor, mask_id: int, key: int) -> Any:
        return additivity_similarities(model, x0_L, options.counts, mask_id, key)

    found = _measure(options, progress, similarities, max(options.counts))
    return {"kind": "additivity", "paper": PAPER_ADDITIVITY, **found}


def _measure(
    options: GradientOptions, progress: Progress, similarities: Similarities, least: int
) -> dict[str, Any]:
    if options.draws < 2:
        raise UserError(f"--draws must be at least 2, got {options.draws}")
    runs = open_runs(options.runs)
    check_all_maskable(runs, "this analysis of gradients")
    for run in runs:
        _check(run, least)
    progress.start(2 * len(runs) * options.draws)
    found = []
    for run in runs:
        for is_trained in (True, False):
            loaded = options.load(run.folder)
            model, (train, valid) = loaded.model, loaded.blocks()
            loaded.check_same_data(train)
            if not is_trained:
                model = (
                    build_model(run.config, loaded.tokenizer.num_tokens).to(loaded.device).eval()
                )
            values = []
            for number, row in enumerate(_rows(valid, options.draws, least)):
                key = stream_key(options.seed, "gradients", number)
                x0_L = row.to(loaded.device)
                values.append(similarities(model, x0_L, loaded.tokenizer.mask_id, key))
                progress.advance()
            step = loaded.step if is_trained else 0
            name = f"{run.name}, step {step}" if is_trained else f"{run.name}, untrained"
            row_set = _summary(values)
            found.append({"name": name, "run": run.folder.name, "step": step, "rows": row_set})
    return {"models": found, "block_length": runs[0].config.data.block_length}


def _check(run: NamedRun, least: int) -> None:
    config = run.config
    is_timed = config.model.modulation == "time" and config.schedule.name != "linear"
    reasons = {
        "is a causal model; this analysis is about masked ones": config.framework.name != "mdm",
        "keeps attention inside documents; gradients are taken with full attention": (
            config.data.document_attention
        ),
        "is told times of another than the linear schedule": is_timed,
        f"has blocks of {config.data.block_length} tokens; this analysis needs {least}": (
            config.data.block_length < least
        ),
    }
    for reason, is_so in reasons.items():
        if is_so:
            raise UserError(f"{run.folder} {reason}")


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


def _summary(draws: Sequence[dict[int, dict[str, float]]]) -> list[dict[str, Any]]:
    """Mean and standard error over draws, for each setting and part; None where undefined."""
    found = []
    for setting in draws[0]:
        row: dict[str, Any] = {"setting": setting}
        for part in PARTS:
            values = [v for draw in draws if not math.isnan(v := draw[setting][part])]
            mean = statistics.mean(values) if values else None
            error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else None
            row[part] = {"mean": mean, "se": error, "draws": len(values)}
        found.append(row)
    return found


# Tables


def _tables(numbers: dict[str, Any]) -> list[Table]:
    what = {"radius": "radius r", "additivity": "number of masks"}[numbers["kind"]]
    number = {"radius": 1, "additivity": 2}[numbers["kind"]]
    tables = []
    for model in numbers["models"]:
        rows = []
        for row in model["rows"]:
            paper = numbers["paper"].get(str(row["setting"]))
            cells = [_show(row[part]) for part in PARTS]
            rows.append([str(row["setting"]), *cells, "-" if paper is None else f"{paper:.3f}"])
        title = f"{model['name']}: cosine similarity ± standard error (Table {number})"
        tables.append(Table(title, [what, *PARTS, "paper, 1M steps"], rows))
    return tables


def _show(value: dict[str, Any]) -> str:
    if value["mean"] is None:
        return "no gradient"
    return f"{value['mean']:.3f} ± {value['se'] or 0:.3f}"


# Figure


def gradients_figure(numbers: Mapping[str, Any]) -> Figure:
    """Similarity against the radius or number of masks: one panel per model, a line per part, the
    paper's numbers dashed.
    """
    models = numbers["models"]
    label = "number of masks"
    if numbers["kind"] == "radius":
        label = f"radius r, {numbers['masks']} tokens masked within it"
    figure = Figure(figsize=(1.5 + 3.6 * len(models), 3.9), layout="constrained")
    panels = figure.subplots(1, len(models), sharey=True, squeeze=False)[0]
    for model, axes in zip(models, panels):
        settings = [str(row["setting"]) for row in model["rows"]]
        for part, colour in zip(PARTS, itertools.cycle(COLOURS)):
            points = [
                (n, row[part])
                for n, row in enumerate(model["rows"])
                if row[part]["mean"] is not None
            ]
            if points:
                axes.errorbar(
                    [n for n, _ in points],
                    [point["mean"] for _, point in points],
                    yerr=[1.96 * (point["se"] or 0) for _, point in points],
                    fmt="o-" if part == "whole" else "o:",
                    markersize=4,
                    capsize=2,
                    color=colour,
                    label="whole model" if part == "whole" else part,
                )
        paper = numbers["paper"]
        known = [(n, paper[s]) for n, s in enumerate(settings) if s in paper]
        if known:
            axes.plot(*zip(*known), "k--", linewidth=1, label="paper (LM1B, 1M steps)")
        axes.set_xticks(range(len(settings)), settings)
        finish_axes(axes, label, title=model["name"])
    panels[0].set_ylabel("cosine similarity (95 % interval)")
    panels[0].legend(fontsize=8)
    return figure


GRADIENT_RADIUS = Analysis(
    "gradient-radius", RadiusOptions, _measure_radius, _tables, gradients_figure, "gradients"
)
GRADIENT_ADDITIVITY = Analysis(
    "gradient-additivity",
    AdditivityOptions,
    _measure_additivity,
    _tables,
    gradients_figure,
    "gradients",
)
