"""SIGKILL, which no process can catch, at random moments: the run goes on and ends the same."""

from __future__ import annotations

import os
import random
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from fault_tools import (
    LONGEST,
    Torchrun,
    assert_no_traceback,
    assert_same,
    command,
    last_step,
    torchrun,
    wait_for,
    writing,
)
from warm_processes import WarmProcesses

from bellmask.config import RunConfig

Config = Callable[..., RunConfig]
Truth = Callable[..., Path]
STEPS = 30
OPTIONS = (
    f"--train.steps {STEPS} --checkpoint.every 3 --log.every 1 --validation.every 20 "
    "--model.dropout 0.1 --train.random-length-fraction 0.3"
).split()


@pytest.fixture
def draw(request: pytest.FixtureRequest) -> random.Random:
    """Random moments; a test's name is its seed."""
    return random.Random(request.node.name)


def moment(kind: str, run: Path, alive: Callable[[], bool], draw: random.Random) -> None:
    """Wait for a moment of that kind: anywhere, after a step, or inside a save."""
    if kind == "anywhere":
        until = time.monotonic() + draw.uniform(0, 8)
        wait_for(lambda: time.monotonic() > until or last_step(run) > STEPS // 2, alive)
    elif kind == "step":
        # a checkpoint of this very start: older lines of metrics.jsonl may still be there
        step = draw.randint(last_step(run) + 1, max(last_step(run) + 1, STEPS // 2))
        wait_for(lambda: last_step(run) >= step, alive)
        time.sleep(draw.uniform(0, 0.05))
    else:
        assert kind == "save"
        wait_for(lambda: writing(run), alive)
        time.sleep(draw.uniform(0, 0.04))


def kill_one(agent: Torchrun, kind: str, run: Path, draw: random.Random, old: set[int]) -> int:
    """SIGKILL one worker while the run is under way; its process id.

    ``old``: workers before the last restart.
    """

    def new_workers() -> dict[int, int] | None:
        found = agent.workers()
        return found if len(found) == 2 and not old & set(found.values()) else None

    before = wait_for(new_workers, agent.is_alive)
    moment(kind, run, agent.is_alive, draw)
    victim = int(draw.choice(sorted(before.values())))
    assert agent.workers() == before  # nothing ended by itself
    assert last_step(run) < STEPS
    os.kill(victim, signal.SIGKILL)
    old |= set(before.values())
    return victim


def kill_and_finish(agent: Torchrun, kinds: list[str], run: Path, draw: random.Random) -> None:
    """Kill once in each way; then torchrun must end well, and every kill must have hit."""
    old: set[int] = set()
    killed = [kill_one(agent, kind, run, draw, old) for kind in kinds]
    code, said = agent.wait(), agent.text()
    assert code == 0, said
    found = re.findall(r"exitcode: -9\) local_rank: \d \(pid: (\d+)\)", said)
    assert [int(pid) for pid in found] == killed, said
    assert "resuming from step" in said


def test_two_kills_under_torchrun(
    small_config: Config, truth: Truth, tmp_path: Path, draw: random.Random
) -> None:
    """Once after a step and once inside a save."""
    config = small_config(*OPTIONS, "--scale.sharding", "full", "--checkpoint.saving", "background")
    run = tmp_path / "run"
    options = ("--standalone", "--max-restarts", "2")
    with torchrun(command(config, run), *options, log=tmp_path / "log") as agent:
        kill_and_finish(agent, ["step", "save"], run, draw)
    assert_same(run, truth(config, 2))


@pytest.mark.long
@pytest.mark.parametrize("saving", ["wait", "background"])
@pytest.mark.parametrize("sharding", ["none", "full"])
@pytest.mark.parametrize("launcher", ["static", "standalone"])
def test_kills_at_random_moments(
    launcher: str,
    sharding: str,
    saving: str,
    small_config: Config,
    truth: Truth,
    tmp_path: Path,
    draw: random.Random,
) -> None:
    """Three kills in each of eight runs: 24."""
    config = small_config(*OPTIONS, "--scale.sharding", sharding, "--checkpoint.saving", saving)
    run = tmp_path / "run"
    options = ["--max-restarts", "3", *(["--standalone"] if launcher == "standalone" else [])]
    kinds = ["anywhere", "step", "save"]
    draw.shuffle(kinds)
    started = time.monotonic()
    with torchrun(command(config, run), *options, log=tmp_path / "log") as agent:
        kill_and_finish(agent, kinds, run, draw)
    print(f"kills: {', '.join(kinds)}, {time.monotonic() - started:.0f} s")
    assert_same(run, truth(config, 2))


LONG = pytest.mark.long


@pytest.mark.parametrize(
    ("size", "options"),
    [
        (1, "--checkpoint.saving wait"),
        pytest.param(1, "--checkpoint.saving background", marks=LONG),
        pytest.param(2, "--scale.sharding full", marks=LONG),
        pytest.param(2, "--scale.sharding none", marks=LONG),
    ],
)
def test_all_processes_killed_then_the_same_command_again(
    size: int,
    options: str,
    small_config: Config,
    warm: WarmProcesses,
    truth: Truth,
    tmp_path: Path,
    draw: random.Random,
) -> None:
    """Between saves and inside one."""
    config = small_config(*OPTIONS, *options.split())
    run = tmp_path / "run"
    for kind in ("step", "save"):
        group = warm.start_group(command(config, run), size)
        moment(kind, run, group[0].is_alive, draw)
        for process in group:
            process.signal(signal.SIGKILL)
        assert [process.wait() for process in group] == [-signal.SIGKILL] * size
        assert last_step(run) < STEPS
    warm.run(command(config, run), size)
    assert_same(run, truth(config, size))


@pytest.mark.long
def test_torchrun_and_workers_killed_then_the_same_command_again(
    small_config: Config, truth: Truth, tmp_path: Path, draw: random.Random
) -> None:
    config = small_config(*OPTIONS, "--scale.sharding", "full")
    run, log = tmp_path / "run", tmp_path / "log"
    for kind in ("step", "save"):
        with torchrun(command(config, run), log=log) as agent:
            moment(kind, run, agent.is_alive, draw)
            agent.kill_all()
        assert last_step(run) < STEPS
    with torchrun(command(config, run), log=log) as agent:
        assert agent.wait(LONGEST) == 0, agent.text()
    assert_same(run, truth(config, 2))


def test_the_survivor_of_a_kill_says_so_in_one_line(
    small_config: Config, warm: WarmProcesses, tmp_path: Path, draw: random.Random
) -> None:
    config, run = small_config(*OPTIONS), tmp_path / "run"
    group = warm.start_group(command(config, run))
    moment("step", run, group[0].is_alive, draw)
    group[1].signal(signal.SIGKILL)
    assert group[0].wait() == 1
    said = group[0].text()
    assert said.count("error: another process of this run is gone") == 1
    assert_no_traceback(said)
