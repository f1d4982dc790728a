"""Expected times: the paper's runs, closed forms of communication, and the probe."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from bellmask.cli import run_command
from bellmask.config import RunConfig
from bellmask.errors import UserError
from bellmask.plan.devices import DEVICES, Cluster, parse_devices
from bellmask.plan.network import Parameters
from bellmask.plan.planner import plan
from bellmask.plan.probe import local_device
from bellmask.plan.timing import (
    HOP_SECONDS,
    LAUNCH_SECONDS,
    LINK_SHARE,
    Communication,
    Timing,
    communicate,
    device_seconds,
    gather_seconds,
    ideal_seconds,
)
from bellmask.plan.tracer import Kernel
from bellmask.presets import preset
from bellmask.train.sharding import Layout

H100 = DEVICES["H100"]


@pytest.mark.parametrize(
    ("name", "devices", "hours"),
    [("lm1b", "2xH200", 100), ("owt", "4xH100", 300), ("cpt_gpt2_large", "4xB200", 50)],
)
def test_the_papers_runs_take_what_they_took(name: str, devices: str, hours: float) -> None:
    """App. C.1, all by the same assumptions: within a factor of 2."""
    made = plan(preset(name), devices)
    assert hours / 2 < made.timing.hours < hours * 2


def test_a_kernel_takes_its_products_or_its_bytes() -> None:
    kernels = Counter({Kernel("mm", int(989e12), 10): 2, Kernel("add", 0, int(3350e9)): 3})
    assert ideal_seconds(kernels, H100, "bfloat16") == pytest.approx(2 + 3)
    assert ideal_seconds(kernels, H100, "float32") == pytest.approx(2 * 989 / 67 + 3)
    assert device_seconds(1.0, 10, H100, 0.25) == 4
    assert device_seconds(1e-9, 1000, H100, 0.25) == pytest.approx(1000 * LAUNCH_SECONDS)
    assert device_seconds(1e-3, 10**6, DEVICES["CPU"], 0.5) == 2e-3


def test_rings_send_all_but_their_own_share() -> None:
    inside, outside = HOP_SECONDS["machine"], HOP_SECONDS["network"]
    one = Cluster(H100, 8)
    size = 1e9
    assert gather_seconds(size, 1, one, is_spread=False) == 0
    expected = size * 7 / 8 / (450e9 * LINK_SHARE) + 7 * inside
    assert gather_seconds(size, 8, one, is_spread=False) == pytest.approx(expected)
    many = Cluster(H100, 8, 4)
    # 8 devices share the way out of a machine: 400 GB/s, less than the link
    expected = size * 31 / 32 / (400e9 * LINK_SHARE) + 28 * inside + 3 * outside
    assert gather_seconds(size, 32, many, is_spread=False) == pytest.approx(expected)
    expected = size * 3 / 4 / (50e9 * LINK_SHARE) + 3 * outside
    assert gather_seconds(size, 4, many, is_spread=True) == pytest.approx(expected)


def test_each_layout_communicates_what_it_must() -> None:
    some = Parameters(1000, 1000, 100, 800, 100, 7, 100, 10)
    many = Cluster(H100, 8, 4)
    common = {"gathered_bytes": 2, "reduced_bytes": 4}
    alone = communicate(some, Layout(1, 1, ""), Cluster(H100, 1), microbatches=1, **common)
    assert alone.total == 0
    none = communicate(some, Layout(32, 1, ""), many, microbatches=3, **common)
    assert none.total == 2 * gather_seconds(4000, 32, many, is_spread=False)
    full = communicate(some, Layout(1, 32, ""), many, microbatches=3, **common)
    each = gather_seconds(2 * 1000 / 8, 32, many, is_spread=False)
    assert full.gathering == pytest.approx(3 * 15 * each)
    assert full.reducing == pytest.approx(8 * gather_seconds(500, 32, many, is_spread=False))
    assert full.between_copies == 0
    hybrid = communicate(some, Layout(4, 8, ""), many, microbatches=3, **common)
    assert hybrid.gathering < full.gathering, "a copy is inside a machine"
    assert hybrid.between_copies == 2 * gather_seconds(500, 4, many, is_spread=True)


def test_communication_is_hidden_as_far_as_the_passes_last() -> None:
    told = Communication(2.0, 1.0, 0.5, is_hidden=True)
    assert Timing(5.0, 0.1, told, 10, "").exposed == 0
    assert Timing(3.0, 0.1, told, 3600, "").hours == pytest.approx(3.6)
    assert Timing(5.0, 0.1, Communication(0, 0, 0.5, is_hidden=False), 1, "").step == 5.6


def test_devices_are_read() -> None:
    assert parse_devices("4xH100") == Cluster(H100, 4)
    assert parse_devices("h100") == Cluster(H100, 1)
    assert parse_devices("16x8xh200") == Cluster(DEVICES["H200"], 8, 16)
    assert parse_devices("8xA100", nodes=3) == Cluster(DEVICES["A100"], 8, 3)
    assert parse_devices("2x4090") == Cluster(DEVICES["4090"], 2)
    assert str(parse_devices("16x8xH100")) == "16x8xH100"


@pytest.mark.parametrize(
    ("text", "nodes", "words"),
    [
        ("4xFOO", None, "unknown device 'FOO'"),
        ("4xH10", None, "did you mean 'H100'"),
        ("0xH100", None, "at least 1 device"),
        ("4xH100", 0, "at least 1 device"),
        ("2x2x2xH100", None, "unknown device|write 4xH100"),
        ("", None, "write 4xH100"),
        ("2x4xH100", 3, "leave --nodes out"),
    ],
)
def test_devices_that_cannot_be_read(text: str, nodes: int | None, words: str) -> None:
    with pytest.raises(UserError, match=words):
        parse_devices(text, nodes)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("tiny", "needs --devices"),
        ("tiny --devices 4xFOO", "unknown device"),
        ("tiny --devices 3xH100", "not a multiple of 3 devices"),
        ("tiny --devices H100 --efficiency 2", "at most 1"),
        ("tiny --devices H100 --efficiency often", "must be a number"),
        ("tiny --devices H100 --nodes x", "whole number"),
        ("tiny --devices V100 --train.precision bfloat16", "no units for bfloat16"),
        ("tiny --devices H100 --json nowhere/plan.json", "no folder nowhere"),
        ("tiny --devices 4xH100 --probe", "--probe measures this machine's device"),
        ("tiny --devices H100 --data.tokenizer someone/thing", "fetches nothing"),
        ("cpt_tiny --devices H100 --start.model someone/thing", "fetches nothing"),
        ("tiny --devices 8xH100 --scale.sharding hybrid --scale.shard-size 3", "does not divide"),
        (f"tiny --devices {'9' * 5000}xH100", "at least 1 device"),
        ("tiny --devices 99999999xH100", "no more than 1,000,000"),
        ("tiny --devices H100 --model.width 4000000000", "model.width=4000000000 is more than"),
        ("tiny --devices H100 --train.batch-size 1000000000000", "train.batch_size=1000000000000"),
        ("tiny --devices H100 --data.tokenizer bpe:0", "N from 259"),
        (f"tiny --devices H100 --data.tokenizer bpe:{'9' * 25}", "N from 259"),
        ("tiny --devices H100 --start.model .", "fetches nothing"),
        ("cpt_gpt2_large --devices H100 --data.block-length 2048", "can read: 1024 at most"),
    ],
)
def test_bad_input_is_one_message(
    line: str, words: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert run_command(["plan", *line.split()]) == 2
    shown = capsys.readouterr()
    assert words in shown.err
    assert shown.err.count("\n") == 1
    assert shown.out == ""


def test_the_command_prints_and_writes(
    small_config: Callable[..., RunConfig], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(small_config().to_dict()))
    line = f"{tmp_path} --devices 2x2xA100 --train.batch-size 16 --json {tmp_path}/plan.json"
    assert run_command(["plan", *line.split()]) == 0
    shown = capsys.readouterr().out
    for words in (
        "parameters",
        "memory per device",
        "hybrid",
        "expected time",
        "assumed: ",
        "fits",
    ):
        assert words in shown
    told = json.loads((tmp_path / "plan.json").read_text())
    assert told["devices"] == "2x2xA100"
    assert told["tokens"] == 6 * 16 * 16
    assert told["memory"]["fits"] is True
    assert told["memory"]["total"] == sum(part["num_bytes"] for part in told["memory"]["parts"])
    assert told["device_hours"] == pytest.approx(4 * told["timing"]["hours"])
    step = told["timing"]["step"]
    assert told["timing"]["hours"] == pytest.approx(6 * step / 3600)


def test_help_names_the_devices(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["plan", "--help"]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in DEVICES)
    assert "bellmask plan lm1b --devices 2xH200" in shown


def test_a_probe_replaces_the_data_sheet(small_config: Callable[..., RunConfig]) -> None:
    config = small_config("--train.microbatch-size", "4", "--train.device", "cpu")
    made = plan(config, "CPU", is_probed=True)
    assert made.measured is not None
    assert made.timing.source == "measured here"
    assert made.measured.microbatch == 4
    # 8 rows of a step, and an update
    assert made.timing.passes == pytest.approx(8 * made.measured.row_seconds)
    assert made.timing.step == made.timing.passes + made.measured.update_seconds
    assert made.measured.matmul_flops > 1e8
    assert not any("efficiency" in line for line in made.assumptions)


@pytest.mark.parametrize(
    ("about", "words"),
    [
        ({}, "no number of tokens"),
        ({"num_tokens": "x"}, "no number"),
        ({"num_tokens": 10**25}, "no n"),
    ],
)
def test_a_start_that_was_changed_is_one_message(
    about: dict[str, object],
    words: str,
    small_config: Callable[..., RunConfig],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(small_config().to_dict()))
    (tmp_path / "run.json").write_text(json.dumps(about))
    line = ["plan", "sft_tiny", "--devices", "H100", "--start.model", str(tmp_path)]
    assert run_command(line) == 2
    assert words in capsys.readouterr().err


def test_a_probe_knows_the_memory_that_is_here() -> None:
    own = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert local_device("cpu").memory == own != DEVICES["CPU"].memory


def test_a_tiny_network_waits_for_its_launches() -> None:
    made = plan(preset("tiny"), "2xH100", efficiency=1.0)
    launches = made.timing.passes / LAUNCH_SECONDS
    assert launches == pytest.approx(round(launches), abs=1e-6)
    assert 200 < launches < 600, "3 blocks, forward and backward"
    assert made.utilisation < 0.01
