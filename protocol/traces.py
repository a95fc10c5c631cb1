"""A request for a profiler trace and its answer: files in the run's folder, nothing on the wire.

    RUN/traces/target-0.request                        seconds, as text; made by whoever wants a trace
    RUN/traces/target-0-20260801T120301-482913.json.gz the answer, a Chrome trace; named by the request's time
                                    ....json.gz.error  or why there is none

A role takes a request by removing it, before it records: one that dies on the way leaves none that its
successor would take up. A request nobody took for a minute is void. Both sides read the time from the file,
so that whoever asked knows the answer to be his. Looking for a request costs a role 5 us.
"""

from __future__ import annotations

import os
import re
import secrets
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from protocol.errors import AlreadyRunning, ConfigError, DecodeError
from protocol.files import FILE_MODE, private_folder

FOLDER = "traces"
LEAST_S, MOST_S = 1.0, 30.0
VOID_S = 60.0
_TEXT_BYTES = 32  # of a request; "3.0" has three


class Request(NamedTuple):
    """A trace of `role` ("target-0") over `seconds`, asked for at `time_ns` (unix, of the file)."""

    run_dir: Path
    role: str
    seconds: float
    time_ns: int

    @property
    def trace(self) -> Path:
        """Where the answer will be, whole or not at all."""
        at = datetime.fromtimestamp(self.time_ns // 10**9, UTC)
        micros = self.time_ns // 1000 % 10**6
        return self.run_dir / FOLDER / f"{self.role}-{at:%Y%m%dT%H%M%S}-{micros:06d}.json.gz"

    @property
    def error(self) -> Path:
        """Where the role says in one line why there is no trace; whoever asked removes it."""
        return self.trace.with_name(f"{self.trace.name}.error")

    def waits(self) -> bool:
        """Whether no role has taken it yet."""
        try:
            return _file(self.run_dir, self.role).stat().st_mtime_ns == self.time_ns
        except FileNotFoundError:
            return False

    def withdraw(self) -> None:
        """Nobody waits for the answer any more: leave nothing that a later role would take up."""
        if self.waits():
            _file(self.run_dir, self.role).unlink(missing_ok=True)


def ask(run_dir: Path, role: str, seconds: float) -> Request:
    """Leave a request for `role`.

    Raises:
        ConfigError: no role that traces is called so, a wrong number of seconds, no such run.
        AlreadyRunning: another request for it waits.
    """
    if not re.fullmatch(r"(target|drafter)-\d{1,6}", role):
        raise ConfigError(f"{role}: no role that can be traced; name a target or drafter, as in target-0")
    if not run_dir.is_dir():
        raise ConfigError(f"{run_dir}: no folder of a run; is the run started?")
    text = str(parse_seconds(str(seconds)))
    private_folder(run_dir / FOLDER)
    file = _file(run_dir, role)
    if _is_void(file):
        file.unlink(missing_ok=True)
    aside = file.with_name(f".{file.name}.{secrets.token_hex(8)}")
    try:
        with os.fdopen(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, FILE_MODE), "w") as stream:
            stream.write(text)
        time_ns = aside.stat().st_mtime_ns  # before a role can take it away
        os.link(aside, file)
        return Request(run_dir, role, float(text), time_ns)
    except FileExistsError as error:
        raise AlreadyRunning(f"{file}: a trace of {role} is asked for already; wait for it") from error
    finally:
        aside.unlink(missing_ok=True)


def take(run_dir: Path, role: str) -> Request | None:
    """For the role: the request that waits for it, which is gone from now on; None: there is none.

    Raises:
        DecodeError: a request that holds no seconds, or too few or too many; it is gone, too.
    """
    file = _file(run_dir, role)
    try:
        with file.open("rb") as stream:
            time_ns, void = os.fstat(stream.fileno()).st_mtime_ns, _is_void(file)
            text = stream.read(_TEXT_BYTES).decode(errors="replace")
        file.unlink()
    except FileNotFoundError:
        return None
    try:
        return None if void else Request(run_dir, role, parse_seconds(text), time_ns)
    except ConfigError as error:
        raise DecodeError(f"{file}: {error}") from error


def parse_seconds(text: str) -> float:
    """ConfigError unless `text` is a number of seconds that a trace may take."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = float("nan")
    if not LEAST_S <= seconds <= MOST_S:
        raise ConfigError(f"{text.strip()!r} seconds of a trace: must be {LEAST_S:g} to {MOST_S:g}")
    return seconds


def _file(run_dir: Path, role: str) -> Path:
    return run_dir / FOLDER / f"{role}.request"


def _is_void(file: Path) -> bool:
    """Whether whoever asked has given up long ago."""
    try:
        return time.time() - file.stat().st_mtime > VOID_S
    except FileNotFoundError:
        return False
