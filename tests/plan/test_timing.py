"""Expected times: the paper's runs, closed forms of communication."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from commands import refuses, succeeds

from bellmask.config.config import override
from bellmask.config.presets import preset
from bellmask.plan import plan as timing
from bellmask.plan.plan import Cluster, gather_seconds, parse_devices, plan
from bellmask.train.memory import Parameters, TracedKernel
from bellmask.train.parallel import Layout
from bellmask.utils.distributed import DEVICES, find_device

H100 = DEVICES["H100"]
ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("name", "devices", "hours"),
    [
        ("lm1b", "2xH200", 100),
        pytest.param("owt", "4xH100", 300, marks=pytest.mark.long),  # in the frozen results, too
        pytest.param("cpt_gpt2_large", "4xB200", 50, marks=pytest.mark.long),
    ],
)
def test_the_papers_runs_take_what_they_took(name, devices, hours):
    """App. C.1, all by the same assumptions: within a factor of 2, as docs/scaling.md lists."""
    planned = plan(preset(name), devices).timing()["hours"]
    assert hours / 2 < planned < hours * 2
    page = (ROOT / "docs/scaling.md").read_text(encoding="utf-8")
    assert f"| {devices} | ~{hours} h | {planned:.0f} h | {planned / hours:.2f} |" in page


def test_a_kernel_takes_its_products_or_its_bytes():
    product, addition = TracedKernel(int(989e12), 10), TracedKernel(0, int(3350e9))
    kernels = Counter({product: 2, addition: 3})
    assert timing.ideal_seconds(kernels, H100, "bfloat16") == pytest.approx(2 + 3)
    assert timing.ideal_seconds(kernels, H100, "float32") == pytest.approx(2 * 2 + 3)  # TF32
    assert timing.device_seconds(1.0, 10, H100, 0.25) == 4
    assert timing.device_seconds(1e-9, 1000, H100, 0.25) == pytest.approx(
        1000 * timing.LAUNCH_SECONDS
    )
    assert timing.device_seconds(1e-3, 10**6, DEVICES["CPU"], 0.5) == 2e-3


def test_rings_send_all_but_their_own_share():
    inside, outside = timing.HOP_SECONDS["machine"], timing.HOP_SECONDS["network"]
    one = Cluster(H100, 8)
    size = 1e9
    assert gather_seconds(size, 1, one) == 0
    expected = size * 7 / 8 / (450e9 * timing.LINK_SHARE) + 7 * inside
    assert gather_seconds(size, 8, one) == pytest.approx(expected)
    many = Cluster(H100, 8, 4)
    # 8 devices share the way out of a machine: 400 GB/s, less than the link
    expected = size * 31 / 32 / (400e9 * timing.LINK_SHARE) + 28 * inside + 3 * outside
    assert gather_seconds(size, 32, many) == pytest.approx(expected)
    expected = size * 3 / 4 / (50e9 * timing.LINK_SHARE) + 3 * outside
    assert gather_seconds(size, 4, many, is_spread=True) == pytest.approx(expected)


def test_each_layout_communicates_what_it_must():
    some = Parameters(1000, 1000, 100, 800, 100, 7, 100, 10)
    many = Cluster(H100, 8, 4)
    few = "--train.batch-size 96 --train.microbatch-size 1"  # 3 microbatches
    alone = plan(override(preset("tiny"), few.split()), "H100")

    def told(copies, share, **known):
        known = {"cluster": many, "world": many.world, "parameters": some} | known
        return replace(alone, layout=Layout(copies, share, ""), **known).timing()

    calls = told(1, 1)["communication"]
    assert calls == dict.fromkeys(("gathering", "reducing", "between_copies"), 0) | {
        "is_hidden": False
    }
    copies = told(32, 1)
    between = 2 * gather_seconds(4000, 32, many)
    assert copies["communication"]["between_copies"] == copies["exposed"] == between
    full = told(1, 32)["communication"]
    each = gather_seconds(2 * 1000 / 8, 32, many)
    assert full["gathering"] == pytest.approx(3 * 15 * each)
    assert full["reducing"] == pytest.approx(8 * gather_seconds(500, 32, many))
    assert full["between_copies"] == 0
    hybrid = told(4, 8)["communication"]
    assert hybrid["gathering"] < full["gathering"], "a copy is inside a machine"
    assert hybrid["between_copies"] == 2 * gather_seconds(500, 4, many, is_spread=True)
    # what the passes do not hide
    slow = told(1, 32, parameters=replace(some, total=10**12))
    calls = sum(slow["communication"].values()) - 1
    assert slow["exposed"] == pytest.approx(calls - slow["passes"]) != 0
    assert slow["step"] == pytest.approx(calls + slow["update"])
    assert slow["hours"] == pytest.approx(slow["step"] * 1000 / 3600)


def test_devices_are_read():
    assert parse_devices("4xH100") == Cluster(H100, 4)
    assert parse_devices("h100") == Cluster(H100, 1)
    assert parse_devices("16x8xh200") == Cluster(DEVICES["H200"], 8, 16)
    assert parse_devices("2x4090") == Cluster(DEVICES["4090"], 2)
    assert str(parse_devices("16x8xH100")) == "16x8xH100"


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("tiny", "--devices"),
        ("tiny --devices 4xH10", "did you mean 'H100'"),
        ("tiny --devices 99999999xH100", "1,000,000"),
        ("tiny --devices 3xH100", "train.batch_size"),
        ("tiny --devices H100 --efficiency 2", "--efficiency 2"),
        ("tiny --devices V100 --train.precision bfloat16", "--train.precision"),
        ("tiny --devices H100 --out nowhere/plan.json", "nowhere"),
        ("tiny --devices H100 --data.tokenizer someone/thing", "data.tokenizer=someone/thing"),
        ("tiny --devices H100 --data.tokenizer bpe:0", "data.tokenizer=bpe:0"),
        ("cpt_tiny --devices H100 --start.model someone/thing", "start.model=someone/thing"),
        ("sft_tiny --devices H100 --start.model .", "checkpoint"),
        ("tiny --devices 8xH100 --scale.sharding hybrid --scale.shard-size 3", "shard"),
        ("cpt_gpt2_large --devices H100 --data.block-length 2048", "1024"),
    ],
)
def test_what_cannot_be_planned_is_refused(line, named, tmp_path, monkeypatch, small_config):
    """The working directory is a run whose number of tokens is gone."""
    (tmp_path / "config.json").write_text(json.dumps(small_config().to_dict()))
    (tmp_path / "run.json").write_text('{"num_tokens": "x"}')
    monkeypatch.chdir(tmp_path)
    refuses("plan", *line.split(), names=named)


def test_the_command_prints_and_writes(small_config, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(small_config().to_dict()))
    line = f"{tmp_path} --devices 2x2xA100 --train.batch-size 16 --out {tmp_path}/plan.json "
    line += "--scale.sharding hybrid"
    assert "usable by tensors" in succeeds("plan", *line.split()).text
    told = json.loads((tmp_path / "plan.json").read_text())
    assert (told["devices"], told["tokens"]) == ("2x2xA100", 6 * 16 * 16)
    assert (told["layout"]["copies"], told["layout"]["processes_per_copy"]) == (2, 2)
    assert told["memory"]["fits"] is True
    assert told["memory"]["total"] == sum(part["num_bytes"] for part in told["memory"]["parts"])
    assert told["device_hours"] == pytest.approx(4 * told["timing"]["hours"])
    step = told["timing"]["step"]
    assert told["timing"]["hours"] == pytest.approx(6 * step / 3600)
    busy = told["flops"]["training"] * 16 * 16 / step
    assert told["utilization"] == pytest.approx(busy / (4 * 312e12))
    assert "B200" in succeeds("plan", "--help").text


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 PCIe", "H100-PCIe"),
        ("NVIDIA A100-SXM4-40GB", "A100"),
        ("NVIDIA GeForce RTX 4090", "4090"),
        ("NVIDIA GH200 480GB", "GH200"),
        ("NVIDIA H100 NVL", "H100-NVL"),
        ("Intel(R) Xeon(R) CPU", None),
    ],
)
def test_a_gpu_is_known_by_its_drivers_name(name, known):
    found = find_device(name)
    assert (found and found.name) == known
