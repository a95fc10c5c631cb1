"""How many targets and drafters a run wants, from who waited for whom. Decisions only.

A role's capacity is its rate over the share of its time that it worked; a balanced run has
targets x their capacity = drafters x theirs.
"""

from __future__ import annotations

from typing import NamedTuple

from services.local.status import Role, Status

_WORTH_SAYING = 0.2  # share of waiting below which a side counts as busy


class Side(NamedTuple):
    """All roles of one kind together."""

    roles: int
    tokens_per_s: float
    waiting: float  # share of their time, 0 to 1

    @property
    def capacity(self) -> float:
        """tok/s of one role that never waits."""
        return self.tokens_per_s / max(1e-9, 1.0 - self.waiting) / self.roles


def advice(status: Status) -> str:
    """One sentence for people; also says so when there is nothing to go by."""
    targets, drafters = side(status, "target"), side(status, "drafter")
    if targets is None or drafters is None or not targets.capacity or not drafters.capacity:
        return "no advice yet: targets and drafters must have worked for a while"
    if max(targets.waiting, drafters.waiting) < _WORTH_SAYING:
        return f"balanced: {targets.roles} targets and {drafters.roles} drafters keep each other busy"
    wanted = drafters.capacity / targets.capacity
    ratio = (
        f"{wanted:.2g} targets a drafter would keep both busy; it has {targets.roles / drafters.roles:.2g}"
    )
    if targets.waiting > drafters.waiting:
        return f"targets wait {targets.waiting:.0%} of their time: {ratio}. More drafters, or fewer targets"
    remedy = "More targets, fewer drafters, or a higher recipe.anchor_draws"
    return f"drafters wait {drafters.waiting:.0%} of their time: {ratio}. {remedy}"


def side(status: Status, name: str) -> Side | None:
    """None without a role of that name that has measured its phases."""
    roles = [role for role in status.roles if role.role == name and role.phases]
    if not roles:
        return None
    waiting, working = (sum(_seconds(role, waits=waits) for role in roles) for waits in (True, False))
    rate = sum(role.tokens_per_s for role in roles)
    return Side(len(roles), rate, waiting / max(1e-9, waiting + working))


def _seconds(role: Role, *, waits: bool) -> float:
    return sum(seconds for name, seconds in role.phases.items() if ("wait" in name) is waits)
