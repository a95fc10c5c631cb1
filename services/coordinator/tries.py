"""The try at a step: opened, voted on by its ranks, and in the ledger, or aborted and opened anew.

    none --open--> current --judge--> committed | packs failed | aborted --> none

One at a time. A step that is committed, and a batch that failed, are in the ledger before anybody is told.
"""

from __future__ import annotations

from collections.abc import Iterable

from protocol.messages import BatchId, Stamp, StepAt, StepTry, Vote
from services.coordinator.failures import Failures
from services.coordinator.ledger import Ledger
from services.coordinator.record import Record
from services.coordinator.steps import Composition, Try
from services.coordinator.work import Work


class Tries:
    """`current` is the try that stands, None between two."""

    def __init__(self, ledger: Ledger, work: Work, record: Record, failures: Failures) -> None:
        self._ledger, self._work, self._record, self._failures = ledger, work, record, failures
        self.current: Try | None = None

    def open(self, here: StepAt, stamp: Stamp, composition: Composition, ranks: Iterable[str]) -> None:
        """Its packs may still be on their way."""
        assert self.current is None, "a try is open already"
        epoch = self._work.composer.epoch_of(here.step)
        self.current = Try(StepTry(*here, *stamp), epoch, composition, tuple(ranks))

    def vote(self, name: str, vote: Vote | None) -> None:
        if self.current is not None:
            self.current.vote(name, vote)

    def judge(self, now_s: float) -> None:
        """Commit, fail packs or abort, once every rank has voted."""
        current, flights = self.current, self._work.pool.flights
        if current is None or not current.decided:
            return
        attempts = {b: flights[b].attempt for _, b in current.composition if b in flights}
        if bad := current.bad_batches():
            self.current = None
            for batch in bad:
                self.fail(batch, "non-finite loss or gradient", poison=False)
        elif not current.trained_as_leased(attempts):
            self.abort("a rank trained an attempt that is not leased to it")
        else:
            self._commit(current, now_s)

    def fail(self, batch: BatchId, reason: str, *, poison: bool) -> None:
        """Once, with the try that it is in."""
        if self._work.has_outcome(batch):
            return
        self._failures.fail(batch, reason, poison=poison)
        if self.current is not None and any(batch == member for _, member in self.current.composition):
            self.abort(f"batch {tuple(batch)} failed")

    def abort(self, reason: str) -> None:
        if self.current is not None:
            self._record.aborted(self.current.step_try, reason)
            self.current = None

    def abort_without(self, name: str, reason: str) -> None:
        """A member is gone."""
        if self.current is not None and name in self.current:
            self.abort(reason)

    def abort_if_a_pack_is_lost(self) -> None:
        """Before a stop, for which nobody computes it again."""
        flights = self._work.pool.flights
        if self.current is not None and any(batch not in flights for _, batch in self.current.composition):
            self.abort("the run stops, and a pack of this step is not there")

    def drop(self) -> None:
        """Its history was rolled back."""
        self.current = None

    def _commit(self, current: Try, now_s: float) -> None:
        flights = [self._work.pool.flights[batch] for _, batch in current.composition]
        self._ledger.commit_step(
            current.step_try,
            current.epoch,
            [(f.batch, len(f.samples)) for f in flights],
            [(f.batch, skip) for f in flights for skip in f.skipped],
        )
        for flight in flights:
            self._work.settle(flight.batch, "committed")
        self._record.committed(now_s, tokens=sum(f.tokens for f in flights))
        self.current = None
        self._work.composer.forget(self._ledger.committed_steps)
