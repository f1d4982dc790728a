"""Validation curves of several runs: one table, one plot.

``python -m bellmask.report.curves RUN RUN ...`` compares the last validations, paired block by
block, with the first run as reference. Reads run folders only.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bellmask.errors import UserError
from bellmask.evaluate.result import Likelihood
from bellmask.records import read_metrics
from bellmask.report.console import print_table
from bellmask.report.plots import plot_nll_curves


@dataclass(frozen=True)
class Curve:
    """A run's validations."""

    name: str
    steps: list[int]
    nll: list[float]
    nll_se: list[float]
    last: Likelihood


def read_curve(folder: Path) -> Curve:
    """The validations in a run folder."""
    lines = [r for r in read_metrics(folder / "metrics.jsonl") if r["kind"] == "validation"]
    if not lines:
        raise UserError(f"{folder} has no validation in its metrics.jsonl")
    path = folder / "validation" / f"step-{lines[-1]['step']:09d}.npz"
    if not path.exists():
        raise UserError(f"{path} is missing; the last validation cannot be compared")
    last = Likelihood.load(path)
    return Curve(
        folder.name,
        [r["step"] for r in lines],
        [r["nll"] for r in lines],
        [r["nll_se"] for r in lines],
        last,
    )


def compare(folders: Sequence[Path], out: Path) -> None:
    """Print the table and write the plot; the first run is the reference."""
    curves = [read_curve(folder) for folder in folders]
    rows = []
    for curve in curves:
        gap, error = curve.last.difference(curves[0].last)
        rows.append(
            [
                curve.name,
                str(curve.steps[-1]),
                f"{curve.nll[-1]:.4f} ± {curve.nll_se[-1]:.4f}",
                f"{curve.last.bits_per_byte:.4f}",
                "reference" if curve is curves[0] else f"{gap:+.4f} ± {error:.4f}",
            ]
        )
    columns = ["run", "step", "NLL (nats/token)", "bits/byte", "paired difference"]
    print_table("validation NELBO ± standard error, same blocks and masks", columns, rows)
    paths = plot_nll_curves([(c.name, c.steps, c.nll) for c in curves], out)
    print(f"written: {', '.join(map(str, paths))}")


def main(args: Sequence[str]) -> int:
    """Command line."""
    if not args:
        print("usage: python -m bellmask.report.curves RUN [RUN ...]", file=sys.stderr)
        return 2
    folders = [Path(arg) for arg in args]
    try:
        compare(folders, folders[0].parent / "curves")
    except (UserError, ValueError, OSError, KeyError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
