"""Role processes on this machine: each in its own group, its output in its own log, none outliving us.

The kernel kills a child when the thread that started it is gone (PR_SET_PDEATHSIG), so start children
from the main thread only. Ctrl-C reaches `up` alone, because children are in groups of their own.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from signal import SIGKILL, Signals

from services.config.environment import child_environment
from services.local.supervisor import COORDINATOR, EVALUATOR, RoleId

ROLE_PROGRAM = (sys.executable, "-m", "services.cli")
_PR_SET_PDEATHSIG = 1
_TAIL_BYTES = 16384


class Processes:
    """The living children by role."""

    def __init__(
        self,
        log_folder: Path,
        arguments: Sequence[str],
        threads: dict[str, int],
        program: Sequence[str] = ROLE_PROGRAM,
    ) -> None:
        """Children run `program ROLE *arguments [--index I]`; `threads` is by role name."""
        self._folder, self._arguments, self._threads = log_folder, arguments, threads
        self._program = program
        self._alive: dict[RoleId, subprocess.Popen[bytes]] = {}
        self._log_start: dict[RoleId, int] = {}  # bytes in the log when the last process of a role began

    def __contains__(self, role: RoleId) -> bool:
        return role in self._alive

    def __bool__(self) -> bool:
        return bool(self._alive)

    def log_file(self, role: RoleId) -> Path:
        return self._folder / f"{role.role}-{role.index}.log"

    def start(self, role: RoleId) -> int:
        """Returns the process id. OSError when the log or the process cannot be made."""
        self._folder.mkdir(parents=True, exist_ok=True)
        index = [] if role in (COORDINATOR, EVALUATOR) else ["--index", str(role.index)]
        command = [*self._program, role.role, *self._arguments, *index]
        with self.log_file(role).open("ab") as output:
            self._log_start[role] = output.tell()
            self._alive[role] = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=child_environment(self._threads.get(role.role, 0)),
                process_group=0,
                preexec_fn=_die_with_parent(os.getpid()),
            )
        return self._alive[role].pid

    def reap(self) -> list[tuple[RoleId, int]]:
        """Children that have ended since the last call, with their return codes. Never blocks."""
        ended = [(role, child.poll()) for role, child in self._alive.items()]
        for role, code in ended:
            if code is not None:
                del self._alive[role]
        return [(role, code) for role, code in ended if code is not None]

    def signal(self, role: RoleId, number: Signals) -> None:
        """Only to the process, not to its group; nothing if it is gone."""
        if role in self._alive:
            self._alive[role].send_signal(number)

    def signal_all(self, number: Signals) -> None:
        for role in self._alive:
            self.signal(role, number)

    def kill_all(self) -> list[RoleId]:
        """SIGKILL whole groups and wait for them. Returns who had to be killed."""
        killed = list(self._alive)
        for child in self._alive.values():
            if child.poll() is None:
                os.killpg(child.pid, SIGKILL)
            child.wait()
        self._alive.clear()
        return killed

    def last_lines(self, role: RoleId, count: int) -> list[str]:
        """The end of what the role's last process wrote, at most 16 KiB of it."""
        with self.log_file(role).open("rb") as log:
            end = log.seek(0, os.SEEK_END)
            log.seek(max(self._log_start.get(role, 0), end - _TAIL_BYTES))
            return log.read().decode(errors="replace").splitlines()[-count:]


def _die_with_parent(parent: int) -> Callable[[], None]:
    libc = ctypes.CDLL(None, use_errno=True)  # loaded before the fork: nothing may allocate locks after it

    def in_child() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # it died before the call above
            os._exit(1)

    return in_child
