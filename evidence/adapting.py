"""A causal LM becomes a masked one (Sec. 5.3): measured on small ones, then told."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from bellmask.cli import run_command
from bellmask.compare.compare import compare
from bellmask.compare.execute import TRAINING_FORMAT, TrainingOptions
from bellmask.compare.report import curves_figure, sentence, show_gap, show_speed_up
from bellmask.compare.stages import stage_figure, stage_notes, stage_table
from bellmask.compare.variants import parse_variants
from bellmask.config.config import RunConfig, override
from bellmask.config.presets import preset
from bellmask.evaluate.likelihood import evaluate
from bellmask.report.figures import save_figure
from bellmask.storage.build import build_framework
from bellmask.train.setup import open_start
from bellmask.utils.errors import UserError
from bellmask.utils.table import Table

sys.path.insert(0, str(Path(__file__).parent))
from analyses import ROOT, read_result, trimmed, write_result
from claims import AGREES, DISAGREES, UNTOLD

RUNS = ROOT.parent / "adapting"
STORIES_VARIANTS = [
    "base",
    "bell",
    "base from scratch=--objective nelbo --law uniform --start.fresh --start.anneal-steps 1",
    "bell from scratch=--objective bell --law gaussian --start.fresh --start.anneal-steps 1",
]


def story_options(model: str, text: str) -> list[str]:
    """stories260K on the beginnings of stories, one per row, as it was pretrained (with BOS)."""
    args = "--start.anneal-steps 150 --data.documents endoftext --data.packing unpacked"
    args += " --data.wrap True --data.block-length 64 --train.steps 600 --optim.lr 3e-3"
    args += " --optim.warmup-steps 50 --validation.blocks 116"
    places = ["--start.model", model, "--data.train", text, "--validation.every", "50 steps"]
    return [*args.split(), *places]


def measure_stages(model: str, text: str) -> None:
    """CPT base/bell x SFT base/bell on those runs."""
    cpt = shlex.join(["cpt_tiny", *story_options(model, text)])
    sft = "sft_tiny --sft.train toy:reverse:4 --sft.round-to 10 --train.steps 500"
    sft += " --validation.every '50 steps'"
    out = RUNS / "stages"
    suite = ["compare", "--suite", "cpt_sft", "--cpt", cpt, "--sft", sft, "--seeds", "3"]
    suite += ["--jobs", "2", "--out", str(out), "--runs", str(RUNS / "runs")]
    if run_command(suite):
        raise UserError("the suite cpt_sft failed")
    found = json.loads((out / "results.json").read_text(encoding="utf-8"))
    for stage in ("cpt", "sft"):  # no paths of a machine
        found[stage] = {"train": found[stage]["train"], "sft": found[stage]["sft"]}
    write_result("adapting-stages", found)


def on_smollm2() -> RunConfig:
    """SmolLM2-135M on WikiText-2: a real model, as many steps as a CPU has time for."""
    args = "--start.model smollm2 --start.anneal-steps 30 --train.batch-size 8 --train.steps 80"
    args += " --optim.lr 1e-4 --optim.warmup-steps 10 --optim.ema 0 --log.every 10"
    args += " --validation.blocks 48 --validation.batch-size 16"
    config = override(preset("cpt_tiny"), args.split())
    return replace(config, validation=replace(config.validation, every="10 steps")).check()


def nll_before(config: RunConfig, framework: str) -> tuple[float, float]:
    """(NLL, standard error) of the start itself: as the causal LM it is, or opened as it is."""
    closed = replace(config, start=replace(config.start, anneal_steps=1))
    args = ["--framework", framework] if framework != "mdm" else []
    start = open_start(override(closed, args).check())
    tokenizer, data = start.load_data()
    model = start.build_model(tokenizer).eval()
    found = evaluate(
        model,
        data.valid.spread(config.validation.blocks),
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
        TrainingOptions(seeds=seeds, jobs=2, runs=str(RUNS / "runs")),
        reference="base",
        out=RUNS / name,
    )
    kept: dict[str, Any] = trimmed(results)
    kept["data"]["train"] = Path(kept["data"]["train"]).name  # no paths of a machine
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
    write_result(f"adapting-{name}", kept)


def measure_adapting(stories: str | None, text: str | None) -> bool:
    """All of it; False when something had to be left out."""
    is_whole = True
    if stories and text:
        config = override(preset("cpt_tiny"), story_options(stories, text)).check()
        measure_comparison("stories", config, ["base", "bell"], seeds=3)
        measure_comparison("stories-scratch", config, STORIES_VARIANTS, seeds=1)
        measure_stages(stories, text)
    else:
        print("left out: stories; give --stories MODEL --stories-text FILE", file=sys.stderr)
        is_whole = False
    try:
        measure_comparison("smollm2", on_smollm2(), ["base", "bell"], seeds=1)
    except UserError as error:
        print(f"left out: {error}", file=sys.stderr)
        is_whole = False
    return is_whole


TITLES = {
    "stories": "stories260K (260K parameters, Llama) on TinyStories",
    "smollm2": "SmolLM2-135M on WikiText-2",
}


def adapting_section(figures: Path) -> list[str]:
    """Sec. 5.3 at a small scale."""
    lines = ["## From a causal LM to a masked one (Sec. 5.3)", "", *NOTE, ""]
    lines += ["### Continual pretraining", ""]
    columns = ["start", "as causal LM", "opened, untrained", "steps", "base", "bell"]
    columns += ["bell - base", "sooner by", "the bell is better"]
    rows = []
    for name, title in TITLES.items():
        found = read_result(f"adapting-{name}")
        rows.append(_row(title, found) if found else [title, "not run yet", *[""] * 7])
    lines += [Table("", columns, rows).markdown(), ""]
    for name, title in TITLES.items():
        if found := read_result(f"adapting-{name}"):
            lines += _curves(found, f"adapting-{name}", title, figures)
    return [*lines, *_scratch(figures), *_stages(figures)]


def _row(title: str, found: Mapping[str, Any]) -> list[str]:
    bell = found["variants"]["bell"]
    nll = [f"{found['variants'][name]['nll']:.3f}" for name in ("base", "bell")]
    before = [f"{found[key][0]:.3f}" for key in ("causal_before", "masked_before")]
    cells = [title, *before, f"{found['steps']}", *nll, show_gap(bell["comparison"], 3)]
    return [*cells, show_speed_up(bell["comparison"]), f"**{_verdict(bell['comparison'])}**"]


def _verdict(compared: Mapping[str, Any]) -> str:
    """Over three seeds by their t-interval; one seed says nothing."""
    if compared["num_seeds"] < 3:
        return UNTOLD
    gap, error = compared["gap"], T_3 * compared["gap_se_over_seeds"]
    return UNTOLD if abs(gap) < error else AGREES if gap < 0 else DISAGREES


T_3 = 4.303
"""Half a 95 % interval from three seeds, in standard errors of their mean."""


def _curves(found: Mapping[str, Any], name: str, title: str, figures: Path) -> list[str]:
    save_figure(curves_figure(found, with_time=False), figures / name)
    told = [f"{title}: {sentence(found, 'bell')}", ""] if len(found["seeds"]) > 1 else []
    return [f"![{title}: curves](figures/{name}.png)", "", *told]


def _scratch(figures: Path) -> list[str]:
    """What pretraining was worth."""
    found = read_result("adapting-stories-scratch")
    if found is None:
        return []
    columns = ["variant", "final NLL", "against base"]
    rows = []
    for name, variant in found["variants"].items():
        gap = show_gap(variant["comparison"], 3) if "comparison" in variant else "reference"
        rows.append([name, f"{variant['nll']:.3f}", gap])
    lines = ["### Adapted or from scratch", ""]
    lines += ["The same network, tokenizer, text and steps, with and without pretrained weights"]
    lines += ["(one seed; errors are over validation rows).", ""]
    lines += [Table("", columns, rows).markdown(), ""]
    save_figure(curves_figure(found, with_time=False), figures / "adapting-stories-scratch")
    return [*lines, "![adapted or not](figures/adapting-stories-scratch.png)", ""]


def _stages(figures: Path) -> list[str]:
    """The two by two, as its suite tells it."""
    lines = ["### Fine-tuning, two by two (Table 4)", ""]
    found = read_result("adapting-stages")
    if found is None:
        return [*lines, "Not run yet.", ""]
    table = stage_table(found).markdown()
    save_figure(stage_figure(found), figures / "adapting-stages")
    picture = "![NLL of held-out responses](figures/adapting-stages.png)"
    lines += [*STAGES_NOTE, "", table, *_stage_verdicts(found), ""]
    return [*lines, *(f"- {note}" for note in stage_notes(found)), "", picture, ""]


WHERE = {
    ("bell", "base"): "at the first stage",
    ("base", "bell"): "at the second stage",
    ("bell", "bell"): "at both stages",
}


def _stage_verdicts(found: Mapping[str, Any]) -> list[str]:
    """Exact match against base at both stages, by the interval over training seeds."""
    lines = []
    for row in found["rows"]:
        where = WHERE.get((row["cpt"], row["sft"]))
        if where is not None:
            difference = row["difference"]["exact_match"]
            is_more, is_less = difference["low"] > 0, difference["high"] < 0
            told = "yes" if is_more else "no, fewer" if is_less else UNTOLD
            lines.append(f"- more right answers with the bell {where}? **{told}**")
    return lines


NOTE = [
    "The paper adapts GPT-2 Large (0.7B) in 100K steps. Here two small causal LMs, a few hundred",
    "steps. *As causal LM* is the exact NLL of the start on the same validation rows, with",
    "position 0 given; *opened, untrained* the bound when attention is opened and masks appear,",
    "before any step. NLLs are of tokens, so only rows of one table compare.",
]
STAGES_NOTE = [
    "stories260K, adapted as above (base and bell, the same runs), then 500 steps of writing four",
    "letters backwards (`toy:reverse:4`), with either objective. In the paper the bell at the",
    "first stage counts for most; the objective of fine-tuning makes little difference.",
]
