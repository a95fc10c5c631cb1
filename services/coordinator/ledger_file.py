"""The ledger's file: made, opened or refused, and changed in transactions. What stands in it: ledger.py."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path
from typing import Any

from protocol.errors import LedgerError
from services.config.fingerprint import differences, remedy
from services.coordinator.disk import disk_errors

SCHEMA_VERSION = 1

_SCHEMA = files("services.coordinator").joinpath("ledger.sql").read_text()


def open_ledger(
    path: Path | str, identity: Mapping[str, Any] | None
) -> tuple[sqlite3.Connection, dict[str, Any]]:
    """The database and the identity in it. Errors as of `Ledger`."""
    with disk_errors(Path(path)):
        database = sqlite3.connect(path, isolation_level=None)
        database.execute("PRAGMA journal_mode=WAL")
        database.execute("PRAGMA synchronous=FULL")
        return database, _begin(database, str(path), identity)


def _begin(database: sqlite3.Connection, path: str, identity: Mapping[str, Any] | None) -> dict[str, Any]:
    (damage,) = database.execute("PRAGMA quick_check(1)").fetchone()
    if damage != "ok":
        raise LedgerError(f"ledger {path}: {damage}. Restore it from a backup")
    run = {"schema": str(SCHEMA_VERSION), "identity": json.dumps(identity, sort_keys=True)}
    if database.execute("SELECT 1 FROM sqlite_master WHERE name = 'run'").fetchone():
        run = dict(database.execute("SELECT key, value FROM run").fetchall())
    elif identity is None:
        raise LedgerError(f"ledger {path}: no run has begun in it; just start it with the data it needs")
    if run.get("schema") != str(SCHEMA_VERSION):
        raise LedgerError(f"ledger {path}: schema {run.get('schema')}, this version reads {SCHEMA_VERSION}")
    with transaction(database):
        for statement in filter(str.strip, _SCHEMA.split(";\n")):
            database.execute(statement)
        database.executemany("INSERT OR IGNORE INTO run VALUES(?, ?)", run.items())
        database.execute("INSERT OR IGNORE INTO timelines VALUES(0, NULL, 0)")
    recorded: dict[str, Any] = json.loads(run["identity"]) or {}
    if identity is not None and (changed := differences(recorded, identity)):
        raise LedgerError(
            f"ledger {path} belongs to a run with other training options: {'; '.join(changed)}. "
            f"{remedy(recorded, identity)}"
        )
    return recorded


@contextmanager
def transaction(database: sqlite3.Connection) -> Iterator[sqlite3.Connection]:
    """All or nothing."""
    database.execute("BEGIN IMMEDIATE")
    try:
        yield database
    except BaseException:
        if database.in_transaction:  # SQLite has ended it itself when the disk is full
            database.execute("ROLLBACK")
        raise
    database.execute("COMMIT")
