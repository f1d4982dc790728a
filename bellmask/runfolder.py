"""The files of a run folder that say what the run is: config.json, tokenizer.json, run.json, and
backbone.json where the network is a Hugging Face causal LM.
"""

from __future__ import annotations

import json
import platform
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from bellmask import __version__
from bellmask.config.config import RunConfig
from bellmask.data.tokenizers import Tokenizer, from_description
from bellmask.utils.errors import UserError
from bellmask.utils.files import count_of, read_json, scratch_of, write_text


def _write(path: Path, content: dict[str, Any]) -> None:
    write_text(path, json.dumps(content, indent=1) + "\n")


@dataclass(frozen=True)
class Backbone:
    """A causal LM as the network of a run, apart from its weights."""

    language_model: dict[str, Any]
    """Its Hugging Face config."""
    chat_template: str | None = None
    """How its tokenizer writes conversations, where it says so."""

    def write(self, folder: Path) -> None:
        """As backbone.json."""
        _write(folder / "backbone.json", asdict(self))


def read_backbone(folder: Path, inside: str = "") -> Backbone | None:
    """The causal LM of a run folder (or of a folder inside); None where there is none."""
    path = folder / inside / "backbone.json"
    if not path.exists():
        return None
    try:
        found = Backbone(**read_json(path))
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"cannot read {path}: {error}") from None
    if not isinstance(found.language_model, dict) or not isinstance(
        found.chat_template, str | None
    ):
        raise UserError(f"{path} is damaged: it describes no causal LM")
    return found


def write_description(
    folder: Path,
    config: RunConfig,
    tokenizer: Tokenizer,
    description: dict[str, Any],
    before: dict[str, Any],
    backbone: Backbone | None = None,
) -> None:
    """Describe a run that starts, or goes on from what ``before`` describes."""
    folder.mkdir(parents=True, exist_ok=True)
    # first of all: a folder with a config.json can always be resumed
    _write(folder / "config.json", config.resolved().to_dict())
    if backbone is not None:
        backbone.write(folder)
    _write(folder / "tokenizer.json", tokenizer.description())
    now = time.strftime("%Y-%m-%d %H:%M:%S")
    machine = {
        "bellmask": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "started": before.get("started", now),
        "last_started": now,
    }
    _write(folder / "run.json", {**machine, **description})
    for part in ("checkpoints", "validation", "samples"):
        (folder / part).mkdir(exist_ok=True)


def is_free(folder: Path) -> bool:
    """True for a place where a run can begin: nothing there, or what a kill at once can leave."""
    if not folder.exists():
        return True
    own = scratch_of(folder / "config.json")
    return folder.is_dir() and all(path == own for path in folder.iterdir())


def read_description(folder: Path) -> dict[str, Any]:
    """What run.json says."""
    try:
        found = read_json(folder / "run.json")
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {folder / 'run.json'}: {error}") from None
    if not isinstance(found, dict):
        raise UserError(f"{folder / 'run.json'} is damaged")
    return found


def read_tokenizer(folder: Path, inside: str = "") -> Tokenizer:
    """The tokenizer kept in the run folder (or a folder inside), checked by its fingerprint."""
    path = folder / inside / "tokenizer.json"
    try:
        tokenizer = from_description(read_json(path))
    except UserError:
        raise
    except Exception as error:  # a vocabulary can be damaged in many ways
        raise UserError(f"cannot read {path}: {error}") from None
    if read_description(folder).get("tokenizer_fingerprint") != tokenizer.fingerprint:
        raise UserError(f"{path} is not the one the run was trained with")
    return tokenizer


def drop_files_after(folder: Path, step: int) -> None:
    """Remove validations and samples of later steps, which a resumed run will write again."""
    for later in [*folder.glob("validation/step-*"), *folder.glob("samples/step-*")]:
        number = count_of(later.stem.removeprefix("step-"))
        if number is not None and number > step:
            later.unlink()
