"""Sections of a slot as tensors: the same bytes, named and shaped. No copy, 3 us a section."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from protocol.descriptors import ITEM_BYTES, Dtype, section_bytes
from protocol.messages import Section
from services.transport.layout import place

DTYPES: dict[Dtype, torch.dtype] = {name: getattr(torch, name) for name in ITEM_BYTES}
NAMES: dict[torch.dtype, Dtype] = {dtype: name for name, dtype in DTYPES.items()}


def sections_of(tensors: Mapping[str, Tensor]) -> tuple[Section, ...]:
    """Where each tensor would lie in a slot, in the order given. KeyError: a dtype that cannot be shipped."""
    return place((name, NAMES[tensor.dtype], tuple(tensor.shape)) for name, tensor in tensors.items())


def view(payload_B: Tensor, section: Section) -> Tensor:
    """The tensor of `section` inside a uint8 payload."""
    raw_B = payload_B[section.offset : section.offset + section_bytes(section)]
    return raw_B.view(DTYPES[section.dtype]).view(section.shape)


def with_index(device: torch.device) -> torch.device:
    """`cuda` as `cuda:0` or whichever is current, so that every thread means the same one."""
    if device.type != "cuda" or device.index is not None:
        return device
    return torch.device("cuda", torch.cuda.current_device())
