"""Freed memory stays with the process: counted in page faults, in processes of their own."""

from __future__ import annotations

import platform
import subprocess
import sys
import types

import pytest

from bellmask import allocator
from bellmask.allocator import keep_freed_memory

IS_GLIBC = sys.platform.startswith("linux") and platform.libc_ver()[0] == "glibc"

COUNT_FAULTS = """
import resource, sys
from bellmask.allocator import keep_freed_memory
kind, is_kept, count, megabytes = sys.argv[1], sys.argv[2] == "True", *map(int, sys.argv[3:])
answer = keep_freed_memory() if is_kept else None
if is_kept and megabytes > 32:
    import ctypes
    if not ctypes.CDLL(None).mallopt(-3, (1 << 31) - 1):
        sys.exit("this glibc allows no mmap threshold above 32 MB")
if kind == "numpy":
    import numpy
    def fill(size): return numpy.full(size // 4, 1.5, dtype=numpy.float32)
else:
    import torch
    torch.set_num_threads(1)
    def fill(size): return torch.full((size // 4,), 1.5)
def once():
    buffers = [fill(megabytes << 20) for _ in range(count)]
    assert all(float(buffer[-1]) == 1.5 for buffer in buffers)
for _ in range(20):  # aligned blocks settle after a few
    once()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    once()
print(answer, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def count_faults(kind: str, is_kept: bool, count: int, megabytes: int) -> tuple[str, int]:
    args = [kind, str(is_kept), str(count), str(megabytes)]
    done = subprocess.run(
        [sys.executable, "-c", COUNT_FAULTS, *args], capture_output=True, text=True
    )
    if "allows no mmap threshold" in done.stderr:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stderr
    answer, faults = done.stdout.split()
    return answer, int(faults)


@pytest.mark.skipif(not IS_GLIBC, reason="malloc's thresholds are glibc's, on Linux")
@pytest.mark.parametrize(
    ("kind", "count", "megabytes"), [("numpy", 1, 64), ("numpy", 4, 24), ("torch", 1, 64)]
)
def test_allocating_again_and_again_faults_hardly_any_page(
    kind: str, count: int, megabytes: int
) -> None:
    """With huge pages a fault brings 2 MB instead of 4 KB, so only the ratio is asked for."""
    answer, with_it = count_faults(kind, True, count, megabytes)
    _, without = count_faults(kind, False, count, megabytes)
    assert answer == "True"
    assert without > 10 * count * megabytes // 4, "the default gives memory back"
    assert with_it < without / 10


def test_the_answer_is_a_bool() -> None:
    program = "from bellmask.allocator import keep_freed_memory; print(repr(keep_freed_memory()))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.strip() in ("True", "False"), done.stderr
    assert done.stderr == ""


def test_other_systems_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: object) -> None:
        raise AssertionError("no library may be loaded")

    monkeypatch.setattr(allocator, "sys", types.SimpleNamespace(platform="darwin"))
    monkeypatch.setattr(allocator.ctypes, "CDLL", refuse)
    assert keep_freed_memory() is False


@pytest.mark.parametrize("error", [OSError, AttributeError])
def test_other_c_libraries_are_left_alone(
    error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(name: object) -> None:
        raise error("mallopt")

    monkeypatch.setattr(allocator, "sys", types.SimpleNamespace(platform="linux"))
    monkeypatch.setattr(allocator.ctypes, "CDLL", refuse)
    assert keep_freed_memory() is False


@pytest.mark.parametrize(
    ("largest", "trims", "answer"),
    [(1 << 31, True, True), (1 << 25, True, True), (0, True, False), (1 << 31, False, False)],
)
def test_what_mallopt_refuses(
    largest: int, trims: bool, answer: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A glibc that limits the mmap threshold gets what it allows; refusals are not hidden."""

    def mallopt(which: int, value: int) -> int:
        return int({-3: value <= largest, -1: trims}[which])

    library = types.SimpleNamespace(mallopt=mallopt)
    monkeypatch.setattr(allocator, "sys", types.SimpleNamespace(platform="linux"))
    monkeypatch.setattr(allocator.ctypes, "CDLL", lambda name: library)
    assert keep_freed_memory() is answer
