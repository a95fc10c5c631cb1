"""Acceptance length in the ways people report it, from one list of round lengths a request.

The pooled mean weighs long answers more; the mean of per-request means is what z-lab's benchmark
prints. They differ, so both are given, and never one for the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean


@dataclass(frozen=True)
class Acceptance:
    """`rounds[r]` holds the tokens that each round of request r yielded, 1 to `block_size`."""

    block_size: int
    rounds: tuple[tuple[int, ...], ...]

    @property
    def all_rounds(self) -> list[int]:
        return [length for request in self.rounds for length in request]

    @property
    def pooled_mean(self) -> float:
        """Tokens per round over all requests; NaN without a round."""
        return _mean(self.all_rounds)

    @property
    def request_mean(self) -> float:
        """Mean over requests of each one's mean; requests without a round are left out."""
        return _mean([fmean(request) for request in self.rounds if request])

    @property
    def histogram(self) -> list[int]:
        """How many rounds yielded 1, 2, .. block_size tokens."""
        rounds = self.all_rounds
        return [rounds.count(length) for length in range(1, self.block_size + 1)]

    @property
    def by_position(self) -> list[float]:
        """Share of rounds that kept the draft in slot 1, 2, .. block_size - 1 (and all before it)."""
        rounds = self.all_rounds
        return [_mean([float(length > slot) for length in rounds]) for slot in range(1, self.block_size)]

    def of(self, requests: Sequence[int]) -> Acceptance:
        """The same for some requests."""
        return Acceptance(self.block_size, tuple(self.rounds[request] for request in requests))


def _mean(values: Sequence[float]) -> float:
    return fmean(values) if values else float("nan")
