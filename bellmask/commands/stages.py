"""``bellmask compare --suite cpt_sft``: adaptation and fine-tuning, base and bell (Table 4)."""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from bellmask.config.config import RunConfig
from bellmask.config.presets import PRESETS, parse_command, peek_option, resolve
from bellmask.generate.settings import Sampling
from bellmask.utils.errors import UserError
from bellmask.utils.files import check_folder

SUITE = "cpt_sft"
_FROM_CPT = tuple(
    f"--start.{name}"
    for name in ("model", "architecture", "fresh", "no-fresh", "checkpoint", "mask-token")
)
"""Options that a fine-tuning cannot have here."""


@dataclass(frozen=True)
class StagesOptions:
    """Continual pretraining {base, bell} x fine-tuning {base, bell}: the rows of Table 4.

    Two adaptations begin with the same weights, two fine-tunings with each of them: six trainings
    per seed. Then every model, also those that were not fine-tuned, is asked held-out examples.
    Interrupt it at will; the same command goes on where it stopped and measures nothing twice.
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


def is_meant(args: Sequence[str]) -> bool:
    """True when a command line of ``compare`` asks for this suite."""
    pairs = itertools.pairwise(args)
    return f"--suite={SUITE}" in args or ("--suite", SUITE) in pairs


def run(args: Sequence[str]) -> int:
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

    from bellmask.compare.stages import Asking, compare_stages
    from bellmask.report.stage_tables import print_stages

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
    print_stages(results)
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


def _stage(option: str, text: str) -> tuple[str, RunConfig]:
    """(name, config) of ``'PRESET --option value'``."""
    from bellmask.compare.variants import OWNED, check_shared

    try:
        words = shlex.split(text)
    except ValueError as error:
        raise UserError(f"{option} {text!r}: {error}") from None
    if not words or words[0].startswith("-"):
        raise UserError(
            f"{option} begins with a preset, as in {option} '{option[2:]}_tiny --train.steps 300'; "
            f"got {text!r}"
        )
    check_shared([], [Path(file) for file in peek_option(words, "--config")])
    for word in words[1:]:
        name = word.split("=")[0].replace("_", "-")
        if name.split(".")[0] in OWNED and not name.endswith("divide-by-c"):
            raise UserError(f"{option}: {name} is what base and bell differ in; leave it out")
        if option == "--sft" and name in _FROM_CPT:
            raise UserError(
                f"--sft: {name} is decided, as fine-tuning starts from the last step of the "
                "continual pretraining; leave it out"
            )
    return resolve(words, option)
