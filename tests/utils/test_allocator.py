"""Freed memory stays with the process: counted in page faults, in processes of their own."""

from __future__ import annotations

import platform
import subprocess
import sys
import types

import pytest

from bellmask.utils import allocator
from bellmask.utils.allocator import keep_freed_memory

IS_GLIBC = sys.platform.startswith("linux") and platform.libc_ver()[0] == "glibc"
COUNT_FAULTS = """
import resource, sys, numpy
from bellmask.utils.allocator import keep_freed_memory
is_kept, count, megabytes = sys.argv[1] == "True", *map(int, sys.argv[2:])
answer = keep_freed_memory() if is_kept else None
if is_kept and megabytes > 32:
    import ctypes
    if not ctypes.CDLL(None).mallopt(-3, (1 << 31) - 1):
        sys.exit("this glibc allows no mmap threshold above 32 MB")
def once():
    size = (megabytes << 20) // 4
    buffers = [numpy.full(size, 1.5, dtype=numpy.float32) for _ in range(count)]
    assert all(float(buffer[-1]) == 1.5 for buffer in buffers)
for _ in range(20):  # aligned blocks settle after a few
    once()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    once()
print(answer, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def count_faults(*args):
    run = [sys.executable, "-c", COUNT_FAULTS, *map(str, args)]
    done = subprocess.run(run, capture_output=True, text=True)
    if "allows no mmap threshold" in done.stderr:
        pytest.skip(done.stderr.strip())
    assert (done.returncode, done.stderr) == (0, "")
    answer, faults = done.stdout.split()
    return answer, int(faults)


@pytest.mark.skipif(not IS_GLIBC, reason="malloc's thresholds are glibc's, on Linux")
@pytest.mark.parametrize(
    ("count", "megabytes"), [(4, 24), pytest.param(1, 64, marks=pytest.mark.long)]
)
def test_allocating_again_and_again_faults_hardly_any_page(count, megabytes):
    """With huge pages a fault brings 2 MB instead of 4 KB, so only the ratio is asked for."""
    answer, with_it = count_faults(True, count, megabytes)
    _, without = count_faults(False, count, megabytes)
    assert answer == "True"
    assert without > 10 * count * megabytes // 4, "the default gives memory back"
    assert with_it < without / 10


@pytest.mark.parametrize(
    ("system", "error"), [("darwin", None), ("linux", OSError), ("linux", AttributeError)]
)
def test_other_systems_and_c_libraries_are_left_alone(system, error, monkeypatch):
    def refuse(name):
        raise error("mallopt") if error else AssertionError("no library may be loaded")

    monkeypatch.setattr(allocator, "sys", types.SimpleNamespace(platform=system))
    monkeypatch.setattr(allocator.ctypes, "CDLL", refuse)
    assert keep_freed_memory() is False


def test_a_limit_of_the_mmap_threshold_is_kept_to(monkeypatch):
    """A glibc that limits it gets what it allows; refusals are not hidden."""

    def answer(largest, trims):
        library = types.SimpleNamespace(
            mallopt=lambda which, n: trims if which == -1 else n <= largest
        )
        monkeypatch.setattr(allocator.ctypes, "CDLL", lambda name: library)
        return keep_freed_memory()

    monkeypatch.setattr(allocator, "sys", types.SimpleNamespace(platform="linux"))
    cases = [(1 << 31, 1), (1 << 25, 1), (0, 1), (1 << 31, 0)]
    assert [answer(*case) for case in cases] == [True, True, False, False]
