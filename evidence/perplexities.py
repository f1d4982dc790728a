"""Zero-shot and generative perplexity of base and bell (Tables 7 and 8): measured, then shown."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from bellmask.cli import run_command
from bellmask.compare.results import ratio_over_seeds
from bellmask.config.config import RunConfig
from bellmask.evaluate.generative import nats_per_sample, quality_diversity_figure
from bellmask.utils.table import Table

sys.path.insert(0, str(Path(__file__).parent))
from analyses import ROOT, on_text, trained
from pages import (
    AGREES,
    DISAGREES,
    INCONCLUSIVE,
    Judged,
    Verdict,
    picture,
    read_result,
    worst,
    write_result,
)

SEEDS = 3
NFE = (32, 64, 128)
"""Half, once and twice the tokens of a row, as in the paper (512, 1024 and 2048 for 1024)."""
SCORERS = {"smollm2": "SmolLM2-135M-Instruct", "arm": "an ARM of the same trunk and text"}
SAMPLES = {"smollm2": 50, "arm": 100}
SAMPLING_SEEDS = {"smollm2": 2, "arm": 5}
PAPER_ZERO_SHOT = {
    "ptb": (115.99, 98.16),
    "wikitext2": (37.76, 34.51),
    "lm1b": (72.06, 67.71),
    "lambada": (48.18, 46.39),
    "ag_news": (68.31, 61.74),
    "pubmed": (43.15, 41.43),
    "arxiv": (37.85, 37.88),
}
"""Table 7: base and gaussian, 1M steps on OpenWebText."""
PAPER_GENERATIVE = {32: (56.51, 55.50), 64: (42.81, 41.55), 128: (36.04, 33.89)}
"""Table 8, at the same share of steps per token."""


def named_runs(config: RunConfig, jobs: int) -> dict[str, Path]:
    """Base and bell of each seed and one ARM, under names that tables can show."""
    folder = ROOT.parent / "perplexities"
    folder.mkdir(parents=True, exist_ok=True)
    found = {}
    for variant, seeds in (("base", SEEDS), ("bell", SEEDS), ("arm", 1)):
        for number, run in enumerate(trained(on_text(config), [variant], seeds=seeds, jobs=jobs)):
            link = folder / f"{variant}-{number + 1}"
            link.unlink(missing_ok=True)
            link.symlink_to(Path(run).resolve())
            found[link.name] = link
    return found


def measure_perplexities(
    config: RunConfig, texts: Sequence[str], columns: Sequence[str], jobs: int
) -> bool:
    """Both suites on all runs; texts are NAME=PATH of sets that are not fetched."""
    runs = named_runs(config, jobs)
    arm = str(runs.pop("arm-1"))
    models, out = [str(path) for path in runs.values()], ROOT.parent / "perplexities"
    given = [part for text in texts for part in ("--from", text)]
    given += [part for column in columns for part in ("--column", column)]
    command = ["evaluate", *models, "--suite", "zero-shot", *given, "--skip-missing"]
    is_whole = run_or_skip([*command, "--out", str(out / "zero-shot")])
    if is_whole:
        keep_result(out / "zero-shot/zero_shot.json", "zero-shot-wikitext2")
    for scorer in SCORERS:
        folder = out / f"generative-{scorer}"
        command = ["evaluate", *models, "--suite", "generative", "--out", str(folder)]
        command += ["--scorer", arm if scorer == "arm" else scorer]
        command += ["--num", str(SAMPLES[scorer]), "--seeds", str(SAMPLING_SEEDS[scorer])]
        if not run_or_skip([*command, "--nfe", *map(str, NFE)]):
            is_whole = False
            continue
        keep_result(folder / "generative.json", f"generative-wikitext2-{scorer}")
    return is_whole


def run_or_skip(command: list[str]) -> bool:
    """Run a command of bellmask; False where it fails."""
    print("==", *command, flush=True)
    return run_command(command) == 0


def keep_result(source: Path, name: str, **more: Any) -> None:
    """The numbers, without paths of a machine."""
    write_result(name, _without_paths(json.loads(source.read_text(encoding="utf-8"))) | more)


def _without_paths(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _without_paths(v) for k, v in value.items() if k not in ("files", "run")}
    if isinstance(value, list):
        return [_without_paths(item) for item in value]
    return Path(value).name if isinstance(value, str) and value.startswith(("/", "..")) else value


@dataclass(frozen=True)
class Pairs:
    """Values of base and bell with the same training seeds."""

    base: list[float]
    bell: list[float]
    paper: float | None
    """Its bell over base."""

    @property
    def ratio(self) -> dict[str, Any]:
        """Bell over base, with its interval."""
        return ratio_over_seeds([b / a for a, b in zip(self.base, self.bell, strict=True)])

    @property
    def word(self) -> str | None:
        """None where the paper has no number, or no difference of at least 1 %."""
        claim = 0 if self.paper is None else round(self.paper - 1, 2)
        if not claim:
            return None
        low, high = self.ratio["low"], self.ratio["high"]
        assert low is not None, "an interval needs three seeds"
        found = -1 if high < 1 else 1 if low > 1 else 0
        return INCONCLUSIVE if not found else AGREES if found * claim > 0 else DISAGREES

    def cells(self) -> list[str]:
        """Means, ratio with its interval, the paper's ratio, and the verdict."""
        means = [f"{sum(some) / len(some):.2f}" for some in (self.base, self.bell)]
        found = self.ratio
        spread = f"{found['mean']:.3f} ({found['low']:.3f} to {found['high']:.3f})"
        if self.paper is None:
            return [*means, spread, "-", "-"]
        return [*means, spread, f"{self.paper:.3f}", self.word or "the paper sees no difference"]


def zero_shot_pairs(numbers: Mapping[str, Any]) -> dict[str, Pairs]:
    """By set, those that were there."""
    found = {}
    for text in numbers["sets"]:
        if not text["missing"]:
            base, bell = (
                [text["results"][f"{kind}-{seed + 1}"]["perplexity"] for seed in range(SEEDS)]
                for kind in ("base", "bell")
            )
            is_own = any(one["is_own_text"] for one in text["results"].values())
            paper = None if is_own else PAPER_ZERO_SHOT.get(text["name"])
            found[text["title"]] = Pairs(base, bell, paper and paper[1] / paper[0])
    return found


def generative_means(numbers: Mapping[str, Any], nfe: int) -> dict[str, list[dict[str, Any]]]:
    """By kind of run, over its seeds."""
    by_name = {run["name"]: run["settings"] for run in numbers["runs"]}
    return {
        kind: [by_name[f"{kind}-{seed + 1}"][NFE.index(nfe)] for seed in range(SEEDS)]
        for kind in ("base", "bell")
    }


def generative_pairs(numbers: Mapping[str, Any], nfe: int) -> Pairs:
    found = generative_means(numbers, nfe)
    base, bell = ([one["mean"]["perplexity"] for one in some] for some in found.values())
    paper = PAPER_GENERATIVE[nfe]
    return Pairs(base, bell, paper[1] / paper[0])


def judge_perplexities() -> list[Judged]:
    """Table 7 on the sets where the paper's two differ; Table 8 under each scorer."""
    rows = []
    if numbers := read_result("zero-shot-wikitext2"):
        pairs = [pair for pair in zero_shot_pairs(numbers).values() if pair.word]
        claim = f"Zero-shot perplexity is lower ({len(pairs)} sets), bell/base"
        rows.append(_judged(claim, "Table 7", pairs))
    for scorer, title in SCORERS.items():
        if numbers := read_result(f"generative-wikitext2-{scorer}"):
            pairs = [generative_pairs(numbers, nfe) for nfe in NFE]
            rows.append(
                _judged(
                    f"Generative perplexity is lower (scorer {title}), bell/base", "Table 8", pairs
                )
            )
    return rows


def _judged(claim: str, item: str, pairs: Sequence[Pairs]) -> Judged:
    told, ours = [p.paper or 1.0 for p in pairs], [p.ratio["mean"] for p in pairs]
    ends = [f"{min(values):.2f} to {max(values):.2f}" for values in (told, ours)]
    word = worst(pair.word or INCONCLUSIVE for pair in pairs)
    return Judged(claim, f"{item}: {ends[0]}", Verdict(word, ends[1]))


def perplexities_page() -> list[str]:
    """Tables 7 and 8 beside what was measured."""
    lines = [*INTRODUCTION.splitlines(), ""]
    lines += _zero_shot(read_result("zero-shot-wikitext2"))
    for scorer, title in SCORERS.items():
        name = f"generative-wikitext2-{scorer}"
        numbers = read_result(name)
        lines += _generative(numbers, title)
        if numbers is not None:
            alt = f"quality against diversity under {title}"
            lines += picture(alt, name, partial(quality_diversity_figure, numbers))
    return lines


INTRODUCTION = """# Perplexities (Tables 7 and 8)

Preset `small`, 2000 steps on WikiText-2, three paired training seeds. The claim is that bell's
perplexity is below base's at the same step, so bell/base is below 1. In brackets is the 95 %
t-interval over seeds. The paper's models were trained on OpenWebText for 1M steps, and a perplexity
is per token of a model's own tokenizer, so only ratios can be compared. *Error, text* is the
largest standard error of a run over documents; *deviation, masks* the largest over sets of masks of
one run. The runs were trained on
WikiText-2, so that set is not zero-shot and has no verdict; the paper's sets of PubMed and arXiv
papers are replaced by small other ones, without a verdict either. LM1B is a sample. Every score is
in `docs/results/zero-shot-*.json` and `docs/results/generative-*.json`."""


def _zero_shot(numbers: Mapping[str, Any] | None) -> list[str]:
    lines = ["## Table 7: zero-shot perplexity", ""]
    if numbers is None:
        return [*lines, "Not run yet.", ""]
    pairs = zero_shot_pairs(numbers)
    rows = []
    for text in numbers["sets"]:
        if text["missing"]:
            rows.append([text["title"], "not here", *[""] * 6])
            continue
        errors = text["results"].values()
        se = max(one["perplexity_se"] / one["perplexity"] for one in errors)
        masks = max(one["seed_deviation"] / one["perplexity"] for one in errors)
        cells = pairs[text["title"]].cells()
        rows.append([text["title"], *cells[:3], f"{se:.1%}", f"{masks:.1%}", *cells[3:]])
    columns = ["set", "base", "bell", "bell/base", "error, text", "deviation, masks"]
    return [*lines, Table("", [*columns, "paper's ratio", "verdict"], rows).markdown()]


def _generative(numbers: Mapping[str, Any] | None, title: str) -> list[str]:
    lines = [f"## Table 8: generative perplexity, scorer {title}", ""]
    if numbers is None:
        return [*lines, "Not run yet.", ""]
    rows = []
    for nfe in NFE:
        found = generative_means(numbers, nfe)
        entropy = [f"{fmean(o['mean']['entropy'] for o in some):.2f}" for some in found.values()]
        cost = [f"{fmean(nats_per_sample(o) or 0.0 for o in some):.1f}" for some in found.values()]
        calls = f"{fmean(one['mean']['calls'] for one in found['bell']):.0f}"
        cells = generative_pairs(numbers, nfe).cells()
        both = [" / ".join(entropy), " / ".join(cost)]
        rows.append([str(nfe), calls, *cells[:2], *both, *cells[2:]])
    columns = ["NFE", "calls", "base", "bell", "entropy, base / bell", "nats per sample"]
    columns += ["bell/base", "paper's ratio", "verdict"]
    lines += [Table("", columns, rows).markdown()]
    (real,) = [text["settings"][0]["mean"] for text in numbers["real_text"]]
    sampling_seeds = len(numbers["runs"][0]["settings"][0]["cells"])
    lines += [
        f"{numbers['num']} samples of {numbers['runs'][0]['tokens']} tokens for each of "
        f"{sampling_seeds} sampling seeds and three training seeds, ancestral, "
        f"float64 noise. Validation text itself: {real['perplexity']:.1f}, entropy "
        f"{real['entropy']:.2f}. The perplexity is per token of the scorer, so it is higher for "
        "text with fewer tokens at the same nats per sample.",
        "",
    ]
    return lines
