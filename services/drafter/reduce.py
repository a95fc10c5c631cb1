"""The drafters' process group: sums of gradients, and a complete member's state for a newcomer.

One group per generation, on a store that its first member hosts for it; no global process group and
no pickle. A collective starts only when every member stands before it: each counts itself in at the
store, and the last one's `go` (or the first one's `leave`, when the orders have changed meanwhile)
is the same verdict for all. So nobody hangs in a collective for a rank that is still computing, and a
collective that takes longer than COLLECTIVE_S (gloo's) has lost a member:

    form -> [copy state to newcomers] -> (arrive -> start* -> finish)* -> close
      any step: a member died, the orders ask for another generation, a time limit -> GroupBroken

On a GPU members arrive before the backward pass of their last pack and start sums during it; on a CPU, where
sums would take the cores from it and a slow member would look like a lost one, after it.

A killed member closes its connections, which gloo reports in milliseconds. NCCL reports nothing: a
watcher thread aborts its communicator once the orders no longer want this generation. A gather costs
two round trips to the store (0.1 ms on one host); a group of one costs nothing.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from protocol.errors import GroupBroken, RetryError
from protocol.messages import Group, StepAt, StepTry

COLLECTIVE_S = 10.0  # all members have arrived: what lasts longer has lost one
SLICE_S = 0.2  # how often the watcher of a GPU's group looks whether it is still wanted
POLL_S = 0.02  # the longest pause between two looks at the store
BUCKET_ELEMENTS = 16 << 20  # of one collective: bounds its time
GO, LEAVE = b"go", b"leave"

Wanted = Callable[[StepTry | None], bool]
"""Whether the newest orders still want this generation, and in it this try (None: whatever it does)."""


class TryLeft(RetryError):
    """A member's orders abandoned the try before all had arrived; the group itself is well."""


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


class Reducer(Protocol):
    """What a step needs of its group."""

    @property
    def overlaps(self) -> bool:
        """Whether sums may be started while the backward pass goes on."""

    def arrive(self, step_try: StepTry) -> None:
        """Wait until all members have: from then on each starts the same sums in the same order.

        Raises TryLeft, GroupBroken.
        """

    def start(self, tensor: Tensor) -> None:
        """Sum over the members, in place. Until `finish` the tensor is nobody else's.

        Raises GroupBroken: what was started since `arrive` is garbage, but no longer written to.
        """

    def finish(self) -> None:
        """Wait for all that was started; on a GPU its stream does, and `confirm` comes after.

        Raises GroupBroken.
        """

    def confirm(self) -> None:
        """After the wait: GroupBroken if the group was aborted, so that the sums are garbage."""

    def close(self) -> None:
        """Leave. Members that still wait for this one see GroupBroken."""


class LocalReducer:
    """A world of one: every sum is complete already."""

    overlaps = False

    def arrive(self, step_try: StepTry) -> None:
        pass

    def start(self, tensor: Tensor) -> None:
        pass

    def finish(self) -> None:
        pass

    def confirm(self) -> None:
        pass

    def close(self) -> None:
        pass


@contextmanager
def _broken(what: str) -> Iterator[None]:
    """Whatever torch.distributed raises (plain RuntimeErrors, all of them) is GroupBroken."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise GroupBroken(f"{what}: {str(error).splitlines()[0]}") from error


@dataclass(frozen=True)
class Meeting:
    """A generation's members at its store, before the process group exists."""

    rank: int
    names: tuple[str, ...]  # by rank
    store: dist.Store
    address: str  # of this host, as the store's host sees it
    wanted: Wanted

    def share(self, standing: Standing) -> list[Standing]:
        """Every member's standing, by rank. Waits for all, as long as the generation is wanted."""
        keys = [f"standing/{rank}" for rank in range(len(self.names))]
        with _broken("the store's host was lost"):
            self.store.set(keys[self.rank], standing.encode())
            if not _await_keys(self.store, keys, lambda: self.wanted(None)):
                raise GroupBroken("the orders ask for another generation")
            return [Standing.decode(self.store.get(key)) for key in keys]

    def gather(self, what: str, step_try: StepTry | None) -> bool:
        """Wait until all have arrived at `what`; False if somebody left first. The same answer for all.

        Keys of one `what` are never used again.
        """
        verdict = f"{what}/verdict"
        if self.store.add(f"{what}/count", 1) == len(self.names):
            return self.store.compare_set(verdict, "", GO.decode()) == GO
        if not _await_keys(self.store, [verdict], lambda: self.wanted(step_try)):
            return self.store.compare_set(verdict, "", LEAVE.decode()) == GO
        return self.store.get(verdict) == GO

    def forget(self, what: str) -> None:
        """Remove the keys of a gathering that all have left behind."""
        if self.rank == 0:
            self.store.delete_key(f"{what}/count")
            self.store.delete_key(f"{what}/verdict")


def _await_keys(store: dist.Store, keys: list[str], wanted: Callable[[], bool]) -> bool:
    """Wait for all `keys`; False once it is no longer wanted.

    Asks again and again: torch's own wait cannot be ended from outside, and complains on stderr at each of
    its timeouts. An arrival is noticed late by an eighth of the wait, and by 20 ms at most.
    """
    start_s, pause = time.monotonic(), threading.Event()
    while not store.check(keys):
        if not wanted():
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
    if store is None:
        with _broken("the store's host was lost"):
            store = dist.TCPStore(host, int(port), None, False, timedelta(seconds=COLLECTIVE_S), False)
    # Another group may have been quicker to listen on this port: in its store nobody answers to our names.
    own = dist.PrefixStore(f"{group.generation} {' '.join(names)}", store)
    return Meeting(rank, names, own, address, wanted)


def _host_store(host: str, port: int) -> dist.TCPStore:
    """Listens on that address only; torch by itself would listen on all."""
    try:
        listener = socket.create_server((host, port), family=_family(host))
    except OSError as error:
        raise GroupBroken(f"store {host}:{port} cannot be bound ({error}); another port is needed") from error
    return dist.TCPStore(
        host, port, None, True, timedelta(seconds=COLLECTIVE_S), False, master_listen_fd=listener.detach()
    )


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


class GroupReducer:
    """A formed generation of two members or more."""

    def __init__(self, meeting: Meeting, device: torch.device, wanted: Wanted | None = None) -> None:
        """`wanted`: the meeting's, as a watcher asks it whose waiting is nobody's progress."""
        self._meeting, self._wanted = meeting, wanted or meeting.wanted
        self._cuda = self.overlaps = device.type == "cuda"
        self._works: list[Any] = []
        self._closed, self._aborted = threading.Event(), threading.Event()
        self._last = ""
        with _broken("cannot connect the members"):
            self._process_group = _connect(meeting, device)
        if self._cuda:
            threading.Thread(target=self._watch, name="group-watch", daemon=True).start()

    def arrive(self, step_try: StepTry) -> None:
        what = "try/" + "-".join(map(str, step_try))
        with _broken("a member was lost before the reduction"):
            if not self._meeting.gather(what, step_try):
                raise TryLeft(f"step try {tuple(step_try)} was abandoned before all members had arrived")
            if self._last:
                self._meeting.forget(self._last)
            self._last = what

    def start(self, tensor: Tensor) -> None:
        with self._reduction():
            for bucket in tensor.view(-1).split(BUCKET_ELEMENTS):
                self._works.append(self._process_group.allreduce([bucket]))

    def finish(self) -> None:
        with self._reduction():
            while self._works:
                self._works.pop(0).wait()

    @contextmanager
    def _reduction(self) -> Iterator[None]:
        """After an error, too, nothing that was started goes on writing."""
        with _broken("a member was lost in the reduction"):
            try:
                yield
            except RuntimeError:
                for work in self._works:
                    with suppress(RuntimeError):
                        work.wait()
                self._works.clear()
                raise

    def send(self, tensors: Iterable[Tensor], receiver: int) -> None:
        """Give `receiver` a copy. GroupBroken, GPU and all, if it does not arrive."""
        self._transfer(tensors, lambda bucket: self._process_group.send([bucket], receiver, 0))

    def receive(self, tensors: Iterable[Tensor], source: int) -> None:
        """Overwrite `tensors` with the source's. GroupBroken: they are garbage now."""
        self._transfer(tensors, lambda bucket: self._process_group.recv([bucket], source, 0))

    def _transfer(self, tensors: Iterable[Tensor], start: Callable[[Tensor], Any]) -> None:
        with _broken("a member was lost while its state was copied"):
            for tensor in tensors:
                for bucket in tensor.view(-1).split(BUCKET_ELEMENTS):
                    start(bucket).wait()
            if self._cuda:
                torch.cuda.current_stream().synchronize()
        self.confirm()

    def confirm(self) -> None:
        if self._aborted.is_set():
            raise GroupBroken("the group was aborted: the orders ask for another generation")

    def close(self) -> None:
        self._closed.set()
        if self._cuda and not self._aborted.is_set():
            self._process_group.abort()
        self._process_group = None  # closes the connections: gloo's members see it at once

    def _watch(self) -> None:
        """Ends collectives that a lost member keeps stuck on the GPU."""
        while not self._closed.wait(SLICE_S):
            if not self._wanted(None):
                process_group = self._process_group  # `close` drops it as soon as the event is set
                self._aborted.set()
                if process_group is not None:
                    process_group.abort()
                return


def _connect(meeting: Meeting, device: torch.device) -> Any:
    """The backend itself, which torch's stubs leave untyped: allreduce, send, recv, abort."""
    rank, size = meeting.rank, len(meeting.names)
    store = dist.PrefixStore("group", meeting.store)
    if device.type == "cuda":
        # A lost peer must not end this process: by default torch's own watchdog would.
        os.putenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
        os.putenv("TORCH_NCCL_ENABLE_MONITORING", "0")
        return dist.ProcessGroupNCCL(store, rank, size, dist.ProcessGroupNCCL.Options())
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._timeout = timedelta(seconds=COLLECTIVE_S)
    options._devices = [gloo.create_device(hostname=meeting.address)]
    return gloo(store, rank, size, options)
