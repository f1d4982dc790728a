"""Data sheets of devices, and machines full of them written as ``4xH100`` or ``16x8xH100``.

Peaks are dense (no sparsity), as the makers publish them: bfloat16 with float32 sums on matrix
units, float32 without TF32, which is torch's default.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace

import torch

from bellmask.utils.distributed import has_native_bfloat16, pick_device
from bellmask.utils.errors import UserError, look_up
from bellmask.utils.files import count_of

GIB = 2**30
MOST_DEVICES = 1_000_000


@dataclass(frozen=True)
class Device:
    """What a data sheet says of one device."""

    name: str
    bfloat16: float | None
    """FLOP/s of matrix products in bfloat16; None where there are no units for it."""
    float32: float
    """FLOP/s in float32."""
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
        if precision == "float32":
            return self.float32
        if self.bfloat16 is None:
            raise UserError(
                f"{self.name} has no units for bfloat16; use --train.precision float32 (or auto)"
            )
        return self.bfloat16

    @property
    def precision(self) -> str:
        """What ``train.precision=auto`` picks there."""
        return "bfloat16" if self.is_gpu and self.bfloat16 is not None else "float32"


# bfloat16, float32 (TFLOP/s); bandwidth (GB/s), memory (GiB: what makers call 80 GB are 80 GiB);
# link, network (GB/s)
_GPUS = {
    "B200": (2250, 75, 8000, 180, 900, 50),
    "H200": (989, 67, 4800, 141, 450, 50),
    "H100": (989, 67, 3350, 80, 450, 50),
    "H100-PCIe": (756, 51, 2000, 80, 64, 25),
    "H800": (989, 67, 3350, 80, 200, 50),
    "A100": (312, 19.5, 2039, 80, 300, 25),
    "A100-40GB": (312, 19.5, 1555, 40, 300, 25),
    "MI300X": (1307, 163, 5300, 192, 448, 50),
    "L40S": (362, 91.6, 864, 48, 32, 12.5),
    "A6000": (155, 38.7, 768, 48, 32, 12.5),
    "4090": (165, 82.6, 1008, 24, 32, 12.5),
    "V100": (None, 15.7, 900, 32, 150, 12.5),
}
DEVICES = {
    name: Device(
        name, bf16 and bf16 * 1e12, fp32 * 1e12, speed * 1e9, size * GIB, link * 1e9, network * 1e9
    )
    for name, (bf16, fp32, speed, size, link, network) in _GPUS.items()
}
DEVICES["CPU"] = Device("CPU", None, 1e12, 100e9, 64e9, 10e9, 3e9, is_gpu=False)
"""The link is half of the published NVLink (or PCIe) figure, which counts both ways. The network is
an assumption: 400 Gbit/s per device beside H100 and later, 200 beside A100, 100 beside the others.
CPU stands for any server: about 16 cores; measure yours with ``--probe``."""


@dataclass(frozen=True)
class Cluster:
    """Machines of equal devices."""

    device: Device
    machine_size: int
    """Devices per machine."""
    machines: int = 1

    @property
    def size(self) -> int:
        """All devices: one process each."""
        return self.machine_size * self.machines

    def __str__(self) -> str:
        inside = f"{self.machine_size}x{self.device.name}"
        return inside if self.machines == 1 else f"{self.machines}x{inside}"


def parse_devices(text: str, nodes: int | None = None) -> Cluster:
    """``H100``, ``4xH100``, or ``16x8xH100`` for 16 machines of 8; ``nodes`` multiplies machines.

    Names are found whatever their case.
    """
    match = re.fullmatch(r"(?:(?:(\d+)x)?(\d+)x)?([A-Za-z0-9][A-Za-z0-9-]*)", text.strip())
    if match is None:
        raise UserError(f"--devices {text!r}: write 4xH100, or 16x8xH100 for 16 machines of 8")
    by_name = {name.lower(): name for name in DEVICES}
    device = look_up("device", by_name.get(match[3].lower(), match[3]), DEVICES)
    if nodes is not None and match[1] is not None:
        raise UserError(f"--devices {text} names the machines already: leave --nodes out")
    machines = (count_of(match[1] or "1") or 0) if nodes is None else nodes
    machine_size = count_of(match[2] or "1") or 0
    if not 1 <= machine_size * machines <= MOST_DEVICES or machines < 1:
        raise UserError(
            f"--devices {text}: there must be at least 1 device on 1 machine, and no more than "
            f"{MOST_DEVICES:,} in all"
        )
    return Cluster(device, machine_size, machines)


def local_device(option: str = "auto") -> Device:
    """The data sheet of this machine's device; UserError for a GPU that is not in the table."""
    device = pick_device(option)
    if device.type == "cpu":
        cpu, size = DEVICES["CPU"], os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        short = 2 * cpu.float32 if has_native_bfloat16(device) else None  # at least twice as fast
        return replace(cpu, memory=float(size), bfloat16=short)
    name = torch.cuda.get_device_name(device)
    for known in sorted(DEVICES.values(), key=lambda d: -len(d.name)):
        pattern = rf"(?<![a-z0-9]){known.name.lower()}(?![0-9])"  # GH200 is no H200
        if re.search(pattern, name.lower().replace(" ", "-")):
            memory = float(torch.cuda.get_device_properties(device).total_memory)
            return replace(known, memory=memory)  # there are kinds with less than the sheet's
    raise UserError(f"this machine's GPU, {name}, is not in the table; give --devices")
