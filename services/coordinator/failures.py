"""Batches that cannot be trained: poison that kills targets, and how many failures a run puts up with.

killed a target     1: tried again   2: runs alone from now on   3: FAILED
failed for any other reason (all samples left out, not finite): FAILED at once
"""

from __future__ import annotations

from protocol.messages import BatchId
from services.coordinator.ledger import Ledger
from services.coordinator.record import Record
from services.coordinator.work import Work

POISON_DEATHS = 2
"""Targets that may die in a batch's forward before it is run alone; one more and it is FAILED."""


class Failures:
    """Writes them into the ledger, and ends the batches' flights."""

    def __init__(self, ledger: Ledger, work: Work, record: Record, max_failed_ratio: float) -> None:
        self._ledger, self._work, self._record, self._limit = ledger, work, record, max_failed_ratio
        suspects = {batch for batch, count in ledger.deaths().items() if count >= POISON_DEATHS}
        work.placement.suspects = suspects

    def killed_a_target(self, batch: BatchId) -> str:
        """A target died in its forward. The reason to fail it, or ""."""
        deaths = self._ledger.count_death(batch)
        if deaths > POISON_DEATHS:
            return f"poison: {deaths} targets died in its forward"
        if deaths == POISON_DEATHS:
            self._work.placement.suspects.add(batch)
            flight = self._work.pool.flights.get(batch)
            if flight is not None and not flight.ready:
                self._work.pool.revoke(
                    flight
                )  # queued among others, while a target that was late with it died
            self._record.event(f"batch {tuple(batch)} killed {deaths} targets: it runs alone from now on")
        return ""

    def fail(self, batch: BatchId, reason: str, *, poison: bool) -> None:
        """Its samples count as failed, at the step that it belongs to or the present one."""
        work = self._work
        step = max(work.step, min(work.step_of(batch), work.schedule.total_steps - 1))
        self._ledger.fail_batch(batch, step, len(work.samples(batch)), reason, poison=poison)
        work.settle(batch, "failed")
        self._record.event(f"batch {tuple(batch)} failed: {reason}")

    def too_many(self) -> str:
        """Why the run must not go on, or ""."""
        failed, total = self._ledger.accounting().failed_samples, self._record.samples_total
        if failed <= self._limit * total:
            return ""
        of_all = f"{failed} of {total} samples failed"
        return f"{of_all}, more than run.max_failed_ratio = {self._limit:g}; {self._work.a_failure()}"
