"""Where the members of a generation meet before its process group exists: a store that the first one hosts.

    meet -> share: who is complete, who takes whose state -> gather: a door that all pass, or none

At a door each counts itself in, and the last one's `go` (or the first one's `leave`, when the orders have
changed meanwhile) is the same verdict for all. Nothing is pickled: values are JSON, or a word.

A host that is frozen or cut off answers nothing and closes nothing, so every question to a store is asked
in a thread that can be left (`leavable.py`): a member is out within SLICE_S of its orders' change, and by
itself after ANSWER_S. A gather costs two round trips to the store; what it takes is at `GroupReducer`.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist

from protocol.errors import GroupBroken
from protocol.messages import Group, StepAt, StepTry
from services.drafter.leavable import SLICE_S, LeavableThread

ANSWER_S = 10.0  # a host whose store takes longer than this for an answer is lost
POLL_S = 0.02  # the longest pause between two looks at the store
GO, LEAVE = b"go", b"leave"

T = TypeVar("T")
Wanted = Callable[[StepTry | None], bool]
"""Whether the newest orders still want this generation, and in it this try (None: whatever it does)."""


class Standing(NamedTuple):
    """What a member brings into a group: its state, and whose state it is to take."""

    complete: StepAt | None
    adopt_from: str  # incarnation, or ""
    adopt_at: StepAt | None

    def encode(self) -> str:
        return json.dumps(self)

    @classmethod
    def decode(cls, text: bytes) -> Standing:
        complete, adopt_from, adopt_at = json.loads(text)
        return cls(complete and StepAt(*complete), adopt_from, adopt_at and StepAt(*adopt_at))


class Copy(NamedTuple):
    """One transfer of state, by rank."""

    source: int
    receiver: int


def plan_copies(names: Sequence[str], standings: Sequence[Standing]) -> list[Copy]:
    """Who sends to whom, worked out alike by every member: only from a source complete where it is wanted."""
    copies = []
    for receiver, standing in enumerate(standings):
        if standing.adopt_from in names and standing.complete != standing.adopt_at:
            source = names.index(standing.adopt_from)
            if standings[source].complete == standing.adopt_at:
                copies.append(Copy(source, receiver))
    return copies


@contextmanager
def broken(what: str) -> Iterator[None]:
    """Whatever torch.distributed raises (plain RuntimeErrors, all of them) is GroupBroken, but what a GPU
    raises is not: after an illegal access, or off the bus, it answers to no group.
    """
    try:
        yield
    except (torch.OutOfMemoryError, torch.AcceleratorError):
        raise
    except RuntimeError as error:
        raise GroupBroken(f"{what}: {str(error).splitlines()[0]}") from error


@dataclass(frozen=True)
class Meeting:
    """A generation's members at its store."""

    rank: int
    names: tuple[str, ...]  # by rank
    store: dist.Store  # only `thread` may ask it
    address: str  # of this host, as the store's host sees it
    wanted: Wanted
    thread: LeavableThread

    def share(self, standing: Standing) -> list[Standing]:
        """Every member's standing, by rank. Waits for all, as long as the generation is wanted."""
        keys = [f"standing/{rank}" for rank in range(len(self.names))]
        with broken("the store's host was lost"):
            self._ask(lambda: self.store.set(keys[self.rank], standing.encode()))
            if not self._await_keys(keys, None):
                raise GroupBroken("the orders ask for another generation")
            return self._ask(lambda: [Standing.decode(self.store.get(key)) for key in keys])

    def gather(self, what: str, step_try: StepTry | None) -> bool:
        """Wait until all have arrived at `what`; False if somebody left first. The same answer for all.

        Keys of one `what` are never used again. GroupBroken: the store was left without an answer.
        """
        store, verdict = self.store, f"{what}/verdict"

        def enter() -> bytes:
            last = store.add(f"{what}/count", 1) == len(self.names)
            return store.compare_set(verdict, "", GO.decode()) if last else b""

        said = self._ask(enter)
        if not said and not self._await_keys([verdict], step_try):
            said = self._ask(lambda: store.compare_set(verdict, "", LEAVE.decode()))
        return (said or self._ask(lambda: store.get(verdict))) == GO

    def forget(self, what: str) -> None:
        """Remove the keys of a gathering that all have left behind."""
        if self.rank == 0:
            self._ask(lambda: [self.store.delete_key(f"{what}/{key}") for key in ("count", "verdict")])

    def _ask(self, question: Callable[[], T]) -> T:
        return _ask(self.thread, question, self.wanted)

    def _await_keys(self, keys: list[str], step_try: StepTry | None) -> bool:
        """Wait for all `keys`; False once this try is no longer wanted.

        Asks again and again: torch's own wait complains on stderr at each of its timeouts. An arrival is
        noticed late by an eighth of the wait, and by 20 ms at most.
        """
        start_s, pause = time.monotonic(), threading.Event()
        while not self._ask(lambda: self.store.check(keys)):
            if not self.wanted(step_try):
                return False
            pause.wait(min(POLL_S, (time.monotonic() - start_s) / 8))
        return True


def meet(group: Group, incarnation: str, wanted: Wanted) -> Meeting:
    """Host the group's store (rank 0) or reach it. GroupBroken: no longer wanted, or cannot be bound."""
    members = sorted(group.members, key=lambda member: member.rank)
    names = tuple(member.incarnation for member in members)
    host, _, port = group.store.rpartition(":")
    if not port.isdigit():
        raise GroupBroken(f"group of {len(names)} with store {group.store!r}: it must name host:port")
    rank = names.index(incarnation)
    store = _host_store(host, int(port)) if rank == 0 else None
    address = _reach(host, int(port), wanted)
    thread = LeavableThread("group")
    if store is None:
        with broken("the store's host was lost"):
            store = _ask(thread, lambda: _store(host, int(port)), wanted)
    # Another group may have been quicker to listen on this port: in its store nobody answers to our names.
    own = dist.PrefixStore(f"{group.generation} {' '.join(names)}", store)
    return Meeting(rank, names, own, address, wanted, thread)


def _ask(thread: LeavableThread, question: Callable[[], T], wanted: Wanted) -> T:
    return thread.do(question, lambda: wanted(None), ANSWER_S)


def _store(host: str, port: int, listener: int | None = None) -> dist.TCPStore:
    """The store itself, on `listener`, or the way to it. Waits for no other member."""
    timeout = timedelta(seconds=ANSWER_S)
    return dist.TCPStore(
        host, port, None, listener is not None, timeout, wait_for_workers=False, master_listen_fd=listener
    )


def _host_store(host: str, port: int) -> dist.TCPStore:
    """Listens on that address only; torch by itself would listen on all."""
    try:
        listener = socket.create_server((host, port), family=_family(host))
    except OSError as error:
        raise GroupBroken(f"store {host}:{port} cannot be bound ({error}); another port is needed") from error
    return _store(host, port, listener.detach())


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _reach(host: str, port: int, wanted: Wanted) -> str:
    """Wait until the store listens; returns the local address of the way there."""
    pause = threading.Event()
    while wanted(None):
        try:
            with socket.create_connection((host, port), timeout=SLICE_S) as connection:
                return str(connection.getsockname()[0])
        except OSError:  # its host forms later, or the orders give up on it
            pause.wait(POLL_S)
    raise GroupBroken(f"store {host}:{port} was not reached before the orders changed")
