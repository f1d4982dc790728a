"""Weights held once or cut (FSDP2): the same rows, times and masks exactly, the losses nearly."""

from __future__ import annotations

import json

import pytest
import torch
from fault_tools import assert_same
from pretrained_tools import save_lm
from warm_processes import free_port

from bellmask.config.options import ScaleOptions
from bellmask.storage.checkpoint import saves_in_background
from bellmask.storage.run_folder import read_metrics
from bellmask.train.parallel import pick_layout
from bellmask.utils.distributed import World
from bellmask.utils.errors import UserError

LONG = pytest.mark.long
OPTIONS = (
    "--train.steps 6 --model.dropout 0 --validation.every 3 --log.every 1 --validation.blocks 50 "
    "--validation.batch-size 8 --checkpoint.every 4 --optim.ema 0.9 "
    "--validation.samples-every 3 --validation.num-samples 1 --validation.sample-steps 2"
)
FULL = "--scale.sharding full"
SHORT = "--train.precision bfloat16 --model.modulation time"
SFT = "--sft.train toy:reverse:3 --sft.min-masks 1 --sft.round-to 8"
IN_PARTS = f"{FULL} --train.microbatch-size 1 --scale.recompute"
DROPOUT = "--model.dropout 0.1 --train.microbatch-size 2"
"""With the microbatch given, its noise too is that of any number of processes."""

FEW = {
    "": (["--train.microbatch-size 2 --scale.recompute block"], ["", f"{IN_PARTS} selective"]),
    f"{DROPOUT} --optimizer muon --optim.weight-decay 0.1": ([], [FULL]),
    SHORT: ([], [FULL]),
}
"""Options: in which other ways one process must learn the same with them, and two."""
MANY = {
    "": (
        ["--train.microbatch-size 2", "--scale.recompute selective"],
        [FULL, f"{IN_PARTS} block", "--scale.sharding hybrid --scale.shard-size 1"],
    ),
    "--model.modulation time": ([], [FULL]),
    "--objective nelbo --law uniform": ([], [FULL]),
    "--framework aoarm --validation.draws 2": ([], [FULL]),
    "--optimizer muon": ([], [FULL]),
    "--optim.ema 0 --optim.weight-decay 0.1": ([], ["", FULL]),
    "--train.precision bfloat16": ([], [FULL]),
    DROPOUT: ([], ["", FULL]),
}


@pytest.fixture
def train_all(warm, small_config, tmp_path):
    """``train_all({"a": "--train.steps 3"}, 2)``: all in one start of so many processes."""

    def run(jobs, processes, resume="no"):
        told = []
        for name, options in jobs.items():
            config = small_config(*OPTIONS.split(), *options.split()).to_dict()
            out, port = str(tmp_path / name), free_port()
            told.append({"config": config, "out": out, "resume": resume, "port": port})
        path = tmp_path / "jobs.json"
        path.write_text(json.dumps(told))
        group = warm.start_group(["--version"], processes, ["many_trainings.train", str(path)])
        codes = [process.wait(600) for process in group]
        assert codes == [0] * processes, "\n".join(process.text()[-3000:] for process in group)

    return run


def recorded(folder, kind="train", field="loss"):
    return [r[field] for r in read_metrics(folder / "metrics.jsonl") if r["kind"] == kind]


def seen(folder):
    """All training rows of all ranks with their times, in an order of their own."""
    found = [json.loads(path.read_text()) for path in folder.glob("seen-*.json")]
    return sorted(row for part in found for row in part)


def check_alike(folder, reference, rel=2e-5):
    assert seen(folder) == seen(reference)
    assert len(seen(folder)) > 0
    for field in ("masked_share", "tokens"):
        assert recorded(folder, field=field) == recorded(reference, field=field)
    for kind, field in (("train", "loss"), ("train", "gradient_norm"), ("validation", "nll")):
        expected = pytest.approx(recorded(reference, kind, field), rel=rel)
        assert recorded(folder, kind, field) == expected, (folder.name, kind, field)


@pytest.mark.parametrize(
    "cases", [pytest.param(FEW, id="few"), pytest.param(MANY, id="many", marks=LONG)]
)
def test_every_layout_learns_the_same(cases, train_all, tmp_path):
    """One test, because its trainings are shared by all that is asked of them."""
    one, two, alike = {}, {}, []
    for number, (options, (ways_of_one, ways_of_two)) in enumerate(cases.items()):
        one[f"{number}"] = options
        for jobs, letter, ways in ((one, "a", ways_of_one), (two, "b", ways_of_two)):
            for n, way in enumerate(ways):
                jobs[f"{number}-{letter}{n}"] = f"{options} {way}"
                # weights are rounded when gathered instead of when multiplied
                rel = 5e-3 if "bfloat16" in options else 2e-5
                alike.append((f"{number}-{letter}{n}", f"{number}", rel))
    train_all(one, 1)
    train_all(two, 2)
    for name, reference, rel in alike:
        check_alike(tmp_path / name, tmp_path / reference, rel)
        assert (tmp_path / name / "samples" / "step-000000006.txt").exists()
    losses = [recorded(tmp_path / f"{number}") for number in range(len(cases))]
    assert all(other != losses[0] for other in losses[1:])
    # one process continues cut weights, and two that cut them what one began
    train_all(dict.fromkeys(("nine", "0-b1"), "--train.steps 9"), 1, resume="auto")
    train_all({"0": f"--train.steps 9 {FULL}"}, 2, resume="auto")
    for name in ("0-b1", "0"):
        for kind, field in (("train", "loss"), ("validation", "nll")):
            expected = pytest.approx(recorded(tmp_path / "nine", kind, field), rel=2e-5)
            assert recorded(tmp_path / name, kind, field) == expected
        assert recorded(tmp_path / name, field="step") == list(range(1, 10))


@pytest.mark.long
def test_stages_learn_the_same_with_two_processes(tmp_path, text_file, train_all):
    """Causal LMs opened and fine-tuned by one process, by two replicas, and by two that cut them.

    Of a replica some rows may be without a mask, and with low-rank updates most weights are frozen.
    """
    text = text_file.read_text()
    tied, other = (save_lm(tmp_path / kind, kind, text) for kind in ("gpt2", "llama"))
    stages = {
        "cpt": f"--start.model {tied} --start.anneal-steps 4",
        "low_rank": f"--start.model {tied} --start.lora-rank 2",
        "sft": f"--start.model {other} {SFT}",
    }
    more = " --train.microbatch-size 2 --data.block-length 48"
    train_all({name: options + more for name, options in stages.items()}, 1)
    ways = {"replicas": "", "cut": FULL}
    jobs = {f"{n}-{way}": f"{stages[n]} {ways[way]} {more}" for n in stages for way in ways}
    train_all(jobs, 2)
    for name in jobs:
        check_alike(tmp_path / name, tmp_path / name.split("-")[0], rel=1e-4)


@pytest.mark.long
@pytest.mark.parametrize(
    ("processes", "options", "how", "rel"),
    [
        (4, "--train.microbatch-size 1", "--scale.sharding hybrid --scale.shard-size 2", 2e-5),
        (2, "", f"--train.compile --scale.recompute selective {FULL}", 1e-4),
        (2, "", "--train.compile --scale.recompute block", 1e-4),
    ],
)
def test_groups_and_compiled_blocks(processes, options, how, rel, tmp_path, train_all):
    train_all({"one": options}, 1)
    train_all({"other": f"{options} {how}"}, processes)
    check_alike(tmp_path / "other", tmp_path / "one", rel)


@pytest.mark.parametrize("processes", [2, pytest.param(3, marks=LONG)])
def test_replicas_resume_exactly(processes, tmp_path, train_all):
    """With three the order of sums depends on DDP's buckets: they must be those of before."""
    options = "--train.batch-size 12 --train.microbatch-size 2 --model.dropout 0.1"
    train_all({"whole": options, "parts": f"{options} --train.steps 3"}, processes)
    train_all({"parts": options}, processes, resume="yes")
    assert_same(tmp_path / "parts", tmp_path / "whole")


GPU = torch.device("cuda")


@pytest.mark.parametrize(
    ("options", "world", "copies", "per_copy"),
    [
        (ScaleOptions(), World(), 1, 1),
        (ScaleOptions("full"), World(), 1, 1),
        (ScaleOptions(), World(0, 4, machine_size=4), 4, 1),
        (ScaleOptions(), World(0, 4, GPU, machine_size=4), 1, 4),
        (ScaleOptions(), World(0, 16, GPU, machine_size=8), 2, 8),
        (ScaleOptions("none"), World(0, 16, GPU, machine_size=8), 16, 1),
        (ScaleOptions("full"), World(0, 16, GPU, machine_size=8), 1, 16),
        (ScaleOptions("hybrid"), World(0, 16, GPU, machine_size=8), 2, 8),
        (ScaleOptions("hybrid", 4), World(0, 16, GPU, machine_size=8), 4, 4),
        (ScaleOptions(shard_size=4), World(0, 16, machine_size=16), 4, 4),
    ],
)
def test_layouts(options, world, copies, per_copy):
    layout = pick_layout(options, world)
    assert (layout.copies, layout.processes_per_copy) == (copies, per_copy)
    assert layout.is_sharded == (per_copy > 1)
    assert layout.reason in str(layout)
    kind = "none" if per_copy == 1 else "full" if copies == 1 else "hybrid"
    assert str(layout).startswith(kind)
    with pytest.raises(UserError, match="shard_size=3"):
        pick_layout(ScaleOptions("hybrid", 3), World(0, 16, machine_size=8))


def test_saving_waits_only_for_one_process_on_a_cpu():
    assert not saves_in_background("auto", World())
    assert saves_in_background("auto", World(size=2))
    assert saves_in_background("auto", World(device=GPU))
    assert saves_in_background("background", World())
    assert not saves_in_background("wait", World(size=2))
