"""The drafters' process group: sums of gradients, and a complete member's state for a newcomer.

One group per generation, on the store where its members meet (`meeting.py`); no global process group and
no pickle. A collective starts only when every member stands before it, by a verdict that is the same for
all. So nobody hangs in a collective for a rank that is still computing, and a collective that takes longer
than COLLECTIVE_S (gloo's) has lost a member:

    form: meet, connect -> [copy state to newcomers] -> (arrive -> start* -> finish)* -> close
      any step: a member died, the orders ask for another generation, a time limit -> GroupBroken

On a GPU members arrive before the backward pass of their last pack and start sums during it; on a CPU, where
sums would take the cores from it and a slow member would look like a lost one, after it.

A killed member closes its connections, which gloo reports in milliseconds. A frozen one, or one behind a
cut, closes nothing, and NCCL reports nothing in any case. Who waits for a member is out nevertheless
as soon as the orders no longer want this generation:

    store, connecting, copies    made by the meeting's thread, which is left behind (leavable.py)
    sums                         gloo's end after COLLECTIVE_S; a watcher thread aborts NCCL's
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from protocol.errors import GroupBroken, RetryError
from protocol.messages import StepTry
from services.drafter.leavable import SLICE_S
from services.drafter.meeting import Meeting, Wanted, broken

COLLECTIVE_S = 10.0  # all members have arrived: what lasts longer has lost one
BUCKET_ELEMENTS = 16 << 20  # of one collective: bounds its time


class TryLeft(RetryError):
    """A member's orders abandoned the try before all had arrived; the group itself is well."""


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


class GroupReducer:
    """A formed generation of two members or more.

    An `arrive` takes the last of two members on one host 0.18 ms, 0.07 of them for the meeting's thread.
    """

    def __init__(self, meeting: Meeting, device: torch.device, wanted: Wanted | None = None) -> None:
        """Connects all members.

        `wanted`: the meeting's, for waits that are nobody's progress: the watcher's, and those for an
        operation that has no limit of its own and must not look alive for ever.
        """
        self._meeting, self._wanted = meeting, wanted or meeting.wanted
        self._device, self._cuda = device, device.type == "cuda"
        self.overlaps = self._cuda
        self._works: list[Any] = []
        self._closed, self._aborted = threading.Event(), threading.Event()
        self._last = ""
        with broken("cannot connect the members"):
            self._process_group = self._leavable(lambda: _connect(meeting, device))
            if self._cuda:
                threading.Thread(target=self._watch, name="group-watch", daemon=True).start()
                self._sum_once()

    def _sum_once(self) -> None:
        """What NCCL puts off to a first collective is not to be done in a backward pass."""
        try:
            one = torch.ones(1, device=self._device)
            self._complete(lambda: self._process_group.allreduce([one]))
        except BaseException:
            self.close()
            raise

    def arrive(self, step_try: StepTry) -> None:
        what = "try/" + "-".join(map(str, step_try))
        with broken("a member was lost before the reduction"):
            if not self._meeting.gather(what, step_try):
                raise TryLeft(f"step try {tuple(step_try)} was abandoned before all members had arrived")
            if self._last:
                self._meeting.forget(self._last)
            self._last = what

    def start(self, tensor: Tensor) -> None:
        with self._reduction():
            for bucket in _buckets([tensor]):
                self._works.append(self._process_group.allreduce([bucket]))

    def finish(self) -> None:
        with self._reduction():
            while self._works:
                self._works.pop(0).wait()

    @contextmanager
    def _reduction(self) -> Iterator[None]:
        """After an error, too, nothing that was started goes on writing."""
        with broken("a member was lost in the reduction"):
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
        for bucket in _buckets(tensors):
            self._transfer(bucket.clone(), receiver, "send")

    def receive(self, tensors: Iterable[Tensor], source: int) -> None:
        """Overwrite `tensors` with the source's. GroupBroken: they are garbage now."""
        for bucket in _buckets(tensors):
            bucket.copy_(self._transfer(torch.empty_like(bucket), source, "recv"))

    def _transfer(self, passing: Tensor, peer: int, way: str) -> Tensor:
        """One bucket. If it is left behind it goes on with `passing`, which is nobody's weights."""
        with broken("a member was lost while its state was copied"):
            if not self._meeting.wanted(None):  # the bucket before has passed: that is progress
                raise GroupBroken("the orders ask for another generation")
            operation = getattr(self._process_group, way)
            self._complete(lambda: operation([passing], peer, 0))
        return passing

    def _complete(self, start: Callable[[], Any]) -> None:
        """Start an operation in the meeting's thread, on this thread's stream, and wait for its end."""
        stream = torch.cuda.current_stream(self._device) if self._cuda else None

        def complete() -> None:
            with torch.cuda.stream(stream):
                start().wait()
            if stream is not None:
                stream.synchronize()

        self._leavable(complete)
        self.confirm()

    def _leavable(self, call: Callable[[], Any]) -> Any:
        return self._meeting.thread.do(call, lambda: self._wanted(None))

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


def _buckets(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    for tensor in tensors:
        yield from tensor.view(-1).split(BUCKET_ELEMENTS)


def _connect(meeting: Meeting, device: torch.device) -> Any:
    """The backend itself, which torch's stubs leave untyped: allreduce, send, recv, abort.

    A member that dies or freezes meanwhile holds this call, and nothing ends it from outside.
    """
    rank, size = meeting.rank, len(meeting.names)
    store = dist.PrefixStore("group", meeting.store)
    if device.type == "cuda":
        return _connect_gpus(store, rank, size, device)
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._timeout = timedelta(seconds=COLLECTIVE_S)
    options._devices = [gloo.create_device(hostname=meeting.address)]
    return gloo(store, rank, size, options)


def _connect_gpus(store: dist.Store, rank: int, size: int, device: torch.device) -> Any:
    """One communicator, made now: torch would at the first sum, and one more for each pair that copies.

    While it is made nothing can abort it (pytorch/pytorch#103264), afterwards a watcher can. Blocking: the
    other kind hangs at times (#153960), and nothing tells when it is there (meta-pytorch/torchft#320).
    """
    # A lost peer must not end this process: by default torch's own watchdog would.
    os.putenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    os.putenv("TORCH_NCCL_ENABLE_MONITORING", "0")
    os.putenv("TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING", "0")  # copies come one by one here
    torch.cuda.set_device(device)  # threads begin on device 0
    options = dist.ProcessGroupNCCL.Options()
    options.config.blocking = 1
    nccl: Any = dist.ProcessGroupNCCL(store, rank, size, options)
    nccl.eager_connect_single_device(device)
    return nccl
