"""`draftmill plan`: what a run will cost, from the configurations and the lengths alone. No GPU, no weights.

Counts (steps, packs, padding, bytes) are exact: they come from the plan that the run will follow. Memory is
an estimate of the large terms: weights, optimizer state, slots, saved activations. For targets of 0.6B, 8B
and 27B (with linear attention) and their drafters it comes within 4 % of torch's peaks on H200s, and with
`CUDA_BYTES` within a tenth of what the processes took (docs/performance.md).
Hours need two rates that a short run reports.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from protocol.errors import ModelError
from services.config.schema import Config
from services.data.plan import Schedule, padded_length, rows_limit
from services.data.training_data import TrainingData
from services.dflash.drafter_config import DrafterConfig
from services.transport.layout import bytes_per_token, slot_bytes

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
DELTA_TENSORS = 15  # in float32, of Transformers' delta rule where no kernels for it are installed
HEAD_CHUNK_ROWS = 1024  # of services/dflash/head.py on a GPU, which is not imported for its torch
CUDA_BYTES = {
    "target": 900_000_000,
    "drafter": 1_400_000_000,
}  # context and kernels, beyond torch's allocator
_MASTER_BYTES = 16  # float32: weight, gradient, and AdamW's two moments


class TargetShape(NamedTuple):
    """What memory depends on, of the target's text tower."""

    parameters: int
    hidden: int
    mlp: int  # widest activation of an MLP, of all experts that a token visits
    attention: int  # queries, keys and values of a token
    delta: int = 0  # values of a token in a layer of linear attention (gated delta nets), of all its heads


class Rates(NamedTuple):
    """Measured on this machine: real tokens a second of one target and of one drafter that never wait."""

    target_tokens_per_s: float
    drafter_tokens_per_s: float


class Counts(NamedTuple):
    """Of the first epoch, whose plan is like all others of its dataset, and of all epochs."""

    samples: int
    tokens: int
    supervised: int
    packs: int
    tokens_per_pack: tuple[int, int, int]  # 5th percentile, mean, 95th percentile
    padding_share: float  # of the target's forward
    largest_forward: int  # positions, padding included
    steps: int
    steps_per_epoch: int
    tokens_of_all_epochs: int


class Memory(NamedTuple):
    """Bytes of one process, by what takes them."""

    parts: dict[str, int]

    @property
    def total(self) -> int:
        return sum(self.parts.values())


class Forecast(NamedTuple):
    counts: Counts
    bytes_per_token: int
    slot_bytes: int
    target: Memory
    drafter: Memory
    drafter_parameters: int
    arena_bytes: int  # of all targets of this host, each with a dead predecessor
    hours: float | None  # None: no rates given
    targets_per_drafter: float | None
    advised: tuple[int, int] | None  # targets and drafters, of as many roles as the options name


def forecast(
    config: Config, data: TrainingData, target: TargetShape, drafter: DrafterConfig, rates: Rates | None
) -> Forecast:
    """Pure. Raises DataError if a sample fits no batch of the plan."""
    counts = count(config, data)
    token_bytes = bytes_per_token(config, hidden=drafter.hidden_size, taps=drafter.taps)
    documents = max(rows_limit(edge, config.plan.token_budget) for edge in config.plan.bucket_edges)
    slot = slot_bytes(config, hidden=drafter.hidden_size, taps=drafter.taps, max_documents=documents)
    positions = max(counts.largest_forward, warmed_positions(config, data.longest))
    return Forecast(
        counts, token_bytes, slot,
        target_memory(config, target, positions, slot),
        drafter_memory(config, drafter, slot),
        drafter.parameter_count,
        2 * config.target.count * config.target.slots * slot,
        None if rates is None else _hours(config, counts, rates),
        None if rates is None else rates.drafter_tokens_per_s / rates.target_tokens_per_s,
        None if rates is None else best_split(config.target.count + config.drafter.count, rates),
    )  # fmt: skip


def count(config: Config, data: TrainingData) -> Counts:
    """From the plan itself. All epochs are planned once, for their steps."""
    schedule, edges = Schedule(config, data), np.asarray(config.plan.bucket_edges)
    dataset = data.of(0)
    batches = schedule.epoch(0).batches
    real = np.array([int(dataset.lengths[list(batch)].sum()) for batch in batches])
    longest = np.array([int(dataset.lengths[list(batch)].max()) for batch in batches])
    padded = edges[np.searchsorted(edges, longest)] * np.array([len(batch) for batch in batches])
    low, high = np.percentile(real, [5, 95]).astype(int).tolist()
    return Counts(
        samples=len(dataset), tokens=int(real.sum()), supervised=int(dataset.supervised.sum(dtype=np.int64)),
        packs=len(batches), tokens_per_pack=(low, round(float(real.mean())), high),
        padding_share=float(1 - real.sum() / padded.sum()), largest_forward=int(padded.max()),
        steps=schedule.total_steps, steps_per_epoch=schedule.steps_in_epoch(0),
        tokens_of_all_epochs=sum(int(data.of(e).lengths.sum()) for e in range(config.run.epochs)),
    )  # fmt: skip


def warmed_positions(config: Config, longest: int) -> int:
    """Of the largest forward that a target on a GPU warms up: a bucket with as many samples as a plan may
    ever put there, up to four times as long as the batches of samples that fill their bucket.
    """
    if not config.target.warm_up:
        return 0
    plan = config.plan
    reached = padded_length(longest, plan.bucket_edges)
    return max(edge * rows_limit(edge, plan.token_budget) for edge in plan.bucket_edges if edge <= reached)


def target_memory(config: Config, target: TargetShape, positions: int, slot: int) -> Memory:
    """A forward of `positions` keeps one layer's activations at a time; and the packs being copied out."""
    item = ITEM_BYTES[config.model.dtype]
    mixer = max(2 * target.attention * item, DELTA_TENSORS * target.delta * ITEM_BYTES["float32"])
    widest_bytes = 3 * target.hidden * item + max(3 * target.mlp * item, mixer)
    return Memory({
        "weights": target.parameters * item,
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


def _hours(config: Config, counts: Counts, rates: Rates) -> float:
    slower = min(
        config.target.count * rates.target_tokens_per_s, config.drafter.count * rates.drafter_tokens_per_s
    )
    return counts.tokens_of_all_epochs / slower / 3600


def best_split(roles: int, rates: Rates) -> tuple[int, int]:
    """(targets, drafters) of `roles` together with the highest throughput; of equals, fewer targets."""

    def tokens_per_s(targets: int) -> float:
        return min(targets * rates.target_tokens_per_s, (roles - targets) * rates.drafter_tokens_per_s)

    targets = max(range(1, roles), key=tokens_per_s)
    return targets, roles - targets


def read_target(path: str) -> TargetShape:
    """From the configuration alone, by building the model without memory. Raises ModelError."""
    import torch
    from transformers import AutoConfig

    from services.dflash.target_model import loader_of

    try:
        config = AutoConfig.from_pretrained(path)
        with torch.device("meta"):
            model = loader_of(config)[0].from_config(config)
    except (OSError, ValueError) as error:
        raise ModelError(f"model.path = {path}: no causal language model to plan for: {error}") from None
    text = config.get_text_config(decoder=True)
    return TargetShape(
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        hidden=text.hidden_size, mlp=_mlp_width(text), attention=_attention_width(text),
        delta=_delta_width(text),
    )  # fmt: skip


def _mlp_width(text: Any) -> int:
    dense = getattr(text, "intermediate_size", None) or 4 * text.hidden_size
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


def plan_of_run(config: Config, model: Path, rates: Rates | None) -> Forecast:
    """What `draftmill plan` does: read the configurations, then forecast."""
    from services.dflash.drafter_config import derive
    from services.dflash.target_model import load_stop_ids, load_text_config, load_tokenizer

    tokenizer = load_tokenizer(model) if config.drafter.mask_token_id < 0 else None
    shape = derive(load_text_config(model), config.drafter, tokenizer, stop_ids=load_stop_ids(model))
    return forecast(config, TrainingData.open(config.data), read_target(str(model)), shape, rates)
