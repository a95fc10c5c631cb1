"""What a pack consists of, and the proof that a descriptor fits its slot before anybody follows it.

A slot's payload is a row of sections, each starting on a multiple of 64 bytes:

    features          float  [tokens, taps * hidden]    or, with split taps,
    features.0 ..     float  [tokens, hidden]           one section a tap, numbered from 0
    last_hidden       float  [tokens, hidden]           only if loss or labels need it
    input_ids         int32  [tokens]
    loss_mask         uint8  [tokens]
    position_ids      int32  [tokens]                   restarting at each document
    document_offsets  int32  [documents + 1]
    sample_ids        int64  [documents]

A descriptor comes from another process, so offsets, lengths, names, types and shapes are checked
against each other and the arena first: 15 us a pack. Torch-free.
"""

from __future__ import annotations

import math
import re
from typing import Literal

from protocol.errors import DecodeError
from protocol.messages import Descriptor, Section

ALIGN_BYTES = 64
Dtype = Literal["float32", "bfloat16", "float16", "float8_e4m3fn", "int64", "int32", "uint8"]
ITEM_BYTES: dict[Dtype, int] = {
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "int64": 8,
    "int32": 4,
    "uint8": 1,
}  # fmt: skip
_FLOATS = frozenset({"float32", "bfloat16", "float16", "float8_e4m3fn"})
_SPLIT = re.compile(r"features\.(0|[1-9][0-9]?)")
_INTEGERS = {
    "input_ids": "int32",
    "loss_mask": "uint8",
    "position_ids": "int32",
    "document_offsets": "int32",
    "sample_ids": "int64",
}


def align(count_bytes: int, to_bytes: int = ALIGN_BYTES) -> int:
    """The next multiple of `to_bytes`."""
    return -(-count_bytes // to_bytes) * to_bytes


def section_bytes(section: Section) -> int:
    """Bytes of the tensor itself, without the gap behind it."""
    return math.prod(section.shape) * ITEM_BYTES[section.dtype]


def check_descriptor(descriptor: Descriptor, *, slots: int, slot_bytes: int) -> None:
    """DecodeError unless every byte `descriptor` speaks of lies inside its slot and means what it should."""
    if descriptor.slot >= slots:
        raise _wrong(descriptor, f"slot {descriptor.slot} of an arena of {slots}")
    if descriptor.payload_bytes > slot_bytes:
        raise _wrong(descriptor, f"payload of {descriptor.payload_bytes:,} bytes in slots of {slot_bytes:,}")
    _check_places(descriptor)
    _check_names(descriptor)
    documents = sum(s.shape[0] for s in descriptor.sections if s.name == "sample_ids" and s.shape)
    for section in descriptor.sections:
        _check_meaning(descriptor, section, documents)


def _check_places(descriptor: Descriptor) -> None:
    end = 0
    for section in sorted(descriptor.sections, key=lambda section: section.offset):
        if section.offset % ALIGN_BYTES:
            raise _wrong(
                descriptor, f"section {section.name} at {section.offset}, no multiple of {ALIGN_BYTES}"
            )
        if section.offset < end:
            raise _wrong(descriptor, f"section {section.name} at {section.offset} overlaps another")
        end = section.offset + section_bytes(section)
    if end > descriptor.payload_bytes:
        raise _wrong(descriptor, f"sections end at {end:,}, the payload at {descriptor.payload_bytes:,}")


def _check_names(descriptor: Descriptor) -> None:
    names = [section.name for section in descriptor.sections]
    split = [name for name in names if _SPLIT.fullmatch(name)]
    features = [f"features.{tap}" for tap in range(len(split))] or ["features"]
    required = {*features, *_INTEGERS}
    if len(set(names)) < len(names) or set(names) - {"last_hidden"} != required:
        raise _wrong(
            descriptor, f"sections {', '.join(names)}; they are {', '.join(sorted(required))}, once each"
        )


def _check_meaning(descriptor: Descriptor, section: Section, documents: int) -> None:
    dtype = _INTEGERS.get(section.name)
    fits = section.dtype in _FLOATS if dtype is None else section.dtype == dtype
    if not fits or len(section.shape) != (2 if dtype is None else 1):
        raise _wrong(descriptor, f"section {section.name} is {section.dtype} {list(section.shape)}")
    rows = descriptor.tokens
    if section.name in {"sample_ids", "document_offsets"}:
        rows = documents + (section.name == "document_offsets")
    if section.shape[0] != rows:
        raise _wrong(descriptor, f"section {section.name} has {section.shape[0]} rows, it must have {rows}")


def _wrong(descriptor: Descriptor, what: str) -> DecodeError:
    attempt = ".".join(str(part) for part in descriptor.attempt)
    return DecodeError(f"descriptor of attempt {attempt} in {descriptor.arena}: {what}")
