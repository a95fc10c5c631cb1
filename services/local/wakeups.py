"""Wait for time, a child's end or a signal, whichever comes first; nothing is polled.

CPython writes the number of each signal it catches into a socket of ours (signal.set_wakeup_fd), and
a wait is a select on it. SIGCHLD needs a handler to be caught at all.
"""

from __future__ import annotations

import select
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager


class Wakeups:
    """See the module's docstring; made by `wakeups`."""

    def __init__(self, reader: socket.socket) -> None:
        self._reader = reader

    def wait(self, timeout_s: float) -> None:
        """Return after `timeout_s` seconds or a signal, also one that came since the last call."""
        readable, _, _ = select.select([self._reader], [], [], max(0.0, timeout_s))
        if readable:
            self._reader.recv(4096)


@contextmanager
def wakeups() -> Iterator[Wakeups]:
    """Main thread only. Handlers for other signals are the caller's."""
    reader, writer = socket.socketpair()
    reader.setblocking(False)
    writer.setblocking(False)
    before = signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
    descriptor = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    try:
        yield Wakeups(reader)
    finally:
        signal.set_wakeup_fd(descriptor)
        signal.signal(signal.SIGCHLD, before)
        reader.close()
        writer.close()
