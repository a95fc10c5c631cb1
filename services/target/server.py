"""The target server: what is ordered becomes packs in slots, and drafters hear of them.

    main thread      orders -> board -> announcements, report          (never waits for a forward)
    thread forward   board -> gather -> launch -> copier               (never waits for the GPU)
    thread copier    wait -> check -> slot -> board                    (never touches a socket)
    thread link      owns the sockets                                  (services/link.py)
    thread trace     a trace of thread forward, on request             (services/tracer.py)

The board is the only shared state, behind one lock that nobody holds for long. Whoever changes it wakes the
main thread, which then says the whole level again. A thread that fails ends the process without a Bye and
without tidying up: the free lock is the message, and the arena file tells in which forward it died.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

import torch

from protocol.messages import Stamp, TargetOrders
from services.config.schema import Config
from services.data.batch import HostBatch, gather
from services.gpu_figures import GpuFigures, uuid_of
from services.lifecycle import (
    ExitCode,
    Watchdog,
    arena_folder,
    hold_lock,
    stop_on_signals,
    tidy_end,
)
from services.link import Link
from services.target.board import Board, Job, Outcome
from services.target.copier import Blame, Copier, Launched, Slabs
from services.target.forward import Cancelled, Slab
from services.target.profile import Totals
from services.target.start import Started, device_of, hello, open_slots, run_fingerprint, start
from services.tracer import Tracer, span
from services.transport.writer import SlotWriter
from services.window import Window

log = logging.getLogger(__name__)


def main(config: Config, incarnation: str, index: int | None = None) -> ExitCode:
    """Serve as target `index` (None: any vacant place) until the run ends or a signal stops it.

    Raises:
        ConfigError, ModelError, DataError: before the coordinator hears of this target.
        Fenced: the coordinator sent it away. PeerGone: none answered.
    """
    return join_run(config, start(config, device_of(config, index)), incarnation, index)


def join_run(config: Config, started: Started, incarnation: str, index: int | None) -> ExitCode:
    """Take the lock, make the arena, say Hello, serve; a clean end leaves no file behind."""
    folder = arena_folder(config)
    lock = hold_lock(folder, incarnation)
    writer = open_slots(config, started, folder, incarnation)
    link = Link.of_run(config, hello(writer, incarnation, index, run_fingerprint(config, started)))
    server = TargetServer(config, incarnation, started, writer, link, stop_on_signals(link.wake))
    with tidy_end(lock):
        return server.serve()


class TargetServer:
    """One target from its first Hello to its Bye."""

    def __init__(
        self,
        config: Config,
        incarnation: str,
        started: Started,
        writer: SlotWriter,
        link: Link,
        stop: threading.Event,
    ) -> None:
        self.config, self.link, self.stop = config, link, stop
        self.started, self.writer, self.forward = started, writer, started.forward
        self.board = Board(incarnation, writer.slots)
        self.totals = Totals()
        self.window = Window(config.profile.interval_s)
        self.gpu = GpuFigures(uuid_of(started.device))
        self.watchdog = Watchdog(config.watch.stuck_s)
        self.tracer = Tracer(config.run.dir, lambda: link.place, started.device)
        self.blame = Blame(writer)
        self.slabs = Slabs(started.slabs)
        self.copier = Copier(
            config,
            shape=started.shape,
            writer=writer,
            slabs=self.slabs,
            blame=self.blame,
            totals=self.totals,
            device=started.device,
            finish=self.finish,
        )
        self._change = threading.Condition()
        self._leaving = False
        self._failure: BaseException | None = None

    # ---- main thread --------------------------------------------------------------------------

    def serve(self) -> ExitCode:
        """The loop. Returns FINISHED or STOPPED; raises what a thread raised, and Fenced."""
        threads = [self._thread("forward", self._compute), self._thread("copier", self.copier.run)]
        self.link.start()
        self.watchdog.start()
        self.tracer.start()
        while self.link.exit is None and not self.stop.is_set():
            seen = self.link.version
            self._turn()
            self.link.wait(seen, self.config.coordinator.heartbeat_s)
            if self._failure is not None:
                raise self._failure
        return self._leave(threads)

    def _turn(self) -> None:
        """Follow the newest orders, announce what they want announced, report the inventory."""
        self.writer.check_file()
        orders = self.link.orders
        with self._change:
            for slot in self.board.obey(orders) if isinstance(orders, TargetOrders) else ():
                self.writer.invalidate(slot)
            for inbox, attempt, pack in self.board.announcements():
                self.link.publish(inbox, pack)
                self.board.announced(attempt, pack.lease)
            slots = self.board.report()
            if self.board.idle:
                self.watchdog.beat()
            self._change.notify_all()
        totals = self.totals.snapshot() | {"stale_orders_total": float(self.board.stale_orders)}
        self.link.report(orders=self.board.orders, totals=totals | self.gpu.read(), slots=slots)
        self.window.look(totals)

    def _leave(self, threads: list[threading.Thread]) -> ExitCode:
        """Release and unlink everything, then say Bye: what is unfinished is assigned again."""
        exit_ = self.link.exit
        reason = exit_.reason if exit_ else "stopped by a signal"
        log.info("leaving", extra={"reason": reason})
        with self._change:
            self._leaving = True
            self._change.notify_all()
        self.forward.cancel()
        self.copier.close()
        for thread in threads:
            thread.join()
        self.link.close(reason)
        self.writer.close()
        self.tracer.close()
        self.watchdog.stop()
        if exit_ is None:
            return ExitCode.STOPPED
        if not exit_.finished:
            raise self.link.why_refused()
        return ExitCode.FINISHED

    # ---- thread forward -----------------------------------------------------------------------

    def _compute(self) -> None:
        with self.tracer.working():
            while (job := self._take()) is not None:
                with span("gather"):
                    batch = gather(
                        self.started.data.of(job.batch.epoch),
                        job.samples,
                        edges=self.config.plan.bucket_edges,
                        vocabulary=self.started.shape.vocab_size,
                    )
                if not batch.documents:
                    self.finish(job.attempt, Outcome.without_rest(batch.skipped))
                elif not self._launch(job, batch):
                    return

    def _take(self) -> Job | None:
        """The next job, when there is one and a slot for it; None: the process is leaving."""
        while True:
            self.tracer.turn()  # not under the lock: to stop a trace may take a second
            with self._change:
                if self._leaving:
                    return None
                job = self.board.start()
                if job is not None:
                    self.link.wake()
                    return job
                with self.totals.phase("wait_slot" if self.board.starved else "wait_lease"):
                    self._change.wait()  # the main thread notifies once a heartbeat at least

    def _launch(self, job: Job, batch: HostBatch) -> bool:
        with self.totals.phase("ahead"):
            slab: Slab | None = self.slabs.take()
        if slab is None:
            return False
        self.blame.begin(job)
        try:
            with span("forward"):
                self.forward.run(batch, slab)
        except Cancelled:
            self.blame.end(job)
            return False
        except Exception as error:
            if not _of_the_gpu(error):  # what the host itself failed in is not what the GPU still computes
                self.blame.only(job)
            raise
        with self.totals.phase("ahead"):
            self.copier.submit(Launched(job, batch, slab))
        return True

    # ---- any thread ---------------------------------------------------------------------------

    def finish(self, attempt: Stamp, outcome: Outcome) -> None:
        """A computing batch is ready or failed: the main thread tells."""
        with self._change:
            for slot in self.board.finish(attempt, outcome):
                self.writer.invalidate(slot)
            self._change.notify_all()
        self.totals.add(skipped_total=len(outcome.skipped))
        self.watchdog.beat()
        self.link.wake()

    def _thread(self, name: str, run: Callable[[], None]) -> threading.Thread:
        def guarded() -> None:
            try:
                if self.started.device.type == "cuda":
                    torch.cuda.set_device(self.started.device)  # threads begin on device 0
                run()
            except BaseException as error:
                log.exception("thread failed", extra={"failed_thread": name})
                self._failure = error  # raised by the main thread
                self.link.wake()

        thread = threading.Thread(target=guarded, name=name, daemon=True)
        thread.start()
        return thread


def _of_the_gpu(error: Exception) -> bool:
    """Whether it may come from an older forward: a GPU's errors are told to whoever calls next."""
    return isinstance(error, torch.AcceleratorError) or "CUDA error" in str(error)
