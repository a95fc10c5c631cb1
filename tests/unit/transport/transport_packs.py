"""Packs to send through slots."""

import torch
from torch import Tensor

from protocol.messages import BatchId, Stamp

BATCH = BatchId(0, 3)


def attempt(counter: int) -> Stamp:
    return Stamp(1, counter)


def make_pack(
    tokens: int = 13, *, hidden: int = 24, taps: int = 2, split: bool = False, seed: int = 0
) -> dict[str, Tensor]:
    """A pack of two documents with random contents."""
    generator = torch.Generator().manual_seed(seed)
    features_TF = torch.randn(tokens, taps * hidden, generator=generator).to(torch.bfloat16)
    first = tokens // 2
    parts = features_TF.split(hidden, dim=1)
    features = (
        {f"features.{tap}": part for tap, part in enumerate(parts)} if split else {"features": features_TF}
    )
    return features | {
        "input_ids": torch.randint(0, 1000, (tokens,), generator=generator, dtype=torch.int32),
        "loss_mask": torch.randint(0, 2, (tokens,), generator=generator, dtype=torch.uint8),
        "position_ids": torch.cat((torch.arange(first), torch.arange(tokens - first))).to(torch.int32),
        "document_offsets": torch.tensor([0, first, tokens], dtype=torch.int32),
        "sample_ids": torch.tensor([5, 2**40], dtype=torch.int64),
    }
