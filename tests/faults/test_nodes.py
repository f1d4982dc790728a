"""Two machines: here two torchrun agents, which meet by a rendezvous."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from fault_tools import (
    Torchrun,
    assert_same,
    checkpoints,
    command,
    last_step,
    lines_of,
    tensors_of,
    torchrun,
    wait_for,
)
from warm_processes import free_port

from bellmask.config import RunConfig

Config = Callable[..., RunConfig]
Truth = Callable[..., Path]
STEPS = 40
OPTIONS = f"--train.steps {STEPS} --checkpoint.every 3 --log.every 1 --model.dropout 0".split()


def node_options(port: int, restarts: int) -> list[str]:
    """What every machine's torchrun is given; an id and a place to meet."""
    meet = f"--rdzv-backend c10d --rdzv-id test --rdzv-endpoint localhost:{port}".split()
    return ["--nnodes", "2", "--max-restarts", str(restarts), *meet]


def finish(agents: list[Torchrun], seconds: float = 300) -> str:
    """Both must end well; what they said."""
    codes = [agent.wait(seconds) for agent in agents]
    said = "\n".join(agent.text() for agent in agents)
    assert codes == [0, 0], said
    return said


@pytest.mark.long
@pytest.mark.parametrize("kills", [0, 1, 2])
@pytest.mark.parametrize(
    ("sharding", "size", "layout"),
    [
        ("full", 1, "full, copies x processes per copy 1 x 2"),
        ("hybrid", 2, "hybrid, copies x processes per copy 2 x 2"),
    ],
)
def test_two_machines_train_and_go_on_after_a_kill(
    sharding: str,
    size: int,
    layout: str,
    kills: int,
    small_config: Config,
    truth: Truth,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Any worker is killed while both train; both machines restart theirs and finish.

    With ``size`` workers each; weights are cut over both machines, or inside each.
    """
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    config = small_config(*OPTIONS, "--scale.sharding", sharding)
    run, draw = tmp_path / "run", random.Random(f"{sharding} {kills}")
    options = node_options(free_port(), kills + 2)
    args, started = command(config, run), time.monotonic()
    with (
        torchrun(args, *options, log=tmp_path / "first", size=size) as first,
        torchrun(args, *options, log=tmp_path / "second", size=size) as second,
    ):
        agents, old = [first, second], set[int]()
        for _ in range(kills):
            kill_one(agents, 2 * size, run, draw, old)
        said = finish(agents)
    assert said.count("exitcode: -9)") == kills
    assert said.count("resuming from step") == kills
    print(f"{kills} kills, {time.monotonic() - started:.0f} s")
    assert layout in json.loads((run / "run.json").read_text())["sharding"]
    check_end(run, config, truth)


def kill_one(
    agents: list[Torchrun], total: int, run: Path, draw: random.Random, old: set[int]
) -> None:
    """SIGKILL the worker of one agent after a checkpoint of the newest start."""

    def is_alive() -> bool:
        return all(agent.is_alive() for agent in agents)

    def workers() -> list[int] | None:
        found = [pid for agent in agents for pid in agent.workers().values()]
        return found if len(found) == total and not old & set(found) else None

    before = wait_for(workers, is_alive)
    step = last_step(run) + draw.randint(1, 8)
    wait_for(lambda: last_step(run) >= step, is_alive)
    assert workers() == before
    assert last_step(run) < STEPS
    os.kill(draw.choice(before), signal.SIGKILL)
    old |= set(before)


def check_end(run: Path, config: RunConfig, truth: Truth) -> None:
    """As in two processes of one machine bit by bit where both cut alike, else nearly."""
    if config.scale.sharding == "full":
        assert_same(run, truth(config, 2))
        return
    alone = truth(config, 1)
    for mine, other in zip(lines_of(run), lines_of(alone), strict=True):
        assert mine["loss"] == pytest.approx(other["loss"], rel=1e-4)
        assert (mine["step"], mine["masked_share"]) == (other["step"], other["masked_share"])
    ours, theirs = (tensors_of(checkpoints(folder)[-1]) for folder in (run, alone))
    assert ours.keys() == theirs.keys()
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-2, atol=1e-4)
