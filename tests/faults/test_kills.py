"""SIGKILL, which no process can catch, at random moments: the run goes on and ends the same."""

from __future__ import annotations

import os
import random
import re
import signal
import time
from functools import partial

import pytest
from fault_tools import assert_same, kill_worker, last_step, torchrun, wait_for

LONG = pytest.mark.long
STEPS = 30
OPTIONS = (
    f"--train.steps {STEPS} --checkpoint.every 3 --log.every 1 --validation.every 20 "
    "--model.dropout 0.1 --train.random-length-fraction 0.3"
).split()
FULL, NONE = "--scale.sharding full", "--scale.sharding none"
WAIT, BACKGROUND = "--checkpoint.saving wait", "--checkpoint.saving background"


@pytest.fixture
def draw(request):
    """Random moments; a test's name is its seed."""
    return random.Random(request.node.name)


def is_writing(run):
    folder = run / "checkpoints"
    return folder.exists() and any(n.startswith(".writing-") for n in os.listdir(folder))


def moment(kind, run, draw, alive):
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
        wait_for(lambda: is_writing(run), alive)
        time.sleep(draw.uniform(0, 0.04))


def kill_and_finish(lab, kinds, draw, *options):
    """Kill once in each way; then torchrun must end well, and every kill must have hit."""
    old, killed = set(), []
    with torchrun(lab.args, *options, log=lab.folder / "log") as agent:
        for kind in kinds:
            wait = partial(moment, kind, lab.run, draw)
            killed.append(kill_worker([agent], 2, lab.run, wait, draw, old))
        code, said = agent.wait(), agent.text()
    assert code == 0, said
    # torchrun names the killed one, or the other if that has ended too before it looked
    found = re.findall(r"exitcode: (-?\d+)\) local_rank: \d \(pid: (\d+)\)", said)
    assert len(found) == len(killed), said
    assert all(number != "-9" or int(pid) in killed for number, pid in found), said
    assert "resuming from step" in said
    assert_same(lab.run, lab.truth())


@pytest.mark.long
@pytest.mark.parametrize("saving", [WAIT, BACKGROUND])
@pytest.mark.parametrize("sharding", [NONE, FULL])
@pytest.mark.parametrize("launcher", ["static", "standalone"])
def test_kills_at_random_moments(launcher, sharding, saving, lab, draw):
    """Three kills in each of eight runs: 24."""
    lab.plan(*OPTIONS, *f"{sharding} {saving}".split(), size=2)
    options = ["--max-restarts", "3", *(["--standalone"] if launcher == "standalone" else [])]
    kill_and_finish(lab, draw.sample(["anywhere", "step", "save"], 3), draw, *options)


@pytest.mark.parametrize(
    ("size", "options"),
    [
        (1, WAIT),
        pytest.param(1, BACKGROUND, marks=LONG),
        pytest.param(2, FULL, marks=LONG),
        pytest.param(2, NONE, marks=LONG),
    ],
)
def test_all_processes_killed_then_the_same_command_again(lab, size, options, draw):
    """Between saves and inside one."""
    lab.plan(*OPTIONS, *options.split(), size=size)
    for kind in ("step", "save"):
        group = lab.start()
        moment(kind, lab.run, draw, group[0].is_alive)
        for process in group:
            process.signal(signal.SIGKILL)
        lab.ends(-signal.SIGKILL, group)
        assert last_step(lab.run) < STEPS
    lab.finish()


def test_the_survivor_of_a_kill_says_so_in_one_line(lab, draw):
    group = lab.plan(*OPTIONS, size=2).start()
    moment("step", lab.run, draw, group[0].is_alive)
    group[1].signal(signal.SIGKILL)
    said = lab.ends(1, group[:1])
    assert said.count("error: another process of this run is gone") == 1
