"""SIGTERM and SIGINT: the step is finished and saved, the folder says how to go on."""

from __future__ import annotations

import shlex
import signal

import pytest
from fault_tools import last_step, lines_of, mark_of, torchrun, wait_for

LONG = pytest.mark.long
STEPS, EVERY = 20, 5
OPTIONS = (
    f"--train.steps {STEPS} --checkpoint.every {EVERY} --log.every 1 --checkpoint.keep-last 2 "
    "--model.dropout 0.1"
).split()
TERM, INT = signal.SIGTERM, signal.SIGINT
WAIT, BACKGROUND = "--checkpoint.saving wait", "--checkpoint.saving background"


def check_stopped(lab, number):
    """What the folder of a stopped run holds; its own command continues it to the same end."""
    step = last_step(lab.run)
    assert 0 < step < STEPS
    assert lines_of(lab.run)[-1]["step"] == step  # of exactly the last step that was made
    mark = mark_of(lab.run)
    assert (mark["state"], mark["step"], mark["steps"]) == ("stopped", step, STEPS)
    assert signal.Signals(number).name in mark["reason"]
    launcher = f"torchrun --nproc-per-node {lab.size} -m bellmask" if lab.size > 1 else "bellmask"
    words, launcher = shlex.split(mark["resume"]), launcher.split()
    assert words[: len(launcher)] == launcher
    lab.finish(*words[len(launcher) :])


def stop(lab, number, rank=0, hook="hold_in_step"):
    """The signal comes to one process of a run that is in its twelfth step."""
    go = lab.folder / "go"
    group = lab.start(f"fault_hooks.{hook}", 11, str(lab.folder / "held"), str(go))
    for n, process in enumerate(group):
        wait_for((lab.folder / f"held-{n}").exists, process.is_alive)
    assert mark_of(lab.run)["state"] == "running"
    group[rank].signal(number)
    go.touch()
    said = lab.ends(128 + number, group)
    check_stopped(lab, number)
    return said


@pytest.mark.parametrize(
    ("number", "saving"),
    [
        (TERM, WAIT),
        pytest.param(INT, BACKGROUND, marks=LONG),
        pytest.param(TERM, BACKGROUND, marks=LONG),
        pytest.param(INT, WAIT, marks=LONG),
    ],
)
def test_one_process_stops_and_goes_on(lab, number, saving):
    assert "stopped at step 12" in stop(lab.plan(*OPTIONS, *saving.split()), number)


def test_a_stop_that_nobody_reads_of_is_a_stop(lab):
    """As in ``bellmask train ... | tee log`` after Ctrl-C, which ends tee too."""
    assert stop(lab.plan(*OPTIONS), INT, hook="nobody_reads") == ""


@pytest.mark.parametrize("sharding", ["full", pytest.param("none", marks=LONG)])
def test_a_signal_to_one_worker_stops_all(lab, sharding):
    stop(lab.plan(*OPTIONS, "--scale.sharding", sharding, size=2), TERM, rank=1)


@pytest.mark.long
@pytest.mark.parametrize(
    ("number", "saving", "options"),
    [(TERM, BACKGROUND, ()), (INT, WAIT, ("--standalone",))],
)
def test_torchrun_stops_and_goes_on(lab, number, saving, options):
    """torchrun's exit code says nothing (always 1), the mark does. It does not restart either."""
    lab.plan(*OPTIONS, "--scale.sharding", "full", *saving.split(), size=2)
    options = (*options, "--max-restarts", "3")
    with torchrun(lab.args, *options, log=lab.folder / "log") as agent:
        wait_for(lambda: steps_logged(lab.run) >= 10, agent.is_alive)
        agent.process.send_signal(number)
        assert agent.wait(60) == 1
    assert agent.text().count("stopping after this step") >= 1
    assert agent.text().count("resuming from step") == 0
    check_stopped(lab, number)


def steps_logged(run):
    path = run / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


@pytest.mark.parametrize("number", [TERM, pytest.param(INT, marks=LONG)])
def test_a_second_signal_acts_at_once(lab, number):
    """In a step that would never end: only steps since the last save are lost."""
    held = lab.folder / "held"
    never = lab.folder / "never"
    (process,) = lab.plan(*OPTIONS).start("fault_hooks.hold_in_step", 17, str(held), str(never))
    wait_for((lab.folder / "held-0").exists, process.is_alive)
    process.signal(number)
    wait_for(lambda: "stopping after this step" in process.text(), process.is_alive)
    process.signal(number)
    assert process.wait() in (-number, 128 + number)
    assert "Traceback" not in process.text()
    assert last_step(lab.run) == 3 * EVERY
    assert mark_of(lab.run)["state"] == "running"
    assert mark_of(lab.run)["step"] == 3 * EVERY  # it follows what is saved
    lab.finish()
