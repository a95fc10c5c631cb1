"""Commands as a user would type them, GPUs lent to several jobs at a time, and the end of them all.

    SIGTERM or SIGINT to this script, or a command's own time is up
        -> SIGTERM to the command (`up` stops with a checkpoint) -> LEAVE_S later SIGKILL to its whole group
    a second signal: SIGKILL at once

Only a SIGKILL to this script leaves commands behind. Costs a look at each command five times a second.
"""

from __future__ import annotations

import math
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

from rich.console import Console
from rich.markup import escape

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
BASE = HERE / "smollm2.toml"
LOOK_S = 0.2
LEAVE_S = 45.0  # of `up`: a step, a checkpoint, roles that leave

console = Console(highlight=False, width=140)
began_s = time.monotonic()
signals: list[int] = []  # that came; a list, because a handler must take no lock


class Failed(Exception):
    """A part did not come about, for the reason given; the others go on."""


class Interrupted(Exception):
    """Nothing more is begun."""


class Outcome(NamedTuple):
    """How a command ended; `cut`: it was asked to, by a signal or because its time was up."""

    code: int
    cut: bool


class Places:
    """GPUs, each lent to `side_by_side` jobs at a time."""

    def __init__(self, gpus: list[str], side_by_side: int) -> None:
        self.count = len(gpus) * side_by_side
        self._free: SimpleQueue[str] = SimpleQueue()
        for _ in range(side_by_side):
            for gpu in gpus:
                self._free.put(gpu)

    @contextmanager
    def one(self) -> Iterator[dict[str, str]]:
        """The environment of a job that has the GPU for itself as device 0."""
        gpu = self._free.get()
        try:
            yield {**os.environ, "CUDA_VISIBLE_DEVICES": gpu, "OMP_NUM_THREADS": "2" if gpu else "1"}
        finally:
            self._free.put(gpu)


def watch_signals() -> None:
    """From now on they end the commands, not this script."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda caught, _frame: signals.append(caught))


def run(
    command: list[str], log: Path, *, env: dict[str, str] | None = None, into: Path | None = None,
    until_s: float = math.inf, look: Callable[[], None] = lambda: None,
) -> Outcome:  # fmt: skip
    """One process to its end, or until `until_s` (monotonic). Its output is in `log`; what it prints is in
    `into`, once it has ended well. `look` is called while it runs. Raises Interrupted after a signal.
    """
    if signals:
        raise Interrupted("a signal came")
    aside = into.with_name(f".{into.name}") if into else None
    with log.open("a") as written, aside.open("w") if aside else nullcontext(written) as result:
        print("$", shlex.join(command), file=written, flush=True)
        process = subprocess.Popen(
            command, cwd=ROOT, env=env, stdin=subprocess.DEVNULL, stdout=result, stderr=written,
            start_new_session=True,
        )  # fmt: skip
        outcome = finish(process, until_s, look)
    if aside and into and not outcome.code:
        aside.rename(into)
    return outcome


def draftmill(
    log: Path, *words: str, env: dict[str, str] | None = None, into: Path | None = None,
    until_s: float = math.inf, look: Callable[[], None] = lambda: None,
) -> Outcome:  # fmt: skip
    """`run` of a `draftmill` command."""
    command = [sys.executable, "-m", "services.cli", *words]
    return run(command, log, env=env, into=into, until_s=until_s, look=look)


def finish(process: subprocess.Popen[bytes], until_s: float, look: Callable[[], None]) -> Outcome:
    """Wait for it; see the top of this file for how it is ended."""
    while not signals and time.monotonic() < until_s:
        look()
        if ended(process):
            return Outcome(process.returncode, cut=False)
    if process.poll() is None:
        process.terminate()
    leave_s = time.monotonic() + LEAVE_S
    while not ended(process):
        if time.monotonic() > leave_s or len(signals) > 1:
            os.killpg(process.pid, signal.SIGKILL)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # parts of an evaluation would notice at their next prompt
    return Outcome(process.returncode, cut=True)


def ended(process: subprocess.Popen[bytes]) -> bool:
    """Within LOOK_S."""
    try:
        process.wait(LOOK_S)
    except subprocess.TimeoutExpired:
        return False
    return True


def write_whole(path: Path, text: str) -> None:
    """Whole or not at all."""
    aside = path.with_name(f".{path.name}")
    aside.write_text(text, encoding="utf-8")
    aside.rename(path)


def say(text: str, style: str = "") -> None:
    shown = f"[{style}]{escape(text)}[/{style}]" if style else escape(text)
    console.print(f"[dim]{time.monotonic() - began_s:6.0f} s[/dim] {shown}")
