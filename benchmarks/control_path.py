"""The whole control path without tensors: a real coordinator process, real sockets, roles that do no work.

    idle    one pack every 20 ms: latency from Ready to the pack in the drafter's hands (p50, p99)
    full    as fast as it goes: batches a second from assignment to commit

The roles use the real decision classes (Board, Desk) and the real Link, each in a process of its own as in a
run; a "forward" and a "training step" take no time. `python benchmarks/control_path.py [--out FILE]`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import platform
import statistics
import sys
import tempfile
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "process"))

from harness import Run, write_data, write_model

from protocol.files import FileLock
from protocol.messages import (
    PROTOCOL_VERSION,
    Descriptor,
    DrafterHello,
    DrafterOrders,
    Saved,
    Stamp,
    StepMetrics,
    TargetHello,
    TargetOrders,
    Vote,
)
from services.config.fingerprint import identity_sha256
from services.coordinator.sizing import identity_and_size
from services.data.training_data import TrainingData
from services.drafter.desk import Commit, Desk, Discard, Form, Learn, Load, Reduce, Save
from services.lifecycle import arena_folder, control_endpoint, hold_lock
from services.link import Link
from services.target.board import Board, Outcome

IDLE_PAUSE_S = 0.02


class FakeTarget(threading.Thread):
    """Every batch is ready at once, or `pause_s` after the one before."""

    def __init__(self, run: Run, fingerprint: str, slot_bytes: int, pause_s: float) -> None:
        super().__init__(name="target", daemon=True)
        self.name_, self.pause_s = "target-benchmark", pause_s
        hello = TargetHello(
            incarnation=self.name_, seq=0, protocol=PROTOCOL_VERSION, fingerprint=fingerprint, host="here",
            index=0, arena="none.arena", slots=16, slot_bytes=slot_bytes,
        )  # fmt: skip
        self.link = Link(control_endpoint(run.config), hello).start()
        self.board = Board(self.name_, 16)
        self.ready_s: dict[Stamp, float] = {}
        self._pause = threading.Event()
        self._change = threading.Condition()

    def run(self) -> None:
        threading.Thread(target=self._compute, name="forward", daemon=True).start()
        while self.link.exit is None:
            seen = self.link.version
            with self._change:
                if isinstance(self.link.orders, TargetOrders):
                    self.board.obey(self.link.orders)
                for inbox, attempt, pack in self.board.announcements():
                    self.link.publish(inbox, pack)
                    self.board.announced(attempt, pack.lease)
                slots = self.board.report()
                self._change.notify_all()
            self.link.report(orders=self.board.orders, totals={}, slots=slots)
            self.link.wait(seen, 1.0)
        self.link.close("done")

    def _compute(self) -> None:
        """As a target's forward and copier: beside the thread that follows orders."""
        while True:
            with self._change:
                while (job := self.board.start()) is None:
                    self._change.wait()
            self._pause.wait(self.pause_s)
            descriptor = Descriptor(
                arena="none.arena", slot=job.slot, batch=job.batch, attempt=job.attempt, tokens=64,
                payload_bytes=64, checksum=None, sections=(),
            )  # fmt: skip
            with self._change:
                self.board.finish(job.attempt, Outcome(descriptor, (), ""))
                self.ready_s[job.attempt] = time.perf_counter()
            self.link.wake()


class FakeDrafter(threading.Thread):
    """Follows its desk; every action succeeds at once."""

    def __init__(self, run: Run, fingerprint: str) -> None:
        super().__init__(name="drafter", daemon=True)
        self.name_ = "drafter-benchmark"
        inbox = f"ipc://{arena_folder(run.config).resolve()}/{self.name_}.inbox"
        hello = DrafterHello(
            incarnation=self.name_, seq=0, protocol=PROTOCOL_VERSION, fingerprint=fingerprint, host="here",
            index=0, inbox=inbox,
        )  # fmt: skip
        self.link = Link(control_endpoint(run.config), hello, inbox=inbox).start()
        self.desk = Desk(self.name_)
        self.got_s: dict[Stamp, float] = {}

    def run(self) -> None:
        while self.link.exit is None:
            seen = self.link.version
            for pack in self.link.take_packs():
                self.got_s.setdefault(pack.descriptor.attempt, time.perf_counter())
                self.desk.take_pack(pack.descriptor.attempt, pack.lease)
            if isinstance(self.link.orders, DrafterOrders):
                self.desk.take_orders(self.link.orders)
            while self._act():
                pass
            self.link.report(totals={}, **self.desk.level())
            self.link.wait(seen, 1.0)
        self.link.close("done")

    def _act(self) -> bool:
        desk = self.desk
        match desk.next_action():
            case Load(adopt):
                desk.loaded(adopt.at)
            case Form(group):
                desk.formed(group.generation if group else None)
            case Learn(pack):
                desk.learned(pack)
            case Reduce(step_try, packs):
                desk.voted(Vote(step_try=step_try, packs=packs, bad_positions=(), gradient_finite=True))
            case Commit(step_try):
                desk.committed(StepMetrics(at=(step_try.timeline, step_try.step + 1), values={}))
            case Discard():
                desk.discarded()
            case Save(at):
                desk.saving(at)
                desk.saved(Saved(at=at, name=f"ckpt-{at.timeline}-{at.step}-none", sha256="0" * 64))
            case _:
                return False
        return True


def drive_drafter(run: Run, fingerprint: str, to: Connection) -> None:
    """In a process of its own: a drafter to the run's end, then when it got which attempt.

    `perf_counter` is the system's monotonic clock, the same in both processes.
    """
    drafter = FakeDrafter(run, fingerprint)
    drafter.start()
    drafter.join(600.0)
    to.send(drafter.got_s)


def measure(root: Path, model: Path, data: Path, *, pause_s: float, epochs: int) -> dict[str, float]:
    run = Run(root, f"run-{epochs}", model, data, targets=1, extra="")
    run.file.write_text(run.file.read_text().replace("epochs = 2", f"epochs = {epochs}"))
    config = run.config.model_copy(update={"run": run.config.run.model_copy(update={"epochs": epochs})})
    identity, size = identity_and_size(config, TrainingData.open(config.data))
    run.start("coordinator")
    with contextlib.ExitStack() as stack:
        stack.callback(run.close)
        run.wait(lambda: (run.dir / "coordinator.json").exists(), "the coordinator")
        folder = arena_folder(run.config)
        locks: list[FileLock] = [hold_lock(folder, f"{role}-benchmark") for role in ("target", "drafter")]
        started_s = time.perf_counter()
        fork = multiprocessing.get_context("fork")
        ours, theirs = fork.Pipe()
        drafter = fork.Process(
            target=drive_drafter, args=(run, identity_sha256(identity), theirs), daemon=True
        )
        drafter.start()
        theirs.close()
        target = FakeTarget(run, identity_sha256(identity), size.slot_bytes, pause_s)
        target.start()
        got_s: dict[Stamp, float] = ours.recv()
        wall_s = time.perf_counter() - started_s
        drafter.join(60.0)
        for lock in locks:
            lock.release(unlink=True)
        run.processes["coordinator"].wait(60.0)
    latencies = sorted(got_s[a] - target.ready_s[a] for a in got_s if a in target.ready_s)
    return {
        "batches": len(latencies),
        "batches_per_s": len(latencies) / wall_s,
        "ready_to_got_p50_ms": 1e3 * statistics.median(latencies),
        "ready_to_got_p99_ms": 1e3 * latencies[int(0.99 * (len(latencies) - 1))],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        model, data = write_model(root / "model"), write_data(root / "prepared")
        result = {
            "machine": {
                "processor": platform.processor() or platform.machine(),
                "python": platform.python_version(),
            },
            "idle": measure(root, model, data, pause_s=IDLE_PAUSE_S, epochs=16),
            "full": measure(root, model, data, pause_s=0.0, epochs=60),
        }
    text = json.dumps(result, indent=1)
    print(text)
    if options.out:
        options.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
