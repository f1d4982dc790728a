"""What the pages of docs/results share: stored numbers, verdicts, figures."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from bellmask.report.figures import save_figure
from bellmask.utils.files import without_nan

DOCS = Path("docs")
AGREES, DISAGREES, INCONCLUSIVE = "agrees", "disagrees", "inconclusive"


@dataclass(frozen=True)
class Verdict:
    """What was measured says about a claim."""

    word: str
    measured: str


@dataclass(frozen=True)
class Judged:
    """A row of the verdict table."""

    claim: str
    paper: str
    verdict: Verdict

    def cells(self) -> list[str]:
        return [self.claim, self.paper, self.verdict.measured, self.verdict.word]


def worst(words: Iterable[str]) -> str:
    """A claim on several measurements is as good as the worst of them."""
    found = set(words)
    return next(word for word in (DISAGREES, INCONCLUSIVE, AGREES) if word in found)


def outside_zero(low: float | None, high: float | None) -> str:
    """Agrees when the whole interval is above zero, disagrees when it is below."""
    if low is None or high is None or low <= 0 <= high:
        return INCONCLUSIVE
    return AGREES if low > 0 else DISAGREES


def picture(alt: str, name: str, draw: Callable[[], Figure]) -> list[str]:
    """Draw docs/figures/NAME and show it on a page of docs/results."""
    save(draw, DOCS / "figures" / name)
    return [f"![{alt}](../figures/{name}.png)", ""]


def save(draw: Callable[[], Figure], path: Path) -> None:
    """Apart, so that tests can leave the drawing out."""
    path.parent.mkdir(parents=True, exist_ok=True)
    save_figure(draw(), path)


def read_result(name: str) -> dict[str, Any] | None:
    """What was measured, or None."""
    path = DOCS / "results" / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def read_comparisons(setting: str) -> dict[str, dict[str, Any]]:
    """The comparisons on one text, by name; a results.json as ``compare`` wrote it is trimmed."""
    found = {}
    for path in sorted((DOCS / "results").glob(f"{setting}-*.json")):
        results = json.loads(path.read_text(encoding="utf-8"))
        name = path.stem.removeprefix(f"{setting}-")
        if "variants" in results:
            found[name] = trimmed(results) if "options" in results else results
    return found


def write_result(name: str, content: Mapping[str, Any]) -> None:
    """One small file for the pages."""
    path = DOCS / "results" / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    numbers = rounded(without_nan(dict(content)))
    text = json.dumps(numbers, separators=(",", ":"), allow_nan=False)
    path.write_text(text + "\n", encoding="utf-8")


def rounded(value: Any) -> Any:
    """Six significant digits."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    return [rounded(item) for item in value] if isinstance(value, list | tuple) else value


def trimmed(results: dict[str, Any]) -> dict[str, Any]:
    """What the pages need of a comparison: no samples, no densities, no paths of a machine."""
    kept = {key: value for key, value in results.items() if key != "options"}
    model, batch = results["options"]["model"], results["options"]["train"]["batch_size"]
    variants = {}
    for name, variant in results["variants"].items():
        law = {k: variant["law"][k] for k in ("name", "effective_sample_share")}
        variants[name] = {**variant, "law": law, "samples": []}
    return rounded({**kept, "model": model, "batch_size": batch, "variants": variants})
