"""The trainings of a comparison: planning and running them.

Runs are planned from variants, seeds and a grid, each in a folder named by a hash of everything
that determines its results. Unfinished runs are trained, sequentially or in parallel. Each training
is a separate process that resumes automatically, so stopping and repeating a comparison loses at
most the steps since each run's last checkpoint, and gives the same results.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock

from bellmask.compare.variants import Variant
from bellmask.config.config import RunConfig, override, to_args
from bellmask.config.options import Interval
from bellmask.storage.run_folder import FAILED, read_metrics
from bellmask.train.setup import open_start
from bellmask.utils.console import messages_on_stderr, tell
from bellmask.utils.errors import DISK_FAILURES, SavingError, TrainingError, UserError
from bellmask.utils.libraries import keep_freed_memory
from bellmask.utils.progress import progress_bar

# The trainings that a comparison needs, each in a folder named by a hash of its content
#
# The key covers every option that affects results, the evaluation, and the fingerprints
# of text and tokenizer. So variants, suites, grids and repetitions share runs, and a changed text
# file never meets old results.

TRAINING_FORMAT = 2
"""Increased when code changes what a run with the same options learns or records: old runs are not
reused."""
_SAME_FOR_ALL = ("data.", "validation.", "train.batch_size", "train.seed", "train.steps")


@dataclass(frozen=True)
class PlannedRun:
    """One training: a variant at a grid point with a seed."""

    variant: str
    point: str
    """The grid's options, as typed, e.g. ``optim.lr=0.003``; empty without a grid."""
    config: RunConfig
    folder: Path

    @property
    def label(self) -> str:
        """Name for display."""
        return " ".join(filter(None, [self.variant, self.point, f"seed {self.config.train.seed}"]))


def run_key(config: RunConfig, text: str) -> str:
    """Hash of what decides a run's results; ``text`` identifies the data and the tokenizer."""
    options = config.key_options("result", "records")
    content = json.dumps([TRAINING_FORMAT, options, text], sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def text_identity(config: RunConfig, *, is_quiet: bool = False) -> str:
    """Fingerprints of tokenizer, text and first weights; prepares the text if need be."""
    start = open_start(config)
    tokenizer, data = start.load_data(is_quiet=is_quiet)
    marks = [tokenizer.fingerprint, data.train.fingerprint, data.valid.fingerprint]
    return "/".join(filter(None, [*marks, start.fingerprint]))


@dataclass(frozen=True, kw_only=True)
class TrainingOptions:
    """Seeds and parallelism of the trainings, and their folder."""

    seeds: int = 1
    """Number of paired training seeds; a confidence interval needs 3."""
    jobs: int | None = None
    """Runs trained in parallel; default: as many as the GPUs suffice for, or 1 on a CPU. Each has
    GPUs of its own; on a CPU, 2 or more use one thread each."""
    processes_per_job: int = 1
    """Processes that share a run, started by torchrun, each with a GPU or one thread."""
    runs: str = "runs/shared"
    """Folder for runs, shared by all comparisons."""
    quiet: bool = False
    """Print only errors and the result."""


def parse_grid(texts: Sequence[str]) -> list[dict[str, str]]:
    """``["optim.lr=1e-3,3e-3"]`` as all combinations; one empty point without a grid."""
    axes: dict[str, list[tuple[str, str]]] = {}
    for text in texts:
        option, _, values = text.partition("=")
        if not option or not values or option.startswith("-"):
            raise UserError(f"write a grid as 'optim.lr=1e-3,3e-3', not {text!r}")
        axes.setdefault(option, []).extend((option, value) for value in values.split(","))
        if len(set(axes[option])) < len(axes[option]):
            raise UserError(f"--grid {text}: each value must be given once")
    return [dict(point) for point in itertools.product(*axes.values())]


def for_comparison(config: RunConfig) -> RunConfig:
    """The shared config with what a comparison needs: an evaluation at the end, samples there."""
    options = config.validation
    interval = Interval.parse(options.every)
    if interval.unit != "steps":
        raise UserError("--validation.every must be in steps, so that runs can be compared")
    if not 0 < interval.amount <= config.train.steps / 2:
        raise UserError(
            f"a comparison needs a curve, but --validation.every {options.every!r} gives none in "
            f"{config.train.steps} steps; set it to '{max(1, config.train.steps // 10)} steps'"
        )
    samples = f"{config.train.steps} steps"
    return replace(config, validation=replace(options, samples_every=samples))


def with_seed(config: RunConfig, number: int) -> RunConfig:
    """The config of paired seed ``number``, from 0."""
    return replace(config, train=replace(config.train, seed=config.train.seed + number)).check()


def plan_runs(
    shared: RunConfig,
    variants: Sequence[Variant],
    options: TrainingOptions,
    grid: Sequence[Mapping[str, str]] = ({},),
) -> list[PlannedRun]:
    """All trainings, with seeds as the outermost loop, so that every variant has a result early.

    Bad variants are refused before a large corpus is prepared, whose identity is in the keys.
    """
    planned = []
    for number, variant, point in itertools.product(range(options.seeds), variants, grid):
        args = [part for option, value in point.items() for part in (f"--{option}", value)]
        config = variant.apply(shared, args)
        _check_fair(config, shared, variant.name)
        name = " ".join(f"{option}={value}" for option, value in point.items())
        planned.append((variant.name, name, with_seed(config, number)))
    root, text = Path(options.runs), text_identity(shared, is_quiet=options.quiet)
    return [PlannedRun(*run, folder=root / run_key(run[-1], text)) for run in planned]


def _check_fair(config: RunConfig, shared: RunConfig, name: str) -> None:
    """Reject, before training, variants that could not be compared."""
    mine, theirs = config.flat(), shared.flat()
    for option in mine:
        is_shared = option.startswith(_SAME_FOR_ALL) and option != "data.pads"  # causal: ignored
        if is_shared and mine[option] != theirs[option]:
            raise UserError(f"variant {name} changes {option}, which must be the same for all")


# Training unfinished runs, sequentially or in parallel

POLL_SECONDS = 0.5
BROKE_DOWN = 3
"""Exit code of a worker whose loss is not finite; any other fault exits with 1."""


def is_finished(run: PlannedRun) -> bool:
    """True when the run's last step has been validated and saved."""
    steps = run.config.train.steps
    records = read_metrics(run.folder / "metrics.jsonl")
    is_validated = any(r["kind"] == "validation" and r["step"] == steps for r in records)
    return is_validated and (run.folder / "checkpoints" / f"step-{steps:09d}").exists()


def visible_gpus() -> list[str]:
    """The GPUs available to trainings, as named by CUDA_VISIBLE_DEVICES."""
    if not torch.cuda.is_available():
        return []
    named = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    return named or [str(number) for number in range(torch.cuda.device_count())]


class _Job:
    def __init__(
        self, run: PlannedRun, slot: int, size: int, is_alone: bool, gpus: Sequence[str]
    ) -> None:
        """``size``: processes that share the run; ``is_alone``: it may take all threads."""
        self.run, self.slot = run, slot
        own = {} if is_alone else {"OMP_NUM_THREADS": "1"}
        if gpus and run.config.train.device in ("auto", "cuda"):
            mine = [gpus[number % len(gpus)] for number in range(slot * size, (slot + 1) * size)]
            own["CUDA_VISIBLE_DEVICES"] = ",".join(mine)
        # standalone: a free port for each, so that several can run at once
        shared = ["torch.distributed.run", "--standalone", f"--nproc-per-node={size}", "-m"]
        command = [sys.executable, "-m", *(shared if size > 1 else []), "bellmask.compare.execute"]
        self.errors = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the job
        self.process = subprocess.Popen(
            [*command, str(run.folder), json.dumps(run.config.to_dict())],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=self.errors,
            env=os.environ | own,
        )
        assert self.process.stdin is not None
        self.stdin = self.process.stdin

    def end(self) -> str:
        """Ask the worker to finish its step, save and exit; return its stderr."""
        self.stdin.close()
        self.process.wait()
        with self.errors as errors:
            errors.seek(0)
            return errors.read().decode(errors="replace").strip()


def execute(
    runs: Sequence[PlannedRun], options: TrainingOptions, *, may_fail: bool = False
) -> dict[Path, str]:
    """Train unfinished runs; return the folders of failed runs with their messages.

    ``may_fail`` continues when a training breaks down (a learning rate of a grid that is too high);
    otherwise the comparison ends.
    """

    def say(text: str) -> None:
        if not options.quiet:
            tell(text, sys.stderr)

    gpus, size = visible_gpus(), options.processes_per_job
    if 0 < len(gpus) < size:
        raise UserError(f"--processes-per-job {size} needs as many GPUs; there are {len(gpus)}")
    jobs = max(1, len(gpus) // size) if options.jobs is None else options.jobs
    distinct: dict[Path, PlannedRun] = {}
    for run in runs:
        distinct.setdefault(run.folder, run)
    waiting = [run for run in distinct.values() if not is_finished(run)]
    if waiting:
        finished = len(distinct) - len(waiting)
        reuse = f"; {finished} already finished" if finished else ""
        say(f"{len(waiting)} run(s) to train{reuse}, {jobs} at a time")
    total, started = sum(run.config.train.steps for run in waiting), time.monotonic()
    failed: dict[Path, str] = {}
    active: list[_Job] = []
    steps = shown = 0
    try:
        with progress_bar("comparing", "steps", total, is_quiet=options.quiet) as progress:
            while waiting or active:
                while waiting and len(active) < jobs:
                    slot = min(set(range(jobs)) - {job.slot for job in active})
                    active.append(_Job(waiting.pop(0), slot, size, jobs * size == 1, gpus))
                time.sleep(POLL_SECONDS)
                for job in [job for job in active if job.process.poll() is not None]:
                    active.remove(job)
                    line = _result(job, failed, may_fail)
                    say(f"{time.monotonic() - started:6.0f} s  {line}")
                    steps += job.run.config.train.steps
                if not options.quiet:
                    made, notes = zip(*map(_status, active)) if active else ((), ())
                    progress.advance(steps + sum(made) - shown, " | ".join(notes))
                    shown = steps + sum(made)
    finally:
        for job in active:
            job.end()
    return failed


def _status(job: _Job) -> tuple[int, str]:
    """(steps done, status of a training)."""
    records = read_metrics(job.run.folder / "metrics.jsonl")
    step = records[-1]["step"] if records else 0
    note = f"{job.run.label}: {step}/{job.run.config.train.steps}"
    last = {record["kind"]: record for record in records}
    if "validation" in last:
        note += f" nll {last['validation']['nll'] or math.nan:.3f}"  # None: it diverged
    if "train" in last:
        note += f" {last['train']['tokens_per_second']:,.0f} tokens/s"
    return step, note


def _result(job: _Job, failed: dict[Path, str], may_fail: bool) -> str:
    """The result of a finished training; its message if it may have failed."""
    complaint, code = job.end(), job.process.returncode
    if code == 0:
        records = read_metrics(job.run.folder / "metrics.jsonl")
        last = next(r["nll"] for r in reversed(records) if r["kind"] == "validation")
        return f"{job.run.label}: NLL {last or math.nan:.4f} nats/token"
    if code in (128 + 2, 128 + 15, -2, -15):
        raise KeyboardInterrupt
    message = f"{job.run.label}: {complaint or f'the training process died ({code})'}"
    # torchrun exits with 1, whatever its processes said
    if may_fail and (code == BROKE_DOWN or (code == 1 and (job.run.folder / FAILED).exists())):
        failed[job.run.folder] = message
        return f"failed: {message.splitlines()[0]}"
    raise (UserError if code == 2 else TrainingError)(message)


# One training in its own process: ``python -m bellmask.compare.execute FOLDER CONFIG``
#
# The parent keeps the other end of stdin open; when it dies, even by SIGKILL, the worker (all that
# torchrun started) finishes its step, saves a checkpoint and ends. A lock keeps two workers out of
# one folder.


def _stop_without_parent() -> None:
    """Ask the training to stop when stdin is closed."""
    while os.read(sys.stdin.fileno(), 1):  # not the buffered reader: its lock survives the thread
        pass
    os.kill(os.getpid(), signal.SIGTERM)


def work(folder: Path, tree: dict[str, Any]) -> int:
    """Train a config; exit codes are those of ``bellmask train``, but for a training that broke
    down.
    """
    from bellmask.train.train_run import train_run  # 0.8 s, which only workers need

    threading.Thread(target=_stop_without_parent, daemon=True).start()
    keep_freed_memory()
    try:
        config = override(RunConfig(), to_args(tree)).check()
        locks = folder.parent / ".locks"
        locks.mkdir(parents=True, exist_ok=True)
        is_main = os.environ.get("RANK", "0") == "0"
        with FileLock(locks / folder.name) if is_main else nullcontext():  # waits
            result = train_run(config, folder, resume="auto", is_quiet=True)
    except (UserError, TrainingError, SavingError, OSError) as error:
        print(error, file=sys.stderr)
        if isinstance(error, OSError) and error.errno in DISK_FAILURES:
            return 1
        codes: dict[type, int] = {SavingError: 1, TrainingError: BROKE_DOWN}
        return codes.get(type(error), 2)
    return 0 if result.stopped_by is None else 128 + result.stopped_by


if __name__ == "__main__":
    with messages_on_stderr():
        sys.exit(work(Path(sys.argv[1]), json.loads(sys.argv[2])))
