"""Small packs of random documents, and the drafter's inputs for them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from services.dflash.drafter_config import DrafterConfig
from services.dflash.head import FrozenHead


class TinyPack(NamedTuple):
    features_TF: Tensor
    input_ids_T: Tensor
    loss_mask_T: Tensor
    position_ids_T: Tensor
    document_offsets: Tensor
    last_hidden_TH: Tensor


def tiny_pack(
    lengths: list[int], config: DrafterConfig, *, supervised: float = 0.7, seed: int = 0
) -> TinyPack:
    """Documents of `lengths` with random features, ids and masks, in the types that travel in a slot."""
    generator = torch.Generator().manual_seed(seed)
    tokens = sum(lengths)
    return TinyPack(
        features_TF=torch.randn(tokens, config.feature_size, generator=generator),
        input_ids_T=torch.randint(3, 90, (tokens,), generator=generator, dtype=torch.int32),
        loss_mask_T=(torch.rand(tokens, generator=generator) < supervised).to(torch.uint8),
        position_ids_T=torch.cat([torch.arange(length, dtype=torch.int32) for length in lengths]),
        document_offsets=torch.tensor([0, *lengths]).cumsum(0).to(torch.int32),
        last_hidden_TH=torch.randn(tokens, config.hidden_size, generator=generator),
    )


def embedding_and_head(config: DrafterConfig, seed: int = 1) -> tuple[Tensor, FrozenHead]:
    generator = torch.Generator().manual_seed(seed)
    embedding = torch.randn(config.vocab_size, config.hidden_size, generator=generator)
    head = 0.3 * torch.randn(config.vocab_size, config.hidden_size, generator=generator)
    return embedding, FrozenHead(head, config.output_multiplier, config.final_logit_softcapping)


def without_last_hidden(pack: TinyPack) -> dict[str, Tensor]:
    fields = pack._asdict()
    del fields["last_hidden_TH"]
    return fields
