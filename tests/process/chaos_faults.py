"""What the chaos tool does to a run: one seeded disturbance at a time, and what must be undone later.

    kill       SIGKILL of one role, two at once, or all of them
    leave      SIGTERM of one role, which leaves cleanly: the coordinator ends the whole run, on a checkpoint
    stop       SIGSTOP of one role, SIGCONT later: before it is missed, or long after it was fenced
    unlink     a living target's arena file is removed
    truncate   a living target's arena file is cut
    fill       no byte is free in the arena folder, or on the disk of ledger and checkpoints, for a while

Filling needs a small tmpfs under the folder, which needs root; without it that kind is left out.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from chaos_roles import ForkedRun

from services.lifecycle import arena_folder

TMPFS_BYTES = 48 << 20
KINDS = {"kill": 60, "leave": 15, "stop": 22, "unlink": 3, "truncate": 5, "fill": 10}


class SmallDisk:
    """A tmpfs of TMPFS_BYTES on `folder`, which can be filled and emptied."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._filler = folder / "filler"
        options = f"size={TMPFS_BYTES},mode=0700"
        subprocess.run(["mount", "-t", "tmpfs", "-o", options, "draftmill", str(folder)], check=True)

    def fill(self) -> None:
        with contextlib.suppress(OSError), self._filler.open("wb", buffering=0) as filler:
            size = 1 << 20
            while size:
                try:
                    filler.write(bytes(size))
                except OSError:
                    size //= 2

    def empty(self) -> None:
        self._filler.unlink(missing_ok=True)

    def close(self) -> None:
        subprocess.run(["umount", "-l", str(self.folder)], check=True)


class Faults:
    """Disturbs `run`; `counts` are of what was done, by kind."""

    def __init__(
        self, run: ForkedRun, random_: random.Random, disks: list[SmallDisk], silence_s: float
    ) -> None:
        self._run, self._random, self._disks, self._silence_s = run, random_, disks, silence_s
        self._undo: list[tuple[float, Callable[[], None]]] = []
        self.counts: Counter[str] = Counter()
        self.victims: Counter[str] = Counter()

    def strike(self) -> None:
        kind = self._random.choices(list(KINDS), list(KINDS.values()))[0]
        if kind == "fill" and not self._disks:
            kind = "kill"
        getattr(self, f"_{kind}")()

    def undo_due(self, *, everything: bool = False) -> None:
        now_s = time.monotonic()
        due = [undo for due_s, undo in self._undo if everything or due_s <= now_s]
        self._undo = [] if everything else [item for item in self._undo if item[0] > now_s]
        for undo in due:
            undo()

    def next_undo_s(self) -> float:
        return min((due_s for due_s, _ in self._undo), default=float("inf"))

    # ---- kinds --------------------------------------------------------------------------------

    def _kill(self) -> None:
        names = self._running()
        how_many = self._random.choices((1, 2, len(names)), (85, 12, 3))[0]
        for name in self._random.sample(names, min(how_many, len(names))):
            self._run.processes[name].kill()
            self.counts["kills"] += 1
            self.victims[name.partition("-")[0]] += 1

    def _stop(self) -> None:
        names = self._running()
        if not names:
            return
        process = self._run.processes[self._random.choice(names)]
        span_s = self._random.choice((0.05, 0.3, 1.0, 1.5 * self._silence_s))
        process.send_signal(signal.SIGSTOP)
        self._undo.append((time.monotonic() + span_s, lambda: process.send_signal(signal.SIGCONT)))
        self.counts["stops"] += 1

    def _leave(self) -> None:
        names = self._running()
        if names:
            self._run.processes[self._random.choice(names)].send_signal(signal.SIGTERM)
            self.counts["leaves"] += 1

    def _unlink(self) -> None:
        for arena in self._arenas(1):
            arena.unlink(missing_ok=True)
            self.counts["unlinks"] += 1

    def _truncate(self) -> None:
        for file in self._arenas(1):
            with contextlib.suppress(FileNotFoundError):
                os.truncate(file, self._random.randint(0, file.stat().st_size))
                self.counts["truncations"] += 1

    def _fill(self) -> None:
        disk = self._random.choice(self._disks)
        disk.fill()
        self._undo.append((time.monotonic() + self._random.uniform(0.2, 3.0), disk.empty))
        self.counts["fills"] += 1

    def _running(self) -> list[str]:
        return sorted(name for name, process in self._run.processes.items() if process.poll() is None)

    def _arenas(self, count: int) -> list[Path]:
        found = sorted(arena_folder(self._run.config).glob("*.arena"))
        return self._random.sample(found, min(count, len(found)))
