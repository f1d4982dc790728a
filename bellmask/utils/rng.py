"""Noise as a function of its name: (seed, stream, step) and the sample's place in the global batch.

Nothing here is stateful. A uniform number is a hash of a 64-bit key and a counter (the SplitMix64
finalizer, applied twice), so any slice of any batch can be drawn on any rank, in any order, and
comes out the same; resuming needs no generator to be saved. Cost: about 15 ns per number.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

_GOLDEN = 0x9E3779B97F4A7C15
_MIX = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_SIGN = 1 << 63
_WORD = 1 << 64


def _signed(value: int) -> int:
    """The int64 with the same 64 bits."""
    return (value + _SIGN) % _WORD - _SIGN


def stream_key(seed: int, *path: str | int) -> int:
    """A 64-bit key for a named stream, e.g. ``stream_key(seed, "masks", step)``."""
    text = "/".join([str(seed), *map(str, path)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def _shift_right(z: Tensor, bits: int) -> Tensor:
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def _mix(z: Tensor) -> Tensor:
    z = (z ^ _shift_right(z, 30)) * _signed(_MIX[0])
    z = (z ^ _shift_right(z, 27)) * _signed(_MIX[1])
    return z ^ _shift_right(z, 31)


def hash_counters(key: int, counters: Tensor) -> Tensor:
    """64 random bits (as int64) for each int64 counter."""
    z = _mix(counters * _signed(_GOLDEN) + _signed(key))
    return _mix(z + _signed((key * _GOLDEN + 1) % _WORD))


def uniform(key: int, counters: Tensor) -> Tensor:
    """Float64 numbers in [0, 1), one for each int64 counter."""
    return _shift_right(hash_counters(key, counters), 11).to(torch.float64) * 2.0**-53


def uniform_rows(key: int, rows: Tensor, width: int) -> Tensor:
    """[len(rows), width] uniforms in which row i depends on ``rows[i]`` alone, not on its place."""
    return uniform(key, rows[:, None] * width + torch.arange(width, device=rows.device))


def shuffle(key: int, count: int) -> Tensor:
    """A random permutation of ``range(count)``: the ranks of keyed random numbers."""
    return torch.argsort(hash_counters(key, torch.arange(count)), stable=True)


def torch_seed(key: int) -> int:
    """A key as a seed for ``torch.manual_seed``, which wants a non-negative int64."""
    return key % _SIGN


class IndexPermutation:
    """A pseudo-random permutation of ``range(size)``, evaluated point by point.

    A four-round Feistel network on the smallest even number of bits that holds ``size``, walked
    until the value falls inside: no array of corpus size exists, whatever the corpus. On few bits
    such a network is not uniform, so small sizes are shuffled outright.
    """

    ROUNDS = 4
    SMALL = 4096

    def __init__(self, size: int, key: int) -> None:
        self.size = size
        self._table = shuffle(key, size) if size <= self.SMALL else None
        self._half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
        self._low = (1 << self._half_bits) - 1
        self._keys = [stream_key(key, "feistel", r) for r in range(self.ROUNDS)]

    def __call__(self, index: Tensor) -> Tensor:
        """The image of each index (int64, in ``range(size)``)."""
        if self._table is not None:
            return self._table[index]
        value = self._encrypt(index)
        outside = value >= self.size
        while bool(outside.any()):
            value = torch.where(outside, self._encrypt(value), value)
            outside = value >= self.size
        return value

    def _encrypt(self, value: Tensor) -> Tensor:
        left, right = value >> self._half_bits, value & self._low
        for key in self._keys:
            left, right = right, left ^ (hash_counters(key, right) & self._low)
        return (left << self._half_bits) | right
