"""Whether the run's folder can be (re)entered: nobody lives in it, and its ledger is of the same run.

The ledger is read from a copy: opening a database in WAL mode writes beside it, and a check changes nothing.
"""

from __future__ import annotations

import json
import shutil
import sqlite3
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

from protocol.errors import ModelError, PeerGone
from protocol.files import is_alive
from services.config.fingerprint import differences, identity, model_fingerprint, remedy
from services.config.load import Loaded
from services.config.sources import Finding
from services.coordinator.checkpoints import strangers
from services.data.training_data import TrainingData, fingerprint_of
from services.local.status import read_address

LOCK = "coordinator.lock"
LEDGER = "ledger.sqlite"
_COPIES = 3  # that may be torn, or of a ledger that is just being closed


def is_running(run_dir: Path) -> bool:
    """Whether a coordinator lives on this run."""
    return run_dir.is_dir() and is_alive(run_dir / LOCK)


def check_run_folder(loaded: Loaded, data: TrainingData | None) -> list[Finding]:
    """Another live coordinator; a ledger that is damaged or of a run with other training options."""
    config, subject = loaded.config, loaded.describe("run.dir")
    if is_running(config.run.dir):
        return [
            Finding(
                subject,
                f"another coordinator runs it ({_where(config.run.dir)}); `draftmill stop` it first",
                in_use=True,
            )
        ]
    if not (config.run.dir / LEDGER).exists():
        rule = strangers(config.run.dir / "checkpoints")
        return [Finding(subject, rule)] if rule else []
    if data is None:
        return []
    try:
        recorded = recorded_identity(config.run.dir / LEDGER)
        current = identity(config, data.fingerprint, model_fingerprint(Path(config.model.path)))
    except sqlite3.DatabaseError as error:
        return [Finding(subject, f"{LEDGER}: {error}; restore it from a backup, or choose another run.dir")]
    except ModelError:
        return []  # reported as a finding on model.path
    began, now = (fingerprint_of(tree.get("dataset", ""), 0) for tree in (recorded, current))
    if began != now:
        return [Finding(loaded.describe("data.path", "run.dir"), _other_data(recorded, current, began, now))]
    changed = "; ".join(differences(recorded, current))
    rule = f"its ledger is of other training options: {changed}. {remedy(recorded, current)}"
    return [Finding(subject, rule)] if changed else []


def _other_data(recorded: dict[str, Any], current: dict[str, Any], began: str, now: str) -> str:
    """A run's first dataset is another one than data.path is now, whatever else has changed."""
    rule = f"the data are not those that the run began with ({now[:12]}, not {began[:12]})"
    others = differences({**recorded, "dataset": current["dataset"]}, current)
    if others:
        return f"{rule}; so differ {'; '.join(others)}. Restore them, or choose another run.dir"
    return (
        f"{rule}. Give data.path back what it was; a new dataset takes over from a later epoch on by "
        'data.later = ["EPOCH:PATH"] and `draftmill extend`. Or choose another run.dir'
    )


def _where(run_dir: Path) -> str:
    try:
        return read_address(run_dir).http
    except PeerGone:
        return "starting"


def recorded_identity(ledger: Path) -> dict[str, Any]:
    """Of a run: training options, dataset, model; empty before it begins. Raises sqlite3.DatabaseError."""
    for _ in range(_COPIES - 1):
        with suppress(FileNotFoundError, sqlite3.DatabaseError):  # its coordinator starts, writes or ends
            return _recorded_identity(ledger)
    return _recorded_identity(ledger)


def _recorded_identity(ledger: Path) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as aside:
        for file in ledger.parent.glob(f"{ledger.name}*"):
            if not file.name.endswith("-shm"):
                shutil.copy(file, aside)
        database = sqlite3.connect(Path(aside) / ledger.name)
        try:
            (damage,) = database.execute("PRAGMA quick_check(1)").fetchone()
            if damage != "ok":
                raise sqlite3.DatabaseError(damage)
            begun = database.execute("SELECT 1 FROM sqlite_master WHERE name = 'run'").fetchone()
            row = begun and database.execute("SELECT value FROM run WHERE key = 'identity'").fetchone()
        finally:
            database.close()
    return json.loads(row[0]) if row else {}
