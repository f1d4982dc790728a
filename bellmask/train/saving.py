"""When a checkpoint is written: while training waits, or beside it from a copy."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor

from bellmask.train.checkpoint import CheckpointStore
from bellmask.utils.distributed import World


def saves_in_background(option: str, world: World) -> bool:
    """What ``checkpoint.saving`` means for these processes."""
    return {
        "wait": False,
        "background": True,
        "auto": world.size > 1 or world.device.type != "cpu",
    }[option]


def _copy(tensor: Tensor) -> Tensor:
    """In CPU memory; of a tensor that is cut, this process's part, cut as before."""
    return tensor.detach().clone() if tensor.device.type == "cpu" else tensor.detach().to("cpu")


class Saver:
    """Hands checkpoints to a store, one at a time.

    In the background a thread writes a copy of all tensors in CPU memory. The store must then have
    processes of its own (:meth:`World.aside`): two threads cannot share a group. A failure shows
    itself at the next call, on all ranks.
    """

    def __init__(
        self, store: CheckpointStore, device: torch.device, *, in_background: bool
    ) -> None:
        self.store, self.device, self.in_background = store, device, in_background
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def save(self, step: int, tensors: dict[str, Tensor], state: dict[str, Any]) -> None:
        """Save now, or begin to, after an earlier save is done."""
        self.wait()
        if not self.in_background:
            self.store.save(step, tensors, state)
            return
        copies = {name: _copy(tensor) for name, tensor in tensors.items()}
        # daemon: a process that was told to stop must not wait for ranks that are gone
        self._thread = threading.Thread(
            target=self._run, args=(step, copies, state), name="saving", daemon=True
        )
        self._thread.start()

    def _run(self, step: int, copies: dict[str, Tensor], state: dict[str, Any]) -> None:
        try:
            if self.device.type == "cuda":
                torch.cuda.set_device(self.device)  # of this thread: else it is the first GPU
            self.store.save(step, copies, state)
        except BaseException as error:  # raised again by the thread that trains
            self._error = error

    @property
    def has_failed(self) -> bool:
        """True when a save in the background could not be done: the next call raises."""
        return self._error is not None

    def wait(self) -> None:
        """Until the save that is under way is on disk; raises what stopped it."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error
