"""When weights are saved, and by whom: at step 0, every so many steps, at a stop and at the end.

A checkpoint counts once the ledger has it. Until then the drafter that was told to write it is told
again; its death or an error of its disk ends the order, and the next due step makes a new one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from protocol.messages import Saved, StepAt
from services.coordinator.ledger import Ledger
from services.coordinator.members import DrafterMember


@dataclass(frozen=True)
class Saving:
    """A checkpoint that a drafter was told to write and that is not recorded yet."""

    at: StepAt
    incarnation: str


class Saves:
    """`pending` is the order that stands, None without one."""

    def __init__(self, ledger: Ledger, every_steps: int) -> None:
        self._ledger, self._every_steps = ledger, every_steps
        self.pending: Saving | None = None

    def recorded(self, step: int) -> bool:
        """Whether a checkpoint of `step` is the newest of this timeline's history."""
        last = self._ledger.last_checkpoint()
        return last is not None and last.at.step == step

    def order(self, here: StepAt, complete: Callable[[], Sequence[DrafterMember]], *, end: bool) -> None:
        """Between two tries: have `here` saved if it is due. `end`: no step will follow for now."""
        due = end or here.step % self._every_steps == 0
        if not due or self.pending is not None or self.recorded(here.step):
            return
        if members := complete():
            self.pending = Saving(here, min(members, key=lambda d: d.index).incarnation)

    def saved(self, saved: Saved, here: StepAt) -> bool:
        """Record what a drafter says is durable; True if that is news.

        A checkpoint of a history that was rolled back is not recorded, and swept as unknown.
        """
        if saved.at.timeline != here.timeline or saved.at.step > here.step:
            return False
        news = not self._ledger.was_recorded(saved.name)
        if news:
            self._ledger.record_checkpoint(saved.name, saved.at, saved.sha256)
        if self.pending is not None and self.pending.at == saved.at:
            self.pending = None
        return news

    def given_up(self, incarnation: str) -> None:
        """That drafter will not save what it was told to."""
        if self.pending is not None and self.pending.incarnation == incarnation:
            self.pending = None
