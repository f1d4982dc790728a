"""SIGKILL, which no process can catch, at random moments: the run goes on and ends the same."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import time
from functools import partial

import pytest
from fault_tools import Torchrun, assert_same, kill_worker, last_step, lines_of, wait_for
from warm_processes import free_port

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
    with Torchrun(lab.args, *options, log=lab.folder / "log") as agent:
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
    ("size", "options"), [(1, WAIT), *(pytest.param(2, way, marks=LONG) for way in (FULL, NONE))]
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
    assert said.count("error: another process of this run has died") == 1


@pytest.mark.long
@pytest.mark.parametrize("kills", [0, 2])
@pytest.mark.parametrize(
    ("sharding", "size", "copies"), [("full", 1, "1 x 2"), ("hybrid", 2, "2 x 2")]
)
def test_two_machines_go_on_after_a_kill(lab, sharding, size, copies, kills, draw, monkeypatch):
    """Here two torchrun agents with ``size`` workers each; weights are cut over both, or in each.

    Any worker is killed; both machines restart theirs and finish.
    """
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    lab.plan(*OPTIONS, "--model.dropout", "0", "--scale.sharding", sharding)
    meet = f"--rdzv-backend c10d --rdzv-id test --rdzv-endpoint localhost:{free_port()}".split()
    options, old = ["--nnodes", "2", "--max-restarts", str(kills + 2), *meet], set()
    with (
        Torchrun(lab.args, *options, log=lab.folder / "first", size=size) as first,
        Torchrun(lab.args, *options, log=lab.folder / "second", size=size) as second,
    ):
        for _ in range(kills):
            wait = partial(moment, "step", lab.run, draw)
            kill_worker([first, second], 2 * size, lab.run, wait, draw, old)
        codes = [agent.wait(300) for agent in (first, second)]
    said = first.text() + second.text()
    assert codes == [0, 0], said
    assert said.count("resuming from step") == kills
    layout = json.loads((lab.run / "run.json").read_text())["sharding"]
    assert f"{sharding}, copies x processes per copy {copies}" in layout
    if sharding == "full":  # bit by bit where both cut alike, else nearly
        lab.size = 2
        return assert_same(lab.run, lab.truth())
    for mine, other in zip(lines_of(lab.run), lines_of(lab.truth()), strict=True):
        field = "nll" if mine["kind"] == "validation" else "loss"
        assert mine[field] == pytest.approx(other[field], rel=1e-4)
        assert (mine["step"], mine["tokens"]) == (other["step"], other["tokens"])
