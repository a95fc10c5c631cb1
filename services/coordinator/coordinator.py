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
    BatchId,
    Bye,
    DrafterHello,
    DrafterReport,
    Exit,
    Failure,
    Message,
    Stamp,
    StepAt,
    StepTry,
    TargetHello,
    TargetReport,
    Welcome,
    Who,
)
from services.config.schema import Config
from services.coordinator.ledger import Ledger
from services.coordinator.members import DrafterMember, Members, TargetMember
from services.coordinator.record import Record
from services.coordinator.saves import Saves
from services.coordinator.steps import Try
from services.coordinator.work import Work
from services.coordinator.world import World
from services.data.training_data import TrainingData

log = logging.getLogger(__name__)

POISON_DEATHS = 2
"""Targets that may die in a batch's forward before it is run alone; one more and it is FAILED."""


@dataclass(frozen=True)
class PackSize:
    """What a pack needs, from the model's and the drafter's configuration."""

    bytes_per_token: int
    slot_bytes: int


class Coordinator:
    """See the module's docstring. `outbox` collects answers as (incarnation, message)."""

    def __init__(
        self, config: Config, data: TrainingData, ledger: Ledger, fingerprint: str, size: PackSize,
        *, target_devices: tuple[str, ...], drafter_devices: tuple[str, ...], now_s: float,
    ) -> None:  # fmt: skip
        self.config, self.ledger, self.fingerprint, self.size = config, ledger, fingerprint, size
        self.epoch_number = ledger.new_coordinator_epoch()
        self._counter = 0
        self.work = Work(config, data, ledger, size.bytes_per_token, self.new_stamp)
        self.schedule, self.pool, self.placement = self.work.schedule, self.work.pool, self.work.placement
        self.members = Members(target_devices, drafter_devices)
        self.world = World(
            places=len(drafter_devices), elastic=config.drafter.elastic, salt=str(config.run.dir.absolute())
        )
        self.placement.suspects = {b for b, count in ledger.deaths().items() if count >= POISON_DEATHS}
        self.record = Record(self.schedule.samples_total)
        self.current: Try | None = None
        self.saves = Saves(ledger, config.checkpoint.every_steps)
        self.outbox: list[tuple[str, Message]] = []
        self.stopping = False
        self.failed_reason = ""
        self._buried = ledger.buried()
        self._awaited = {i.name for i in ledger.living()}
        self._await_until_s = now_s + config.coordinator.rejoin_s

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
    def finished(self) -> bool:
        return self.ledger.finished

    @property
    def recovering(self) -> bool:
        return bool(self._awaited)

    @property
    def awaited(self) -> set[str]:
        """Incarnations the ledger knows as living that have not reported to this coordinator yet."""
        return set(self._awaited)

    @property
    def done(self) -> bool:
        """Nothing more to decide: finished, failed, or stopped on a recorded checkpoint."""
        return bool(self.finished or self.failed_reason or (self.stopping and self._stopped_cleanly()))

    def _stopped_cleanly(self) -> bool:
        if self.current is not None:
            return False
        return self.saves.recorded(self.step) or not self.complete_members()

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
        if member is None and self.recovering and name not in self._awaited:
            return False  # places belong to those who are awaited; it will say Hello again
        if member is None:
            reason = self.members.refusal(hello, self.fingerprint, self.size.slot_bytes)
            if reason:
                self.outbox.append((name, Exit(incarnation=name, finished=False, reason=reason)))
                self.record.event(now_s, f"{hello.role} {name} refused: {reason}")
                return False
            member = self.members.admit(hello, now_s)
            self.ledger.welcome(name, hello.role, member.index, hello.host)
            self.record.joined(now_s, member)
        elif hello.seq <= member.seq:
            return False
        member.seq, member.heard_s = hello.seq, now_s
        welcome = Welcome(
            incarnation=name, coordinator_epoch=self.epoch_number, index=member.index, device=member.device
        )
        self.outbox.append((name, welcome))
        return True

    def _turned_away(self, name: str) -> bool:
        if name in self._buried:
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
        if name in self._buried or member is None:
            if not self._turned_away(name):
                self.outbox.append((name, Who()))
            return name in self._buried
        if report.seq <= member.seq:
            self.record.stale_messages += 1
            return False
        member.seq, member.heard_s = report.seq, now_s
        member.remember(now_s, report.totals)
        self._awaited.discard(name)
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
        failed, strangers = self.pool.target_reported(name, report.slots, report.orders)
        for flight, reason in failed:
            self._fail(flight.batch, f"target: {reason}", now_s, poison=False)
        for slot in strangers if first else ():
            suspect = slot.batch in self.placement.suspects and slot.state != "ready"  # to be placed alone
            old = slot.attempt.coordinator_epoch < self.epoch_number
            if old and slot.state != "failed" and not suspect:
                self.work.adopt(name, slot.batch, slot.attempt, now_s)
        if first and strangers:
            self.pool.target_reported(name, report.slots, report.orders)

    def _drafter_reported(self, member: DrafterMember, report: DrafterReport, now_s: float) -> None:
        name = member.incarnation
        for attempt in report.held:
            flight = self.pool.of_attempt(attempt)
            if flight is not None and flight.ready and flight.holder is None and flight.lease is None:
                # it got it before this coordinator's start
                self.pool.lease(flight, name, self.new_stamp(), now_s)
        self.pool.touched.add(name)
        self.world.heard(name, report)
        self.pool.drafter_reported(name, report.held)
        if self.current is not None:
            self.current.vote(name, report.vote)
        for saved in report.saved:
            if self.saves.saved(saved, self.here):
                self.record.event(now_s, f"checkpoint {saved.name} recorded")
        if report.failures:
            self._drafter_failed(member, report.failures, now_s)
        for metrics in report.metrics:
            self.record.metrics(metrics, now_s)

    def _drafter_failed(self, member: DrafterMember, failures: tuple[Failure, ...], now_s: float) -> None:
        error = "; ".join(map(str, failures))
        if self.record.error(now_s, member.incarnation, error):
            log.error("drafter reports an error", extra={"drafter": member.incarnation, "error": error})
        self.saves.given_up(member.incarnation)
        if member.complete is None and any(failure.order == "adopt" for failure in failures):
            self._give_up(f"drafter {member.index} could not load its state: {error}", now_s)

    def bye(self, bye: Bye, now_s: float) -> None:
        """It leaves by itself: the same as a death, without a suspect."""
        member = self.members.get(bye.incarnation)
        if member is not None and bye.seq > member.seq:
            self.lost(bye.incarnation, f"left: {bye.reason}", now_s)

    def lost(self, name: str, reason: str, now_s: float, *, computing: BatchId | None = None) -> None:
        """Dead or to be treated so: fenced in the ledger first, then its work is given to others."""
        if name in self._buried:
            return
        member = self.members.get(name)
        self.ledger.bury(name, reason)
        self._buried.add(name)
        self._awaited.discard(name)
        self.record.left(now_s, name, reason)
        if computing is not None and not self.work.has_outcome(computing):
            self._count_death(computing, now_s)
        if member is None:
            return
        self.members.remove(name)
        if isinstance(member, TargetMember):
            self.pool.target_died(name)
            return
        self.world.forget(name)
        if self.current is not None and name in self.current:
            self._abort(f"drafter {name} {reason}", now_s)
        self.saves.given_up(name)
        self.pool.drafter_died(name)

    def _count_death(self, batch: BatchId, now_s: float) -> None:
        deaths = self.ledger.count_death(batch)
        if deaths > POISON_DEATHS:
            self._fail(batch, f"poison: {deaths} targets died in its forward", now_s, poison=True)
        elif deaths == POISON_DEATHS:
            self.placement.suspects.add(batch)
            flight = self.pool.flights.get(batch)
            if flight is not None and not flight.ready:
                self.pool.revoke(flight)  # queued among others, while a target that was late with it died
            self.record.event(
                now_s, f"batch {tuple(batch)} killed {deaths} targets: it runs alone from now on"
            )

    def stop(self) -> None:
        """Finish the step, record a checkpoint, leave."""
        self.stopping = True

    # ---- decisions ----------------------------------------------------------------------------

    def decide(self, now_s: float) -> None:
        """Bring what is wanted up to date with what is known. Cheap when nothing changed."""
        self._end_recovery(now_s)
        if self.recovering or self.done:
            return
        self._judge(now_s)
        self._form_world(now_s)
        if not self.failed_reason:
            self._roll_back_if_lost(now_s)
            if self.current is None:
                end = self.stopping or self.step == self.schedule.total_steps
                self.saves.order(self.here, self.complete_members, end=end)
            self._open_try()
            self._move_packs(now_s)
            self._finish(now_s)

    def _end_recovery(self, now_s: float) -> None:
        if self._awaited and now_s > self._await_until_s:
            for name in sorted(self._awaited):
                self.lost(name, "did not return after the coordinator's restart", now_s)

    def _judge(self, now_s: float) -> None:
        """Commit, fail packs or abort, once every rank of the current try has voted."""
        attempt = self.current
        if attempt is None or not attempt.decided:
            return
        bad = attempt.bad_batches()
        flights = self.pool.flights
        attempts = {b: flights[b].attempt for _, b in attempt.composition if b in flights}
        if bad:
            self.current = None
            for batch in bad:
                self._fail(batch, "non-finite loss or gradient", now_s, poison=False)
        elif not attempt.trained_as_leased(attempts):
            self._abort("a rank trained an attempt that is not leased to it", now_s)
        else:
            self._commit(attempt, now_s)

    def _commit(self, attempt: Try, now_s: float) -> None:
        flights = [self.pool.flights[batch] for _, batch in attempt.composition]
        self.ledger.commit_step(
            attempt.step_try,
            attempt.epoch,
            [(f.batch, len(f.samples)) for f in flights],
            [(f.batch, skip) for f in flights for skip in f.skipped],
        )
        for flight in flights:
            self.work.settle(flight.batch, "committed")
        self.record.committed(now_s, tokens=sum(f.tokens for f in flights))
        self.current = None
        self.work.composer.forget(self.step)
        self._check_failed_ratio(now_s)

    def _fail(self, batch: BatchId, reason: str, now_s: float, *, poison: bool) -> None:
        if self.work.has_outcome(batch):
            return
        samples = self.work.samples(batch)
        step = max(self.step, min(self.work.step_of(batch), self.schedule.total_steps - 1))
        self.ledger.fail_batch(batch, step, len(samples), reason, poison=poison)
        self.work.settle(batch, "failed")
        self.record.event(now_s, f"batch {tuple(batch)} failed: {reason}")
        if self.current is not None and any(batch == member for _, member in self.current.composition):
            self._abort(f"batch {tuple(batch)} failed", now_s)
        self._check_failed_ratio(now_s)

    def _check_failed_ratio(self, now_s: float) -> None:
        failed = self.ledger.accounting().failed_samples
        limit = self.config.run.max_failed_ratio
        if failed > limit * self.record.samples_total:
            of_all = f"{failed} of {self.record.samples_total} samples failed"
            why = f"more than run.max_failed_ratio = {limit:g}; {self.work.a_failure()}"
            self._give_up(f"{of_all}, {why}", now_s)

    def _give_up(self, reason: str, now_s: float) -> None:
        if not self.failed_reason:
            self.failed_reason = reason
            self.record.event(now_s, f"run stopped: {reason}")
            log.error("run stopped", extra={"reason": reason})

    def _abort(self, reason: str, now_s: float) -> None:
        if self.current is not None:
            self.record.aborted(now_s, self.current.step_try, reason)
            self.current = None

    def _form_world(self, now_s: float) -> None:
        broken = self.world.broken(self.members.drafters, now_s)
        if broken:
            self.record.event(now_s, f"generation {self.world.generation} is over: {broken}")
            self._abort(broken, now_s)
        if self.world.follow(
            self.members, at_boundary=self.current is None, stamp=self.new_stamp, broken=broken
        ):
            assert self.current is None, "a try outlived its world"

    def _roll_back_if_lost(self, now_s: float) -> None:
        """Nobody has the last step's weights any more: continue from the last recorded checkpoint, if any."""
        if not self.world.ranks or any(map(self.is_complete, self.members.drafters.values())):
            return
        checkpoint = self.ledger.last_checkpoint()
        back = checkpoint.at if checkpoint is not None else StepAt(self.ledger.timeline, 0)
        if back.step == self.step:
            return  # drafters start from the seed, or from the checkpoint of this very step
        lost = self.step - back.step
        timeline = self.ledger.open_timeline(back)
        self.current = self.saves.pending = None
        self.work.rolled_back()
        self.record.rolled_back(now_s, timeline, back.step, lost)

    def _open_try(self) -> None:
        """A try opens when the world is formed and complete; its packs may still be on their way."""
        if self.current is not None or self.stopping or self.step >= self.schedule.total_steps:
            return
        composition = self.work.composition(self.step)
        complete = {d.incarnation for d in self.complete_members()}
        if composition is None or not self.world.ready(self.members.drafters, complete):
            return
        step_try = StepTry(*self.here, *self.new_stamp())
        epoch = self.work.composer.epoch_of(self.step)
        self.current = Try(step_try, epoch, composition, self.world.ranks)

    # ---- packs --------------------------------------------------------------------------------

    def _move_packs(self, now_s: float) -> None:
        targets = [t for t in self.members.targets.values() if t.report is not None]
        late = self.placement.reassign_overdue(self.step, targets, now_s)
        for flight in late:
            self.record.event(now_s, f"batch {tuple(flight.batch)} is overdue at {flight.target}: reassigned")
        if not self.stopping and self.members.drafters:
            self.work.assign(targets, now_s)
        if self.world.ranks:
            ranks = self.current.ranks if self.current is not None else self.world.ranks
            self.work.lease(ranks, (self.here, self.world.generation, self.current is None), now_s)

    def _finish(self, now_s: float) -> None:
        if self.step == self.schedule.total_steps and self.saves.recorded(self.step) and not self.finished:
            self.ledger.finish()
            self.record.event(now_s, "finished")
