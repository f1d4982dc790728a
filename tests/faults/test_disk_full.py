"""No room while a checkpoint is written: a clear end, nothing lost, and on again when there is."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fault_tools import (
    assert_no_traceback,
    assert_same,
    checkpoints,
    command,
    copy_run,
    last_step,
    leftovers,
    mark_of,
)
from warm_processes import WarmProcesses

from bellmask.config import RunConfig

Config = Callable[..., RunConfig]
Truth = Callable[..., Path]
OPTIONS = "--checkpoint.every 2 --log.every 1 --checkpoint.keep-last 3".split()
ROOM = 60_000
"""Bytes that a file may have: more than any but a shard."""


def check_failed(run: Path, said: str, step: int, cause: str) -> None:
    """What a run leaves whose save failed: message, older checkpoint, mark, and nothing else."""
    assert said.count("error: ") == 1, said
    assert_no_traceback(said)
    assert f"checkpoint of step {step} could not be written" in said
    assert cause in said
    assert f"the newest good one is step-{step - 2:09d}" in said
    assert last_step(run) == step - 2
    assert leftovers(run) == []
    assert mark_of(run)["state"] == "running"


def start_size(args: list[str], size: int, warm: WarmProcesses, *prepare: object) -> str:
    """Run in so many processes: all must end with exit code 1; what they say."""
    if size == 1:
        group = [warm.start(args, prepare=prepare)]
    else:
        group = warm.start_group(args, size, prepare)
    codes = [process.wait() for process in group]
    said = "\n".join(process.text() for process in group)
    assert codes == [1] * size, said
    return said


LONG = pytest.mark.long
CASES = [
    (1, "none", 0, "wait"),
    pytest.param(1, "none", 0, "background", marks=LONG),
    pytest.param(2, "none", 1, "wait", marks=LONG),
    pytest.param(2, "none", 1, "background", marks=LONG),
    pytest.param(2, "full", 0, "wait", marks=LONG),
    pytest.param(2, "full", 0, "background", marks=LONG),
    pytest.param(2, "full", 1, "wait", marks=LONG),
    pytest.param(2, "full", 1, "background", marks=LONG),
]


@pytest.mark.parametrize(("size", "sharding", "rank", "saving"), CASES)
def test_files_that_may_not_grow(
    size: int,
    sharding: str,
    rank: int,
    saving: str,
    small_config: Config,
    warm: WarmProcesses,
    truth: Truth,
    tmp_path: Path,
) -> None:
    """A real failure of write(2), in one process or in one of two."""
    common = (*OPTIONS, "--scale.sharding", sharding, "--checkpoint.saving", saving)
    config = small_config(*common, "--train.steps", "10")
    begun = truth(small_config(*common, "--train.steps", "4"), size)
    run = copy_run(begun, tmp_path / "run")
    said = start_size(command(config, run), size, warm, "fault_hooks.limit_file_size", ROOM, rank)
    check_failed(run, said, 6, "File too large")
    warm.run(command(config, run), size)
    assert_same(run, truth(config, size))


@pytest.mark.parametrize("size", [1, pytest.param(2, marks=LONG)])
def test_no_space_left(
    size: int, small_config: Config, warm: WarmProcesses, truth: Truth, tmp_path: Path
) -> None:
    """The same from the writer itself, in the midst of a run, on the last process."""
    config = small_config(*OPTIONS, "--train.steps", "10")
    run = tmp_path / "run"
    prepare = ("fault_hooks.no_space_for", ".writing-000000008", size - 1)
    said = start_size(command(config, run), size, warm, *prepare)
    check_failed(run, said, 8, "No space left on device")
    warm.run(command(config, run), size)
    assert_same(run, truth(config, size))


@pytest.mark.long
@pytest.mark.parametrize("name", ["state.json", "manifest.json", "latest"])
def test_no_space_left_for_a_small_file(
    name: str, small_config: Config, warm: WarmProcesses, truth: Truth, tmp_path: Path
) -> None:
    config = small_config(*OPTIONS, "--train.steps", "10")
    run = tmp_path / "run"
    prepare = ("fault_hooks.no_space_for", f".{name}.writing", 0)
    said = start_size(command(config, run), 1, warm, *prepare)
    assert said.count("error: ") == 1
    assert "No space left on device" in said
    assert_no_traceback(said)
    warm.run(command(config, run))
    assert_same(run, truth(config))


@pytest.mark.parametrize(
    ("size", "saving"), [(2, "background"), *(pytest.param(n, "wait", marks=LONG) for n in (1, 2))]
)
def test_no_space_left_for_metrics(
    saving: str,
    size: int,
    small_config: Config,
    warm: WarmProcesses,
    truth: Truth,
    tmp_path: Path,
) -> None:
    config = small_config(*OPTIONS, "--train.steps", "10", "--checkpoint.saving", saving)
    run = tmp_path / "run"
    said = start_size(command(config, run), size, warm, "fault_hooks.no_space_for_line", 7)
    assert said.count("error: ") == 1
    assert "No space left on device" in said
    assert "metrics.jsonl" in said
    assert_no_traceback(said)
    warm.run(command(config, run), size)
    assert_same(run, truth(config, size))


@pytest.mark.parametrize(
    ("prepare", "cause"),
    [
        (("fault_hooks.limit_file_size", 1500), "File too large: "),
        (("fault_hooks.no_space_for", ".RESUME_ME.writing", 0), "No space left on device: "),
    ],
    ids=["config.json", "RESUME_ME"],
)
def test_no_space_left_at_the_start(
    prepare: tuple[object, ...],
    cause: str,
    small_config: Config,
    warm: WarmProcesses,
    truth: Truth,
    tmp_path: Path,
) -> None:
    """Not even for the first files; the same command starts the run when there is room."""
    config = small_config(*OPTIONS, "--train.steps", "10")
    run, expected = tmp_path / "run", truth(config)  # which also prepares the text
    said = start_size(command(config, run), 1, warm, *prepare)
    assert said.count("error: ") == 1
    assert cause in said
    assert_no_traceback(said)
    assert leftovers(run) == []
    warm.run(command(config, run))
    assert_same(run, expected)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own with room for two checkpoints and a bit."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=800k", "tmpfs", str(disk)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("only the superuser may mount a small disk")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.parametrize("size", [1, pytest.param(2, marks=LONG)])
def test_a_disk_that_is_really_full(
    size: int,
    small_config: Config,
    warm: WarmProcesses,
    truth: Truth,
    small_disk: Path,
) -> None:
    """Once there is more room, the same command ends the run as it should."""
    config = small_config(*OPTIONS, "--train.steps", "10")
    run = small_disk / "run"
    said = start_size(command(config, run), size, warm)
    check_failed(run, said, 2 * len(checkpoints(run)) + 2, "No space left on device")
    subprocess.run(["mount", "-o", "remount,size=8m", str(small_disk)], check=True)
    warm.run(command(config, run), size)
    assert_same(run, truth(config, size))
