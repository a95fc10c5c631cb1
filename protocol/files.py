"""Files two processes agree on: locks that prove death, folders nobody else enters, writes that are whole.

A lock is an `flock` held for a process's life. The kernel frees it within a millisecond of SIGKILL,
across containers too, where process ids mean nothing: free = dead. Held proves nothing about being
well. Owners take LOCK_EX, everyone else asks with LOCK_SH (two exclusive probes would collide and make
a dead owner look alive). A file that is missing has no owner.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

from protocol.errors import AlreadyRunning, ConfigError, RetryError

FILE_MODE = 0o600
FOLDER_MODE = 0o700
_PROBES_S = 5.0  # a probe takes microseconds, but on a busy machine its thread may rest in the middle of it
_ATTEMPT_S = 0.001
_REMOVALS = 5  # of a folder, between making it and making a file in it: a run that ends, another that begins


class FileLock:
    """One owner at a time, until `release` or the end of the process. Never inherited by a child."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: int | None = None

    @property
    def held(self) -> bool:
        return self._file is not None

    def acquire(self) -> Self:
        """Become the owner. AlreadyRunning while another is."""
        assert self._file is None, f"{self.path} is already held by this object"
        until_s = time.monotonic() + _PROBES_S
        while time.monotonic() < until_s:
            file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, FILE_MODE)
            try:
                owned = _lock(file, fcntl.LOCK_EX) and _is_same_file(file, self.path)
                if not owned and not _lock(file, fcntl.LOCK_SH):
                    break
            except BaseException:
                os.close(file)
                raise
            if owned:
                self._file = file
                return self
            # Only probes, or an unlinked file, stood in the way: let them go on, and try again.
            os.close(file)
            time.sleep(_ATTEMPT_S)
        else:
            raise AlreadyRunning(
                f"{self.path} could not be locked in {_PROBES_S:g} s, nor has it an owner; who is probing it?"
            )
        os.close(file)
        raise AlreadyRunning(f"{self.path} is held by another live process; stop that one first")

    def release(self, *, unlink: bool = False) -> None:
        """Give it up. With `unlink` the file goes first, so nobody can lock a file that has no name."""
        if self._file is None:
            return
        if unlink:
            self.path.unlink(missing_ok=True)
        os.close(self._file)
        self._file = None

    def __enter__(self) -> Self:
        return self if self.held else self.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def is_alive(path: Path) -> bool:
    """Whether some process owns the lock at `path`. About 10 us; a missing file has no owner."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return False
    try:
        return not _lock(file, fcntl.LOCK_SH)
    finally:
        os.close(file)


@contextlib.contextmanager
def if_dead(path: Path) -> Iterator[bool]:
    """Whether nobody owns the lock at `path`; nor will, of this file, while the body of the `with` runs.

    Who tries meanwhile waits, and makes a new file if this one was removed.
    """
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        yield True
        return
    try:
        yield _lock(file, fcntl.LOCK_SH)
    finally:
        os.close(file)


def private_lock(folder: Path, name: str) -> FileLock:
    """Own `name` in a private folder, which is made if it is missing, also if others are just removing it."""
    for _ in range(_REMOVALS):
        with contextlib.suppress(FileNotFoundError):
            return FileLock(private_folder(folder) / name).acquire()
    raise RetryError(f"{folder}: it is removed again and again; who does that?")


def private_folder(path: Path) -> Path:
    """Make `path` with mode 0700 (parents too) and check that only this user can enter it.

    ConfigError: it is not so, or cannot be made. RetryError: not now, for want of space or memory.
    """
    found = _made(path)
    if not stat.S_ISDIR(found.st_mode):
        raise ConfigError(f"{path} is no folder (or a symbolic link to one); choose a real one")
    if found.st_uid != os.geteuid():
        raise ConfigError(
            f"folder {path} belongs to user {found.st_uid}, not to {os.geteuid()}; choose another"
        )
    if found.st_mode & 0o077:
        raise ConfigError(
            f"folder {path} has mode {stat.S_IMODE(found.st_mode):04o}; others may enter it: chmod 700 {path}"
        )
    return path


def _made(path: Path) -> os.stat_result:
    error = OSError()
    for _ in range(_REMOVALS):
        try:
            _make_folders(path)
            return path.lstat()
        except FileNotFoundError as missing:  # removed in between, or in a file system that takes none
            error = missing
        except OSError as found:
            error = found
            break
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM):
        raise RetryError(f"folder {path}: {error.strerror}; free some space") from error
    raise ConfigError(f"folder {path}: {error.strerror}; choose one this user may make and enter") from error


def write_durably(path: Path, data: bytes) -> None:
    """`path` holds all of `data`, also after a power cut, or what it held before. OSError (ENOSPC, ...)."""
    aside = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        file = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, FILE_MODE)
        with os.fdopen(file, "wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(file)
        aside.rename(path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def publish_folder(aside: Path, final: Path) -> None:
    """Rename folder `aside` to `final` once every byte in it is on the disk. OSError if `final` exists."""
    for folder, _, names in os.walk(aside):
        for name in names:
            sync_file(Path(folder, name))
        sync_folder(Path(folder))
    aside.rename(final)
    sync_folder(final.parent)


def sync_file(path: Path) -> None:
    """What was written to the file `path`, by anyone, is on the disk."""
    _sync(path, os.O_RDONLY)


def sync_folder(path: Path) -> None:
    """The names in the folder `path` are on the disk."""
    _sync(path, os.O_RDONLY | os.O_DIRECTORY)


def _sync(path: Path, flags: int) -> None:
    file = os.open(path, flags | os.O_CLOEXEC)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def _lock(file: int, kind: int) -> bool:
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_same_file(file: int, path: Path) -> bool:
    """Whether `path` still names the open `file`: an owner may have unlinked it between open and lock."""
    opened = os.fstat(file)
    with contextlib.suppress(FileNotFoundError):
        named = path.lstat()
        return (opened.st_dev, opened.st_ino) == (named.st_dev, named.st_ino)
    return False


def _make_folders(path: Path) -> None:
    for folder in [*reversed(path.parents), path]:
        if not folder.exists():
            with contextlib.suppress(FileExistsError):
                folder.mkdir(FOLDER_MODE)
