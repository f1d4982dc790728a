"""SIGTERM and SIGINT: the step is finished and saved, the folder says how to go on."""

from __future__ import annotations

import random
import shlex
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from fault_tools import (
    assert_no_traceback,
    assert_same,
    command,
    last_step,
    lines_of,
    mark_of,
    steps_logged,
    torchrun,
    wait_for,
)
from warm_processes import WarmProcess, WarmProcesses

from bellmask.config import RunConfig

Config = Callable[..., RunConfig]
Truth = Callable[..., Path]
STEPS, EVERY = 30, 7
OPTIONS = (
    f"--train.steps {STEPS} --checkpoint.every {EVERY} --log.every 1 --checkpoint.keep-last 2 "
    "--model.dropout 0.1"
).split()
SIGNALS = [signal.SIGTERM, signal.SIGINT]
HOLD = "fault_hooks.hold_in_step"


def check_stopped(run: Path, number: int, size: int) -> list[str]:
    """What the folder of a stopped run holds; returns the command that continues it."""
    step = last_step(run)
    assert 0 < step < STEPS
    assert lines_of(run)[-1]["step"] == step  # of exactly the last step that was made
    mark = mark_of(run)
    assert (mark["state"], mark["step"], mark["steps"]) == ("stopped", step, STEPS)
    assert signal.Signals(number).name in mark["reason"]
    words = shlex.split(mark["resume"])
    launcher = f"torchrun --nproc-per-node {size} -m bellmask".split() if size > 1 else ["bellmask"]
    assert words[: len(launcher)] == launcher
    return words[len(launcher) :]


def held_group(
    config: RunConfig, run: Path, warm: WarmProcesses, size: int, hook: str = HOLD
) -> list[WarmProcess]:
    """A run that is in its twelfth step until the file ``go`` is beside its folder."""
    note, go = run.with_name("held"), run.with_name("go")
    group = warm.start_group(command(config, run), size, [hook, 11, str(note), str(go)])
    for rank, process in enumerate(group):
        wait_for(run.with_name(f"held-{rank}").exists, process.is_alive)
    return group


@pytest.mark.parametrize(
    ("number", "saving"),
    [
        (signal.SIGTERM, "wait"),
        (signal.SIGINT, "background"),
        pytest.param(signal.SIGTERM, "background", marks=pytest.mark.long),
        pytest.param(signal.SIGINT, "wait", marks=pytest.mark.long),
    ],
)
def test_one_process_stops_and_goes_on(
    number: int,
    saving: str,
    small_config: Config,
    warm: WarmProcesses,
    truth: Truth,
    tmp_path: Path,
) -> None:
    """The folder's name has a space: the command of the mark works all the same."""
    config = small_config(*OPTIONS, "--checkpoint.saving", saving)
    run = tmp_path / "my run"
    (process,) = held_group(config, run, warm, 1)
    assert mark_of(run)["state"] == "running"
    process.signal(number)
    (tmp_path / "go").touch()
    assert process.wait() == 128 + number
    assert_no_traceback(process.text())
    assert f"stopped at step {last_step(run)}" in process.text()
    warm.run(check_stopped(run, number, 1))
    assert_same(run, truth(config))


def test_a_stop_that_nobody_reads_of_is_a_stop(
    small_config: Config, warm: WarmProcesses, truth: Truth, tmp_path: Path
) -> None:
    """As in ``bellmask train ... | tee log`` after Ctrl-C, which ends tee too."""
    config, run = small_config(*OPTIONS), tmp_path / "run"
    (process,) = held_group(config, run, warm, 1, "fault_hooks.nobody_reads")
    process.signal(signal.SIGINT)
    (tmp_path / "go").touch()
    assert process.wait() == 128 + signal.SIGINT
    assert process.text() == ""
    warm.run(check_stopped(run, signal.SIGINT, 1))
    assert_same(run, truth(config))


def test_a_run_that_nobody_reads_of_is_a_run(
    small_config: Config, warm: WarmProcesses, truth: Truth, tmp_path: Path
) -> None:
    config, run = small_config(*OPTIONS), tmp_path / "run"
    process = warm.start(command(config, run), prepare=["fault_hooks.nobody_reads_at_all"])
    assert process.wait() == 0
    assert_same(run, truth(config))


@pytest.mark.parametrize("sharding", ["full", pytest.param("none", marks=pytest.mark.long)])
def test_a_signal_to_one_worker_stops_all(
    sharding: str, small_config: Config, warm: WarmProcesses, truth: Truth, tmp_path: Path
) -> None:
    config = small_config(*OPTIONS, "--scale.sharding", sharding)
    run = tmp_path / "run"
    group = held_group(config, run, warm, 2)
    group[1].signal(signal.SIGTERM)
    (tmp_path / "go").touch()
    assert [process.wait() for process in group] == [143, 143]
    for process in group:
        assert_no_traceback(process.text())
    warm.run(check_stopped(run, signal.SIGTERM, 2), 2)
    assert_same(run, truth(config, 2))


@pytest.mark.parametrize(
    ("number", "saving", "options"),
    [
        pytest.param(signal.SIGTERM, "background", (), marks=pytest.mark.long),
        pytest.param(signal.SIGINT, "background", ("--standalone",), marks=pytest.mark.long),
        pytest.param(signal.SIGTERM, "wait", ("--standalone",), marks=pytest.mark.long),
        pytest.param(signal.SIGINT, "wait", (), marks=pytest.mark.long),
    ],
)
def test_torchrun_stops_and_goes_on(
    number: int,
    saving: str,
    options: tuple[str, ...],
    small_config: Config,
    warm: WarmProcesses,
    truth: Truth,
    tmp_path: Path,
) -> None:
    """torchrun's exit code says nothing (always 1), the mark does. It does not restart either."""
    config = small_config(*OPTIONS, "--scale.sharding", "full", "--checkpoint.saving", saving)
    run = tmp_path / "run"
    options = (*options, "--max-restarts", "3")
    with torchrun(command(config, run), *options, log=tmp_path / "log") as agent:
        wait_for(lambda: steps_logged(run) >= 10, agent.is_alive)
        agent.process.send_signal(number)
        assert agent.wait(60) == 1
    assert agent.text().count("stopping after this step") >= 1
    assert agent.text().count("resuming from step") == 0
    warm.run(check_stopped(run, number, 2), 2)
    assert_same(run, truth(config, 2))


@pytest.mark.parametrize("number", SIGNALS)
def test_a_second_signal_acts_at_once(
    number: int, small_config: Config, warm: WarmProcesses, truth: Truth, tmp_path: Path
) -> None:
    """In a step that would take half a minute more: only steps since the last save are lost."""
    config, run = small_config(*OPTIONS), tmp_path / "run"
    slow = ["fault_hooks.wait_in_step", 17, 30.0, str(tmp_path / "waiting")]
    process = warm.start(command(config, run), prepare=slow)
    wait_for((tmp_path / "waiting").exists, process.is_alive)
    process.signal(number)
    wait_for(lambda: "stopping after this step" in process.text(), process.is_alive)
    process.signal(number)
    assert process.wait() in (-number, 128 + number)
    assert_no_traceback(process.text())
    assert last_step(run) == 2 * EVERY
    assert mark_of(run)["state"] == "running"
    assert mark_of(run)["step"] == 2 * EVERY  # it follows what is saved
    warm.run(command(config, run))
    assert_same(run, truth(config))


@pytest.mark.long
@pytest.mark.parametrize("size", [1, 2])
def test_signals_at_random_moments(
    size: int, small_config: Config, warm: WarmProcesses, truth: Truth, tmp_path: Path
) -> None:
    """Forty stops, to any worker, at any time after the start: none loses a step it logged."""
    config = small_config(*OPTIONS, "--train.steps", "500")
    run, draw = tmp_path / "run", random.Random(size)
    stops = 0
    while stops < 40:
        before = last_step(run)
        args = command(config, run)
        group = warm.start_group(args) if size > 1 else [warm.start(args)]
        wait_for(lambda b=before: steps_logged(run) > b, group[0].is_alive)  # type: ignore[misc]
        time.sleep(draw.uniform(0, 0.3))
        number = draw.choice(SIGNALS)
        draw.choice(group).signal(number)
        codes = [process.wait() for process in group]
        assert set(codes) <= {143, 130, 0}, [process.text() for process in group]
        if codes[0] == 0:
            break
        assert last_step(run) == lines_of(run)[-1]["step"] == mark_of(run)["step"] > before
        stops += 1
    print(f"{stops} stops in {last_step(run)} steps")
    assert stops >= 10
    warm.run(command(config, run), size)
    assert_same(run, truth(config, size))
