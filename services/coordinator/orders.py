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
    """The last orders of every member; `pending` yields those that must go out (again).

    Orders are built anew only where the pool was touched, and for all drafters when what they share
    changed (step, try, world, checkpoints, arenas): the cost of a message does not grow with the members.
    """

    def __init__(self, coordinator: Coordinator, *, repeat_s: float) -> None:
        self._coordinator, self._repeat_s = coordinator, repeat_s
        self._last: dict[str, TargetOrders | DrafterOrders] = {}
        self._sent_s: dict[str, float] = {}
        self._unseen: set[str] = set()  # not yet known to act on their last orders
        self._shared: object = None
        self._peer: str | None = None  # who gives its state to newcomers
        self._version = -1
        self._look_again_s = 0.0

    def pending(self, now_s: float) -> list[TargetOrders | DrafterOrders]:
        """Changed orders at once; unchanged ones every `repeat_s` until they are seen to be acted on."""
        due: list[TargetOrders | DrafterOrders] = []
        for member in self._may_have_changed():
            last = self._last.get(member.incarnation)
            fresh = self._build(member, last.stamp if last else Stamp(0, 0))
            if last is None or fresh != last:
                due.append(fresh.model_copy(update={"stamp": self._coordinator.new_stamp()}))
        fresh_names = {orders.incarnation for orders in due}
        due += [orders for orders in self._overdue(now_s) if orders.incarnation not in fresh_names]
        for orders in due:
            self._last[orders.incarnation] = orders
            self._sent_s[orders.incarnation] = now_s
            self._unseen.add(orders.incarnation)
        return due

    def _may_have_changed(self) -> list[TargetMember | DrafterMember]:
        coordinator, members = self._coordinator, self._coordinator.members
        names, coordinator.pool.touched = coordinator.pool.touched, set()
        if members.version != self._version:
            self._version = members.version
            self._forget_the_gone()
            names |= {member.incarnation for member in members if member.incarnation not in self._last}
        self._peer = coordinator.first_complete_rank()
        shared = (self._peer, *_shared(coordinator))
        if shared != self._shared:
            self._shared = shared
            names |= members.drafters.keys()
        found = [members.get(name) for name in sorted(names)]
        return [member for member in found if member is not None]

    def _overdue(self, now_s: float) -> list[TargetOrders | DrafterOrders]:
        if now_s < self._look_again_s:
            return []
        self._look_again_s = now_s + self._repeat_s / 4
        overdue = []
        for name in sorted(self._unseen):
            member, last = self._coordinator.members.get(name), self._last.get(name)
            if member is None or last is None or not _unacted(member, last):
                self._unseen.discard(name)
            elif now_s - self._sent_s[name] >= self._repeat_s:
                overdue.append(last)
        return overdue

    def _forget_the_gone(self) -> None:
        for name in [n for n in self._last if self._coordinator.members.get(n) is None]:
            del self._last[name], self._sent_s[name]

    def _build(self, member: TargetMember | DrafterMember, stamp: Stamp) -> TargetOrders | DrafterOrders:
        if isinstance(member, TargetMember):
            return target_orders(self._coordinator, member, stamp)
        return drafter_orders(self._coordinator, member, stamp, self._peer)


def _unacted(member: TargetMember | DrafterMember, last: TargetOrders | DrafterOrders) -> bool:
    return member.report is None or member.report.orders < last.stamp


def _shared(coordinator: Coordinator) -> tuple[object, ...]:
    """What every drafter's orders depend on beside the pool and its own report."""
    saving, current = coordinator.saves.pending, coordinator.current
    return (
        coordinator.here,
        coordinator.ledger.last_try,
        coordinator.ledger.checkpoints(),
        current.step_try if current is not None else None,
        (saving.at, saving.incarnation) if saving is not None else None,
        coordinator.world.generation,
        coordinator.members.arenas,
    )


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


def drafter_orders(
    coordinator: Coordinator, drafter: DrafterMember, stamp: Stamp, peer: str | None
) -> DrafterOrders:
    name = drafter.incarnation
    flights = coordinator.pool.of_holder(name)
    saving = coordinator.saves.pending
    return DrafterOrders(
        incarnation=name,
        stamp=stamp,
        held=tuple(sorted(f.attempt for f in flights)),
        arenas=coordinator.members.arenas,
        group=coordinator.world.group() if name in coordinator.world.places else None,
        adopt=_adopt(coordinator, drafter, peer),
        committed=coordinator.ledger.last_try,
        train=_train(coordinator, name),
        save=saving.at if saving is not None and saving.incarnation == name else None,
        recorded=_recorded(coordinator, drafter),
    )


def _train(coordinator: Coordinator, name: str) -> Train | None:
    current = coordinator.current
    if current is None or name not in current:
        return None
    packs = []
    for position, batch in current.share(name):
        flight = coordinator.pool.flights.get(batch)
        leased = flight is not None and flight.holder == name
        packs.append(
            TrainPack(position=position, batch=batch, attempt=flight.attempt if flight and leased else None)
        )
    return Train(step_try=current.step_try, packs=tuple(packs))


def _adopt(coordinator: Coordinator, drafter: DrafterMember, peer: str | None) -> Adopt | None:
    """None: it has the weights of the ledger's last step, or there is no world to have them for."""
    if drafter.report is None or drafter.incarnation not in coordinator.world.places:
        return None
    if coordinator.is_complete(drafter):
        return None
    here = coordinator.here
    if peer is not None:
        return Adopt(at=here, source="peer", name=peer, sha256="")
    checkpoint = coordinator.ledger.last_checkpoint()
    if checkpoint is None:
        return Adopt(at=StepAt(here.timeline, 0), source="seed", name="", sha256="")
    return Adopt(at=here, source="checkpoint", name=checkpoint.name, sha256=checkpoint.sha256)


def _recorded(coordinator: Coordinator, drafter: DrafterMember) -> tuple[StepAt, ...]:
    """Of the checkpoints it still reports, those that need no more reporting."""
    reported, ledger = drafter.report.saved if drafter.report else (), coordinator.ledger
    return tuple(s.at for s in reported if ledger.was_recorded(s.name) or s.at.timeline != ledger.timeline)
