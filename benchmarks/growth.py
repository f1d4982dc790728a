"""How time and memory of a training step grow with batch, length, vocabulary and depth.

Each row changes one thing of the small size; ours and the plain implementation take turns.

usage: python benchmarks/growth.py [--rounds N]
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator
from dataclasses import replace

import torch
from subjects import SMALL, Size, take_turns

from bellmask.utils.table import Table


def sizes() -> Iterator[Size]:
    yield SMALL
    for batch in (8, 64):
        yield replace(SMALL, name=f"batch {batch}", batch=batch)
    for length in (32, 512):
        batch = SMALL.tokens // length
        yield replace(SMALL, name=f"length {length}, batch {batch}", length=length, batch=batch)
    for vocabulary in (512, 8192, 32768):
        yield replace(SMALL, name=f"vocabulary {vocabulary}", vocabulary=vocabulary)
    for depth in (2, 8):
        model = replace(SMALL.model, num_layers=depth)
        yield replace(SMALL, name=f"{depth} layers", model=model)


def row(size: Size, rounds: int) -> list[str]:
    subjects = take_turns(["our training", "plain training"], size, rounds)
    times = [statistics.median(subject.seconds) * 1e3 for subject in subjects]
    peaks = [subject.finish() / 2**20 for subject in subjects]
    cells = [f"{value:.0f}" for value in (*times, *peaks)]
    return [size.name, *cells, f"{times[1] / times[0]:.2f}x", f"{peaks[0] / peaks[1]:.0%}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=6)
    rounds = parser.parse_args().rounds
    columns = ["small, but", "ours ms", "plain ms", "ours MiB", "plain MiB", "sooner", "memory"]
    rows = [row(size, rounds) for size in sizes()]
    Table(f"growth of a training step, {torch.get_num_threads()} threads", columns, rows).print()


if __name__ == "__main__":
    main()
