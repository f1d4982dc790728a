"""A finished run as a comparison sees it: its curve, its per-block values, its settings."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bellmask.compare.speedup import Floats, detrended_spread
from bellmask.config.config import RunConfig, load_config
from bellmask.evaluate.likelihood import binned_curve
from bellmask.evaluate.result import Likelihood
from bellmask.storage.run_folder import read_description, read_metrics
from bellmask.utils import files as outside
from bellmask.utils.errors import UserError

CONTEXT_BINS = 8


@dataclass(frozen=True)
class RunRecord:
    """What one run folder says."""

    folder: Path
    config: RunConfig
    description: dict[str, Any]
    steps: list[int]
    nll: list[float]
    nll_se: list[float | None]
    seconds: list[float]
    """Training time at each evaluation; evaluation and saving are not in it."""
    block_nll_EB: Floats
    last: Likelihood
    train_lines: list[dict[str, Any]]
    diverged_at: int | None = None
    """The first step whose NLL is not finite: such a run can lose a grid and do nothing else."""

    @property
    def curve(self) -> tuple[list[float], list[float], list[float]]:
        """(steps, nll, seconds), for the speed-up."""
        return [float(step) for step in self.steps], self.nll, self.seconds

    @property
    def tokens_per_second(self) -> float:
        """Median over the training lines."""
        return float(np.median([line["tokens_per_second"] for line in self.train_lines]))

    def summary(self) -> dict[str, Any]:
        """The numbers of results.json."""
        norms = [line["gradient_norm"] for line in self.train_lines]
        norms = [math.log(max(norm, 1e-30)) for norm in norms if norm is not None]
        return {
            "run": self.folder.name,
            "seed": self.config.train.seed,
            "steps": self.steps,
            "nll": self.nll,
            "nll_se": self.nll_se,
            "seconds": self.seconds,
            "bits_per_byte": self.last.summary()["bits_per_byte"],
            "tokens_per_second": self.tokens_per_second,
            "nll_by_context": [
                {"low": p.low, "high": p.high, "nll": p.nll, "se": p.standard_error}
                for p in binned_curve(self.last, CONTEXT_BINS)
            ],
            "nll_spread": detrended_spread(self.nll),
            "log_gradient_norm_spread": detrended_spread(norms),
            "largest_weight": max(line["largest_weight"] for line in self.train_lines),
            "clipped_share": float(np.mean([line["clipped_share"] for line in self.train_lines])),
        }

    def samples(self, limit: int = 2) -> list[str]:
        """The last samples that the run wrote."""
        files = sorted((self.folder / "samples").glob("step-*.txt"))
        text = files[-1].read_text(encoding="utf-8", errors="replace") if files else ""
        return [part.strip("\n") for part in text.split("\n\n--------\n\n")][:limit] if text else []


def read_run(folder: Path) -> RunRecord:
    """Read a run folder; a UserError says what is missing."""
    if not folder.is_dir():
        raise UserError(f"there is no folder {folder}")
    if not (folder / "config.json").exists():
        raise UserError(f"{folder} is not a run folder: it has no config.json")
    config = load_config(folder / "config.json")
    lines = _whole_lines(folder / "metrics.jsonl")
    checks = [line for line in lines if line["kind"] == "validation"]
    if not checks or checks[-1]["step"] != config.train.steps:
        raise UserError(
            f"{folder} has no validation at its last step {config.train.steps}; finish it with "
            f"bellmask train {folder} --out {folder} --resume auto"
        )
    if not any(line["kind"] == "train" for line in lines):
        raise UserError(f"{folder / 'metrics.jsonl'} has no line of training metrics")
    block_nll, diverged = [], []
    for line in checks:
        last = _load(folder, line["step"])
        block_nll.append(last.block_nll)
        if not (outside.is_finite(line["nll"]) and last.is_finite):
            diverged.append(line["step"])
    if len({len(values) for values in block_nll}) > 1:
        raise UserError(f"{folder} was validated on different blocks; it cannot be compared")
    return RunRecord(
        folder,
        config,
        read_description(folder),
        [line["step"] for line in checks],
        [math.nan if line["step"] in diverged else line["nll"] for line in checks],
        [line["nll_se"] for line in checks],
        [line["seconds"] for line in checks],
        np.stack(block_nll),
        last,
        [line for line in lines if line["kind"] == "train"],
        diverged[0] if diverged else None,
    )


_NUMBERS = {
    "validation": ("seconds",),
    "train": ("tokens_per_second", "largest_weight", "clipped_share"),
}
"""What is read of each kind of line."""
_MAY_BE_ABSENT = {"validation": ("nll", "nll_se"), "train": ("gradient_norm",)}
"""No NLL of a model that diverged, no error of a single block, no norm of skipped steps."""


def _whole_lines(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics.jsonl; UserError where one lacks a number that is read."""
    lines = read_metrics(path)
    for line in lines:
        for name in _NUMBERS.get(line["kind"], ()):
            if not outside.is_finite(line.get(name)):
                raise UserError(f"{path}, step {line['step']}: {name} is no finite number")
        for name in _MAY_BE_ABSENT.get(line["kind"], ()):
            if line.get(name, "") is not None and not outside.is_number(line.get(name)):
                raise UserError(f"{path}, step {line['step']}: {name} is no number")
    return lines


def _load(folder: Path, step: int) -> Likelihood:
    path = folder / "validation" / f"step-{step:09d}.npz"
    try:
        return Likelihood.load(path)
    except FileNotFoundError:
        raise UserError(f"{path} is missing; the run cannot be compared") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path} is damaged: {error}") from None


_MUST_AGREE = {
    "tokenizer_fingerprint": "tokenizers",
    "train_fingerprint": "training texts",
    "valid_fingerprint": "validation texts",
}

_WHERE_TEXT_LIES = ("data.train", "data.from_files", "data.valid", "data.cache")
_SAME_BUDGET = ("train.steps", "train.batch_size", "train.random_length_fraction")


def check_comparable(runs: list[RunRecord]) -> None:
    """Refuse, saying why, runs whose text, tokenizer, evaluation masks or budget differ."""
    first = runs[0]
    masked = [run for run in runs if not run.last.is_causal]
    for other in runs[1:]:
        pair = f"{first.folder} and {other.folder} cannot be compared"
        for key, what in _MUST_AGREE.items():
            if first.description.get(key) != other.description.get(key):
                raise UserError(f"{pair}: their {what} differ")
        same_kind = first if other.last.is_causal else masked[0]
        if not all(one.last.is_paired_with(other.last) for one in (first, same_kind)):
            raise UserError(f"{pair}: their validation blocks or masks differ")
        left, right = first.config.flat(), other.config.flat()
        for option in left:
            is_watched = option.startswith("data.") and option not in _WHERE_TEXT_LIES
            if (is_watched or option in _SAME_BUDGET) and left[option] != right[option]:
                raise UserError(f"{pair}: {option} is {left[option]} and {right[option]}")
        if first.steps != other.steps:
            raise UserError(f"{pair}: they were validated at different steps")


def read_json(path: Path) -> Any:
    """A JSON file, or a UserError."""
    try:
        return outside.read_json(path)
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {path}: {error}") from None
