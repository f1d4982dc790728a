"""Optional packages: imported when they are needed, kept quiet."""

from __future__ import annotations

import contextlib
import io
import logging
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from bellmask.utils.errors import UserError
from bellmask.utils.files import inside, read_json


def import_package(name: str, what: str, extra: str) -> Any:
    """An optional package, or a UserError that says what needs it and how to get it."""
    try:
        return import_module(name)
    except ImportError:
        raise UserError(f"{what} needs {name}: pip install 'bellmask[{extra}]'") from None


def import_transformers(what: str) -> Any:
    return import_package("transformers", what, "hf")


@contextlib.contextmanager
def quiet(failure: str = "") -> Iterator[None]:
    """Neither bars nor retries of the hub on the screen; loggers keep streams of their own.

    With ``failure`` whatever goes wrong (no network, damaged files, impossible sizes: each package
    fails in its own way) becomes one UserError that begins so.
    """
    loggers = [logging.getLogger(name) for name in ("huggingface_hub", "transformers")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
            yield
    except Exception as error:
        if not failure or isinstance(error, UserError):
            raise
        raise UserError(f"{failure}: {first_line(error)}") from None
    finally:
        for logger, level in zip(loggers, levels):
            logger.setLevel(level)


def check_shards(source: str) -> None:
    """Refuse a folder whose index of weights names files outside of it."""
    for index in Path(source).glob("*.index.json") if Path(source).is_dir() else ():
        named = read_json(index)
        named = named.get("weight_map") if isinstance(named, dict) else None
        for name in set(named.values()) if isinstance(named, dict) else ():
            inside(index.parent, name, str(index))


def first_line(error: Exception) -> str:
    """What went wrong, in one line."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
