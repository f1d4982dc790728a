"""Data sheets of devices, and machines full of them written as ``4xH100`` or ``16x8xH100``.

Peaks are dense (no sparsity), as the makers publish them: bfloat16 with float32 sums on matrix
units, float32 without TF32, which is torch's default.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from bellmask.utils.errors import UserError, unknown
from bellmask.utils.files import count_of

TERA, GIGA = 1e12, 1e9
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

    @property
    def precision(self) -> str:
        """What ``train.precision=auto`` picks there."""
        return "bfloat16" if self.is_gpu and self.bfloat16 is not None else "float32"

    def peak(self, precision: str) -> float:
        """FLOP/s of matrix products in a type."""
        if precision == "float32":
            return self.float32
        if self.bfloat16 is None:
            raise UserError(
                f"{self.name} has no units for bfloat16; use --train.precision float32 (or auto)"
            )
        return self.bfloat16


def _gpu(
    name: str,
    bfloat16: float | None,
    float32: float,
    bandwidth: float,
    memory: float,
    link: float,
    network: float,
) -> Device:
    """TFLOP/s, GB/s and GiB in place of base units: what makers call 80 GB are 80 GiB."""
    peak = None if bfloat16 is None else bfloat16 * TERA
    sizes = bandwidth * GIGA, memory * GIB, link * GIGA, network * GIGA
    return Device(name, peak, float32 * TERA, *sizes)


DEVICES: dict[str, Device] = {
    device.name: device
    for device in (
        _gpu("B200", 2250, 75, 8000, 180, 900, 50),
        _gpu("H200", 989, 67, 4800, 141, 450, 50),
        _gpu("H100", 989, 67, 3350, 80, 450, 50),
        _gpu("H100-PCIe", 756, 51, 2000, 80, 64, 25),
        _gpu("H800", 989, 67, 3350, 80, 200, 50),
        _gpu("A100", 312, 19.5, 2039, 80, 300, 25),
        _gpu("A100-40GB", 312, 19.5, 1555, 40, 300, 25),
        _gpu("MI300X", 1307, 163, 5300, 192, 448, 50),
        _gpu("L40S", 362, 91.6, 864, 48, 32, 12.5),
        _gpu("A6000", 155, 38.7, 768, 48, 32, 12.5),
        _gpu("4090", 165, 82.6, 1008, 24, 32, 12.5),
        _gpu("V100", None, 15.7, 900, 32, 150, 12.5),
        Device("CPU", None, 1 * TERA, 100 * GIGA, 64 * GIGA, 10 * GIGA, 3 * GIGA, is_gpu=False),
    )
}
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
    match = re.fullmatch(r"(?:(\d+)x)?(?:(\d+)x)?([A-Za-z0-9][A-Za-z0-9-]*)", text.strip())
    if match is None:
        raise UserError(f"--devices {text!r}: write 4xH100, or 16x8xH100 for 16 machines of 8")
    by_name = {name.lower(): device for name, device in DEVICES.items()}
    device = by_name.get(match[3].lower())
    if device is None:
        raise unknown("device", match[3], DEVICES)
    counts = [count_of(count) or 0 for count in match.groups()[:2] if count is not None]
    machine_size = counts[-1] if counts else 1
    machines = counts[0] if len(counts) == 2 else 1
    if nodes is not None and len(counts) == 2:
        raise UserError(f"--devices {text} names the machines already: leave --nodes out")
    machines = machines if nodes is None else nodes
    if not 1 <= machine_size * machines <= MOST_DEVICES or min(machine_size, machines) < 1:
        raise UserError(
            f"--devices {text}: there must be at least 1 device on 1 machine, and no more than "
            f"{MOST_DEVICES:,} in all"
        )
    return Cluster(device, machine_size, machines)
