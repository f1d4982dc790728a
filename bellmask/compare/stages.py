"""The suite ``cpt_sft``: continual pretraining {base, bell} x fine-tuning {base, bell} (Table 4).

For each training seed two adaptations (CPT) begin with the same weights, and two fine-tunings
(SFT) with each of them: six trainings. A fine-tuning's folder is keyed by its own options, its
examples and the key of the adaptation it starts from, never by a path. Everything is resumable:
trainings as in any comparison (:mod:`bellmask.compare.execute`), answers by
:mod:`bellmask.evaluate.exact_match`.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from matplotlib.figure import Figure

from bellmask import __version__
from bellmask.compare import execute as trainings
from bellmask.compare.execute import PlannedRun, TrainingOptions
from bellmask.compare.report import draw_runs
from bellmask.compare.results import RunRecord, check_comparable, read_run, write_json
from bellmask.compare.variants import OWNED, check_shared, parse_variants, split_words
from bellmask.config.command_line import PresetOptions, parse_command, resolve, split_args
from bellmask.config.config import RunConfig, load_config, parse_options
from bellmask.data.blocks import Blocks
from bellmask.data.prepare import LoadedData, describe_blocks, make_tokenizer
from bellmask.data.tokenizers import Tokenizer
from bellmask.evaluate.exact_match import ExactMatch, Exam
from bellmask.generate.settings import Sampling
from bellmask.report.figures import finish_axes, new_figure, save_figure
from bellmask.train.setup import open_start
from bellmask.utils.errors import UserError, check_least
from bellmask.utils.files import check_folder, without_nan, write_text
from bellmask.utils.progress import progress_bar
from bellmask.utils.stats import Estimate, plus_minus
from bellmask.utils.table import Bold, Table, in_markdown, markdown_page

SUITE = "cpt_sft"
VARIANTS = ("base", "bell")


@dataclass(frozen=True, kw_only=True)
class StagesOptions(TrainingOptions):
    """Continual pretraining {base, bell} x fine-tuning {base, bell}: the rows of Table 4.

    Two adaptations start from the same weights, and two fine-tunings from each of them: six runs
    per seed. Then every model, fine-tuned or not, answers held-out examples.
    If interrupted, the same command continues where it stopped.
    Writes results.json, table.md and curves.png/.svg.

    Examples:
    bellmask train arm_tiny --out runs/arm_tiny

    bellmask compare --suite cpt_sft --seeds 3 --jobs 2

    bellmask compare --suite cpt_sft --cpt 'cpt_tiny --train.steps 300' --sft 'sft_tiny --sft.train
    toy:copy --sft.round-to 16'

    bellmask compare --suite cpt_sft --cpt 'cpt_tiny --start.model runs/other_arm' --sampling.rule
    most_confident --sampling.temperature 0 --sampling-seeds 1
    """

    suite: Literal["cpt_sft"] = "cpt_sft"
    """Name of the suite."""
    cpt: str = "cpt_tiny"
    """Continual pretraining: a preset, config file or run folder, with options, in quotes; base and
    bell differ from it only in framework, law, schedule and objective."""
    sft: str = "sft_tiny"
    """Fine-tuning, in the same format; it starts from the last step of continual pretraining."""
    examples: int = 256
    """Number of held-out examples; 0 means all."""
    length: int | None = None
    """Tokens of the gap to fill, for all examples. Default: enough for nine in ten training
    responses."""
    sampling_seeds: int = 5
    """Number of answers sampled per example; mean and deviation are over these seeds."""
    sampling: Sampling = field(default_factory=Sampling)
    """How answers are sampled; default steps: the fine-tuning's validation.sample_steps."""
    batch_size: int = 64
    """Examples per forward pass; does not change answers."""
    out: str | None = None
    """Folder for the results; default: runs/compare-CPT-SFT."""


# Planning


@dataclass(frozen=True)
class StageRun(PlannedRun):
    """A training, and its place in the table."""

    seed: int
    """Of the continual pretraining."""
    cpt: str
    sft: str | None
    """None: continual pretraining only."""


@dataclass(frozen=True)
class StagePlan:
    """All trainings, and what is held out of the fine-tuning's examples."""

    runs: list[StageRun]
    valid: Blocks
    tokenizer: Tokenizer
    length: int
    """The gap that most training responses need."""


def plan_stages(cpt: RunConfig, sft: RunConfig, options: TrainingOptions) -> StagePlan:
    """Every training of the suite; the data of both stages is prepared, nothing is trained."""
    if cpt.sft.train is not None:
        raise UserError("--cpt is continual pretraining on text: omit its --sft options")
    if sft.sft.train is None:
        raise UserError("--sft needs prompts and responses, as in sft_tiny or by --sft.train")
    trainings.for_comparison(sft)
    variants = parse_variants(VARIANTS)
    # as 'bellmask compare' plans them, which so shares these runs
    adapted = trainings.plan_runs(trainings.for_comparison(cpt), variants, options)
    tokenizer, data = _load_examples(cpt, sft, options.quiet)
    marks = (tokenizer.fingerprint, data.train.fingerprint, data.valid.fingerprint)
    runs = []
    for first in adapted:
        name, seed, steps = first.variant, first.config.train.seed, first.config.train.steps
        runs.append(StageRun(f"CPT {name}", "", first.config, first.folder, seed, name, None))
        for second in variants:
            own = _started(trainings.with_seed(sft, seed - cpt.train.seed), first.folder, steps)
            tuned = second.apply(own)
            # the adaptation's key replaces its path
            key = trainings.run_key(_started(tuned, first.folder.name, steps), "/".join(marks))
            label, folder = f"CPT {name} + SFT {second.name}", first.folder.with_name(key)
            runs.append(StageRun(label, "", tuned, folder, seed, name, second.name))
    about = describe_blocks(sft, data)
    return StagePlan(runs, data.valid, tokenizer, about["response_tokens"])


def _started(sft: RunConfig, model: Path | str, step: int) -> RunConfig:
    """A fine-tuning from an adaptation's last step."""
    return replace(sft, start=replace(sft.start, model=str(model), checkpoint=str(step)))


def _load_examples(cpt: RunConfig, sft: RunConfig, is_quiet: bool) -> tuple[Tokenizer, LoadedData]:
    """The fine-tuning's data as the adapted models will read it."""
    if cpt.start.model is None:
        start = open_start(cpt)
        tokenizer = start.tokenizer or make_tokenizer(cpt.data)
        config = replace(sft, model=start.config.model)
        start = replace(start, config=config, tokenizer=tokenizer)
    else:  # as a start of the fine-tuning, which rejects rows too long for the backbone
        options = replace(sft.start, model=cpt.start.model, checkpoint=cpt.start.checkpoint)
        start = open_start(replace(sft, start=options))
    return start.load_data(is_quiet=is_quiet)


# Running


@dataclass(frozen=True)
class StageOutcome:
    """A trained run: the contents of its folder, and its answers."""

    run: StageRun
    record: RunRecord
    answered: ExactMatch

    def summary(self) -> dict[str, Any]:
        """The numbers of results.json; nothing that depends on timing."""
        record, answered = self.record, self.answered
        return {
            "seed": self.run.seed,
            "run": record.folder.name,
            "steps": record.steps,
            "nll": record.nll,
            "nll_se": record.nll_se[-1],
            "exact_match": answered.share,
            "exact_match_se": answered.standard_error,
            "by_sampling_seed": answered.seed_shares,
            "sampling_deviation": answered.seed_deviation,
        }


# Paper: Table 4
def compare_stages(
    cpt: RunConfig, sft: RunConfig, options: StagesOptions, out: Path
) -> dict[str, Any]:
    """Train missing runs, evaluate answers, write the report, return the results."""
    check_least(options, seeds=1, jobs=1, processes_per_job=1)
    check_least(options, sampling_seeds=1, batch_size=1, examples=0)
    options.sampling.check()
    plan = plan_stages(cpt, sft, options)
    exam = _exam(plan, sft, options)
    out.mkdir(parents=True, exist_ok=True)
    try:
        for is_tuned in (False, True):
            stage = [run for run in plan.runs if (run.sft is not None) == is_tuned]
            trainings.execute(list(map(_as_started, stage)), options)
        outcomes = _outcomes(plan, exam, options.quiet)
    except KeyboardInterrupt:
        raise KeyboardInterrupt("interrupted; the same command continues") from None
    results = without_nan({**_describe(cpt, sft, exam), **summarize_stages(outcomes)})
    write_json(out / "results.json", results, is_quiet=options.quiet)
    write_text(out / "table.md", stage_markdown(results))
    save_figure(stage_figure(results), out / "curves")
    return results


def _exam(plan: StagePlan, sft: RunConfig, options: StagesOptions) -> Exam:
    """The questions, the same for all runs."""
    sampling, block = options.sampling, plan.valid.block_length
    if sampling.steps is None and sampling.has_steps:
        sampling = replace(sampling, steps=sft.validation.sample_steps)
    length = plan.length if options.length is None else options.length
    if not 1 <= length < block:
        raise UserError(f"--length {length} leaves no room for a prompt in rows of {block} tokens")
    examples = plan.valid.slice(0, min(options.examples or len(plan.valid), len(plan.valid)))
    seeds = tuple(range(options.sampling_seeds))
    return Exam(examples, plan.tokenizer, length, sampling, seeds, options.batch_size)


def _as_started(run: StageRun) -> StageRun:
    """A fine-tuning that has started keeps the name of its start, because resuming compares
    options.
    """
    path = run.folder / "config.json"
    if run.sft is None or not path.exists() or trainings.is_finished(run):
        return run
    before = load_config(path).start.model
    return replace(run, config=replace(run.config, start=replace(run.config.start, model=before)))


def _outcomes(plan: StagePlan, exam: Exam, is_quiet: bool) -> list[StageOutcome]:
    """NLL and answers of every run; adaptations are evaluated without fine-tuning."""
    missing = sum(len(exam.missing(run.folder, run.config.train.steps)) for run in plan.runs)
    total, is_quiet = len(exam.examples) * missing, is_quiet or not missing
    outcomes = []
    with progress_bar("exact match", "answers", total, is_quiet=is_quiet) as progress:
        for run in plan.runs:
            answered = exam.take(run.folder, run.config.train.steps, progress)
            outcomes.append(StageOutcome(run, read_run(run.folder), answered))
    return outcomes


def _describe(cpt: RunConfig, sft: RunConfig, exam: Exam) -> dict[str, Any]:
    """Description of the trainings and questions, without options that variants set."""
    own = exam.examples.num_maskable(slice(None))
    sft = replace(sft, start=replace(sft.start, model=None, checkpoint="latest"))
    found = {"cpt": cpt.to_dict(), "sft": sft.to_dict()}
    for config, option in itertools.product(found.values(), OWNED):
        del config[option.removeprefix("--")]
    asked = {
        "examples": len(exam.examples),
        "fingerprint": exam.examples.fingerprint,
        "gap": exam.length,
        "own_gaps": [int(own.min()), int(own.max())],
        "sampling": vars(exam.sampling),
        "seeds": list(exam.seeds),
    }
    return {**found, "asked": asked}


# Outcomes of the suite ``cpt_sft`` → the rows of Table 4, with differences and their errors
#
# A row is compared with the base row of its section. With one training seed the difference is
# paired over validation blocks (NLL) or examples (exact match), and its error covers their choice.
# With several it is paired over training seeds: mean, standard error over seeds, and from three
# seeds on a 95 % t-interval, as everywhere in comparisons.

FORMAT = 1
BASE = "base"


def summarize_stages(outcomes: Sequence[StageOutcome]) -> dict[str, Any]:
    """Rows in the table's order: continual pretraining first, then with fine-tuning."""
    places: dict[tuple[str, str | None], list[StageOutcome]] = {}
    for one in outcomes:
        places.setdefault((one.run.cpt, one.run.sft), []).append(one)
    rows = [
        _row(cpt, sft, mine, places[BASE, sft and BASE])
        for (cpt, sft), mine in sorted(places.items(), key=lambda item: item[0][1] is not None)
    ]
    about = {"format": FORMAT, "bellmask": __version__, "suite": SUITE}
    seeds = list(dict.fromkeys(one.run.seed for one in outcomes))
    return {**about, "seeds": seeds, "rows": rows}


def _row(
    cpt: str, sft: str | None, mine: Sequence[StageOutcome], base: Sequence[StageOutcome]
) -> dict[str, Any]:
    match = Estimate.over_seeds([one.answered.share for one in mine])
    # of one model's answers: the mean variance over training seeds
    variance = statistics.fmean(one.answered.seed_deviation**2 for one in mine)
    row: dict[str, Any] = {
        "section": "cpt" if sft is None else "sft",
        "cpt": cpt,
        "sft": sft,
        "nll": statistics.fmean(one.record.nll[-1] for one in mine),
        "exact_match": match.value,
        "sampling_deviation": math.sqrt(variance),
        "training_deviation": match.deviation,
        "difference": None,
        "runs": [one.summary() for one in mine],
    }
    if mine == base:
        return row
    check_comparable([one.record for one in (*base, *mine)])
    pairs = list(zip(mine, base, strict=True))
    nll = join_seeds([a.record.last.difference(b.record.last) for a, b in pairs])
    exact = join_seeds([a.answered.difference(b.answered) for a, b in pairs])
    return {**row, "difference": {"nll": nll, "exact_match": exact}}


def join_seeds(differences: Sequence[tuple[float, float]]) -> dict[str, Any]:
    """(difference, its error within the seed) of each training seed → mean, error, interval."""
    values = [value for value, _ in differences]
    mean = Estimate.over_seeds(values)
    low, high = mean.interval
    error = differences[0][1] if mean.se is None else mean.se
    return {"value": mean.value, "se": error, "low": low, "high": high, "by_seed": values}


# Table 4 on the screen and in Markdown (Sec. 5.3)

SECTIONS = {"cpt": "Continual pretraining", "sft": "Continual pretraining + fine-tuning"}
NONE = "—"


def stage_table(results: Mapping[str, Any]) -> Table:
    """The best values of a section are bold."""
    rows: list[list[str]] = []
    for section, title in SECTIONS.items():
        found = [row for row in results["rows"] if row["section"] == section]
        rows.append([Bold(title), *[""] * 5])
        # as they are shown, so that what looks equal is bold alike
        nll = [round(row["nll"], 4) for row in found]
        match = [round(100 * row["exact_match"], 2) for row in found]
        for row, loss, share in zip(found, nll, match):
            deviation, changes = row["sampling_deviation"], row["difference"] or {}
            exact = plus_minus(share, None if deviation is None else 100 * deviation)
            cells = [Bold(f"{loss:.4f}") if loss == min(nll) else f"{loss:.4f}"]
            cells += [show_difference(changes.get("nll"), 4)]
            cells += [Bold(exact) if share == max(match) else exact]
            cells += [show_difference(changes.get("exact_match"), 2, 100)]
            rows.append([row["cpt"], row["sft"] or NONE, *cells])
    columns = ["CPT", "SFT", "NLL", "difference", "exact match (%)", "difference (points)"]
    return Table(_title(results), columns, rows, stage_notes(results))


def show_difference(found: Mapping[str, Any] | None, digits: int, scale: float = 1) -> str:
    """``+8.10 ± 0.52 (+6.61 to +9.59)``; the interval where there are seeds enough."""
    if found is None:
        return ""
    low, high, value, error = (
        None if found[key] is None else scale * found[key] for key in ("low", "high", "value", "se")
    )
    ends = "" if low is None else f" ({low:+.{digits}f} to {high:+.{digits}f})"
    return plus_minus(value, error, digits, "+") + ends


def stage_notes(results: Mapping[str, Any]) -> list[str]:
    """Explain the numbers and their errors."""
    asked, seeds, sampling = results["asked"], len(results["seeds"]), results["asked"]["sampling"]
    low, high = asked["own_gaps"]
    gap = f"{asked['gap']} tokens for every answer (in training {low} to {high})"
    steps = "" if sampling["steps"] is None else f", at most {sampling['steps']} steps"
    over = f"{seeds} paired training seeds" + (", with a 95 % t-interval" if seeds > 2 else "")
    if seeds == 1:
        over = "validation blocks (NLL) or examples (exact match), for one training seed"
    return [
        "NLL: nats per token, of held-out text after continual pretraining, of held-out responses "
        "after fine-tuning; the sections measure different things.",
        f"Exact match: {asked['examples']} held-out examples, white space at both ends stripped; "
        f"the gap to fill has {gap}. ± is one standard deviation over {len(asked['seeds'])} "
        f"sampling seeds ({sampling['rule']}{steps}, temperature {sampling['temperature']:g}).",
        f"Difference: to the base row of the section; ± is the standard error over {over}.",
    ]


def _title(results: Mapping[str, Any]) -> str:
    cpt, sft = results["cpt"], results["sft"]
    return (
        f"{cpt['data']['train']}, {cpt['train']['steps']} steps; then {sft['sft']['train']}, "
        f"{sft['train']['steps']} steps"
    )


def stage_markdown(results: Mapping[str, Any]) -> str:
    about = f"The rows of the paper's Table 4, here {in_markdown(_title(results))}."
    return markdown_page(
        "Continual pretraining and fine-tuning, base and bell",
        replace(stage_table(results), title=""),
        introduction=f"{about} Bold: best of the section.",
    )


# Validation curves of the four fine-tunings

COLORS = {"base": "tab:red", "bell": "tab:blue"}
STYLES = {"base": "--", "bell": "-"}
"""Color says which continual pretraining, the line which fine-tuning."""


def stage_figure(results: Mapping[str, Any]) -> Figure:
    """NLL of held-out responses against the fine-tuning's steps; thin lines are single seeds."""
    figure, (axes,) = new_figure(7, 4.4)
    for row in results["rows"]:
        if row["section"] == "sft":
            label = f"CPT {row['cpt']}, SFT {row['sft']} ({100 * row['exact_match']:.1f} % exact)"
            look = {"color": COLORS[row["cpt"]], "linestyle": STYLES[row["sft"]]}
            draw_runs(axes, row["runs"], "steps", label, **look)
    y = "validation NLL bound of responses (nats per token)"
    finish_axes(axes, "fine-tuning step", y, legend=0)
    return figure


# The command


def is_meant(args: Sequence[str]) -> bool:
    """True when a command line of ``compare`` asks for this suite."""
    pairs = itertools.pairwise(args)
    return f"--suite={SUITE}" in args or ("--suite", SUITE) in pairs


def main(args: Sequence[str]) -> int:
    if args and not args[0].startswith("-"):
        raise UserError(f"--suite {SUITE} takes presets as --cpt and --sft, not {args[0]!r}")
    options = parse_command(StagesOptions, args, command=f"compare --suite {SUITE}")
    cpt_name, cpt = _stage("--cpt", options.cpt)
    sft_name, sft = _stage("--sft", options.sft)
    out = Path(options.out or f"runs/compare-{cpt_name}-{sft_name}")
    check_folder(str(out))
    check_folder(options.runs, "--runs")

    results = compare_stages(cpt, sft, options, out)
    stage_table(results).print()
    print(f"written: {out}/results.json, table.md, curves.png, curves.svg")
    return 0


_FROM_CPT = tuple(
    f"--start.{name}"
    for name in ("model", "architecture", "fresh", "no-fresh", "checkpoint", "mask-token")
)
"""Options that a fine-tuning cannot have here."""


def _stage(option: str, text: str) -> tuple[str, RunConfig]:
    """(name, config) of ``'PRESET --option value'``."""
    words = split_words(text, f"{option} {text!r}")
    if not words or words[0].startswith("-"):
        raise UserError(f"{option} must begin with a preset ({option[2:]}_tiny), got {text!r}")
    own, rest = split_args(PresetOptions, words, option)
    options = parse_options(PresetOptions, None, own, option)
    check_shared(words[1:], options.config, where=f"{option}: ")
    for word in words[1:]:
        name = word.split("=")[0].replace("_", "-")
        if option == "--sft" and name in _FROM_CPT:
            raise UserError(f"--sft: {name} cannot be set: it starts from the last step of --cpt")
    return resolve(options, rest, option)
