"""How many bytes a pack takes, and where in a slot each of its sections lies. Torch-free.

With Qwen3-8B (hidden 4096, 5 taps, bf16) a token takes 40,969 bytes, a pack of 4,096 tokens 160 MiB.
"""

from __future__ import annotations

from collections.abc import Iterable

from protocol.descriptors import ALIGN_BYTES, ITEM_BYTES, Dtype, align, section_bytes
from protocol.messages import Section
from services.config.schema import Config


def place(sections: Iterable[tuple[str, Dtype, tuple[int, ...]]]) -> tuple[Section, ...]:
    """Sections (name, dtype, shape) one behind the other, each on a multiple of 64 bytes."""
    placed = []
    offset = 0
    for name, dtype, shape in sections:
        section = Section(name=name, dtype=dtype, shape=shape, offset=offset)
        placed.append(section)
        offset = align(offset + section_bytes(section))
    return tuple(placed)


def payload_bytes(sections: Iterable[Section]) -> int:
    """Bytes from the start of the slot's payload to the end of the last section's last 64 bytes."""
    return max((align(section.offset + section_bytes(section)) for section in sections), default=0)


def pack_sections(
    config: Config, *, hidden: int, taps: int, tokens: int, documents: int
) -> tuple[Section, ...]:
    """Every section of a pack of `tokens` tokens from `documents` documents."""
    dtype = config.model.dtype
    if config.target.split_fc_layers:
        features = [(f"features.{tap}", dtype, (tokens, hidden)) for tap in range(taps)]
    else:
        features = [("features", dtype, (tokens, taps * hidden))]
    last = [("last_hidden", dtype, (tokens, hidden))] if config.recipe.needs_last_hidden else []
    return place(
        [
            *features,
            *last,
            ("input_ids", "int32", (tokens,)),
            ("loss_mask", "uint8", (tokens,)),
            ("position_ids", "int32", (tokens,)),
            ("document_offsets", "int32", (documents + 1,)),
            ("sample_ids", "int64", (documents,)),
        ]
    )


def bytes_per_token(config: Config, *, hidden: int, taps: int) -> int:
    """Bytes a further token adds to a pack, beside its share of the documents' sections."""
    rows = taps + config.recipe.needs_last_hidden
    ids = 2 * ITEM_BYTES["int32"] + ITEM_BYTES["uint8"]
    return rows * hidden * ITEM_BYTES[config.model.dtype] + ids


def slot_bytes(config: Config, *, hidden: int, taps: int, max_documents: int) -> int:
    """Payload bytes of the largest pack: `plan.token_budget` tokens from `max_documents` documents."""
    tokens = config.plan.token_budget
    sections = pack_sections(config, hidden=hidden, taps=taps, tokens=tokens, documents=max_documents)
    return payload_bytes(sections)


assert ALIGN_BYTES % max(ITEM_BYTES.values()) == 0, "a section's elements are aligned because the section is"
