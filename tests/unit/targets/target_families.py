"""Every family of targets as a configuration of a few thousand random weights: real Transformers classes.

Hidden 32, 7 layers (two taps: 1 and 4), 97 rows. Each configuration switches on what is special about its
family (windows, experts, recurrent layers, caps, shared keys, per-layer inputs); what it leaves out is
written beside it in docs/targets.md.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import transformers

ROWS, HIDDEN, LAYERS, MASK = 97, 32, 7, 96
TAPS = (1, 4)
SHAPE: dict[str, Any] = {
    "vocab_size": ROWS,
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.2,  # so that logits differ clearly and caps bite
}
HEADS_16: dict[str, Any] = {**SHAPE, "head_dim": 16}
DELTA_NET: dict[str, Any] = {
    **HEADS_16,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
MLA: dict[str, Any] = {
    **SHAPE,
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "first_k_dense_replace": 1,
}
ROUTED: dict[str, Any] = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_group": 2,
    "topk_group": 1,
    "n_shared_experts": 1,
}
QWEN_EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
VISION: dict[str, Any] = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "out_hidden_size": HIDDEN,
    "patch_size": 4,
    "image_size": 8,
    "num_position_embeddings": 4,
}


@dataclass(frozen=True)
class Family:
    """One row of the table in docs/targets.md."""

    special: str  # what else than a plain decoder is in it
    config: str  # class name in `transformers`
    fields: dict[str, Any]
    wraps: str = ""  # a vision-language model around a text tower of this class
    vision: dict[str, Any] = field(default_factory=dict)
    scale: float = 1.0  # of embedding rows
    multiplier: float = 1.0  # of logits
    softcap: float = 0.0
    rope_theta: float = 10000.0
    attention: str = "sdpa"

    def build(self, *, tied: bool) -> Any:
        """The configuration object."""
        fields = {**self.fields, "tie_word_embeddings": tied}
        if not self.wraps:
            return getattr(transformers, self.config)(**fields)
        text = getattr(transformers, self.wraps)(**fields)
        return getattr(transformers, self.config)(
            text_config=text.to_dict(), vision_config=self.vision, tie_word_embeddings=tied
        )


GEMMA_SCALE = HIDDEN**0.5
_QWEN35 = {
    **DELTA_NET,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e6,
        "mrope_section": [2, 1, 1],
        "partial_rotary_factor": 0.5,
        "mrope_interleaved": True,
    },
}
_GEMMA4 = {
    **HEADS_16,
    "global_head_dim": 32,
    "sliding_window": 8,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2 + ["full_attention"],
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": ROWS,
    "num_kv_shared_layers": 3,
    "final_logit_softcapping": 3.0,
}

FAMILIES: dict[str, Family] = {
    "llama": Family(
        "scaled rope",
        "LlamaConfig",
        {
            **SHAPE,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 5e5,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        },
        rope_theta=5e5,
    ),
    "qwen2": Family("biases in attention", "Qwen2Config", SHAPE),
    "qwen2_moe": Family(
        "experts and a shared one",
        "Qwen2MoeConfig",
        {**SHAPE, **QWEN_EXPERTS, "shared_expert_intermediate_size": 16},
    ),
    "qwen3": Family("normed queries and keys", "Qwen3Config", HEADS_16),
    "qwen3_moe": Family("experts", "Qwen3MoeConfig", {**HEADS_16, **QWEN_EXPERTS}),
    "qwen3_next": Family(
        "gated delta net, full attention each fourth layer, experts",
        "Qwen3NextConfig",
        {**DELTA_NET, **QWEN_EXPERTS, "shared_expert_intermediate_size": 16},
    ),
    "qwen3_5": Family(
        "gated delta net, partial rope with sections (also Qwen3.6)",
        "Qwen3_5TextConfig",
        _QWEN35,
        rope_theta=1e6,
    ),
    "qwen3_5 in its wrapper": Family(
        "text tower of the vision-language model",
        "Qwen3_5Config",
        _QWEN35,
        wraps="Qwen3_5TextConfig",
        vision=VISION,
        rope_theta=1e6,
    ),
    "qwen3_5_moe": Family(
        "gated delta net, experts (also Qwen3.6)",
        "Qwen3_5MoeTextConfig",
        {**_QWEN35, **QWEN_EXPERTS, "shared_expert_intermediate_size": 16},
        rope_theta=1e6,
    ),
    "qwen3_5_moe in its wrapper": Family(
        "text tower of the vision-language model",
        "Qwen3_5MoeConfig",
        {**_QWEN35, **QWEN_EXPERTS, "shared_expert_intermediate_size": 16},
        wraps="Qwen3_5MoeTextConfig",
        vision=VISION,
        rope_theta=1e6,
    ),
    "qwen3_vl": Family(
        "text tower of the vision-language model",
        "Qwen3VLConfig",
        {
            **HEADS_16,
            "rope_parameters": {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [4, 2, 2]},
        },
        wraps="Qwen3VLTextConfig",
        vision={**VISION, "deepstack_visual_indexes": [0]},
        rope_theta=5e6,
    ),
    "gemma": Family("scaled embedding", "GemmaConfig", HEADS_16, scale=GEMMA_SCALE),
    "gemma2": Family(
        "scaled embedding, caps on scores and logits, windows; `eager`",
        "Gemma2Config",
        {**HEADS_16, "sliding_window": 8, "final_logit_softcapping": 3.0},
        scale=GEMMA_SCALE,
        softcap=3.0,
        attention="eager",
    ),
    "gemma3": Family(
        "scaled embedding, windows, rope by kind of layer",
        "Gemma3TextConfig",
        {**HEADS_16, "sliding_window": 8},
        scale=GEMMA_SCALE,
        rope_theta=1e6,
    ),
    "gemma3 in its wrapper": Family(
        "text tower of the vision-language model",
        "Gemma3Config",
        {**HEADS_16, "sliding_window": 8},
        wraps="Gemma3TextConfig",
        vision=VISION,
        scale=GEMMA_SCALE,
        rope_theta=1e6,
    ),
    "gemma4": Family(
        "per-layer inputs, shared keys and values, heads by kind of layer, cap",
        "Gemma4TextConfig",
        _GEMMA4,
        scale=GEMMA_SCALE,
        softcap=3.0,
        rope_theta=1e6,
    ),
    "gemma4_moe": Family(
        "experts beside an MLP, keys as values, heads by kind of layer, cap",
        "Gemma4TextConfig",
        {
            **HEADS_16,
            "global_head_dim": 32,
            "sliding_window": 8,
            "hidden_size_per_layer_input": 0,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "enable_moe_block": True,
            "num_experts": 4,
            "top_k_experts": 2,
            "moe_intermediate_size": 16,
            "final_logit_softcapping": 3.0,
        },
        scale=GEMMA_SCALE,
        softcap=3.0,
        rope_theta=1e6,
    ),
    "gemma4 in its wrapper": Family(
        "text tower of the vision-language model",
        "Gemma4Config",
        _GEMMA4,
        wraps="Gemma4TextConfig",
        vision={**VISION, "num_key_value_heads": 2, "head_dim": 8},
        scale=GEMMA_SCALE,
        softcap=3.0,
        rope_theta=1e6,
    ),
    "mistral": Family("windows in all layers", "MistralConfig", {**HEADS_16, "sliding_window": 8}),
    "ministral3": Family(
        "yarn rope, scores scaled by position",
        "Ministral3Config",
        {
            **HEADS_16,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e6,
                "factor": 4.0,
                "original_max_position_embeddings": 64,
                "llama_4_scaling_beta": 0.1,
            },
        },
        rope_theta=1e6,
    ),
    "mistral3 (wrapper of ministral3)": Family(
        "text tower of the vision-language model",
        "Mistral3Config",
        {
            **HEADS_16,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e6,
                "factor": 4.0,
                "original_max_position_embeddings": 64,
                "llama_4_scaling_beta": 0.1,
            },
        },
        wraps="Ministral3Config",
        vision={"model_type": "pixtral", **VISION},
        rope_theta=1e6,
    ),
    "mixtral": Family(
        "experts",
        "MixtralConfig",
        {**HEADS_16, "num_local_experts": 4, "num_experts_per_tok": 2},
        rope_theta=1e6,
    ),
    "gpt_oss": Family(
        "experts, attention sinks, windows, yarn; `eager`",
        "GptOssConfig",
        {**HEADS_16, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8},
        rope_theta=150000.0,
        attention="eager",
    ),
    "glm": Family("partial rope", "GlmConfig", HEADS_16),
    "glm4": Family("partial rope, norms around sublayers", "Glm4Config", HEADS_16),
    "glm4_moe": Family(
        "grouped router, shared expert, dense first layer",
        "Glm4MoeConfig",
        {**HEADS_16, **ROUTED, "use_qk_norm": True},
    ),
    "glm4_moe_lite": Family("latent attention, grouped router", "Glm4MoeLiteConfig", {**MLA, **ROUTED}),
    "deepseek_v2": Family(
        "latent attention, experts", "DeepseekV2Config", {**MLA, **ROUTED, "topk_method": "greedy"}
    ),
    "deepseek_v3": Family(
        "latent attention, grouped router, interleaved rope", "DeepseekV3Config", {**MLA, **ROUTED}
    ),
    "phi3": Family("joined projections", "Phi3Config", SHAPE),
    "olmo2": Family("norms behind sublayers", "Olmo2Config", SHAPE),
    "olmo3": Family(
        "norms behind sublayers, windows", "Olmo3Config", {**SHAPE, "sliding_window": 8}, rope_theta=5e5
    ),
    "granite": Family(
        "embedding, residual and logit factors",
        "GraniteConfig",
        {
            **SHAPE,
            "embedding_multiplier": 12.0,
            "logits_scaling": 8.0,
            "residual_multiplier": 0.5,
            "attention_multiplier": 0.2,
        },
        scale=12.0,
        multiplier=0.125,
    ),
    "cohere2": Family(
        "parallel sublayers, logit factor, windows, layers without rope",
        "Cohere2Config",
        {**HEADS_16, "sliding_window": 8, "logit_scale": 0.25},
        multiplier=0.25,
    ),
    "smollm3": Family("layers without rope", "SmolLM3Config", SHAPE, rope_theta=2e6),
    "exaone4": Family("windows, layers without rope", "Exaone4Config", {**HEADS_16, "sliding_window": 8}),
    "ernie4_5": Family("interleaved rope", "Ernie4_5Config", HEADS_16, rope_theta=5e5),
    "minimax_m2": Family(
        "experts",
        "MiniMaxM2Config",
        {**HEADS_16, "num_local_experts": 4, "num_experts_per_tok": 2},
        rope_theta=5e6,
    ),
    "seed_oss": Family("biases in attention", "SeedOssConfig", HEADS_16),
    "hunyuan_v1_dense": Family("normed queries and keys", "HunYuanDenseV1Config", HEADS_16),
    "lfm2": Family(
        "short convolutions between attention layers",
        "Lfm2Config",
        {**SHAPE, "block_multiple_of": 8, "full_attn_idxs": [1, 4]},
        rope_theta=1e6,
    ),
    "falcon_h1": Family(
        "Mamba beside attention, embedding and logit factors",
        "FalconH1Config",
        {
            **SHAPE,
            "embedding_multiplier": 3.0,
            "lm_head_multiplier": 0.5,
            "mamba_d_ssm": 32,
            "mamba_n_heads": 4,
            "mamba_d_head": 8,
            "mamba_d_state": 8,
            "mamba_chunk_size": 8,
        },
        scale=3.0,
        multiplier=0.5,
    ),
}


def model_of(family: Family, *, tied: bool, seed: int = 0) -> Any:
    """A random model of the family, float32, every parameter away from what initialisation left it at.

    Norms of ones and biases of zeros would hide a norm applied twice or a bias left out.
    """
    torch.manual_seed(seed)
    config = family.build(tied=tied)
    auto: Any = (
        transformers.AutoModelForImageTextToText if family.wraps else transformers.AutoModelForCausalLM
    )
    model = auto.from_config(config, attn_implementation=family.attention, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    return model.eval()
