"""Weights held once or cut (FSDP2): the same rows, times and masks exactly, the losses nearly."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pretrained_tools import save_lm
from warm_processes import WarmProcesses, free_port

from bellmask.config import RunConfig
from bellmask.errors import UserError
from bellmask.records import read_metrics
from bellmask.scale_options import ScaleOptions
from bellmask.train.checkpoint import load_tensors
from bellmask.train.distributed import World
from bellmask.train.saving import saves_in_background
from bellmask.train.sharding import pick_layout

Config = Callable[..., RunConfig]
OPTIONS = (
    "--train.steps 6 --model.dropout 0 --validation.every 3 --log.every 1 --validation.blocks 50 "
    "--validation.batch-size 8 --checkpoint.every 4 --optim.ema 0.9 "
    "--validation.samples-every 3 --validation.num-samples 1 --validation.sample-steps 2"
)
FULL = "--scale.sharding full"


TrainAll = Callable[[list[dict[str, Any]], int], None]


@pytest.fixture
def train_all(warm: WarmProcesses, tmp_path: Path) -> TrainAll:
    """``train_all(jobs, 2)``: every job in one start of so many processes."""

    def run(jobs: list[dict[str, Any]], processes: int) -> None:
        path = tmp_path / f"jobs-{processes}-{jobs[0]['out'].name}.json"
        told = [{**job, "out": str(job["out"]), "port": free_port()} for job in jobs]
        path.write_text(json.dumps(told))
        group = warm.start_group(["--version"], processes, ["many_trainings.train", str(path)])
        codes = [process.wait(600) for process in group]
        assert codes == [0] * processes, "\n".join(process.text()[-3000:] for process in group)

    return run


def recorded(folder: Path, kind: str = "train", field: str = "loss") -> list[float]:
    return [r[field] for r in read_metrics(folder / "metrics.jsonl") if r["kind"] == kind]


def seen(folder: Path) -> list[Any]:
    """All training rows of all ranks with their times, in an order of their own."""
    found = [json.loads(path.read_text())["rows"] for path in folder.glob("seen-*.json")]
    return sorted(row for part in found for row in part)


def check_alike(folder: Path, reference: Path, rel: float = 2e-5) -> None:
    assert seen(folder) == seen(reference)
    assert len(seen(folder)) > 0
    for field in ("masked_share", "tokens"):
        assert recorded(folder, field=field) == recorded(reference, field=field)
    for kind, field in (("train", "loss"), ("train", "gradient_norm"), ("validation", "nll")):
        expected = pytest.approx(recorded(reference, kind, field), rel=rel)
        assert recorded(folder, kind, field) == expected, (folder.name, kind, field)


SHORT = "--train.precision bfloat16"
DROPOUT = "--model.dropout 0.1 --train.microbatch-size 2"
"""With the microbatch given, its noise too is that of any number of processes."""
VARIANTS = {
    "plain": "",
    "time": "--model.modulation time",
    "base": "--objective nelbo --law uniform",
    "any_order": "--framework aoarm --validation.draws 2",
    "muon": "--optimizer muon",
    "no_average": "--optim.ema 0 --optim.weight-decay 0.1",
}
LAYOUTS = {
    "copies": "",
    "full": FULL,
    "full_in_parts": f"{FULL} --train.microbatch-size 1 --scale.recompute block",
    "full_selective": f"{FULL} --scale.recompute selective --checkpoint.saving wait",
    "hybrid_of_one": "--scale.sharding hybrid --scale.shard-size 1",
}


def train_layouts(small_config: Config, folder: Path, train_all: TrainAll) -> None:
    """All of the above: one process as ``one-*``, two as ``two-*``."""

    def job(name: str, options: str) -> dict[str, Any]:
        config = small_config(*OPTIONS.split(), *options.split())
        return {"config": config.to_dict(), "out": folder / name}

    train_all(
        [
            *(job(f"one-{name}", options) for name, options in VARIANTS.items()),
            job("one-accumulated", "--train.microbatch-size 2"),
            job("one-recomputed", "--scale.recompute block --train.microbatch-size 4"),
            job("one-selective", "--scale.recompute selective"),
            job("one-short", SHORT),
            job("one-short_time", f"{SHORT} {VARIANTS['time']}"),
            job("one-dropout", DROPOUT),
        ],
        1,
    )
    train_all(
        [
            *(job(f"two-{name}", options) for name, options in LAYOUTS.items()),
            *(job(f"two-{name}", f"{VARIANTS[name]} {FULL}") for name in list(VARIANTS)[1:]),
            job("two-short", f"{SHORT} {FULL}"),
            job("two-short_time", f"{SHORT} {VARIANTS['time']} {FULL}"),
            job("two-dropout", f"{DROPOUT} {FULL}"),
        ],
        2,
    )


def test_every_layout_learns_the_same(
    small_config: Config, tmp_path: Path, train_all: TrainAll
) -> None:
    """One test, because its trainings are shared by all that is asked of them."""
    train_layouts(small_config, tmp_path, train_all)
    for name in ("accumulated", "recomputed", "selective"):
        check_alike(tmp_path / f"one-{name}", tmp_path / "one-plain")
    for name in LAYOUTS:
        check_alike(tmp_path / f"two-{name}", tmp_path / "one-plain")
    for name in list(VARIANTS)[1:]:
        check_alike(tmp_path / f"two-{name}", tmp_path / f"one-{name}")
    check_alike(tmp_path / "two-dropout", tmp_path / "one-dropout")
    assert recorded(tmp_path / "one-dropout") != recorded(tmp_path / "one-plain")
    # weights rounded when gathered instead of when multiplied: same rows, like losses
    for name in ("short", "short_time"):
        check_alike(tmp_path / f"two-{name}", tmp_path / f"one-{name}", rel=5e-3)
        assert (tmp_path / f"two-{name}" / "samples" / "step-000000006.txt").exists()
    assert recorded(tmp_path / "two-short") != recorded(tmp_path / "one-plain")
    for name in ("two-full", "two-muon", "two-copies"):
        check_read_whole(tmp_path / name)
    check_other_numbers_of_processes(small_config, tmp_path, train_all)


def check_read_whole(run: Path) -> None:
    """Every tensor as one process reads it: bit for bit what the processes had together."""
    said = json.loads((run / "seen-0.json").read_text())["hashes"]["4"]
    folder = run / "checkpoints" / "step-000000004"
    tensors = empty_tensors(folder)
    load_tensors(folder, tensors)
    found = {k: hashlib.sha256(t.numpy().tobytes()).hexdigest() for k, t in tensors.items()}
    assert found == said
    assert any(name.startswith("ema.") for name in said)
    assert all(bool(t.abs().sum() > 0) for k, t in tensors.items() if "exp_avg" in k)


def empty_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Zeros of the shapes and types that a checkpoint says it has."""
    from torch.distributed.checkpoint import HuggingFaceStorageReader

    metadata = HuggingFaceStorageReader(str(folder)).read_metadata()
    return {
        name: torch.zeros(entry.size, dtype=entry.properties.dtype)
        for name, entry in metadata.state_dict_metadata.items()
    }


def check_other_numbers_of_processes(
    small_config: Config, tmp_path: Path, train_all: TrainAll
) -> None:
    """One process continues cut weights, and two that cut them what one began."""

    def job(name: str, options: str = "", resume: str = "no") -> dict[str, Any]:
        config = small_config(*OPTIONS.split(), "--train.steps", "9", *options.split())
        return {"config": config.to_dict(), "out": tmp_path / name, "resume": resume}

    train_all([job("nine"), job("two-full", resume="yes")], 1)
    train_all([job("one-plain", FULL, resume="yes")], 2)
    for name in ("two-full", "one-plain"):
        for kind, field in (("train", "loss"), ("validation", "nll")):
            expected = pytest.approx(recorded(tmp_path / "nine", kind, field), rel=2e-5)
            assert recorded(tmp_path / name, kind, field) == expected
        assert recorded(tmp_path / name, field="step") == list(range(1, 10))


STAGES = {
    "cpt": "--start.anneal-steps 4",
    "cpt_low_rank": "--start.lora-rank 2",
    "sft": "--sft.train toy:reverse:3 --sft.min-masks 1 --sft.round-to 8",
}


def test_stages_learn_the_same_with_cut_weights(
    small_config: Config, tmp_path: Path, text_file: Path, train_all: TrainAll
) -> None:
    """Causal LMs opened and fine-tuned by one process, and by two that cut them."""
    folder = tmp_path
    tied = save_lm(folder / "gpt2", "gpt2", text_file.read_text())
    other = save_lm(folder / "llama", "llama", text_file.read_text())
    for processes, more in ((1, ""), (2, FULL)):
        jobs = []
        for name, options in STAGES.items():
            start = f"--start.model {other if name == 'sft' else tied} --data.block-length 48"
            args = f"{OPTIONS} --train.microbatch-size 2 {start} {options} {more}"
            config = small_config(*args.split())
            jobs.append({"config": config.to_dict(), "out": folder / f"{processes}-{name}"})
        train_all(jobs, processes)
    for name in STAGES:
        check_alike(folder / f"2-{name}", folder / f"1-{name}", rel=1e-4)


@pytest.mark.long
def test_four_processes_in_two_groups_learn_what_one_does(
    small_config: Config, tmp_path: Path, train_all: TrainAll
) -> None:
    for processes, more in ((1, ""), (4, "--scale.sharding hybrid --scale.shard-size 2")):
        config = small_config(*OPTIONS.split(), "--train.microbatch-size", "1", *more.split())
        job = {"config": config.to_dict(), "out": tmp_path / str(processes)}
        train_all([job], processes)
    check_alike(tmp_path / "4", tmp_path / "1")


@pytest.mark.long
def test_compiled_blocks_can_be_cut_and_recomputed(
    small_config: Config, tmp_path: Path, train_all: TrainAll
) -> None:
    compiled = f"--train.compile --scale.recompute selective {FULL}"
    for processes, more in ((1, ""), (2, compiled)):
        config = small_config(*OPTIONS.split(), *more.split())
        job = {"config": config.to_dict(), "out": tmp_path / str(processes)}
        train_all([job], processes)
    check_alike(tmp_path / "2", tmp_path / "1", rel=1e-4)


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
def test_layouts(options: ScaleOptions, world: World, copies: int, per_copy: int) -> None:
    layout = pick_layout(options, world)
    assert (layout.copies, layout.processes_per_copy) == (copies, per_copy)
    assert layout.is_sharded == (per_copy > 1)
    assert layout.reason in str(layout)


def test_groups_that_do_not_divide_the_processes_are_refused() -> None:
    with pytest.raises(UserError, match="shard_size=3 does not divide 16 processes"):
        pick_layout(ScaleOptions("hybrid", 3), World(0, 16, machine_size=8))


def test_saving_waits_only_for_one_process_on_a_cpu() -> None:
    assert not saves_in_background("auto", World())
    assert saves_in_background("auto", World(size=2))
    assert saves_in_background("auto", World(device=GPU))
    assert saves_in_background("background", World())
    assert not saves_in_background("wait", World(size=2))
