"""A disk without space is told apart from a damaged ledger: the first is repaired by freeing some."""

from __future__ import annotations

import errno
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from protocol.errors import DiskFull


@contextmanager
def disk_full(path: Path) -> Iterator[None]:
    """A disk without space, met by the ledger or any file beside it, is DiskFull: a restart may help."""
    try:
        yield
    except sqlite3.OperationalError as error:
        raise no_space(error, path) or error from error
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        raise DiskFull(f"{error.filename or path}: {error.strerror}; {_FREE_SOME}") from error


_FREE_SOME = "nothing that was committed is lost: free some space and start the coordinator again"


def no_space(error: sqlite3.OperationalError, path: Path | str) -> DiskFull | None:
    """DiskFull if that is what `error` says."""
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    if code not in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR):
        return None
    return DiskFull(f"ledger {path}: {error}; {_FREE_SOME}")
