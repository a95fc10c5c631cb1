"""A role's side of the control plane: one thread that owns all sockets of the process.

The role's threads never touch a socket. They read the newest orders, replace the report, hand over
packs and wait for change; the thread "link" keeps both levels fresh: a report goes out at once after
it is replaced and again every heartbeat, orders replace older orders. It costs nothing while idle
(one poll per heartbeat) and about 0.1 ms a message.

    Link --- DEALER ---> coordinator        Hello, *Report, Bye / Welcome, Who, *Orders, Exit
         --- DEALER ---> drafter inboxes    Pack (targets)
         <-- ROUTER ---  inbox              Pack (drafters)
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import zmq

from protocol.codec import decode, encode
from protocol.errors import DecodeError, DraftmillError, Fenced, PeerGone
from protocol.keys import load_client_keys
from protocol.messages import (
    Bye,
    DrafterHello,
    DrafterOrders,
    DrafterReport,
    Exit,
    Message,
    Pack,
    TargetHello,
    TargetOrders,
    TargetReport,
    Welcome,
    Who,
)
from protocol.sockets import dealer, new_context, router
from services.config.schema import Config
from services.lifecycle import control_endpoint

log = logging.getLogger(__name__)

INBOXES_KEPT = 32  # sockets to inboxes; drafters restart under new ones
PACK_PATIENCE_S = 5.0  # a pack that its inbox does not take for this long is forgotten; it is leased anew


class Link:
    """Levels in, levels out. All public methods may be called from any thread."""

    def __init__(
        self,
        endpoint: str,
        hello: TargetHello | DrafterHello,
        *,
        heartbeat_s: float = 1.0,
        inbox: str | None = None,
        patience_s: float = 60.0,
        absence_s: float = 300.0,
        keys: Any = None,
        insecure: bool = False,
    ) -> None:
        """`hello` is repeated under fresh sequence numbers; `inbox` (ipc://) is bound for a drafter.

        Without a Welcome within `patience_s`, and later when no coordinator could be reached for
        `absence_s`, the role is told to leave: there may be no run any more.
        """
        self._hello, self._heartbeat_s = hello, heartbeat_s
        self._patience_s, self._absence_s = patience_s, absence_s
        self._started_s = self._reached_s = time.monotonic()
        self._deserted = False
        self._context = new_context()
        self._inbox = router(self._context, inbox) if inbox else None
        self._control = dealer(self._context, endpoint, keys=keys, insecure=insecure)
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._change = threading.Condition()
        self._version = 0
        self._welcome: Welcome | None = None
        self._orders: TargetOrders | DrafterOrders | None = None
        self._exit: Exit | None = None
        self._packs: deque[Pack] = deque()
        self._outgoing: deque[tuple[str, Pack, float]] = deque()
        self._inventory: dict[str, Any] | None = None
        self._dirty = False
        self._seq = 0
        self._bye: str | None = None
        self._failure: BaseException | None = None
        self._peers: dict[str, zmq.Socket[bytes]] = {}
        self._thread = threading.Thread(target=self._run, name="link", daemon=True)

    @classmethod
    def of_run(cls, config: Config, hello: TargetHello | DrafterHello, *, inbox: str | None = None) -> Link:
        """As the run's options say. ConfigError for keys that are missing, open to others or malformed."""
        options = config.coordinator
        return cls(
            control_endpoint(config),
            hello,
            heartbeat_s=options.heartbeat_s,
            inbox=inbox,
            patience_s=options.silence_s,
            absence_s=config.watch.stuck_s,
            keys=load_client_keys(Path(options.keys)) if options.keys else None,
            insecure=options.insecure,
        )

    # ---- for the role -------------------------------------------------------------------------

    def start(self) -> Link:
        self._started_s = self._reached_s = time.monotonic()
        self._thread.start()
        return self

    @property
    def orders(self) -> TargetOrders | DrafterOrders | None:
        """The newest level of this incarnation's orders; None before the first."""
        return self._orders

    @property
    def index(self) -> int | None:
        """The place in the run: the one given, else the one asked for."""
        return self._welcome.index if self._welcome else self._hello.index

    @property
    def exit(self) -> Exit | None:
        return self._exit

    def why_refused(self) -> DraftmillError:
        """The error for an exit that is not the run's end: PeerGone without a coordinator, else Fenced."""
        reason = self._exit.reason if self._exit else "not sent away"
        if self._deserted:
            return PeerGone(reason)
        return Fenced(f"the coordinator sent this {self._hello.role} away: {reason}")

    def _no_answer(self) -> str:
        return f"no coordinator answered within {self._patience_s:g} s; is it running?"

    @property
    def place(self) -> str:
        """As a person names the role: "target-0"; "" while it has no place."""
        return "" if self.index is None else f"{self._hello.role}-{self.index}"

    @property
    def version(self) -> int:
        return self._version

    @property
    def failed(self) -> bool:
        """Its thread has ended: orders stay as they are. `wait` and `report` raise why."""
        return self._failure is not None

    def wait(self, seen_version: int, timeout_s: float | None = None) -> int:
        """Block until anything (orders, packs, exit, `wake`) is newer than `seen_version`."""
        with self._change:
            self._change.wait_for(lambda: self._version != seen_version or self._failure, timeout_s)
            self._raise_failure()
            return self._version

    def wake(self) -> None:
        """Make `wait` return: another thread of the role has news."""
        with self._change:
            self._version += 1
            self._change.notify_all()

    def report(self, **inventory: Any) -> None:
        """Replace the level: the report's fields except incarnation and seq. Sent at once."""
        with self._change:
            self._raise_failure()
            self._inventory, self._dirty = inventory, True
            self._ring()

    def publish(self, inbox: str, pack: Pack) -> None:
        """Send a pack into a drafter's inbox; a pack the inbox never takes is leased anew."""
        with self._change:
            self._outgoing.append((inbox, pack, time.monotonic() + PACK_PATIENCE_S))
            self._ring()

    def take_packs(self) -> list[Pack]:
        with self._change:
            packs = list(self._packs)
            self._packs.clear()
        return packs

    def close(self, reason: str) -> None:
        """Say Bye and stop the thread; at most 1 s is spent on delivering it."""
        with self._change:
            self._bye = reason
            self._ring()
        if self._thread.is_alive():
            self._thread.join(timeout=5.0)

    def _ring(self) -> None:
        """Wake the thread, if it still listens. Hold `_change`."""
        if self._wake_fd >= 0:
            os.eventfd_write(self._wake_fd, 1)

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    # ---- the thread ---------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._loop()
        except BaseException as error:  # handed to the role's own thread, which raises it
            log.exception("link failed")
            with self._change:
                self._failure = error
                self._change.notify_all()
        finally:
            self._close_sockets()

    def _loop(self) -> None:
        poller = zmq.Poller()
        poller.register(self._control, zmq.POLLIN)
        poller.register(self._wake_fd, zmq.POLLIN)
        if self._inbox:
            poller.register(self._inbox.socket, zmq.POLLIN)
        next_beat_s = 0.0
        while self._bye is None:
            now_s = time.monotonic()
            if now_s >= next_beat_s:
                self._beat()
                next_beat_s = now_s + self._heartbeat_s
            wait_s = min(next_beat_s - time.monotonic(), 0.005 if self._outgoing else 60.0)
            ready = dict(poller.poll(max(0, int(wait_s * 1000) + 1)))
            if self._wake_fd in ready:
                os.eventfd_read(self._wake_fd)
            self._receive(self._control, self._from_coordinator)
            if self._inbox:
                self._receive(self._inbox.socket, self._from_target, skip=1)
            self._send_packs()
            if self._dirty:
                self._send_report()
        self._say(Bye(incarnation=self._hello.incarnation, seq=self._next_seq(), reason=self._bye))

    def _beat(self) -> None:
        now_s = time.monotonic()
        if self._welcome is None and now_s - self._started_s > self._patience_s:
            self._desert(self._no_answer())
        elif now_s - self._reached_s > self._absence_s:
            self._desert(f"no coordinator was reached for {self._absence_s:g} s; the run may be over")
        if self._welcome is None or self._inventory is None:
            self._say_hello()  # a member that still loads its model is not silent
        else:
            self._dirty = True

    def _desert(self, reason: str) -> None:
        self._deserted = True
        self._from_coordinator(Exit(incarnation=self._hello.incarnation, finished=False, reason=reason))

    def _receive(
        self, socket: zmq.Socket[bytes], handle: Callable[[Message], None], *, skip: int = 0
    ) -> None:
        """Drain `socket`. What is no message, or not for us, is dropped."""
        while True:
            try:
                frames = socket.recv_multipart(zmq.NOBLOCK)[skip:]
            except zmq.Again:
                return
            try:
                handle(decode(frames))
            except DecodeError as error:
                log.warning("refused a message", extra={"error": str(error)})

    def _from_coordinator(self, message: Message) -> None:
        incarnation = self._hello.incarnation
        if isinstance(message, Who):
            self._say_hello()
            return
        if getattr(message, "incarnation", None) != incarnation:
            return
        with self._change:
            if isinstance(message, Welcome):
                self._welcome = message
                self._dirty = self._inventory is not None
            elif isinstance(message, Exit):
                self._exit = message
            elif isinstance(message, TargetOrders | DrafterOrders):
                if self._orders is not None and message.stamp <= self._orders.stamp:
                    return
                self._orders = message
            self._version += 1
            self._change.notify_all()

    def _from_target(self, message: Message) -> None:
        if not isinstance(message, Pack):
            return
        with self._change:
            self._packs.append(message)
            self._version += 1
            self._change.notify_all()

    def _send_packs(self) -> None:
        with self._change:
            waiting = [self._outgoing.popleft() for _ in range(len(self._outgoing))]
        now_s = time.monotonic()
        for inbox, pack, until_s in waiting:
            try:
                self._peer(inbox).send_multipart(encode(pack), zmq.NOBLOCK)
            except zmq.Again:  # not connected yet, or its queue is full
                if now_s < until_s:
                    with self._change:
                        self._outgoing.append((inbox, pack, until_s))

    def _peer(self, inbox: str) -> zmq.Socket[bytes]:
        if inbox not in self._peers:
            while len(self._peers) >= INBOXES_KEPT:
                self._peers.pop(next(iter(self._peers))).close(linger=0)
            self._peers[inbox] = dealer(self._context, inbox)
        return self._peers[inbox]

    def _send_report(self) -> None:
        with self._change:
            inventory, self._dirty = self._inventory, False
        if inventory is None or self._welcome is None:
            return
        kind = TargetReport if isinstance(self._hello, TargetHello) else DrafterReport
        report = kind(incarnation=self._hello.incarnation, seq=self._next_seq(), **inventory)
        self._say(report)  # unsent without a coordinator: the next heartbeat says it again

    def _say_hello(self) -> None:
        self._say(self._hello.model_copy(update={"seq": self._next_seq(), "index": self.index}))

    def _next_seq(self) -> int:
        self._seq += 1
        return self._seq

    def _say(self, message: Message) -> None:
        with contextlib.suppress(zmq.Again):  # no coordinator right now: the next level says it all again
            self._control.send_multipart(encode(message), zmq.NOBLOCK)
            self._reached_s = time.monotonic()

    def _close_sockets(self) -> None:
        self._control.close(linger=1000)
        if self._inbox:
            self._inbox.close()
        for peer in self._peers.values():
            peer.close(linger=0)
        self._context.term()
        with self._change:
            os.close(self._wake_fd)
            self._wake_fd = -1
