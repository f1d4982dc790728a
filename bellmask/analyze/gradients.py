"""What distant tokens do to the learning signal: two measurements on gradients (Sec. 3.3).

Evaluation mode, no weight on the loss, all parameters; also for embedding, trunk and head apart. An
untrained model is the control: there both similarities are high for trivial reasons (its trunk does
not look at the context yet, and with a head of zeros gets no gradient at all).

L block length, P parameters of a part.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import torch
import tyro
from torch import Tensor, nn

from bellmask.analyze.analysis import Analysis, OnProgress, Table
from bellmask.analyze.runs import NamedRun, check_all_maskable, open_runs
from bellmask.analyze.similarity import (
    additivity_similarities,
    margin_of,
    radius_similarities,
)
from bellmask.data.blocks import Blocks
from bellmask.report.gradient_plots import PARTS, additivity_figure, radius_figure
from bellmask.storage.build import build_model
from bellmask.utils.errors import UserError
from bellmask.utils.rng import stream_key

PAPER_RADIUS = {"4": 0.108, "8": 0.463, "16": 0.685, "32": 0.839, "128": 0.935}
PAPER_ADDITIVITY = {"2": 0.999, "4": 0.997, "8": 0.994, "16": 0.985, "32": 0.976}
"""Tables 1 and 2: LM1B, 1M steps; keys as JSON has them."""


@dataclass(frozen=True)
class GradientOptions:
    """Gradients of masked models."""

    runs: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN...")]
    """Run folders of masked models (framework mdm)."""
    checkpoint: str = "latest"
    """latest, best, or a step."""
    draws: int = 128
    """Sequences, each with its own masks; at least 64 for a useful error."""
    seed: int = 1234
    """Decides masks."""
    device: str = "auto"
    """auto, cpu, cuda, ..."""
    out: str | None = None
    """Folder for the results; default RUN/analysis for a single run, else runs/analysis/NAME."""


@dataclass(frozen=True)
class RadiusOptions(GradientOptions):
    """Does masking tokens far from a mask change its gradient? Table 1, Finding 3 (Sec. 3.3).

    Cosine similarity between the gradient of a masked token's cross-entropy before and after 8 more
    tokens within a radius are masked. Low for small radii and high for large ones: only nearby
    tokens matter to what is learned.

    Examples:
    bellmask analyze gradient-radius runs/base

    bellmask analyze gradient-radius runs/base --radii 4 8 16 --draws 256
    """

    radii: tuple[int, ...] = (4, 8, 16, 32, 128)
    """Radii; one beyond the block means all of it."""
    masks: int = 8
    """Tokens masked besides the centre."""


@dataclass(frozen=True)
class AdditivityOptions(GradientOptions):
    """Is the gradient of k masks together the sum of k gradients of one mask each? Table 2
    (Sec. 3.3).

    Cosine similarity between the two. Near one: rows with a single mask teach nothing that a row
    with many masks does not.

    Examples:
    bellmask analyze gradient-additivity runs/base

    bellmask analyze gradient-additivity runs/base --counts 2 4 8 --draws 256
    """

    counts: tuple[int, ...] = (2, 4, 8, 16, 32)
    """Numbers of masks."""


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


Similarities = Callable[[nn.Module, Tensor, int, int], dict[int, dict[str, float]]]


def _measure(
    options: GradientOptions, on_progress: OnProgress, similarities: Similarities, least: int
) -> dict[str, Any]:
    if options.draws < 2:
        raise UserError(f"--draws must be at least 2, got {options.draws}")
    runs = open_runs(options.runs)
    check_all_maskable(runs, "this analysis of gradients")
    for run in runs:
        _check(run, least)
    models, done = 2 * len(runs), 0
    total, found = models * options.draws, []
    for run in runs:
        for is_trained in (True, False):
            loaded = run.load(options.checkpoint, options.device)
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
                done += 1
                on_progress(done, total)
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


def _measure_radius(options: RadiusOptions, on_progress: OnProgress) -> dict[str, Any]:
    if options.masks < 1 or any(2 * r < options.masks for r in options.radii) or not options.radii:
        raise UserError(
            f"--radii {' '.join(map(str, options.radii))}: each must have at least --masks "
            f"{options.masks} positions around a centre, 2 per unit of radius"
        )

    def similarities(model: nn.Module, x0_L: Tensor, mask_id: int, key: int) -> Any:
        return radius_similarities(model, x0_L, options.radii, options.masks, mask_id, key)

    least = 2 * margin_of(options.masks) + 1
    found = _measure(options, on_progress, similarities, least)
    return {"kind": "radius", "masks": options.masks, "paper": PAPER_RADIUS, **found}


def _measure_additivity(options: AdditivityOptions, on_progress: OnProgress) -> dict[str, Any]:
    if not options.counts or min(options.counts) < 1:
        raise UserError("--counts needs numbers of masks of at least 1")

    def similarities(model: nn.Module, x0_L: Tensor, mask_id: int, key: int) -> Any:
        return additivity_similarities(model, x0_L, options.counts, mask_id, key)

    found = _measure(options, on_progress, similarities, max(options.counts))
    return {"kind": "additivity", "paper": PAPER_ADDITIVITY, **found}


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


GRADIENT_RADIUS = Analysis(
    "gradient-radius", RadiusOptions, _measure_radius, _tables, radius_figure, "gradients"
)
GRADIENT_ADDITIVITY = Analysis(
    "gradient-additivity",
    AdditivityOptions,
    _measure_additivity,
    _tables,
    additivity_figure,
    "gradients",
)
