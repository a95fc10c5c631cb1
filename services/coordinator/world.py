"""Which drafters reduce gradients together, and as which rank. Plain decisions.

A generation is one process group: it ends when a member dies, and at a step boundary when a
newcomer stands ready. `shrink` goes on with whoever is left; `wait` forms no world until every place
is taken, so that the world size, and with it every bit of the result, stays the same.
"""

from __future__ import annotations

from collections.abc import Iterable

from protocol.messages import Group, Member
from services.coordinator.members import DrafterMember


class World:
    """The current generation's members by rank."""

    def __init__(self, *, places: int, elastic: str) -> None:
        self._places, self._elastic = places, elastic
        self.ranks: tuple[str, ...] = ()
        self.generation = 0

    def update(self, drafters: Iterable[DrafterMember], *, at_boundary: bool, generation: int) -> bool:
        """Follow the living drafters; True if a new generation (numbered `generation`) began."""
        living = tuple(d.incarnation for d in sorted(drafters, key=lambda d: d.index))
        lost = any(rank not in living for rank in self.ranks)
        if not lost and (living == self.ranks or not (at_boundary or not self.ranks)):
            return False
        wanted = living if self._elastic == "shrink" or len(living) == self._places else ()
        if wanted == self.ranks:
            return False
        self.ranks, self.generation = wanted, generation
        return True

    def group(self) -> Group | None:
        if not self.ranks:
            return None
        members = tuple(Member(rank=rank, incarnation=name) for rank, name in enumerate(self.ranks))
        return Group(generation=self.generation, members=members, store="")
