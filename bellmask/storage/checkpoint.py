"""Checkpoints: safetensors shards with a hash manifest, written atomically.

A checkpoint folder holds ``*.safetensors`` (written by ``torch.distributed.checkpoint``, so any
number of processes can read it), ``state.json`` (everything that is not a tensor) and
``manifest.json`` (size and SHA-256 of every other file). No pickle anywhere. A folder named
``step-*`` is always whole: a kill in the middle of a save leaves only a ``.writing-*`` folder,
which the next start removes.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import re
import shutil
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bellmask.config.options import CheckpointOptions
from bellmask.utils import files
from bellmask.utils.distributed import World
from bellmask.utils.errors import SavingError, UserError

logger = logging.getLogger(__name__)

# manifest.json of a checkpoint: size and SHA-256 of its files, and their verification.

MANIFEST, STATE = "manifest.json", "state.json"


def digest(path: Path) -> dict[str, Any]:
    """Manifest entry of a file."""
    with path.open("rb") as stream:
        sha256 = hashlib.file_digest(stream, "sha256").hexdigest()
    return {"bytes": path.stat().st_size, "sha256": sha256}


def find_damage(folder: Path, world: World | None = None) -> str | None:
    """Description of a checkpoint's damage, or None if every file is unchanged.

    Processes share the reading; all get the answer.
    """
    world = world or World()
    return world.any_rank(_own_damage(folder, world.rank, world.size)) or None


def _own_damage(folder: Path, rank: int, size: int) -> str:
    """What is wrong with every ``size``-th file; empty when nothing is."""
    try:
        manifest = files.read_json(folder / MANIFEST)
        for name, expected in list(manifest.items())[rank::size]:
            path = files.inside(folder, name, MANIFEST)
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


# The checkpoints of a run.

_NAME = re.compile(r"step-\d{9}$")
LATEST = "latest"
FORMAT = 1
"""Increased when a checkpoint's layout changes."""


def _sync(path: Path) -> None:
    """Sync a file, or the entries of a folder, to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _cause(error: BaseException) -> str:
    """Reason of a failed save, in one line, extracted from DCP's exception."""
    failures = getattr(error, "failures", None)  # CheckpointException: {rank: (error, stack)}
    if failures:
        rank, (inner, _) = sorted(failures.items())[0]
        return f"{inner}" if len(failures) > 1 or rank == 0 else f"process {rank}: {inner}"
    return str(error) or type(error).__name__


def step_of(folder: Path) -> int:
    """The step in a checkpoint folder's name."""
    return int(folder.name.removeprefix("step-"))


def list_checkpoints(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("step-*") if _NAME.match(path.name))


@dataclass(frozen=True)
class CheckpointStore:
    """The checkpoints of one run."""

    folder: Path
    options: CheckpointOptions
    world: World
    on_saved: Callable[[int], None] = lambda step: None
    """Called on the main process with each step whose checkpoint is on disk."""

    def __post_init__(self) -> None:
        # here and not around a save: filters apply to all threads, and a save may run in another
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)

    def clean(self) -> None:
        """Remove leftovers of interrupted saves and removals, and checkpoints set aside earlier."""
        for kind in ("writing", "removing", "damaged"):
            for leftover in self.folder.glob(f".{kind}-*"):
                shutil.rmtree(leftover, ignore_errors=True)

    def all(self) -> list[Path]:
        return list_checkpoints(self.folder)

    def save(self, step: int, tensors: dict[str, Tensor], state: dict[str, Any]) -> Path:
        """Write a checkpoint, which appears complete or not at all; then apply the retention rules.

        SavingError, on all ranks, when any of them cannot write.
        """
        import torch.distributed.checkpoint as dcp  # slow to import, and not needed for help

        final = self.folder / f"step-{step:09d}"
        scratch = self.folder / f".writing-{step:09d}"

        def prepare() -> None:
            shutil.rmtree(scratch, ignore_errors=True)
            scratch.mkdir(parents=True)

        def write_tensors() -> None:
            writer = dcp.HuggingFaceStorageWriter(str(scratch), save_distributed=True)
            is_alone, group = self.world.size == 1, self.world.group
            dcp.save(dict(tensors), storage_writer=writer, process_group=group, no_dist=is_alone)

        self._together(step, prepare, on_main=True)
        self._together(step, write_tensors)
        digests = self._hash_files(step, scratch)
        self._together(step, lambda: self._finish(scratch, final, state, digests), on_main=True)
        return final

    def _together(self, step: int, work: Callable[[], object], *, on_main: bool = False) -> None:
        """Run a part of a save on every rank, or the main one; all continue, or all stop."""
        import torch.distributed.checkpoint as dcp

        problem = ""
        try:
            if self.world.is_main or not on_main:
                work()
        except (Exception, dcp.CheckpointException) as error:  # the disk's, safetensors', DCP's own
            problem = _cause(error)
        problem = self.world.any_rank(problem)
        if problem:
            if self.world.is_main:
                shutil.rmtree(self.folder / f".writing-{step:09d}", ignore_errors=True)
            last = self.all()[-1:]
            left = f"the latest intact one is {last[0].name}" if last else "there is no earlier one"
            raise SavingError(
                f"the checkpoint of step {step} could not be written to {self.folder}: {problem}; "
                f"{left}. Fix this (e.g. free some space) and continue with the same command and "
                "--resume auto."
            )

    def _hash_files(self, step: int, scratch: Path) -> dict[str, dict[str, Any]]:
        """Size and SHA-256 of all files, which are then synced to disk; ranks share the work.

        The list is the union over ranks, because file systems can show an older list.
        """
        found: dict[str, dict[str, Any]] = {}
        listed = self.world.all_gather_object([p.name for p in scratch.iterdir() if p.is_file()])
        names = sorted({name for part in listed for name in part})

        def hash_own() -> None:
            for name in names[self.world.rank :: self.world.size]:
                found[name] = digest(scratch / name)
                _sync(scratch / name)

        self._together(step, hash_own)
        for part in self.world.all_gather_object(found):
            found.update(part)
        return found

    def _finish(
        self, scratch: Path, final: Path, state: dict[str, Any], digests: dict[str, dict[str, Any]]
    ) -> None:
        """State, manifest, the final name; on the main process."""
        files.write_json(scratch / STATE, state)
        manifest = {**digests, STATE: digest(scratch / STATE)}
        files.write_json(scratch / MANIFEST, manifest, sort_keys=True)
        _sync(scratch)
        if final.exists():  # a repeated step, after resuming from an older checkpoint
            self._remove(final)
        os.replace(scratch, final)
        _sync(self.folder)
        files.write_text(self.folder / LATEST, final.name + "\n")
        try:
            self.on_saved(step_of(final))
            self._prune()
        except OSError as error:  # the checkpoint is complete nevertheless
            logger.warning("%s is saved, but %s", final, error)

    def _remove(self, folder: Path) -> None:
        trash = folder.with_name(f".removing-{folder.name}")
        os.replace(folder, trash)
        shutil.rmtree(trash, ignore_errors=True)  # the next start removes leftovers

    def _prune(self) -> None:
        folders = self.all()
        keep = set(folders[-self.options.keep_last :])
        keep |= {f for f in folders if step_of(f) in self.options.keep_steps}
        if self.options.keep_every:
            keep |= {f for f in folders if step_of(f) % self.options.keep_every == 0}
        if self.options.keep_best:
            keep.add(self.best() or folders[-1])
        for folder in folders:
            if folder not in keep:
                self._remove(folder)

    def best(self) -> Path | None:
        """The checkpoint with the lowest validation NLL, among those validated at their step."""
        scores: list[tuple[float, Path]] = []
        for folder in self.all():
            with contextlib.suppress(UserError):  # a damaged one is never the best
                nll = read_state(folder).get("nll")
                scores += [(nll, folder)] if files.is_finite(nll) else []
        return min(scores, key=lambda item: item[0])[1] if scores else None

    def set_aside_after(self, step: int) -> None:
        """Rename checkpoints of later steps: damaged ones, which a resumed run will write again.

        They stay until the next start, in case they can be repaired.
        """
        for folder in self.all():
            if step_of(folder) > step:
                os.replace(folder, folder.with_name(f".damaged-{folder.name}"))
        if self.all():
            files.write_text(self.folder / LATEST, self.all()[-1].name + "\n")

    def find(self, which: str) -> Path:
        """``latest``, ``best`` or a step number; UserError when it is not there."""
        known: dict[str, Path | None] = {str(step_of(f)): f for f in self.all()}
        steps = ", ".join(known) or "none"
        known |= {"best": self.best(), "latest": next(reversed(self.all()), None)}
        found = known.get(which)
        if found is None:
            raise UserError(f"no checkpoint {which!r} in {self.folder}: latest, best, {steps}")
        return found

    def newest_intact(self) -> tuple[Path | None, list[str]]:
        """The latest undamaged checkpoint, and a message for each damaged one that was skipped.

        All ranks use the main rank's list, because file systems can show an older list.
        """
        complaints: list[str] = []
        names = self.world.all_gather_object([folder.name for folder in self.all()])[0]
        for folder in (self.folder / name for name in reversed(names)):
            damage = find_damage(folder, self.world)
            if damage is None:
                return folder, complaints
            complaints.append(f"{folder} is damaged: {damage}")
        return None, complaints


def read_state(folder: Path) -> dict[str, Any]:
    """The state in a checkpoint, without tensors."""
    state = files.read_object(folder / STATE)
    if state.get("format", FORMAT) != FORMAT:
        raise UserError(f"{folder} was written by another version of bellmask")
    if not files.is_whole(state.get("step")):
        raise UserError(f"{folder / STATE} is damaged: it has no step")
    return state


def load_tensors(
    folder: Path, tensors: dict[str, Tensor], world: World | None = None, *, is_intact: bool = False
) -> None:
    """Fill ``tensors`` in place from a checkpoint, whatever number of processes wrote it.

    ``is_intact``: its files were compared with the manifest just now.
    """
    damage = None if is_intact else find_damage(folder, world)
    if damage:
        others = [step_of(other) for other in list_checkpoints(folder.parent) if other != folder]
        hint = f"; use --checkpoint STEP (others: {str(others)[1:-1]})" if others else ""
        raise UserError(f"checkpoint {folder} is damaged: {damage}{hint}")
    import torch.distributed.checkpoint as dcp

    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore", UserWarning)
        try:
            reader = dcp.HuggingFaceStorageReader(str(folder))
            dcp.load(tensors, storage_reader=reader, no_dist=world is None or world.size == 1)
        except (Exception, dcp.CheckpointException) as error:  # the latter is not an Exception
            raise UserError(f"{folder} does not match config.json: {_cause(error)}") from None


# When a checkpoint is written: while training waits, or in the background from a copy.


def saves_in_background(option: str, world: World) -> bool:
    """What ``checkpoint.saving`` means for these processes."""
    auto = world.size > 1 or world.device.type != "cpu"
    return {"wait": False, "background": True, "auto": auto}[option]


class Saver:
    """Hands checkpoints to a store, one at a time.

    In the background a thread writes a copy of all tensors in CPU memory. The store must then have
    processes of its own (:meth:`World.aside`): two threads cannot share a group. A failure is
    raised at the next call, on all ranks.
    """

    def __init__(
        self, store: CheckpointStore, device: torch.device, *, in_background: bool
    ) -> None:
        self.store, self.device, self.in_background = store, device, in_background
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def save(self, step: int, tensors: dict[str, Tensor], state: dict[str, Any]) -> None:
        """Save now, or start a save after the previous one is done."""
        self.wait()
        if not self.in_background:
            self.store.save(step, tensors, state)
            return
        # of a tensor that is cut, this process's part, cut as before
        copies = {name: t.detach().to("cpu", copy=True) for name, t in tensors.items()}
        # daemon: a process that was told to stop must not wait for ranks that are gone
        given = (step, copies, state)
        self._thread = threading.Thread(target=self._run, args=given, name="saving", daemon=True)
        self._thread.start()

    def _run(self, step: int, copies: dict[str, Tensor], state: dict[str, Any]) -> None:
        try:
            if self.device.type == "cuda":
                torch.cuda.set_device(self.device)  # of this thread: else it is the first GPU
            self.store.save(step, copies, state)
        except BaseException as error:  # raised again in the training thread
            self._error = error

    @property
    def has_failed(self) -> bool:
        """True when a background save failed: the next call raises."""
        return self._error is not None

    def wait(self) -> None:
        """Wait until the current save is on disk; raise its error, if any."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error
