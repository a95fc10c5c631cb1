"""Who may take part: newcomers are welcomed or refused, the buried sent away, the living awaited.

    Hello -> awaited or vacant place? -> member     buried, misfit or late -> Exit with the reason

After a coordinator's restart places belong to those whom the ledger knows as living, until all have
reported or `coordinator.rejoin_s` is over. A name that was buried never comes back.
"""

from __future__ import annotations

from protocol.messages import DrafterHello, TargetHello
from services.coordinator.ledger import Ledger
from services.coordinator.members import DrafterMember, Members, TargetMember


class Admission:
    """Answers are reasons: "" means yes."""

    def __init__(
        self, members: Members, ledger: Ledger, fingerprint: str, slot_bytes: int, *, rejoin_s: float
    ) -> None:
        self._members, self._ledger = members, ledger
        self._fingerprint, self._slot_bytes = fingerprint, slot_bytes
        self._buried = ledger.buried()
        self.awaited = {member.name for member in ledger.living()}
        self._rejoin_s = rejoin_s
        self._until_s: float | None = None

    def is_buried(self, name: str) -> bool:
        return name in self._buried

    def must_wait(self, name: str) -> bool:
        """A stranger, while others are awaited: it will say Hello again."""
        return bool(self.awaited) and name not in self.awaited

    def refusal(self, hello: TargetHello | DrafterHello) -> str:
        return self._members.refusal(hello, self._fingerprint, self._slot_bytes)

    def admit(self, hello: TargetHello | DrafterHello, now_s: float) -> TargetMember | DrafterMember:
        """Call after `refusal`. The ledger knows it before it is told."""
        member = self._members.admit(hello, now_s)
        self._ledger.welcome(hello.incarnation, hello.role, member.index, hello.host)
        return member

    def reported(self, name: str) -> None:
        """It is there: nobody waits for it any more."""
        self.awaited.discard(name)

    def bury(self, name: str, reason: str) -> None:
        """Fence it, in the ledger first."""
        self._ledger.bury(name, reason)
        self._buried.add(name)
        self.awaited.discard(name)

    def missing(self, now_s: float) -> list[str]:
        """Those who were awaited for too long, from the first call on: planning a long run takes a while, in
        which nobody could be heard.
        """
        if self._until_s is None:
            self._until_s = now_s + self._rejoin_s
        return sorted(self.awaited) if now_s > self._until_s else []

    def forgive(self, stall_s: float) -> None:
        """The coordinator itself did not listen for so long."""
        if self._until_s is not None:
            self._until_s += stall_s
