"""The run's only decider: reports and deaths in, orders out. No socket, no thread, no file but the ledger.

Every message updates what is known; `decide` then compares it with what should be, and `orders`
says again what is missing. Nothing here depends on the order or the number of messages, only on the
newest level of each member and on the ledger. Clock readings are handed in.

    phase   recovering -> running -> stopping -> done(reason)
    step    open a try -> votes -> commit in the ledger -> the next one in the same orders
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from protocol.messages import (
    TEXT_CHARACTERS,
    BatchId,
    Bye,
    DrafterHello,
    DrafterReport,
    Exit,
    Failure,
    Message,
    Stamp,
    StepAt,
    TargetHello,
    TargetReport,
    Welcome,
    Who,
)
from services.config.schema import Config
from services.coordinator.admission import Admission
from services.coordinator.failures import Failures
from services.coordinator.ledger import Ledger
from services.coordinator.members import DrafterMember, Members, TargetMember
from services.coordinator.record import Record
from services.coordinator.saves import Saves
from services.coordinator.steps import Try
from services.coordinator.tries import Tries
from services.coordinator.troubles import Troubles
from services.coordinator.work import Work
from services.coordinator.world import World
from services.data.training_data import TrainingData

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PackSize:
    """What a pack needs, from the model's and the drafter's configuration."""

    bytes_per_token: int
    slot_bytes: int


class Coordinator:
    """See the module's docstring. `outbox` collects answers as (incarnation, message)."""

    def __init__(
        self, config: Config, data: TrainingData, ledger: Ledger, fingerprint: str, size: PackSize,
        *, target_devices: tuple[str, ...], drafter_devices: tuple[str, ...],
    ) -> None:  # fmt: skip
        self.config, self.ledger = config, ledger
        self.epoch_number = ledger.new_coordinator_epoch()
        self._counter = 0
        self.work = Work(config, data, ledger, size.bytes_per_token, self.new_stamp)
        self.schedule, self.pool, self.placement = self.work.schedule, self.work.pool, self.work.placement
        self.members = Members(target_devices, drafter_devices)
        self.world = World(
            places=len(drafter_devices), elastic=config.drafter.elastic, salt=str(config.run.dir.absolute())
        )
        self.record = Record(self.schedule.samples_total)
        self.failures = Failures(ledger, self.work, self.record, config.run.max_failed_ratio)
        self.tries = Tries(ledger, self.work, self.record, self.failures)
        self.saves = Saves(ledger, config.checkpoint.every_steps)
        self.outbox: list[tuple[str, Message]] = []
        self.stopping = False
        self.failed_reason = ""
        self.admission = Admission(
            self.members, ledger, fingerprint, size.slot_bytes, rejoin_s=config.coordinator.rejoin_s
        )
        self.troubles = Troubles()
        self._left_unsaved = False

    def new_stamp(self) -> Stamp:
        self._counter += 1
        return Stamp(self.epoch_number, self._counter)

    # ---- what is known ------------------------------------------------------------------------

    @property
    def step(self) -> int:
        """Committed steps, which is also the number of the step to do."""
        return self.ledger.committed_steps

    @property
    def here(self) -> StepAt:
        return StepAt(self.ledger.timeline, self.step)

    @property
    def current(self) -> Try | None:
        """The try at that step, None between two."""
        return self.tries.current

    @property
    def finished(self) -> bool:
        return self.ledger.finished

    @property
    def recovering(self) -> bool:
        return bool(self.admission.awaited)

    @property
    def awaited(self) -> set[str]:
        """Incarnations the ledger knows as living that have not reported to this coordinator yet."""
        return set(self.admission.awaited)

    @property
    def done(self) -> bool:
        """Nothing more to decide: finished, failed, or stopped on a recorded checkpoint."""
        return bool(self.finished or self.failed_reason or (self.stopping and self._stopped_cleanly()))

    def _stopped_cleanly(self) -> bool:
        if self.current is not None or self.recovering:  # who is awaited may have steps that nobody saved
            return False
        return self.saves.recorded(self.step) or not self.complete_members() or self._left_unsaved

    def complete_members(self) -> list[DrafterMember]:
        """Living drafters with the weights of the ledger's last step, or its voted gradient in hand."""
        return [d for d in self.members.drafters.values() if self.is_complete(d)]

    def is_complete(self, drafter: DrafterMember) -> bool:
        return drafter.is_complete(self.here, self.ledger.last_try)

    def first_complete_rank(self) -> str | None:
        """Who gives its state to newcomers. Looks at all ranks while nobody is complete."""
        drafters, here, last_try = self.members.drafters, self.here, self.ledger.last_try
        for name in self.world.ranks:
            if name in drafters and drafters[name].is_complete(here, last_try):
                return name
        return None

    # ---- what members say ---------------------------------------------------------------------

    def hello(self, hello: TargetHello | DrafterHello, now_s: float) -> bool:
        """Welcome a newcomer, welcome back a known one, send away the buried and the misfit.

        True if the sender is a member now.
        """
        name = hello.incarnation
        member = self.members.get(name)
        if self._turned_away(name):
            return False
        if member is None and self.admission.must_wait(name):
            return False
        if member is None:
            if reason := self.admission.refusal(hello):
                self.outbox.append((name, Exit(incarnation=name, finished=False, reason=reason)))
                self.record.event(f"{hello.role} {name} refused: {reason}")
                return False
            member = self.admission.admit(hello, now_s)
            self.record.joined(member)
        elif hello.seq <= member.seq:
            return False
        member.seq, member.heard_s = hello.seq, now_s
        self.outbox.append((name, Welcome(incarnation=name, index=member.index)))
        return True

    def _turned_away(self, name: str) -> bool:
        if self.admission.is_buried(name):
            self.outbox.append((name, Exit(incarnation=name, finished=False, reason="fenced: declared dead")))
        elif self.done:
            good = not self.failed_reason
            reason = self.failed_reason or ("finished" if self.finished else "stopped")
            self.outbox.append((name, Exit(incarnation=name, finished=good, reason=reason)))
        else:
            return False
        return True

    def report(self, report: TargetReport | DrafterReport, now_s: float) -> bool:
        """Follow a member's newest level; False for a stale one (its sender is not to be trusted)."""
        name = report.incarnation
        member = self.members.get(name)
        if member is None or self.admission.is_buried(name):
            if not self._turned_away(name):
                self.outbox.append((name, Who()))
            return self.admission.is_buried(name)
        if report.seq <= member.seq:
            self.record.stale_messages += 1
            return False
        member.seq, member.heard_s = report.seq, now_s
        member.remember(now_s, report.totals)
        self.admission.reported(name)
        first = member.report is None
        if first:
            self.record.ready(now_s, member)
            self.members.changed()
            self.pool.freed = True
        if isinstance(report, TargetReport) and isinstance(member, TargetMember):
            member.report = report
            self._target_reported(member, report, now_s, first)
        elif isinstance(report, DrafterReport) and isinstance(member, DrafterMember):
            member.report = report
            self._drafter_reported(member, report, now_s)
        return True

    def _target_reported(self, member: TargetMember, report: TargetReport, now_s: float, first: bool) -> None:
        """Once, take over what it has from before this coordinator's start: later, that may be revoked."""
        name = member.incarnation
        failed, strangers = self.pool.target_reported(name, report.slots, report.orders, now_s)
        for flight, reason in failed:
            self._fail(flight.batch, f"target: {reason}", poison=False)
        for slot in strangers if first else ():
            suspect = slot.batch in self.placement.suspects and slot.state != "ready"  # to be placed alone
            old = slot.attempt.coordinator_epoch < self.epoch_number
            if old and slot.state != "failed" and not suspect:
                self.work.adopt(name, slot.batch, slot.attempt, now_s)
        if first and strangers:
            self.pool.target_reported(name, report.slots, report.orders, now_s)

    def _drafter_reported(self, member: DrafterMember, report: DrafterReport, now_s: float) -> None:
        name = member.incarnation
        has_state = member.complete is not None
        self.troubles.heard(name, has_state=has_state, failures=report.failures, now_s=now_s)
        for attempt in report.held:
            flight = self.pool.of_attempt(attempt)
            if flight is not None and flight.ready and flight.holder is None and flight.lease is None:
                # it got it before this coordinator's start
                self.pool.lease(flight, name, self.new_stamp(), now_s)
        self.pool.touched.add(name)
        self.world.heard(name, report)
        self.pool.drafter_reported(name, report.held)
        self.tries.vote(name, report.vote)
        for saved in report.saved:
            if self.saves.saved(saved, self.here):
                self.troubles.saved()
                self.record.event(f"checkpoint {saved.name} recorded")
        if report.failures:
            self._drafter_failed(member, report.failures, now_s)
        for metrics in report.metrics:
            self.record.metrics(metrics)

    def _drafter_failed(self, member: DrafterMember, failures: tuple[Failure, ...], now_s: float) -> None:
        error = "; ".join(map(str, failures))
        if self.record.error(member.incarnation, error):
            log.error("drafter reports an error", extra={"drafter": member.incarnation, "error": error})
        self.saves.given_up(member.incarnation)
        if self.stopping and self.current is None:
            self.troubles.not_saved(failures, now_s)

    def bye(self, bye: Bye, now_s: float) -> None:
        """It leaves by itself: the same as a death, without a suspect."""
        member = self.members.get(bye.incarnation)
        if member is not None and bye.seq > member.seq:
            self.lost(bye.incarnation, f"left: {bye.reason}", now_s)

    def lost(self, name: str, reason: str, now_s: float, *, computing: BatchId | None = None) -> None:
        """Dead or to be treated so: fenced in the ledger first, then its work is given to others."""
        if self.admission.is_buried(name):
            return
        member = self.members.get(name)
        self.admission.bury(name, reason)
        self.troubles.forget(name)
        self.record.left(now_s, name, reason)
        if computing is not None and not self.work.has_outcome(computing):
            self._blame(computing)
        if member is None:
            return
        self.members.remove(name)
        if isinstance(member, TargetMember):
            self.pool.target_died(name)
            return
        self.world.forget(name)
        self.tries.abort_without(name, f"drafter {name} {reason}")
        self.saves.given_up(name)
        self.pool.drafter_died(name)

    def _blame(self, batch: BatchId) -> None:
        if reason := self.failures.killed_a_target(batch):
            self._fail(batch, reason, poison=True)

    def forgive(self, stall_s: float) -> None:
        """Whoever was not heard while this coordinator did not listen is not to blame."""
        self.members.forgive(stall_s)
        self.admission.forgive(stall_s)
        self.troubles.forgive(stall_s)

    def stop(self) -> None:
        """Finish the step, record a checkpoint, leave."""
        self.stopping = True

    # ---- decisions ----------------------------------------------------------------------------

    def decide(self, now_s: float) -> None:
        """Bring what is wanted up to date with what is known. Cheap when nothing changed."""
        self._end_recovery(now_s)
        if self.recovering or self.done:
            return
        self.tries.judge(now_s)
        self._check_failures()
        if self.stopping:
            self.tries.abort_if_a_pack_is_lost()
        self._leave_unsaved(now_s)
        from_disk = self.ledger.last_checkpoint() is not None
        if reason := self.troubles.nobody_loads(self.members.drafters.keys(), now_s, from_disk=from_disk):
            self._give_up(reason)
        self._form_world(now_s)
        if not self.failed_reason:
            self._roll_back_if_lost()
            if self.current is None:
                end = self.stopping or self.step == self.schedule.total_steps
                self.saves.order(self.here, self.complete_members, end=end)
            self._open_try()
            self._move_packs(now_s)
            self._finish()

    def _end_recovery(self, now_s: float) -> None:
        for name in self.admission.missing(now_s):
            self.lost(name, "did not return after the coordinator's restart", now_s)

    def _leave_unsaved(self, now_s: float) -> None:
        """A stop does not wait for a full disk until it is killed: what is not saved is trained again."""
        if self.current is not None or self.saves.recorded(self.step):
            self.troubles.saved()
        elif self.troubles.unsaved_for_s(now_s) > self.config.watch.stop_s / 2:
            self._left_unsaved = True
            self.record.event(f"stopped without a checkpoint of step {self.step}: {self.troubles.unsaved}")

    def _fail(self, batch: BatchId, reason: str, *, poison: bool) -> None:
        self.tries.fail(batch, reason, poison=poison)
        self._check_failures()

    def _check_failures(self) -> None:
        if reason := self.failures.too_many():
            self._give_up(reason)

    def _give_up(self, reason: str) -> None:
        if not self.failed_reason:
            self.failed_reason = reason = reason[:TEXT_CHARACTERS]  # an Exit has room for no more
            self.record.event(f"run stopped: {reason}")
            log.error("run stopped", extra={"reason": reason})

    def _form_world(self, now_s: float) -> None:
        broken = self.world.broken(self.members.drafters, now_s)
        if broken:
            self.record.event(f"generation {self.world.generation} is over: {broken}")
            self.tries.abort(broken)
        if self.world.follow(
            self.members, at_boundary=self.current is None, stamp=self.new_stamp, broken=broken
        ):
            assert self.current is None, "a try outlived its world"

    def _roll_back_if_lost(self) -> None:
        """Nobody has the last step's weights any more: continue from the last recorded checkpoint, if any."""
        if not self.world.ranks or any(map(self.is_complete, self.members.drafters.values())):
            return
        checkpoint = self.ledger.last_checkpoint()
        back = checkpoint.at if checkpoint is not None else StepAt(self.ledger.timeline, 0)
        if back.step == self.step:
            return  # drafters start from the seed, or from the checkpoint of this very step
        lost = self.step - back.step
        timeline = self.ledger.open_timeline(back)
        self.saves.pending = None
        self.tries.drop()
        self.work.rolled_back()
        self.record.rolled_back(timeline, back.step, lost)

    def _open_try(self) -> None:
        """A try opens when the world is formed and complete; its packs may still be on their way."""
        if self.current is not None or self.stopping or self.step >= self.schedule.total_steps:
            return
        composition = self.work.composition(self.step)
        complete = {d.incarnation for d in self.complete_members()}
        if composition is None or not self.world.ready(self.members.drafters, complete):
            return
        self.tries.open(self.here, self.new_stamp(), composition, self.world.ranks)

    # ---- packs --------------------------------------------------------------------------------

    def _move_packs(self, now_s: float) -> None:
        targets = [t for t in self.members.targets.values() if t.report is not None]
        late = self.placement.reassign_overdue(self.step, targets, now_s)
        for flight in late:
            self.record.event(f"batch {tuple(flight.batch)} is overdue at {flight.target}: reassigned")
        if not self.stopping and self.members.drafters:
            self.work.assign(targets, now_s)
        if self.world.ranks:
            ranks = self.current.ranks if self.current is not None else self.world.ranks
            self.work.lease(ranks, (self.here, self.world.generation, self.current is None), now_s)

    def _finish(self) -> None:
        if self.step == self.schedule.total_steps and self.saves.recorded(self.step) and not self.finished:
            self.ledger.finish()
            self.record.event("finished")
