"""Who is in the run: places, incarnations, silence. Plain decisions, no socket and no clock.

A place is a role's index with its device; it is taken by one living incarnation at a time and given
back when that one dies. An incarnation, once buried, never comes back: its process must exit and
return under a new name.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from protocol.messages import (
    PROTOCOL_VERSION,
    DrafterHello,
    DrafterReport,
    StepAt,
    StepTry,
    TargetHello,
    TargetReport,
)

Totals = dict[str, float]

WINDOW_S = 20.0
"""Span of the rates that people are shown."""


@dataclass
class Member:
    """What is known of one living incarnation."""

    incarnation: str
    role: str
    index: int
    device: str
    heard_s: float
    seq: int
    history: deque[tuple[float, Totals]] = field(default_factory=deque)  # (seconds, totals), newest last

    @property
    def totals(self) -> Totals:
        return self.history[-1][1] if self.history else {}

    def remember(self, now_s: float, totals: Totals) -> None:
        """Keep what spans the last `WINDOW_S` seconds, a reading each half second at most."""
        if len(self.history) > 1 and now_s - self.history[-2][0] < 0.5:
            self.history.pop()
        self.history.append((now_s, totals))
        while len(self.history) > 2 and now_s - self.history[1][0] > WINDOW_S:
            self.history.popleft()

    def rates(self) -> Totals:
        """Growth of every total per second over the window."""
        if len(self.history) < 2:
            return {}
        (start_s, start), (end_s, end) = self.history[0], self.history[-1]
        return {name: (end[name] - start.get(name, 0.0)) / (end_s - start_s) for name in end}

    def tokens_per_s(self) -> float:
        return max(0.0, self.rates().get("tokens_total", 0.0))

    def waits_for(self) -> str:
        """The phase of waiting that took most of the window, "" if none took a fifth of it."""
        waits = {name: rate for name, rate in self.rates().items() if "wait" in name}
        longest = max(waits, key=lambda name: waits[name], default="")
        if not longest or waits[longest] < 0.2:
            return ""
        return longest.removeprefix("phase_").removesuffix("_seconds")


@dataclass
class TargetMember(Member):
    hello: TargetHello | None = None
    report: TargetReport | None = None

    @property
    def slots(self) -> int:
        return self.hello.slots if self.hello else 0


@dataclass
class DrafterMember(Member):
    hello: DrafterHello | None = None
    report: DrafterReport | None = None

    @property
    def complete(self) -> StepAt | None:
        """The weights it reported to have, None before it has any."""
        return self.report.complete if self.report else None

    def is_complete(self, here: StepAt, last_try: StepTry | None) -> bool:
        """Whether it has the weights of `here`, or the voted gradient of the try that led there."""
        report = self.report
        if report is None:
            return False
        voted = report.vote.step_try if report.vote is not None else None
        return report.complete == here or (voted is not None and voted == last_try)


class Members:
    """Living incarnations by name, and the places they hold."""

    def __init__(self, target_devices: tuple[str, ...], drafter_devices: tuple[str, ...]) -> None:
        self._devices = {"target": target_devices, "drafter": drafter_devices}
        self.targets: dict[str, TargetMember] = {}
        self.drafters: dict[str, DrafterMember] = {}
        self.version = 0  # of who is there, and who has reported
        self._arenas: tuple[str, ...] | None = None

    @property
    def arenas(self) -> tuple[str, ...]:
        """Of the living targets, sorted."""
        if self._arenas is None:
            self._arenas = tuple(sorted(t.hello.arena for t in self.targets.values() if t.hello))
        return self._arenas

    def changed(self) -> None:
        """Somebody came, left, or reported for the first time."""
        self.version += 1
        self._arenas = None

    def get(self, incarnation: str) -> TargetMember | DrafterMember | None:
        return self.targets.get(incarnation) or self.drafters.get(incarnation)

    def __iter__(self) -> Iterator[TargetMember | DrafterMember]:
        yield from list(self.targets.values())
        yield from list(self.drafters.values())

    def refusal(self, hello: TargetHello | DrafterHello, fingerprint: str, slot_bytes: int) -> str:
        """Why this Hello cannot be welcomed; "" if it can."""
        if hello.protocol != PROTOCOL_VERSION:
            return (
                f"speaks protocol {hello.protocol}, the run's is {PROTOCOL_VERSION}: "
                "install the same version on both sides"
            )
        if hello.fingerprint != fingerprint:
            return (
                f"configuration fingerprint {hello.fingerprint[:12]}, the run's is {fingerprint[:12]}: "
                "start the role with the run's training options, model and data"
            )
        if isinstance(hello, TargetHello) and hello.slot_bytes < slot_bytes:
            return f"slots of {hello.slot_bytes} bytes; a pack of this run needs {slot_bytes}"
        if self._vacant(hello) is None:
            where = "every place" if hello.index is None else f"place {hello.index}"
            places = len(self._devices[hello.role])
            return f"{where} for a {hello.role} is taken by a living process (there are {places})"
        return ""

    def _taken(self, role: str) -> set[int]:
        members = self.targets if role == "target" else self.drafters
        return {member.index for member in members.values()}

    def _vacant(self, hello: TargetHello | DrafterHello) -> int | None:
        taken = self._taken(hello.role)
        places = range(len(self._devices[hello.role]))
        wanted = places if hello.index is None else [hello.index] if hello.index in places else []
        return next((index for index in wanted if index not in taken), None)

    def admit(self, hello: TargetHello | DrafterHello, now_s: float) -> TargetMember | DrafterMember:
        """Give it the place it asks for, or the lowest vacant one. Call after `refusal`."""
        index = self._vacant(hello)
        assert index is not None, "admit() without refusal()"
        device = self._devices[hello.role][index]
        self.changed()
        common = (hello.incarnation, hello.role, index, device, now_s, hello.seq)
        if isinstance(hello, TargetHello):
            target = TargetMember(*common, hello=hello)
            self.targets[hello.incarnation] = target
            return target
        drafter = DrafterMember(*common, hello=hello)
        self.drafters[hello.incarnation] = drafter
        return drafter

    def remove(self, incarnation: str) -> None:
        self.changed()
        self.targets.pop(incarnation, None)
        self.drafters.pop(incarnation, None)

    def silent(self, now_s: float, limit_s: float) -> list[str]:
        return [m.incarnation for m in self if now_s - m.heard_s > limit_s]

    def forgive(self, stall_s: float) -> None:
        """The coordinator itself stood still: nobody else is to blame for that time."""
        for member in self:
            member.heard_s += stall_s
