"""Calls that a peer can hold for ever, made by a thread that the caller can leave behind.

torch's store has no limit on the wait for an answer, and a communicator none on the wait for its peers:
a host that is frozen or cut off, whose connection nobody closes, keeps such a call for as long as it likes.

    caller   do(call) ---> waits, and asks every SLICE_S whether the answer is still wanted ---> GroupBroken
    thread        call ------------------------------------- held by a peer, until its connection ends

A thread that was left behind is not joined and takes no more calls; it ends with the call that holds it.
What that call reads and writes must be its own: it may go on at any time. A process that may hold such a
thread ends by os._exit, as roles do: one that wakes in an interpreter that is taken down aborts the process.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, TypeVar

from protocol.errors import GroupBroken

SLICE_S = 0.2  # how often a caller looks whether it still wants an answer

T = TypeVar("T")


class _Call:
    """One call and how it ended."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._call: Callable[[], Any] | None = call
        self.done = threading.Event()
        self.result: Any = None
        self.error: BaseException | None = None

    def make(self) -> None:
        call, self._call = self._call, None
        assert call is not None, "a call is made once"
        try:
            self.result = call()
        except BaseException as error:  # noqa: BLE001 - it is the caller's
            self.error = error
        del call  # what it holds is the caller's alone, before that goes on
        self.done.set()


class LeavableThread:
    """Makes calls one after the other, for one caller."""

    def __init__(self, name: str) -> None:
        self._calls: SimpleQueue[_Call | None] = SimpleQueue()
        self._left = False
        threading.Thread(target=_make_all, args=(self._calls,), name=name, daemon=True).start()

    def do(self, call: Callable[[], T], wanted: Callable[[], bool], limit_s: float | None = None) -> T:
        """What `call` returns or raises.

        Raises:
            GroupBroken: no longer `wanted`, or not done after `limit_s`; now, or at an earlier call. Time in
                which this process itself is stopped does not count.
        """
        if self._left:
            raise GroupBroken("an earlier call to a member was left unanswered")
        made, waited_s = _Call(call), 0.0
        self._calls.put(made)
        while not made.done.wait(SLICE_S):
            waited_s += SLICE_S
            if not wanted():
                self._leave("the orders ask for another generation; a member did not answer")
            if limit_s is not None and waited_s >= limit_s:
                self._leave(f"a member did not answer for {limit_s:.0f} s")
        error, made.error = made.error, None
        if error is not None:
            try:
                raise error
            finally:
                del error  # nothing that the call held outlives the handler, in a cycle with a traceback
        return made.result

    def _leave(self, why: str) -> None:
        self._left = True
        self._calls.put(None)
        raise GroupBroken(why)

    def __del__(self) -> None:
        self._calls.put(None)


def _make_all(calls: SimpleQueue[_Call | None]) -> None:
    while (call := calls.get()) is not None:
        call.make()
        del call  # not kept while the thread waits for the next one
