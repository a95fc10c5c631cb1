"""Which role is started when, and when a run is over or hopeless. Decisions only: no process, no clock.

    waiting --due--> running --exit--> waiting     a death: back-off, doubled until it progresses
                        |--------> left            0: it was told that the run is finished
                        +--------> verdict         a code that no restart helps, or too many deaths

The coordinator's exit decides the run: 0 finished, 8 stopped. Delays double from restart_delay_s to 30 s.
An evaluator decides nothing: where another role's exit would end the run, it is left where it is.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from services.lifecycle import ExitCode

LONGEST_DELAY_S = 30.0
HOPELESS = {ExitCode.USAGE, ExitCode.CONFIGURATION}  # for every role
HOPELESS_COORDINATOR = {ExitCode.REFUSED, ExitCode.RUN_FAILED}
COORDINATOR_DONE = {ExitCode.FINISHED, ExitCode.STOPPED}


@dataclass(frozen=True)
class RoleId:
    """`target 0`; the index of coordinator and evaluator is 0."""

    role: str
    index: int

    def __str__(self) -> str:
        return self.role if self.role in ("coordinator", "evaluator") else f"{self.role}-{self.index}"


COORDINATOR = RoleId("coordinator", 0)
EVALUATOR = RoleId("evaluator", 0)


class Verdict(NamedTuple):
    """The end of the run: what `up` exits with, why, and whose log shows it (None: nobody's)."""

    code: ExitCode
    reason: str
    culprit: RoleId | None


@dataclass
class Place:
    """One role's place in the run, whatever process fills it."""

    due_s: float | None = 0.0  # None: running or left
    running: bool = False
    starts: int = 0
    fruitless_deaths: int = 0  # in a row

    @property
    def restarts(self) -> int:
        return max(0, self.starts - 1)


class Supervisor:
    """Told of starts, exits and progress; says what to start, and the verdict once there is one."""

    def __init__(self, roles: Iterable[RoleId], restart_delay_s: float, give_up_after: int) -> None:
        self.places = {role: Place() for role in roles}
        self.verdict: Verdict | None = None
        self._ending = False
        self._restart_delay_s, self._give_up_after = restart_delay_s, give_up_after

    def run_is_ending(self, ending: bool, now_s: float) -> None:
        """The coordinator sends the roles away: only it is started again, unless it changes its mind."""
        if self._ending and not ending:
            for place in self.places.values():
                place.due_s = place.due_s if place.running or place.due_s is not None else now_s
        self._ending = ending

    def due(self, now_s: float) -> list[RoleId]:
        """Roles to start now, the coordinator first."""
        return [role for role, due_s in self._waiting() if due_s <= now_s]

    def next_due_s(self) -> float | None:
        """When a role is to be started next; None: none waits."""
        return min((due_s for _, due_s in self._waiting()), default=None)

    def _waiting(self) -> list[tuple[RoleId, float]]:
        waiting = [(role, place.due_s) for role, place in self.places.items() if place.due_s is not None]
        return [(role, due_s) for role, due_s in waiting if role == COORDINATOR or not self._ending]

    def started(self, role: RoleId) -> None:
        place = self.places[role]
        place.due_s, place.running = None, True
        place.starts += 1

    def progressed(self, role: RoleId) -> None:
        """The running process did what it is for: its deaths so far are forgiven."""
        if role in self.places and self.places[role].running:
            self.places[role].fruitless_deaths = 0

    def exited(self, role: RoleId, code: int, now_s: float) -> None:
        """`code` as of Popen.returncode: negative for a signal."""
        place = self.places[role]
        place.running = False
        verdict = self._decisive(role, code)
        if role == EVALUATOR and (verdict or place.fruitless_deaths + 1 >= self._give_up_after):
            return
        if self.verdict is None:
            self.verdict = verdict
        if self.verdict or (role != COORDINATOR and (self._ending or code == ExitCode.FINISHED)):
            return
        place.fruitless_deaths += 1
        if place.fruitless_deaths >= self._give_up_after:
            times = f"{place.fruitless_deaths} times in a row without progress (watch.give_up_after)"
            self.verdict = Verdict(
                ExitCode.RUN_FAILED, f"{role} died {times}, last by {describe(code)}", role
            )
            return
        delay_s = self._restart_delay_s * 2 ** (place.fruitless_deaths - 1)
        place.due_s = now_s + min(delay_s, LONGEST_DELAY_S)

    def _decisive(self, role: RoleId, code: int) -> Verdict | None:
        if role == COORDINATOR and code in COORDINATOR_DONE:
            return Verdict(ExitCode(code), "", None)
        if code in HOPELESS or (role == COORDINATOR and code in HOPELESS_COORDINATOR):
            return Verdict(
                ExitCode(code), f"{role} ended with {describe(code)}; starting it again cannot help", role
            )
        return None


def describe(code: int) -> str:
    """`signal 9`, `status 5 (stuck)`, `status 42`."""
    if code < 0:
        return f"signal {-code}"
    known = {member.value: member.name.lower().replace("_", " ") for member in ExitCode}
    return f"status {code} ({known[code]})" if code in known else f"status {code}"
