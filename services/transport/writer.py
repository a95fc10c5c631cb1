"""The target's side of an arena: a pack's sections go into a slot, and a descriptor of it comes out.

    invalidate header -> sections into the slot -> the host has seen them complete -> checksum -> file whole?
    -> seal

    shm       the slot is host memory; a CPU copies at memcpy speed, a GPU through a staging buffer
    pinned    the same file, pinned for the GPU: 55 GB/s instead of 12
    cuda_ipc  the slot is in a ring on the target's own GPU: 1.9 TB/s, but it dies with the target
    auto      shm on a CPU; on a GPU pinned, or cuda_ipc if the folder cannot hold the arena

One thread writes. Exactly one copy, no allocation, no pickle.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol, Self

import torch
from torch import Tensor

from protocol.arena import KINDS, Arena, Computing, Kind, SlotHeader, arena_bytes, arena_name, free_bytes
from protocol.descriptors import check_descriptor
from protocol.errors import ConfigError
from protocol.messages import BatchId, Descriptor, Section, Stamp
from services.transport.checksum import wants_checksum
from services.transport.cuda_ipc import RingSlots
from services.transport.layout import payload_bytes
from services.transport.pinned import PinnedSlots
from services.transport.shm import HostSlots
from services.transport.views import sections_of, with_index

log = logging.getLogger(__name__)


class Slots(Protocol):
    """Where payloads of one arena are written, whatever memory that is."""

    def fill(
        self,
        slot: int,
        sections: tuple[Section, ...],
        tensors: Mapping[str, Tensor],
        ready: torch.cuda.Event | None,
    ) -> None:
        """Copy `tensors` to their sections of `slot`; return when the host has seen the copy complete."""

    def checksum(self, slot: int, size: int) -> int:
        """Of the first `size` bytes of `slot`."""

    def close(self) -> None:
        """Give the memory up. Readers keep what they have mapped."""


class SlotWriter:
    """Writes packs into one arena and describes them."""

    def __init__(self, arena: Arena, slots: Slots, checksum: str) -> None:
        self._arena = arena
        self._slots = slots
        self._checksum = checksum
        self.kind: Kind = arena.kind
        self.arena_name = arena_name(arena.incarnation)
        self.slots = arena.slots
        self.slot_bytes = arena.slot_bytes

    @classmethod
    def create(
        cls,
        folder: Path,
        incarnation: str,
        *,
        slots: int,
        slot_bytes: int,
        kind: str = "auto",
        checksum: str = "sampled",
        device: torch.device,
    ) -> Self:
        """The arena of a new incarnation whose target computes on `device`; its lock must be held already.

        ArenaFull: the folder, or the GPU, has no room for it. ConfigError: the kind needs a GPU.
        """
        device = with_index(device)
        chosen = _choose(kind, folder, slots, slot_bytes, device)
        arena = Arena.create(folder, incarnation, kind=chosen, slots=slots, slot_bytes=slot_bytes)
        try:
            return cls(arena, _slots_of(arena, device), checksum)
        except BaseException:
            arena.unlink()
            raise

    def write(
        self,
        slot: int,
        batch: BatchId,
        attempt: Stamp,
        tensors: Mapping[str, Tensor],
        *,
        ready: torch.cuda.Event | None = None,
    ) -> Descriptor:
        """Put a pack (see protocol/descriptors.py for its sections) into `slot` and describe it.

        Blocks until the host has seen the copy complete. `ready` was recorded on the stream that
        produced the tensors, after their last byte; those on a GPU need it, and live until the return.
        DecodeError, before anything is written: these tensors are no pack, or too large for a slot.
        RetryError: the arena's file was removed or cut.
        """
        sections = sections_of(tensors)
        descriptor = Descriptor(
            arena=self.arena_name,
            slot=slot,
            batch=batch,
            attempt=attempt,
            tokens=tensors["input_ids"].shape[0],
            payload_bytes=payload_bytes(sections),
            checksum=None,
            sections=sections,
        )
        check_descriptor(descriptor, slots=self.slots, slot_bytes=self.slot_bytes)
        self._arena.invalidate(slot)
        self._slots.fill(slot, sections, tensors, ready)
        if wants_checksum(self._checksum, attempt.counter):
            checksum = self._slots.checksum(slot, descriptor.payload_bytes)
            descriptor = descriptor.model_copy(update={"checksum": checksum})
        self._arena.check_file()  # a cut before the checksum would have been sealed with it, zeros and all
        self._arena.seal(slot, SlotHeader(batch, attempt, descriptor.payload_bytes, descriptor.checksum))
        return descriptor

    def invalidate(self, slot: int) -> None:
        """`slot` holds no pack any longer: whoever still reads it finds it stale."""
        self._arena.invalidate(slot)

    def set_computing(self, batch: BatchId | None, attempt: Stamp | None = None) -> None:
        """Say in the file whose forward runs now (None: nobody's), for the day this process dies in it."""
        self._arena.set_computing(None if batch is None or attempt is None else Computing(batch, attempt))

    def check_file(self) -> None:
        """RetryError: the arena's file was removed or cut, so that nobody can map it any more. 2 us."""
        self._arena.check_file()

    def close(self) -> None:
        """Unlink the file and give the memory up."""
        self._arena.unlink()
        self._slots.close()
        self._arena.close()


def _choose(kind: str, folder: Path, slots: int, slot_bytes: int, device: torch.device) -> Kind:
    if kind != "auto":
        if kind != "shm" and device.type != "cuda":
            raise ConfigError(
                f"arena.kind = {kind} needs a target on a GPU, this one is on {device}; use shm"
            )
        return KINDS[KINDS.index(kind)]
    chosen: Kind
    if device.type != "cuda":
        chosen, reason = "shm", "the target computes on a CPU"
    elif arena_bytes("pinned", slots, slot_bytes) <= free_bytes(folder):
        chosen, reason = "pinned", "the target computes on a GPU"
    else:
        chosen, reason = "cuda_ipc", f"{folder} has {free_bytes(folder):,} bytes free, too few for the arena"
    log.info("arena kind chosen", extra={"kind": chosen, "reason": reason})
    return chosen


def _slots_of(arena: Arena, device: torch.device) -> Slots:
    if arena.kind == "cuda_ipc":
        return RingSlots(arena, device)
    if arena.kind == "pinned":
        return PinnedSlots(arena, device)
    return HostSlots(arena, device)
