"""Train what docs/results.md is made of: resumable, a few minutes a run on two CPU cores.

usage: python evidence/run.py [--lm1b GLOB] [--texts NAME=PATH ...] [--columns NAME=COLUMN ...]
                              [--stories MODEL --stories-text FILE] [--benchmarks FOLDER]
                              [--settings NAME ...] [--jobs N] [--only PART]

Writes one small results file per comparison to docs/results/ and then rebuilds docs/results.md.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from bellmask.compare.compare import compare
from bellmask.compare.execute import TrainingOptions
from bellmask.compare.variants import SUITES, parse_variants
from bellmask.config.config import RunConfig
from bellmask.config.presets import small
from bellmask.utils.errors import UserError

sys.path.insert(0, str(Path(__file__).parent))
from adapting import measure_adapting
from analyses import analyze_everything, trimmed
from downstream import measure_downstream
from perplexities import measure_perplexities
from write import RESULTS, write_document

ROOT = Path("runs/evidence")
HEADLINE = "headline"


def settings(lm1b: str | None) -> dict[str, RunConfig]:
    """The texts: WikiText-2, and LM1B sentences packed and one per row."""
    wikitext = small()
    packed = replace(wikitext, data=replace(wikitext.data, train="lm1b", from_files=lm1b))
    unpacked = replace(packed, data=replace(packed.data, packing="unpacked"))
    return {"wikitext2": wikitext, "lm1b": packed, "lm1b_unpacked": unpacked}


def comparisons() -> Iterator[tuple[str, list[str], int]]:
    """(name, variants, seeds): the headline first, then the suites."""
    yield HEADLINE, ["base", "bell"], 3
    yield "arm", ["base", "arm"], 1
    for name in ("families", "alternatives", "mean", "variance", "dirac", "laplace"):
        yield name, SUITES[name], 1
    for name in ("optimizers", "stratification", "gaussian"):
        yield name, SUITES[name], 1


def compare_everything(chosen: dict[str, RunConfig], jobs: int) -> bool:
    """All comparisons on the given texts; False when one had to be left out."""
    is_whole = True
    for name, variants, seeds in comparisons():
        for setting, config in chosen.items():
            print(f"== {setting}: {name}", flush=True)
            try:
                results = compare(
                    config,
                    parse_variants(variants),
                    TrainingOptions(seeds=seeds, jobs=jobs, runs=str(ROOT / "runs")),
                    reference=variants[0],
                    out=ROOT / f"{setting}-{name}",
                )
            except UserError as error:
                print(f"left out: {error}", file=sys.stderr)
                is_whole = False
                continue
            text = json.dumps(trimmed(results), separators=(",", ":"))
            (RESULTS / f"{setting}-{name}.json").write_text(text + "\n", encoding="utf-8")
    return is_whole


def main() -> int:
    """Train, collect, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lm1b", help="local LM1B files (path or quoted glob) instead of the hub")
    names = ["wikitext2", "lm1b", "lm1b_unpacked"]
    parser.add_argument(
        "--texts", nargs="+", default=[], metavar="NAME=PATH", help="zero-shot sets in local files"
    )
    parser.add_argument(
        "--columns", nargs="+", default=[], metavar="NAME=COLUMN", help="their columns of text"
    )
    parser.add_argument("--settings", nargs="+", choices=names, default=names)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--stories", help="folder of stories260K, a small pretrained causal LM")
    parser.add_argument("--stories-text", help="stories, separated by <|endoftext|>")
    parser.add_argument("--benchmarks", help="folder with LAMBADA's and ROCStories' files")
    parts = ["analyses", "perplexities", "comparisons", "adapting", "downstream", "document"]
    parser.add_argument("--only", choices=parts, help="one part instead of all")
    given = parser.parse_args()
    chosen = {k: v for k, v in settings(given.lm1b).items() if k in given.settings}
    RESULTS.mkdir(parents=True, exist_ok=True)
    is_whole = True
    if given.only in (None, "analyses"):
        is_whole &= analyze_everything(chosen, given.jobs)
    if given.only in (None, "perplexities") and "wikitext2" in chosen:
        is_whole &= measure_perplexities(
            "wikitext2", chosen["wikitext2"], given.texts, given.columns, given.jobs
        )
    if given.only in (None, "comparisons"):
        is_whole &= compare_everything(chosen, given.jobs)
    if given.only in (None, "adapting"):
        is_whole &= measure_adapting(given.stories, given.stories_text)
    if given.only in (None, "downstream"):
        is_whole &= measure_downstream(given.stories, given.stories_text, given.benchmarks)
    write_document()
    return 0 if is_whole else 1


if __name__ == "__main__":
    sys.exit(main())
