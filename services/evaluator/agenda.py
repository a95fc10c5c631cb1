"""What is evaluated next, and which was best. Decisions only: no file, no clock, no GPU.

Always the newest recorded checkpoint, so that an evaluator which is slower than the training skips what it
missed instead of falling behind; each at most once, also over restarts, because what was done comes from
acceptance.jsonl. After a roll-back the newest is one of the new timeline's history.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

Line = Mapping[str, Any]
"""What is recorded of one evaluation: see services/evaluator/figures.py."""


class Recorded(NamedTuple):
    """A checkpoint that the ledger has; `epoch` of its last step, None if nobody said."""

    name: str
    timeline: int
    step: int
    epoch: int | None = None


class Agenda:
    """Told of every evaluation; says what comes next and what is best."""

    def __init__(self, lines: Iterable[Line] = ()) -> None:
        self._done: set[str] = set()
        self._unreadable: set[str] = set()
        self.best: Line | None = None
        for line in lines:
            self.add(line)

    def __contains__(self, name: str) -> bool:
        return name in self._done

    def next(self, recorded: Sequence[Recorded]) -> Recorded | None:
        """`recorded` oldest first. None: the newest is done, or there is none."""
        newest = recorded[-1] if recorded else None
        if newest is None or newest.name in self._done or newest.name in self._unreadable:
            return None
        return newest

    def add(self, line: Line) -> None:
        """An evaluation was recorded."""
        self._done.add(line["checkpoint"])
        if better(line, self.best):
            self.best = line

    def set_aside(self, name: str) -> None:
        """It is gone or damaged: neither comes back, so it is not tried again."""
        self._unreadable.add(name)


def better(line: Line, best: Line | None) -> bool:
    """A larger acceptance length; the earlier of two equal ones stays. One without any length never wins."""
    length = line["acceptance_length"]
    if length is None:
        return False
    return best is None or length > best["acceptance_length"]


def pause_s(worked_s: float, share: float) -> float:
    """How long to rest after `worked_s` of work, so that work is `share` of the time, in (0, 1]."""
    return worked_s * (1.0 - share) / share
