"""The loop. Periodic actions are given to it, not built into it.

After each update the order is: metrics line, actions in the order given (validation before
checkpoint, so that a checkpoint knows its NLL), stop if asked to. All of a step's lines are written
before the step's checkpoint, which is why resuming can cut metrics.jsonl back to the checkpoint.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from torch import Tensor, nn

from bellmask.intervals import Interval, Progress
from bellmask.options import OptimOptions
from bellmask.records import MetricsFile
from bellmask.train.distributed import World
from bellmask.train.metrics import Display, Tracker, Window
from bellmask.train.optim import Ema, Optimizer, learning_rate
from bellmask.train.step import TrainStep


@dataclass
class TrainState:
    """Everything a checkpoint holds: what is not a field here is not resumed."""

    model: nn.Module
    optimizer: Optimizer
    ema: Ema | None
    step: int = 0
    """Updates done."""
    tokens: int = 0
    """Maskable tokens seen."""
    seconds: float = 0.0
    """Time spent in steps; validation and saving excluded."""
    nll: float | None = None
    """Validation NLL, if this very step was validated."""
    window: Window = field(default_factory=Window)

    def tensors(self) -> dict[str, Tensor]:
        """All tensors by name, as they are in memory."""
        found = {f"model.{n}": p.detach() for n, p in self.model.named_parameters()}
        found |= {f"optimizer.{n}": t for n, t in self.optimizer.tensors().items()}
        if self.ema:
            found |= {f"ema.{n}": t for n, t in self.ema.shadow.items()}
        return found

    def scalars(self) -> dict[str, Any]:
        """The rest, ready for JSON (which keeps every digit of a float)."""
        return {
            "step": self.step,
            "tokens": self.tokens,
            "seconds": self.seconds,
            "nll": self.nll,
            "window": self.window.state(),
        }

    def restore(self, scalars: dict[str, Any]) -> None:
        """Take back what ``scalars`` gave."""
        self.step, self.tokens = scalars["step"], scalars["tokens"]
        self.seconds, self.nll = scalars["seconds"], scalars["nll"]
        self.window = Window(**scalars["window"])

    @property
    def progress(self) -> Progress:
        """How far the run is."""
        return Progress(self.step, self.tokens, self.seconds / 60)

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[nn.Module]:
        """The model with averaged weights (where there are any), in evaluation mode."""
        self.model.eval()
        with self.ema.applied() if self.ema else contextlib.nullcontext():
            yield self.model
        self.model.train()


@dataclass(frozen=True)
class Action:
    """Something done now and then, and after the last step."""

    interval: Interval
    run: Callable[[TrainState], None]
    at_steps: Sequence[int] = ()
    """Also at these steps."""
    also_last: bool = True
    also_when_stopped: bool = False


class Trainer:
    """Runs steps until the last one, or until a signal asks it to stop."""

    def __init__(
        self,
        state: TrainState,
        step: TrainStep,
        world: World,
        *,
        num_steps: int,
        optim: OptimOptions,
        log_every: int,
        actions: Sequence[Action],
        metrics: MetricsFile,
        trackers: Sequence[Tracker],
        display: Display,
    ) -> None:
        self.state, self.step, self.world = state, step, world
        self.num_steps, self.optim, self.log_every = num_steps, optim, log_every
        self.actions, self.metrics, self.trackers, self.display = (
            actions,
            metrics,
            trackers,
            display,
        )
        self._signal: int | None = None

    def fit(self) -> int | None:
        """Train; return the signal that ended it early, or None when all steps are done."""
        self.state.model.train()
        with self._catching_signals():
            while self.state.step < self.num_steps:
                before = self.state.progress
                self._update()
                is_stopped = self.world.any(self._signal is not None)
                self._act(before, is_stopped)
                if is_stopped and self.state.step < self.num_steps:
                    return self._signal or signal.SIGTERM
        return None

    def _update(self) -> None:
        state, started = self.state, time.perf_counter()
        result = self.step(state.step)
        lr = learning_rate(self.optim, state.step, self.num_steps)
        state.optimizer.step(lr)
        state.optimizer.zero_grad()
        state.step += 1
        if state.ema:
            state.ema.update(state.step)
        seconds = time.perf_counter() - started
        state.tokens += result.num_maskable
        state.seconds += seconds
        state.nll = None
        state.window.add(result, seconds)
        self.display.advance(state.step, result.loss, result.num_maskable / seconds)
        if state.step % self.log_every == 0 or state.step == self.num_steps:
            self.record("train", {**state.window.means(), "lr": lr})
            state.window = Window()

    def _act(self, before: Progress, is_stopped: bool) -> None:
        now, is_last = self.state.progress, self.state.step == self.num_steps
        for action in self.actions:
            is_due = action.interval.is_due(before, now) or now.steps in action.at_steps
            if action.interval.unit == "minutes":
                is_due = self.world.agree(is_due)
            if (
                is_due
                or (is_last and action.also_last)
                or (is_stopped and action.also_when_stopped)
            ):
                action.run(self.state)

    def record(self, kind: str, values: dict[str, Any]) -> None:
        """Write one line of metrics and send its numbers to the trackers."""
        if not self.world.is_main:
            return
        state = self.state
        self.metrics.write(
            {"kind": kind, "step": state.step, "tokens": state.tokens, **values}
            | {"seconds": state.seconds}
        )
        numbers = {f"{kind}/{k}": v for k, v in values.items() if isinstance(v, int | float)}
        for tracker in self.trackers:
            tracker.log(numbers, state.step)

    @contextlib.contextmanager
    def _catching_signals(self) -> Iterator[None]:
        """SIGINT and SIGTERM finish the current step; a second one acts at once."""
        previous: dict[int, Any] = {}

        def remember(number: int, frame: FrameType | None) -> None:
            self._signal = number
            signal.signal(number, previous[number])
            self.display.say("stopping after this step, saving a checkpoint ...")

        for number in (int(signal.SIGINT), int(signal.SIGTERM)):
            with contextlib.suppress(ValueError):  # not in the main thread: leave signals alone
                previous[number] = signal.signal(number, remember)
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)
