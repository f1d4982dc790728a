"""Weights held once or cut (FSDP2): the same rows, times and masks exactly, the losses nearly."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
import torch
from fault_tools import assert_same, command
from pretrained_tools import save_lm
from warm_processes import free_port

from bellmask.config.options import ModelOptions, ScaleOptions
from bellmask.model.transformer import Denoiser
from bellmask.storage.checkpoint import saves_in_background
from bellmask.storage.run_folder import read_metrics, resume_command
from bellmask.train.parallel import parallelize, pick_layout, plan_parallel
from bellmask.utils.distributed import World, open_world, pick_device, pick_precision
from bellmask.utils.errors import UserError

LONG = pytest.mark.long
OPTIONS = (
    "--train.steps 6 --model.dropout 0 --validation.every 3 --log.every 1 --validation.blocks 50 "
    "--validation.batch-size 8 --checkpoint.every 4 --optim.ema 0.9 "
    "--validation.samples-every 3 --validation.num-samples 1 --validation.sample-steps 2"
)
FULL = "--scale.sharding full"
SFT = "--sft.train toy:reverse:3 --sft.min-masks 1 --sft.round-to 8"
PARTS = f"{FULL} --train.microbatch-size 1 --scale.recompute selective"
DROPOUT = "--model.dropout 0.1 --train.microbatch-size 2"
"""With the microbatch given, its noise too is that of any number of processes."""

FEW = [
    ("", {"--train.microbatch-size 2 --scale.recompute block": 1, "": 2, PARTS: 2}),
    (f"{DROPOUT} --optimizer muon --optim.weight-decay 0.1", {FULL: 2}),
    ("--train.precision bfloat16 --model.modulation time --model.local-conv 3", {FULL: 2}),
    ("--law progress --train.microbatch-size 2", {"": 2, FULL: 2}),
]
"""Options, and in which other ways (and numbers of processes) a run must learn the same."""
STAGE = "--train.microbatch-size 2 --data.block-length 48"
MANY = [
    (
        "",
        {
            "--train.microbatch-size 2": 1,
            "--scale.recompute selective": 1,
            FULL: 2,
            f"{FULL} --train.microbatch-size 1 --scale.recompute block": 2,
            "--scale.sharding hybrid --scale.shard-size 1": 2,
            "--scale.sharding hybrid --scale.shard-size 2 --train.microbatch-size 1": 4,
            f"--train.compile True --scale.recompute selective {FULL}": 2,
            "--train.compile True --scale.recompute block": 2,
        },
    ),
    ("--model.modulation time", {FULL: 2}),
    ("--objective nelbo --law uniform", {FULL: 2}),
    ("--framework aoarm --validation.draws 2", {FULL: 2}),
    ("--optim.ema 0 --optim.weight-decay 0.1", {"": 2, FULL: 2}),
    (DROPOUT, {"": 2, FULL: 2}),
    # of a replica some rows may be without a mask; with low-rank updates most weights are frozen
    (f"{STAGE} --start.model TIED --start.anneal-steps 4", {"": 2, FULL: 2}),
    (f"{STAGE} --start.model TIED --start.lora-rank 2", {"": 2, FULL: 2}),
    (f"{STAGE} --start.model OTHER {SFT}", {"": 2, FULL: 2}),
]


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
def test_every_layout_learns_the_same(cases, train_all, tmp_path, text_file):
    """One test, because trainings in the same number of processes share their start."""
    places = {
        name: str(save_lm(tmp_path / kind, kind, text_file.read_text()))
        for name, kind in (("TIED", "gpt2"), ("OTHER", "llama"))
    }
    jobs = {1: {}}
    for number, (options, ways) in enumerate(cases):
        for name, place in places.items():
            options = options.replace(name, place)
        jobs[1][f"{number}"] = options
        for n, (way, processes) in enumerate(ways.items()):
            jobs.setdefault(processes, {})[f"{number}-{n}"] = f"{options} {way}"
    for processes, some in jobs.items():
        train_all(some, processes)
    for name, options in (pair for some in jobs.values() for pair in some.items()):
        # of bfloat16 weights are rounded when gathered instead of when multiplied
        rel = 5e-3 if "bfloat16" in options else 1e-4 if "compile" in options else 2e-5
        rel = max(rel, 1e-4) if "start.model" in options else rel
        check_alike(tmp_path / name, tmp_path / name.split("-")[0], rel)
        assert (tmp_path / name / "samples" / "step-000000006.txt").exists()
    losses = [recorded(tmp_path / f"{number}") for number in range(len(cases))]
    assert all(other != losses[0] for other in losses[1:])
    # one process continues cut weights, and two that cut them what one began
    train_all(dict.fromkeys(("nine", "0-2"), "--train.steps 9"), 1, resume="auto")
    train_all({"0": f"--train.steps 9 {FULL}"}, 2, resume="auto")
    for name in ("0-2", "0"):
        for kind, field in (("train", "loss"), ("validation", "nll")):
            expected = pytest.approx(recorded(tmp_path / "nine", kind, field), rel=2e-5)
            assert recorded(tmp_path / name, kind, field) == expected
        assert recorded(tmp_path / name, field="step") == list(range(1, 10))


@pytest.mark.parametrize("processes", [2, pytest.param(3, marks=LONG)])
def test_replicas_resume_exactly(processes, tmp_path, train_all):
    """With three the order of sums depends on DDP's buckets: they must be those of before."""
    options = "--train.batch-size 12 --train.microbatch-size 2 --model.dropout 0.1"
    train_all({"whole": options, "parts": f"{options} --train.steps 3"}, processes)
    train_all({"parts": options}, processes, resume="yes")
    assert_same(tmp_path / "parts", tmp_path / "whole")


# --- processes that come late


def test_a_process_that_is_late_at_the_end_ends_well(small_config, tmp_path, warm):
    """The main process holds the store here, as on several machines: it must not leave first."""
    args = command(small_config("--train.steps", "2"), tmp_path / "run")
    warm.run(args, 2, prepare=["fault_hooks.hear_late", 1, 0.5])
    assert not (tmp_path / "run" / "RESUME_ME").exists()


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--data.train", "nothing.txt"], "nothing.txt"),
        pytest.param(["--train.batch-size", "9"], "train.batch_size=9", marks=LONG),
    ],
)
def test_a_late_process_hears_what_went_wrong(options, named, small_config, tmp_path, warm):
    args = command(small_config(*options), tmp_path / "run")
    group = warm.start_group(args, prepare=["fault_hooks.hear_late", 1, 1.0])
    assert [process.wait() for process in group] == [2, 2]
    said = "".join(process.text() for process in group)
    assert said.count("error: ") == 1
    assert named in said
    assert not (tmp_path / "run").exists()


# --- what a run decides for its devices and number of processes

GPU = torch.device("cuda")


def test_restarts_on_several_machines_need_a_new_store(monkeypatch):
    told = {"WORLD_SIZE": "2", "GROUP_WORLD_SIZE": "2", "TORCHELASTIC_MAX_RESTARTS": "3"}
    for name, value in (told | {"TORCHELASTIC_USE_AGENT_STORE": "True"}).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match="SHARE_RDZV_TCP_STORE=1"), open_world("cpu"):
        pass


@pytest.mark.parametrize(("device", "told"), [("cpu", None), ("cuda:1", [1])])
def test_processes_wait_on_their_own_gpu(device, told, monkeypatch):
    """Without being told, NCCL guesses which one it is, and torch warns."""
    seen = []
    monkeypatch.setattr(torch.distributed, "barrier", lambda **how: seen.append(how["device_ids"]))
    World(size=2, device=torch.device(device)).barrier()
    assert seen == [told]


def test_devices_precisions_and_saving(monkeypatch):
    """auto is float32 on every CPU, whatever it can do; only one process on a CPU waits."""
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
    assert pick_device("auto") == torch.device("cpu")
    assert pick_precision("auto", torch.device("cpu")) == torch.float32
    assert pick_precision("bfloat16", torch.device("cpu")) == torch.bfloat16
    for option in ("cuda", "cuda:1", "tpu"):
        with pytest.raises(UserError, match=option):
            pick_device(option)
    worlds = [World(), World(size=2), World(device=GPU)]
    assert [saves_in_background("auto", world) for world in worlds] == [False, True, True]
    assert saves_in_background("background", World())
    assert not saves_in_background("wait", World(size=2))


REDUCE = "--scale.reduce bfloat16"


@pytest.mark.parametrize(
    ("options", "size", "named", "kernel"),
    [
        ("", 1, [], "torch"),
        (FULL, 1, ["scale.sharding"], "torch"),
        ("--scale.sharding hybrid --scale.shard-size 1", 2, ["scale.sharding"], "torch"),
        (f"{FULL} {REDUCE}", 2, ["scale.reduce=bfloat16"], "torch"),
        (f"{FULL} {REDUCE} --train.precision bfloat16", 2, [], "chunked"),
        ("--objective nelbo --law uniform", 1, [], "chunked"),
        ("--scale.loss chunked", 1, [], "chunked"),
    ],
)
def test_options_that_do_not_apply_are_named(options, size, named, kernel, small_config):
    """And the kernel is the one that suits the options."""
    plan = plan_parallel(small_config(*options.split()), World(size=size, machine_size=size))
    assert len(plan.notes) == len(named)
    assert all(name in note for note, name in zip(plan.notes, named, strict=True))
    assert plan.describe()["loss_kernel"] == kernel


@pytest.mark.parametrize("objective", ["bell --law gaussian", "nelbo --law uniform"])
def test_none_compiles_on_gpus_where_both_objectives_have_the_same_loss(
    objective, small_config, monkeypatch
):
    monkeypatch.setattr("torch.utils._triton.has_triton", lambda: True)
    options = f"--train.compile None --train.precision float32 --objective {objective}".split()
    config = small_config(*options)
    told = plan_parallel(config, World(device=GPU)).describe()
    assert (told["compile"], told["loss_kernel"]) == ("blocks", "compiled")
    assert plan_parallel(config, World()).describe()["compile"] == "off"


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's compiler of torch.jit
@torch.no_grad()
def test_another_number_of_masked_rows_compiles_nothing_anew(small_config):
    plan, graphs = plan_parallel(small_config("--train.compile", "True"), World()), []
    options = ModelOptions(num_layers=2, width=16, num_heads=2, dropout=0.0)
    model = parallelize(Denoiser(options, 9), plan, torch.device("cpu"))
    for count in (20, 13, 7):
        model(torch.ones(4, 8, dtype=torch.long), torch.arange(count), torch.arange(count) % 9)
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert graphs[0] == graphs[1] == graphs[2] > 0


@pytest.mark.parametrize(("given", "expected"), [("", ""), ("L['x']", "L['x'],")])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's compiler of torch.jit
def test_sources_that_the_user_marks_as_dynamic_stay_so(given, expected, small_config):
    plan = plan_parallel(small_config("--train.compile", "True"), World())
    with torch.compiler.config.patch(dynamic_sources=given):
        for _ in range(2):  # the second time it is there
            parallelize(Denoiser(ModelOptions(num_layers=1, width=16), 9), plan, World().device)
        assert torch.compiler.config.dynamic_sources == f"{expected}L['rows_N']"


def test_blocks_are_not_compiled_without_a_compiler(small_config, monkeypatch):
    """By default a note says so; on request it is an error."""
    given, auto = (
        small_config("--train.precision", "float32", "--train.compile", what)
        for what in ("True", "None")
    )
    monkeypatch.setattr("torch.utils._triton.has_triton", lambda: True)
    monkeypatch.setenv("CC", "no-such-compiler")
    monkeypatch.setenv("CXX", "no-such-compiler")
    for world, variable in ((World(device=GPU), "CC"), (World(), "CXX")):
        with pytest.raises(UserError, match=f"train.compile needs .* variable {variable} "):
            plan_parallel(given, world)
    monkeypatch.setattr("torch.utils._triton.has_triton", lambda: False)
    plan = plan_parallel(auto, World(device=GPU))
    assert (plan.is_compiled, plan.loss_kernel) == (False, "torch")
    assert plan.notes == (
        "blocks are not compiled: train.compile needs triton, and a GPU that it supports",
    )


@pytest.mark.parametrize(
    ("options", "world", "copies", "per_copy"),
    [
        (ScaleOptions(), World(0, 16, GPU, machine_size=8), 16, 1),
        (ScaleOptions(), World(), 1, 1),
        (ScaleOptions("full"), World(), 1, 1),
        (ScaleOptions(), World(0, 4, machine_size=4), 4, 1),
        (None, World(0, 4, GPU, machine_size=4), 1, 4),
        (None, World(0, 16, GPU, machine_size=8), 2, 8),
        (ScaleOptions("none"), World(0, 16, GPU, machine_size=8), 16, 1),
        (ScaleOptions("full"), World(0, 16, GPU, machine_size=8), 1, 16),
        (ScaleOptions("hybrid"), World(0, 16, GPU, machine_size=8), 2, 8),
        (ScaleOptions("hybrid", 4), World(0, 16, GPU, machine_size=8), 4, 4),
        (ScaleOptions(shard_size=4), World(0, 16, machine_size=16), 4, 4),
    ],
)
def test_layouts(options, world, copies, per_copy):
    """None: auto, for a model that is too large for copies."""
    layout = pick_layout(options or ScaleOptions(), world, is_large=options is None)
    assert (layout.copies, layout.processes_per_copy) == (copies, per_copy)
    assert layout.is_sharded == (per_copy > 1)
    kind = "none" if per_copy == 1 else "full" if copies == 1 else "hybrid"
    assert str(layout).startswith(kind)
    with pytest.raises(UserError, match="shard_size=3"):
        pick_layout(ScaleOptions("hybrid", 3), World(0, 16, machine_size=8))


@pytest.mark.parametrize(
    ("processes", "per_machine", "launch"),
    [(1, 1, "bellmask"), (16, 8, "torchrun --nnodes 2 --nproc-per-node 8 -m bellmask")],
)
def test_the_command_that_continues(processes, per_machine, launch):
    """Of several processes on one machine: tests/faults/test_signals.py."""
    words = shlex.split(resume_command(Path("my runs/x"), processes, per_machine))
    rest = ["train", "my runs/x/config.json", "--out", "my runs/x", "--resume", "auto"]
    assert words == [*launch.split(), *rest]
