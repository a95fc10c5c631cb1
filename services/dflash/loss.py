"""What each predicted slot of a block counts: the paper's decay, or D-PACE's survival weights.

A pack gives two sums, of weighted losses and of weights. They are added over all packs of a step and
all ranks and divided once: a normaliser local to a pack or rank would weigh short answers more.

K = B - 1 predicted slots, k = 1..K; slot 0 is given and has no loss.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor

from services.config.schema import Recipe

DPACE_FLOOR = 0.5
_GAMMAS = ((8, 4.0), (10, 5.0), (16, 7.0))  # paper, training recipe


@dataclass(frozen=True)
class LossOptions:
    """`ce` and `kl` weigh slot k by exp(-(k-1)/gamma); `gamma` 0.0 takes the paper's for the block size."""

    kind: Literal["ce", "kl", "dpace"] = "ce"
    gamma: float = 0.0

    @classmethod
    def of(cls, recipe: Recipe) -> LossOptions:
        return cls(recipe.loss, recipe.gamma)


def default_gamma(block_size: int) -> float:
    """4, 5, 7 for blocks of 8, 10, 16; straight lines between, in proportion outside."""
    first, last = _GAMMAS[0], _GAMMAS[-1]
    if block_size <= first[0]:
        return first[1] * block_size / first[0]
    for (left, low), (right, high) in pairwise(_GAMMAS):
        if block_size <= right:
            return low + (high - low) * (block_size - left) / (right - left)
    return last[1] * block_size / last[0]


def position_weights(block_size: int, gamma: float, device: torch.device) -> Tensor:
    """float32 [K], 1 for the first predicted slot."""
    slots = torch.arange(block_size - 1, dtype=torch.float32, device=device)
    return torch.exp(slots / -(gamma or default_gamma(block_size)))


def slot_weights(options: LossOptions, loss_AK: Tensor, real_AK: Tensor) -> Tensor:
    """Detached weights float32 [A, K], zero where `real_AK` is False.

    `loss_AK` is the cross-entropy of each slot (read for D-PACE only). D-PACE: with the draft's
    probability p of the label, s = (1-a)p + a, slot k counts the sum over j >= k of s_1 ... s_j:
    how many later slots still hang on it.
    """
    if options.kind != "dpace":
        return real_AK * position_weights(real_AK.shape[1] + 1, options.gamma, real_AK.device)
    survival = torch.exp(-loss_AK.detach()) * (1.0 - DPACE_FLOOR) + DPACE_FLOOR
    prefix = torch.where(real_AK, survival, 1.0).cumprod(1) * real_AK
    slots = torch.arange(real_AK.shape[1], device=real_AK.device)
    # A sum of products: a running sum of floats has no deterministic kernel on a GPU.
    return (prefix[:, None, :] * (slots >= slots[:, None])).sum(2) * real_AK
