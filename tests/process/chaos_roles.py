"""Role processes forked from one that has imported everything: a killed role is back in half a second.

Importing torch takes four seconds of each role's start, in which there is nothing to kill. So the chaos
tool imports it all once, with one thread and no socket, file or tensor of its own, and forks. What runs in
the child is the command line's own entry, and a `kill -9` kills that one role.
"""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import sys
import traceback
from pathlib import Path
from typing import NoReturn

from harness import Run

_PR_SET_PDEATHSIG = 1
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}


def preload() -> None:
    """Import what roles import. The process must have one thread, now and until the last fork."""
    for name in [name for name in os.environ if name.startswith("DFLASH_")]:
        del os.environ[name]
    os.environ |= _ENVIRONMENT
    import torch
    import transformers.models.llama.modeling_llama

    import services.cli
    import services.coordinator.server
    import services.drafter.trainer
    import services.target.server  # noqa: F401

    assert transformers.models.llama.modeling_llama.LlamaForCausalLM
    torch.set_num_threads(1)
    threads = {(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()}
    threads -= {"jemalloc_bg_thd"}  # of pyarrow; jemalloc starts it again in a child
    assert len(threads) == 1, f"threads {threads} after the imports; a fork would lose all but one"
    gc.collect()
    gc.freeze()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})


def pause(seconds: float) -> None:
    """Until a child ends, at most `seconds`."""
    signal.sigtimedwait({signal.SIGCHLD}, max(0.0, seconds))


class Forked:
    """A child, with what the harness uses of a Popen."""

    def __init__(self, words: list[str], log: Path) -> None:
        self._code: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            _become(words, log)

    def poll(self) -> int | None:
        if self._code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self._code = os.waitstatus_to_exitcode(status) if pid else None
        return self._code

    def wait(self, timeout_s: float | None = None) -> int:
        if self._code is None:
            _, status = os.waitpid(self.pid, 0)
            self._code = os.waitstatus_to_exitcode(status)
        return self._code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class ForkedRun(Run):
    """A harness run whose roles are forked. Call `preload` first."""

    flags: tuple[str, ...] = ()  # more options, for every role

    def start(self, *names: str) -> None:
        for name in names or self.names():
            role, _, index = name.partition("-")
            words = [role, "--config", str(self.file), *(["--index", index] if index else []), *self.flags]
            self.processes[name] = Forked(words, self.log_folder / f"{name}.log")  # type: ignore[assignment]

    @property
    def log_folder(self) -> Path:
        """Beside the run's folder, whose disk may be full."""
        folder = self.dir.with_name(self.dir.name + "-logs")
        folder.mkdir(exist_ok=True)
        return folder

    def log(self, name: str) -> str:
        return (self.log_folder / f"{name}.log").read_text(errors="replace")


def _become(words: list[str], log: Path) -> NoReturn:
    """In the child: be `draftmill WORDS`, its output in `log`, dead when the parent is."""
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        for descriptor in (1, 2):
            os.dup2(output, descriptor)
        os.close(output)
        sys.argv = ["draftmill", *words]
        from services.cli import main

        main()
    except BaseException:  # noqa: BLE001 - the child must never return into the parent's code
        traceback.print_exc()
    sys.stderr.flush()
    os._exit(70)
