"""manifest.json of a checkpoint: size and SHA-256 of its files, and whether they still fit."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from bellmask.utils.distributed import World
from bellmask.utils.files import inside, read_json

MANIFEST, STATE = "manifest.json", "state.json"


def digest(path: Path) -> dict[str, Any]:
    """What the manifest says of a file."""
    with path.open("rb") as stream:
        sha256 = hashlib.file_digest(stream, "sha256").hexdigest()
    return {"bytes": path.stat().st_size, "sha256": sha256}


def find_damage(folder: Path, world: World | None = None) -> str | None:
    """What is wrong with a checkpoint, or None when every file is as it was written.

    Processes share the reading; all get the answer.
    """
    world = world or World()
    return world.on_any(_own_damage(folder, world.rank, world.size)) or None


def _own_damage(folder: Path, rank: int, size: int) -> str:
    """What is wrong with every ``size``-th file; empty when nothing is."""
    try:
        manifest = read_json(folder / MANIFEST)
        for name, expected in list(manifest.items())[rank::size]:
            path = inside(folder, name, MANIFEST)
            if not path.exists():
                return f"{name} is missing"
            if digest(path) != expected:
                return f"{name} has changed since it was written"
    except FileNotFoundError:
        return f"{MANIFEST} is missing"
    except (OSError, ValueError, AttributeError) as error:
        return f"{MANIFEST} cannot be read ({error})"
    extra = {p.name for p in folder.glob("*.safetensors")} - set(manifest)
    if extra:
        return f"{sorted(extra)[0]} is not in the manifest"
    return "" if STATE in manifest else f"{STATE} is not in the manifest"
