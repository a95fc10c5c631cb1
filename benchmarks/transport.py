"""What it costs to hand a pack to another process: JSON with GB/s, as ratios to memcpy in the same run.

    python benchmarks/transport.py [--out FILE] [--packs N] [--checksum off|sampled|always]

payload   For packs of 1, 16 and 128 MiB, between a target and a drafter in two processes of one thread:
          write into a slot, descriptor through a socket, open, verify, copy into a private buffer.
          `one_by_one` waits for each pack before the next is written, so its time is both copies and all
          that is between them; it is held against two memcpys of the same bytes between private buffers.
          `streaming` keeps every slot busy, so both processes copy at once; it is held against two
          processes that do nothing but memcpy at the same time.
          `queue` is torch.multiprocessing.Queue at its best (one copy into fresh shared memory, one out).

Sources, slots and private buffers rotate through 192 MiB each, so nobody copies out of a cache: a pack in
a run is always new. Each figure is the median of rounds in which all ways take turns, so a busy machine
slows all alike. `cpu_ms` is the processor time of a pack in both processes together: it says more than the
clock where other work has the cores.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp
import zmq
from torch import Tensor

from protocol.codec import decode, encode
from protocol.messages import BatchId, Pack, Stamp
from protocol.sockets import dealer, new_context, router
from services.transport.layout import payload_bytes
from services.transport.reader import SlotReader
from services.transport.views import sections_of
from services.transport.writer import SlotWriter

MIB = 1 << 20
SIZES_MIB = (1, 16, 128)
WORKING_SET_BYTES = 192 * MIB
IN_FLIGHT = 3
PATIENCE_S = 120  # for a drafter that may have died
FEATURES = 4096
CPU = torch.device("cpu")


def make_pack(size: int) -> dict[str, Tensor]:
    """A pack whose features take `size` bytes."""
    tokens = size // (FEATURES * 2)
    return {
        "features": torch.ones(tokens, FEATURES, dtype=torch.bfloat16),
        "input_ids": torch.zeros(tokens, dtype=torch.int32),
        "loss_mask": torch.ones(tokens, dtype=torch.uint8),
        "position_ids": torch.arange(tokens, dtype=torch.int32),
        "document_offsets": torch.tensor([0, tokens], dtype=torch.int32),
        "sample_ids": torch.zeros(1, dtype=torch.int64),
    }


def ring(size: int) -> int:
    """How many buffers of `size` bytes are used in turn."""
    return max(IN_FLIGHT, WORKING_SET_BYTES // size)


class Drafter:
    """The other process: does what the last order says until the next."""

    def __init__(self, folder: Path, orders: Any, packs: Any, done: Any) -> None:
        self._folder, self._orders, self._packs, self._done = folder, orders, packs, done

    def run(self) -> None:
        """Follow orders until one is None."""
        torch.set_num_threads(1)
        self._reader = SlotReader(self._folder, CPU)
        context = new_context()
        with router(context, f"ipc://{self._folder}/inbox") as inbox:
            self._done.put("bound")
            private: list[dict[str, Tensor]] = []
            for way, size, count in iter(self._orders.get, None):
                if not private or private[0]["features"].nbytes != size:
                    self._reader.close()
                    private = [make_pack(size) for _ in range(ring(size))]
                self._done.put("ready")
                begun_s = time.process_time()
                getattr(self, way)(inbox.socket, private, count)
                self._done.put(time.process_time() - begun_s)
        context.term()

    def slots(self, inbox: zmq.Socket, private: list[dict[str, Tensor]], count: int) -> None:
        """Take `count` packs out of their slots; answer each, so that its slot is free again."""
        for number in range(count):
            sender, *frames = inbox.recv_multipart()
            message = decode(frames)
            assert isinstance(message, Pack)
            pack = self._reader.open(message.descriptor)
            for name, tensor in private[number % len(private)].items():
                tensor.copy_(pack[name])
            pack.verify()
            inbox.send_multipart([sender, b"got"], zmq.NOBLOCK)

    def queue(self, _: zmq.Socket, private: list[dict[str, Tensor]], count: int) -> None:
        """Take `count` tensors out of the queue."""
        for number in range(count):
            private[number % len(private)]["features"].copy_(self._packs.get())
            self._done.put("got")

    def memcpy(self, _: zmq.Socket, private: list[dict[str, Tensor]], count: int) -> None:
        """Copy beside the target's own copies."""
        for number in range(count):
            private[number % len(private)]["features"].copy_(private[(number - 1) % len(private)]["features"])


class Bench:
    """The target's process: orders a way of handing over from the drafter and takes the time."""

    def __init__(self, folder: Path, checksum: str) -> None:
        context = mp.get_context("spawn")
        self._folder, self._checksum, self._counter = folder, checksum, 0
        self._orders, self._packs, self._done = context.Queue(), context.Queue(), context.Queue()
        drafter = Drafter(folder, self._orders, self._packs, self._done)
        self._process = context.Process(target=drafter.run)
        self._process.start()
        assert self._done.get(timeout=PATIENCE_S) == "bound"
        self._context = new_context()
        self._socket = dealer(self._context, f"ipc://{folder}/inbox")
        self._socket.set(zmq.RCVTIMEO, PATIENCE_S * 1000)

    def close(self) -> None:
        self._orders.put(None)
        self._socket.close()
        self._context.term()
        self._process.join(timeout=60)

    def measure(self, size: int, count: int, rounds: int) -> dict[str, Any]:
        """Every way for packs of `size` bytes, `count` a round, in turns."""
        packs = [make_pack(size) for _ in range(ring(size))]
        self._writer = SlotWriter.create(
            self._folder,
            f"target-{size}",
            slots=len(packs),
            slot_bytes=payload_bytes(sections_of(packs[0])),
            checksum=self._checksum,
            device=CPU,
        )
        private = [torch.empty_like(pack["features"]).fill_(0) for pack in packs]
        ways: dict[str, Callable[[], None]] = {
            "one_by_one": lambda: self._slots(packs, count, in_flight=1),
            "streaming": lambda: self._slots(packs, count, in_flight=IN_FLIGHT),
            "queue_one_by_one": lambda: self._queue(packs, count),
            "memcpy": lambda: _copies(packs, private, count),
            "memcpy_beside_memcpy": lambda: _copies(packs, private, count),
        }
        orders = {"one_by_one": "slots", "streaming": "slots", "queue_one_by_one": "queue"}
        orders["memcpy_beside_memcpy"] = "memcpy"
        taken: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
        for round_number in range(rounds + 1):
            for name, way in ways.items():
                figures = self._timed(way, orders.get(name), size, count)
                if round_number:  # the first warms caches, mappings and both processes
                    taken[name].append(figures)
        self._writer.close()
        return report(size, taken)

    def _timed(
        self, way: Callable[[], None], order: str | None, size: int, count: int
    ) -> tuple[float, float]:
        """Seconds by the clock and of processor time that a pack takes."""
        if order:
            self._orders.put((order, size, count))
            assert self._done.get(timeout=PATIENCE_S) == "ready"
        begun_s, begun_cpu_s = time.perf_counter(), time.process_time()
        way()
        clock_s, cpu_s = time.perf_counter() - begun_s, time.process_time() - begun_cpu_s
        if order:
            cpu_s += self._done.get(timeout=PATIENCE_S)
        return clock_s / count, cpu_s / count

    def _slots(self, packs: list[dict[str, Tensor]], count: int, in_flight: int) -> None:
        for number in range(count):
            if number >= in_flight:
                self._socket.recv()
            slot, attempt = number % len(packs), Stamp(1, self._counter)
            descriptor = self._writer.write(slot, BatchId(0, number), attempt, packs[slot])
            self._counter += 1
            message = Pack(target="target", lease=attempt, descriptor=descriptor)
            self._socket.send_multipart(encode(message), zmq.NOBLOCK)
        for _ in range(min(in_flight, count)):
            self._socket.recv()

    def _queue(self, packs: list[dict[str, Tensor]], count: int) -> None:
        for number in range(count):
            source = packs[number % len(packs)]["features"]
            self._packs.put(torch.empty_like(source).share_memory_().copy_(source))
            assert self._done.get(timeout=PATIENCE_S) == "got"


def _copies(packs: list[dict[str, Tensor]], private: list[Tensor], count: int) -> None:
    for number in range(count):
        private[number % len(private)].copy_(packs[number % len(packs)]["features"])


def report(size: int, taken: dict[str, list[tuple[float, float]]]) -> dict[str, Any]:
    """GB/s of each way and what the bar asks: ratios to memcpy with one copy each side."""
    clock_s = {name: statistics.median(clock for clock, _ in values) for name, values in taken.items()}
    cpu_s = {name: statistics.median(cpu for _, cpu in values) for name, values in taken.items()}
    return {
        "pack_mib": size // MIB,
        "gb_per_s": {name: round(size / seconds / 1e9, 3) for name, seconds in clock_s.items()},
        "pack_ms": {name: round(seconds * 1e3, 4) for name, seconds in clock_s.items()},
        "cpu_ms": {name: round(seconds * 1e3, 4) for name, seconds in cpu_s.items()},
        "one_by_one_of_two_memcpys": round(2 * clock_s["memcpy"] / clock_s["one_by_one"], 3),
        "streaming_of_memcpy_beside_memcpy": round(clock_s["memcpy_beside_memcpy"] / clock_s["streaming"], 3),
        "cpu_of_two_memcpys": round(2 * cpu_s["memcpy"] / cpu_s["one_by_one"], 3),
        "one_by_one_times_queue": round(clock_s["queue_one_by_one"] / clock_s["one_by_one"], 2),
    }


def machine() -> dict[str, Any]:
    """Where the figures come from."""
    names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return {
        "cpu": names[0].partition(":")[2].strip() if names else platform.machine(),
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "pyzmq": zmq.__version__,
    }


def measure_payload(options: argparse.Namespace) -> list[dict[str, Any]]:
    """The table of the module's docstring."""
    with tempfile.TemporaryDirectory(prefix="draftmill-", dir="/dev/shm") as name:
        bench = Bench(Path(name), options.checksum)
        try:
            return [
                bench.measure(size * MIB, max(IN_FLIGHT, options.packs * 4 // max(4, size)), options.rounds)
                for size in SIZES_MIB
            ]
        finally:
            bench.close()


# One entry a table: the control path gets its own.
TABLES: dict[str, Callable[[argparse.Namespace], Any]] = {"payload": measure_payload}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="write the JSON there too")
    parser.add_argument("--packs", type=int, default=96, help="packs a round (fewer of the larger)")
    parser.add_argument("--rounds", type=int, default=5, help="rounds a figure is the median of")
    parser.add_argument("--checksum", choices=("off", "sampled", "always"), default="sampled")
    options = parser.parse_args()
    torch.set_num_threads(1)
    result = {"machine": machine(), "checksum": options.checksum}
    result |= {name: measure(options) for name, measure in TABLES.items()}
    text = json.dumps(result, indent=1)
    if options.out:
        options.out.write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
