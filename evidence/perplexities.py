"""Zero-shot and generative perplexity of base and bell (Tables 7 and 8): measured, then told."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bellmask.cli import run_command
from bellmask.compare.results import ratio_over_seeds
from bellmask.config.config import RunConfig
from bellmask.evaluate.generative import nats_per_sample, quality_diversity_figure
from bellmask.report.figures import save_figure
from bellmask.utils.files import without_nan
from bellmask.utils.table import Table

sys.path.insert(0, str(Path(__file__).parent))
from analyses import RESULTS, ROOT, on_text, rounded, trained
from claims import AGREES, DISAGREES, UNTOLD

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
    setting: str, config: RunConfig, texts: Sequence[str], columns: Sequence[str], jobs: int
) -> bool:
    """Both suites on all runs; texts are NAME=PATH of sets that are not fetched."""
    runs = named_runs(config, jobs)
    arm = str(runs.pop("arm-1"))
    models, out = [str(path) for path in runs.values()], ROOT.parent / "perplexities"
    given = [part for text in texts for part in ("--from", text)]
    given += [part for column in columns for part in ("--column", column)]
    command = ["evaluate", *models, "--suite", "zero-shot", *given, "--skip-missing"]
    is_whole = _run([*command, "--out", str(out / "zero-shot")])
    if is_whole:
        _keep(out / "zero-shot/zero_shot.json", f"zero-shot-{setting}")
    for scorer in SCORERS:
        folder = out / f"generative-{scorer}"
        command = ["evaluate", *models, "--suite", "generative", "--out", str(folder)]
        command += ["--scorer", arm if scorer == "arm" else scorer]
        command += ["--num", str(SAMPLES[scorer]), "--seeds", str(SAMPLING_SEEDS[scorer])]
        if not _run([*command, "--nfe", *map(str, NFE)]):
            is_whole = False
            continue
        _keep(folder / "generative.json", f"generative-{setting}-{scorer}")
    return is_whole


def _run(command: list[str]) -> bool:
    print("==", *command, flush=True)
    return run_command(command) == 0


def _keep(source: Path, name: str) -> None:
    """The numbers, rounded, without paths of a machine."""
    numbers = _without_paths(without_nan(json.loads(source.read_text(encoding="utf-8"))))
    text = json.dumps(rounded(numbers), separators=(",", ":"), allow_nan=False)
    (RESULTS / f"{name}.json").write_text(text + "\n", encoding="utf-8")


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

    def cells(self, paper: tuple[float, float] | None) -> list[str]:
        """Means, bell over base with its interval, the paper's ratio, and the verdict."""
        ratio = ratio_over_seeds([b / a for a, b in zip(self.base, self.bell, strict=True)])
        low, high = ratio["low"], ratio["high"]
        assert low is not None, "an interval needs three seeds"
        claim = 0 if paper is None else round(paper[1] / paper[0] - 1, 2)
        found = -1 if high < 1 else 1 if low > 1 else 0
        verdict = UNTOLD
        if found and claim:
            verdict = AGREES if found * claim > 0 else DISAGREES
        if not claim:
            verdict = "the paper sees no difference"
        means = [f"{sum(some) / len(some):.2f}" for some in (self.base, self.bell)]
        told = "-" if paper is None else f"{paper[1] / paper[0]:.3f}"
        spread = f"{ratio['mean']:.3f} ({low:.3f} to {high:.3f})"
        return [*means, spread, told, f"**{verdict}**"]


def perplexity_section(setting: str = "wikitext2") -> list[str]:
    """Tables 7 and 8 beside what was measured."""
    lines = [*INTRODUCTION.splitlines(), ""]
    lines += _zero_shot(_load(f"zero-shot-{setting}"))
    for scorer, title in SCORERS.items():
        numbers = _load(f"generative-{setting}-{scorer}")
        lines += _generative(numbers, title)
        if numbers is not None:
            name = f"generative-{setting}-{scorer}"
            save_figure(quality_diversity_figure(numbers), RESULTS.parent / "figures" / name)
            lines += [f"![quality against diversity under {title}](figures/{name}.png)", ""]
    return lines


INTRODUCTION = """## Perplexities (Sec. 5.2, C.3)

Preset `small`, 2000 steps on WikiText-2, three paired training seeds: the claim is that bell's
perplexity is below base's at the same step, so bell/base below 1 (but for arXiv, where the
paper's two are within 1 %). In brackets the 95 % t-interval
over seeds. The paper's models were trained on OpenWebText for 1M steps, and a perplexity is per
token of a model's own tokenizer, so only ratios can be set side by side. WikiText-2 is the runs'
own text here. Sets in local files may be samples of the published ones."""


def _load(name: str) -> dict[str, Any] | None:
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def _zero_shot(numbers: Mapping[str, Any] | None) -> list[str]:
    lines = ["### Table 7: zero-shot perplexity", ""]
    if numbers is None:
        return [*lines, "not run yet", ""]
    rows = []
    for text in numbers["sets"]:
        if text["missing"]:
            rows.append([text["title"], "not here", *[""] * 6])
            continue
        found = text["results"]
        by_kind = {
            kind: [found[f"{kind}-{seed + 1}"] for seed in range(SEEDS)]
            for kind in ("base", "bell")
        }
        pairs = Pairs(*([one["perplexity"] for one in some] for some in by_kind.values()))
        errors = [one for some in by_kind.values() for one in some]
        se = max(one["perplexity_se"] / one["perplexity"] for one in errors)
        masks = max(one["seed_deviation"] / one["perplexity"] for one in errors)
        cells = pairs.cells(PAPER_ZERO_SHOT.get(text["name"]))
        rows.append([text["title"], *cells[:3], f"{se:.1%}", f"{masks:.1%}", *cells[3:]])
    columns = ["set", "base", "bell", "bell/base", "error, text", "deviation, masks"]
    return [*lines, Table("", [*columns, "paper's ratio", "verdict"], rows).markdown()]


def _generative(numbers: Mapping[str, Any] | None, title: str) -> list[str]:
    lines = [f"### Table 8: generative perplexity under {title}", ""]
    if numbers is None:
        return [*lines, "not run yet", ""]
    by_name = {run["name"]: run["settings"] for run in numbers["runs"]}
    rows = []
    for place, nfe in enumerate(NFE):
        found = {
            kind: [by_name[f"{kind}-{seed + 1}"][place]["mean"] for seed in range(SEEDS)]
            for kind in ("base", "bell")
        }
        pairs = Pairs(*([one["perplexity"] for one in some] for some in found.values()))
        entropy = [f"{sum(o['entropy'] for o in some) / SEEDS:.2f}" for some in found.values()]
        cost = [
            sum(nats_per_sample(by_name[f"{kind}-{n + 1}"][place]) or 0.0 for n in range(SEEDS))
            for kind in found
        ]
        calls = f"{sum(one['calls'] for one in found['bell']) / SEEDS:.0f}"
        cells = pairs.cells(PAPER_GENERATIVE[nfe])
        both = " / ".join(f"{value / SEEDS:.1f}" for value in cost)
        rows.append([str(nfe), calls, *cells[:2], " / ".join(entropy), both, *cells[2:]])
    columns = ["NFE", "calls", "base", "bell", "entropy, base / bell", "nats per sample"]
    columns += ["bell/base"]
    lines += [Table("", [*columns, "paper's ratio", "verdict"], rows).markdown()]
    (real,) = [text["settings"][0]["mean"] for text in numbers["real_text"]]
    lines += [
        f"{numbers['num']} samples of {numbers['runs'][0]['tokens']} tokens for each of "
        f"{len(by_name['base-1'][0]['cells'])} sampling seeds and three training seeds, ancestral, "
        f"float64 noise. Validation text itself: {real['perplexity']:.1f}, entropy "
        f"{real['entropy']:.2f}. The perplexity is per token of the scorer; nats per sample "
        "do not depend on how the scorer cuts the text.",
        "",
    ]
    return lines
