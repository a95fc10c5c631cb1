"""What a pack's copies into and out of a slot keep of a plain copy's speed: JSON with GB/s and ratios.

    python benchmarks/copies.py [--out FILE] [--sizes 16,64,256] [--rounds N]

For each size, medians of rounds in which all ways take turns, between a target on the first GPU and a drafter
in another process on the last one (without GPUs both are on the CPU, with an arena in shared memory):

d2h       pinned arena: `slot` is the writer's copy of a pack into its slot, waited for; `write` is all of
          SlotWriter.write, header and descriptor included. `plain` is tensor.copy_ from the same GPU
          buffer into torch's own pinned memory, waited for in the same way.
h2d       pinned arena: `slot` is SlotReader.open, then verify. `plain` is copy_ from torch's own pinned
          memory in the drafter's process.
ring      cuda_ipc arena on the first GPU, drafter on the second: `slot` as before. `plain` is a peer copy
          between buffers of one process. Left out with fewer than two GPUs.

`one` waits for each copy before the next; `burst` queues BURST of them behind a pause of the stream and takes
the GPU's own time, so that the host is out of the picture. In d2h a burst is of the copies alone, since the
writer waits for each pack. The bar is 0.95 for d2h `one_slot` and the other bursts, at 64 MiB and more. All
ends by itself: the drafter has PATIENCE_S for an answer; what was measured until then is printed and written.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from protocol.arena import lock_name
from protocol.codec import decode, encode
from protocol.files import FileLock
from protocol.messages import BatchId, Pack, Stamp
from services.transport.layout import payload_bytes
from services.transport.reader import PackTensors, SlotReader
from services.transport.views import sections_of
from services.transport.writer import SlotWriter

MIB = 1 << 20
FEATURES = 5 * 4096  # of a token: five taps of Qwen3-8B
SLOTS, BURST = 2, 8
PAUSE_CYCLES = 40_000_000  # some 20 ms, in which a burst is queued
PATIENCE_S = 60.0
BAR, BAR_FROM_MIB = 0.95, 64
Samples = dict[str, list[float]]


def make_pack(size: int, device: torch.device) -> dict[str, Tensor]:
    """A pack whose features take about `size` bytes; ids on the host, as in a target."""
    tokens = size // (FEATURES * 2)
    return {
        "features": torch.ones(tokens, FEATURES, dtype=torch.bfloat16, device=device),
        "input_ids": torch.zeros(tokens, dtype=torch.int32),
        "loss_mask": torch.ones(tokens, dtype=torch.uint8),
        "position_ids": torch.arange(tokens, dtype=torch.int32),
        "document_offsets": torch.tensor([0, tokens], dtype=torch.int32),
        "sample_ids": torch.zeros(1, dtype=torch.int64),
    }


def host_buffer(size: int) -> Tensor:
    return torch.zeros(size, dtype=torch.uint8, pin_memory=torch.cuda.is_available())


class Wait:
    """Lets the host sleep until what was queued on a device's current stream is done."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._event = torch.cuda.Event(blocking=True) if device.type == "cuda" else None

    def __call__(self) -> None:
        if self._event is not None:
            self._event.record(torch.cuda.current_stream(self._device))
            self._event.synchronize()


def one(way: Callable[[], object]) -> float:
    """Seconds of one call that waits for its copy."""
    begun_s = time.perf_counter()
    way()
    return time.perf_counter() - begun_s


def burst(stream: torch.cuda.Stream, queue: Callable[[], object]) -> float:
    """The GPU's seconds for one of BURST copies on `stream`, all queued before the first begins."""
    begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with torch.cuda.stream(stream):
        torch.cuda._sleep(PAUSE_CYCLES)
        begun.record(stream)
    for _ in range(BURST):
        queue()
    ended.record(stream)
    ended.synchronize()
    return begun.elapsed_time(ended) / 1e3 / BURST


# ---- the target -------------------------------------------------------------------------------


class Source:
    """The target: an arena of one kind, and packs in all its slots."""

    def __init__(self, folder: Path, kind: str, size: int, device: torch.device) -> None:
        self.pack, self._device, self._counter = make_pack(size, device), device, 0
        name = f"target-{kind}-{size // MIB}"
        self._lock = FileLock(folder / lock_name(name)).acquire()
        self.writer = SlotWriter.create(
            folder, name, slots=SLOTS, slot_bytes=payload_bytes(sections_of(self.pack)),
            kind=kind, checksum="off", device=device,
        )  # fmt: skip
        self.pinned = bool(getattr(self.writer._slots, "pinned", False))
        self._sections = sections_of(self.pack)

    def write(self) -> str:
        """The next slot: hex of its message."""
        self._counter += 1
        descriptor = self.writer.write(
            self._counter % SLOTS, BatchId(0, self._counter), Stamp(1, self._counter), self.pack,
            ready=self._ready(),
        )  # fmt: skip
        return encode(Pack(target="target", lease=Stamp(1, 0), descriptor=descriptor))[1].hex()

    def fill(self) -> None:
        """The copy alone, of all sections, waited for."""
        self._counter += 1
        self.writer._slots.fill(self._counter % SLOTS, self._sections, self.pack, self._ready())

    def queue(self) -> None:
        """The copy alone, not waited for."""
        self._counter += 1
        slots = self.writer._slots
        with torch.cuda.stream(slots._stream):
            slots._copy(self._counter % SLOTS, self._sections, self.pack)

    def close(self) -> None:
        self.writer.close()
        self._lock.release(unlink=True)

    def _ready(self) -> torch.cuda.Event | None:
        if self._device.type != "cuda":
            return None
        ready = torch.cuda.Event()
        ready.record(torch.cuda.current_stream(self._device))
        return ready


def measure_d2h(source: Source, device: torch.device, rounds: int) -> Samples:
    """Into slots, in this process."""
    features_B = source.pack["features"].view(torch.uint8).flatten()
    private, wait = [host_buffer(features_B.numel()) for _ in range(SLOTS)], Wait(device)
    turn = 0

    def queue_plain() -> None:
        nonlocal turn
        turn += 1
        private[turn % SLOTS].copy_(features_B, non_blocking=True)

    def plain() -> None:
        queue_plain()
        wait()

    ways: dict[str, Callable[[], float]] = {
        "one_plain": lambda: one(plain),
        "one_slot": lambda: one(source.fill),
        "one_write": lambda: one(source.write),
    }
    if device.type == "cuda":
        own = torch.cuda.current_stream(device)
        ways |= {
            "burst_plain": lambda: burst(own, queue_plain),
            "burst_slot": lambda: burst(source.writer._slots._stream, source.queue),
        }
    taken: Samples = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name, way in ways.items():
            for _ in range(BURST if name.startswith("one") else 1):
                seconds = way()
                if number:  # the first warms mappings and allocators
                    taken[name].append(seconds)
    return taken


# ---- the drafter ------------------------------------------------------------------------------


def drafter(pipe: Connection, folder: Path, device: torch.device, peer: torch.device, rounds: int) -> None:
    """The other process: for each list of messages, the same packs out of their slots, and plain copies."""
    torch.set_num_threads(1)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    reader = SlotReader(folder, device)
    pipe.send("ready")
    for order in iter(pipe.recv, None):
        messages = [decode([b"Pack", bytes.fromhex(text)]) for text in order]
        packs = [message for message in messages if isinstance(message, Pack)]
        reader.keep(())
        pipe.send(measure_out(reader, packs, device, peer, rounds))
    reader.close()


def measure_out(
    reader: SlotReader, packs: list[Pack], device: torch.device, peer: torch.device, rounds: int
) -> Samples:
    """Out of slots and of plain memory in turns: on the host, or on `peer` if the pack is in a ring."""
    first = reader.open(packs[0].descriptor)
    first.verify()
    size = first["features"].nbytes
    ring = peer if type(first._packs).__name__ == "RingPacks" else None
    sources = [
        host_buffer(size) if ring is None else torch.zeros(size, dtype=torch.uint8, device=ring)
        for _ in range(SLOTS)
    ]
    private = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(SLOTS)]
    stream = stream_of(first)
    wait, turn = Wait(device), 0
    held: list[PackTensors] = []

    def queue_plain() -> None:
        nonlocal turn
        turn += 1
        private[turn % SLOTS].copy_(sources[turn % SLOTS], non_blocking=True)

    def queue_slot() -> None:
        nonlocal turn
        turn += 1
        held.append(reader.open(packs[turn % SLOTS].descriptor))

    def plain() -> None:
        queue_plain()
        wait()

    def slot() -> None:
        queue_slot()
        if device.type != "cuda":  # the reader copies nothing there: the step reads in place
            private[turn % SLOTS].copy_(held[-1]["features"].view(torch.uint8).flatten())
        held.pop().verify()

    ways: dict[str, Callable[[], float]] = {"one_plain": lambda: one(plain), "one_slot": lambda: one(slot)}
    if stream is not None:
        # a peer copy runs on the source's stream, which the destination's waits for and is waited for by
        own = torch.cuda.current_stream(device)
        ways |= {
            "burst_plain": lambda: burst(own, queue_plain),
            "burst_slot": lambda: burst(stream, queue_slot),
        }
    taken: Samples = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name, way in ways.items():
            for _ in range(BURST if name.startswith("one") else 1):
                seconds = way()
                held.clear()
                if number:
                    taken[name].append(seconds)
    return taken


def stream_of(pack: PackTensors) -> torch.cuda.Stream | None:
    """The stream that a reader copies on; None on a CPU."""
    found: Any = getattr(pack._packs, "stream", None) or getattr(pack._packs, "_stream", None)
    return found if isinstance(found, torch.cuda.Stream) else None


# ---- both -------------------------------------------------------------------------------------


class Bench:
    """Target and drafter, and what has been measured so far."""

    def __init__(self, folder: Path, rounds: int) -> None:
        gpus = torch.cuda.device_count()
        self.device = torch.device("cuda", 0) if gpus else torch.device("cpu")
        other = torch.device("cuda", gpus - 1) if gpus else torch.device("cpu")
        self.kinds = ["pinned" if gpus else "shm"] + (["cuda_ipc"] if gpus > 1 else [])
        self._folder, self._rounds = folder, rounds
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        arguments = (theirs, folder, other, self.device, rounds)
        self._process = context.Process(target=drafter, args=arguments, daemon=True)
        self._process.start()
        theirs.close()

    def begin(self) -> None:
        """Raises TimeoutError unless the drafter gets ready."""
        self._hear()

    def measure(self, size: int) -> dict[str, Any]:
        """All tables for packs of `size` bytes."""
        found: dict[str, Any] = {"pack_mib": size // MIB}
        for kind in self.kinds:
            source = Source(self._folder, kind, size, self.device)
            moved = source.pack["features"].nbytes
            if kind != "cuda_ipc":
                found |= {"pinned": source.pinned}
                found["d2h"] = table(moved, measure_d2h(source, self.device, self._rounds))
            self._pipe.send([source.write() for _ in range(SLOTS)])
            found["ring" if kind == "cuda_ipc" else "h2d"] = table(moved, self._hear())
            source.close()
        return found

    def close(self) -> None:
        self._process.kill()
        self._process.join(PATIENCE_S)

    def _hear(self) -> Any:
        if not self._pipe.poll(PATIENCE_S):
            raise TimeoutError(f"the drafter has said nothing for {PATIENCE_S:.0f} s")
        return self._pipe.recv()


def table(size: int, taken: Samples) -> dict[str, Any]:
    """Median GB/s of each way, and ratios to the plain copy taken in the same manner."""
    seconds = {name: statistics.median(values) for name, values in taken.items()}
    ratios = {
        f"{name}_of_plain": round(seconds[f"{name.split('_')[0]}_plain"] / value, 3)
        for name, value in seconds.items()
        if not name.endswith("plain")
    }
    return {
        "gb_per_s": {name: round(size / value / 1e9, 2) for name, value in seconds.items()},
        "pack_ms": {name: round(value * 1e3, 4) for name, value in seconds.items()},
        **ratios,
    }


def judge(sizes: list[dict[str, Any]]) -> dict[str, Any]:
    """Each ratio that the bar asks for, and whether all reach it (None: no size is large enough)."""
    wanted = {"d2h": "one_slot_of_plain", "h2d": "burst_slot_of_plain", "ring": "burst_slot_of_plain"}
    ratios = {
        f"{name}_{found['pack_mib']}": found[name][ratio]
        for found in sizes
        if found["pack_mib"] >= BAR_FROM_MIB
        for name, ratio in wanted.items()
        if ratio in found.get(name, {})
    }
    return {"bar": BAR, "ratios": ratios, "reached": min(ratios.values()) >= BAR if ratios else None}


def machine() -> dict[str, Any]:
    """Where the figures come from."""
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return {
        "gpus": gpus,
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="write the JSON there too")
    parser.add_argument("--sizes", default="16,64,256", help="MiB, comma-separated")
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    torch.set_num_threads(1)
    begun_s = time.monotonic()
    sizes: list[dict[str, Any]] = []
    result: dict[str, Any] = {"benchmark": "copies", "machine": machine(), "sizes": sizes}
    if torch.cuda.device_count() < 2:
        print("ring: left out, it needs two GPUs", file=sys.stderr)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that nothing is left in /dev/shm
    with tempfile.TemporaryDirectory(prefix="draftmill-", dir="/dev/shm") as name, ExitStack() as ends:
        try:
            bench = Bench(Path(name), options.rounds)
            ends.callback(bench.close)
            bench.begin()
            for mib in map(int, options.sizes.split(",")):
                sizes.append(bench.measure(mib * MIB))
                print(f"{mib} MiB after {time.monotonic() - begun_s:.1f} s", file=sys.stderr)
        except Exception as error:  # noqa: BLE001 - what was measured before is worth its JSON
            result["error"] = f"{type(error).__name__}: {error}"
    result |= {"judged": judge(sizes), "seconds": round(time.monotonic() - begun_s, 1)}
    text = json.dumps(result, indent=1)
    if options.out:
        options.out.write_text(text + "\n", encoding="utf-8")
    print(text)
    return 1 if "error" in result else 0


if __name__ == "__main__":
    sys.exit(main())
