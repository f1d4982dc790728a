"""What only a GPU can show: ``make test-gpu``, for people who have one.

Each test runs a public command on the GPU and compares it with the CPU's stored results
(``tests/frozen``), with another precision, with another number of GPUs, or with itself.
``BELLMASK_TEST_GPU=cpu`` runs the same tests without a GPU, to check the tests themselves.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import CASES, NARROW, RESULTS, SHORT, run_bellmask, working_folder
from fault_tools import assert_same

import bellmask
from bellmask.config.config import override

DEVICE = "cpu" if os.environ.get("BELLMASK_TEST_GPU") == "cpu" else "cuda"
NUM_DEVICES = 2 if DEVICE == "cpu" else torch.cuda.device_count()
STORED = json.loads(RESULTS.read_text(encoding="utf-8"))
ON_GPU = f"--train.device {DEVICE} --train.precision float32"

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("default"),  # of compilers and drivers, which differ by machine
    pytest.mark.skipif(NUM_DEVICES == 0, reason="torch finds no GPU"),
]


@pytest.fixture(autouse=True)
def in_zoo() -> Iterator[Path]:
    with working_folder() as folder:
        (folder / "out").mkdir()
        for path in folder.glob("*/config.json"):  # auto would be bfloat16
            config = json.loads(path.read_text())
            config["train"]["precision"] = "float32"
            path.write_text(json.dumps(config))
        yield folder


def train(name: str, options: str, num_processes: int = 1) -> list[float]:
    """Losses and validation NLLs of a training of 8 steps."""
    run_bellmask(f"train {options} {SHORT} --out out/{name}", num_processes)
    lines = Path(f"out/{name}/metrics.jsonl").read_text().splitlines()
    return [line.get("loss", line.get("nll")) for line in map(json.loads, lines)]


TRAININGS = [name for name, case in CASES.items() if case.is_stored and name.startswith("train-")]


@pytest.mark.parametrize("name", [name for name in TRAININGS if CASES[name].num_processes == 1])
def test_losses_of_the_cpu(name: str) -> None:
    for command in CASES[name].commands:
        run_bellmask(f"{command} {ON_GPU}")
    lines = [json.loads(line) for line in Path("out/run/metrics.jsonl").read_text().splitlines()]
    places = re.findall(r"metrics.jsonl:\[(\d+)\]\.(loss|nll)'", str(list(STORED[name])))
    assert len(places) >= 8
    for number, key in places:
        expected = STORED[name][f"out/run/metrics.jsonl:[{number}].{key}"]
        assert lines[int(number)][key] == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize(
    ("options", "tolerance"),
    [
        (f"--train.device {DEVICE} --train.precision bfloat16", 2e-2),
        (f"{ON_GPU} --train.compile True", 1e-3),
        (f"{ON_GPU} --scale.loss compiled", 1e-4),
        (f"{ON_GPU} --scale.loss chunked", 1e-4),
        (f"{ON_GPU} --scale.loss torch", 1e-4),
        (f"{ON_GPU} --scale.loss liger", 1e-4),
    ],
)
def test_other_ways_to_compute_are_close(options: str, tolerance: float) -> None:
    if "liger" in options:
        pytest.importorskip("liger_kernel", reason="pip install 'bellmask[cuda]'")
    plain = train("plain", f"tiny {NARROW} {ON_GPU}")
    assert train("other", f"tiny {NARROW} {options}") == pytest.approx(plain, rel=tolerance)


@pytest.mark.parametrize(
    "options",
    [
        # FlexAttention has no smaller heads on a GPU
        "--data.document-attention --data.documents line --model.width 32",
        "--law uniform --objective nelbo",
    ],
)
def test_compiled_blocks_and_losses_are_close(options: str) -> None:
    """FlexAttention instead of SDPA's mask; weighted rows in the compiled loss."""
    plain = train("plain", f"tiny {NARROW} {ON_GPU} {options}")
    compiled = train("other", f"tiny {NARROW} {ON_GPU} {options} --train.compile True")
    assert compiled == pytest.approx(plain, rel=1e-3)


@pytest.mark.skipif(DEVICE == "cpu", reason="a CPU has nothing to wait for")
@pytest.mark.parametrize(
    "options",
    [
        "",
        "--optimizer muon",
        "--train.compile True --model.dropout 0.1",
        # FlexAttention has no smaller heads on a GPU
        "--train.compile True --data.document-attention --data.documents line --model.width 32",
    ],
)
def test_nothing_waits_between_steps(options: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch raises an error at any synchronization but that of reading a step late."""
    from bellmask.train.trainer import Trainer

    update, read = Trainer._update, Trainer._read

    def watched(trainer: Trainer) -> None:
        if trainer.state.step >= 2:  # compiled, and its optimizer's state is there
            torch.cuda.set_sync_debug_mode("error")
        try:
            update(trainer)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    def unwatched(trainer: Trainer, pending: Any) -> Any:
        torch.cuda.set_sync_debug_mode("default")
        return read(trainer, pending)

    monkeypatch.setattr(Trainer, "_update", watched)
    monkeypatch.setattr(Trainer, "_read", unwatched)
    config = bellmask.preset("tiny").with_options(
        {"data.train": "text.txt", "data.cache": "cache", "train.steps": 6, "log.every": 6}
    )
    more = f"{NARROW} {ON_GPU} {options} --validation.every never".split()
    bellmask.train_run(override(config, more), "out/run", is_quiet=True)


@pytest.mark.skipif(NUM_DEVICES < 2, reason="needs two GPUs")
@pytest.mark.parametrize("sharding", ["none", "full"])
def test_two_devices_equal_one(sharding: str) -> None:
    options = f"tiny {NARROW} {ON_GPU} --scale.sharding {sharding}"
    one, two = train("one", options), train("two", options, num_processes=2)
    assert two == pytest.approx(one, rel=1e-3)


@pytest.mark.parametrize("is_compiled", [False, True])
def test_resuming_is_exact(is_compiled: bool) -> None:
    options = f"tiny {NARROW} {ON_GPU} --train.deterministic --model.dropout 0.1"
    options += f" --train.compile {is_compiled}"
    options += " --checkpoint.keep-last 1"
    train("whole", options)
    run_bellmask(f"train {options} {SHORT} --out out/parts --train.steps 4")
    train("parts", f"{options} --resume yes")
    assert_same(Path("out/parts"), Path("out/whole"))


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("evaluate-")])
def test_likelihoods_of_the_cpu(name: str) -> None:
    (command,) = CASES[name].commands
    run_bellmask(f"{command} --device {DEVICE}")
    found = json.loads(Path("out/evaluation.json").read_text())["nll"]
    assert found == pytest.approx(STORED[name]["out/evaluation.json:nll"], rel=1e-3)


@pytest.mark.parametrize("rule", ["ancestral", "most_confident", "blocks", "arm", "aoarm", "cpt"])
def test_samples_are_reproducible(rule: str) -> None:
    """Not those of the CPU: one token that flips by rounding changes all that come after it."""
    (command,) = CASES[f"generate-{rule}"].commands
    made = []
    for _ in range(2):
        run_bellmask(f"{command} --device {DEVICE}")
        made.append(Path("out/samples.jsonl").read_text())
    assert made[0] == made[1]
    stored = [ids for place, ids in STORED[f"generate-{rule}"].items() if place.endswith(".ids")]
    lengths = [len(json.loads(line)["ids"]) for line in made[0].splitlines()]
    assert lengths == [len(ids) for ids in stored]
