"""The coordinator process: receive, probe, decide, send. One loop, one socket, no GPU, no torch.

The loop wakes for every message and at least ten times a second. Locks of all members are probed
every 0.2 s (a death is known within that), silence is judged only after the sockets were drained,
and a stall of the coordinator itself is never held against anyone.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
import time
from contextlib import suppress
from pathlib import Path

import zmq

from protocol.arena import lock_name, read_computing, sweep
from protocol.codec import decode, encode
from protocol.errors import DecodeError
from protocol.files import FileLock, is_alive, private_folder, write_durably
from protocol.keys import load_server_keys
from protocol.messages import (
    Bye,
    DrafterHello,
    DrafterReport,
    Exit,
    Message,
    TargetHello,
    TargetReport,
)
from protocol.sockets import Router, new_context, router
from services.config.schema import Config
from services.coordinator.checkpoints import refuse_strangers, retire, sweep_unknown
from services.coordinator.coordinator import Coordinator
from services.coordinator.disk import disk_errors
from services.coordinator.evaluation import Evaluation
from services.coordinator.http import Board, StatusServer
from services.coordinator.ledger import Ledger
from services.coordinator.orders import OrderBook
from services.coordinator.sinks import StepLog
from services.coordinator.sizing import devices, identity_and_size
from services.coordinator.status import UploadState, arena_bytes, arena_space, snapshot
from services.coordinator.upload import Uploader
from services.data.training_data import TrainingData
from services.lifecycle import (
    ExitCode,
    Watchdog,
    arena_folder,
    control_endpoint,
    new_incarnation,
    stop_on_signals,
)
from services.place import forget_places

log = logging.getLogger(__name__)

POLL_MS = 100
PROBE_S = 0.2
STATUS_S = 0.25
STALL_S = 1.0
LEAVE_S = 15.0
"""How long a finished coordinator waits for its roles to leave before it leaves itself."""


class Server:
    """Sockets, locks, clock and files around a Coordinator."""

    def __init__(self, config: Config, core: Coordinator, control: Router, folder: Path) -> None:
        self._config, self.core, self._control, self._folder = config, core, control, folder
        self._orders = OrderBook(core, repeat_s=config.coordinator.heartbeat_s)
        self._checkpoints = config.run.dir / "checkpoints"
        self._routes: dict[str, bytes] = {}
        self._stop_asked = False
        self.board = Board(on_stop=self.ask_stop)
        self._started_s = self._last_s = time.monotonic()
        self._next_probe_s = self._next_status_s = self._next_exit_s = 0.0
        self._audit: tuple[int | None, int] | None = None
        self._steps = StepLog(config, here=core.here)
        self._evaluation = Evaluation(config.run.dir)
        upload = config.checkpoint.upload
        self._uploader = Uploader(upload, self._checkpoints) if upload else None

    def ask_stop(self) -> None:
        """From a signal handler or an HTTP thread."""
        self._stop_asked = True

    def run(self, watchdog: Watchdog, signalled: threading.Event) -> ExitCode:
        """To the run's end, and with watch.linger on to a signal, serving the last status until then."""
        while not self.core.done:
            self._turn(watchdog)
        code = self._see_off(watchdog)
        while self._config.watch.linger and not signalled.is_set():
            watchdog.beat()
            self._receive()
            self._show(self._now())
        self._steps.close()
        if self._uploader is not None:
            self._uploader.close()
        return code

    def _turn(self, watchdog: Watchdog) -> None:
        watchdog.beat()
        self._receive()
        now_s = self._now()
        if self._stop_asked:
            self.core.stop()
        self._probe_locks(now_s)
        self._judge_silence(now_s)
        self.core.decide(now_s)
        self._send(now_s)
        self._show(now_s)

    def _now(self) -> float:
        """The clock; a gap between two turns is the coordinator's own stall."""
        now_s = time.monotonic()
        if now_s - self._last_s > STALL_S:
            self.core.forgive(now_s - self._last_s)
        self._last_s = now_s
        return now_s

    # ---- in -----------------------------------------------------------------------------------

    def _receive(self) -> None:
        """Wait for a message, then drain the socket."""
        if not self._control.socket.poll(POLL_MS):
            return
        while True:
            try:
                sender, *frames = self._control.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                self._handle(sender, decode(frames))
            except DecodeError as error:
                self.core.record.refused_messages += 1
                log.debug("refused a message", extra={"error": str(error)})
            self._answer(sender)

    def _handle(self, sender: bytes, message: Message) -> None:
        now_s = time.monotonic()
        if isinstance(message, TargetHello | DrafterHello):
            self._probe_locks(now_s, at_once=True)
            if not self._lives(message.incarnation):
                self.core.record.refused_messages += 1  # a replay, or a process of another host's run
            elif self.core.hello(message, now_s):
                self._routes[message.incarnation] = sender
        elif isinstance(message, TargetReport | DrafterReport):
            if self.core.report(message, now_s):
                self._routes[message.incarnation] = sender
        elif isinstance(message, Bye):
            self.core.bye(message, now_s)
        else:
            self.core.record.refused_messages += 1

    def _answer(self, sender: bytes) -> None:
        for _, message in self.core.outbox:
            self._send_to(sender, message)
        self.core.outbox.clear()

    # ---- who lives ----------------------------------------------------------------------------

    def _lives(self, incarnation: str) -> bool:
        return is_alive(self._folder / lock_name(incarnation))

    def _probe_locks(self, now_s: float, *, at_once: bool = False) -> None:
        """A free lock is proof of death, whatever the last message said."""
        if now_s < self._next_probe_s and not at_once:
            return
        self._next_probe_s = now_s + PROBE_S
        names = {member.incarnation for member in self.core.members} | self.core.awaited
        for name in sorted(names):
            if not self._lives(name):
                self._lose(name, "its process died", now_s)

    def _lose(self, name: str, reason: str, now_s: float) -> None:
        """Fence, take the work back, then remove what it left in memory."""
        computing = read_computing(self._folder, name)
        self.core.lost(name, reason, now_s, computing=computing.batch if computing else None)
        self._routes.pop(name, None)
        self.sweep_checkpoints()
        swept = sweep(self._folder)
        if swept.freed_bytes:
            log.info("swept", extra={"bytes": swept.freed_bytes, "incarnations": sorted(swept.incarnations)})

    def _judge_silence(self, now_s: float) -> None:
        limit_s = self._config.coordinator.silence_s
        for name in self.core.members.silent(now_s, limit_s):
            self._lose(name, f"silent for more than coordinator.silence_s = {limit_s:g}", now_s)

    # ---- out ----------------------------------------------------------------------------------

    def _send(self, now_s: float) -> None:
        if self.core.recovering:
            return
        for orders in self._orders.pending(now_s):
            route = self._routes.get(orders.incarnation)
            if route is not None:
                self._send_to(route, orders)

    def _send_to(self, route: bytes, message: Message) -> None:
        try:
            self._control.socket.send_multipart([route, *encode(message)], zmq.NOBLOCK)
        except zmq.ZMQError as error:  # gone or stalled: levels are repeated, locks tell the rest
            log.debug("not sent", extra={"message_name": type(message).__name__, "error": str(error)})

    def _show(self, now_s: float) -> None:
        for metrics in self.core.record.take_metrics():
            self._steps.write(metrics.at, metrics.values)
        if now_s < self._next_status_s:
            return
        self._next_status_s = now_s + STATUS_S
        self._keep_checkpoints()
        self.board.snapshot = snapshot(
            self.core, name=self._config.run.dir.name, now_s=now_s, started_s=self._started_s,
            arena=arena_space(self._folder), audit=self._audit, upload=self._upload_state(),
            evaluation=self._evaluation.newest(),
        )  # fmt: skip
        self.board.unhealthy = self._unhealthy(now_s)

    def _keep_checkpoints(self) -> None:
        """Offer the newest to the upload, then retire the others, but for one that is being copied."""
        keep, busy = self._config.checkpoint.keep, ""
        if self._uploader is not None:
            self._uploader.offer([r.name for r in self.core.ledger.checkpoints() if r.at.step > 0][-keep:])
            busy = self._uploader.busy
        retire(self.core.ledger, self._checkpoints, keep=keep, busy=busy)

    def _upload_state(self) -> UploadState | None:
        up = self._uploader
        if up is None:
            return None
        up.look()
        return UploadState(up.pending, up.errors)

    def _finish_uploads(self, watchdog: Watchdog) -> None:
        """The last checkpoint is what a run is for: wait for its copy while there is one to hope for."""
        if self._uploader is None or self._config.watch.linger:
            return
        self._keep_checkpoints()
        self._uploader.hurry()
        while self._uploader.arriving:
            watchdog.beat()
            self._receive()
            self._show(self._now())
        if missing := self._uploader.pending:
            log.error("left with checkpoints that were not uploaded", extra={"checkpoints": missing})

    def _unhealthy(self, now_s: float) -> str:
        """ "" while the run progresses; a run that waits for roles to come is not stuck."""
        last_s = self.core.record.last_commit_s
        if self.core.failed_reason:
            return self.core.failed_reason
        if self.core.done:
            return ""
        if last_s is not None and now_s - last_s > self._config.watch.stuck_s:
            return f"no commit for {now_s - last_s:.0f} s"
        return ""

    def sweep_checkpoints(self) -> None:
        """Remove what drafters that died left half written or unrecorded."""
        gone = sweep_unknown(self.core.ledger, self._checkpoints, self._lives)
        if gone:
            log.info("swept checkpoints", extra={"checkpoints": gone})

    # ---- the end ------------------------------------------------------------------------------

    def _see_off(self, watchdog: Watchdog) -> ExitCode:
        """Tell every role to leave until its lock is free, then leave."""
        core, code = self.core, self._code()
        good = code != ExitCode.RUN_FAILED
        reason = core.failed_reason or ("finished" if core.finished else "stopped")
        deadline_s = time.monotonic() + LEAVE_S
        while time.monotonic() < deadline_s and self._roles_left():
            watchdog.beat()
            now_s = self._now()
            if now_s >= self._next_exit_s:
                self._next_exit_s = now_s + self._config.coordinator.heartbeat_s
                for name, route in self._routes.items():
                    self._send_to(route, Exit(incarnation=name, finished=good, reason=reason))
            self._receive()
            self._probe_locks(now_s)
            self._show(now_s)
        with suppress(OSError):  # for who asks during the uploads, which may outlast a full disk
            self._conclude()
        self._finish_uploads(watchdog)
        self._conclude()
        return code

    def _roles_left(self) -> bool:
        """Whether any role's process lives in the run's folder, fenced ones included."""
        return any(is_alive(lock) for lock in self._folder.glob("*-*.lock") if ".inbox" not in lock.name)

    def _code(self) -> ExitCode:
        if self.core.failed_reason:
            return ExitCode.RUN_FAILED
        return ExitCode.FINISHED if self.core.finished else ExitCode.STOPPED

    def _conclude(self) -> None:
        """The accounting of the whole run, from the ledger, to the log and to `run.dir/result.json`."""
        core, now_s = self.core, time.monotonic()
        lost, duplicated = core.ledger.audit(core.work.batches_per_epoch)
        self._audit = (lost if core.finished else None, duplicated)
        self._next_status_s = 0.0
        self._show(now_s)
        swept = sweep(self._folder)
        result = dict(self.board.snapshot or {})
        result |= {
            "failures": [{"batch": list(b), "reason": r} for b, r in core.ledger.failures()],
            "skipped": [{"batch": list(b), **skip.model_dump()} for b, skip in core.ledger.skips()],
            "arena_bytes_left": arena_bytes(self._folder),
        }
        write_durably(self._config.run.dir / "result.json", json.dumps(result, indent=1).encode())
        log.info(
            "accounting",
            extra={
                "samples": core.record.samples_total,
                "committed": result["samples_committed"],
                "failed": result["samples_failed"],
                "lost_batches": result["batches_without_outcome"],
                "duplicated_batches": result["batches_duplicated"],
                "swept_bytes": swept.freed_bytes,
                "arena_bytes_left": result["arena_bytes_left"],
            },
        )


def main(config: Config) -> ExitCode:
    """Run until finished, stopped or failed. AlreadyRunning, LedgerError and the like end it at start."""
    with disk_errors(config.run.dir):
        config.run.dir.mkdir(parents=True, exist_ok=True)
    data = TrainingData.open(config.data)
    identity, size = identity_and_size(config, data)
    with disk_errors(config.run.dir), FileLock(config.run.dir / "coordinator.lock"):
        ledger = Ledger(config.run.dir / "ledger.sqlite", identity)
        refuse_strangers(ledger, config.run.dir / "checkpoints")
        ledger.name_datasets(data.places)
        folder = private_folder(arena_folder(config))
        endpoint = control_endpoint(config)
        keys = load_server_keys(Path(config.coordinator.keys)) if config.coordinator.keys else None
        targets, drafters = devices(config)
        core = Coordinator(
            config, data, ledger, ledger.fingerprint, size,
            target_devices=targets, drafter_devices=drafters,
        )  # fmt: skip
        context = new_context()
        with router(context, endpoint, keys=keys, insecure=config.coordinator.insecure) as control:
            server = Server(config, core, control, folder)
            server.sweep_checkpoints()
            code = _serve(config, server, endpoint)
        context.term()
        ledger.close()
        _remove_if_empty(folder)
    return code


def _serve(config: Config, server: Server, endpoint: str) -> ExitCode:
    signalled = stop_on_signals(server.ask_stop)
    watchdog = Watchdog(config.watch.stuck_s).start()
    server.board.incarnation = new_incarnation("coordinator")
    web = StatusServer(server.board, config.coordinator.http_host, config.coordinator.http_port)
    where = {
        "http": web.url, "control": endpoint, "pid": os.getpid(),
        "host": socket.gethostname(), "incarnation": server.board.incarnation,
    }  # fmt: skip
    write_durably(config.run.dir / "coordinator.json", json.dumps(where).encode())
    log.info("serving", extra=where)
    try:
        return server.run(watchdog, signalled)
    finally:
        web.close()
        watchdog.stop()


def _remove_if_empty(folder: Path) -> None:
    """Leave nothing in memory: locks of the gone, then the folder unless a role still lives in it."""
    sweep(folder)
    forget_places(folder)
    for left in folder.glob("control*"):
        left.unlink(missing_ok=True)
    with suppress(OSError):  # a role is still there, or has just come
        folder.rmdir()
