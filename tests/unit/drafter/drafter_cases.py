"""A drafter so small that a step takes milliseconds, and packs of random features for it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from protocol.messages import BatchId, StepTry
from services.config.schema import Config
from services.dflash.drafter import Drafter
from services.dflash.drafter_config import DrafterConfig
from services.dflash.head import FrozenHead
from services.drafter.metrics import Phases
from services.drafter.reduce import Reducer
from services.drafter.step import StepGradient
from services.drafter.weights import Weights

HIDDEN, VOCABULARY, BLOCK = 16, 32, 4
CPU = torch.device("cpu")


def tiny_shape() -> DrafterConfig:
    return DrafterConfig(
        hidden_size=HIDDEN, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, vocab_size=VOCABULARY, num_target_layers=6,
        target_layer_ids=(1, 3), block_size=BLOCK, mask_token_id=0, rms_norm_eps=1e-6,
        rope_theta=10000.0, max_position_embeddings=64, layer_types=("full_attention",) * 2,
    )  # fmt: skip


def tiny_config(**changes: dict) -> Config:
    """Sections as keyword arguments: `recipe={"lr": 0.1}`."""
    sections = {
        "model": {"path": "none", "dtype": "float32"},
        "data": {"path": Path("none")},
        "run": {"seed": 7},
        "plan": {"packs_per_step": 4},
        "drafter": {"dtype": "float32"},
        "recipe": {"anchors_per_pack": 6, "lr": 1e-2, "warmup_ratio": 0.0},
    }
    for name, options in changes.items():
        sections[name] = sections.get(name, {}) | options
    return Config.model_validate(sections)


def tiny_step(config: Config, *, seed: int = 1, total_steps: int = 100) -> StepGradient:
    """A step over fresh weights; equal seeds give equal weights."""
    drafter = Drafter(tiny_shape(), seed=seed)
    ends = torch.randn(VOCABULARY, HIDDEN, generator=torch.Generator().manual_seed(5))
    return StepGradient(
        config, drafter, Weights(drafter, config.recipe, CPU), ends, FrozenHead(ends),
        total_steps=total_steps, phases=Phases(CPU),
    )  # fmt: skip


def random_pack(
    seed: int, lengths: tuple[int, ...] = (9, 12), *, supervised: bool = True
) -> dict[str, Tensor]:
    """The sections of a pack, its first three tokens of each document a prompt."""
    generator = torch.Generator().manual_seed(seed)
    tokens = sum(lengths)
    positions = torch.cat([torch.arange(length, dtype=torch.int32) for length in lengths])
    return {
        "features": torch.randn(tokens, 2 * HIDDEN, generator=generator),
        "input_ids": torch.randint(1, VOCABULARY, (tokens,), generator=generator, dtype=torch.int32),
        "loss_mask": ((positions >= 3) & supervised).to(torch.uint8),
        "position_ids": positions,
        "document_offsets": torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32),
        "sample_ids": torch.arange(len(lengths), dtype=torch.int64),
    }


def sum_over(reducer: Reducer, tensors: Iterable[Tensor], step_try: StepTry) -> None:
    """All that a reduction is, without a step around it."""
    reducer.arrive(step_try)
    for tensor in tensors:
        reducer.start(tensor)
    reducer.finish()


def add_packs(step: StepGradient, seeds: list[int], first_position: int = 0) -> None:
    for position, seed in enumerate(seeds, start=first_position):
        step.add(position, BatchId(0, seed), random_pack(seed))
