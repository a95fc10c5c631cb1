"""Slots in a ring on the target's GPU that drafters of the same host copy out of: no host memory, no PCIe.

The ring is one driver allocation, made once, outside PyTorch's allocator (so whatever its segments are);
its 64-byte handle is in the arena's file header, next to the slot headers. A drafter opens it once, with
its own device's index, and copies a pack out at once: the ring dies with its target, so a pack is good
only if the owner's lock was still held after the copy's event. 1.9 TB/s on one GPU, 385 GB/s over NVLink.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping

import torch
from torch import Tensor

from protocol.arena import Arena, lock_name
from protocol.descriptors import align, section_bytes
from protocol.errors import ArenaFull, ConfigError, StalePack
from protocol.files import is_alive
from protocol.messages import Descriptor, Section
from services.transport.checksum import checksum
from services.transport.driver import Driver, DriverError

_STRIDE_UNIT_BYTES = 4096


class RingSlots:
    """The writer's side: owns the ring."""

    def __init__(self, arena: Arena, device: torch.device) -> None:
        """ArenaFull: the GPU has no room for the ring."""
        torch.cuda.init()
        self._device = device
        self._driver = Driver(device.index or 0)
        self._stride = align(arena.slot_bytes, _STRIDE_UNIT_BYTES)
        size = arena.slots * self._stride
        try:
            self._ring = self._driver.allocate(size)
        except DriverError as error:
            if not error.out_of_memory:
                raise
            raise ArenaFull(
                f"the ring of {arena.slots} slots needs {size:,} bytes of {device}, "
                f"{self._driver.free_bytes():,} are free; lower target.slots or use arena.kind = pinned"
            ) from error
        arena.ring_handle = self._driver.export(self._ring)
        self._stream = torch.cuda.Stream(device)
        self._done = torch.cuda.Event(blocking=True)

    def fill(
        self,
        slot: int,
        sections: tuple[Section, ...],
        tensors: Mapping[str, Tensor],
        ready: torch.cuda.Event | None,
    ) -> None:
        """Copy in, and wait for it."""
        assert ready is not None or not any(tensor.is_cuda for tensor in tensors.values()), (
            "when are they ready?"
        )
        start = self._ring + slot * self._stride
        with torch.no_grad(), torch.cuda.stream(self._stream):
            if ready is not None:
                self._stream.wait_event(ready)
            sources = [tensors[section.name].contiguous() for section in sections]
            for section, source in zip(sections, sources, strict=True):
                size = section_bytes(section)
                if size:
                    self._driver.copy(
                        start + section.offset, source.data_ptr(), size, self._stream.cuda_stream
                    )
            self._done.record(self._stream)
            self._done.synchronize()

    def checksum(self, slot: int, size: int) -> int:
        """Of the first `size` bytes of `slot`, read back, so that gaps between sections count as they are."""
        with torch.cuda.stream(self._stream):
            read_B = torch.empty(size, dtype=torch.uint8, device=self._device)
            start = self._ring + slot * self._stride
            self._driver.copy(read_B.data_ptr(), start, size, self._stream.cuda_stream)
            return checksum(read_B)

    def close(self) -> None:
        """Free the ring. The driver keeps the pages while another process has them open."""
        self._stream.synchronize()
        self._driver.free(self._ring)


class RingPacks:
    """The reader's side: opens the ring once, closes it when the last pack of the arena is dropped."""

    def __init__(self, arena: Arena, device: torch.device) -> None:
        """StalePack: the target is dead. ConfigError: this GPU does not reach the ring."""
        torch.cuda.init()
        self.arena = arena
        self._device = device
        self._driver = Driver(device.index or 0)
        self._stride = align(arena.slot_bytes, _STRIDE_UNIT_BYTES)
        try:
            self._ring = self._driver.open(arena.ring_handle)
        except DriverError as error:
            if not self.still_good():
                raise StalePack(f"the ring of {arena.path} died with its target") from error
            raise ConfigError(
                f"the ring of {arena.path} cannot be opened from {device}: {error}; use arena.kind = pinned"
            ) from error
        self.stream = torch.cuda.Stream(device)
        weakref.finalize(self, _close, self._driver, self._ring, self.stream)

    def fetch(self, descriptor: Descriptor) -> tuple[Tensor, torch.cuda.Event | None]:
        """The payload, uint8 [payload_bytes], on the device once the event has come."""
        done = torch.cuda.Event(blocking=True)
        with torch.cuda.stream(self.stream):
            payload_B = torch.empty(descriptor.payload_bytes, dtype=torch.uint8, device=self._device)
            start = self._ring + descriptor.slot * self._stride
            self._driver.copy(payload_B.data_ptr(), start, descriptor.payload_bytes, self.stream.cuda_stream)
            done.record(self.stream)
        return payload_B, done

    def still_good(self) -> bool:
        """Whether the owner's lock is held now, which is to be asked after the copy's event."""
        return is_alive(self.arena.path.with_name(lock_name(self.arena.incarnation)))


def _close(driver: Driver, ring: int, stream: torch.cuda.Stream) -> None:
    stream.synchronize()
    driver.close(ring)
