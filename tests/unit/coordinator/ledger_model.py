"""What a ledger must say, as dicts, and what one says, in the same form.

The model copies nothing: what counts on a timeline is asked of its parents each time, while the ledger
copies their outcomes when it opens one.
"""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from protocol.messages import BatchId, SkippedSample, StepAt, StepTry
from services.coordinator.ledger import CheckpointRow, Ledger

EPOCHS, BATCHES, SAMPLES = 2, 6, 3
ALL = [BatchId(epoch, index) for epoch in range(EPOCHS) for index in range(BATCHES)]


def samples(of: BatchId) -> list[int]:
    return [of.index * SAMPLES + n for n in range(SAMPLES)]


def by_sample(skip: tuple[BatchId, SkippedSample]) -> tuple[BatchId, int]:
    return skip[0], skip[1].sample


class Outcome(NamedTuple):
    step: int
    failed: str | None
    poison: bool


class Step(NamedTuple):
    epoch: int
    coordinator_epoch: int
    counter: int
    skips: list[tuple[BatchId, SkippedSample]]


@dataclass
class Timeline:
    """What happened on it, without what its parents did."""

    parent: StepAt | None
    steps: list[Step] = field(default_factory=list)
    outcomes: dict[BatchId, Outcome] = field(default_factory=dict)


@dataclass
class Model:
    timelines: list[Timeline] = field(default_factory=lambda: [Timeline(None)])
    poisoned: dict[BatchId, Outcome] = field(default_factory=dict)
    checkpoints: list[tuple[CheckpointRow, bool]] = field(default_factory=list)  # with whether it is kept
    deaths: dict[BatchId, int] = field(default_factory=dict)
    people: dict[str, tuple[str, int, bool]] = field(default_factory=dict)  # role, place, whether alive
    finished: set[int] = field(default_factory=set)

    @property
    def here(self) -> StepAt:
        return StepAt(len(self.timelines) - 1, len(self.steps()))

    def steps(self, timeline: int = -1) -> list[Step]:
        own = self.timelines[timeline]
        return (self.steps(own.parent.timeline)[: own.parent.step] if own.parent else []) + own.steps

    def outcomes(self, timeline: int = -1) -> dict[BatchId, Outcome]:
        own = self.timelines[timeline]
        inherited = self.outcomes(own.parent.timeline) if own.parent else {}
        before = {b: o for b, o in inherited.items() if own.parent and o.step < own.parent.step}
        return before | own.outcomes

    def effective(self) -> dict[BatchId, Outcome]:
        """Poison is for ever, whichever timeline it was found on."""
        return self.poisoned | self.outcomes()

    def counts(self, at: StepAt, timeline: int) -> bool:
        """Whether `at` lies on the history of `timeline`."""
        parent = self.timelines[timeline].parent
        if at.timeline == timeline:
            return True
        return parent is not None and at.step <= parent.step and self.counts(at, parent.timeline)

    def history(self) -> list[CheckpointRow]:
        kept = [row for row, kept in self.checkpoints if kept and self.counts(row.at, self.here.timeline)]
        return sorted(kept, key=lambda row: (row.at.step, row.at.timeline, row.name))

    def expected(self) -> dict[str, Any]:
        outcomes, steps, history = self.effective(), self.steps(), self.history()
        skips = sorted((skip for step in steps for skip in step.skips), key=by_sample)
        skipped = len(skips)
        failed = [b for b, o in outcomes.items() if o.failed is not None]
        committed = len(outcomes) - len(failed)
        counts = (committed * SAMPLES - skipped, len(failed) * SAMPLES + skipped, committed, len(failed))
        last = StepTry(self.here.timeline, len(steps) - 1, *steps[-1][1:3]) if steps else None
        return {
            "timeline": self.here.timeline,
            "steps": len(steps),
            "last try": last,
            "outcomes": {b: "committed" if o.failed is None else "failed" for b, o in outcomes.items()},
            "failures": sorted((b, o.failed) for b, o in outcomes.items() if o.failed is not None),
            "skips": skips,
            "accounting": counts,
            "lost": len(ALL) - len(outcomes),
            "begun epochs": max((step.epoch + 1 for step in steps), default=0),
            "deaths": self.deaths,
            "checkpoints": history,
            "last checkpoint": history[-1].at if history else None,
            "names": {row.name for row, kept in self.checkpoints if kept},
            "living": {n: (role, place) for n, (role, place, alive) in self.people.items() if alive},
            "buried": {name for name, (_, _, alive) in self.people.items() if not alive},
            "finished": self.here.timeline in self.finished,
        }


def recorded(ledger: Ledger) -> dict[str, Any]:
    """Everything that a ledger says, in the form of `Model.expected`."""
    outcomes = {BatchId(e, i): o for e in range(EPOCHS) for i, o in ledger.outcomes(e).items()}
    rows, last = ledger.checkpoints(), ledger.last_checkpoint()
    assert [(r.at.step, r.at.timeline) for r in rows] == sorted((r.at.step, r.at.timeline) for r in rows)
    lost, extra = ledger.audit([BATCHES] * EPOCHS)
    assert extra == 0
    assert tuple(ledger.accounting()) == tuple(ledger._count()), "kept up wrongly"
    return {
        "timeline": ledger.timeline,
        "steps": ledger.committed_steps,
        "last try": ledger.last_try,
        "outcomes": outcomes,
        "failures": ledger.failures(),
        "skips": ledger.skips(),
        "accounting": tuple(ledger.accounting()),
        "lost": lost,
        "begun epochs": ledger.begun_epochs,
        "deaths": ledger.deaths(),
        "checkpoints": sorted(rows, key=lambda row: (row.at.step, row.at.timeline, row.name)),
        "last checkpoint": None if last is None else last.at,
        "names": ledger.kept_names(),
        "living": {i.name: (i.role, i.place) for i in ledger.living()},
        "buried": ledger.buried(),
        "finished": ledger.finished,
    }
