"""Processes, devices, reductions and precision. One process needs no process group.

Every rank runs its slice of the global batch; gradients are averaged by DDP or FSDP2
(``train/parallel.py``).
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.rendezvous import rendezvous

from bellmask.utils.errors import LostProcessError, SavingError, TrainingError, UserError

S = TypeVar("S")
T = TypeVar("T")
CPU = torch.device("cpu")
_LOST = re.compile(
    r"Connection (closed|reset|refused|was likely closed)|Broken pipe|Failed to recv|"
    r"NCCL.*(remote|abort|timeout)"
)
"""Messages of gloo, NCCL and the store on the remaining processes when one has died."""
_SHARED_ERRORS: dict[str, type[Exception]] = {
    kind.__name__: kind for kind in (UserError, SavingError, TrainingError)
}
"""Errors that are raised as they are on all ranks; other ranks get a message for the rest."""
LONGEST_WAIT = timedelta(days=7)
"""How long other ranks wait while the main one prepares data."""
LONGEST_CALL = timedelta(hours=1)
"""How long a collective call may take; hashing a large checkpoint happens between two."""
LONGEST_FAREWELL = 10.0
"""Seconds that a failed main process waits until the others have been notified."""


@dataclass(frozen=True)
class World:
    """This process among all of the run's."""

    rank: int = 0
    size: int = 1
    device: torch.device = CPU
    store: dist.Store | None = None
    machine_size: int = 1
    """Processes on this machine."""
    group: dist.ProcessGroup | None = None
    """Process group of the collective calls; None: the default group."""
    _calls: Iterator[int] = field(default_factory=itertools.count, repr=False, compare=False)

    @property
    def is_main(self) -> bool:
        """True on the process that writes files and prints."""
        return self.rank == 0

    def all_reduce_sum(self, tensor: Tensor) -> Tensor:
        """The sum over ranks, in place."""
        if self.size > 1:
            dist.all_reduce(tensor, group=self.group)
        return tensor

    def agree(self, flag: bool) -> bool:
        """The main process's flag, on all ranks."""
        return self.any(flag and self.is_main)

    def any(self, flag: bool) -> bool:
        """True on all ranks when any rank's flag is."""
        return bool(self.all_reduce_max(flag))

    def all_reduce_max(self, value: float) -> float:
        if self.size == 1:
            return value
        shared = torch.tensor([value], dtype=torch.float64, device=self.device)
        dist.all_reduce(shared, op=dist.ReduceOp.MAX, group=self.group)
        return float(shared.item())

    def all_gather_object(self, value: T) -> list[T]:
        """The objects of all ranks, by rank."""
        found = [value] * self.size
        if self.size > 1:
            dist.all_gather_object(found, value, group=self.group)
        return found

    def share(self, items: Sequence[S], work: Callable[[Sequence[S]], list[T]]) -> list[T]:
        """``work`` on a part of the items by each rank; the results of all, in order."""
        mine = items[self.rank :: self.size]
        parts = self.all_gather_object(work(mine) if mine else [])
        return [parts[number % self.size][number // self.size] for number in range(len(items))]

    def any_rank(self, problem: str) -> str:
        """The first problem of any rank, on all ranks; empty if there is none."""
        return next((said for said in self.all_gather_object(problem) if said), "")

    def aside(self) -> World:
        """The same processes with a separate process group, for use in another thread.

        Collective calls of two threads in one group would mix.
        """
        if self.size == 1:
            return replace(self, device=CPU)
        group = dist.new_group(backend="gloo", timeout=LONGEST_CALL)
        return replace(self, device=CPU, store=None, group=group, _calls=itertools.count())

    def on_main(self, work: Callable[[], object]) -> None:
        """Run a function on the main process while the others wait, however long it takes.

        An error there is raised everywhere, so that no rank is left in a collective call.
        """
        if self.size == 1:
            work()
            return
        assert self.store is not None
        key = f"bellmask/on-main/{next(self._calls)}"
        heard = f"{key}/heard"
        if self.is_main:
            try:
                work()
            except BaseException as error:
                self.store.set(key, f"{type(error).__name__} {error}")
                # exit a little later, after the others were notified: this process may host the
                # store
                until = time.monotonic() + LONGEST_FAREWELL
                while self.store.add(heard, 0) < self.size - 1 and time.monotonic() < until:
                    time.sleep(0.01)
                raise
            self.store.set(key, "done")
            return
        self.store.wait([key], LONGEST_WAIT)
        kind, _, text = self.store.get(key).decode().partition(" ")
        if kind != "done":
            self.store.add(heard, 1)
            raise _SHARED_ERRORS.get(kind, LostProcessError)(text)

    def barrier(self) -> None:
        if self.size > 1:  # NCCL would guess the device, and warn
            gpus = [self.device.index] if self.device.type == "cuda" else None
            dist.barrier(group=self.group, device_ids=gpus)


def pick_device(option: str) -> torch.device:
    """``auto`` is this rank's GPU where there is one, a Mac's for a single process."""
    has_mps = torch.backends.mps.is_available()
    if option == "auto":
        is_alone = os.environ.get("WORLD_SIZE", "1") == "1"
        option = "mps" if has_mps and is_alone else "cpu"
        option = "cuda" if torch.cuda.is_available() else option
    is_missing = option.startswith("cuda") and not torch.cuda.is_available()
    if is_missing or (option == "mps" and not has_mps):
        raise UserError(f"device {option} is not available: torch finds no GPU; use cpu")
    if not re.fullmatch(r"cpu|mps|cuda(:\d+)?", option):
        raise UserError(f"unknown device {option!r} (auto, cpu, cuda, cuda:N, mps)")
    if option == "cuda":
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        option = f"cuda:{local_rank % torch.cuda.device_count()}"
    if option.startswith("cuda"):
        torch.set_float32_matmul_precision("high")  # TF32 where products are float32
        if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:  # masked rows differ in number every time
            os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    return torch.device(option)


def _check_restarts() -> None:
    """Several machines need a new store after each restart: agents count restarts separately."""
    is_shared = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    restarts = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")
    if os.environ.get("GROUP_WORLD_SIZE", "1") != "1" and is_shared and restarts != "0":
        raise UserError(
            "torchrun --max-restarts on several machines needs the environment variable "
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 (docs/scaling.md)"
        )


@contextlib.contextmanager
def open_world(device_option: str) -> Iterator[World]:
    """The processes that torchrun started, or this one alone."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    device = pick_device(device_option)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if size == 1:
        yield World(device=device)
        return
    if device.type == "mps":
        raise UserError("a Mac's GPU takes one process: omit torchrun, or use the device cpu")
    _check_restarts()
    store, rank, size = next(rendezvous("env://"))
    if os.environ.get("GROUP_WORLD_SIZE", "1") == "1":
        # a prefix by restart, so that a restarted group never meets the dead one's addresses; the
        # agents of several machines count restarts separately and need a new store instead
        # (slurm.sh)
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        store = dist.PrefixStore(f"attempt-{attempt}", store)
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=LONGEST_CALL)
    machine_size = int(os.environ.get("LOCAL_WORLD_SIZE", size))
    world = World(rank, size, device, store, machine_size)
    try:
        yield world
    except RuntimeError as error:
        if found := _LOST.search(str(error)):
            raise LostProcessError(f"another process of this run has died ({found[0]})") from None
        raise
    # only after success: others may be in a call that never ends, and torchrun ends them
    world.barrier()  # on several machines the main process hosts the store: all must be done
    dist.destroy_process_group()


@contextlib.contextmanager
def deterministic(is_wanted: bool) -> Iterator[None]:
    """torch's deterministic kernels inside; to be entered before anything is on a GPU."""
    cudnn, before = torch.backends.cudnn, torch.are_deterministic_algorithms_enabled()
    flags = cudnn.deterministic, cudnn.benchmark
    only_warns = torch.is_deterministic_algorithms_warn_only_enabled()
    if is_wanted:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS starts
        torch.use_deterministic_algorithms(True)
        cudnn.deterministic, cudnn.benchmark = True, False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=only_warns)
        cudnn.deterministic, cudnn.benchmark = flags


def float64_device(device: torch.device) -> torch.device:
    """Where float64 numbers of a device are: on the CPU for a Mac's, which has none."""
    return CPU if device.type == "mps" else device


def to_float64(tensor: Tensor) -> Tensor:
    return tensor.to(float64_device(tensor.device)).double()


def device_memory(device: torch.device) -> float:
    """Bytes of memory that a device has left; a CPU's is the machine's."""
    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[0])
    if device.type == "mps":
        return float(torch.mps.recommended_max_memory())
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def fork_rng(device: torch.device) -> contextlib.AbstractContextManager[None]:
    """Restore the caller's random generators, of the CPU and of this process's GPU."""
    return torch.random.fork_rng(devices=[device] if device.type == "cuda" else [])


def pick_precision(option: str, device: torch.device) -> torch.dtype:
    """The type of matrix products; weights and sums stay float32.

    ``auto`` is float32 on every CPU, so that a run has the same numbers whatever the CPU can do,
    and on GPUs that would emulate bfloat16.
    """
    if option == "auto":
        is_native = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)
        return torch.bfloat16 if is_native else torch.float32
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[option]


def autocast(device: torch.device, dtype: torch.dtype) -> torch.autocast:
    """Matrix products in ``dtype``; a no-op for float32."""
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=dtype == torch.bfloat16)


def missing_compiler(device: torch.device) -> str:
    """What torch.compile needs and does not find for a device, in words; empty: nothing."""
    if device.type == "cuda":
        from torch.utils._triton import has_triton

        if not has_triton():
            return "triton, and a GPU that it supports"
        variable, names = "CC", ["gcc", "clang"]  # for what starts triton's kernels
    elif device.type == "cpu":
        variable, names = "CXX", ["clang++" if sys.platform == "darwin" else "g++"]
    else:
        return ""
    if any(map(shutil.which, [os.environ[variable]] if variable in os.environ else names)):
        return ""
    return f"a compiler: install {names[0]}, or set the environment variable {variable} to another"


# Data sheets of devices
#
# Peaks are dense (no sparsity), as the makers publish them: bfloat16 with float32 sums on matrix
# units; float32 on ordinary units, while runs use TF32 on matrix units, at half of bfloat16's rate.
# The link is half of the published NVLink (or PCIe) figure, which counts both ways. The network is
# an assumption: 400 Gbit/s per device with H100 and later, 200 with A100, 100 with the others.

GIB = 2**30


@dataclass(frozen=True)
class Device:
    """What a data sheet says of one device."""

    name: str
    bfloat16: float | None
    """FLOP/s of matrix products in bfloat16; None where there are no units for it."""
    float32: float
    bandwidth: float
    """Bytes per second to its own memory."""
    memory: float
    """Bytes."""
    link: float
    """Bytes per second to another device of the machine, one way."""
    network: float
    """Bytes per second to another machine, one way, per device."""
    is_gpu: bool = True

    def peak(self, precision: str) -> float:
        """FLOP/s of matrix products in a type."""
        if precision == "float32" and self.is_gpu and self.bfloat16 is not None:
            return max(self.float32, self.bfloat16 / 2)  # TF32
        found = self.float32 if precision == "float32" else self.bfloat16
        if found is None:
            raise UserError(f"{self.name} does not support bfloat16; use --train.precision float32")
        return found

    @property
    def precision(self) -> str:
        return "bfloat16" if self.is_gpu and self.bfloat16 is not None else "float32"


# bfloat16, float32, bandwidth, memory (GiB: what makers call 80 GB are 80 GiB), link, network
_KNOWN = (
    Device("B200", 2250e12, 75e12, 8000e9, 180 * GIB, 900e9, 50e9),
    Device("H200", 989e12, 67e12, 4800e9, 141 * GIB, 450e9, 50e9),
    Device("H100", 989e12, 67e12, 3350e9, 80 * GIB, 450e9, 50e9),
    Device("GH200", 989e12, 67e12, 4000e9, 96 * GIB, 450e9, 50e9),
    Device("H100-NVL", 835e12, 60e12, 3900e9, 94 * GIB, 300e9, 25e9),
    Device("H100-PCIe", 756e12, 51e12, 2000e9, 80 * GIB, 64e9, 25e9),
    Device("H800", 989e12, 67e12, 3350e9, 80 * GIB, 200e9, 50e9),
    Device("A100", 312e12, 19.5e12, 2039e9, 80 * GIB, 300e9, 25e9),
    Device("A100-40GB", 312e12, 19.5e12, 1555e9, 40 * GIB, 300e9, 25e9),
    Device("MI300X", 1307e12, 163e12, 5300e9, 192 * GIB, 448e9, 50e9),
    Device("L40S", 362e12, 91.6e12, 864e9, 48 * GIB, 32e9, 12.5e9),
    Device("A6000", 155e12, 38.7e12, 768e9, 48 * GIB, 32e9, 12.5e9),
    Device("4090", 165e12, 82.6e12, 1008e9, 24 * GIB, 32e9, 12.5e9),
    Device("V100", None, 15.7e12, 900e9, 32 * GIB, 150e9, 12.5e9),
    # stands for any server: about 16 cores; measure yours with ``--probe``
    Device("CPU", None, 1e12, 100e9, 64e9, 10e9, 3e9, is_gpu=False),
)
DEVICES = {device.name: device for device in _KNOWN}


def find_device(name: str) -> Device | None:
    """The data sheet of a GPU, by the name that its driver gives."""
    for known in sorted(DEVICES.values(), key=lambda device: -len(device.name)):
        pattern = rf"(?<![a-z0-9]){known.name.lower()}(?![0-9])"  # GH200 is no H200
        if known.is_gpu and re.search(pattern, name.lower().replace(" ", "-")):
            return known
    return None
