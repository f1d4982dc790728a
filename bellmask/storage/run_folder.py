"""The files of a run folder: description of the run, metrics, status of its training.

What it is: config.json, tokenizer.json, run.json, and backbone.json where the network is a Hugging
Face causal LM.
"""

from __future__ import annotations

import json
import os
import platform
import shlex
import signal
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from bellmask import __version__
from bellmask.config.config import RunConfig, load_config
from bellmask.data.tokenizers import Tokenizer, from_description
from bellmask.model.pretrained import Backbone
from bellmask.utils import files
from bellmask.utils.errors import UserError

FORMAT = 1
"""Increased when older versions of bellmask can no longer read a run folder."""


def _now() -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S")


def write_backbone(folder: Path, backbone: Backbone) -> None:
    files.write_json(folder / "backbone.json", asdict(backbone))


def read_backbone(folder: Path, inside: str = "") -> Backbone | None:
    """The causal LM of a run folder (or of a folder inside); None where there is none."""
    path = folder / inside / "backbone.json"
    if not path.exists():
        return None
    found = files.read_object(path)
    kinds: dict[str, Any] = {"language_model": dict, "chat_template": (str, type(None))}
    if found.keys() - kinds.keys() or not files.has_kinds({"chat_template": None} | found, kinds):
        raise UserError(f"{path} is damaged: it does not describe a causal LM")
    return Backbone(**found)


def write_description(
    folder: Path,
    config: RunConfig,
    tokenizer: Tokenizer,
    description: dict[str, Any],
    before: dict[str, Any],
    backbone: Backbone | None = None,
) -> None:
    """Describe a run that starts, or that continues the run described by ``before``."""
    folder.mkdir(parents=True, exist_ok=True)
    # first of all: a folder with a config.json can always be resumed
    files.write_json(folder / "config.json", config.resolved().to_dict())
    if backbone is not None:
        write_backbone(folder, backbone)
    files.write_json(folder / "tokenizer.json", tokenizer.description())
    machine = {
        "format": FORMAT,
        "bellmask": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "started": before.get("started", _now()),
        "last_started": _now(),
    }
    files.write_json(folder / "run.json", {**machine, **description})
    for part in ("checkpoints", "validation", "samples"):
        (folder / part).mkdir(exist_ok=True)


def describe_tokenizer(tokenizer: Tokenizer) -> dict[str, Any]:
    """Entry of the tokenizer in run.json."""
    about = {"num_tokens": tokenizer.num_tokens, "mask_id": tokenizer.mask_id}
    return {**about, "tokenizer_fingerprint": tokenizer.fingerprint}


def is_free(folder: Path) -> bool:
    """True for a path where a run can start: nothing there, or only leftovers of an early kill."""
    if not folder.exists():
        return True
    own = files.scratch_of(folder / "config.json")
    return folder.is_dir() and all(path == own for path in folder.iterdir())


def read_description(folder: Path) -> dict[str, Any]:
    """run.json of a run folder or an export; those of bellmask 0.1 have no format."""
    path = folder / "run.json"
    found = files.read_object(path)
    written = found.get("format", FORMAT)
    if not files.is_whole(written):
        raise UserError(f"{path} is damaged: its format is {written!r}, not a whole number")
    if written > FORMAT:
        raise UserError(f"{folder} has format {written}, a newer one: update bellmask")
    return found


def read_config(folder: Path, inside: str = "") -> RunConfig:
    """The options of a run folder (or a folder inside).

    The format is checked first: a newer bellmask may have options that this one does not know.
    """
    if (folder / "run.json").exists():  # absent after a kill right after config.json was written
        read_description(folder)
    return load_config(folder / inside / "config.json")


def read_tokenizer(folder: Path, inside: str = "") -> Tokenizer:
    """The tokenizer in the run folder (or a folder inside), checked by its fingerprint."""
    path = folder / inside / "tokenizer.json"
    tokenizer = from_description(files.read_object(path))
    if read_description(folder).get("tokenizer_fingerprint") != tokenizer.fingerprint:
        raise UserError(f"{path} is not the tokenizer the run was trained with")
    return tokenizer


def drop_files_after(folder: Path, step: int) -> None:
    """Remove validations and samples of later steps, which a resumed run will write again."""
    for later in [*folder.glob("validation/step-*"), *folder.glob("samples/step-*")]:
        number = files.count_of(later.stem.removeprefix("step-"))
        if number is not None and number > step:
            later.unlink()


# metrics.jsonl: one JSON object per line, appended while training, cut back on resume.

TIME_FIELDS = ("seconds", "tokens_per_second")
"""Fields of metrics.jsonl that differ between repetitions of a run."""


class MetricsFile:
    """metrics.jsonl: append a line; cut back to a step when a run is resumed."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, record: dict[str, Any]) -> None:
        with self.path.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(record) + "\n")

    def sync(self) -> None:
        """Make sure that all lines so far are on disk."""
        if self.path.exists():
            with self.path.open("rb") as stream:
                os.fsync(stream.fileno())

    def cut_back(self, step: int) -> None:
        """Drop lines of later steps, and an incomplete last line."""
        kept = [line for line in read_metrics(self.path) if line["step"] <= step]
        files.write_text(self.path, "".join(json.dumps(line) + "\n" for line in kept))


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All whole lines of a metrics.jsonl, in order; none if the file is absent."""
    if not path.exists():
        return []
    records = []
    for line in path.read_bytes().split(b"\n"):
        try:
            record = files.load_json(line)
        except ValueError:
            continue  # the line that was being written when the process was killed
        if files.has_kinds(record, {"step": int, "kind": str}) and files.is_whole(record["step"]):
            records.append(record)
    return records


# Marks in a run folder with the status of a training, for people and for job scripts.
#
# ``RESUME_ME`` is there from the first step until the last one is done: if it exists and no process
# is training, the run can be resumed. ``FAILED`` is there instead when continuing would only repeat
# the failure. A finished run has neither. (Exit codes are not sufficient: torchrun's is always 1
# when a run ends early.)

RESUME, FAILED = "RESUME_ME", "FAILED"


def resume_command(folder: Path, num_processes: int = 1, per_machine: int = 1) -> str:
    """The command that resumes a run; with several machines, the command for each."""
    words = ["bellmask", "train", str(folder / "config.json"), "--out", str(folder)]
    if num_processes > 1:
        words = ["torchrun", "--nproc-per-node", str(per_machine), "-m", *words]
    if num_processes > per_machine:
        words[1:1] = ["--nnodes", str(num_processes // per_machine)]
    return shlex.join([*words, "--resume", "auto"])


@dataclass(frozen=True)
class RunState:
    """Writes the marks of one run."""

    folder: Path
    steps: int
    command: str
    """The command that resumes the run."""

    def running(self, step: int) -> None:
        """Training starts, or continues, after ``step``."""
        (self.folder / FAILED).unlink(missing_ok=True)
        self._write(RESUME, "running", step, "running, or killed")

    def stopped(self, step: int, number: int) -> None:
        """A signal ended the run; everything up to ``step`` is saved."""
        self._write(RESUME, "stopped", step, f"stopped by {signal.Signals(number).name}")

    def failed(self, step: int, reason: str) -> None:
        """The run cannot continue."""
        self._write(FAILED, "failed", step, reason)
        (self.folder / RESUME).unlink(missing_ok=True)

    @property
    def has_failed(self) -> bool:
        """True if an earlier attempt failed."""
        return (self.folder / FAILED).exists()

    def done(self) -> None:
        """All steps are done and saved."""
        (self.folder / RESUME).unlink(missing_ok=True)

    def _write(self, name: str, state: str, step: int, reason: str) -> None:
        content = {"state": state, "step": step, "steps": self.steps, "reason": reason}
        if name == RESUME:
            content |= {"resume": self.command, "from": str(Path.cwd())}
        files.write_json(self.folder / name, content | {"written": _now()})
