"""What a drafter does next, decided from levels alone: no socket, no clock, no tensor.

The desk holds the newest orders, the packs at hand and the step try at work, and names the next
action. The trainer carries it out and tells the desk how it went. Orders and packs may be lost,
late, doubled or reordered; whatever comes, a gradient reaches the weights only by the commit of
exactly the try it was reduced for, once, and an abandoned try leaves no trace in them.

    complete at X --Learn*--> share trained --Reduce--> voted --Commit--> complete at X + 1
         ^  ^                       |                     |
         |  +------- Discard -------+---------------------+      the orders name another try, or none
         +-- Load (seed, checkpoint), or a peer's state when a group forms

Every decision takes microseconds; the desk's size is that of one step's packs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from protocol.messages import (
    Adopt,
    DrafterOrders,
    Failure,
    Group,
    Saved,
    Stamp,
    StepAt,
    StepMetrics,
    StepTry,
    Train,
    TrainPack,
    Vote,
)

METRICS_KEPT = 8  # steps whose figures are repeated in each report, in case one is lost
REASON_CHARACTERS = 4000  # what fits a message's text field


class Load(NamedTuple):
    """Take the state of `adopt.at` from the seed or from a checkpoint."""

    adopt: Adopt


class Form(NamedTuple):
    """Leave the present process group and stand in this one (None: in none)."""

    group: Group | None


class Leave(NamedTuple):
    """This generation cannot do what is asked: stand in no group, and say why."""

    generation: int
    why: str


class Learn(NamedTuple):
    """Add one held pack's gradient to the try."""

    pack: TrainPack
    step_try: StepTry
    last: bool  # of the share: once it is learned, nothing but the reduction can follow


class Reduce(NamedTuple):
    """The whole share is trained: sum over the group, then vote."""

    step_try: StepTry
    packs: tuple[Stamp, ...]


class Commit(NamedTuple):
    """The ledger has the try: apply its reduced gradient."""

    step_try: StepTry


class Discard(NamedTuple):
    """The try is over without a commit: forget its gradient."""

    step_try: StepTry


class Save(NamedTuple):
    """Write a checkpoint of the present state."""

    at: StepAt


class Wait(NamedTuple):
    """Nothing to do until something arrives; `why` names who keeps us waiting."""

    why: Literal["orders", "group", "pack", "vote"]


Order = Adopt | StepAt | int
"""What can fail: an adoption, a checkpoint (StepAt), a generation (int)."""

Action = Load | Form | Leave | Learn | Reduce | Commit | Discard | Save | Wait


@dataclass
class Attempt:
    """The try at work: packs trained so far in plan order, and the vote once it is reduced."""

    step_try: StepTry
    trained: list[TrainPack] = field(default_factory=list)
    vote: Vote | None = None

    def fits(self, train: Train | None) -> bool:
        """Whether the orders still want this try with the packs already trained.

        Once voted, a change of the share is the coordinator's to settle: the other ranks have reduced too.
        """
        if train is None or train.step_try != self.step_try:
            return False
        return self.vote is not None or list(train.packs[: len(self.trained)]) == self.trained


class Desk:
    """The state machine of one drafter incarnation."""

    def __init__(self, incarnation: str) -> None:
        self._incarnation = incarnation
        self.orders: DrafterOrders | None = None
        self.complete: StepAt | None = None
        self.generation: int | None = None
        self._held: dict[Stamp, Stamp] = {}  # attempt -> newest lease
        self._attempt: Attempt | None = None
        self._spoiled: StepTry | None = None  # its reduction failed: only another try can succeed
        self._unformed: int | None = None  # a generation that did not come about, or broke
        self._refused: set[Order] = set()  # what failed and is not tried again before `retry`
        self._saving: StepAt | None = None
        self._saved: dict[StepAt, Saved] = {}
        self._metrics: list[StepMetrics] = []
        self._failures: dict[Order, Failure] = {}  # of orders that still stand

    # ---- what arrives -------------------------------------------------------------------------

    def take_orders(self, orders: DrafterOrders) -> list[Stamp]:
        """Follow newer orders; returns the attempts of packs that are no longer held."""
        if orders.incarnation != self._incarnation:
            return []
        if self.orders is not None and orders.stamp <= self.orders.stamp:
            return []
        self.orders = orders
        self._saved = {at: saved for at, saved in self._saved.items() if at not in orders.recorded}
        standing = (orders.adopt, orders.save, orders.group.generation if orders.group else None)
        self._failures = {order: failure for order, failure in self._failures.items() if order in standing}
        dropped = [attempt for attempt, lease in self._held.items() if not self._may_hold(attempt, lease)]
        for attempt in dropped:
            del self._held[attempt]
        return dropped

    def take_pack(self, attempt: Stamp, lease: Stamp) -> bool:
        """Hold a pack that was announced under `lease`; False if newer orders have dropped it already."""
        lease = max(lease, self._held.get(attempt, lease))
        if not self._may_hold(attempt, lease):
            return False
        self._held[attempt] = lease
        return True

    def _may_hold(self, attempt: Stamp, lease: Stamp) -> bool:
        return self.orders is None or lease > self.orders.stamp or attempt in self.orders.held

    # ---- what to do ---------------------------------------------------------------------------

    def next_action(self) -> Action:
        """The most urgent thing that the newest orders ask and the present state allows."""
        orders, attempt = self.orders, self._attempt
        if orders is None:
            return Wait("orders")
        adopt = orders.adopt if orders.adopt is not None and orders.adopt.at != self.complete else None
        if attempt is not None:
            if attempt.vote is not None and orders.committed == attempt.step_try:
                return Commit(attempt.step_try)
            if adopt is not None or not attempt.fits(orders.train):
                return Discard(attempt.step_try)
        if adopt is not None and adopt.source != "peer" and adopt not in self._refused:
            return Load(adopt)
        if self._wanted_generation(orders) != self.generation:
            return Form(self._own_group(orders))
        if adopt is not None and adopt.source == "peer" and self.generation is not None:
            return Leave(
                self.generation, f"{adopt.name}'s state comes while a group forms, this one has formed"
            )
        if orders.save is not None and self._save_is_due(orders.save, orders):
            return Save(orders.save)
        return self._train(orders, attempt)

    def _own_group(self, orders: DrafterOrders) -> Group | None:
        group = orders.group
        if group is None or all(member.incarnation != self._incarnation for member in group.members):
            return None
        return group

    def _wanted_generation(self, orders: DrafterOrders) -> int | None:
        group = self._own_group(orders)
        return None if group is None or group.generation == self._unformed else group.generation

    def _save_is_due(self, at: StepAt, orders: DrafterOrders) -> bool:
        if at != self.complete or self._saving is not None:
            return False
        return at not in orders.recorded and at not in self._saved and at not in self._refused

    def _train(self, orders: DrafterOrders, attempt: Attempt | None) -> Action:
        train = orders.train
        if train is None or train.step_try == self._spoiled:
            return Wait("orders")
        if self.complete is None or train.step_try[:2] != self.complete:
            return Wait("orders")
        if attempt is None:
            if self.generation is None:
                return Wait("group")
            attempt = self._attempt = Attempt(train.step_try)
        if attempt.vote is not None:
            return Wait("vote")
        if len(attempt.trained) == len(train.packs):
            return Reduce(attempt.step_try, tuple(pack.attempt for pack in attempt.trained if pack.attempt))
        pack = train.packs[len(attempt.trained)]
        if pack.attempt is None or pack.attempt not in self._held:
            return Wait("pack")
        return Learn(pack, attempt.step_try, last=len(attempt.trained) + 1 == len(train.packs))

    # ---- how it went --------------------------------------------------------------------------

    def learned(self, pack: TrainPack) -> None:
        assert self._attempt is not None, "a pack was trained outside a try"
        self._attempt.trained.append(pack)

    def voted(self, vote: Vote) -> None:
        assert self._attempt is not None, "a vote without a try"
        assert self._attempt.step_try == vote.step_try, "a vote on another try than the one at work"
        self._attempt.vote = vote

    def unreduced(self, step_try: StepTry) -> None:
        """The reduction did not take place and cannot be made up for: only another try can succeed."""
        self._attempt, self._spoiled = None, step_try

    def committed(self, metrics: StepMetrics) -> None:
        assert self._attempt is not None, "a commit without a try"
        assert self._attempt.vote is not None, "a commit without a vote"
        timeline, step = self._attempt.step_try[:2]
        assert self.complete == StepAt(timeline, step), "a commit of a step that does not follow"
        self.complete, self._attempt = StepAt(timeline, step + 1), None
        self._metrics = [*self._metrics, metrics][-METRICS_KEPT:]

    def discarded(self) -> None:
        self._attempt = None

    def formed(self, generation: int | None) -> None:
        self.generation = generation

    def ungrouped(self, generation: int, why: str) -> None:
        """`generation` did not come about, or broke. No generation and a reason ask for another one."""
        self.generation, self._unformed = None, generation
        self._failures[generation] = _failure("group", why)

    def overwriting(self) -> None:
        """From here on the weights are no state of any step, until `loaded`."""
        assert self._attempt is None, "weights overwritten under a try"
        self.complete = None

    def loaded(self, at: StepAt) -> None:
        self.complete = at
        self._failures = {
            order: failure for order, failure in self._failures.items() if failure.order != "adopt"
        }

    def unloaded(self, adopt: Adopt, why: str) -> None:
        self._refused.add(adopt)
        self._failures[adopt] = _failure("adopt", why)

    def saving(self, at: StepAt) -> None:
        self._saving = at

    def saved(self, saved: Saved) -> None:
        self._saving = None
        self._saved[saved.at] = saved
        self._failures.pop(saved.at, None)

    def unsaved(self, at: StepAt, why: str) -> None:
        self._saving = None
        self._refused.add(at)
        self._failures[at] = _failure("save", why)

    def retry(self) -> None:
        """Some time has passed: what failed to load or to save may be tried again."""
        self._refused.clear()

    # ---- what it says -------------------------------------------------------------------------

    @property
    def held(self) -> tuple[Stamp, ...]:
        """Attempts of the packs at hand."""
        return tuple(sorted(self._held))

    def level(self) -> dict[str, Any]:
        """The fields of a DrafterReport, but for incarnation, seq and totals."""
        attempt = self._attempt
        return {
            "orders": self.orders.stamp if self.orders else Stamp(0, 0),
            "complete": self.complete,
            "generation": self.generation,
            "held": self.held,
            "training": attempt.step_try if attempt else None,
            "trained": len(attempt.trained) if attempt else 0,
            "vote": attempt.vote if attempt else None,
            "saved": tuple(self._saved[at] for at in sorted(self._saved)),
            "metrics": tuple(self._metrics),
            "failures": (*self._failures.values(), *self._outrun()),
        }

    def _outrun(self) -> tuple[Failure, ...]:
        """A save that was not begun while its state was there: unsaid, it would be waited for to the end."""
        at, complete = self.orders.save if self.orders else None, self.complete
        if self.orders is None or at is None or complete is None or at in self.orders.recorded:
            return ()
        if at in self._saved or at == self._saving or at in self._failures:
            return ()
        if complete.timeline != at.timeline or complete.step <= at.step:
            return ()  # still to come, or to be taken from another member
        return (_failure("save", f"step {at.step} was not saved before step {complete.step} came"),)


def _failure(order: Literal["adopt", "group", "save"], why: str) -> Failure:
    return Failure(order=order, reason=why[:REASON_CHARACTERS])
