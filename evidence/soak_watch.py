"""What the soak looks at while it trains: memory, files and threads of its processes, from /proc.

Linux only. A worker's life ends with a kill, so growth is told life by life: a line is fitted to
the resident memory of the longest, and the peaks of early and late lives are compared.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MIB = 2**20
AGENT, RANKS = "agent", ("rank 0", "rank 1")


def children(pid: int) -> list[int]:
    """Processes started by this one that are still there."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and _parent(entry) == pid:
                found.append(int(entry.name))
        except (OSError, IndexError, ValueError):
            continue  # gone meanwhile
    return found


def _parent(process: Path) -> int:
    state, parent = (process / "stat").read_text().rsplit(")", 1)[1].split()[:2]
    return -1 if state == "Z" else int(parent)


def rank_of(pid: int) -> int | None:
    """The rank torchrun gave to a process; None for others and for one that is just starting."""
    try:
        entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return None
    found = [entry[5:] for entry in entries if entry.startswith(b"RANK=")]
    return int(found[0]) if found and found[0].isdigit() else None


def read_process(pid: int) -> dict[str, int] | None:
    """Resident bytes (all, and those of no file), threads and open files; None if it is gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        files = len(os.listdir(f"/proc/{pid}/fd"))
    except OSError:
        return None
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    if "VmRSS" not in fields:  # it has ended and waits to be noticed
        return None
    rss = int(fields["VmRSS"].split()[0]) * 1024
    anonymous = int(fields.get("RssAnon", fields["VmRSS"]).split()[0]) * 1024
    threads = int(fields["Threads"])
    return {"rss": rss, "anonymous": anonymous, "threads": threads, "files": files}


def read_folder(folder: Path) -> dict[str, int]:
    """Bytes and files of a run folder, and what interrupted saves and removals left there."""
    size = count = 0
    for where, _, names in os.walk(folder):
        for name in names:
            try:
                size += os.stat(os.path.join(where, name)).st_size
                count += 1
            except OSError:
                continue  # removed meanwhile
    return {"bytes": size, "count": count, "leftovers": len(leftovers(folder))}


def leftovers(folder: Path) -> list[str]:
    """Half-written or half-removed checkpoints (one is there during a save)."""
    try:
        names = os.listdir(folder / "checkpoints")
    except OSError:
        return []
    return [name for name in names if name.startswith((".writing-", ".removing-"))]


class Watcher(threading.Thread):
    """Writes a line about all processes every few seconds."""

    def __init__(
        self, path: Path, look: Callable[[], Mapping[str, Any]], *, every: float, since: float
    ) -> None:
        super().__init__(daemon=True)
        self.path, self.look, self.every, self.since = path, look, every, since
        self._is_over = threading.Event()

    def run(self) -> None:
        """Until ``close``."""
        with self.path.open("w", encoding="utf-8") as stream:
            while not self._is_over.wait(self.every):
                row = {"time": time.monotonic() - self.since, **self.look()}
                stream.write(json.dumps(row) + "\n")
                stream.flush()

    def close(self) -> None:
        """Stop looking."""
        self._is_over.set()
        self.join()


@dataclass(frozen=True)
class Life:
    """One process from its first sample to its last."""

    role: str
    pid: int
    times: tuple[float, ...]
    """Seconds since the soak began."""
    rss: tuple[float, ...]
    """MiB."""
    files: tuple[int, ...]
    threads: tuple[int, ...]

    @property
    def seconds(self) -> float:
        """From the first sample to the last."""
        return self.times[-1] - self.times[0]


def lives(samples: Iterable[Mapping[str, Any]]) -> list[Life]:
    """Samples by process, in the order in which the processes appeared.

    The last sample of a process is left out: it may have been ending.
    """
    rows: dict[tuple[str, int], list[tuple[float, Mapping[str, Any]]]] = {}
    for sample in samples:
        for process in sample["processes"]:
            rows.setdefault((process["role"], process["pid"]), []).append((sample["time"], process))
    return [
        Life(
            role,
            pid,
            tuple(time for time, _ in found),
            tuple(process["rss"] / MIB for _, process in found),
            tuple(process["files"] for _, process in found),
            tuple(process["threads"] for _, process in found),
        )
        for (role, pid), seen in rows.items()
        for found in [seen[:-1] or seen]
    ]


def slope(times: Sequence[float], values: Sequence[float]) -> tuple[float, float]:
    """Least squares: growth per second, and its standard error if residuals were independent."""
    number = len(times)
    if number < 3:
        return math.nan, math.nan
    middle, level = statistics.fmean(times), statistics.fmean(values)
    spread = sum((t - middle) ** 2 for t in times)
    if spread == 0:
        return math.nan, math.nan
    rate = sum((t - middle) * (v - level) for t, v in zip(times, values)) / spread
    left = sum((v - level - rate * (t - middle)) ** 2 for t, v in zip(times, values))
    return rate, math.sqrt(left / (number - 2) / spread)


def growth(life: Life, warm_up: float) -> dict[str, Any]:
    """MiB per hour after the first seconds of a life, and where it began and ended."""
    kept = [(t, v) for t, v in zip(life.times, life.rss) if t >= life.times[0] + warm_up]
    rate, error = slope([t for t, _ in kept], [v for _, v in kept])
    return {
        "role": life.role,
        "minutes": life.seconds / 60,
        "rss_first": kept[0][1] if kept else life.rss[0],
        "rss_last": life.rss[-1],
        "rss_peak": max(life.rss),
        "rate": rate * 3600,
        "rate_error": error * 3600,
        "files": [life.files[len(life.files) // 2], life.files[-1], max(life.files)],
        "threads": [life.threads[len(life.threads) // 2], life.threads[-1], max(life.threads)],
    }


def peaks(found: Sequence[Life], least: float) -> dict[str, Any]:
    """Peaks of lives of at least so many seconds: mean and maximum of the first and last third."""
    long_enough = [life for life in found if life.seconds >= least]
    third = len(long_enough) // 3
    if third == 0:
        return {"lives": len(long_enough), "first": None, "last": None}
    parts = {"first": long_enough[:third], "last": long_enough[-third:]}
    told = {name: [max(life.rss) for life in part] for name, part in parts.items()}
    return {"lives": len(long_enough)} | {
        name: {"mean": statistics.fmean(values), "max": max(values)}
        for name, values in told.items()
    }


def memory(samples: Sequence[Mapping[str, Any]], *, warm_up: float, least: float) -> dict[str, Any]:
    """The longest life of every role, and the peaks of all."""
    found = lives(samples)
    result: dict[str, Any] = {}
    for role in (*RANKS, AGENT):
        mine = [life for life in found if life.role == role]
        if mine:
            longest = max(mine, key=lambda life: life.seconds)
            result[role] = {
                "lives": len(mine),
                "longest": growth(longest, min(warm_up, longest.seconds / 3)),
                "peaks": peaks(mine, least),
            }
    return result


def series(samples: Sequence[Mapping[str, Any]], most: int = 400) -> dict[str, list[Any]]:
    """Few enough points for a figure: MiB by role (None while there is no such process)."""
    every = math.ceil(len(samples) / most) if samples else 1
    kept = samples[::every]
    told: dict[str, list[Any]] = {"minutes": [sample["time"] / 60 for sample in kept]}
    for role in (*RANKS, AGENT):
        told[role] = [
            next((p["rss"] / MIB for p in sample["processes"] if p["role"] == role), None)
            for sample in kept
        ]
    told["step"] = [sample["step"] for sample in kept]
    told["folder"] = [sample["folder"]["bytes"] / MIB for sample in kept]
    return told
