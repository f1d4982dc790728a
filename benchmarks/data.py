"""Preparing data: megabytes of text per second, and peak memory against corpus size.

Each measurement is a process of its own with one thread; the text is WikiText-2, repeated.

usage: python benchmarks/data.py [--megabytes 32] [--large 128]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from bellmask.config.options import DataOptions
from bellmask.data.corpora import open_corpus
from bellmask.data.readers import cache_folder
from bellmask.utils.table import Table

TOKENIZERS = ["bytes", "bpe:2048", "gpt2", "bert-base-uncased"]
CHILD = """
import json, resource, sys, time
from bellmask.data.prepare import make_tokenizer, prepare
from bellmask.config.options import DataOptions

options = DataOptions(
    train=sys.argv[1], tokenizer=sys.argv[2], cache=sys.argv[3], documents=sys.argv[4]
)
tokenizer = make_tokenizer(options)
started = time.perf_counter()
blocks = prepare(options, tokenizer, "train")
seconds = time.perf_counter() - started
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
print(json.dumps({"seconds": seconds, "peak": peak, "blocks": len(blocks)}))
"""


def write_text(path: Path, megabytes: int) -> None:
    """WikiText-2 repeated, each pass with a different suffix so that no two lines are the same."""
    source, _ = open_corpus(DataOptions(), "train", cache_folder())
    lines = "".join(piece.text for piece in source.read()).splitlines()
    with path.open("w", encoding="utf-8") as stream:
        written, turn = 0, 0
        while written < megabytes * 1_000_000:
            line = lines[turn % len(lines)]
            if line.strip():
                written += stream.write(f"{line.strip()} {turn // len(lines)}\n")
            turn += 1


def measure(path: Path, tokenizer: str, rule: str, wheels: Path) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as cache:
        (Path(cache) / "wheels").symlink_to(wheels)
        done = subprocess.run(
            [sys.executable, "-c", CHILD, str(path), tokenizer, cache, rule],
            capture_output=True,
            text=True,
            env={**os.environ, "RAYON_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
        )
    if done.returncode:
        sys.exit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=32, help="text for each tokenizer")
    parser.add_argument("--large", type=int, default=128, help="text for the memory comparison")
    args = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        wheels = cache_folder() / "wheels"
        for size, tokenizers in ((args.megabytes, TOKENIZERS), (args.large, ["gpt2"])):
            path = Path(folder) / f"{size}.txt"
            write_text(path, size)
            for tokenizer in tokenizers:
                found = measure(path, tokenizer, "line", wheels)
                speed = f"{size / found['seconds']:.1f}"
                rows.append([tokenizer, str(size), speed, f"{found['peak']:.0f}"])
    columns = ["tokenizer", "text (MB)", "MB/s, one thread", "peak memory (MB)"]
    Table("preparing plain text, a document per line", columns, rows).print()


if __name__ == "__main__":
    main()
