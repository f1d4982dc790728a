"""For warm processes: trains a list of configs one after another, and writes what each saw.

A job is {"config", "out", "resume", "port"}, the last where its processes meet. Each rank writes
inputs and times of all its training rows.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch

from bellmask.config.config import RunConfig, override, to_args
from bellmask.diffusion.frameworks import Problem
from bellmask.diffusion.progress import ProgressLaw
from bellmask.train.train_run import train_run

rows: list[Any] = []
ask = Problem.ask


def recording_ask(problem: Problem, *args: Any, **options: Any) -> Any:
    if options.get("reduce", True):
        times = [None] * len(problem.x_BL) if problem.t_B is None else problem.t_B.tolist()
        rows.extend(zip(problem.x_BL.tolist(), times, strict=True))
    return ask(problem, *args, **options)


def train(path: str) -> None:
    """Train all jobs of a file."""
    Problem.ask = recording_ask  # type: ignore[method-assign]
    ProgressLaw.every = 2  # so that short trainings change it
    torch.set_num_threads(1)
    for job in json.loads(Path(path).read_text()):
        os.environ["MASTER_PORT"] = str(job["port"])
        rows.clear()
        config = override(RunConfig(), to_args(job["config"])).check()
        train_run(config, job["out"], resume=job["resume"], is_quiet=True)
        seen = Path(job["out"]) / f"seen-{os.environ.get('RANK', '0')}.json"
        seen.write_text(json.dumps(rows))
