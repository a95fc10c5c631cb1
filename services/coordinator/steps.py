"""What a step consists of, and whether one try at it may be committed. Plain decisions.

    composed -> open(try, world) -> votes of all ranks -> commit | fail packs | abort -> ...

With `order = plan` a step's composition is a pure function of its number: a fixed run of plan
positions, in which a failed batch leaves a hole. With `order = arrival` it is drawn from the ready
packs of the epoch once enough are there, and kept until the step is committed.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from protocol.messages import BatchId, Stamp, StepTry, Vote
from services import seeds
from services.data.plan import Schedule

Composition = tuple[tuple[int, BatchId], ...]  # (position within the step, batch)


class Composer:
    """Compositions by step."""

    def __init__(
        self, schedule: Schedule, *, order: str, packs_per_step: int, min_ready: int, seed: int
    ) -> None:
        self.schedule, self._order, self._seed = schedule, order, seed
        self._packs_per_step, self._threshold = packs_per_step, max(packs_per_step, min_ready)
        self._planned: dict[int, Composition] = {}
        self._drawn: dict[int, Composition] = {}
        self._step_drawn: dict[BatchId, int] = {}

    def epoch_of(self, step: int) -> int:
        return self.schedule.locate(step)[0]

    def planned(self, step: int) -> Composition:
        """The plan positions of `step`: its composition, or in arrival order a share of the epoch's work."""
        planned = self._planned.get(step)
        if planned is None:
            epoch, indices = self.schedule.locate(step)
            planned = tuple((position, BatchId(epoch, index)) for position, index in enumerate(indices))
            self._planned[step] = planned
        return planned

    def composition(self, step: int) -> Composition | None:
        """None: not drawn yet (arrival only)."""
        return self.planned(step) if self._order == "plan" else self._drawn.get(step)

    def step_of(self, batch: BatchId, current_step: int) -> int:
        """The step that waits for `batch`.

        In arrival order an undrawn batch of the current epoch is waited for until the current step is
        drawn; any other belongs to no step yet, so it may give way to all that do.
        """
        if self._order == "plan":
            return self.schedule.first_step(batch.epoch) + batch.index // self._packs_per_step
        never = self.schedule.total_steps
        drawn = self._step_drawn.get(batch, never)
        waited_for = current_step < never and current_step not in self._drawn
        if drawn == never and waited_for and batch.epoch == self.epoch_of(current_step):
            return current_step
        return drawn

    def undrawn(self, batches: Iterable[BatchId]) -> list[BatchId]:
        return [batch for batch in batches if batch not in self._step_drawn]

    def draw(self, step: int, ready: Iterable[BatchId], left_in_epoch: int, *, saturated: bool) -> None:
        """Compose `step` from `ready` if enough are there; `left_in_epoch` counts batches without outcome.

        Every step but the epoch's last takes `packs_per_step`, so the number of steps is the plan's.
        `saturated`: no more packs will be ready before some are trained, so a full step is enough.
        """
        if self._order == "plan" or step in self._drawn:
            return
        candidates = sorted(ready)
        threshold = self._packs_per_step if saturated else self._threshold
        if len(candidates) < min(threshold, left_in_epoch):
            return
        random.Random(seeds.seed(self._seed, "arrival", step)).shuffle(candidates)  # noqa: S311
        self._drawn[step] = tuple(enumerate(candidates[: self._packs_per_step]))
        self._step_drawn |= dict.fromkeys(candidates[: self._packs_per_step], step)

    def forget(self, before: int | None = None) -> None:
        """Drop what was drawn for steps `before` this one; without it, everything (a roll-back)."""
        self._planned = {s: p for s, p in self._planned.items() if before is not None and s >= before}
        for step in [s for s in self._drawn if before is None or s < before]:
            for _, batch in self._drawn.pop(step):
                del self._step_drawn[batch]


def rank_of(position: int, world_size: int) -> int:
    return position % world_size


@dataclass
class Try:
    """One attempt at a step by one world."""

    step_try: StepTry
    epoch: int
    composition: Composition
    ranks: tuple[str, ...]  # incarnations
    votes: dict[str, Vote] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._shares: dict[str, list[tuple[int, BatchId]]] = {name: [] for name in self.ranks}
        for member in self.composition:
            self._shares[self.ranks[rank_of(member[0], len(self.ranks))]].append(member)

    def __contains__(self, incarnation: str) -> bool:
        return incarnation in self._shares

    def share(self, incarnation: str) -> Composition:
        return tuple(self._shares[incarnation])

    def vote(self, incarnation: str, vote: Vote | None) -> None:
        if vote is not None and vote.step_try == self.step_try and incarnation in self:
            self.votes[incarnation] = vote

    @property
    def decided(self) -> bool:
        return len(self.votes) == len(self.ranks)

    def bad_batches(self) -> list[BatchId]:
        """Each rank's first non-finite pack; all packs if only the reduced gradient is non-finite.

        Later flags of a rank may have inherited the first one's NaN.
        """
        by_position = dict(self.composition)
        first = [min(vote.bad_positions) for vote in self.votes.values() if vote.bad_positions]
        if first:
            return sorted(by_position[position] for position in first if position in by_position)
        if all(vote.gradient_finite for vote in self.votes.values()):
            return []
        return sorted(by_position.values())

    def trained_as_leased(self, attempts: Mapping[BatchId, Stamp]) -> bool:
        """Whether every rank trained exactly the attempts that are leased to it now."""
        return all(
            self.votes[rank].packs == expected_attempts(self.share(rank), attempts) for rank in self.ranks
        )


def expected_attempts(share: Composition, attempts: Mapping[BatchId, Stamp]) -> Sequence[Stamp | None]:
    return tuple(attempts.get(batch) for _, batch in share)
