"""Do two checkouts of the project give the same numbers, exactly?

    python tools/same_numbers.py OLD_CHECKOUT NEW_CHECKOUT [--only PATTERN] [--keep DIR]

Trains, evaluates, samples and scores the runs of ``tests/frozen/cases.py`` with both, side by side
on this machine, one thread each, and reports every value that differs: losses, likelihoods,
samples, scores, options, and digests of all weights, optimizer states and values per block. Each
checkout runs its own list of cases, so that a renamed option is no difference. Both
start from the stored runs of the new checkout. Needs an environment with
the project's dependencies (``make setup``); exit code 1 when something differs.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

MOST_SHOWN = 12
"""Differences of one case on the screen."""


def start(checkout: Path, zoo: Path, out: Path, only: str) -> subprocess.Popen[bytes]:
    """All results of a checkout, into a file."""
    cases = checkout / "tests" / "frozen" / "cases.py"
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(checkout), str(cases.parent)]),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "BELLMASK_FROZEN_ZOO": str(zoo),
    }
    command = [sys.executable, str(cases), "results", str(out), "--all", "--only", only]
    with out.with_suffix(".log").open("wb") as log:
        return subprocess.Popen(command, cwd=out.parent, env=environment, stdout=log, stderr=log)


def differences(old: dict[str, Any], new: dict[str, Any]) -> Iterator[str]:
    """One line for each value that is not the same in both; digests of tensors come last."""

    def order(place: str) -> tuple[bool, str]:
        return ".safetensors:" in place or ".npz:" in place, place

    for place in sorted(old.keys() | new.keys(), key=order):
        values = [side.get(place, "nothing") for side in (old, new)]
        if json.dumps(values[0]) != json.dumps(values[1]):  # NaN equals NaN here
            yield f"{place}: {values[0]!r:.60} -> {values[1]!r:.60}"


def report(old: dict[str, Any], new: dict[str, Any]) -> bool:
    """Print what differs; True when nothing does."""
    num_different = 0
    for name in dict.fromkeys([*old, *new]):
        before, after = old.get(name, {}), new.get(name, {})
        lines = list(differences(before, after))
        if not before or not after:
            lines.append("it has no values in one of them")
        lines += [f"failed: {side['failed']}" for side in (before, after) if "failed" in side]
        if lines:
            num_different += 1
            print(f"{name}: {len(lines)} differences")
            print("\n".join(f"    {line}" for line in lines[:MOST_SHOWN]))
    count = sum(len(results) for results in new.values())
    print(f"{len(new)} cases, {count} values; {num_different or 'no'} cases with a difference")
    return num_different == 0


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--only", default="*", help="names of cases, with * and ?")
    parser.add_argument("--keep", type=Path, help="folder for both results (old.json, new.json)")
    options = parser.parse_args()
    checkouts = {"old": options.old.resolve(), "new": options.new.resolve()}
    with tempfile.TemporaryDirectory(prefix="same-numbers-") as made:
        folder = Path(made) if options.keep is None else options.keep.resolve()
        folder.mkdir(parents=True, exist_ok=True)
        zoo = checkouts["new"] / "tests" / "frozen" / "zoo"
        running = {
            side: start(checkout, zoo, folder / f"{side}.json", options.only)
            for side, checkout in checkouts.items()
        }
        if failed := [side for side, process in running.items() if process.wait() != 0]:
            sys.exit("\n".join(f"{s}: {(folder / f'{s}.log').read_text()[-2000:]}" for s in failed))
        results = {s: json.loads((folder / f"{s}.json").read_text()) for s in checkouts}
        if not results["new"]:
            parser.error(f"no case is named {options.only}")
        sys.exit(0 if report(results["old"], results["new"]) else 1)


if __name__ == "__main__":
    main()
