"""What is measured while training: metrics.jsonl, trackers, and a progress bar.

``metrics.jsonl`` has one object per line: ``{"kind": "train" | "validation", "step": ...}``. Its
values are a function of the run's options, apart from ``seconds`` and ``tokens_per_second``.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from bellmask.config.config import RunConfig
from bellmask.train.step import StepResult
from bellmask.utils.errors import UserError, look_up
from bellmask.utils.stats import plus_minus


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
    num_skipped: int = 0
    seconds: float = 0.0

    def add(self, result: StepResult) -> None:
        """Take in one step; of one without update only that there was one."""
        self.steps += 1
        if not result.is_finite:
            self.num_skipped += 1
            return
        self.loss += result.loss
        self.gradient_norm += result.gradient_norm
        self.largest_gradient_norm = max(self.largest_gradient_norm, result.gradient_norm)
        self.largest_weight = max(self.largest_weight, result.largest_weight)
        self.num_clipped += result.is_clipped
        self.num_masked += result.num_masked
        self.num_maskable += result.num_maskable

    def means(self) -> dict[str, Any]:
        """One line's values: means over steps with an update; None where there was none."""
        updates = self.steps - self.num_skipped
        return {
            "loss": self.loss / updates if updates else None,
            "gradient_norm": self.gradient_norm / updates if updates else None,
            "largest_gradient_norm": self.largest_gradient_norm,
            "largest_weight": self.largest_weight,
            "clipped_share": self.num_clipped / max(1, updates),
            "skipped": self.num_skipped,
            "masked_share": self.num_masked / max(1, self.num_maskable),
            "tokens_per_second": self.num_maskable / max(self.seconds, 1e-9),
        }


def device_use(
    device: torch.device, tokens_per_second: float, full_speed: float | None
) -> dict[str, float]:
    """Of a GPU: model FLOPs utilization, and the most memory that tensors have taken, in bytes.

    ``full_speed``: tokens per second at its data sheet's peak; None: not known.
    """
    if device.type != "cuda":
        return {}
    share = {} if full_speed is None else {"mfu": tokens_per_second / full_speed}
    return {**share, "peak_memory": torch.cuda.max_memory_allocated(device)}


@contextlib.contextmanager
def profiling(path: Path | None) -> Iterator[Callable[[], object]]:
    """To be called after each step; steps 4 to 6 are traced into the file. None: nothing is."""
    if path is None:
        yield lambda: None
        return
    with torch.profiler.profile(
        schedule=torch.profiler.schedule(wait=2, warmup=1, active=3, repeat=1),
        on_trace_ready=lambda found: found.export_chrome_trace(str(path)),
    ) as profiler:
        yield profiler.step


# Trackers: somewhere else that metrics go. Each is open within its block.

Tracker = Callable[[dict[str, float], int], None]
"""Sends the numbers of a step."""
OpenTracker = Callable[[RunConfig, Path, str, int], contextlib.AbstractContextManager[Tracker]]
"""From a run's options, folder and id, and the step that it starts or continues at."""


@contextlib.contextmanager
def _tensorboard(config: RunConfig, folder: Path, run_id: str, step: int) -> Iterator[Tracker]:
    """Event files in ``<run>/tensorboard``; points after the step resumed from are dropped."""
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1) as writer:

        def log(values: dict[str, float], step: int) -> None:
            for name, value in values.items():
                writer.add_scalar(name, value, step)

        yield log


def _hosted(package: str) -> OpenTracker:
    """A run of wandb or trackio named after the folder, continued on resume."""

    @contextlib.contextmanager
    def start(config: RunConfig, folder: Path, run_id: str, step: int) -> Iterator[Tracker]:
        library = importlib.import_module(package)
        name = {"name": folder.name, "id": run_id}
        if package == "trackio":  # knows runs by their names alone
            name = {"name": f"{folder.name}-{run_id}"}
        library.init(project=config.log.project, config=config.to_dict(), resume="allow", **name)
        try:
            yield lambda values, step: library.log(values, step=step)
        finally:
            library.finish()

    return start


TRACKERS: dict[str, OpenTracker] = {
    "tensorboard": _tensorboard,
    "wandb": _hosted("wandb"),
    "trackio": _hosted("trackio"),
}


def find_trackers(names: Sequence[str]) -> None:
    """Refuse trackers whose package is not installed, before anything is written."""
    for name in names:
        look_up("tracker", name, TRACKERS)
        if importlib.util.find_spec(name) is None:
            raise UserError(f"tracker {name} needs its package: pip install 'bellmask[{name}]'")


class _Console(Console):
    """A console that ignores a closed pipe, so that a training continues."""

    def on_broken_pipe(self) -> None:
        """Instead of ending the process, as rich would."""
        self.quiet = True


class Display:
    """Progress bar on a terminal; elsewhere a line every ``log.every`` steps; other ranks: none."""

    def __init__(self, total: int, *, is_quiet: bool) -> None:
        self.console = _Console(quiet=is_quiet, highlight=False)
        self.progress = Progress(
            TextColumn("[bold]training"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}"),
            TimeRemainingColumn(),
            console=self.console,
            disable=is_quiet or not self.console.is_terminal,
            transient=True,
        )
        self._task = self.progress.add_task("training", total=total, note="")
        self._nll, self._total = "", total

    def advance(self, step: int, loss: float, speed: Mapping[str, float]) -> None:
        """Move the bar. ``speed``: tokens per second, and :func:`device_use`."""
        note = self._note(loss, speed)
        self.progress.update(self._task, completed=step, note=note)

    def logged(self, step: int, means: Mapping[str, Any]) -> None:
        """Where there is no bar: the means of the steps since the last such line."""
        if not self.console.is_terminal:
            note = self._note(means["loss"], means)
            self.say(f"step {step:>7} of {self._total}  {note}")

    def _note(self, loss: float | None, speed: Mapping[str, Any]) -> str:
        told = ["no update" if loss is None else f"loss {loss:.3f}", self._nll]
        told.append(f"{speed['tokens_per_second']:,.0f} tokens/s")
        if "mfu" in speed:
            told.append(f"{speed['mfu']:.0%} MFU")
        if "peak_memory" in speed:
            told.append(decimal(int(speed["peak_memory"])))
        return "  ".join(filter(None, told))

    def validated(self, step: int, nll: float, error: float, text: str) -> None:
        """``text``: on how many blocks of what."""
        self._nll = f"nll {plus_minus(nll, error, 4)}"
        self.say(f"step {step:>7}  validation {self._nll} nats/token on {text}")

    def say(self, text: str) -> None:
        """A line above the bar, if it can be written."""
        with contextlib.suppress(OSError):  # only a terminal has a width to break lines for
            self.console.print(text, markup=False, soft_wrap=not self.console.is_terminal)
