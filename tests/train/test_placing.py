"""What a run says of itself: its choices, options that do not apply, its pace, how to go on."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from bellmask.assemble import train_run
from bellmask.config import RunConfig
from bellmask.errors import UserError
from bellmask.placing import pick_placing
from bellmask.run_state import resume_command
from bellmask.train import metrics
from bellmask.train.distributed import World, open_world
from bellmask.train.metrics import Display

Config = Callable[..., RunConfig]


@pytest.mark.parametrize(
    ("options", "size", "words"),
    [
        ("", 1, []),
        ("--scale.sharding full", 1, ["weights are not cut: one process"]),
        ("--scale.shard-size 3", 1, ["weights are not cut: one process"]),
        ("--scale.sharding full", 2, []),
        ("--scale.sharding hybrid --scale.shard-size 1", 2, ["weights are not cut: as asked for"]),
        ("--scale.reduce bfloat16", 1, ["scale.reduce=bfloat16 is for cut weights"]),
        ("--scale.sharding full --scale.reduce bfloat16", 2, ["scale.reduce=bfloat16 is for"]),
        (
            "--scale.sharding full --scale.reduce bfloat16 --train.precision bfloat16",
            2,
            [],
        ),
    ],
)
def test_options_that_do_not_apply_are_named(
    options: str, size: int, words: list[str], small_config: Config
) -> None:
    config = small_config(*options.split())
    notes = pick_placing(config, World(size=size, machine_size=size)).notes
    assert len(notes) == len(words)
    assert all(note.startswith(word) for note, word in zip(notes, words, strict=True))


@pytest.mark.parametrize(
    ("options", "kernel"),
    [
        ("", "torch"),
        ("--train.precision bfloat16", "chunked"),
        ("--objective nelbo --law uniform", "chunked"),
        ("--scale.loss chunked", "chunked"),
    ],
)
def test_the_kernel_that_is_told_is_the_one_that_is_used(
    options: str, kernel: str, small_config: Config
) -> None:
    told = pick_placing(small_config(*options.split()), World()).describe()
    assert told["loss_kernel"] == kernel


@pytest.mark.parametrize(
    ("processes", "per_machine", "launch"),
    [
        (1, 1, "bellmask"),
        (4, 4, "torchrun --nproc-per-node 4 -m bellmask"),
        (16, 8, "torchrun --nnodes 2 --nproc-per-node 8 -m bellmask"),
    ],
)
def test_the_command_that_goes_on(processes: int, per_machine: int, launch: str) -> None:
    words = shlex.split(resume_command(Path("my runs/x"), processes, per_machine))
    rest = ["train", "my runs/x/config.json", "--out", "my runs/x", "--resume", "auto"]
    assert words == [*launch.split(), *rest]


def test_without_a_terminal_a_line_comes_now_and_then(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with Display(9, is_quiet=False) as display:
        display.advance(1, 2.5, 100.0)
        assert capsys.readouterr().out == ""
        monkeypatch.setattr(metrics, "LINE_SECONDS", 0)
        display.advance(2, 1.25, 1000.0)
        assert capsys.readouterr().out.split() == "step 2 of 9 loss 1.250 1,000 tokens/s".split()


def test_a_finished_run_says_that_it_is(
    small_config: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = small_config("--train.steps", "1")
    train_run(config, tmp_path / "run")
    assert "all steps are done already" not in capsys.readouterr().out
    train_run(config, tmp_path / "run", resume="auto")
    assert "all steps are done already" in capsys.readouterr().out
    assert not (tmp_path / "run" / "RESUME_ME").exists()


def test_restarts_on_several_machines_need_a_new_store(monkeypatch: pytest.MonkeyPatch) -> None:
    told = {"WORLD_SIZE": "2", "GROUP_WORLD_SIZE": "2", "TORCHELASTIC_MAX_RESTARTS": "3"}
    for name, value in (told | {"TORCHELASTIC_USE_AGENT_STORE": "True"}).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match="SHARE_RDZV_TCP_STORE=1"), open_world("cpu"):
        pass
