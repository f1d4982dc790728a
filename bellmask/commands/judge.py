"""``bellmask judge pairwise A B``: win rates by a judge (the paper's Table 5)."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bellmask.commands.judge_options import (
    PairwiseOptions,
    check_options,
    open_calibration,
    open_sides,
    open_tasks,
    opened_judge,
    prices,
)
from bellmask.config.presets import parse_command
from bellmask.utils.errors import UserError

if TYPE_CHECKING:
    from bellmask.judge.answering import Side
    from bellmask.judge.benchmarks import Benchmark
    from bellmask.judge.chat import Request
    from bellmask.judge.pairwise import Judge
    from bellmask.judge.verdicts import Judged, Pair

HELP = """Judge models by their answers.

usage: bellmask judge pairwise A B --judge MODEL [options]    (add --help for all of them)

examples:
  bellmask judge pairwise runs/bell runs/base --benchmark mt-bench --judge gpt-4o --dry-run
  bellmask judge pairwise runs/bell runs/base --benchmark prompts.jsonl --judge local:smollm2
"""
BySeed = dict[int, list["Pair"]]


def run(args: Sequence[str]) -> int:
    """Hand over to the kind of judgement."""
    if not args or args[0] in ("-h", "--help"):
        print(HELP)
        return 0
    kind, *rest = args
    if kind != "pairwise":
        raise UserError(f"there is one kind of judgement: bellmask judge pairwise A B; not {kind}")
    return _pairwise(parse_command(PairwiseOptions, rest, command="judge pairwise"))


def _pairwise(options: PairwiseOptions) -> int:
    check_options(options)
    benchmark = open_tasks(options)
    calibration = open_calibration(options, benchmark)
    with opened_judge(options, benchmark) as judge:
        sides = open_sides(options)
        seeds = _seeds(options, sides)
        with _goes_on("answers", Path(options.out) / "answers"):
            pairs = _answered(sides, benchmark, seeds)
        everything = [pair for seed in seeds for pair in pairs[seed]]
        missing = _announce(options, sides, judge, everything)
        if options.dry_run:
            return 0
        judged = _judged(judge, pairs, missing, options)

    from bellmask.judge.numbers import seed_numbers, summarise

    results = [seed_numbers(judged[seed], calibration) for seed in seeds]
    cautions = [line for side in sides for line in side.cautions(benchmark, seeds)]
    cautions += [*judge.cautions(everything), *_cautions(options, sides, benchmark)]
    numbers = {
        "a": _about(options.a, sides[0]),
        "b": _about(options.b, sides[1]),
        "benchmark": {"name": benchmark.name, "identity": benchmark.identity},
        "num_tasks": len(benchmark.tasks),
        "judge": {"label": judge.label, "is_local": options.is_local, **judge.about(everything)},
        "seeds": seeds,
        "over_seeds": summarise(results, [judged[seed] for seed in seeds]),
        "results": results,
        "cautions": cautions,
    }
    _write(Path(options.out), numbers, _verdict_lines(judge, judged))
    return 0


def _about(given: str, side: Side) -> dict[str, Any]:
    return {"name": side.name, "given": given, **side.about}


def _seeds(options: PairwiseOptions, sides: Sequence[Side]) -> list[int]:
    """Files say the same every time: then one seed is all."""
    is_one = all(side.is_fixed for side in sides)
    return [options.seed + number for number in range(1 if is_one else options.seeds)]


def _answered(sides: Sequence[Side], benchmark: Benchmark, seeds: Sequence[int]) -> BySeed:
    """Pairs by seed; what has not been answered before is answered now."""
    from bellmask.judge.verdicts import pairs_of
    from bellmask.utils.console import progress_bar

    work = [(seed, side, side.missing(benchmark, seed)) for seed in seeds for side in sides]
    said: dict[int, list[Any]] = {seed: [] for seed in seeds}
    before = 0
    with progress_bar("answering", "answers", sum(count for *_, count in work)) as advance:
        for seed, side, count in work:
            said[seed].append(
                side.answers(benchmark, seed, lambda done, start=before: advance(start + done))  # type: ignore[misc]
            )
            before += count
    return {seed: pairs_of(benchmark.tasks, *both) for seed, both in said.items()}


@contextlib.contextmanager
def _goes_on(what: str, folder: Path) -> Iterator[None]:
    """Ctrl-C says what is kept."""
    try:
        yield
    except KeyboardInterrupt as stop:
        words = f"interrupted; {what} so far are kept in {folder}: the same command goes on"
        raise KeyboardInterrupt(str(stop) or words) from None


def _announce(
    options: PairwiseOptions, sides: Sequence[Side], judge: Judge, pairs: Sequence[Pair]
) -> list[Request]:
    """Say what it will cost; what will be asked."""
    from bellmask.judge.cost import estimate
    from bellmask.judge.pairwise import EndpointJudge

    missing: list[Request] = []
    if isinstance(judge, EndpointJudge):
        missing = judge.transcript.missing(judge.requests(pairs))
        found = estimate(missing, prices(options))
        print(found.words(), flush=True)
        if judge.limit is not None:
            judge.limit.check(found)
    if options.dry_run:
        is_written = not all(side.is_fixed for side in sides)
        place = f"; answers are in {options.out}/answers" if is_written else ""
        print(f"dry run: nothing was asked{place}")
    return missing


def _judged(
    judge: Judge, pairs: BySeed, missing: Sequence[Request], options: PairwiseOptions
) -> dict[int, list[Judged]]:
    """All seeds at once, so that threads are never idle between them; then says what it cost."""
    from bellmask.judge.pairwise import EndpointJudge
    from bellmask.utils.console import staged_bar

    everything = [pair for mine in pairs.values() for pair in mine]
    try:
        with (
            _goes_on("likelihoods", Path(options.out)),
            staged_bar("judging", "verdicts") as on_progress,
        ):
            found = iter(judge.judge(everything, on_progress))
    finally:  # money is gone after a failure, too
        words = judge.spent(missing) if missing and isinstance(judge, EndpointJudge) else None
        if words is not None:
            print(words, flush=True)
    return {seed: [next(found) for _ in mine] for seed, mine in pairs.items()}


def _cautions(options: PairwiseOptions, sides: Sequence[Side], benchmark: Benchmark) -> list[str]:
    """What a reader must know of the comparison itself."""
    from bellmask.judge.answering import RunSide
    from bellmask.judge.benchmarks import NUM_INSTRUCTIONS

    lines = []
    marks = {side.fingerprint for side in sides if isinstance(side, RunSide)}
    if len(marks) == 1 and all(isinstance(side, RunSide) for side in sides):
        lines.append("A and B are the same model: all their answers are.")
    if options.difficulty is not None:
        lines.append("AlpacaEval's full model holds for B = gpt4_1106_preview's outputs only.")
        if (count := len(benchmark.tasks)) < NUM_INSTRUCTIONS:
            lines.append(
                f"AlpacaEval's full model is calibrated on all {NUM_INSTRUCTIONS} instructions; "
                f"with {count} of them it is no leaderboard number."
            )
    return lines


def _verdict_lines(judge: Judge, judged: dict[int, list[Judged]]) -> str:
    """A line for each pair: what was said, who won, and what that rests on."""
    lines = []
    for seed, mine in judged.items():
        for one in mine:
            record = {
                "seed": seed,
                "task": one.pair.task.id,
                "turn": one.pair.turn + 1,
                "category": one.pair.task.category,
                "result": one.outcome.result,
                "preference": one.outcome.preference,
                "a": one.pair.answers_a[-1],
                "b": one.pair.answers_b[-1],
                **judge.grounds(one.pair),
            }
            lines.append(json.dumps(record) + "\n")
    return "".join(lines)


def _write(folder: Path, numbers: dict[str, Any], verdicts: str) -> None:
    """To files and to the screen."""
    from bellmask.compare.results import without_nan
    from bellmask.report.judge_tables import markdown, show
    from bellmask.utils.files import write_text

    plain = without_nan(numbers)
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / "verdicts.jsonl", verdicts)
    write_text(folder / "judge.md", markdown(plain))
    write_text(folder / "judge.json", json.dumps(plain, indent=1, allow_nan=False) + "\n")
    show(plain)
    print(f"written: judge.json, judge.md and verdicts.jsonl in {folder}", file=sys.stderr)
