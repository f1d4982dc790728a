"""Train and measure what docs/results.md is made of: resumable, on two CPU cores.

usage: python evidence/run.py [--parts PART ...] [--jobs N] [--dry-run]
                              [--lm1b GLOB] [--texts NAME=PATH ...] [--columns NAME=COLUMN ...]
                              [--stories MODEL --stories-text FILE] [--chat FILE]
                              [--benchmarks FOLDER]

Writes small files of numbers to docs/results/, then docs/results.md and its pages. Finished runs
are not trained again, and of medium, suites and tuning only what docs/results does not hold yet is
measured: remove its files (and evidence/records) to start from nothing. python evidence/write.py
only writes the pages.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from adapting import measure_adapting
from analyses import analyze_everything
from downstream import measure_downstream
from medium import measure_medium
from perplexities import measure_perplexities
from suites import MEDIUM, WIKITEXT, measure_suites, settings
from tuning import measure_tuning
from write import write_pages

HOURS = {
    "medium": 10.0,
    "suites": 2.0,
    "analyses": 1.5,
    "perplexities": 1.0,
    "adapting": 5.5,
    "downstream": 2.0,
    "tuning": 3.0,
}
"""About how long each part takes on two cores, in the order in which they run.

suites and adapting: half the sum of the runs' `seconds` in docs/results/*.json (two run at a time),
and a third more for validation. medium: sixteen runs of about an hour, as the preset says, and what
is measured of them. tuning: 240 runs of under a minute each, and their probes. analyses,
perplexities and downstream were not timed: their steps at the time per step of the runs of that
size in those files, rounded up for the measurements.
"""


def announce(parts: list[str]) -> None:
    """What will run, and for how long if nothing is trained yet."""
    for part in parts:
        print(f"{part:>12}: about {HOURS[part]:g} h")
    total = sum(HOURS[part] for part in parts)
    print(
        f"{'in all':>12}: about {total:g} h on two cores, less what is trained already", flush=True
    )


def main() -> int:
    """Train, measure, write; 1 when something had to be left out."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--parts", nargs="+", choices=HOURS, default=list(HOURS))
    parser.add_argument("--dry-run", action="store_true", help="only print what would run")
    parser.add_argument("--jobs", type=int, default=2, help="runs trained in parallel")
    parser.add_argument("--lm1b", help="local LM1B files for tuning, instead of the hub")
    parser.add_argument(
        "--texts", nargs="+", default=[], metavar="NAME=PATH", help="zero-shot sets in local files"
    )
    parser.add_argument(
        "--columns", nargs="+", default=[], metavar="NAME=COLUMN", help="their columns of text"
    )
    parser.add_argument("--stories", help="folder of stories260K, a small pretrained causal LM")
    parser.add_argument("--stories-text", help="stories, separated by <|endoftext|>")
    parser.add_argument("--chat", help="conversations as ShareGPT has them, for answers (App. E)")
    parser.add_argument("--benchmarks", help="folder with LAMBADA's and ROCStories' files")
    given = parser.parse_args()
    parts = [part for part in HOURS if part in given.parts]
    announce(parts)
    if given.dry_run:
        return 0
    configs, more = settings(), (given.texts, given.columns, given.jobs)
    run = {
        "medium": lambda: measure_medium(configs[MEDIUM], *more),
        "suites": lambda: measure_suites({WIKITEXT: configs[WIKITEXT]}, given.jobs),
        "analyses": lambda: analyze_everything(configs[WIKITEXT], given.jobs),
        "perplexities": lambda: measure_perplexities(configs[WIKITEXT], *more),
        "adapting": lambda: measure_adapting(given.stories, given.stories_text, given.chat),
        "downstream": lambda: measure_downstream(
            given.stories, given.stories_text, given.benchmarks
        ),
        "tuning": lambda: measure_tuning(given.lm1b, given.jobs),
    }
    is_complete = True
    for part in parts:
        is_complete &= run[part]()
    write_pages()
    return 0 if is_complete else 1


if __name__ == "__main__":
    sys.exit(main())
