"""Which drafters reduce gradients together, and as which rank. Plain decisions.

A generation is one process group: it ends when a member dies, when a member says that it broke or did
not come about, and at a step boundary when a newcomer stands ready. `shrink` goes on with whoever is
left; `wait` forms no world until every place is taken, so that the world size, and with it every bit of
the result, stays the same.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Mapping

from protocol.messages import DrafterReport, Group, Member, Stamp
from services.coordinator.members import DrafterMember, Members

STORE_PORTS = range(20000, 32000)
"""Ports of group stores: below the ephemeral ones, so no outgoing connection sits on them."""


REGROUP_S = 0.5
"""Between two generations of the same members, whatever they complain of."""


class World:
    """The current generation's members by rank. `salt` keeps the stores of two runs apart."""

    def __init__(self, *, places: int, elastic: str, salt: str) -> None:
        self._places, self._elastic, self._salt = places, elastic, salt
        self.ranks: tuple[str, ...] = ()
        self.generation = 0
        self.places: dict[str, int] = {}  # incarnation -> rank
        self._group: Group | None = None
        self._formed_version = -1  # of the members that the world was last formed from
        self._complaints: set[str] = set()  # drafters whose last report says that their group is over
        self._regroup_from_s = 0.0

    def heard(self, name: str, report: DrafterReport) -> None:
        """Keep in mind who stands in no group and says that its group is over."""
        if report.generation is None and any(failure.order == "group" for failure in report.failures):
            self._complaints.add(name)
        else:
            self._complaints.discard(name)

    def forget(self, name: str) -> None:
        self._complaints.discard(name)

    def broken(self, drafters: Mapping[str, DrafterMember], now_s: float) -> str:
        """Why the generation cannot go on, in the words of a member that was told of it; "" if it can."""
        if now_s < self._regroup_from_s:
            return ""
        for name in sorted(self._complaints & self.places.keys()):
            report = drafters[name].report
            if report is not None and _as_number(report.orders) > self.generation:
                self._regroup_from_s = now_s + REGROUP_S
                return f"{name}: {'; '.join(map(str, report.failures))}"
        return ""

    def follow(self, members: Members, *, at_boundary: bool, stamp: Callable[[], Stamp], broken: str) -> bool:
        """Form a new generation if the members changed or the present one broke; True if one began."""
        version = members.version
        if version == self._formed_version and not broken:
            return False
        ready = [d for d in members.drafters.values() if d.report is not None]
        began = self.update(
            ready, at_boundary=at_boundary, number=lambda: _as_number(stamp()), broken=bool(broken)
        )
        if at_boundary:  # else a newcomer may still be waiting for one
            self._formed_version = version
        return began

    def update(
        self,
        drafters: Iterable[DrafterMember],
        *,
        at_boundary: bool,
        number: Callable[[], int],
        broken: bool = False,
    ) -> bool:
        """Follow the living drafters; True if a new generation (numbered by `number`) began."""
        members = sorted(drafters, key=lambda d: d.index)
        living = tuple(d.incarnation for d in members)
        over = broken or any(rank not in living for rank in self.ranks)
        if not over and (living == self.ranks or not (at_boundary or not self.ranks)):
            return False
        wanted = living if self._elastic == "shrink" or len(living) == self._places else ()
        if wanted == self.ranks and not (broken and wanted):
            return False
        self.ranks, self.generation = wanted, number()
        self.places = {name: rank for rank, name in enumerate(wanted)}
        self._group = None
        if wanted:
            store = self._store_of(members) if len(wanted) > 1 else ""
            named = tuple(Member(rank=rank, incarnation=name) for rank, name in enumerate(wanted))
            self._group = Group(generation=self.generation, members=named, store=store)
        return True

    def ready(self, drafters: Mapping[str, DrafterMember], complete: Collection[str]) -> bool:
        """Every rank has the last step's weights and stands in this generation's group."""
        reports = [drafters[rank].report for rank in self.ranks if rank in complete]
        in_group = [r for r in reports if r is not None and r.generation == self.generation]
        return bool(self.ranks) and len(in_group) == len(self.ranks)

    def group(self) -> Group | None:
        """As it is told to its members; None while there is none."""
        return self._group

    def _store_of(self, members: list[DrafterMember]) -> str:
        """Where the first member is to listen: another port each generation, as the last may be taken."""
        hosts = [member.hello.host for member in members if member.hello]
        digest = hashlib.sha256(f"{self._salt} {self.generation}".encode()).digest()
        port = STORE_PORTS[int.from_bytes(digest[:4], "big") % len(STORE_PORTS)]
        return f"{'127.0.0.1' if len(set(hosts)) == 1 else hosts[0]}:{port}"


def _as_number(stamp: Stamp) -> int:
    """A stamp as one number: orders with a newer stamp speak of this generation or a later one."""
    return (stamp.coordinator_epoch << 32) + stamp.counter
