"""Slots and packs in host memory that both processes have mapped: one memcpy in, none out (on a CPU).

A GPU's copies run on a stream of their own, waited for by one blocking event, so neither the forward nor
the training step is waited for and no core spins.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from protocol.arena import Arena
from protocol.messages import Descriptor, Section
from services.transport.checksum import checksum
from services.transport.views import view


class HostSlots:
    """The writer's side of an arena in host memory."""

    def __init__(self, arena: Arena, device: torch.device) -> None:
        self._payloads = [host_payload(arena, slot) for slot in range(arena.slots)]
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._done = torch.cuda.Event(blocking=True) if device.type == "cuda" else None

    def fill(
        self,
        slot: int,
        sections: tuple[Section, ...],
        tensors: Mapping[str, Tensor],
        ready: torch.cuda.Event | None,
    ) -> None:
        """Copy in, and wait for it."""
        if self._stream is None or self._done is None:
            self._copy(slot, sections, tensors)
            return
        assert ready is not None or not any(tensor.is_cuda for tensor in tensors.values()), (
            "when are they ready?"
        )
        with torch.cuda.stream(self._stream):
            if ready is not None and not ready.query():
                self._stream.wait_event(ready)
            self._copy(slot, sections, tensors)
            self._done.record(self._stream)
            self._done.synchronize()

    def checksum(self, slot: int, size: int) -> int:
        """Of the first `size` bytes of `slot`."""
        return checksum(self._payloads[slot][:size])

    @torch.no_grad()
    def _copy(self, slot: int, sections: tuple[Section, ...], tensors: Mapping[str, Tensor]) -> None:
        payload_B = self._payloads[slot]
        for section in sections:
            view(payload_B, section).copy_(tensors[section.name], non_blocking=True)

    def close(self) -> None:
        """Let go of the views, so the mapping can end."""
        self._payloads.clear()


class HostPacks:
    """The reader's side on a CPU: tensors are views of the slot itself, as good as its file."""

    stream = None

    def __init__(self, arena: Arena) -> None:
        self.arena = arena

    def fetch(self, descriptor: Descriptor) -> tuple[Tensor, torch.cuda.Event | None]:
        """The payload, uint8 [payload_bytes], in place. It keeps the mapping alive by itself."""
        return host_payload(self.arena, descriptor.slot)[: descriptor.payload_bytes], None

    def still_good(self) -> bool:
        """Mapped memory outlives the process that wrote it, but not a cut of its file."""
        return self.arena.is_whole()


class HostPacksOnGpu:
    """The reader's side on a GPU: one asynchronous copy of the whole payload into fresh device memory."""

    def __init__(self, arena: Arena, device: torch.device) -> None:
        self.arena = arena
        self._device = device
        self.stream = torch.cuda.Stream(device)

    def fetch(self, descriptor: Descriptor) -> tuple[Tensor, torch.cuda.Event | None]:
        """The payload, uint8 [payload_bytes], on the device once the event has come."""
        host_B = host_payload(self.arena, descriptor.slot)[: descriptor.payload_bytes]
        done = torch.cuda.Event(blocking=True)
        with torch.cuda.stream(self.stream):
            payload_B = torch.empty(descriptor.payload_bytes, dtype=torch.uint8, device=self._device)
            payload_B.copy_(host_B, non_blocking=True)
            done.record(self.stream)
        return payload_B, done

    def still_good(self) -> bool:
        """Mapped memory outlives the process that wrote it, but not a cut of its file."""
        return self.arena.is_whole()


def host_payload(arena: Arena, slot: int) -> Tensor:
    """All bytes of `slot` as uint8 [slot_bytes], without a copy."""
    return torch.frombuffer(arena.payload(slot), dtype=torch.uint8)
