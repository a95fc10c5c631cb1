"""Targets and drafters that are really killed in the middle of a copy; children of a forkserver.

Packs are drawn from their number, on the device, so every process knows each bit of each. A victim starts a
thread that sends SIGKILL to its own process after a share of the time that its copies have taken so far: the
death lies in the copy, not somewhere near it.

    target    ("write", number, slot) -> ("written", hex of the Pack, seconds)    ("die", number, slot, share)
    drafter   ("open", hex) -> "ok", or the name of what it found                 ("die", hex, share)
    each      ("leave",) -> its own account of what it still holds

Not a test module: a forkserver that asked for GPUs could not have children that use them.
"""

from __future__ import annotations

import os
import signal
import statistics
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from protocol.arena import lock_name
from protocol.codec import decode, encode
from protocol.errors import DraftmillError
from protocol.files import FileLock
from protocol.messages import BatchId, Pack, Stamp
from services.transport.layout import payload_bytes
from services.transport.reader import PackTensors, SlotReader
from services.transport.views import sections_of
from services.transport.writer import SlotWriter

WIDTH = 2048
ODD = 0x1E3779B97F4A7C15
WARM = 3  # copies whose time says how long one takes


def features_of(number: int, tokens: int, device: torch.device) -> Tensor:
    """bfloat16 [tokens, WIDTH] whose bits, read as int64, are a different line for each `number`."""
    words_W = torch.arange(tokens * WIDTH // 4, dtype=torch.int64, device=device)
    return (words_W * ODD + number * 7919).view(torch.bfloat16).view(tokens, WIDTH)


def is_pack(pack: dict[str, Tensor], number: int) -> bool:
    """Whether `pack` is number `number`, compared bit by bit where it lies."""
    features_TF = pack["features"]
    expected_TF = features_of(number, features_TF.shape[0], features_TF.device)
    return torch.equal(features_TF.view(torch.int64), expected_TF.view(torch.int64)) and bool(
        (pack["input_ids"] == number).all()
    )


def pack_of(number: int, tokens: int, device: torch.device) -> dict[str, Tensor]:
    return {
        "features": features_of(number, tokens, device),
        "input_ids": torch.full((tokens,), number, dtype=torch.int32),
        "loss_mask": torch.ones(tokens, dtype=torch.uint8),
        "position_ids": torch.arange(tokens, dtype=torch.int32),
        "document_offsets": torch.tensor([0, tokens], dtype=torch.int32),
        "sample_ids": torch.tensor([number], dtype=torch.int64),
    }


def begin(device: torch.device) -> None:
    torch.set_num_threads(1)
    if device.type == "cuda":
        torch.cuda.set_device(device)


def kill_after(seconds: float) -> None:
    """SIGKILL to this process, from a thread that nothing holds up."""
    timer = threading.Timer(seconds, os.kill, [os.getpid(), signal.SIGKILL])
    timer.daemon = True
    timer.start()


def target(
    pipe: Connection, folder: Path, name: str, kind: str, device: torch.device, tokens: int, slots: int
) -> None:
    """Writes what it is told to; the copies go through the same writer as in a run."""
    begin(device)
    FileLock(folder / lock_name(name)).acquire()
    size = payload_bytes(sections_of(pack_of(0, tokens, torch.device("cpu"))))
    writer = SlotWriter.create(
        folder, name, slots=slots, slot_bytes=size, kind=kind, checksum="always", device=device
    )
    fills = Fills(writer)
    pipe.send((writer.kind, bool(getattr(writer._slots, "pinned", False))))
    while True:
        what, *rest = pipe.recv()
        if what == "leave":
            writer.close()
            pipe.send(account(device))
            return
        number, slot = rest[:2]
        shipped, ready = pack_of(number, tokens, device), None
        if device.type == "cuda":
            ready = torch.cuda.Event()
            ready.record()
            torch.cuda.synchronize(device)  # what is timed, and killed, is the copy
        if what == "die":
            fills.die_after = rest[2] * statistics.median(fills.seconds)
        descriptor = writer.write(slot, BatchId(0, number), Stamp(1, number), shipped, ready=ready)
        message = Pack(target=name, lease=Stamp(2, number), descriptor=descriptor)
        pipe.send(("written", encode(message)[1].hex()))


class Fills:
    """Times the copies of a writer, and on demand starts the clock of death as one begins."""

    def __init__(self, writer: SlotWriter) -> None:
        self._fill = writer._slots.fill
        self.seconds: list[float] = []
        self.die_after: float | None = None
        writer._slots.fill = self  # type: ignore[method-assign, assignment]

    def __call__(self, *arguments: Any) -> None:
        if self.die_after is not None:
            kill_after(self.die_after)
        begun_s = time.perf_counter()
        self._fill(*arguments)
        self.seconds.append(time.perf_counter() - begun_s)


def drafter(pipe: Connection, folder: Path, device: torch.device) -> None:
    """Opens what it is told to, and holds each good pack while it opens the next."""
    begin(device)
    reader = SlotReader(folder, device)
    held: PackTensors | None = None
    seconds: list[float] = []
    pipe.send("ready")
    while True:
        what, *rest = pipe.recv()
        if what in ("keep", "leave"):
            held = None
            reader.keep(rest[0] if rest else ())
            pipe.send(account(device) | {"mapped": sorted(reader.mapped)})
            if what == "leave":
                return
            continue
        if what == "die":
            kill_after(rest[1] * statistics.median(seconds))
        try:
            said, found = look(reader, bytes.fromhex(rest[0]), seconds)
        except RuntimeError as error:  # CUDA will not work in this process any more
            pipe.send(f"CUDA: {str(error).splitlines()[0]}")
            return
        held, found = found or held, None
        pipe.send(said)


def look(reader: SlotReader, packed: bytes, seconds: list[float]) -> tuple[str, PackTensors | None]:
    """What a drafter makes of one message: copy, compare, and only then ask whether it was to be trusted."""
    message = decode([b"Pack", packed])
    assert isinstance(message, Pack)
    try:
        begun_s = time.perf_counter()
        found = reader.open(message.descriptor)
        pack = copied(found)
        seconds.append(time.perf_counter() - begun_s)
        right = is_pack(pack, message.descriptor.batch.index)
        found.verify()
    except DraftmillError as error:
        return type(error).__name__, None
    return "ok" if right else "other bits", found


def copied(found: PackTensors) -> dict[str, Tensor]:
    """The sections once they are on the device; on a CPU, where they are views of the slot, a copy."""
    found.wait()
    if found["features"].is_cuda:
        torch.cuda.current_stream().synchronize()
        return dict(found)
    return {name: tensor.clone() for name, tensor in found.items()}


def account(device: torch.device) -> dict[str, Any]:
    """Mappings of removed files, and of a GPU's memory what torch has handed out."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    return {
        "deleted_maps": [line for line in maps if ".arena" in line and line.endswith("(deleted)")],
        "allocated": torch.cuda.memory_allocated(device) if device.type == "cuda" else 0,
    }


def free_bytes(pipe: Connection, gpus: int) -> None:
    """Free memory of each GPU, seen by a process that has none itself but its contexts."""
    found = []
    for index in range(gpus):
        torch.cuda.set_device(index)
        found.append(torch.cuda.mem_get_info(index)[0])
    pipe.send(found)
