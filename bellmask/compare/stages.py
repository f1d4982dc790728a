"""The suite ``cpt_sft``: continual pretraining {base, bell} x fine-tuning {base, bell} (Table 4).

For each training seed two adaptations (CPT) begin with the same weights, and two fine-tunings
(SFT) with each of them: six trainings. A fine-tuning's folder is keyed by its own options, its
examples and the key of the adaptation it starts from, never by a path. Everything is resumable:
trainings as in any comparison (:mod:`bellmask.compare.execute`), answers by
:mod:`bellmask.evaluate.exact_match`.
"""

from __future__ import annotations

import itertools
import json
import math
import shlex
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from matplotlib.figure import Figure

from bellmask import __version__
from bellmask.compare.execute import (
    PlannedRun,
    check_positive,
    distinct,
    execute,
    for_comparison,
    is_finished,
    run_key,
    text_identity,
)
from bellmask.compare.results import RunRecord, ratio_over_seeds, read_run, read_run_json
from bellmask.compare.variants import OWNED, Variant, check_shared, parse_variants
from bellmask.config.command_line import PresetOptions, parse_command, resolve, split_args
from bellmask.config.config import RunConfig, load_config, parse_options
from bellmask.config.presets import PRESETS
from bellmask.data.blocks import Blocks
from bellmask.data.inputs import describe_blocks
from bellmask.data.prepare import LoadedData, make_tokenizer
from bellmask.data.tokenizers import Tokenizer
from bellmask.evaluate.exact_match import ExactMatch, Exam, Gap
from bellmask.generate.settings import Sampling
from bellmask.report.figures import save_figure
from bellmask.train.setup import open_start
from bellmask.utils.errors import UserError
from bellmask.utils.files import check_folder, without_nan, write_text
from bellmask.utils.progress import progress_bar
from bellmask.utils.table import Bold, Table, in_markdown, markdown_page

SUITE = "cpt_sft"
VARIANTS = ("base", "bell")


@dataclass(frozen=True)
class StagesOptions:
    """Continual pretraining {base, bell} x fine-tuning {base, bell}: the rows of Table 4.

    Two adaptations begin with the same weights, two fine-tunings with each of them: six trainings
    per seed. Then every model, also those that were not fine-tuned, is asked held-out examples.
    Interrupt it at will; the same command continues where it stopped and measures nothing twice.
    Writes results.json, table.md and curves.png/.svg.

    Examples:
    bellmask train arm_tiny --out runs/arm_tiny

    bellmask compare --suite cpt_sft --seeds 3 --jobs 2

    bellmask compare --suite cpt_sft --cpt 'cpt_tiny --train.steps 300' --sft 'sft_tiny --sft.train
    toy:copy --sft.round-to 16'

    bellmask compare --suite cpt_sft --start runs/other_arm --sampling.rule most_confident
    --sampling.temperature 0 --sampling-seeds 1
    """

    suite: Literal["cpt_sft"] = "cpt_sft"
    """This suite."""
    cpt: str = "cpt_tiny"
    """Continual pretraining: a preset, config file or run folder, and options, in quotes; base and
    bell differ from it only in framework, law, schedule and objective."""
    sft: str = "sft_tiny"
    """Fine-tuning, given alike. It starts from the last step of the continual pretraining."""
    start: str | None = None
    """Where both adaptations start, in place of --cpt's own start.model: a run folder, an export or
    a Hugging Face causal LM."""
    seeds: int = 1
    """Paired training seeds; an interval needs 3."""
    jobs: int = 1
    """Trainings side by side; with 2 or more each has one thread."""
    examples: int = 256
    """Held-out examples that are asked; 0: all."""
    gap: Literal["fixed", "own"] = "fixed"
    """fixed: the gap to fill has the same length for all examples. own: the response's own,
    rounded up to sft.round_to as in training, which tells a little about the answer."""
    length: int | None = None
    """Tokens of a fixed gap. Default: what nine in ten training responses need."""
    sampling_seeds: int = 5
    """How often each example is asked: mean and deviation are over these seeds."""
    sampling: Sampling = field(default_factory=Sampling)
    """How answers are sampled. Steps by default: the fine-tuning's validation.sample_steps."""
    batch_size: int = 64
    """Examples per forward pass when asking; no answer depends on it."""
    out: str | None = None
    """Where results go; default runs/compare-CPT-SFT."""
    runs: str = "runs/shared"
    """Run folders, shared by all comparisons."""
    quiet: bool = False
    """Say nothing but errors and the result."""


# Planning


@dataclass(frozen=True)
class Cell:
    """One place in the table, for one training seed."""

    seed: int
    cpt: str
    sft: str | None = None
    """None: continual pretraining only."""

    @property
    def name(self) -> str:
        """What a person calls it."""
        return f"CPT {self.cpt}" + (f" + SFT {self.sft}" if self.sft else "")


@dataclass(frozen=True)
class StagePlan:
    """All trainings, and what is held out of the fine-tuning's examples."""

    cells: list[tuple[Cell, PlannedRun]]
    valid: Blocks
    tokenizer: Tokenizer
    length: int
    """The gap that most training responses need."""

    def runs(self, *, is_tuned: bool) -> list[PlannedRun]:
        """The fine-tunings, or the adaptations that they start from."""
        return distinct([run for cell, run in self.cells if (cell.sft is not None) == is_tuned])


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
) -> StagePlan:
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
            folder = root / run_key(config, identity)
            cell = Cell(seed, variant.name)
            cells.append((cell, PlannedRun(cell.name, seed, "", config, folder)))
            for second in variants:
                cell = Cell(seed, variant.name, second.name)
                tuned = _tuned(_seeded(sft, number), second, folder, cpt.train.steps)
                place = root / _tuned_key(tuned, folder.name, "/".join(marks))
                run = PlannedRun(cell.name, tuned.train.seed, "", tuned, place)
                cells.append((cell, run))
    about = describe_blocks(sft, data.train, data.valid, data.counts)
    return StagePlan(cells, data.valid, tokenizer, about["response_tokens"])


def _seeded(config: RunConfig, number: int) -> RunConfig:
    return replace(config, train=replace(config.train, seed=config.train.seed + number)).check()


def _tuned(sft: RunConfig, variant: Variant, start: Path, step: int) -> RunConfig:
    """A fine-tuning from an adaptation's last step."""
    options = replace(sft.start, model=str(start), checkpoint=str(step))
    return variant.apply(replace(sft, start=options))


def _tuned_key(config: RunConfig, start: str, identity: str) -> str:
    """The folder of a fine-tuning: the adaptation's key stands for where it lies."""
    return run_key(replace(config, start=replace(config.start, model=start)), identity)


def _load_examples(cpt: RunConfig, sft: RunConfig, is_quiet: bool) -> tuple[Tokenizer, LoadedData]:
    """The fine-tuning's data as the adapted models will read it."""
    if cpt.start.model is None:
        start = open_start(cpt)
        tokenizer = start.tokenizer or make_tokenizer(cpt.data)
        config = replace(sft, model=start.config.model)
        start = replace(start, config=config, tokenizer=tokenizer)
    else:  # as a start of the fine-tuning, which refuses, say, rows too long for the backbone
        options = replace(sft.start, model=cpt.start.model, checkpoint=cpt.start.checkpoint)
        start = open_start(replace(sft, start=options))
    return start.load_data(is_quiet=is_quiet)


# Running


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
class StageOutcome:
    """A trained cell: what its folder says, and its answers."""

    cell: Cell
    record: RunRecord
    answered: ExactMatch

    def summary(self) -> dict[str, Any]:
        """The numbers of results.json; nothing that a clock decides."""
        record, answered = self.record, self.answered
        return {
            "seed": self.cell.seed,
            "run": record.folder.name,
            "steps": record.steps,
            "nll": record.nll,
            "nll_se": record.nll_se[-1],
            "exact_match": answered.share,
            "exact_match_se": answered.standard_error,
            "by_sampling_seed": answered.seed_shares,
            "sampling_deviation": answered.seed_deviation,
        }


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
    check_positive(seeds=seeds, jobs=jobs)
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
            "interrupted; trainings and answers are saved, and the same command continues with them"
        ) from None
    about = _describe(cpt, sft, exam)
    return write_stages({**about, **summarize_stages(outcomes)}, out, is_quiet=is_quiet)


def _check_asking(asking: Asking) -> None:
    asking.sampling.check()
    if asking.seeds < 1 or asking.batch_size < 1 or asking.examples < 0:
        raise UserError(
            "--sampling-seeds and --batch-size must be at least 1, --examples at least 0"
        )


def _exam(plan: StagePlan, sft: RunConfig, asking: Asking) -> Exam:
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


def _outcomes(plan: StagePlan, exam: Exam, is_quiet: bool) -> list[StageOutcome]:
    """What every run learned and answers; an adaptation is asked without any fine-tuning."""
    size = len(exam.examples)
    missing = sum(len(exam.missing(r.folder, r.config.train.steps)) for _, r in plan.cells)
    is_quiet = is_quiet or not missing
    outcomes = []
    with progress_bar("exact match", "answers", size * missing, is_quiet=is_quiet) as progress:
        for cell, run in plan.cells:
            answered = exam.take(run.folder, run.config.train.steps, progress)
            outcomes.append(StageOutcome(cell, read_run(run.folder), answered))
    return outcomes


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
        before = read_run_json(path)
        rows = before.get("rows") if isinstance(before, dict) else None
        rows = [row.get("runs") for row in rows if isinstance(row, dict)] if rows else None
        if rows != [row["runs"] for row in results["rows"]]:
            print(f"note: {out} held other results, which are replaced")
    write_text(path, json.dumps(results, indent=1, allow_nan=False) + "\n")
    write_text(out / "table.md", stage_markdown(results))
    write_stage_curves(results, out)
    return results


# Outcomes of the suite ``cpt_sft`` → the rows of Table 4, with differences and their errors
#
# A row is compared with the base row of its section. With one training seed the difference is
# paired over validation blocks (NLL) or examples (exact match), and its error says what other ones
# would change. With several it is paired over training seeds: mean, standard error over seeds, and
# from three seeds on a 95 % t-interval, as everywhere in comparisons.

FORMAT = 1
BASE = "base"


def summarize_stages(outcomes: Sequence[StageOutcome]) -> dict[str, Any]:
    """Rows in the table's order: continual pretraining first, then with fine-tuning."""
    places = dict.fromkeys((o.cell.cpt, o.cell.sft) for o in outcomes)
    ordered = sorted(places, key=lambda place: place[1] is not None)  # stable
    seeds = list(dict.fromkeys(o.cell.seed for o in outcomes))
    found = {(o.cell.cpt, o.cell.sft, o.cell.seed): o for o in outcomes}
    rows = []
    for cpt, sft in ordered:
        mine = [found[cpt, sft, seed] for seed in seeds]
        base = [found[BASE, sft and BASE, seed] for seed in seeds]
        rows.append(_row(cpt, sft, mine, None if mine == base else base))
    return {
        "format": FORMAT,
        "bellmask": __version__,
        "suite": "cpt_sft",
        "seeds": seeds,
        "rows": rows,
    }


def _row(
    cpt: str, sft: str | None, mine: Sequence[StageOutcome], base: Sequence[StageOutcome] | None
) -> dict[str, Any]:
    shares = [one.answered.share for one in mine]
    row: dict[str, Any] = {
        "section": "cpt" if sft is None else "sft",
        "cpt": cpt,
        "sft": sft,
        "nll": statistics.fmean(one.record.nll[-1] for one in mine),
        "exact_match": statistics.fmean(shares),
        # of one model's answers: the mean variance over training seeds
        "sampling_deviation": math.sqrt(
            statistics.fmean(one.answered.seed_deviation**2 for one in mine)
        ),
        "training_deviation": statistics.stdev(shares) if len(shares) > 1 else None,
        "difference": None,
        "runs": [one.summary() for one in mine],
    }
    if base is not None:
        pairs = list(zip(mine, base, strict=True))
        for one, other in pairs:
            if not one.record.last.is_paired_with(other.record.last):
                raise UserError(
                    f"{one.record.folder} and {other.record.folder} were validated on different "
                    "blocks or masks"
                )
        row["difference"] = {
            "nll": join_seeds([a.record.last.difference(b.record.last) for a, b in pairs]),
            "exact_match": join_seeds([a.answered.difference(b.answered) for a, b in pairs]),
        }
    return row


def join_seeds(differences: Sequence[tuple[float, float]]) -> dict[str, Any]:
    """(difference, its error within the seed) of each training seed → mean, error, interval."""
    values = [value for value, _ in differences]
    if len(values) == 1:
        return {
            "value": values[0],
            "se": differences[0][1],
            "low": None,
            "high": None,
            "by_seed": values,
        }
    # ratio_over_seeds takes ratios and works with their logs, which the differences are
    interval = ratio_over_seeds([math.exp(value) for value in values])
    low, high = (None if end is None else math.log(end) for end in (interval.low, interval.high))
    return {
        "value": statistics.fmean(values),
        "se": statistics.stdev(values) / math.sqrt(len(values)),
        "low": low,
        "high": high,
        "by_seed": values,
    }


# Table 4 on the screen and in Markdown (Sec. 5.3)

SECTIONS = {"cpt": "Continual pretraining", "sft": "Continual pretraining + fine-tuning"}
NONE = "—"


def stage_table(results: Mapping[str, Any]) -> Table:
    """The best values of a section are bold."""
    columns = ["CPT", "SFT", "NLL", "difference", "exact match (%)", "difference (points)"]
    rows = []
    for section, title in SECTIONS.items():
        found = [row for row in results["rows"] if row["section"] == section]
        rows.append([Bold(title), *[""] * 5])
        nll = [f"{row['nll']:.4f}" for row in found]
        match = [f"{100 * row['exact_match']:.2f}" for row in found]
        best_nll = min(nll, key=float)
        best_match = max(match, key=float)
        for row, loss, share in zip(found, nll, match, strict=True):
            deviation = row["sampling_deviation"]
            shown = share if deviation is None else f"{share} ± {100 * deviation:.2f}"
            difference = row["difference"] or {"nll": None, "exact_match": None}
            rows.append(
                [
                    row["cpt"],
                    row["sft"] or NONE,
                    Bold(loss) if loss == best_nll else loss,
                    show_difference(difference["nll"], 4),
                    Bold(shown) if share == best_match else shown,
                    show_difference(difference["exact_match"], 2, 100),
                ]
            )
    return Table(_title(results), columns, rows, stage_notes(results))


def show_difference(found: Mapping[str, Any] | None, digits: int, scale: float = 1) -> str:
    """``+8.10 ± 0.52 (+6.61 to +9.59)``; the interval where there are seeds enough."""
    if found is None:
        return ""
    text = f"{scale * found['value']:+.{digits}f}"
    if found["se"] is not None:
        text += f" ± {scale * found['se']:.{digits}f}"
    if found["low"] is not None:
        low, high = scale * found["low"], scale * found["high"]
        text += f" ({low:+.{digits}f} to {high:+.{digits}f})"
    return text


def _count(number: int, word: str) -> str:
    return f"{number} {word}" + ("" if number == 1 else "s")


def stage_notes(results: Mapping[str, Any]) -> list[str]:
    """What the numbers are, and what their errors mean."""
    asked, seeds = results["asked"], len(results["seeds"])
    gap, (low, high) = asked["gap"], asked["own_gaps"]
    length = (
        "each answer's own length, rounded up as in training, which tells a little about it"
        if gap == "own"
        else f"{_count(gap, 'token')} for every answer (in training {low} to {high}, by the "
        "response's length)"
    )
    over = "the paired training seeds"
    if seeds == 1:
        over = "validation blocks (NLL) or examples (exact match), for one training seed"
    elif seeds > 2:
        over += ", with a 95 % t-interval"
    lines = [
        "NLL: nats per token, of held-out text after continual pretraining, of held-out responses "
        "after fine-tuning; the sections measure different things.",
        f"Exact match: {_count(asked['examples'], 'held-out example')}, answers compared after "
        f"stripping white space, case counts; the gap to fill has {length}. Without fine-tuning "
        "the same prompts are asked.",
        f"± after exact match: one standard deviation over {_count(len(asked['seeds']), 'seed')} "
        f"of sampling ({_sampling(asked['sampling'])}).",
        f"Difference: to the base row of the section; ± is the standard error over {over}.",
    ]
    if seeds > 1:
        lines.append(f"Means over {seeds} training seeds.")
    return lines


def _sampling(settings: Mapping[str, Any]) -> str:
    steps = "" if settings["steps"] is None else f", {_count(settings['steps'], 'step')} at most"
    return f"{settings['rule']}{steps}, temperature {settings['temperature']:g}"


def _title(results: Mapping[str, Any]) -> str:
    cpt, sft = results["cpt"], results["sft"]
    return (
        f"{cpt['data']['train']}, {cpt['train']['steps']} steps; then {sft['sft']['train']}, "
        f"{sft['train']['steps']} steps"
    )


def stage_markdown(results: Mapping[str, Any]) -> str:
    """table.md."""
    about = f"The rows of the paper's Table 4, here {in_markdown(_title(results))}."
    return markdown_page(
        "Continual pretraining and fine-tuning, base and bell",
        replace(stage_table(results), title=""),
        introduction=f"{about} Bold: best of the section.",
    )


# Validation curves of the four fine-tunings

COLOURS = {"base": "tab:red", "bell": "tab:blue"}
STYLES = {"base": "--", "bell": "-"}
"""Colour says which continual pretraining, the line which fine-tuning."""


def stage_figure(results: Mapping[str, Any]) -> Figure:
    """NLL of held-out responses against the fine-tuning's steps; thin lines are single seeds."""
    figure = Figure(figsize=(7, 4.4), layout="constrained")
    axes = figure.subplots()
    for row in results["rows"]:
        if row["section"] != "sft":
            continue
        colour, style = COLOURS[row["cpt"]], STYLES[row["sft"]]
        curves = np.array([run["nll"] for run in row["runs"]])
        steps = row["runs"][0]["steps"]
        if len(curves) > 1:
            for curve in curves:
                axes.plot(steps, curve, style, color=colour, linewidth=0.7, alpha=0.35)
        label = f"CPT {row['cpt']}, SFT {row['sft']} ({100 * row['exact_match']:.1f} % exact)"
        axes.plot(steps, curves.mean(0), style, color=colour, linewidth=1.8, label=label)
    axes.set_xlabel("fine-tuning step")
    axes.set_ylabel("validation NLL bound of responses (nats per token)")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=9)
    return figure


def write_stage_curves(results: Mapping[str, Any], folder: Path) -> list[Path]:
    """curves.png and curves.svg."""
    return save_figure(stage_figure(results), folder / "curves")


# The command


def is_meant(args: Sequence[str]) -> bool:
    """True when a command line of ``compare`` asks for this suite."""
    pairs = itertools.pairwise(args)
    return f"--suite={SUITE}" in args or ("--suite", SUITE) in pairs


def main(args: Sequence[str]) -> int:
    """Parse, check, run, print."""
    if args and not args[0].startswith("-"):
        raise UserError(
            f"--suite {SUITE} has two presets: give them as --cpt and --sft, not {args[0]!r}"
        )
    options = parse_command(StagesOptions, args, command=f"compare --suite {SUITE}")
    cpt_name, cpt = _stage("--cpt", options.cpt)
    sft_name, sft = _stage("--sft", options.sft)
    if options.start is not None:
        cpt = replace(cpt, start=replace(cpt.start, model=options.start, architecture=None)).check()
    _check_start(cpt)
    if options.gap == "own" and options.length is not None:
        raise UserError("--length is of a fixed gap; leave it or --gap own out")
    out = Path(options.out or f"runs/compare-{cpt_name}-{sft_name}")
    check_folder(str(out))
    check_folder(options.runs, "--runs")

    asking = Asking(
        options.examples,
        "own" if options.gap == "own" else options.length,
        options.sampling,
        options.sampling_seeds,
        options.batch_size,
    )
    results = compare_stages(
        cpt,
        sft,
        out=out,
        root=Path(options.runs),
        seeds=options.seeds,
        jobs=options.jobs,
        asking=asking,
        is_quiet=options.quiet,
    )
    stage_table(results).print()
    print(f"written: {out}/results.json, table.md, curves.png, curves.svg")
    return 0


def _check_start(cpt: RunConfig) -> None:
    """Say which command makes a start that is missing."""
    model = cpt.start.model
    if model is None or Path(model).exists() or Path(model).name not in PRESETS:
        return
    raise UserError(
        f"{model}, where both adaptations start, is missing: make it with bellmask train "
        f"{Path(model).name} --out {model}, or give another --start"
    )


_FROM_CPT = tuple(
    f"--start.{name}"
    for name in ("model", "architecture", "fresh", "no-fresh", "checkpoint", "mask-token")
)
"""Options that a fine-tuning cannot have here."""


def _stage(option: str, text: str) -> tuple[str, RunConfig]:
    """(name, config) of ``'PRESET --option value'``."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise UserError(f"{option} {text!r}: {error}") from None
    if not words or words[0].startswith("-"):
        raise UserError(
            f"{option} begins with a preset, as in {option} '{option[2:]}_tiny --train.steps 300'; "
            f"got {text!r}"
        )
    own, rest = split_args(PresetOptions, words, option)
    options = parse_options(PresetOptions, None, own, option)
    check_shared([], [Path(file) for file in options.config])
    for word in words[1:]:
        name = word.split("=")[0].replace("_", "-")
        if name.split(".")[0] in OWNED and not name.endswith("divide-by-c"):
            raise UserError(f"{option}: {name} is what base and bell differ in; leave it out")
        if option == "--sft" and name in _FROM_CPT:
            raise UserError(
                f"--sft: {name} is decided, as fine-tuning starts from the last step of the "
                "continual pretraining; leave it out"
            )
    return resolve(options, rest, option)
