"""A thread whose caller waits for its calls, or leaves it behind with one."""

from __future__ import annotations

import threading
import weakref

import pytest

from protocol.errors import GroupBroken
from services.drafter import leavable
from services.drafter.leavable import LeavableThread

SECONDS = 20.0  # a deadline, not a wait


@pytest.fixture(autouse=True)
def short_slices(monkeypatch):
    monkeypatch.setattr(leavable, "SLICE_S", 0.01)


def yes() -> bool:
    return True


def no() -> bool:
    return False


class Kept:
    """Something that a call holds."""


def thread_named(name: str) -> threading.Thread:
    return next(thread for thread in threading.enumerate() if thread.name == name)


def test_what_a_call_returns_or_raises_is_the_callers():
    thread = LeavableThread("of this test")
    assert thread.do(lambda: 7, no) == 7, "who is answered at once is not asked what it wants"
    with pytest.raises(ZeroDivisionError):
        thread.do(lambda: 1 // 0, yes)
    assert thread.do(lambda: threading.current_thread().name, yes) == "of this test"


@pytest.mark.parametrize("raises", [False, True])
def test_nothing_of_an_ended_call_is_kept(raises):
    """A process group that is dropped closes its connections then, and not at the next call."""
    thread, kept = LeavableThread("of this test"), Kept()
    gone = weakref.ref(kept)

    def call(kept: Kept = kept) -> None:
        assert not raises, kept

    if raises:
        with pytest.raises(AssertionError):
            thread.do(call, yes)
    else:
        thread.do(call, yes)
    del kept, call
    assert gone() is None


def test_a_call_that_is_left_ends_alone_and_its_thread_with_it():
    thread, go_on, ended = LeavableThread("left behind"), threading.Event(), []
    answers = iter([True, True, False])
    with pytest.raises(GroupBroken, match="another generation"):
        thread.do(lambda: ended.append(go_on.wait(SECONDS)), lambda: next(answers))
    with pytest.raises(GroupBroken, match="earlier call"):
        thread.do(lambda: ended.append("made"), yes)
    worker = thread_named("left behind")
    go_on.set()
    worker.join(SECONDS)
    assert not worker.is_alive() and ended == [True]


def test_a_call_has_its_limit_whatever_is_wanted():
    thread, go_on = LeavableThread("limited"), threading.Event()
    with pytest.raises(GroupBroken, match="did not answer"):
        thread.do(lambda: go_on.wait(SECONDS), yes, limit_s=0.05)
    go_on.set()


def test_a_thread_ends_with_its_owner():
    thread = LeavableThread("owned")
    thread.do(lambda: None, yes)
    worker = thread_named("owned")
    del thread
    worker.join(SECONDS)
    assert not worker.is_alive()
