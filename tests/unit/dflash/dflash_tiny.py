"""Tiny random targets and drafters: real Hugging Face classes with a few thousand weights."""

from __future__ import annotations

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    LlamaConfig,
    PreTrainedConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from services.dflash.drafter_config import DrafterConfig
from services.dflash.target_model import Target, wrap_target

_SHAPE = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 7,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.3,  # large enough that greedy answers vary
}

FAMILIES: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**_SHAPE, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**_SHAPE, head_dim=16, tie_word_embeddings=False),
    "qwen3_moe": Qwen3MoeConfig(
        **_SHAPE, head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16
    ),
    "gemma2": Gemma2Config(**_SHAPE, head_dim=16, sliding_window=16, final_logit_softcapping=3.0),
    "gemma3": Gemma3TextConfig(**_SHAPE, head_dim=16, sliding_window=16),
}


def tiny_model(family: str, seed: int = 0) -> torch.nn.Module:
    """A random causal LM of the family, float32 on the CPU."""
    torch.manual_seed(seed)
    config = type(FAMILIES[family]).from_dict(FAMILIES[family].to_dict())
    return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=torch.float32)


def tiny_target(family: str, seed: int = 0) -> Target:
    return wrap_target(tiny_model(family, seed))


def drafter_config(**changes: object) -> DrafterConfig:
    """A drafter of 3 layers over 3 taps of a 32-wide target; every field can be changed."""
    fields: dict[str, object] = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 97,
        "num_target_layers": 7,
        "target_layer_ids": (1, 2, 4),
        "block_size": 6,
        "mask_token_id": 96,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": 256,
        "layer_types": ("full_attention",) * 3,
    }
    return DrafterConfig(**{**fields, **changes})  # type: ignore[arg-type]
