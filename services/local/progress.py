"""Which role processes have done what they are for since they were started. Decisions only.

A target or drafter: tokens under an incarnation that is not its predecessor's. The coordinator: an
outcome recorded since its predecessor died; the evaluator: a checkpoint evaluated since then. Mere life is
no progress: a role that dies at its first batch again and again must be given up.
"""

from __future__ import annotations

from services.local.status import Evaluation, Status
from services.local.supervisor import COORDINATOR, EVALUATOR, RoleId


class Progress:
    """Compares each Status with what was known when a role's last process died."""

    def __init__(self) -> None:
        self._seen: dict[RoleId, str] = {}  # incarnation last listed
        self._buried: dict[RoleId, str] = {}  # incarnation of the last dead process
        self._outcomes: int | None = None
        self._outcomes_before: int | None = None  # None: not known yet
        self._evaluation: Evaluation | None = None
        self._evaluation_before: Evaluation | None = None

    def exited(self, role: RoleId) -> None:
        if role == COORDINATOR:
            self._outcomes_before = self._outcomes
        elif role == EVALUATOR:
            self._evaluation_before = self._evaluation
        elif role in self._seen:
            self._buried[role] = self._seen[role]

    def of(self, status: Status) -> list[RoleId]:
        """Roles that have progressed."""
        self._outcomes = status.samples_committed + status.samples_failed
        if self._outcomes_before is None:
            self._outcomes_before = self._outcomes
        found = [COORDINATOR] if self._outcomes > self._outcomes_before else []
        self._evaluation = status.evaluation
        if self._evaluation is not None and self._evaluation != self._evaluation_before:
            found.append(EVALUATOR)
        for member in status.roles:
            role = RoleId(member.role, member.index)
            self._seen[role] = member.incarnation
            if member.tokens_per_s > 0 and member.incarnation != self._buried.get(role):
                found.append(role)
        return found
