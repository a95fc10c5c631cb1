"""Feature noise, bit-identical whether the target adds it to joined taps or the drafter while joining.

Each element's noise is a function of (seed, row of the pack, column of the joined features), so it
does not matter who draws it, in which pieces, or for how many rows at once. Sums are rounded once
from float32. Uniform noise is the same on every device; normal noise uses log and cos, whose last
bit may differ between a CPU and a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from services.dflash.counter_random import hash_bits

Kind = Literal["none", "uniform", "normal"]


def add_noise_(features_TF: Tensor, *, kind: Kind, scale: float, seed: int, first_column: int = 0) -> Tensor:
    """Adds seeded noise in place to [T, columns] and returns it.

    `scale` is the half width of uniform noise or the deviation of normal noise; `first_column` is
    where these columns stand in the joined features.
    """
    if kind == "none" or scale == 0.0:
        return features_TF
    rows, columns = features_TF.shape
    device = features_TF.device
    row = torch.arange(rows, device=device)[:, None]
    column = torch.arange(first_column, first_column + columns, device=device)[None, :]
    noise = _noise(kind, row, column, seed).mul_(scale)
    return features_TF.copy_(noise.add_(features_TF))


def _unit(bits: Tensor) -> Tensor:
    """float32 in [0, 1) from the upper 24 of 32 bits: exact on every device."""
    return (bits >> 8).to(torch.float32) * 2.0**-24


def _noise(kind: Kind, row: Tensor, column: Tensor, seed: int) -> Tensor:
    first = _unit(hash_bits(row, column, seed))
    if kind == "uniform":
        return first * 2.0 - 1.0
    second = _unit(hash_bits(row, column, seed ^ 0x5DEECE66D))
    return torch.sqrt(torch.log1p(-first) * -2.0) * torch.cos(second * (2.0 * math.pi))


def join_taps(taps: Sequence[Tensor], *, kind: Kind = "none", scale: float = 0.0, seed: int = 0) -> Tensor:
    """Features [T, F] from D taps [T, H], with the noise that `add_noise_` adds to joined ones."""
    return add_noise_(torch.cat(tuple(taps), dim=-1), kind=kind, scale=scale, seed=seed)
