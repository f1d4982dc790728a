"""A causal LM becomes a masked one (Sec. 5.3): measured on small ones, then shown."""

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
from bellmask.compare.report import curves_figure, show_gap, show_speed_up
from bellmask.compare.stages import stage_figure, stage_table
from bellmask.compare.variants import parse_variants
from bellmask.config.config import RunConfig, override
from bellmask.config.presets import preset
from bellmask.evaluate.likelihood import evaluate
from bellmask.storage.build import build_framework
from bellmask.train.setup import open_start
from bellmask.utils.errors import UserError
from bellmask.utils.stats import Estimate
from bellmask.utils.table import Table

sys.path.insert(0, str(Path(__file__).parent))
from analyses import ROOT
from pages import (
    DISAGREES,
    INCONCLUSIVE,
    Judged,
    Verdict,
    outside_zero,
    picture,
    read_result,
    trimmed,
    write_result,
)

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
    found["cpt"]["data"] = {"train": Path(text).name}
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
    """Train the variants; with the start's NLL as a causal LM and opened."""
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
    "smollm2": "SmolLM2-135M-Instruct (4-bit weights, converted) on WikiText-2",
}


def judge_adapting() -> list[Judged]:
    """Continual pretraining on each start, then the stages of fine-tuning."""
    rows = []
    for name, title in TITLES.items():
        if found := read_result(f"adapting-{name}"):
            compared = found["variants"]["bell"]["comparison"]
            said = f"{show_gap(compared, 2)}, {show_speed_up(compared)}"
            where = title.partition(" (")[0].partition(" on ")[0]
            claim = f"{where}, continual pretraining: the bell beats the base"
            rows.append(Judged(claim, "Sec. 5.3", Verdict(_word(compared), said)))
    if found := read_result("adapting-stages"):
        by_stage = {(row["cpt"], row["sft"]): row for row in found["rows"]}
        for stages, claim in STAGE_CLAIMS.items():
            change = by_stage[stages]["difference"]["exact_match"]
            low, high = change["low"], change["high"]
            word = outside_zero(low, high)
            if stages == LITTLE and word != INCONCLUSIVE:
                word = DISAGREES
            said = f"{100 * change['value']:+.0f} points ({100 * low:+.0f} to {100 * high:+.0f})"
            rows.append(Judged(claim, "Table 4", Verdict(word, said)))
    return rows


LITTLE = ("base", "bell")
"""The stages for which the paper sees little difference."""
STAGE_CLAIMS = {
    ("bell", "bell"): "Four letters backwards, exact match: the bell at both stages helps",
    ("bell", "base"): "The same, the bell in continual pretraining alone helps",
    LITTLE: "The same, the bell in fine-tuning alone makes little difference",
}


def adapting_page() -> list[str]:
    """Sec. 5.3 at a small scale."""
    columns = ["start", "as causal LM", "opened, untrained", "steps", "base", "bell"]
    columns += ["bell - base", "speed-up"]
    rows, curves = [], []
    for name, title in TITLES.items():
        found = read_result(f"adapting-{name}")
        rows.append(_row(title, found) if found else [title, "not run yet", *[""] * 6])
        if found:
            curves += _curves(f"{title}: curves", f"adapting-{name}", found)
    return [*NOTE, Table("", columns, rows).markdown(), *curves, *_scratch(), *_stages()]


def _row(title: str, found: Mapping[str, Any]) -> list[str]:
    bell = found["variants"]["bell"]
    nll = [f"{found['variants'][name]['nll']:.3f}" for name in ("base", "bell")]
    before = [f"{found[key][0]:.3f}" for key in ("causal_before", "masked_before")]
    cells = [title, *before, f"{found['steps']}", *nll, show_gap(bell["comparison"], 3)]
    return [*cells, show_speed_up(bell["comparison"])]


def _word(compared: Mapping[str, Any]) -> str:
    """Over three seeds by their t-interval; one seed says nothing."""
    low, high = Estimate.over_seeds([-gap for gap in compared["gaps"]]).interval
    return outside_zero(low, high)


def _curves(alt: str, name: str, found: dict[str, Any]) -> list[str]:
    return picture(alt, name, lambda: curves_figure(found, with_time=False))


def _scratch() -> list[str]:
    """What pretraining was worth."""
    found = read_result("adapting-stories-scratch")
    if found is None:
        return []
    columns = ["variant", "final NLL", "difference"]
    rows = []
    for name, variant in found["variants"].items():
        gap = show_gap(variant["comparison"], 3) if "comparison" in variant else "reference"
        rows.append([name, f"{variant['nll']:.3f}", gap])
    lines = ["## Adapted or from scratch", ""]
    lines += ["The same network, tokenizer, text and steps, with and without pretrained weights"]
    lines += ["(one seed; errors are over validation rows).", ""]
    lines += [Table("", columns, rows).markdown()]
    return [*lines, *_curves("adapted or from scratch", "adapting-stories-scratch", found)]


def _stages() -> list[str]:
    """The two by two of its suite."""
    lines = ["## Fine-tuning, two by two (Table 4)", ""]
    found = read_result("adapting-stages")
    if found is None:
        return [*lines, "Not run yet.", ""]
    table = stage_table(found)
    lines += [*STAGES_NOTE, "", table.markdown(), *(f"- {note}" for note in table.notes), ""]
    alt = "NLL of held-out responses"
    return [*lines, *picture(alt, "adapting-stages", lambda: stage_figure(found))]


NOTE = [
    "# From a causal LM to a masked one (Sec. 5.3)",
    "",
    "The paper adapts GPT-2 Large (0.7B) in 100K steps. Here two small causal LMs are adapted in a",
    "few hundred steps. *As causal LM* is the exact NLL of the original model on the same",
    "validation rows, with position 0 given; *opened, untrained* is the bound with full attention",
    "and masks, before any step. NLLs are per token, so only rows of one table can be compared.",
    "",
    "## Continual pretraining",
    "",
]
STAGES_NOTE = [
    "stories260K, adapted as above (base and bell, the same runs), then 500 steps of writing four",
    "letters backwards (`toy:reverse:4`), with either objective. In the paper the bell at the",
    "first stage matters most; the objective of fine-tuning makes little difference.",
]
