"""A causal LM becomes a masked one (Sec. 5.3): measured on small ones, then told."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from bellmask.build import build_framework, build_model
from bellmask.compare.comparison import compare
from bellmask.compare.plan import TRAINING_FORMAT
from bellmask.compare.variants import parse_variants
from bellmask.config import RunConfig, override
from bellmask.data.prepare import make_tokenizer
from bellmask.errors import UserError
from bellmask.evaluate.likelihood import evaluate
from bellmask.inputs import load_inputs
from bellmask.presets import preset
from bellmask.report.comparison_plots import curves_figure
from bellmask.report.markdown import markdown_table
from bellmask.report.plots import save_figure
from bellmask.report.tables import sentence
from bellmask.start import open_start

sys.path.insert(0, str(Path(__file__).parent))
from analyses import RESULTS, ROOT, rounded, trimmed

RUNS = ROOT.parent / "adapting"
STORIES_VARIANTS = [
    "base",
    "bell",
    "base from scratch=--objective nelbo --law uniform --start.fresh --start.anneal-steps 1",
    "bell from scratch=--objective bell --law gaussian --start.fresh --start.anneal-steps 1",
]


def on_stories(model: str, text: str) -> RunConfig:
    """stories260K on the beginnings of stories, one per row, as it was pretrained (with BOS)."""
    args = f"--start.model {model} --start.anneal-steps 150 --data.train {text}"
    args += " --data.documents endoftext --data.packing unpacked --data.wrap True"
    args += " --data.block-length 128 --train.steps 600 --optim.lr 3e-3 --optim.warmup-steps 50"
    args += " --validation.blocks 116"
    config = override(preset("cpt_tiny"), args.split())
    return replace(config, validation=replace(config.validation, every="50 steps")).check()


def on_smollm2() -> RunConfig:
    """SmolLM2-135M on WikiText-2: a real model, as many steps as a CPU has time for."""
    args = "--start.model smollm2 --start.anneal-steps 60 --train.batch-size 8 --train.steps 160"
    args += " --optim.lr 1e-4 --optim.warmup-steps 20 --optim.ema 0 --log.every 10"
    args += " --validation.blocks 48 --validation.batch-size 16"
    config = override(preset("cpt_tiny"), args.split())
    return replace(config, validation=replace(config.validation, every="20 steps")).check()


def nll_before(config: RunConfig, framework: str) -> tuple[float, float]:
    """(NLL, standard error) of the start itself: as the causal LM it is, or opened as it is."""
    closed = replace(config, start=replace(config.start, anneal_steps=1))
    args = ["--framework", framework] if framework != "mdm" else []
    start = open_start(override(closed, args).check())
    tokenizer = start.tokenizer or make_tokenizer(config.data)
    data = load_inputs(start.config, tokenizer, start.backbone)
    model = build_model(start.config, tokenizer.num_tokens, start.backbone, start.fill).eval()
    found = evaluate(
        model,
        data.valid.slice(0, min(len(data.valid), config.validation.blocks)),
        mask_id=tokenizer.mask_id,
        framework=build_framework(start.config),
        seed=config.validation.seed,
        batch_size=config.validation.batch_size,
    )
    return found.nll, found.standard_error


def measure_comparison(name: str, config: RunConfig, variants: list[str], seeds: int) -> None:
    """Train the variants; what they begin with as a causal LM and opened goes beside."""
    results = compare(
        config,
        parse_variants(variants),
        reference="base",
        out=RUNS / name,
        root=RUNS / "runs",
        seeds=seeds,
        jobs=2,
    )
    kept: dict[str, Any] = trimmed(results)
    kept["causal_before"] = nll_before(config, "arm")
    kept["masked_before"] = nll_before(config, "mdm")
    kept["options"] = {
        "steps": config.train.steps,
        "anneal_steps": config.start.anneal_steps,
        "batch_size": config.train.batch_size,
        "block_length": config.data.block_length,
        "lr": config.optim.lr,
        "format": TRAINING_FORMAT,
    }
    write_result(name, kept)


def write_result(name: str, content: Mapping[str, Any]) -> None:
    """One small file for the document."""
    text = json.dumps(rounded(dict(content)), separators=(",", ":"))
    (RESULTS / f"adapting-{name}.json").write_text(text + "\n", encoding="utf-8")
