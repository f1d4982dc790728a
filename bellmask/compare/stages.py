"""The suite ``cpt_sft``: continual pretraining {base, bell} x fine-tuning {base, bell} (Table 4).

For each training seed two adaptations (CPT) begin with the same weights, and two fine-tunings
(SFT) with each of them: six trainings. A fine-tuning's folder is keyed by its own options, its
examples and the key of the adaptation it starts from, never by a path. Everything is resumable:
trainings as in any comparison (:mod:`bellmask.compare.execute`), answers by
:mod:`bellmask.evaluate.exact_match`.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from bellmask.compare.comparison import text_identity
from bellmask.compare.execute import execute, is_finished
from bellmask.compare.plan import PlannedRun, content_key, distinct, for_comparison
from bellmask.compare.records import read_json, read_run
from bellmask.compare.stage_results import Cell, Outcome, summarize
from bellmask.compare.variants import Variant, parse_variants
from bellmask.config.config import RunConfig, load_config
from bellmask.data.blocks import Blocks
from bellmask.data.inputs import describe_blocks, load_inputs
from bellmask.data.prepare import LoadedData, make_tokenizer
from bellmask.data.tokenizers import Tokenizer
from bellmask.evaluate.exact_match import Exam, Gap
from bellmask.generate.settings import Sampling
from bellmask.report.stage_plots import write_stage_curves
from bellmask.report.stage_tables import stage_markdown
from bellmask.start import open_start
from bellmask.utils.console import preparing_bar, progress_bar
from bellmask.utils.errors import UserError
from bellmask.utils.files import without_nan, write_text

VARIANTS = ("base", "bell")


@dataclass(frozen=True)
class Asking:
    """How exact match is measured."""

    examples: int = 256
    """Held-out examples, the first ones (they are in a random order); 0: all."""
    length: Gap | None = None
    """Tokens of the gap; None: what most training responses need; "own": each example's."""
    sampling: Sampling = field(default_factory=Sampling)
    """Without steps: as many as the fine-tuning's ``validation.sample_steps``."""
    seeds: int = 5
    batch_size: int = 64


@dataclass(frozen=True)
class Plan:
    """All trainings, and what is held out of the fine-tuning's examples."""

    cells: list[tuple[Cell, PlannedRun]]
    valid: Blocks
    tokenizer: Tokenizer
    length: int
    """The gap that most training responses need."""

    def runs(self, *, is_tuned: bool) -> list[PlannedRun]:
        """The fine-tunings, or the adaptations that they start from."""
        return distinct([run for cell, run in self.cells if (cell.sft is not None) == is_tuned])


# --- planning --------------------------------------------------------------------------------


def check_stages(cpt: RunConfig, sft: RunConfig) -> None:
    """Refuse, before anything is loaded, two stages that do not follow one another."""
    if cpt.sft.train is not None:
        raise UserError("--cpt is continual pretraining on text: leave its --sft options out")
    if sft.sft.train is None:
        raise UserError(
            "--sft needs prompts and responses: a preset that has them, such as sft_tiny, or "
            "--sft.train"
        )
    for_comparison(cpt)
    for_comparison(sft)


def plan_stages(
    cpt: RunConfig, sft: RunConfig, *, seeds: int, root: Path, is_quiet: bool = False
) -> Plan:
    """Every training of the suite; the data of both stages is prepared, nothing is trained."""
    check_stages(cpt, sft)
    variants = parse_variants(list(VARIANTS))
    cpt = for_comparison(cpt)  # so that 'bellmask compare' shares these runs
    adapted = [[_seeded(variant.apply(cpt), n) for variant in variants] for n in range(seeds)]
    identity = text_identity(cpt, is_quiet=is_quiet)
    tokenizer, data = _load_examples(cpt, sft, is_quiet)
    marks = (tokenizer.fingerprint, data.train.fingerprint, data.valid.fingerprint)
    cells = []
    for number, configs in enumerate(adapted):
        for variant, config in zip(variants, configs, strict=True):
            seed = config.train.seed
            folder = root / content_key(config, identity)
            cell = Cell(seed, variant.name)
            cells.append((cell, PlannedRun(cell.name, seed, "", config, folder)))
            for second in variants:
                cell = Cell(seed, variant.name, second.name)
                tuned = _tuned(_seeded(sft, number), second, folder, cpt.train.steps)
                place = root / _tuned_key(tuned, folder.name, "/".join(marks))
                run = PlannedRun(cell.name, tuned.train.seed, "", tuned, place)
                cells.append((cell, run))
    about = describe_blocks(sft, data.train, data.valid, data.counts)
    return Plan(cells, data.valid, tokenizer, about["response_tokens"])


def _seeded(config: RunConfig, number: int) -> RunConfig:
    return replace(config, train=replace(config.train, seed=config.train.seed + number)).check()


def _tuned(sft: RunConfig, variant: Variant, start: Path, step: int) -> RunConfig:
    """A fine-tuning from an adaptation's last step."""
    options = replace(sft.start, model=str(start), checkpoint=str(step))
    return variant.apply(replace(sft, start=options))


def _tuned_key(config: RunConfig, start: str, identity: str) -> str:
    """The folder of a fine-tuning: the adaptation's key stands for where it lies."""
    return content_key(replace(config, start=replace(config.start, model=start)), identity)


def _load_examples(cpt: RunConfig, sft: RunConfig, is_quiet: bool) -> tuple[Tokenizer, LoadedData]:
    """The fine-tuning's data as the adapted models will read it."""
    if cpt.start.model is None:
        start = open_start(cpt)
        config = replace(sft, model=start.config.model)
    else:  # as a start of the fine-tuning, which refuses, say, rows too long for the backbone
        options = replace(sft.start, model=cpt.start.model, checkpoint=cpt.start.checkpoint)
        start = open_start(replace(sft, start=options))
        config = start.config
    tokenizer = start.tokenizer or make_tokenizer(cpt.data)
    with preparing_bar(is_quiet=is_quiet) as on_progress:
        backbone = start.backbone_for(tokenizer)
        return tokenizer, load_inputs(config, tokenizer, backbone, on_progress)


# --- running ---------------------------------------------------------------------------------


def compare_stages(
    cpt: RunConfig,
    sft: RunConfig,
    *,
    out: Path,
    root: Path,
    seeds: int = 1,
    jobs: int = 1,
    asking: Asking | None = None,
    is_quiet: bool = False,
) -> dict[str, Any]:
    """Train what is not there yet, ask, write the report, return the results."""
    asking = asking or Asking()
    if seeds < 1 or jobs < 1:
        raise UserError("--seeds and --jobs must be at least 1")
    _check_asking(asking)
    plan = plan_stages(cpt, sft, seeds=seeds, root=root, is_quiet=is_quiet)
    exam = _exam(plan, sft, asking)
    out.mkdir(parents=True, exist_ok=True)
    root.mkdir(parents=True, exist_ok=True)
    try:
        execute(plan.runs(is_tuned=False), jobs=jobs, is_quiet=is_quiet)
        execute([_as_started(r) for r in plan.runs(is_tuned=True)], jobs=jobs, is_quiet=is_quiet)
        outcomes = _outcomes(plan, exam, is_quiet)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(
            "interrupted; trainings and answers are saved, and the same command goes on with them"
        ) from None
    about = _describe(cpt, sft, exam)
    return write_stages({**about, **summarize(outcomes)}, out, is_quiet=is_quiet)


def _check_asking(asking: Asking) -> None:
    asking.sampling.check()
    if asking.seeds < 1 or asking.batch_size < 1 or asking.examples < 0:
        raise UserError(
            "--sampling-seeds and --batch-size must be at least 1, --examples at least 0"
        )


def _exam(plan: Plan, sft: RunConfig, asking: Asking) -> Exam:
    """The questions, the same for all runs."""
    sampling, block = asking.sampling, plan.valid.block_length
    if sampling.steps is None and sampling.has_steps:
        sampling = replace(sampling, steps=sft.validation.sample_steps)
    length = plan.length if asking.length is None else asking.length
    if length != "own" and not 1 <= length < block:
        raise UserError(f"--length {length}: rows have {block} tokens, and a prompt needs room too")
    examples = plan.valid.slice(0, min(asking.examples or len(plan.valid), len(plan.valid)))
    seeds = tuple(range(asking.seeds))
    return Exam(examples, plan.tokenizer, length, sampling, seeds, asking.batch_size)


def _as_started(run: PlannedRun) -> PlannedRun:
    """A fine-tuning that was begun keeps how it named its start: resuming compares options."""
    path = run.folder / "config.json"
    if not path.exists() or is_finished(run):
        return run
    before = load_config(path).start.model
    return replace(run, config=replace(run.config, start=replace(run.config.start, model=before)))


def _bar(what: str, total: int, is_quiet: bool) -> AbstractContextManager[Callable[[int], None]]:
    if is_quiet or not total:
        return contextlib.nullcontext(lambda done: None)
    return progress_bar(what, "answers", total)


def _outcomes(plan: Plan, exam: Exam, is_quiet: bool) -> list[Outcome]:
    """What every run learned and answers; an adaptation is asked without any fine-tuning."""
    size = len(exam.examples)
    left = [size * len(exam.missing(run.folder, run.config.train.steps)) for _, run in plan.cells]
    outcomes, before = [], 0
    with _bar("exact match", sum(left), is_quiet) as advance:
        for (cell, run), count in zip(plan.cells, left, strict=True):
            answered = exam.take(
                run.folder, run.config.train.steps, partial(_later, advance, before)
            )
            outcomes.append(Outcome(cell, read_run(run.folder), answered))
            before += count
    return outcomes


def _later(advance: Callable[[int], None], before: int, done: int) -> None:
    """Move a bar that other work has moved before."""
    advance(before + done)


# --- writing ---------------------------------------------------------------------------------


def _describe(cpt: RunConfig, sft: RunConfig, exam: Exam) -> dict[str, Any]:
    """What was trained and asked; the options that variants decide are left out."""
    own = exam.examples.num_maskable(slice(None))
    owned = ("framework", "law", "schedule", "objective")
    kept = [
        {name: part for name, part in config.to_dict().items() if name not in owned}
        for config in (cpt, replace(sft, start=replace(sft.start, model=None, checkpoint="latest")))
    ]
    return {
        "cpt": kept[0],
        "sft": kept[1],
        "asked": {
            "examples": len(exam.examples),
            "fingerprint": exam.examples.fingerprint,
            "gap": exam.length,
            "own_gaps": [int(own.min()), int(own.max())],
            "sampling": vars(exam.sampling),
            "seeds": list(exam.seeds),
        },
    }


def write_stages(results: dict[str, Any], out: Path, *, is_quiet: bool = False) -> dict[str, Any]:
    """results.json, table.md and curves.png/.svg; returns the results."""
    results = without_nan(results)
    path = out / "results.json"
    if path.exists() and not is_quiet:
        before = read_json(path)
        rows = before.get("rows") if isinstance(before, dict) else None
        rows = [row.get("runs") for row in rows if isinstance(row, dict)] if rows else None
        if rows != [row["runs"] for row in results["rows"]]:
            print(f"note: {out} held other results, which are replaced")
    write_text(path, json.dumps(results, indent=1, allow_nan=False) + "\n")
    write_text(out / "table.md", stage_markdown(results))
    write_stage_curves(results, out)
    return results
