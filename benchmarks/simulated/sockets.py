"""A real coordinator process, and N + N roles that speak to it from this one, each over its own socket.

Roles work in no time and hold real locks; a pack is handed over in memory, as it never passes the
coordinator. Latencies are seen by the roles: from a report that a batch is ready to the orders with the
next one, and from a step's last vote to the orders that say it is committed.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import zmq

from protocol.arena import lock_name
from protocol.codec import decode, encode
from protocol.files import FileLock
from protocol.messages import DrafterOrders, Exit, TargetOrders, Welcome, Who
from protocol.sockets import dealer, new_context
from services.config.fingerprint import identity_sha256
from services.config.load import load
from services.coordinator.sizing import identity_and_size
from services.data.dataset import Sample
from services.data.training_data import TrainingData
from services.data.writer import write_dataset
from services.lifecycle import arena_folder, control_endpoint
from simulated.roles import Drafter, Target

PACKS, MIN_PACKS = 24, 1024
SLOTS = 6
DEADLINE_S = 120.0
CONFIG = """
[run]
dir = "{folder}/run"
[model]
path = "{folder}/model"
[data]
path = "{folder}/data"
[plan]
token_budget = 16
bucket_edges = [16]
packs_per_step = {roles}
[target]
count = {roles}
slots = {slots}
[drafter]
count = {roles}
[arena]
dir = "{arena}"
[checkpoint]
every_steps = 1000000
[coordinator]
http_port = 0
"""


class Wire:
    """One role's socket, and the times that latencies are taken from."""

    def __init__(self, role: Target | Drafter, context: zmq.Context, endpoint: str) -> None:
        self.role, self.socket = role, dealer(context, endpoint)
        self.reported = False

    def say(self, message: object) -> bool:
        try:
            self.socket.send_multipart(encode(message), zmq.NOBLOCK)  # type: ignore[arg-type]
        except zmq.Again:
            return False
        return True


class Bench:
    """The roles' side."""

    def __init__(self, folder: Path, arena: Path, roles: int) -> None:
        import numpy as np

        sample = Sample(np.ones(16, np.int32), np.ones(16, np.uint8))
        self.packs = max(MIN_PACKS, PACKS * roles)
        write_dataset(folder / "data", [sample] * self.packs, {})
        (folder / "model").mkdir()
        (folder / "model" / "config.json").write_text(json.dumps({"hidden_size": 32}))
        (folder / "model" / "model.safetensors").write_bytes(struct.pack("<Q", 2) + b"{}")
        self.file = folder / "run.toml"
        self.file.write_text(CONFIG.format(folder=folder, arena=arena, roles=roles, slots=SLOTS))
        self.config = load(file=self.file, environ={}).config
        self.log = (folder / "coordinator.log").open("wb")
        identity, _ = identity_and_size(self.config, TrainingData.open(self.config.data))
        fingerprint = identity_sha256(identity)
        names = [f"{kind}-{n}" for kind in ("target", "drafter") for n in range(roles)]
        self.roles = {n: (Target if n.startswith("t") else Drafter)(n, fingerprint) for n in names}
        self.drafters = {n: r for n, r in self.roles.items() if isinstance(r, Drafter)}
        self.ready_s: dict[str, float] = {}
        self.vote_s = 0.0
        self.assigned_ms: list[float] = []
        self.committed_ms: list[float] = []
        self.first_commit_s = 0.0
        self.messages = 0

    def run(self) -> dict[str, float]:
        command = [sys.executable, "-m", "services.cli", "coordinator", "--config", str(self.file)]
        process = subprocess.Popen(command, stdout=self.log, stderr=self.log)
        context, folder = new_context(), arena_folder(self.config)
        try:
            _wait_for(self.config.run.dir / "coordinator.json", process, Path(self.log.name))
            locks = [FileLock(folder / lock_name(name)).acquire() for name in self.roles]
            endpoint = control_endpoint(self.config)
            wires = {name: Wire(role, context, endpoint) for name, role in self.roles.items()}
            start_cpu_s, start_s = self._drive(wires, process.pid)
            wall_s, cpu_s = time.monotonic() - start_s, _cpu_s(process.pid) - start_cpu_s
            for lock in locks:
                lock.release(unlink=True)
            for wire in wires.values():
                wire.socket.close(0)
            process.wait(DEADLINE_S)
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait()
            context.term()
            self.log.close()
        done = self.packs
        return {
            "targets": len(self.drafters), "drafters": len(self.drafters), "packs": done,
            "packs_per_s": done / wall_s, "coordinator_cpu_us_per_pack": 1e6 * cpu_s / done,
            "coordinator_cpu_share": cpu_s / wall_s,
            "assignment_ms_median": statistics.median(self.assigned_ms),
            "assignment_ms_p99": sorted(self.assigned_ms)[int(0.99 * (len(self.assigned_ms) - 1))],
            "commit_ms_median": statistics.median(self.committed_ms),
            "commit_ms_worst": max(self.committed_ms),
        }  # fmt: skip

    def _drive(self, wires: dict[str, Wire], pid: int) -> tuple[float, float]:
        """Until the coordinator says Exit. Returns its CPU time and the clock at the first commit."""
        poller, by_socket = zmq.Poller(), {}
        for wire in wires.values():
            poller.register(wire.socket, zmq.POLLIN)
            by_socket[wire.socket] = wire
        deadline_s, hello_s, started = time.monotonic() + DEADLINE_S, 0.0, (0.0, 0.0)
        over = False
        while not over:
            assert time.monotonic() < deadline_s, "the run does not end"
            if time.monotonic() > hello_s:
                hello_s = time.monotonic() + 1.0
                for wire in wires.values():
                    wire.say(wire.role.report() if wire.reported else wire.role.hello())
            news: dict[str, None] = {}
            for socket, _ in poller.poll(100):
                wire = by_socket[socket]
                while True:
                    try:
                        message = decode(socket.recv_multipart(zmq.NOBLOCK))
                    except zmq.Again:
                        break
                    self.messages += 1
                    over |= isinstance(message, Exit)
                    self._take(wire, message, news)
            if not started[1] and self.first_commit_s:
                started = (_cpu_s(pid), time.monotonic())
            for name in news:
                self._tell(wires[name])
        return started

    def _take(self, wire: Wire, message: object, news: dict[str, None]) -> None:
        role = wire.role
        if isinstance(message, Welcome | Who):
            wire.reported = isinstance(message, Welcome)
            news[role.name] = None
        elif isinstance(message, TargetOrders | DrafterOrders):
            before = len(role.work) if isinstance(role, Target) else role.complete
            old = set(role.work) if isinstance(role, Target) else set()
            news |= dict.fromkeys(role.act(message, self.drafters))  # type: ignore[arg-type]
            now_s = time.perf_counter()
            if isinstance(role, Target) and role.name in self.ready_s and set(role.work) - old:
                self.assigned_ms.append(1e3 * (now_s - self.ready_s.pop(role.name)))
            if isinstance(role, Drafter) and before is not None and role.complete != before and self.vote_s:
                self.committed_ms.append(1e3 * (now_s - self.vote_s))
                self.first_commit_s, self.vote_s = self.first_commit_s or now_s, 0.0

    def _tell(self, wire: Wire) -> None:
        role = wire.role
        if not wire.reported:
            wire.say(role.hello())
            return
        while True:
            report = role.report()
            wire.say(report)
            if isinstance(role, Target):
                if len(role.work) < SLOTS:  # else the next batch waits for a commit, not for a decision
                    self.ready_s.setdefault(role.name, time.perf_counter())
            elif not self.vote_s and role.vote is not None and all(d.vote for d in self.drafters.values()):
                self.vote_s = time.perf_counter()
            if not role.busy:
                return


def measure_sockets(folder: Path, roles: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory(prefix="dm-", dir="/dev/shm") as arena:
        return Bench(folder, Path(arena), roles).run()


def _wait_for(path: Path, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while not path.exists():
        alive = time.monotonic() < deadline_s and process.poll() is None
        assert alive, f"{path} does not come: {log.read_text()[-2000:]}"
        try:
            process.wait(0.05)
        except subprocess.TimeoutExpired:
            continue


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
