"""The loop. Periodic actions are given to it, not built into it.

After each update the order is: metrics line, actions in the order given (validation before
checkpoint, so that a checkpoint knows its NLL), stop if asked to. All of a step's lines are written
before the step's checkpoint, which is why resuming can cut metrics.jsonl back to the checkpoint.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from torch import Tensor, nn

from bellmask.config.config import RunConfig
from bellmask.config.options import Interval, OptimOptions, RunProgress
from bellmask.storage.checkpoint import Saver
from bellmask.storage.run_folder import MetricsFile
from bellmask.train.metrics import Display, Tracker, Window, device_use, profiling
from bellmask.train.optim import Ema, Optimizer, learning_rate
from bellmask.train.parallel import reshard
from bellmask.train.step import PendingStep, StepResult, TrainStep
from bellmask.utils.errors import SavingError, TrainingError


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
    skipped: int = 0
    """Steps in a row, up to this one, that made no update."""
    window: Window = field(default_factory=Window)
    law: dict[str, Any] = field(default_factory=dict)
    """Of a time law that changes while training."""

    @staticmethod
    def begin(model: nn.Module, options: OptimOptions) -> TrainState:
        return TrainState(
            model, Optimizer(model, options), Ema(model, options.ema) if options.ema else None
        )

    def tensors(self) -> dict[str, Tensor]:
        """All tensors by name, as they are in memory."""
        found = {f"model.{n}": p.detach() for n, p in self.model.named_parameters()}
        found |= {f"optimizer.{n}": t for n, t in self.optimizer.tensors().items()}
        if self.ema:
            found |= {f"ema.{n}": t for n, t in self.ema.shadow.items()}
        return found

    def scalars(self) -> dict[str, Any]:
        """The rest, ready for JSON (which keeps every digit of a float)."""
        rest = {k: v for k, v in vars(self).items() if k not in ("model", "optimizer", "ema")}
        return {**rest, "window": asdict(self.window)}

    def restore(self, scalars: dict[str, Any]) -> None:
        """Take back what ``scalars`` gave."""
        for name in self.scalars().keys() & scalars.keys():
            setattr(self, name, scalars[name])
        self.window = Window(**scalars["window"])

    @contextlib.contextmanager
    def evaluating(self, *, is_averaged: bool = True) -> Iterator[nn.Module]:
        """The model with averaged weights (where there are any), in evaluation mode."""
        self.model.eval()
        with self.ema.applied() if self.ema and is_averaged else contextlib.nullcontext():
            yield self.model
        reshard(self.model)
        self.model.train()


@dataclass(frozen=True)
class Action:
    """A periodic action, also run after the last step."""

    every: str
    """An interval as options write it: 500 steps, 10 minutes, never."""
    run: Callable[[], None]
    at_steps: Sequence[int] = ()
    """Also at these steps."""
    is_save: bool = False
    """Done at the end even where it is never due, and when the run is stopped."""


class Trainer:
    """Runs steps until the last one, or until a signal asks it to stop."""

    def __init__(
        self,
        config: RunConfig,
        folder: Path,
        state: TrainState,
        step: TrainStep,
        saver: Saver,
        display: Display,
        actions: Sequence[Action],
    ) -> None:
        self.config, self.state, self.step, self.world = config, state, step, step.world
        self.saver, self.display = saver, display
        self.actions = [(Interval.parse(action.every), action) for action in actions]
        self.metrics = MetricsFile(folder / "metrics.jsonl")
        self.skipped = MetricsFile(folder / "skipped.jsonl")
        self.trackers: list[Tracker] = []
        self.full_speed: float | None = None
        """Tokens per second at the peak of the devices' data sheet; None: not known."""
        self._signal: int | None = None
        self._problem = ""
        self._pending: PendingStep | None = None
        self._is_stopping = False
        self._clock = 0.0
        step.wants_stop, step.clock = self._wants_stop, lambda: state.seconds

    @property
    def is_done(self) -> bool:
        """True after the last step."""
        return self.state.step >= self.config.train.steps

    def fit(self) -> int | None:
        """Train; return the signal that ended it early, or None when all steps are done."""
        self.state.model.train()
        is_profiled = self.config.log.profile and self.world.is_main
        profile = self.metrics.path.with_name("profile.json") if is_profiled else None
        with self._catching_signals(), profiling(profile) as traced:
            self._clock = self.state.seconds
            now = self._progress()
            while not self.is_done:
                self._update()
                traced()
                # several processes agree on it in the step's own sums
                is_stopped = self._wants_stop() if self.world.size == 1 else self._is_stopping
                if is_stopped:
                    self._finish()
                    self._raise_problem()
                before, now = now, self._progress()  # probes and late reads count as well
                self._act(before, now, is_stopped)
                if is_stopped and not self.is_done:
                    self.saver.wait()
                    return self._signal or signal.SIGTERM
            self.saver.wait()
        return None

    def _progress(self) -> RunProgress:
        """Of several processes: the same on all, by the main one's clock of the step last read."""
        minutes = (self.state.seconds if self.world.size == 1 else self._clock) / 60
        return RunProgress(self.state.step, self.state.tokens, minutes)

    def _wants_stop(self) -> bool:
        return self._signal is not None or self.saver.has_failed or bool(self._problem)

    def _update(self) -> None:
        """One step.

        Where the host runs ahead of the device, what a step measured is read a step later, and the
        device itself skips the update.
        """
        state, started = self.state, time.perf_counter()
        pending = self.step.begin(state.step)
        lr = learning_rate(self.config.optim, state.step, self.config.train.steps)
        result = None if self.step.reads_late else self._read(pending)
        if result is None or result.is_finite:
            state.optimizer.step(lr, pending.is_bad)
        state.optimizer.zero_grad()
        state.step += 1
        if state.ema and (result is None or result.is_finite):
            state.ema.update(state.step, pending.is_bad)
        if result is None:
            before, self._pending = self._pending, pending
            result = None if before is None else self._read(before)
        state.tokens += pending.num_maskable
        state.nll = None
        seconds = self._spent(started)
        if result is not None:
            self.display.advance(
                state.step, result.loss, self._speed(pending.num_maskable / seconds)
            )
        if state.step % self.config.log.every == 0 or self.is_done:
            self._finish()
            means = state.window.means()
            means |= self._speed(means["tokens_per_second"])
            self.record("train", {**means, "lr": lr})
            self.display.logged(state.step, means)
            state.window = Window()

    def _speed(self, tokens_per_second: float) -> dict[str, float]:
        use = device_use(self.world.device, tokens_per_second, self.full_speed)
        return {"tokens_per_second": tokens_per_second, **use}

    def _spent(self, started: float) -> float:
        seconds = time.perf_counter() - started
        self.state.seconds += seconds
        self.state.window.seconds += seconds
        return seconds

    def _finish(self) -> None:
        """Read the last step too, before anything depends on it."""
        pending, started, self._pending = self._pending, time.perf_counter(), None
        if pending is not None:
            self._read(pending)
            self._spent(started)

    def _read(self, pending: PendingStep) -> StepResult:
        """Take in what a step measured; write it down if it made no update."""
        result = pending.read()
        self._is_stopping, self._clock = result.wants_stop, result.clock
        self.state.window.add(result)
        self.state.skipped = 0 if result.is_finite else self.state.skipped + 1
        if not result.is_finite:
            self._skip(result, pending.step)
        return result

    def _skip(self, result: StepResult, number: int) -> None:
        """Write down a batch whose gradient is not finite; TrainingError after too many in a row.

        Step numbers count from 1, as everywhere in a run folder.
        """
        state, step, limit = self.state, number + 1, self.config.train.skip_limit
        bad = self.world.any_rank(self.step.first_bad(result))
        if self.world.is_main:
            planner = self.step.planner
            found = {"loss": str(result.loss), "gradient_norm": str(result.gradient_norm)}
            rows = planner.batches.rows(number).tolist()
            times = planner.times(number).tolist()
            with self.writing():
                self.skipped.write(
                    {"kind": "skipped", "step": step, **found, "rows": rows, "times": times}
                )
        what = f"step {step}: the loss is {result.loss:.6g} and the gradient norm "
        what += f"{result.gradient_norm:.6g}. The weights were not updated{bad}."
        if state.skipped <= limit:
            self.display.say(f"warning: {what} Its rows are in {self.skipped.path}")
            return
        raise TrainingError(
            f"{what} This was step {state.skipped} in a row, and --train.skip-limit is {limit}. "
            "Common causes: a learning rate that is too high (try a third of --optim.lr), no "
            "clipping (--optim.clip 1), damaged weights. Earlier checkpoints are intact, but "
            "resuming repeats the same steps: change options and start again with another --out."
        )

    def _act(self, before: RunProgress, now: RunProgress, is_stopped: bool) -> None:
        for interval, action in self.actions:
            is_due = interval.is_due(before, now) or now.steps in action.at_steps
            is_due |= self.is_done and (interval.amount > 0 or action.is_save)
            if is_due or (is_stopped and action.is_save):
                self._finish()
                action.run()
                self._raise_problem()

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Around files that the main process writes: a failure ends the run on all ranks, later."""
        try:
            yield
        except OSError as error:
            self._problem = (
                f"step {self.state.step}: {error.filename or self.metrics.path} could not be "
                f"written: {error.strerror or error}. Earlier checkpoints are intact: free "
                "some space, then continue with the same command and --resume auto."
            )

    def _raise_problem(self) -> None:
        """SavingError on all ranks where :meth:`writing` failed on one."""
        problem = self.world.any_rank(self._problem)
        if problem:
            with contextlib.suppress(SavingError):
                self.saver.wait()  # what was to be saved before may still be good
            raise SavingError(problem)

    def record(self, kind: str, values: dict[str, Any]) -> None:
        """Write one line of metrics and send its numbers to the trackers."""
        if not self.world.is_main:
            return
        state = self.state
        with self.writing():
            self.metrics.write(
                {"kind": kind, "step": state.step, "tokens": state.tokens, **values}
                | {"seconds": state.seconds}
            )
            numbers = {f"{kind}/{k}": v for k, v in values.items() if isinstance(v, int | float)}
            for tracker in self.trackers:
                tracker(numbers, state.step)

    @contextlib.contextmanager
    def _catching_signals(self) -> Iterator[None]:
        """SIGINT and SIGTERM finish the current step; a second one acts at once."""
        previous: dict[int, Any] = {}

        def remember(number: int, frame: FrameType | None) -> None:
            self._signal = number
            signal.signal(number, previous[number])
            if not self.display.console.quiet:
                with contextlib.suppress(OSError):  # whoever read it may have had the signal too
                    # not print: this may have interrupted one
                    os.write(1, b"stopping after this step, saving a checkpoint ...\n")

        for number in (int(signal.SIGINT), int(signal.SIGTERM)):
            with contextlib.suppress(ValueError):  # not in the main thread: leave signals alone
                previous[number] = signal.signal(number, remember)
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)
