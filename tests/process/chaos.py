"""Chaos: runs of a tiny model under kills, stops, full disks and torn files, each held to the promise.

    python tests/process/chaos.py --duration 120 --seed 1 --targets 2 --drafters 3 --elastic wait

Rounds follow each other until the time is over; a round is a whole run, from an empty folder to its
finished record, disturbed at every phase and restarted as a restart policy would. Then its ledger, its
files in memory and its final weights are compared with what they should be. The last line is

    kills=.. stops=.. epochs=.. samples=.. lost=0 duplicated=0 failed=0 leaked_bytes=0 weights=identical

and the exit status is 1 if any figure is another. `identical`: to the weights of an undisturbed run (one
drafter, or elastic=wait). `close`: with elastic=shrink gradients are summed in another order while fewer
drafters live, so the weights may differ by CLOSE of the distance that training moved them.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from chaos_faults import Faults, SmallDisk
from chaos_roles import ForkedRun, pause, preload
from harness import DEADLINE_S, Patience, write_data, write_model

from services.lifecycle import arena_folder

CLOSE = 1e-3
"""Of the distance between initial and final weights (L2)."""

SILENCE_S = 2.0
PERIOD_S = 0.7  # between two disturbances, on average
ROUND_S = 30.0  # of disturbances; then the round must end in peace
FLAGS = (
    f"--coordinator.silence-s={SILENCE_S}",
    "--coordinator.rejoin-s=5",
    "--watch.stuck-s=20",
    "--run.epochs=5",
)


@dataclass
class Tally:
    """Sums over rounds."""

    counts: Counter[str] = field(default_factory=Counter)
    victims: Counter[str] = field(default_factory=Counter)
    weights: set[str] = field(default_factory=set)
    worst_distance: float = 0.0

    def line(self) -> str:
        names = ("kills", "stops", "leaves", "fills", "unlinks", "truncations", "rounds", "epochs", "samples")
        names += ("lost", "duplicated", "failed", "leaked_bytes")
        weights = max(self.weights, key=["identical", "close", "different"].index, default="none")
        return " ".join(f"{name}={self.counts[name]}" for name in names) + f" weights={weights}"

    @property
    def good(self) -> bool:
        broken = any(self.counts[name] for name in ("lost", "duplicated", "failed", "leaked_bytes"))
        return not broken and bool(self.weights) and "different" not in self.weights


class Chaos:
    """The rounds of one configuration, and the undisturbed run they are compared with."""

    def __init__(self, root: Path, options: argparse.Namespace) -> None:
        self.root, self.options = root, options
        self.model, self.data = root / "model", root / "data"
        self.tally = Tally()
        self._make(write_model, self.model)
        self._make(write_data, self.data)

    @staticmethod
    def _make(write: Callable[[Path], Path], folder: Path) -> None:
        """In a child: torch must not start threads in the process that forks roles."""
        pid = os.fork()
        if pid == 0:
            try:
                write(folder)
            finally:
                os._exit(0 if folder.exists() else 1)
        assert os.waitpid(pid, 0)[1] == 0, f"{folder} was not written"

    def run(self, name: str) -> ForkedRun:
        options = self.options
        run = ForkedRun(
            self.root, name, self.model, self.data, targets=options.targets, drafters=options.drafters
        )
        run.flags = (*FLAGS, f"--drafter.elastic={options.elastic}")
        return run

    def undisturbed(self) -> ForkedRun:
        run = self.run("undisturbed")
        run.start()
        self._calm(run)
        return run

    def round(self, number: int, until_s: float, reference: ForkedRun) -> None:
        run = self.run(f"round-{number}")
        seeded = random.Random(f"{self.options.seed} {number}")
        disks = self._disks(run) if self.options.fill else []
        faults = Faults(run, seeded, disks, SILENCE_S)
        try:
            self._disturb(run, faults, seeded, min(until_s, time.monotonic() + ROUND_S))
            faults.undo_due(everything=True)
            self._calm(run)
            self._judge(run, faults, reference)
        finally:
            faults.undo_due(everything=True)
            if not self.tally.good or not run.finished():
                self._keep(run, number)
            for disk in disks:
                disk.close()
            run.close()

    def _keep(self, run: ForkedRun, number: int) -> None:
        """Ledger, metrics and weights of a round that broke the promise, beside its logs: its disk goes."""
        for process in run.processes.values():
            process.kill()
            process.wait()
        shutil.copytree(run.dir, run.log_folder / "run", ignore=shutil.ignore_patterns("filler"))
        print(f"round {number} of seed {self.options.seed}: kept in {run.log_folder}", flush=True)

    def _disks(self, run: ForkedRun) -> list[SmallDisk]:
        return [SmallDisk(run.arena), SmallDisk(run.dir)]

    def _disturb(self, run: ForkedRun, faults: Faults, seeded: random.Random, until_s: float) -> None:
        next_s = time.monotonic()
        run.start()
        while time.monotonic() < until_s and not run.finished():
            if time.monotonic() >= next_s:
                faults.strike()
                next_s = time.monotonic() + seeded.expovariate(1 / PERIOD_S)
            run.revive()
            pause(min(next_s, until_s, faults.next_undo_s(), time.monotonic() + 0.5) - time.monotonic())
            faults.undo_due()

    def _calm(self, run: ForkedRun) -> None:
        """To the finished record and the end of every process, restarting what dies."""
        patience = Patience(run)
        while not (run.finished() and self._ended(run)):
            if patience.over():
                raise AssertionError(f"no progress for {DEADLINE_S} s without disturbance\n{run.tails()}")
            if not run.finished() or run.processes["coordinator"].poll() not in (None, 0):
                run.revive()
            pause(0.2)

    def _ended(self, run: ForkedRun) -> bool:
        return all(process.poll() is not None for process in run.processes.values())

    # ---- the verdict --------------------------------------------------------------------------

    def _judge(self, run: ForkedRun, faults: Faults, reference: ForkedRun) -> None:
        result, counts = run.result(), self.tally.counts
        counts.update(faults.counts)
        self.tally.victims.update(faults.victims)
        folder = arena_folder(run.config)
        left = sum(file.stat().st_size for file in folder.rglob("*")) if folder.exists() else 0
        counts.update(
            rounds=1,
            epochs=result["epochs"],
            samples=result["samples_committed"],
            lost=result["batches_without_outcome"],
            duplicated=result["batches_duplicated"],
            failed=result["samples_failed"],
            leaked_bytes=left,
        )
        self.tally.weights.add(self._compare(run, reference))
        if result["failures"]:
            print(f"failed: {result['failures']}", flush=True)

    def _compare(self, run: ForkedRun, reference: ForkedRun) -> str:
        if run.final_weights() == reference.final_weights():
            return "identical"
        if self.options.drafters == 1 or self.options.elastic == "wait":
            return "different"
        distance = _distance(run, reference)
        self.tally.worst_distance = max(self.tally.worst_distance, distance)
        return "close" if distance <= CLOSE else "different"


def _distance(run: ForkedRun, reference: ForkedRun) -> float:
    """L2 between two runs' final weights, as a share of how far the reference moved from step 0."""
    import numpy as np
    from safetensors.numpy import load_file

    def weights(which: ForkedRun, order: str) -> np.ndarray:
        rows = which.query(f"SELECT name FROM checkpoints WHERE deleted = 0 ORDER BY step {order} LIMIT 1")
        tensors = load_file(which.dir / "checkpoints" / rows[0][0] / "model.safetensors")
        return np.concatenate([tensors[name].ravel() for name in sorted(tensors)])

    final, wanted, initial = weights(run, "DESC"), weights(reference, "DESC"), weights(reference, "ASC")
    return float(np.linalg.norm(final - wanted) / np.linalg.norm(wanted - initial))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--duration", type=float, default=120.0, help="seconds of disturbances")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--targets", type=int, default=2)
    parser.add_argument("--drafters", type=int, default=1)
    parser.add_argument("--elastic", choices=("shrink", "wait"), default="wait")
    parser.add_argument("--keep", type=Path, help="existing folder where they stay; else only if it fails")
    parser.add_argument("--no-fill", dest="fill", action="store_false", help="leave full disks out")
    options = parser.parse_args()
    options.fill = options.fill and os.geteuid() == 0
    preload()
    folder, code = Path(tempfile.mkdtemp(prefix="draftmill-chaos-", dir=options.keep)), 1
    try:
        code = rounds(Chaos(folder, options), options)
    finally:
        if code:
            print(f"logs and runs are in {folder}", file=sys.stderr)
        elif not options.keep:
            shutil.rmtree(folder)
    return code


def rounds(chaos: Chaos, options: argparse.Namespace) -> int:
    reference = chaos.undisturbed()
    until_s = time.monotonic() + options.duration
    number = 0
    while time.monotonic() < until_s:
        chaos.round(number, until_s, reference)
        number += 1
        print(f"round {number}: {chaos.tally.line()} victims={dict(chaos.tally.victims)}", flush=True)
    reference.close()
    if chaos.tally.worst_distance:
        print(f"worst distance {chaos.tally.worst_distance:.1e}, allowed {CLOSE:.0e}")
    print(chaos.tally.line())
    return 0 if chaos.tally.good else 1


if __name__ == "__main__":
    sys.exit(main())
