"""Optional packages, imported on use, with their output silenced; and the C library's malloc."""

from __future__ import annotations

import contextlib
import ctypes
import io
import logging
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, TextIO

from bellmask.utils.console import LOGGER
from bellmask.utils.errors import UserError
from bellmask.utils.files import inside, read_json


def import_optional(name: str, what: str, extra: str) -> Any:
    """Import a module, or raise a UserError that says what needs it and how to install it."""
    try:
        return import_module(name)
    except ImportError:
        package = name.partition(".")[0]
        raise UserError(f"{what} needs {package}: pip install 'bellmask[{extra}]'") from None


def import_transformers(what: str) -> Any:
    return import_optional("transformers", what, "hf")


@contextlib.contextmanager
def quiet(failure: str = "") -> Iterator[None]:
    """Silence progress bars and retry messages of the hub, but not with ``--verbose``.

    With ``failure`` whatever goes wrong (no network, damaged files, impossible sizes: each package
    fails differently) becomes one UserError with this prefix.
    """
    loggers = [logging.getLogger(name) for name in ("huggingface_hub", "transformers")]
    levels = [logger.level for logger in loggers]
    is_verbose = LOGGER.isEnabledFor(logging.DEBUG)
    shown: TextIO = sys.stderr if is_verbose else io.StringIO()
    for logger in loggers:
        logger.setLevel(logging.INFO if is_verbose else logging.CRITICAL)
    try:
        with contextlib.redirect_stderr(shown), contextlib.redirect_stdout(shown):
            yield
    except Exception as error:
        if not failure or isinstance(error, UserError):
            raise
        raise UserError(f"{failure}: {first_line(error)}") from None
    finally:
        for logger, level in zip(loggers, levels):
            logger.setLevel(level)


def check_shards(source: str) -> None:
    """Reject a folder whose index of weights refers to files outside of it."""
    for index in Path(source).glob("*.index.json") if Path(source).is_dir() else ():
        named = read_json(index)
        named = named.get("weight_map") if isinstance(named, dict) else None
        for name in set(named.values()) if isinstance(named, dict) else ():
            inside(index.parent, name, str(index))


def first_line(error: Exception) -> str:
    """First line of an error's message."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


# Freed memory stays in the process, on Linux CPUs.
#
# By default glibc gives every large tensor back to the kernel when it is freed and asks for zeroed
# pages again a moment later: about a tenth of a training step is page faults. Nothing here touches
# GPUs, other systems or other C libraries.

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
