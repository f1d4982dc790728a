"""What is measured while training: metrics.jsonl, trackers, and a progress bar.

``metrics.jsonl`` has one object per line: ``{"kind": "train" | "validation", "step": ...}``. Its
values are a function of the run's options, apart from ``seconds`` and ``tokens_per_second``.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from bellmask.errors import UserError, look_up
from bellmask.train.step import StepResult

TIME_FIELDS = ("seconds", "tokens_per_second")
"""Fields of metrics.jsonl that differ between repetitions of a run."""


@dataclass
class Window:
    """Running sums since the last line of training metrics; part of the checkpoint."""

    steps: int = 0
    loss: float = 0.0
    gradient_norm: float = 0.0
    largest_gradient_norm: float = 0.0
    largest_weight: float = 0.0
    num_clipped: int = 0
    num_masked: int = 0
    num_maskable: int = 0
    seconds: float = 0.0

    def add(self, result: StepResult, seconds: float) -> None:
        """Take in one step."""
        self.steps += 1
        self.loss += result.loss
        self.gradient_norm += result.gradient_norm
        self.largest_gradient_norm = max(self.largest_gradient_norm, result.gradient_norm)
        self.largest_weight = max(self.largest_weight, result.largest_weight)
        self.num_clipped += result.is_clipped
        self.num_masked += result.num_masked
        self.num_maskable += result.num_maskable
        self.seconds += seconds

    def means(self) -> dict[str, float]:
        """One line's values."""
        return {
            "loss": self.loss / self.steps,
            "gradient_norm": self.gradient_norm / self.steps,
            "largest_gradient_norm": self.largest_gradient_norm,
            "largest_weight": self.largest_weight,
            "clipped_share": self.num_clipped / self.steps,
            "masked_share": self.num_masked / max(1, self.num_maskable),
            "tokens_per_second": self.num_maskable / max(self.seconds, 1e-9),
        }

    def state(self) -> dict[str, Any]:
        """For the checkpoint."""
        return asdict(self)


class MetricsFile:
    """metrics.jsonl: append a line; cut back to a step when a run is resumed."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, record: dict[str, Any]) -> None:
        """Append one line."""
        with self.path.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(record) + "\n")

    def sync(self) -> None:
        """Make sure that all lines so far are on disk."""
        if self.path.exists():
            with self.path.open("rb") as stream:
                os.fsync(stream.fileno())

    def cut_back(self, step: int) -> None:
        """Drop lines of later steps, and a last line that a kill left incomplete."""
        kept = [line for line in read_metrics(self.path) if line["step"] <= step]
        scratch = self.path.with_suffix(".writing")
        scratch.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")
        os.replace(scratch, self.path)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All whole lines of a metrics.jsonl, in order; none if the file is absent."""
    if not path.exists():
        return []
    records = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            continue  # the line that was being written when the process was killed
    return records


class Tracker(Protocol):
    """Somewhere else that metrics go."""

    def log(self, values: dict[str, float], step: int) -> None:
        """Send values."""
        ...

    def close(self) -> None:
        """Finish."""
        ...


def _need(package: str, error: ImportError) -> UserError:
    return UserError(
        f"tracker {package} needs its package: pip install 'bellmask[{package}]' ({error})"
    )


class TensorBoardTracker:
    """Event files in ``<run>/tensorboard``."""

    def __init__(self, folder: Path, project: str, config: dict[str, Any]) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise _need("tensorboard", error) from None
        self._writer = SummaryWriter(str(folder / "tensorboard"))

    def log(self, values: dict[str, float], step: int) -> None:
        """One scalar each."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Flush."""
        self._writer.close()


class WandbTracker:
    """A wandb run named after the folder, continued on resume."""

    def __init__(self, folder: Path, project: str, config: dict[str, Any]) -> None:
        try:
            import wandb
        except ImportError as error:
            raise _need("wandb", error) from None
        self._run = wandb.init(
            project=project, name=folder.name, id=folder.name, resume="allow", config=config
        )

    def log(self, values: dict[str, float], step: int) -> None:
        """One record."""
        self._run.log(values, step=step)

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()


class TrackioTracker:
    """A trackio run named after the folder."""

    def __init__(self, folder: Path, project: str, config: dict[str, Any]) -> None:
        try:
            import trackio
        except ImportError as error:
            raise _need("trackio", error) from None
        self._trackio = trackio
        trackio.init(project=project, name=folder.name, config=config, resume="allow")

    def log(self, values: dict[str, float], step: int) -> None:
        """One record."""
        self._trackio.log(values, step=step)

    def close(self) -> None:
        """Finish the run."""
        self._trackio.finish()


TRACKERS: dict[str, type[TensorBoardTracker] | type[WandbTracker] | type[TrackioTracker]] = {
    "tensorboard": TensorBoardTracker,
    "wandb": WandbTracker,
    "trackio": TrackioTracker,
}


def open_trackers(
    names: Sequence[str], folder: Path, project: str, config: dict[str, Any]
) -> list[Tracker]:
    """The trackers that the options name."""
    return [look_up("tracker", name, TRACKERS)(folder, project, config) for name in names]


class Display:
    """Progress bar on a terminal; plain lines elsewhere; silent on other ranks."""

    def __init__(self, total: int, *, is_quiet: bool) -> None:
        self.console = Console(quiet=is_quiet, highlight=False)
        self._progress = Progress(
            TextColumn("[bold]training"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}"),
            TimeRemainingColumn(),
            console=self.console,
            disable=is_quiet or not self.console.is_terminal,
        )
        self._task = self._progress.add_task("training", total=total, note="")
        self._loss, self._nll, self._speed = "", "", ""

    def __enter__(self) -> Display:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def advance(self, step: int, loss: float, tokens_per_second: float) -> None:
        """Show a finished step."""
        self._loss = f"loss {loss:.3f}"
        self._speed = f"{tokens_per_second:,.0f} tokens/s"
        note = "  ".join(part for part in (self._loss, self._nll, self._speed) if part)
        self._progress.update(self._task, completed=step, note=note)

    def validated(self, step: int, nll: float, error: float, extra: str = "") -> None:
        """Show a validation."""
        self._nll = f"nll {nll:.4f} ± {error:.4f}"
        self.say(f"step {step:>7}  validation {self._nll} nats/token{extra}")

    def say(self, text: str) -> None:
        """A line above the bar."""
        self._progress.console.print(text, markup=False, soft_wrap=True)
