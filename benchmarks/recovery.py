"""How long a run stands still after a kill: from SIGKILL to the next commit in the ledger.

    python benchmarks/recovery.py --out benchmarks/results/recovery.json

Real processes on the tiny model of the process tests, 2 targets and 3 drafters, each victim killed KILLS
times in one run and restarted at once. Roles are forked from a process that has imported everything, so
the start of a role takes `role_start_s` here instead of seconds; it is measured beside, from the fork to
the member's first report. For a drafter the commit waited for is that of the survivors.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "process"))

from chaos import Chaos
from chaos_roles import ForkedRun, pause, preload

KILLS = 20
DEADLINE_S = 60.0
VICTIMS = {"target": ["target-0", "target-1"], "drafter": ["drafter-0", "drafter-1", "drafter-2"],
           "coordinator": ["coordinator"]}  # fmt: skip


class Recovery:
    """One long run, disturbed by one kill at a time."""

    def __init__(self, run: ForkedRun) -> None:
        self.run = run

    def measure(self, names: list[str]) -> dict[str, float]:
        stalls_s, starts_s = [], []
        for number in range(KILLS):
            name = names[number % len(names)]
            self._settle()
            before = self._commits()
            killed_s = time.monotonic()
            self.run.kill(name)
            self.run.start(name)
            self._wait(lambda before=before: self._commits() > before, "the next commit")
            stalls_s.append(time.monotonic() - killed_s)
            if name != "coordinator":
                self._wait(self._whole, "the restarted role")
                starts_s.append(time.monotonic() - killed_s)
        found = {"kills": KILLS, "median_s": statistics.median(stalls_s), "worst_s": max(stalls_s)}
        if starts_s:
            found |= {"back_median_s": statistics.median(starts_s), "back_worst_s": max(starts_s)}
        return found

    def _settle(self) -> None:
        """Everybody is a member, and two more steps are committed."""
        self._wait(self._whole, "all members")
        target = self._commits() + 2
        self._wait(lambda: self._commits() >= target, "steady steps")

    def _commits(self) -> int:
        """Steps on this history; a roll-back would show as a stall until it is made up for."""
        return self.run.committed_steps()

    def _whole(self) -> bool:
        rows = self.run.query("SELECT count(*) FROM incarnations WHERE died IS NULL")
        return bool(rows) and rows[0][0] >= len(self.run.names()) - 1

    def _wait(self, until: object, what: str) -> None:
        deadline_s = time.monotonic() + DEADLINE_S
        assert callable(until)
        while not until():
            assert time.monotonic() < deadline_s, f"{what}: not within {DEADLINE_S} s\n{self.run.tails()}"
            assert not self.run.finished(), "the run is too short"
            pause(0.005)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    preload()
    results: dict[str, object] = {"machine": {"cpus": os.cpu_count(), "platform": platform.platform()}}
    with tempfile.TemporaryDirectory(prefix="draftmill-recovery-") as folder:
        settings = argparse.Namespace(targets=2, drafters=3, elastic="shrink", seed=1)
        chaos = Chaos(Path(folder), settings)
        for victim, names in VICTIMS.items():
            run = chaos.run(victim)
            run.flags = (*(f for f in run.flags if "epochs" not in f), "--run.epochs=400")
            try:
                run.start()
                results[victim] = Recovery(run).measure(names)
            finally:
                run.close()
            print(victim, json.dumps(results[victim]), flush=True)
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
