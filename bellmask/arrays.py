"""Arrays in .npz files that anybody may have written: no objects, and nothing that fills memory."""

from __future__ import annotations

import math
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

MOST_BYTES = 1 << 30
"""A file of a few kilobytes can say that it unpacks to terabytes; ours have some megabytes."""


def read_arrays(path: Path) -> dict[str, NDArray[Any]]:
    """All arrays of an .npz file; OSError or ValueError where it cannot be read."""
    try:
        with path.open("rb") as stream:
            _check_size(stream)
            with np.load(stream, allow_pickle=False) as stored:
                return {name: stored[name] for name in stored.files}
    except (OSError, ValueError):
        raise
    except Exception as error:  # damaged zips fail in their own, zlib's and struct's ways
        raise ValueError(f"not a whole .npz file ({error or type(error).__name__})") from None


def _check_size(stream: Any) -> None:
    """By the archive's own table, and by the shape that each array claims to have."""
    formats = np.lib.format
    look_at = {(1, 0): formats.read_array_header_1_0, (2, 0): formats.read_array_header_2_0}
    with zipfile.ZipFile(stream) as archive:
        if sum(info.file_size for info in archive.infolist()) > MOST_BYTES:
            raise ValueError(f"its arrays take more than {MOST_BYTES >> 20} MB")
        for info in archive.infolist():
            with archive.open(info) as member:
                read = look_at[np.lib.format.read_magic(member)]
                shape, _, dtype = read(member)
                if dtype.itemsize * math.prod(shape) > info.file_size:
                    raise ValueError(f"{info.filename} is shorter than it says")
    stream.seek(0)
