"""The run's memory: what was committed, what failed and why, who is alive. One SQLite file, one writer.

Everything else the coordinator knows is rebuilt from reports. WAL with synchronous=FULL: a returned
call is on the disk; about 0.4 ms a step commit. Nothing is ever updated that another process reads.

    coordinator_epochs   one row per start, written before the first message of that epoch
    incarnations         every role process ever welcomed; dead once fenced, never alive again
    timelines            a history of weights; a roll-back opens a new one from its parent's checkpoint
    steps, outcomes      one row per committed step, one outcome (committed | failed) per batch and timeline
    skips                samples left out of a committed pack, with the reason
    deaths               targets that died in the forward of a batch, over the whole run
    checkpoints          durable weights: the only ones a role is ever told to load
    finished             written once, after the checkpoint of the last step
    datasets             which prepared dataset the epochs from a first one on are trained on
    extensions           what the run was before it was given more data or epochs, and at which step
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

from protocol.errors import LedgerError
from protocol.messages import BatchId, SkippedSample, StepAt, StepTry
from services.config.fingerprint import identity_sha256
from services.coordinator.ledger_file import open_ledger, transaction


class CheckpointRow(NamedTuple):
    name: str
    at: StepAt
    sha256: str


class Incarnation(NamedTuple):
    name: str
    role: str
    place: int


class Accounting(NamedTuple):
    """Samples of the current timeline by outcome. Skipped samples count as failed."""

    committed_samples: int
    failed_samples: int
    committed_batches: int
    failed_batches: int


class Ledger:
    """Single writer; the coordinator's lock on the run folder keeps a second one out."""

    def __init__(self, path: Path | str, identity: Mapping[str, Any] | None) -> None:
        """Open or create. `identity` is the run's (services.config.fingerprint); None: what is recorded.

        LedgerError: damaged, of another schema, or of a run with another identity; with None no ledger yet.
        DiskFull: no space. RetryError: another program holds it. ConfigError: it cannot be opened.
        """
        self._db, self.identity = open_ledger(path, identity)
        self.fingerprint = identity_sha256(self.identity)
        (self._timeline,) = self._db.execute("SELECT max(timeline) FROM timelines").fetchone()
        self._last_try = self._read_last_try()
        self._checkpoints: tuple[CheckpointRow, ...] | None = None
        self._accounting: Accounting | None = None

    def transaction(self) -> AbstractContextManager[sqlite3.Connection]:
        """All or nothing; what a caller writes, this object may have read before."""
        return transaction(self._db)

    def close(self) -> None:
        self._db.close()

    # ---- who ----------------------------------------------------------------------------------

    def new_coordinator_epoch(self) -> int:
        """Persist and return the next epoch; call before sending anything."""
        cursor = self._db.execute("INSERT INTO coordinator_epochs(started_s) VALUES(?)", (time.time(),))
        assert cursor.lastrowid is not None
        return cursor.lastrowid

    def welcome(self, name: str, role: str, place: int, host: str) -> None:
        """Record a living incarnation; known ones keep their first row."""
        self._db.execute(
            "INSERT OR IGNORE INTO incarnations VALUES(?, ?, ?, ?, NULL)", (name, role, place, host)
        )

    def bury(self, name: str, reason: str) -> None:
        """Fence: from here on every message of this incarnation is answered Exit."""
        self._db.execute(
            "UPDATE incarnations SET died = ? WHERE name = ? AND died IS NULL", (reason or "unknown", name)
        )

    def living(self) -> list[Incarnation]:
        rows = self._db.execute("SELECT name, role, place FROM incarnations WHERE died IS NULL").fetchall()
        return [Incarnation(*row) for row in rows]

    def buried(self) -> set[str]:
        rows = self._db.execute("SELECT name FROM incarnations WHERE died IS NOT NULL").fetchall()
        return {name for (name,) in rows}

    def knows_anybody(self) -> bool:
        """Whether a role has ever been welcomed: without one there is no checkpoint of this ledger."""
        return self._db.execute("SELECT 1 FROM incarnations LIMIT 1").fetchone() is not None

    # ---- history ------------------------------------------------------------------------------

    @property
    def timeline(self) -> int:
        return self._timeline

    @property
    def committed_steps(self) -> int:
        """Steps on this timeline's history; also the number of the step to do next."""
        return 0 if self._last_try is None else self._last_try.step + 1

    @property
    def last_try(self) -> StepTry | None:
        """The try that the last committed step of this timeline was committed under."""
        return self._last_try

    def _read_last_try(self) -> StepTry | None:
        row = self._db.execute(
            "SELECT timeline, step, coordinator_epoch, counter FROM steps WHERE timeline = ? "
            "ORDER BY step DESC LIMIT 1",
            (self._timeline,),
        ).fetchone()
        return None if row is None else StepTry(*row)

    def commit_step(
        self,
        step_try: StepTry,
        epoch: int,
        batches: Sequence[tuple[BatchId, int]],
        skips: Sequence[tuple[BatchId, SkippedSample]],
    ) -> None:
        """Step, outcomes (with their sample counts) and skips in one transaction.

        LedgerError when the step is not the next one or a batch already has an outcome.
        """
        if step_try.timeline != self._timeline or step_try.step != self.committed_steps:
            raise LedgerError(
                f"step try {tuple(step_try)} is not the next one: the ledger is on timeline "
                f"{self._timeline} with {self.committed_steps} steps"
            )
        timeline, step = step_try.timeline, step_try.step
        try:
            with self.transaction():
                self._db.execute(
                    "INSERT INTO steps VALUES(?, ?, ?, ?, ?)",
                    (timeline, step, step_try.coordinator_epoch, step_try.counter, epoch),
                )
                self._db.executemany(
                    "INSERT INTO outcomes VALUES(?, ?, ?, ?, ?, NULL, 0)",
                    [(timeline, batch.epoch, batch.index, step, samples) for batch, samples in batches],
                )
                self._db.executemany(
                    "INSERT INTO skips VALUES(?, ?, ?, ?, ?, ?)",
                    [(timeline, b.epoch, s.sample, b.index, step, s.reason) for b, s in skips],
                )
        except sqlite3.IntegrityError as error:
            raise LedgerError(f"step {step}: {error}; refused to record an outcome twice") from error
        self._last_try = step_try
        skipped, samples = len(skips), sum(count for _, count in batches)
        self._account(Accounting(samples - skipped, skipped, len(batches), 0))

    def fail_batch(self, batch: BatchId, step: int, samples: int, reason: str, *, poison: bool) -> None:
        """A batch will never be trained on this timeline; poison also on later ones."""
        try:
            self._db.execute(
                "INSERT INTO outcomes VALUES(?, ?, ?, ?, ?, ?, ?)",
                (self._timeline, batch.epoch, batch.index, step, samples, reason, int(poison)),
            )
        except sqlite3.IntegrityError as error:
            raise LedgerError(f"batch {tuple(batch)} already has an outcome; not failed again") from error
        self._account(Accounting(0, samples, 0, 1))

    def outcomes(self, epoch: int) -> dict[int, str]:
        """Batch index -> "committed" or "failed", of this timeline."""
        sql = "SELECT batch, failed FROM outcomes WHERE timeline = ? AND epoch = ?"
        rows = self._db.execute(sql, (self._timeline, epoch))
        return {batch: "committed" if failed is None else "failed" for batch, failed in rows}

    def failures(self) -> list[tuple[BatchId, str]]:
        sql = "SELECT epoch, batch, failed FROM outcomes WHERE timeline = ? AND failed NOTNULL ORDER BY 1, 2"
        rows = self._db.execute(sql, (self._timeline,))
        return [(BatchId(epoch, batch), reason) for epoch, batch, reason in rows]

    def skips(self) -> list[tuple[BatchId, SkippedSample]]:
        """Samples that were left out of committed packs, which count as failed."""
        sql = "SELECT epoch, batch, sample, reason FROM skips WHERE timeline = ? ORDER BY 1, 2, 3"
        rows = self._db.execute(sql, (self._timeline,))
        return [(BatchId(e, b), SkippedSample(sample=s, reason=reason)) for e, b, s, reason in rows]

    def accounting(self) -> Accounting:
        """Read once, then kept up: it is asked at every commit."""
        if self._accounting is None:
            self._accounting = self._count()
        return self._accounting

    def _account(self, more: Accounting) -> None:
        if self._accounting is not None:
            self._accounting = Accounting(*(a + b for a, b in zip(self._accounting, more, strict=True)))

    def _count(self) -> Accounting:
        committed, failed, n_committed, n_failed = self._db.execute(
            "SELECT coalesce(sum(iif(failed IS NULL, samples, 0)), 0), "
            "coalesce(sum(iif(failed IS NULL, 0, samples)), 0), "
            "coalesce(sum(failed IS NULL), 0), coalesce(sum(failed IS NOT NULL), 0) "
            "FROM outcomes WHERE timeline = ?",
            (self._timeline,),
        ).fetchone()
        sql = "SELECT count(*) FROM skips WHERE timeline = ?"
        (skipped,) = self._db.execute(sql, (self._timeline,)).fetchone()
        return Accounting(committed - skipped, failed + skipped, n_committed, n_failed)

    def count_death(self, batch: BatchId) -> int:
        """One more target died in this batch's forward; returns how many now."""
        (count,) = self._db.execute(
            "INSERT INTO deaths VALUES(?, ?, 1) ON CONFLICT DO UPDATE SET count = count + 1 RETURNING count",
            (batch.epoch, batch.index),
        ).fetchone()
        return count

    def deaths(self) -> dict[BatchId, int]:
        rows = self._db.execute("SELECT epoch, batch, count FROM deaths").fetchall()
        return {BatchId(epoch, batch): count for epoch, batch, count in rows}

    # ---- checkpoints and timelines ------------------------------------------------------------

    def lineage(self) -> list[tuple[int, int | None]]:
        """This timeline and its ancestors, each with the step up to which it counts (None: all)."""
        line: list[tuple[int, int | None]] = [(self._timeline, None)]
        limit: int | None = None
        timeline = self._timeline
        while True:
            parent, step = self._db.execute(
                "SELECT parent, step FROM timelines WHERE timeline = ?", (timeline,)
            ).fetchone()
            if parent is None:
                return line
            limit = step if limit is None else min(limit, step)
            line.append((parent, limit))
            timeline = parent

    def checkpoints(self) -> tuple[CheckpointRow, ...]:
        """Kept checkpoints of this timeline's history, oldest first. The same object until they change."""
        if self._checkpoints is None:
            self._checkpoints = self._read_checkpoints()
        return self._checkpoints

    def _read_checkpoints(self) -> tuple[CheckpointRow, ...]:
        rows: list[CheckpointRow] = []
        for timeline, limit in self.lineage():
            found = self._db.execute(
                "SELECT name, timeline, step, sha256 FROM checkpoints "
                "WHERE timeline = ? AND deleted = 0 AND (? IS NULL OR step <= ?)",
                (timeline, limit, limit),
            ).fetchall()
            rows += [CheckpointRow(name, StepAt(t, s), sha256) for name, t, s, sha256 in found]
        return tuple(sorted(rows, key=lambda row: (row.at.step, row.at.timeline)))

    def kept_names(self) -> set[str]:
        """Folder names of all checkpoints that are not deleted, of any timeline."""
        rows = self._db.execute("SELECT name FROM checkpoints WHERE deleted = 0").fetchall()
        return {name for (name,) in rows}

    def last_checkpoint(self) -> CheckpointRow | None:
        """The newest of this timeline's history: what a roll-back returns to."""
        rows = self.checkpoints()
        return rows[-1] if rows else None

    def was_recorded(self, name: str) -> bool:
        """Also if it was deleted since, and on any timeline."""
        row = self._db.execute("SELECT 1 FROM checkpoints WHERE name = ?", (name,)).fetchone()
        return row is not None

    def record_checkpoint(self, name: str, at: StepAt, sha256: str) -> None:
        """The files are durable; saying it again changes nothing."""
        self._checkpoints = None
        self._db.execute(
            "INSERT OR IGNORE INTO checkpoints VALUES(?, ?, ?, ?, 0)", (name, at.timeline, at.step, sha256)
        )

    def forget_checkpoint(self, name: str) -> None:
        """Call before deleting the files, so that no load is ever ordered of a half-deleted one."""
        self._checkpoints = None
        self._db.execute("UPDATE checkpoints SET deleted = 1 WHERE name = ?", (name,))

    def open_timeline(self, at: StepAt) -> int:
        """Roll back to `at`, a checkpoint's or a timeline's beginning: a new one with the outcomes before it.

        Steps, skips and non-finite failures from that step on are forgotten; poison failures stay.
        """
        parent, step, new = at.timeline, at.step, self._timeline + 1
        with self.transaction():
            self._db.execute("INSERT INTO timelines VALUES(?, ?, ?)", (new, parent, step))
            self._db.execute(
                "INSERT INTO steps SELECT ?, step, coordinator_epoch, counter, epoch FROM steps "
                "WHERE timeline = ? AND step < ?",
                (new, parent, step),
            )
            self._db.execute(
                "INSERT INTO outcomes SELECT ?, epoch, batch, step, samples, failed, poison FROM outcomes "
                "WHERE timeline = ? AND step < ?",
                (new, parent, step),
            )
            self._db.execute(
                "INSERT OR IGNORE INTO outcomes SELECT ?, epoch, batch, step, samples, failed, 1 "
                "FROM outcomes WHERE timeline = ? AND poison = 1",
                (new, self._timeline),
            )
            self._db.execute(
                "INSERT INTO skips SELECT ?, epoch, sample, batch, step, reason FROM skips "
                "WHERE timeline = ? AND step < ?",
                (new, parent, step),
            )
        self._timeline = new
        self._checkpoints = self._accounting = None
        self._last_try = self._read_last_try()
        return new

    def finish(self) -> None:
        if not self.finished:
            self._db.execute("INSERT INTO finished VALUES(?, ?)", (self._timeline, self.committed_steps))

    @property
    def finished(self) -> bool:
        """Whether this timeline is: one that was opened later, by a roll-back, goes on."""
        row = self._db.execute("SELECT 1 FROM finished WHERE timeline = ?", (self._timeline,)).fetchone()
        return row is not None

    def name_datasets(self, datasets: Sequence[tuple[int, str, str]]) -> None:
        """(first epoch, fingerprint, path) of each, for people: the identity decides, paths may change."""
        with self.transaction():
            self._db.execute("DELETE FROM datasets")
            self._db.executemany("INSERT INTO datasets VALUES(?, ?, ?)", datasets)

    @property
    def begun_epochs(self) -> int:
        """Epochs of which a step is committed on this timeline."""
        sql = "SELECT coalesce(max(epoch) + 1, 0) FROM steps WHERE timeline = ?"
        return self._db.execute(sql, (self._timeline,)).fetchone()[0]

    def audit(self, batches_per_epoch: Sequence[int]) -> tuple[int, int]:
        """(lost, duplicated) batches of this timeline: without an outcome, and outcomes without a batch."""
        lost = extra = 0
        for epoch, batches in enumerate(batches_per_epoch):
            indices = set(self.outcomes(epoch))
            lost += batches - len(indices & set(range(batches)))
            extra += len(indices - set(range(batches)))
        (beyond,) = self._db.execute(
            "SELECT count(*) FROM outcomes WHERE timeline = ? AND epoch >= ?",
            (self._timeline, len(batches_per_epoch)),
        ).fetchone()
        return lost, extra + beyond
