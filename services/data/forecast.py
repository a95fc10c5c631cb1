"""`draftmill plan`: what a run will cost, from the configurations and the lengths alone. No GPU, no weights.

Counts (steps, packs, padding, bytes) are exact: they come from the plan that the run will follow. Memory is
an estimate (services/data/gpu_memory.py). Hours need two rates that a short run reports.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np

from protocol.errors import ModelError
from services.config.schema import Config
from services.data.gpu_memory import (
    ITEM_BYTES,
    Memory,
    TargetWidths,
    drafter_memory,
    most_positions,
    target_memory,
    widths_of,
)
from services.data.plan import Schedule, rows_limit
from services.data.training_data import TrainingData
from services.dflash.drafter_config import DrafterConfig
from services.transport.layout import bytes_per_token, slot_bytes


class TargetShape(NamedTuple):
    parameters: int
    widths: TargetWidths


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
    warmed = most_positions(config, data.longest) if config.target.warm_up else 0
    positions = max(counts.largest_forward, warmed)
    weights = target.parameters * ITEM_BYTES[config.model.dtype]
    return Forecast(
        counts, token_bytes, slot,
        target_memory(config, weights, target.widths, positions, slot),
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
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return TargetShape(parameters, widths_of(config.get_text_config(decoder=True)))


def plan_of_run(config: Config, model: Path, rates: Rates | None) -> Forecast:
    """What `draftmill plan` does: read the configurations, then forecast."""
    from services.dflash.drafter_config import derive
    from services.dflash.target_model import load_stop_ids, load_text_config, load_tokenizer

    tokenizer = load_tokenizer(model) if config.drafter.mask_token_id < 0 else None
    shape = derive(load_text_config(model), config.drafter, tokenizer, stop_ids=load_stop_ids(model))
    return forecast(config, TrainingData.open(config.data), read_target(str(model)), shape, rates)
