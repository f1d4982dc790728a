"""Keep freed memory in the process, on Linux CPUs.

By default glibc gives every large tensor back to the kernel when it is freed and asks for zeroed
pages again a moment later: about a tenth of a training step is page faults. Nothing here touches
GPUs, other systems or other C libraries.
"""

from __future__ import annotations

import ctypes
import sys

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # malloc.h
_LARGE = (1 << 31) - 1  # mallopt takes an int
_LARGEST_ALLOWED = 1 << 25
"""The limit of glibc versions that restrict the mmap threshold."""


def keep_freed_memory() -> bool:
    """Raise malloc's mmap and trim thresholds for this process; False if not supported.

    The command line does this at its start; a program that uses the library may call it too.
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # musl has no mallopt
        return False
    is_raised = mallopt(_MMAP_THRESHOLD, _LARGE) or mallopt(_MMAP_THRESHOLD, _LARGEST_ALLOWED)
    return bool(is_raised and mallopt(_TRIM_THRESHOLD, _LARGE))
