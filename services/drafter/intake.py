"""Announced packs become tensors at hand, in a thread of its own: the step never waits for a copy.

    inbox -> open the slot -> (GPU: H2D on the reader's stream) -> verify -> at hand

Opening starts while the step computes or waits for its vote, so a pack counts as held only when it is
whole and checked. On a CPU features stay in the slot (zero copies) and the few integers are copied
before the check: a slot that is overwritten under an aborted try can then spoil nothing but floats.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from torch import Tensor

from protocol.errors import DecodeError, StalePack
from protocol.messages import DrafterOrders, Pack, Stamp
from services.link import Link
from services.transport.reader import PackTensors, SlotReader

log = logging.getLogger(__name__)

Opened = tuple[PackTensors, dict[str, Tensor]]
"""The mapped slot, which lives as long as its views, and its sections."""


class Intake:
    """Thread `intake`. `accept(attempt, lease)` is called there for each pack, and says whether to keep it.

    `lock` is the desk's: what the desk holds and what is at hand here change together under it.
    `open_s` counts the seconds from descriptor to checked tensors.
    """

    def __init__(
        self, link: Link, reader: SlotReader, lock: threading.RLock, accept: Callable[[Stamp, Stamp], bool]
    ) -> None:
        self._link, self._reader, self._lock, self._accept = link, reader, lock, accept
        self._packs: dict[Stamp, Opened] = {}
        self._closing = threading.Event()
        self._failure: BaseException | None = None
        self.stale_packs, self.open_s = 0, 0.0
        self._thread = threading.Thread(target=self._run, name="intake", daemon=True)

    def start(self) -> Intake:
        self._thread.start()
        return self

    @contextmanager
    def sections(self, attempt: Stamp) -> Iterator[dict[str, Tensor]]:
        """The tensors of a held pack, for use on the current stream. Raises what the thread raised.

        StalePack at the end: the arena was cut under the views, and what came of them is worthless.
        """
        self.check()
        with self._lock:
            pack, sections = self._packs[attempt]
        pack.wait()
        yield sections
        pack.confirm()

    def drop(self, attempts: Iterable[Stamp]) -> None:
        with self._lock:
            for attempt in attempts:
                self._packs.pop(attempt, None)

    def check(self) -> None:
        """Raise CorruptPack, or whatever else ended the thread."""
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        """Unmap everything. No tensor of `sections` may be used afterwards."""
        self._closing.set()
        self._link.wake()
        self._thread.join()
        self._packs.clear()
        self._reader.close()

    # ---- the thread ---------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._reader.use_device()
            while True:
                seen = self._link.version
                if self._closing.is_set():  # only now: a close from here on is newer than `seen`
                    return
                for pack in self._link.take_packs():
                    self._take(pack)
                orders = self._link.orders
                if isinstance(orders, DrafterOrders):
                    self._reader.keep(orders.arenas)
                self._link.wait(seen)
        except BaseException as error:  # noqa: BLE001 - the trainer's thread raises it
            self._failure = error
            self._link.wake()

    def _take(self, pack: Pack) -> None:
        attempt = pack.descriptor.attempt
        with self._lock:
            opened = self._packs.get(attempt)
            if opened is not None:  # announced again, under another lease
                self._keep(pack, opened)
                return
        begun_s = time.perf_counter()
        opened = self._open(pack)
        self.open_s += time.perf_counter() - begun_s
        if opened is not None:
            with self._lock:
                self._keep(pack, opened)

    def _keep(self, pack: Pack, opened: Opened) -> None:
        attempt = pack.descriptor.attempt
        self._packs[attempt] = opened
        if not self._accept(attempt, pack.lease):
            del self._packs[attempt]
        self._link.wake()

    def _open(self, pack: Pack) -> Opened | None:
        """None for a slot that does not hold the pack (any more): it is leased anew, or given up."""
        try:
            tensors = self._reader.open(pack.descriptor)
            sections = dict(tensors)
            if not sections["input_ids"].is_cuda:
                sections = {name: _own(tensor) for name, tensor in sections.items()}
            tensors.verify()
        except (StalePack, DecodeError) as error:
            self.stale_packs += 1
            log.warning("pack not taken", extra={"target": pack.target, "reason": str(error)})
            return None
        return tensors, sections


def _own(tensor: Tensor) -> Tensor:
    return tensor if tensor.is_floating_point() else tensor.clone()
