"""What each member is told: its whole level, built from the coordinator's state and nothing else.

Same state, same orders; a newer stamp is spent only when the content changed. That makes every
order safe to repeat, to lose and to receive late.
"""

from __future__ import annotations

from protocol.messages import (
    Adopt,
    Assignment,
    DrafterOrders,
    Publication,
    Stamp,
    StepAt,
    TargetOrders,
    Train,
    TrainPack,
)
from services.coordinator.coordinator import Coordinator
from services.coordinator.members import DrafterMember, TargetMember


class OrderBook:
    """The last orders of every member; `pending` yields those that must go out (again)."""

    def __init__(self, coordinator: Coordinator, *, repeat_s: float) -> None:
        self._coordinator, self._repeat_s = coordinator, repeat_s
        self._last: dict[str, TargetOrders | DrafterOrders] = {}
        self._sent_s: dict[str, float] = {}

    def pending(self, now_s: float) -> list[TargetOrders | DrafterOrders]:
        """Changed orders at once; unchanged ones every `repeat_s` until they are seen to be acted on."""
        due: list[TargetOrders | DrafterOrders] = []
        for member in self._coordinator.members:
            last = self._last.get(member.incarnation)
            fresh = self._build(member, last.stamp if last else Stamp(0, 0))
            if last is None or fresh != last:
                fresh = fresh.model_copy(update={"stamp": self._coordinator.new_stamp()})
            elif not self._repeat(member, last, now_s):
                continue
            self._last[member.incarnation] = fresh
            self._sent_s[member.incarnation] = now_s
            due.append(fresh)
        self._forget_the_gone()
        return due

    def _repeat(
        self, member: TargetMember | DrafterMember, last: TargetOrders | DrafterOrders, now_s: float
    ) -> bool:
        acted = member.report is not None and member.report.orders >= last.stamp
        return not acted and now_s - self._sent_s[member.incarnation] >= self._repeat_s

    def _forget_the_gone(self) -> None:
        for name in [n for n in self._last if self._coordinator.members.get(n) is None]:
            del self._last[name], self._sent_s[name]

    def _build(self, member: TargetMember | DrafterMember, stamp: Stamp) -> TargetOrders | DrafterOrders:
        if isinstance(member, TargetMember):
            return target_orders(self._coordinator, member, stamp)
        return drafter_orders(self._coordinator, member, stamp)


def target_orders(coordinator: Coordinator, target: TargetMember, stamp: Stamp) -> TargetOrders:
    assignments = []
    for flight in coordinator.pool.of_target(target.incarnation):
        holder = coordinator.members.drafters.get(flight.holder or "")
        publish = None
        if holder is not None and holder.hello is not None and flight.lease is not None:
            publish = Publication(lease=flight.lease, inbox=holder.hello.inbox)
        assignments.append(
            Assignment(batch=flight.batch, attempt=flight.attempt, samples=flight.samples, publish=publish)
        )
    return TargetOrders(incarnation=target.incarnation, stamp=stamp, assignments=tuple(assignments))


def drafter_orders(coordinator: Coordinator, drafter: DrafterMember, stamp: Stamp) -> DrafterOrders:
    name = drafter.incarnation
    flights = [f for f in coordinator.pool if f.holder == name]
    saving = coordinator.saving
    arenas = sorted(t.hello.arena for t in coordinator.members.targets.values() if t.hello)
    return DrafterOrders(
        incarnation=name,
        stamp=stamp,
        held=tuple(sorted(f.attempt for f in flights)),
        arenas=tuple(arenas),
        group=coordinator.world.group() if name in coordinator.world.ranks else None,
        adopt=_adopt(coordinator, drafter),
        committed=coordinator.ledger.last_try,
        train=_train(coordinator, name),
        save=saving.at if saving is not None and saving.incarnation == name else None,
        recorded=_recorded(coordinator, drafter),
    )


def _train(coordinator: Coordinator, name: str) -> Train | None:
    attempt = coordinator.current
    if attempt is None or name not in attempt.ranks:
        return None
    packs = []
    for position, batch in attempt.share(name):
        flight = coordinator.pool.flights.get(batch)
        leased = flight is not None and flight.holder == name
        packs.append(
            TrainPack(position=position, batch=batch, attempt=flight.attempt if flight and leased else None)
        )
    return Train(step_try=attempt.step_try, epoch=attempt.epoch, packs=tuple(packs))


def _adopt(coordinator: Coordinator, drafter: DrafterMember) -> Adopt | None:
    """None: it has the weights of the ledger's last step, or there is no world to have them for."""
    if drafter.report is None or drafter.incarnation not in coordinator.world.ranks:
        return None
    complete = coordinator.complete_members()
    if drafter in complete:
        return None
    here = coordinator.here
    peers = [d for d in complete if d.incarnation in coordinator.world.ranks]
    if peers:
        return Adopt(at=here, source="peer", name=peers[0].incarnation, sha256="")
    checkpoint = coordinator.last_checkpoint()
    if checkpoint is None:
        return Adopt(at=StepAt(here.timeline, 0), source="seed", name="", sha256="")
    return Adopt(at=here, source="checkpoint", name=checkpoint.name, sha256=checkpoint.sha256)


def _recorded(coordinator: Coordinator, drafter: DrafterMember) -> tuple[StepAt, ...]:
    """Of the checkpoints it still reports, those that need no more reporting."""
    reported = drafter.report.saved if drafter.report else ()
    known, timeline = coordinator.recorded_names(), coordinator.ledger.timeline
    return tuple(saved.at for saved in reported if saved.name in known or saved.at.timeline != timeline)
