"""What there is to compute and to train: compositions of steps, outcomes of batches, who gets which pack.

Plain decisions over plan, ledger, pool and placement. What came back to pending is remembered and the
rest lies beyond a frontier, so a turn costs what changed, not what is in flight.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator

from protocol.messages import BatchId, Stamp
from services.config.schema import Config
from services.coordinator.ledger import Ledger
from services.coordinator.members import TargetMember
from services.coordinator.placement import LEASE_PATIENCE_S, Limits, Placement, Wanted
from services.coordinator.pool import Flight, Pool
from services.coordinator.steps import Composer, Composition, rank_of
from services.data.plan import Schedule
from services.data.training_data import TrainingData


class Work:
    """The batches of a run, from plan to outcome."""

    def __init__(
        self,
        config: Config,
        data: TrainingData,
        ledger: Ledger,
        bytes_per_token: int,
        stamp: Callable[[], Stamp],
    ) -> None:
        plan, cap = config.plan, config.coordinator
        self._config, self._ledger = config, ledger
        self._bytes_per_token = bytes_per_token
        self.schedule = Schedule(config, data)
        self.composer = Composer(
            self.schedule, order=plan.order, packs_per_step=plan.packs_per_step,
            min_ready=plan.min_ready, seed=config.run.seed,
        )  # fmt: skip
        self.batches_per_epoch = [len(self.schedule.epoch(e).batches) for e in range(config.run.epochs)]
        self.pool = Pool()
        limits = Limits(
            config.target.assign_ahead, cap.in_flight_cap_packs, cap.in_flight_cap_bytes,
            cap.overdue_s, config.drafter.prefetch_packs,
        )  # fmt: skip
        self.placement = Placement(self.pool, limits, stamp, self.step_of)
        self._outcomes: dict[int, dict[int, str]] = {}
        self._frontier = 0  # before this step every batch has been placed once
        self._leased_for: object = None
        self._drafter_of: dict[BatchId, str] = {}  # of the batches that may be leased at this step
        self._lease_again_s = 0.0

    @property
    def step(self) -> int:
        return self._ledger.committed_steps

    @property
    def in_order(self) -> bool:
        return self._config.plan.order == "plan"

    # ---- outcomes -----------------------------------------------------------------------------

    def outcomes(self, epoch: int) -> dict[int, str]:
        """Batch index -> outcome on this timeline."""
        if epoch not in self._outcomes:
            self._outcomes[epoch] = self._ledger.outcomes(epoch)
        return self._outcomes[epoch]

    def has_outcome(self, batch: BatchId) -> bool:
        return batch.index in self.outcomes(batch.epoch)

    def settle(self, batch: BatchId, outcome: str) -> None:
        """The ledger has it: the flight is over."""
        self.outcomes(batch.epoch)[batch.index] = outcome
        self.pool.done(batch)
        self.placement.settled(batch)

    def a_failure(self) -> str:
        """One of those that failed, with its reason."""
        if skips := self._ledger.skips():
            batch, skip = skips[-1]
            return f"sample {skip.sample} of batch {tuple(batch)}: {skip.reason}"
        batch, reason = self._ledger.failures()[-1]
        return f"batch {tuple(batch)}: {reason}"

    def rolled_back(self) -> None:
        """The ledger is on a new timeline: batches of undone steps are pending again."""
        self._outcomes.clear()
        self._frontier, self.pool.freed = 0, True
        self.composer.forget()
        self.pool.clear(lambda flight: not self.has_outcome(flight.batch))

    # ---- steps --------------------------------------------------------------------------------

    def composition(self, step: int) -> Composition | None:
        """The step's batches without the failed ones, which leave holes; None: not drawn yet."""
        if not self.in_order and self.composer.composition(step) is None:
            self._draw(step)
        composition = self.composer.composition(step)
        if composition is None:
            return None
        return tuple((p, b) for p, b in composition if self.outcomes(b.epoch).get(b.index) != "failed")

    def _draw(self, step: int) -> None:
        epoch = self.composer.epoch_of(step)
        ready = self.composer.undrawn(f.batch for f in self.pool if f.ready and f.batch.epoch == epoch)
        open_batches = [
            BatchId(epoch, index)
            for index in range(self.batches_per_epoch[epoch])
            if index not in self.outcomes(epoch)
        ]
        left = len(self.composer.undrawn(open_batches))
        self.composer.draw(step, ready, left, saturated=all(f.ready for f in self.pool))

    def step_of(self, batch: BatchId) -> int:
        return self.composer.step_of(batch, self.step)

    # ---- to the targets -----------------------------------------------------------------------

    def assign(self, targets: list[TargetMember], now_s: float) -> None:
        self.placement.assign(self.wanted(), self.step, targets, now_s)

    def wanted(self) -> Iterator[Wanted]:
        """Batches to place, the current step's first, then in plan order; lazily: credit ends it."""
        step = self.step
        if step == self.schedule.total_steps:
            return
        if not self.in_order:
            yield from (self.item(b) for _, b in self.composition(step) or () if self._pending(b))
            step = self.schedule.first_step(self.composer.epoch_of(step))  # early batches may be open
        for batch in heapq.merge(sorted(self.pool.returned), self._beyond_frontier(step)):
            if self._pending(batch):
                yield self.item(batch)

    def _beyond_frontier(self, step: int) -> Iterator[BatchId]:
        """Pending batches in plan order. The frontier passes a step once all of it was placed."""
        self._frontier = max(self._frontier, step)
        for planned in range(self._frontier, self.schedule.total_steps):
            batches = [batch for _, batch in self.composer.planned(planned)]
            yield from filter(self._pending, batches)
            if planned == self._frontier and not any(map(self._pending, batches)):
                self._frontier += 1

    def _pending(self, batch: BatchId) -> bool:
        return batch not in self.pool.flights and not self.has_outcome(batch)

    def samples(self, batch: BatchId) -> tuple[int, ...]:
        return self.schedule.epoch(batch.epoch).batches[batch.index]

    def item(self, batch: BatchId) -> Wanted:
        tokens = self.schedule.tokens(*batch)
        return Wanted(batch, self.samples(batch), tokens, tokens * self._bytes_per_token)

    def adopt(self, target: str, batch: BatchId, attempt: Stamp, now_s: float) -> None:
        """What a target did before this coordinator's start goes on: its attempt stays valid."""
        if batch.epoch >= len(self.batches_per_epoch) or batch in self.pool.flights:
            return
        if batch.index >= self.batches_per_epoch[batch.epoch] or self.has_outcome(batch):
            return
        item = self.item(batch)
        self.pool.add(Flight(batch, item.samples, item.tokens, item.payload_bytes, attempt, target, now_s))

    # ---- to the drafters ----------------------------------------------------------------------

    def lease(self, ranks: tuple[str, ...], about: object, now_s: float) -> None:
        """All packs when `about` (step and world) changed or a lease may be overdue, else those with news."""
        if about != self._leased_for or now_s >= self._lease_again_s:
            self._leased_for, self._lease_again_s = about, now_s + LEASE_PATIENCE_S / 4
            self._drafter_of = dict(self._lease_order(ranks))
            order = list(self._drafter_of.items())
        else:
            news = sorted(self.pool.leasable & self._drafter_of.keys())
            order = [(batch, self._drafter_of[batch]) for batch in news]
        self.pool.leasable.clear()
        self.placement.lease(order, self.step, now_s)

    def _lease_order(self, ranks: tuple[str, ...]) -> Iterator[tuple[BatchId, str]]:
        """(batch, drafter) from the current step on, as far as anybody prefetches."""
        packs = self._config.drafter.prefetch_packs * len(ranks)
        ahead = 1 - (-packs // self._config.plan.packs_per_step)
        for step in range(self.step, min(self.step + 1 + ahead, self.schedule.total_steps)):
            for position, batch in self.composition(step) or ():
                yield batch, ranks[rank_of(position, len(ranks))]
