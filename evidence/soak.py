"""The soak: one training that is killed about once a minute, and is the same run in the end.

usage: python evidence/soak.py --out FOLDER [--minutes 60] [--period 45] [--seed 1] [--data TEXT]
                               [--no-reference] [--part soak|reference|report]

Two processes train with sharding under torchrun, and validate, sample and save every two seconds.
Something happens to them about once a minute (soak_faults.py); evaluations and generations visit
the live folder; memory is recorded. The last quarter has no faults, so that workers live long.
When the time is over the run is stopped and given its last step (its learning rate is constant, so
that changes nothing before it). Then the same steps are trained undisturbed and everything is
compared. Numbers go to docs/results/soak.json, a figure and tables to docs/scaling.md. It works
on a copy of the package, so the code may be edited meanwhile. Linux only.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import bellmask

sys.path.insert(0, str(Path(__file__).parent))
from soak_compare import compare_runs, compare_with_one_process, is_same
from soak_faults import FAULTS, Hangs, Training, plan_faults
from soak_report import summarize, write_section
from soak_watch import Watcher, leftovers

FAR_AWAY = 100_000_000
"""Steps, until the time is over."""
CALM_SHARE = 0.25
"""Of the time, at the end, without faults."""
SAVE_EVERY = 40
SINGLE_STEPS = 400
"""Of the run in one process: rounding differs, and later steps would tell nothing more."""
OPTIONS = f"""
    --train.batch-size 16 --model.dropout 0 --log.every 10
    --validation.every {SAVE_EVERY} --validation.blocks 64
    --validation.samples-every {SAVE_EVERY} --validation.num-samples 2 --validation.sample-steps 4
    --checkpoint.every {SAVE_EVERY} --checkpoint.keep-last 3
""".split()
SHARDED = "--scale.sharding full --checkpoint.saving background".split()
VISITS = {
    "evaluate": "--blocks 32 --draws 1",
    "generate": "--num 1 --length 32 --steps 8",
}


class Visitors:
    """Evaluations and generations of the live folder, one at a time, in turn."""

    def __init__(self, folder: Path, out: Path, every: float) -> None:
        self.folder, self.out, self.every = folder, out, every
        self.done: list[dict[str, Any]] = []
        self._now: subprocess.Popen[bytes] | None = None
        self._next = time.monotonic() + every
        out.mkdir(exist_ok=True)

    def turn(self) -> None:
        """See whether one has ended, or start one if it is time."""
        if self._now is not None:
            self._end(self._now)
        elif time.monotonic() >= self._next:
            self._begin()

    def _begin(self) -> None:
        kind = list(VISITS)[len(self.done) % len(VISITS)]
        self._path = self.out / f"{len(self.done):03d}-{kind}.txt"
        self._kind, self._next = kind, time.monotonic() + self.every
        command = [sys.executable, "-m", "bellmask", kind, str(self.folder), *VISITS[kind].split()]
        with self._path.open("wb") as stream:
            self._now = subprocess.Popen(
                command, stdout=stream, stderr=stream, env=dict(os.environ, OMP_NUM_THREADS="1")
            )

    def _end(self, visitor: subprocess.Popen[bytes]) -> None:
        code = visitor.poll()
        if code is None:
            return
        self._now = None
        said = self._path.read_text(encoding="utf-8", errors="replace")
        is_told = code == 2 and "Traceback" not in said  # a damaged checkpoint may be the newest
        outcome = "done" if code == 0 else "refused" if is_told else "failed"
        self.done.append({"kind": self._kind, "outcome": outcome, "file": self._path.name})

    def close(self) -> None:
        """Wait for the last one."""
        if self._now is not None:
            self._now.wait()
            self._end(self._now)


class Soak:
    """The disturbed run."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.given, self.out = given, given.out
        self.seconds = given.minutes * 60
        self.draw = random.Random(given.seed + 1)
        args = [*train_args(given), *SHARDED]
        self.training = Training(args, self.out / "run", self.out / "run.log")
        self.events: list[dict[str, Any]] = []

    @property
    def elapsed(self) -> float:
        """Seconds since the first checkpoint."""
        return time.monotonic() - self.began

    def run(self) -> dict[str, Any]:
        """Train, disturb, finish."""
        every = max(1.0, min(5.0, self.seconds / 120))
        watch = self.out / "watch.jsonl"
        self.training.start(FAR_AWAY)
        try:
            self.training.wait_beyond(0)
        except BaseException:
            self.training.kill_all()
            raise
        self.began = time.monotonic()
        watcher = Watcher(watch, self.training.look, every=every, since=self.began)
        watcher.start()
        self.visitors = Visitors(self.training.folder, self.out / "visits", self.given.period * 1.5)
        try:
            self._disturb()
            while self.elapsed < self.seconds:
                self._idle()
            self.visitors.close()
            step = self._finish()
        finally:
            watcher.close()
            if not self.training.has_ended():
                self.training.kill_all()
        return {
            "minutes": self.elapsed / 60,
            "steps": step,
            "leftovers": len(leftovers(self.training.folder)),
            "marks": sorted(p for p in os.listdir(self.training.folder) if p.isupper()),
            "events": self.events,
            "visits": self.visitors.done,
        }

    def _disturb(self) -> None:
        """Faults until the calm part begins."""
        calm = self.seconds * (1 - CALM_SHARE)
        for wait, name in plan_faults(self.given.seed, self.given.period):
            next_time = self.elapsed + wait
            while self.elapsed < min(next_time, calm):
                self._idle()
            if self.elapsed >= calm:
                return
            self._one(name)

    def _one(self, name: str) -> None:
        """One fault, and the time until the run is further than before."""
        began = self.elapsed
        told = FAULTS[name](self.training, self.draw)
        reached, _ = self.training.newest()  # a stop saves, so not the step before the fault
        self.training.wait_beyond(reached)
        back = self.elapsed - began
        event = {"name": name, "time": began, "step": reached, "back": back, **told}
        self.events.append(event)
        print(json.dumps(event), flush=True)

    def _idle(self) -> None:
        self.visitors.turn()
        if self.training.has_ended():
            raise Hangs(f"torchrun has exited by itself; see {self.training.log}")
        time.sleep(0.5)

    def _finish(self) -> int:
        """Stop, and go on to a last step that is a few saves away."""
        self.training.stop()
        last = (self.training.newest()[0] // SAVE_EVERY + 3) * SAVE_EVERY
        self.training.start(last)
        assert self.training.agent is not None
        if self.training.agent.wait():
            raise Hangs(f"the last part failed; see {self.training.log}")
        return last


def train_args(given: argparse.Namespace) -> list[str]:
    """Preset and options that all runs share."""
    return ["tiny", "--data.train", given.data, *OPTIONS]


def read_json(path: Path) -> dict[str, Any]:
    """A file written by an earlier part."""
    return json.loads(path.read_text(encoding="utf-8"))


def write_json(path: Path, content: Any) -> None:
    """For the parts that follow."""
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def train_references(given: argparse.Namespace) -> None:
    """The same steps undisturbed in two processes, and the first of them in one; then compare."""
    steps = read_json(given.out / "soak.json")["steps"]
    for name in ("two", "one"):  # of an earlier try: undisturbed means not resumed either
        shutil.rmtree(given.out / name, ignore_errors=True)
    two = Training([*train_args(given), *SHARDED], given.out / "two", given.out / "two.log")
    began = time.monotonic()
    two.start(steps)
    assert two.agent is not None
    try:
        if two.agent.wait():
            raise SystemExit(f"the undisturbed run failed; see {two.log}")
    finally:
        if not two.has_ended():
            two.kill_all()
    minutes = (time.monotonic() - began) / 60
    single = given.out / "one"
    command = [sys.executable, "-m", "bellmask", "train", *train_args(given), "--quiet"]
    command += ["--train.steps", str(min(steps, SINGLE_STEPS)), "--out", str(single)]
    subprocess.run(command, check=True, env=dict(os.environ, OMP_NUM_THREADS="1"))
    run = given.out / "run"
    compared = compare_runs(run, two.folder, steps)
    one = compare_with_one_process(run, single)
    write_json(
        given.out / "reference.json",
        {"minutes": minutes, "compared": compared, "one": one, "is_same": is_same(compared)},
    )


def use_copy(out: Path) -> None:
    """Train with a copy of the code: a worker that starts again must be what it was."""
    code = out / "code"
    if not code.exists():
        shutil.copytree(Path(bellmask.__file__).parent, code / "bellmask")
    os.environ["PYTHONPATH"] = str(code)
    os.chdir(out)  # ``python -m`` looks in the working folder first


def main(args: Sequence[str] | None = None) -> int:
    """All parts, or one."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for everything")
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--period", type=float, default=45, help="seconds between faults")
    parser.add_argument("--seed", type=int, default=1, help="seed of the faults and their times")
    parser.add_argument("--data", default="wikitext2", help="training text, as for bellmask train")
    parser.add_argument("--docs", type=Path, default=Path("docs"), help="folder for results")
    parser.add_argument("--no-reference", action="store_true", help="skip the comparison")
    parser.add_argument("--part", choices=["soak", "reference", "report"], help="run one part only")
    given = parser.parse_args(args)
    given.out, given.docs = given.out.resolve(), given.docs.resolve()
    given.data = str(Path(given.data).resolve()) if Path(given.data).exists() else given.data
    parts = [given.part] if given.part else ["soak", "reference", "report"]
    if given.no_reference and not given.part:
        parts.remove("reference")
    if "soak" in parts and given.out.exists() and any(given.out.iterdir()):
        parser.error(f"{given.out} is not empty; choose another --out")
    given.out.mkdir(parents=True, exist_ok=True)
    use_copy(given.out)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # end what was started, too
    if "soak" in parts:
        write_json(given.out / "soak.json", Soak(given).run())
    if "reference" in parts:
        train_references(given)
    if "report" in parts:
        result = summarize(given.out)
        write_section(result, given.docs)
        return 0 if result["is_kept"] else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
