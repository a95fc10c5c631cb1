"""What a disk, the ledger on it or the process's own limits refuse, told apart by what helps."""

from __future__ import annotations

import errno
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from protocol.errors import ConfigError, DiskFull, DraftmillError, LedgerError, RetryError

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_FOR_NOW = {errno.EIO, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.ENOLCK}
_WRONG = {errno.EROFS, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ELOOP, errno.ENAMETOOLONG}
_NOTHING_LOST = "nothing that was committed is lost"
_FREE_SOME = f"{_NOTHING_LOST}: free some space and start the coordinator again"


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """What stops the ledger at `path`, or any file beside it, as the error that says what helps.

    DiskFull, RetryError: a restart may help. ConfigError, LedgerError: it cannot. Others pass through.
    """
    try:
        yield
    except sqlite3.DatabaseError as error:
        raise of_ledger(error, path) or error from error
    except OSError as error:
        raise _of_file(error, path) or error from error


def of_ledger(error: sqlite3.DatabaseError, path: Path | str) -> DraftmillError | None:
    """None: not the ledger's file is to blame, but we."""
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    if code in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR):
        return DiskFull(f"ledger {path}: {error}; {_FREE_SOME}")
    if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_PROTOCOL):
        return RetryError(f"ledger {path}: {error}; another program holds it for seconds: close that one")
    if code in (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM):
        return ConfigError(
            f"ledger {path}: {error}; let this user read and write it, or choose another run.dir"
        )
    if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
        return LedgerError(
            f"ledger {path}: {error}. It is damaged or no ledger; restore it from a backup, "
            "or start the run in another run.dir"
        )
    return None


def _of_file(error: OSError, path: Path) -> DraftmillError | None:
    where = f"{error.filename or path}: {error.strerror}"
    if error.errno in _FULL:
        return DiskFull(f"{where}; {_FREE_SOME}")
    if error.errno in _FOR_NOW:
        return RetryError(f"{where}; {_NOTHING_LOST}: look after it and start the coordinator again")
    if error.errno in _WRONG:
        return ConfigError(f"{where}; repair that, or choose another run.dir")
    return None
