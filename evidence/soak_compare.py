"""Is a disturbed run the undisturbed one? Weights, metrics, validations, samples: bit for bit."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open

from bellmask.storage.checkpoint import find_damage
from bellmask.storage.run_folder import TIME_FIELDS, read_metrics

EXACT_FIELDS = ("step", "tokens", "masked_share", "lr")
"""Fields of training lines that are the same with any number of processes."""
EARLY = 100
"""Steps in which losses of one and two processes differ by rounding alone; later it grows."""


def timeless(folder: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl without the fields that depend on the clock."""
    lines = read_metrics(folder / "metrics.jsonl")
    return [{k: v for k, v in line.items() if k not in TIME_FIELDS} for line in lines]


def compare_lines(
    mine: Sequence[Mapping[str, Any]], theirs: Sequence[Mapping[str, Any]]
) -> dict[str, int]:
    """How many lines are lost, too many, or say something else."""
    have = Counter((line["kind"], line["step"]) for line in mine)
    want = Counter((line["kind"], line["step"]) for line in theirs)
    by_key = {(line["kind"], line["step"]): line for line in theirs}
    return {
        "lines": len(mine),
        "lost": (want - have).total(),
        "too_many": (have - want).total(),
        "different": sum(by_key.get((m["kind"], m["step"]), m) != m for m in mine),
        "out_of_order": sum(a["step"] > b["step"] for a, b in itertools.pairwise(mine)),
    }


def pieces(checkpoint: Path) -> dict[str, list[str]]:
    """Tensor name to hashes of its pieces, wherever they are stored."""
    found: dict[str, list[str]] = {}
    for shard in sorted(checkpoint.glob("*.safetensors")):
        with safe_open(shard, framework="pt") as stream:
            for name in stream.keys():  # noqa: SIM118 (it is not a dict)
                tensor = stream.get_tensor(name).contiguous()
                content = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
                mark = f"{tensor.dtype} {tuple(tensor.shape)}".encode()
                found.setdefault(name, []).append(hashlib.sha256(mark + content).hexdigest())
    return {name: sorted(hashes) for name, hashes in found.items()}


def compare_weights(mine: Path, theirs: Path) -> dict[str, int]:
    """Tensors (model, optimizer, average) of two checkpoints, and how many of them differ."""
    a, b = pieces(mine), pieces(theirs)
    differ = sum(a.get(name) != b.get(name) for name in a.keys() | b.keys())
    return {"tensors": len(a), "different": differ}


def compare_files(mine: Path, theirs: Path, pattern: str) -> dict[str, int]:
    """Files of two folders: how many are lost, too many or of other content."""
    a, b = ({p.name: p for p in folder.glob(pattern)} for folder in (mine, theirs))
    both = a.keys() & b.keys()
    return {
        "files": len(a),
        "lost": len(b.keys() - both),
        "too_many": len(a.keys() - both),
        "different": sum(not is_same_content(a[name], b[name]) for name in both),
    }


def is_same_content(a: Path, b: Path) -> bool:
    """The same bytes; of arrays: the same arrays."""
    if a.suffix != ".npz":
        return a.read_bytes() == b.read_bytes()
    with np.load(a) as x, np.load(b) as y:
        return {k: _content(x[k]) for k in x.files} == {k: _content(y[k]) for k in y.files}


def _content(array: np.ndarray) -> tuple[str, tuple[int, ...], bytes]:
    return str(array.dtype), array.shape, array.tobytes()


def compare_runs(mine: Path, theirs: Path, step: int) -> dict[str, Any]:
    """Everything two finished runs of the same options must agree on."""
    place = f"checkpoints/step-{step:09d}"
    return {
        "weights": compare_weights(mine / place, theirs / place),
        "metrics": compare_lines(timeless(mine), timeless(theirs)),
        "validations": compare_files(mine, theirs, "validation/*.npz"),
        "samples": compare_files(mine, theirs, "samples/*.txt"),
        "damaged": sum(find_damage(p) is not None for p in mine.glob("checkpoints/step-*")),
    }


def is_same(comparison: Mapping[str, Any]) -> bool:
    """True when nothing is lost, doubled, damaged or different, and there was something."""
    wrong = ("lost", "too_many", "different", "out_of_order")
    parts = [part for part in comparison.values() if isinstance(part, dict)]
    counts = [comparison["damaged"], *(part.get(name, 0) for part in parts for name in wrong)]
    return not any(counts) and all(next(iter(part.values())) for part in parts)


def compare_with_one_process(mine: Path, single: Path) -> dict[str, Any]:
    """Training lines both have: the same noise exactly, losses as near as rounding leaves them."""
    a, b = (
        {line["step"]: line for line in timeless(folder) if line["kind"] == "train"}
        for folder in (mine, single)
    )
    last = max(b, default=0)  # its last line may be a mean over fewer steps
    both = sorted(step for step in a.keys() & b.keys() if step < last)
    gaps = [abs(a[s]["loss"] - b[s]["loss"]) / abs(b[s]["loss"]) for s in both]
    early = [gap for step, gap in zip(both, gaps) if step <= EARLY]
    return {
        "steps": last,
        "lines": len(both),
        "noise_differs": sum(a[s][k] != b[s][k] for s in both for k in EXACT_FIELDS),
        "largest_gap_early": max(early, default=None),
    }


def read_lines(path: Path) -> list[dict[str, Any]]:
    """All lines of a JSONL file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
