"""The ledger on a real file against dicts: reopened, killed between any two statements, rolled back.

A kill is a copy of the files as they lie there, opened as another ledger. About 6 s; in memory, since a
disk would be waited for thousands of times.
"""

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from ledger_model import ALL, EPOCHS, SAMPLES, Model, Outcome, Step, Timeline, recorded, samples

from protocol.errors import LedgerError
from protocol.messages import BatchId, SkippedSample, StepAt, StepTry
from services.coordinator.ledger import CheckpointRow, Ledger

IDENTITY = {"options": {}, "dataset": "d", "model": "m"}
batches = st.lists(st.sampled_from(ALL), max_size=4, unique=True)
batch = st.sampled_from(ALL)


class LedgerLife(RuleBasedStateMachine):
    """`moment` of a rule: the statement within its call before which a copy of the files is taken."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory(dir="/dev/shm")
        self.files = 0
        self.model = Model()
        self.epoch = self.counter = 0
        self.ledger = Ledger(self.path, IDENTITY)

    def teardown(self) -> None:
        self.ledger.close()
        self.folder.cleanup()

    @property
    def path(self) -> Path:
        return Path(self.folder.name) / f"{self.files}.sqlite"

    def fork(self) -> Path:
        """The files as a process that is killed now leaves them, under another name."""
        copy = Path(self.folder.name) / "killed.sqlite"
        for end in ("", "-wal"):  # the index in -shm is rebuilt, as after a crash of the machine
            source, target = Path(f"{self.path}{end}"), Path(f"{copy}{end}")
            target.unlink(missing_ok=True)
            if source.exists():
                shutil.copy(source, target)
        Path(f"{copy}-shm").unlink(missing_ok=True)
        return copy

    def tell(self, call: Callable[[], None], moment: int, change: Callable[[], None]) -> None:
        """`call` on the ledger does what `change` does to the model, or nothing when it is killed."""
        before, said, copies = self.model.expected(), list[str](), list[Path]()

        def statement(text: str) -> None:
            said.append(text)
            if len(said) == moment and "COMMIT" not in said[:-1]:
                copies.append(self.fork())

        self.ledger._db.set_trace_callback(statement)
        call()
        self.ledger._db.set_trace_callback(None)
        change()
        for copy in copies:
            killed = Ledger(copy, IDENTITY)
            assert recorded(killed) == before, f"something of it was there before {said[moment - 1]}"
            killed.close()

    # ---- processes ------------------------------------------------------------------------------

    @rule()
    def reopen(self) -> None:
        self.ledger.close()
        self.ledger = Ledger(self.path, IDENTITY)

    @rule()
    def kill_and_reopen(self) -> None:
        copy = self.fork()
        self.ledger.close()
        self.files += 1
        for end in ("", "-wal"):
            if Path(f"{copy}{end}").exists():
                Path(f"{copy}{end}").rename(f"{self.path}{end}")
        self.ledger = Ledger(self.path, None)
        assert self.ledger.identity == IDENTITY

    @rule()
    def a_coordinator_starts(self) -> None:
        epoch = self.ledger.new_coordinator_epoch()
        assert epoch == self.epoch + 1
        self.epoch = epoch

    @rule(name=st.sampled_from(["target-1", "target-2", "drafter-1"]), place=st.integers(0, 1))
    def welcome(self, name: str, place: int) -> None:
        role = name.split("-")[0]
        self.ledger.welcome(name, role, place, "h")
        self.model.people.setdefault(name, (role, place, True))

    @precondition(lambda self: self.model.people)
    @rule(data=st.data())
    def bury(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.model.people)))
        self.ledger.bury(name, data.draw(st.sampled_from(["", "silent"])))
        self.model.people[name] = (*self.model.people[name][:2], False)

    # ---- outcomes -------------------------------------------------------------------------------

    @rule(
        wanted=batches, skipped=st.integers(0, SAMPLES), epoch=st.integers(0, EPOCHS - 1),
        moment=st.integers(1, 12), saved=st.booleans(),
    )  # fmt: skip
    def commit(self, wanted: list[BatchId], skipped: int, epoch: int, moment: int, saved: bool) -> None:
        fresh = [b for b in wanted if b not in self.model.effective()]
        skips = [(b, SkippedSample(sample=n, reason="bad")) for b in fresh[:1] for n in samples(b)[:skipped]]
        self.counter += 1
        here = self.model.here
        step_try = StepTry(*here, self.epoch, self.counter)

        def change() -> None:
            own = self.model.timelines[-1]
            own.steps.append(Step(epoch, self.epoch, self.counter, skips))
            own.outcomes |= dict.fromkeys(fresh, Outcome(here.step, None, False))

        counted = [(b, SAMPLES) for b in fresh]
        self.tell(lambda: self.ledger.commit_step(step_try, epoch, counted, skips), moment, change)
        if saved:
            self.record(0, "a")

    @rule(wanted=batches, ahead=st.sampled_from([-1, 0, 1]), timeline=st.sampled_from([-1, 0, 1]))
    def commit_what_may_not_be(self, wanted: list[BatchId], ahead: int, timeline: int) -> None:
        """Another step than the next one, or a batch with an outcome, last: the others stay without one."""
        here, settled = self.model.here, self.model.effective()
        wanted = sorted(wanted, key=lambda b: b in settled)
        if ahead == timeline == 0 and not (wanted and wanted[-1] in settled):
            return
        step_try = StepTry(here.timeline + timeline, here.step + ahead, self.epoch, 0)
        with pytest.raises(LedgerError, match=r"not the next one|refused to record an outcome twice"):
            self.ledger.commit_step(step_try, 0, [(b, SAMPLES) for b in wanted], [])

    @rule(failed=batch, ahead=st.integers(0, 3), poison=st.booleans())
    def fail(self, failed: BatchId, ahead: int, poison: bool) -> None:
        step, reason = self.model.here.step + ahead, f"reason {self.model.here.timeline}"

        def call() -> None:
            self.ledger.fail_batch(failed, step, SAMPLES, reason, poison=poison)

        if failed in self.model.effective():
            with pytest.raises(LedgerError, match="already has an outcome"):
                call()
            return
        to = self.model.poisoned if poison else self.model.timelines[-1].outcomes
        self.tell(call, 1, lambda: to.update({failed: Outcome(step, reason, poison)}))

    @rule(victim=batch)
    def a_target_dies_of(self, victim: BatchId) -> None:
        self.model.deaths[victim] = self.model.deaths.get(victim, 0) + 1
        assert self.ledger.count_death(victim) == self.model.deaths[victim]

    # ---- checkpoints and timelines --------------------------------------------------------------

    @rule(back=st.integers(0, 2), writer=st.sampled_from("ab"))
    def record(self, back: int, writer: str) -> None:
        """Saved now or, late, of an earlier step of this timeline; said twice it is said once."""
        own = self.model.timelines[-1]
        first = own.parent.step if own.parent else 0
        at = StepAt(self.model.here.timeline, max(first, self.model.here.step - back))
        row = CheckpointRow(f"ckpt-{at.timeline}-{at.step}-{writer}", at, writer * 64)
        self.ledger.record_checkpoint(*row)
        if row.name not in {known.name for known, _ in self.model.checkpoints}:
            self.model.checkpoints.append((row, True))

    @precondition(lambda self: self.model.history())
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        row = data.draw(st.sampled_from(self.model.history()))
        self.ledger.forget_checkpoint(row.name)
        self.model.checkpoints = [(r, kept and r != row) for r, kept in self.model.checkpoints]

    @rule(data=st.data(), moment=st.integers(1, 8))
    def roll_back(self, data: st.DataObject, moment: int) -> None:
        beginning = StepAt(self.model.here.timeline, 0)
        rows = [row.at for row in self.model.history()]
        at = data.draw(st.sampled_from([*rows, beginning]))
        self.tell(
            lambda: self.ledger.open_timeline(at), moment, lambda: self.model.timelines.append(Timeline(at))
        )

    @rule()
    def finish(self) -> None:
        self.ledger.finish()
        self.model.finished.add(self.model.here.timeline)

    @invariant()
    def the_ledger_says_what_happened(self) -> None:
        assert recorded(self.ledger) == self.model.expected()


TestLedgerLife = LedgerLife.TestCase
TestLedgerLife.settings = settings(max_examples=160, stateful_step_count=40, deadline=None)
