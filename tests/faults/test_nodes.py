"""Two machines: here two torchrun agents, which meet by a rendezvous."""

from __future__ import annotations

import json
import random
from functools import partial

import pytest
from fault_tools import assert_same, kill_worker, last_step, lines_of, torchrun, wait_for
from warm_processes import free_port

OPTIONS = "--train.steps 40 --checkpoint.every 3 --log.every 1 --model.dropout 0".split()


def moment(run, draw, alive):
    """After a checkpoint of the newest start."""
    step = last_step(run) + draw.randint(1, 8)
    wait_for(lambda: last_step(run) >= step, alive)


@pytest.mark.long
@pytest.mark.parametrize("kills", [0, 2])
@pytest.mark.parametrize(
    ("sharding", "size", "copies"), [("full", 1, "1 x 2"), ("hybrid", 2, "2 x 2")]
)
def test_two_machines_train_and_go_on_after_a_kill(lab, sharding, size, copies, kills, monkeypatch):
    """Any worker is killed while both train; both machines restart theirs and finish.

    With ``size`` workers each; weights are cut over both machines, or inside each.
    """
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    lab.plan(*OPTIONS, "--scale.sharding", sharding)
    draw, old = random.Random(f"{sharding} {kills}"), set()
    meet = f"--rdzv-backend c10d --rdzv-id test --rdzv-endpoint localhost:{free_port()}".split()
    options = ["--nnodes", "2", "--max-restarts", str(kills + 2), *meet]
    with (
        torchrun(lab.args, *options, log=lab.folder / "first", size=size) as first,
        torchrun(lab.args, *options, log=lab.folder / "second", size=size) as second,
    ):
        for _ in range(kills):
            kill_worker(
                [first, second], 2 * size, lab.run, partial(moment, lab.run, draw), draw, old
            )
        codes = [agent.wait(300) for agent in (first, second)]
    said = first.text() + second.text()
    assert codes == [0, 0], said
    assert said.count("resuming from step") == kills
    layout = json.loads((lab.run / "run.json").read_text())["sharding"]
    assert f"{sharding}, copies x processes per copy {copies}" in layout
    check_end(lab)


def check_end(lab):
    """As in two processes of one machine bit by bit where both cut alike, else nearly."""
    if lab.config.scale.sharding == "full":
        lab.size = 2
        return assert_same(lab.run, lab.truth())
    alone = lab.truth()
    for mine, other in zip(lines_of(lab.run), lines_of(alone), strict=True):
        assert mine["loss"] == pytest.approx(other["loss"], rel=1e-4)
        assert (mine["step"], mine["masked_share"]) == (other["step"], other["masked_share"])
