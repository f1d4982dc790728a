"""SIGTERM and SIGINT: the step is finished and saved, the folder says how to go on."""

from __future__ import annotations

import shlex
import signal

import pytest
from fault_tools import Torchrun, last_step, lines_of, mark_of, wait_for

LONG = pytest.mark.long
STEPS, EVERY = 20, 5
OPTIONS = (
    f"--train.steps {STEPS} --checkpoint.every {EVERY} --log.every 1 --checkpoint.keep-last 2 "
    "--model.dropout 0.1"
).split()
TERM, INT = signal.SIGTERM, signal.SIGINT
WAIT, BACKGROUND = "--checkpoint.saving wait", "--checkpoint.saving background"
FULL = "--scale.sharding full"


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


@pytest.mark.parametrize(
    ("number", "options", "size", "hook"),
    [
        (TERM, WAIT, 1, "hold_in_step"),
        (INT, "", 1, "nobody_reads"),
        (TERM, FULL, 2, "hold_in_step"),
        pytest.param(TERM, "--scale.sharding none", 2, "hold_in_step", marks=LONG),
        pytest.param(INT, BACKGROUND, 1, "hold_in_step", marks=LONG),
    ],
)
def test_a_signal_to_one_worker_stops_all(lab, number, options, size, hook):
    """Nobody reads after ``bellmask train ... | tee log`` and Ctrl-C, which ends tee too."""
    go, held = lab.folder / "go", str(lab.folder / "held")
    group = lab.plan(*OPTIONS, *options.split(), size=size).start(
        f"fault_hooks.{hook}", 11, held, str(go)
    )
    for rank, process in enumerate(group):
        wait_for((lab.folder / f"held-{rank}").exists, process.is_alive)
    assert mark_of(lab.run)["state"] == "running"
    group[-1].signal(number)
    go.touch()
    said = lab.ends(128 + number, group)
    assert said == "" if hook == "nobody_reads" else "stopped at step 12" in said
    check_stopped(lab, number)


@pytest.mark.long
@pytest.mark.parametrize(
    ("number", "saving", "options"), [(TERM, BACKGROUND, ()), (INT, WAIT, ("--standalone",))]
)
def test_torchrun_stops_and_goes_on(lab, number, saving, options):
    """torchrun's exit code says nothing (always 1), the mark does. It does not restart either."""
    lab.plan(*OPTIONS, *FULL.split(), *saving.split(), size=2)
    options = (*options, "--max-restarts", "3")
    with Torchrun(lab.args, *options, log=lab.folder / "log") as agent:
        wait_for(lambda: last_step(lab.run) >= 2 * EVERY, agent.is_alive)
        agent.process.send_signal(number)
        assert agent.wait(60) == 1
    assert agent.text().count("stopping after this step") >= 1
    assert agent.text().count("resuming from step") == 0
    check_stopped(lab, number)


@pytest.mark.parametrize("number", [TERM, pytest.param(INT, marks=LONG)])
def test_a_second_signal_acts_at_once(lab, number):
    """In a step that would never end: only steps since the last save are lost."""
    held, never = str(lab.folder / "held"), str(lab.folder / "never")
    (process,) = lab.plan(*OPTIONS).start("fault_hooks.hold_in_step", 17, held, never)
    wait_for((lab.folder / "held-0").exists, process.is_alive)
    process.signal(number)
    wait_for(lambda: "stopping after this step" in process.text(), process.is_alive)
    process.signal(number)
    assert process.wait() in (-number, 128 + number)
    assert "Traceback" not in process.text()
    mark = mark_of(lab.run)
    assert (mark["state"], mark["step"], last_step(lab.run)) == ("running", 15, 15)
    lab.finish()
