"""A trace of a role's next seconds, on request, while it works: `draftmill status --trace target-0`.

    thread trace      a request? -> prepare -> ............................... -> write aside, rename
    compute thread    turn: nothing  turn: start ... turn: not yet ... turn: stop

The profiler is started and stopped by the thread whose work is wanted, between two pieces of it. It then has
the operators of that thread and of its backward passes, and on a GPU every kernel and copy of the process.
`profile_all_threads`, started from anywhere, would have those of the other threads as well, but frees its
buffers under operators that still run: with PyTorch 2.13 and three busy threads the heap was corrupt within
seconds (pytorch/pytorch#187483).

Until somebody asks it costs a look for a file once a second and 0.1 us a turn. At the end PyTorch holds the
interpreter for some 5 us an event, and takes 1.5 KB of memory and 250 bytes of trace for each. So a quarter
of a second is recorded first, and tells how many seconds stay below MOST_BYTES: some 800,000 events, 4 s of
silence, far below coordinator.silence_s. Measured on one core of a CPU.
"""

from __future__ import annotations

import gzip
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from protocol.errors import DecodeError
from protocol.files import FILE_MODE, write_durably
from protocol.traces import Request, take

log = logging.getLogger(__name__)

PERIOD_S = 1.0
PROBE_S = 0.25
MOST_BYTES = 200e6  # of the trace before it is compressed
LAST_TRACE_S = 5.0  # a trace under way may take this long when the process leaves


def span(name: str) -> AbstractContextManager[object]:
    """Names what is done inside, for a trace; 0.2 us when none is recorded in this thread."""
    return record_function(name) if torch.autograd._profiler_enabled() else nullcontext()


class Tracer:
    """Answers the requests for one role; `role` names it ("target-0"), or "" while it has no place."""

    def __init__(self, run_dir: Path, role: Callable[[], str], device: torch.device) -> None:
        self._run_dir, self._role, self._device = run_dir, role, device
        self._recording: _Recording | None = None
        self._change = threading.Lock()
        self._over = False
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="trace", daemon=True)

    def start(self) -> None:
        self._thread.start()

    # ---- compute thread -----------------------------------------------------------------------

    def turn(self) -> None:
        """Between two pieces of work, and now and then while there is none."""
        recording = self._recording
        if recording is not None and not recording.done.is_set():
            recording.turn()

    @contextmanager
    def working(self) -> Iterator[None]:
        """All of the thread's work is inside: what is being recorded ends with it."""
        try:
            yield
        finally:
            with self._change:
                self._over = True
                if self._recording is not None:
                    self._recording.end()

    # ---- main thread --------------------------------------------------------------------------

    def close(self) -> None:
        """After the compute thread's work. A trace under way is still written, if that does not take long."""
        self._closing.set()
        self._thread.join(LAST_TRACE_S)

    # ---- thread trace -------------------------------------------------------------------------

    def _watch(self) -> None:
        while not self._closing.wait(PERIOD_S):
            try:
                role = self._role()
                request = take(self._run_dir, role) if role else None
                if request is not None:
                    self._answer(request)
            except (DecodeError, OSError) as error:  # nothing of it may end a run
                log.warning("no trace", extra={"error": str(error)})

    def _answer(self, request: Request) -> None:
        try:
            self._trace(request)
        except Exception as error:  # whatever a profiler raises is told to who asked
            log.warning("no trace", exc_info=error)
            write_durably(request.error, (str(error) or type(error).__name__).encode())

    def _trace(self, request: Request) -> None:
        folder, name = request.trace.parent, request.trace.name
        for left in folder.glob(f".{request.role}-*"):  # of a process that died while it recorded
            left.unlink()
        raw, packed = folder / f".{name}.raw", folder / f".{name}"
        log.info("tracing", extra={"request_s": request.seconds})
        try:
            self._record(PROBE_S).save(raw)
            seconds = min(request.seconds, MOST_BYTES / max(1, raw.stat().st_size) * PROBE_S)
            recording = self._record(seconds)
            recording.save(raw)
            with raw.open("rb") as source, gzip.open(packed, "wb", compresslevel=3) as sink:
                shutil.copyfileobj(source, sink, 1 << 20)
            packed.chmod(FILE_MODE)
            packed.rename(request.trace)
        finally:
            raw.unlink(missing_ok=True)
            packed.unlink(missing_ok=True)
        log.info("traced", extra={"trace": str(request.trace), "seconds": round(recording.took_s, 2)})

    def _record(self, seconds: float) -> _Recording:
        """RuntimeError: the profiler refused, or the compute thread has ended before it began."""
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # threads begin on device 0
        recording = _Recording(self._device, seconds)
        with self._change:
            if self._over:
                raise RuntimeError("the role is leaving")
            self._recording = recording
        recording.done.wait()
        self._recording = None
        if recording.failure is not None:
            raise recording.failure
        return recording


class _Recording:
    """One profile: made in one thread, started and stopped by the turns of another."""

    def __init__(self, device: torch.device, seconds: float) -> None:
        activities = [ProfilerActivity.CPU]
        if device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        config = torch._C._profiler._ExperimentalConfig()
        if hasattr(config, "trace_only"):  # a quarter of the time that stopping takes otherwise
            config.trace_only = True
        # acc_events changes nothing for a profile that records once, and PyTorch 2.11 warns of all without it
        self._profile = profile(activities=activities, experimental_config=config, acc_events=True)
        self._profile.prepare_trace()  # the first of a process takes seconds: not the compute thread's
        self._seconds, self._begun_s = seconds, 0.0
        self.took_s = 0.0
        self.failure: Exception | None = None
        self.done = threading.Event()

    def turn(self) -> None:
        """In the compute thread: start, go on, or stop."""
        try:
            if not self._begun_s:
                self._profile.start_trace()
                self._begun_s = time.monotonic()
            elif time.monotonic() - self._begun_s >= self._seconds:
                self._stop()
        except Exception as error:  # noqa: BLE001 - told to who asked; no trace is worth the role
            self._fail(error)

    def end(self) -> None:
        """In the compute thread: it has no more turns."""
        if self.done.is_set():
            return
        if not self._begun_s:
            self._fail(RuntimeError("the role is leaving"))
            return
        try:
            self._stop()
        except Exception as error:  # noqa: BLE001 - told to who asked; no trace is worth the role
            self._fail(error)

    def save(self, path: Path) -> None:
        """As JSON, into a file that only this user can read."""
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, FILE_MODE))
        self._profile.export_chrome_trace(str(path))

    def _stop(self) -> None:
        self.took_s = time.monotonic() - self._begun_s
        self._profile.stop_trace()
        self.done.set()

    def _fail(self, error: Exception) -> None:
        self.failure = error
        self.done.set()
