"""Stop anywhere, resume, and nothing differs from the uninterrupted run: bit for bit."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from warm_processes import WarmProcesses

from bellmask.assemble import train_run
from bellmask.config import RunConfig
from bellmask.errors import UserError
from bellmask.records import TIME_FIELDS, read_metrics

Config = Callable[..., RunConfig]
OPTIONS = (
    "--model.dropout 0.2 --train.microbatch-size 4 --validation.draws 2 --log.every 4 "
    "--train.random-length-fraction 0.3"
).split()


def weights(folder: Path, step: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for shard in (folder / "checkpoints" / f"step-{step:09d}").glob("*.safetensors"):
        found |= load_file(shard)
    return found


def timeless(folder: Path) -> list[dict[str, Any]]:
    lines = read_metrics(folder / "metrics.jsonl")
    return [{k: v for k, v in line.items() if k not in TIME_FIELDS} for line in lines]


def assert_same_run(a: Path, b: Path, step: int) -> None:
    mine, theirs = weights(a, step), weights(b, step)
    assert mine.keys() == theirs.keys()
    assert any(k.startswith("ema.") for k in mine)
    assert any(k.startswith("optimizer.") for k in mine)
    different = [k for k in mine if not mine[k].equal(theirs[k])]
    assert not different
    assert timeless(a) == timeless(b)


class SignalAt:
    """A tracker's place to stand: sends this process a SIGTERM when a step has been made."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, step: int) -> None:
        from bellmask.train.trainer import Trainer

        update = Trainer._update

        def then_signal(trainer: Trainer) -> None:
            update(trainer)
            if trainer.state.step == step:
                os.kill(os.getpid(), signal.SIGTERM)

        monkeypatch.setattr(Trainer, "_update", then_signal)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("stop_after", [1, 4, 7])
def test_resuming_is_exact(
    small_config: Config,
    tmp_path: Path,
    optimizer: str,
    stop_after: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With dropout, accumulation, random lengths and averages over steps that span the stop."""
    options = [*OPTIONS, "--train.steps", "10", "--validation.every", "3"]
    config = small_config(*options, "--optimizer", optimizer)
    train_run(config, tmp_path / "whole", is_quiet=True)
    with monkeypatch.context() as patch:
        SignalAt(patch, stop_after)
        stopped = train_run(config, tmp_path / "parts", is_quiet=True)
    assert (stopped.step, stopped.stopped_by) == (stop_after, signal.SIGTERM)
    result = train_run(config, tmp_path / "parts", resume="yes", is_quiet=True)
    assert (result.step, result.stopped_by) == (10, None)
    assert_same_run(tmp_path / "whole", tmp_path / "parts", 10)


def test_lines_after_the_checkpoint_are_cut_back(
    small_config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small_config("--train.steps", "6", "--validation.every", "1")
    train_run(config, tmp_path / "whole", is_quiet=True)
    with monkeypatch.context() as patch:
        SignalAt(patch, 3)
        train_run(config, tmp_path / "parts", is_quiet=True)
    with (tmp_path / "parts" / "metrics.jsonl").open("a") as stream:
        stream.write(json.dumps({"kind": "train", "step": 4, "loss": 99.0}) + "\n")
        stream.write('{"kind": "train", "st')  # torn by a kill
    train_run(config, tmp_path / "parts", resume="auto", is_quiet=True)
    assert timeless(tmp_path / "parts") == timeless(tmp_path / "whole")


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (("--optim.lr", "0.5"), "optim.lr: was 0.006, now 0.5"),
        (("--train.seed", "9"), "train.seed"),
        (("--law", "laplace"), "law.name"),
        (("--train.batch-size", "16"), "train.batch_size"),
        (("--validation.seed", "5"), "validation.seed"),
        (("--optim.curve", "cosine"), "optim.curve"),
    ],
)
def test_options_that_would_break_a_resume_are_refused(
    small_config: Config, tmp_path: Path, change: tuple[str, ...], named: str
) -> None:
    train_run(small_config("--train.steps", "1"), tmp_path / "run", is_quiet=True)
    before = sorted(p.name for p in (tmp_path / "run" / "checkpoints").iterdir())
    with pytest.raises(UserError, match=named):
        train_run(small_config(*change), tmp_path / "run", resume="auto", is_quiet=True)
    assert sorted(p.name for p in (tmp_path / "run" / "checkpoints").iterdir()) == before


def test_harmless_options_may_change(small_config: Config, tmp_path: Path) -> None:
    train_run(small_config("--train.steps", "2"), tmp_path / "run", is_quiet=True)
    more = small_config(
        "--train.steps", "4", "--log.every", "1", "--train.microbatch-size", "2",
        "--validation.every", "2", "--checkpoint.keep-last", "1",
    )  # fmt: skip
    assert train_run(more, tmp_path / "run", resume="auto", is_quiet=True).step == 4


def test_changed_text_is_refused(small_config: Config, tmp_path: Path, text_file: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text(text_file.read_text())
    config = small_config("--data.train", str(text))
    train_run(config, tmp_path / "run", is_quiet=True)
    text.write_text(text_file.read_text()[5:])
    with pytest.raises(UserError, match="the training text has changed"):
        train_run(config, tmp_path / "run", resume="auto", is_quiet=True)


def test_folders_in_use_are_refused(small_config: Config, tmp_path: Path) -> None:
    config = small_config("--train.steps", "1")
    with pytest.raises(UserError, match="holds no run to resume"):
        train_run(config, tmp_path / "new", resume="yes", is_quiet=True)
    train_run(config, tmp_path / "run", is_quiet=True)
    with pytest.raises(UserError, match="already holds a run"):
        train_run(config, tmp_path / "run", is_quiet=True)
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "me.png").write_bytes(b"0")
    with pytest.raises(UserError, match="not a run of bellmask"):
        train_run(config, tmp_path / "photos", is_quiet=True)
    assert (tmp_path / "photos" / "me.png").exists()
    with pytest.raises(UserError, match="unknown resume mode 'ato'; did you mean 'auto'"):
        train_run(config, tmp_path / "run", resume="ato", is_quiet=True)


def test_a_damaged_newest_checkpoint_is_passed_over(
    small_config: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = small_config("--train.steps", "6", "--checkpoint.every", "3")
    train_run(config, tmp_path / "whole", is_quiet=True)
    train_run(config, tmp_path / "run", is_quiet=True)
    (shard,) = (tmp_path / "run" / "checkpoints" / "step-000000006").glob("*.safetensors")
    shard.write_bytes(shard.read_bytes()[:-1])
    train_run(config, tmp_path / "run", resume="auto", is_quiet=True)
    assert "step-000000006 is damaged" in capsys.readouterr().err
    assert_same_run(tmp_path / "whole", tmp_path / "run", 6)


@pytest.mark.parametrize(
    "countdowns",
    [
        pytest.param((0, 13, 9, 17), id="four kills"),
        pytest.param(tuple(range(40)), id="every place", marks=pytest.mark.long),
    ],
)
def test_a_kill_in_the_middle_of_a_save_loses_nothing(
    small_config: Config, tmp_path: Path, countdowns: tuple[int, ...], warm: WarmProcesses
) -> None:
    config = small_config("--train.steps", "5", "--checkpoint.every", "1", *OPTIONS)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config.to_dict()))
    train_run(config, tmp_path / "whole", is_quiet=True)
    kills = 0
    for countdown in countdowns:
        again = ["train", path, "--out", tmp_path / "run", "--resume", "auto", "--quiet"]
        process = warm.start(again, prepare=["fault_hooks.kill_at_touch", countdown])
        assert process.wait() in (0, -signal.SIGKILL), process.text()
        kills += process.code != 0
    assert kills >= min(2, len(countdowns))
    train_run(config, tmp_path / "run", resume="auto", is_quiet=True)
    assert_same_run(tmp_path / "whole", tmp_path / "run", 5)
    assert not [p for p in (tmp_path / "run" / "checkpoints").iterdir() if p.name[0] == "."]
