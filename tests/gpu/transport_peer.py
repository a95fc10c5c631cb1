"""The two ends of an arena, each in its own process, led line by line from the test.

target FOLDER KIND SPLIT DEVICE PACKS SLOTS
    writes packs; prints each as hex of its message; waits for a line before it reuses a slot
drafter FOLDER DEVICE
    reads hex lines; opens, verifies and compares each bit by bit; prints "ok" or what it found
"""

import sys
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from protocol.arena import lock_name
from protocol.codec import decode, encode
from protocol.errors import DraftmillError
from protocol.files import FileLock
from protocol.messages import BatchId, Pack, Stamp
from services.transport.reader import SlotReader
from services.transport.writer import SlotWriter

INCARNATION = "target-gpu"
HIDDEN, TAPS, MAX_TOKENS = 512, 3, 3000
SLOT_BYTES = MAX_TOKENS * (HIDDEN * TAPS * 2 + 9) + 8192
SPIN_CYCLES = 20_000_000  # 10 ms: a copy that does not wait for its event reads the pack before


def pack(number: int, split: bool, device: torch.device) -> dict[str, Tensor]:
    """Pack `number` of a run, equal in every process; floats on `device`, ids on the host."""
    generator = torch.Generator().manual_seed(number)
    tokens = int(torch.randint(1, MAX_TOKENS, (1,), generator=generator))
    features_TF = torch.randn(tokens, HIDDEN * TAPS, generator=generator).to(torch.bfloat16).to(device)
    taps = features_TF.split(HIDDEN, dim=1)
    features = {f"features.{i}": tap.contiguous() for i, tap in enumerate(taps)}
    return (features if split else {"features": features_TF}) | {
        "input_ids": torch.randint(0, 150_000, (tokens,), generator=generator, dtype=torch.int32),
        "loss_mask": torch.randint(0, 2, (tokens,), generator=generator, dtype=torch.uint8),
        "position_ids": torch.arange(tokens, dtype=torch.int32),
        "document_offsets": torch.tensor([0, tokens], dtype=torch.int32),
        "sample_ids": torch.tensor([number], dtype=torch.int64),
    }


def late(
    tensors: dict[str, Tensor], buffers: dict[str, Tensor]
) -> tuple[dict[str, Tensor], torch.cuda.Event]:
    """The pack in persistent buffers that get their contents 10 ms from now, and the event that says when."""
    torch.cuda.synchronize()
    torch.cuda._sleep(SPIN_CYCLES)
    shipped = dict(tensors)
    for name, tensor in tensors.items():
        if tensor.is_cuda:
            buffer = buffers.setdefault(
                name, torch.zeros(MAX_TOKENS, tensor.shape[1], dtype=tensor.dtype).cuda()
            )
            shipped[name] = buffer[: tensor.shape[0]]
            shipped[name].copy_(tensor)
    ready = torch.cuda.Event()
    ready.record()
    return shipped, ready


def target(folder: Path, kind: str, split: bool, device: torch.device, packs: int, slots: int) -> None:
    torch.cuda.set_device(device)
    FileLock(folder / lock_name(INCARNATION)).acquire()
    writer = SlotWriter.create(
        folder, INCARNATION, slots=slots, slot_bytes=SLOT_BYTES, kind=kind, checksum="always", device=device
    )
    say(f"{writer.kind} {getattr(writer._slots, 'pinned', False)}")
    buffers: dict[str, Tensor] = {}
    for number in range(packs):
        if number >= slots:
            sys.stdin.readline()
        shipped, ready = late(pack(number, split, device), buffers)
        descriptor = writer.write(number % slots, BatchId(0, number), Stamp(1, number), shipped, ready=ready)
        message = Pack(target=INCARNATION, lease=Stamp(2, number), descriptor=descriptor)
        say(encode(message)[1].hex())
    for _ in range(min(slots, packs)):
        sys.stdin.readline()
    writer.close()
    say(f"left {[path.name for path in folder.iterdir()]}")


def drafter(folder: Path, device: torch.device) -> None:
    torch.cuda.set_device(device)
    reader = SlotReader(folder, device)
    held = []  # the last two, so that copies overlap with comparing
    for line in sys.stdin:
        message = decode([b"Pack", bytes.fromhex(line)])
        assert isinstance(message, Pack)
        try:
            got = reader.open(message.descriptor)
            got.wait()
            differs = compare(got, message, device)
            got.verify()
        except DraftmillError as error:
            say(type(error).__name__)
            continue
        assert not bool(differs), f"pack {message.descriptor.batch} differs"
        held = [*held[-1:], got]
        say("ok")
    held.clear()
    got = None
    reader.close()
    say(f"mapped {sorted(reader.mapped)}")


def compare(got: Mapping[str, Tensor], message: Pack, device: torch.device) -> Tensor:
    """Whether any bit differs, as work queued behind the copy: the host has not waited for either."""
    split = "features.0" in got
    sent = pack(message.descriptor.batch.index, split, device)
    differs = [(got[name] != tensor.to(device)).any() for name, tensor in sent.items()]
    return torch.stack(differs).any()


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    role, where, *rest = sys.argv[1:]
    if role == "target":
        target(Path(where), rest[0], rest[1] == "split", torch.device(rest[2]), int(rest[3]), int(rest[4]))
    else:
        drafter(Path(where), torch.device(rest[0]))
