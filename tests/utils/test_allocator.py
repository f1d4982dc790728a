"""Freed memory stays with the process: counted in page faults, in processes of their own."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

IS_GLIBC = sys.platform.startswith("linux") and platform.libc_ver()[0] == "glibc"
COUNT_FAULTS = """
import resource, sys, numpy
from bellmask.utils.libraries import keep_freed_memory
if sys.argv[1] == "True":
    assert keep_freed_memory()
def once():
    buffers = [numpy.full(6 << 20, 1.5, dtype=numpy.float32) for _ in range(4)]
for _ in range(20):  # aligned blocks settle after a few
    once()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    once()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(not IS_GLIBC, reason="malloc's thresholds are glibc's, on Linux")
def test_allocating_again_and_again_faults_hardly_any_page():
    """With huge pages a fault brings 2 MB instead of 4 KB, so only the ratio is asked for."""
    with_it, without = (
        int(subprocess.check_output([sys.executable, "-c", COUNT_FAULTS, str(is_kept)]))
        for is_kept in (True, False)
    )
    assert without > 200, "the default gives memory back"
    assert with_it < without / 10
