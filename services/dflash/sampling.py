"""Sampling from the target and the exact rejection rule: drafting changes the speed, not the distribution.

A draft token x from q is kept with probability min(1, p(x)/q(x)); at the first refusal the token comes
from max(p - q, 0) normalised; if all are kept, one more comes from p (Leviathan et al., 2023).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from protocol.errors import ConfigError


@dataclass(frozen=True)
class Sampling:
    """`temperature` above 0; `top_p` in (0, 1], 1 keeps all; one `seed` a request."""

    temperature: float = 1.0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.temperature <= 0.0 or not 0.0 < self.top_p <= 1.0:
            raise ConfigError(
                f"temperature {self.temperature}, top_p {self.top_p}: must be above 0 and in (0, 1]; "
                "leave sampling out for greedy decoding"
            )

    def generator(self, device: torch.device) -> torch.Generator:
        return torch.Generator(device).manual_seed(self.seed)

    def probabilities(self, logits: Tensor) -> Tensor:
        """float32 [..., V]: softmax at the temperature, cut to the smallest set that holds `top_p`."""
        probability = torch.softmax(logits.float() / self.temperature, dim=-1)
        if self.top_p >= 1.0:
            return probability
        ordered, order = probability.sort(dim=-1, descending=True)
        ordered = ordered.masked_fill(ordered.cumsum(-1) - ordered >= self.top_p, 0.0)
        kept = torch.zeros_like(probability).scatter(-1, order, ordered)
        return kept / kept.sum(-1, keepdim=True)


def draw(probability: Tensor, generator: torch.Generator) -> Tensor:
    """One id a row, int64 [rows], from [rows, V]."""
    return torch.multinomial(probability, 1, generator=generator)[:, 0]


def pick(p_BV: Tensor, bits_B: Tensor) -> Tensor:
    """One id a row, int64 [B], by inverting each row's distribution at its own 32 random bits (int64 [B]).

    In float64: sums of float32 lose the tail of a large vocabulary, and a GPU's need not even grow from one
    id to the next, so that one which `top_p` has cut could be hit. Costs 8 bytes a probability.
    """
    cumulative_BV = p_BV.double().cumsum(-1)
    wanted_B1 = (bits_B.double() / 2**32 * cumulative_BV[:, -1])[:, None]  # below the last sum
    return torch.searchsorted(cumulative_BV, wanted_B1, right=True)[:, 0]


def accept(draft_K: Tensor, p_BV: Tensor, q_KV: Tensor, generator: torch.Generator) -> tuple[int, int]:
    """(drafts kept, next token) for K drafts drawn from `q_KV`, with the target's `p_BV`, B = K + 1 rows."""
    count = draft_K.numel()
    p = p_BV[:count].gather(1, draft_K[:, None])[:, 0]
    q = q_KV.gather(1, draft_K[:, None])[:, 0]
    chance = torch.rand(count, generator=generator, device=draft_K.device)
    kept = int((chance * q < p).to(torch.int64).cumprod(0).sum())
    if kept == count:
        return kept, int(draw(p_BV[-1:], generator))
    rest = (p_BV[kept] - q_KV[kept]).clamp_(min=0.0)
    # Rounding alone can leave nothing where p and q agree; then p itself is right.
    rest = torch.where(rest.sum() > 0, rest, p_BV[kept])
    return kept, int(draw((rest / rest.sum())[None], generator))
