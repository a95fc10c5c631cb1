"""What a coordinator costs as roles are added: its own decisions alone, and a real one over real sockets.

    python benchmarks/coordinator.py --out benchmarks/results/coordinator.json

`decisions`: a Coordinator, its ledger on a disk and its orders, with N targets and N drafters in the same
process that work in no time; only the coordinator's calls are timed. Reports come in bursts of BURST, after
each of which it decides and makes its orders, as the server does. `sockets`: a coordinator process, driven
by N + N roles that speak the protocol over ZeroMQ from one other process and hold real locks.
Every step has one pack a drafter.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
from simulated.roles import Drafter, Target
from simulated.sockets import measure_sockets

from services.config.schema import Config
from services.coordinator.coordinator import Coordinator, PackSize
from services.coordinator.ledger import Ledger
from services.coordinator.orders import OrderBook
from services.data.dataset import Dataset, Sample
from services.data.training_data import TrainingData
from services.data.writer import write_dataset

BURST = 16
SIZES = (4, 16, 64, 256, 1024)
PACKS = 8  # per role and measurement, at least
MIN_PACKS = 512


def make_data(folder: Path, packs: int) -> Dataset:
    """One sample a pack."""
    sample = Sample(np.ones(16, np.int32), np.ones(16, np.uint8))
    return write_dataset(folder, [sample] * packs, {})


def make_config(folder: Path, roles: int) -> Config:
    return Config.model_validate(
        {
            "run": {"dir": folder / "run"},
            "model": {"path": str(folder / "model")},
            "data": {"path": folder / "data"},
            "plan": {"token_budget": 16, "bucket_edges": (16,), "packs_per_step": roles},
            "target": {"count": roles, "slots": 6},
            "drafter": {"count": roles},
            "checkpoint": {"every_steps": 1_000_000},
        }
    )


class Cost:
    """Seconds the coordinator took, by what it did."""

    def __init__(self) -> None:
        self.turns_s: list[float] = []
        self.reports_s = 0.0
        self.messages = 0


def measure_decisions(folder: Path, roles: int) -> dict[str, float]:
    packs = max(MIN_PACKS, PACKS * roles)
    dataset = make_data(folder / "data", packs)
    config = make_config(folder, roles)
    ledger = Ledger(folder / "ledger.sqlite", {"options": {}, "dataset": "d", "model": "m"})
    core = Coordinator(
        config, TrainingData(dataset), ledger, ledger.fingerprint, PackSize(10, 1000),
        target_devices=("",) * roles, drafter_devices=("",) * roles,
    )  # fmt: skip
    book, cost = OrderBook(core, repeat_s=1.0), Cost()
    targets = {f"target-{n}": Target(f"target-{n}", ledger.fingerprint) for n in range(roles)}
    drafters = {f"drafter-{n}": Drafter(f"drafter-{n}", ledger.fingerprint) for n in range(roles)}
    everyone = {**targets, **drafters}
    for role in everyone.values():
        core.hello(role.hello(), 0.0)
    _run(core, book, everyone, drafters, cost)
    assert core.finished and ledger.accounting().committed_batches == packs
    cpu_s = sum(cost.turns_s) + cost.reports_s
    turns_ms = sorted(1e3 * s for s in cost.turns_s)
    ledger.close()
    return {
        "targets": roles,
        "drafters": roles,
        "packs": packs,
        "packs_per_cpu_s": packs / cpu_s,
        "cpu_us_per_pack": 1e6 * cpu_s / packs,
        "cpu_us_per_message": 1e6 * cpu_s / cost.messages,
        "turn_ms_median": statistics.median(turns_ms),
        "turn_ms_p99": turns_ms[int(0.99 * (len(turns_ms) - 1))],
    }


def _run(
    core: Coordinator,
    book: OrderBook,
    everyone: dict[str, Target | Drafter],
    drafters: dict[str, Drafter],
    cost: Cost,
) -> None:
    now_s, news = 0.0, list(everyone)
    while not core.done:
        burst, news = news[:BURST], news[BURST:]
        now_s += 0.0005
        reports = [everyone[name].report() for name in burst]
        start_s = time.thread_time()
        for report in reports:
            core.report(report, now_s)
        reported_s = time.thread_time()
        core.decide(now_s)
        orders = book.pending(now_s)
        cost.turns_s.append(time.thread_time() - reported_s)
        cost.reports_s += reported_s - start_s
        cost.messages += len(reports)
        core.outbox.clear()
        waiting = set(news)
        for order in orders:
            for name in everyone[order.incarnation].act(order, drafters):
                if name not in waiting:
                    waiting.add(name)
                    news.append(name)
        for name in burst:  # whoever has more to do at once, e.g. the next batch of its queue
            if everyone[name].busy and name not in waiting:
                news.append(name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--sizes", type=int, nargs="*", default=SIZES)
    parser.add_argument("--socket-sizes", type=int, nargs="*", default=(4, 16, 64))
    options = parser.parse_args()
    results: dict[str, object] = {
        "machine": {"cpus": os.cpu_count(), "platform": platform.platform()},
        "decisions": [],
        "sockets": [],
    }
    for name, sizes, measure in (
        ("decisions", options.sizes, measure_decisions),
        ("sockets", options.socket_sizes, measure_sockets),
    ):
        rows = results[name]
        assert isinstance(rows, list)
        for roles in sizes:
            with tempfile.TemporaryDirectory(prefix="draftmill-bench-") as folder:
                rows.append(measure(Path(folder), roles))
            print(name, json.dumps(rows[-1], default=float), flush=True)
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
