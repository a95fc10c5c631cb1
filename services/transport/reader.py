"""The drafter's side of arenas: a descriptor goes in, the pack's tensors come out.

On a CPU they are views of the slot, without a copy; on a GPU one asynchronous copy of the whole payload
on a stream of its own. Nothing in a descriptor is followed before it is proved to fit the arena, and
`verify` tells afterwards whether what was read is what was announced, `confirm` whether that held to the
end of its use:

    StalePack     the slot, its owner or its file has moved on: discard it, the coordinator knows
    CorruptPack   the slot is current and its contents are not: stop, and name it

Arenas stay mapped until `keep` leaves them out and the last tensor from them is gone.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from protocol.arena import Arena, SlotHeader
from protocol.descriptors import check_descriptor
from protocol.errors import ConfigError, CorruptPack, DecodeError, DraftmillError, StalePack
from protocol.messages import Descriptor
from services.transport.checksum import checksum
from services.transport.cuda_ipc import RingPacks
from services.transport.pinned import PinnedPacks
from services.transport.shm import HostPacks, HostPacksOnGpu
from services.transport.views import view, with_index


class Packs(Protocol):
    """Where payloads of one arena are read from, whatever memory that is."""

    arena: Arena

    @property
    def stream(self) -> torch.cuda.Stream | None:
        """Of the copies; None on a CPU."""

    def fetch(self, descriptor: Descriptor) -> tuple[Tensor, torch.cuda.Event | None]:
        """The payload, uint8 [payload_bytes], and the event that completes it (None: complete)."""

    def still_good(self) -> bool:
        """Whether what was read before now was the owner's memory, not a dead one's or a cut file's zeros."""


class PackTensors(Mapping[str, Tensor]):
    """The sections of one pack by name. On a GPU `wait` comes before their first use."""

    def __init__(self, packs: Packs, descriptor: Descriptor) -> None:
        self.descriptor = descriptor
        self._packs = packs
        self._payload_B, self._done = packs.fetch(descriptor)
        self._tensors = {section.name: view(self._payload_B, section) for section in descriptor.sections}

    def wait(self) -> None:
        """Let the current stream wait for the copy; the host does not. Nothing to do on a CPU."""
        if self._done is not None:
            stream = torch.cuda.current_stream(self._payload_B.device)
            stream.wait_event(self._done)
            self._payload_B.record_stream(stream)

    def verify(self) -> None:
        """Wait for the copy, then check that the slot still holds the pack, and its checksum if it has one.

        StalePack, CorruptPack. With a checksum it costs a read of the payload, without one 10 us.
        """
        if self._done is not None:
            self._done.synchronize()
        check_header(self._packs.arena, self.descriptor, CorruptPack)
        self._check_memory()
        expected = self.descriptor.checksum
        if expected is None:
            return
        stream = self._packs.stream  # not behind the packs that are being trained on
        with torch.cuda.stream(stream) if stream is not None else nullcontext():
            found = checksum(self._payload_B)
        if found != expected:
            check_header(self._packs.arena, self.descriptor, CorruptPack)
            self._check_memory()
            raise CorruptPack(
                f"{_name(self.descriptor)} has checksum {found:#x}, it was sealed with {expected:#x}"
            )

    def confirm(self) -> None:
        """After the last use of tensors that are views of the slot: StalePack if its file was cut under them.

        A copy was complete when it was verified, and stays good.
        """
        if self._done is None:
            self._check_memory()

    def _check_memory(self) -> None:
        if not self._packs.still_good():
            raise StalePack(f"{_name(self.descriptor)}: its target died, or its file was cut under it")

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


class SlotReader:
    """Opens packs of any arena in `folder` for `device`. One thread opens and keeps."""

    def __init__(self, folder: Path, device: torch.device) -> None:
        self._folder = folder
        self._device = with_index(device)
        self._kept: dict[str, Packs] = {}
        self._mapped: weakref.WeakValueDictionary[str, Packs] = weakref.WeakValueDictionary()

    def use_device(self) -> None:
        """Of the thread that opens. Threads begin on GPU 0, and would make themselves a context there."""
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)

    @property
    def mapped(self) -> frozenset[str]:
        """Arenas that are mapped now, for being kept or for a pack still held."""
        return frozenset(self._mapped)

    def open(self, descriptor: Descriptor) -> PackTensors:
        """The pack that `descriptor` announces.

        DecodeError: the descriptor does not fit its arena, or contradicts the slot it names. StalePack: the
        slot, or the arena, is no longer what was announced. CorruptPack: its owner did not write it.
        """
        packs = self._packs(descriptor.arena)
        check_descriptor(descriptor, slots=packs.arena.slots, slot_bytes=packs.arena.slot_bytes)
        check_header(packs.arena, descriptor, DecodeError)
        return PackTensors(packs, descriptor)

    def keep(self, arenas: Collection[str]) -> None:
        """Unmap every other arena, each when the last pack from it is dropped."""
        self._kept = {name: packs for name, packs in self._kept.items() if name in arenas}

    def close(self) -> None:
        """Unmap them all, each when the last pack from it is dropped."""
        self.keep(())

    def _packs(self, name: str) -> Packs:
        packs = self._kept.get(name) or self._mapped.get(name)
        if packs is None:
            packs = _packs_of(Arena.open(self._folder, name), self._device)
            self._mapped[name] = packs
        self._kept[name] = packs
        return packs


def check_header(arena: Arena, descriptor: Descriptor, otherwise: type[DraftmillError]) -> None:
    """StalePack unless the slot holds the attempt announced; `otherwise` if it says other things of it."""
    header = arena.header(descriptor.slot)
    if header is None or header.attempt != descriptor.attempt:
        holds = "nothing whole" if header is None else f"attempt {header.attempt}"
        raise StalePack(f"{_name(descriptor)}: the slot holds {holds}")
    announced = SlotHeader(
        descriptor.batch, descriptor.attempt, descriptor.payload_bytes, descriptor.checksum
    )
    if header != announced:
        raise otherwise(f"{_name(descriptor)} was announced as {announced}, the slot says {header}")


def _packs_of(arena: Arena, device: torch.device) -> Packs:
    if device.type != "cuda":
        if arena.kind == "cuda_ipc":
            raise ConfigError(
                f"{arena.path} is in GPU memory, this drafter is on {device}; use arena.kind = pinned"
            )
        return HostPacks(arena)
    if arena.kind == "cuda_ipc":
        return RingPacks(arena, device)
    return PinnedPacks(arena, device) if arena.kind == "pinned" else HostPacksOnGpu(arena, device)


def _name(descriptor: Descriptor) -> str:
    return f"slot {descriptor.slot} of {descriptor.arena} (attempt {descriptor.attempt})"
