"""What a process takes of its GPU's memory: an estimate of the large terms, without the GPU or any weights.

Weights, optimizer state, slots, activations. For targets of 0.6B, 8B and 27B (with linear attention) and
their drafters it comes within 4 % of torch's peaks on H200s, and with `CUDA_BYTES` within a tenth of what the
processes took (docs/performance.md).
"""

from __future__ import annotations

from typing import Any, NamedTuple

from services.config.schema import Config
from services.data.plan import padded_length, rows_limit
from services.dflash.drafter_config import DrafterConfig

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
DELTA_TENSORS = 15  # in float32, of Transformers' delta rule where no kernels for it are installed
HEAD_CHUNK_ROWS = 1024  # of services/dflash/head.py on a GPU, which is not imported for its torch
CUDA_BYTES = {"target": 900_000_000, "drafter": 1_400_000_000, "evaluator": 900_000_000}
"""Context and kernels, beyond torch's allocator. An evaluator's is taken to be a target's, not measured."""
_MASTER_BYTES = 16  # float32: weight, gradient, and AdamW's two moments


class TargetWidths(NamedTuple):
    """Values of a token that are widest while one layer of the target's text tower is computed."""

    hidden: int
    mlp: int  # of all experts that a token visits
    attention: int  # queries, keys and values
    delta: int = 0  # of all heads of a layer of linear attention (gated delta nets)


class Memory(NamedTuple):
    """Bytes of one process, by what takes them."""

    parts: dict[str, int]

    @property
    def total(self) -> int:
        return sum(self.parts.values())


def widths_of(text: Any) -> TargetWidths:
    """From the configuration of a text tower."""
    return TargetWidths(text.hidden_size, _mlp_width(text), _attention_width(text), _delta_width(text))


def _mlp_width(text: Any) -> int:
    dense = getattr(text, "intermediate_size", None) or 4 * text.hidden_size
    if isinstance(dense, (list, tuple)):  # a width a layer
        dense = max(dense)
    expert = getattr(text, "moe_intermediate_size", None)
    visited = getattr(text, "num_experts_per_tok", None) or 0
    return max(int(dense), int(expert) * int(visited)) if expert else int(dense) * max(1, int(visited))


def _attention_width(text: Any) -> int:
    layers = text.per_layer_config if getattr(text, "is_heterogeneous", False) else (text,)

    def width(layer: Any) -> int:
        heads = layer.num_attention_heads
        size = getattr(layer, "head_dim", None) or layer.hidden_size // heads
        return size * (heads + 2 * (getattr(layer, "num_key_value_heads", None) or heads))

    return max(width(layer) for layer in layers)


def _delta_width(text: Any) -> int:
    """Keys are repeated to as many heads as there are of values."""
    sizes = (getattr(text, f"linear_{of}_head_dim", 0) for of in ("key", "value"))
    return int(getattr(text, "linear_num_value_heads", 0) * max(sizes))


def most_positions(config: Config, longest: int) -> int:
    """Of a target's largest forward: a bucket with as many samples as a plan may ever put there. A target on
    a GPU warms it up; it may be four times as long as the batches of samples that fill their bucket.
    """
    plan = config.plan
    reached = padded_length(longest, plan.bucket_edges)
    return max(edge * rows_limit(edge, plan.token_budget) for edge in plan.bucket_edges if edge <= reached)


def target_memory(
    config: Config, weight_bytes: int, widths: TargetWidths, positions: int, slot: int
) -> Memory:
    """A forward of `positions` keeps one layer's activations at a time; and the packs being copied out."""
    item = ITEM_BYTES[config.model.dtype]
    mixer = max(2 * widths.attention * item, DELTA_TENSORS * widths.delta * ITEM_BYTES["float32"])
    widest_bytes = 3 * widths.hidden * item + max(3 * widths.mlp * item, mixer)
    return Memory({
        "weights": weight_bytes,
        "activations": positions * widest_bytes,
        "pack buffers": (config.target.postprocess_depth + 1) * slot,
    })  # fmt: skip


def drafter_memory(config: Config, drafter: DrafterConfig, slot: int) -> Memory:
    """Of a drafter on a GPU, at its peak: a pack of `plan.token_budget` tokens has gone through all layers.

    The widths of a block's row and of a context row (keys and values of each layer, alone and joined with the
    blocks', and what all layers share) are an approximation held against measurements, no list of tensors.
    On top come the logits of a chunk in the head, three times: its own, their slopes, the chunk before's.
    """
    item, weights = ITEM_BYTES[config.drafter.dtype], drafter.parameter_count
    query, key = (
        drafter.num_attention_heads * drafter.head_dim,
        drafter.num_key_value_heads * drafter.head_dim,
    )
    block_row = 5 * drafter.hidden_size + 2 * drafter.intermediate_size + 3 * query + 4 * key
    block_rows = config.recipe.anchors_per_pack * drafter.block_size
    context_row = 3 * drafter.hidden_size + drafter.num_hidden_layers * 4 * key
    saved = drafter.num_hidden_layers * block_rows * block_row + config.plan.token_budget * context_row
    logits = (4 if config.recipe.loss == "kl" else 3) * min(block_rows, HEAD_CHUNK_ROWS) * drafter.vocab_size
    ends = (1 if drafter.tie_word_embeddings else 2) * drafter.vocab_size * drafter.hidden_size
    return Memory({
        "masters and optimizer": weights * _MASTER_BYTES,
        "compute copy": weights * item if item < 4 else 0,
        "embedding and head": ends * item,
        "packs": (1 + config.drafter.prefetch_packs) * slot,
        "activations": (saved + logits) * item,
    })  # fmt: skip
