"""Everything a target does before the coordinator hears of it, so that a lease never waits for a start.

    data -> model -> self-check -> shapes warmed -> arena -> (Hello)

Up to `open_slots` nothing outside this process is touched: a wrong option leaves no trace.
"""

from __future__ import annotations

import logging
import re
import socket
from dataclasses import dataclass
from pathlib import Path

import torch

from protocol.errors import ConfigError
from protocol.messages import PROTOCOL_VERSION, TargetHello
from services.config.fingerprint import fingerprint, model_fingerprint
from services.config.schema import Config
from services.data.plan import check_lengths, rows_limit
from services.data.training_data import TrainingData
from services.device import use_device
from services.dflash.drafter_config import DrafterConfig, derive
from services.dflash.self_check import self_check
from services.dflash.target_model import Target, load_target, load_tokenizer
from services.target.forward import Forward, Slab, compile_layers, warm_up
from services.transport.layout import slot_bytes
from services.transport.writer import SlotWriter

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Started:
    """A target that could compute, with nobody to compute for yet."""

    data: TrainingData
    target: Target
    shape: DrafterConfig
    forward: Forward
    slabs: list[Slab]
    device: torch.device


def device_of(config: Config, index: int | None) -> torch.device:
    """Where target `index` (None: the first) runs: its entry of target.gpus, else the GPU of its number, if
    there is one, else the CPU.

    Raises:
        ConfigError: target.gpus has no such entry.
    """
    place, gpus = index or 0, config.target.gpus
    if not gpus:
        on_gpu = torch.cuda.is_available() and place < torch.cuda.device_count()
        return torch.device("cuda", place) if on_gpu else torch.device("cpu")
    if place >= len(gpus):
        raise ConfigError(
            f"target {place}: target.gpus = {', '.join(gpus)} names {len(gpus)}; name one a target"
        )
    name = f"cuda:{gpus[place]}" if gpus[place].isdigit() else gpus[place]
    return torch.device(name)


def start(config: Config, device: torch.device) -> Started:
    """Open the data, load the model, `assemble` both.

    Raises:
        ConfigError: there is no such GPU.
        ModelError: model, taps or memory do not fit.
        DataError: no dataset, or one whose samples do not fit the plan.
    """
    if config.target.threads:
        torch.set_num_threads(config.target.threads)
    use_device(device)
    data = TrainingData.open(config.data)
    for _, dataset in data.parts:
        check_lengths(dataset.lengths, config.plan.bucket_edges, config.plan.token_budget)
    target = load_target(
        config.model.path, dtype=config.model.dtype, device=device, attention=config.model.attention
    )
    tokenizer = load_tokenizer(config.model.path) if config.drafter.mask_token_id < 0 else None
    shape = derive(target.config, config.drafter, tokenizer, stop_ids=target.stop_ids)
    return assemble(config, data, target, shape)


def assemble(config: Config, data: TrainingData, target: Target, shape: DrafterConfig) -> Started:
    """Compile and check the model, make its buffers, warm its shapes.

    Raises:
        ModelError: the model's hidden states are wrong, or a shape does not fit into memory.
    """
    device = target.device
    if config.target.compile:
        compile_layers(target)
    if config.target.self_check:
        worst = self_check(target, shape.target_layer_ids)
        log.info("self-check passed", extra=worst)
    forward = Forward(config, target, shape.target_layer_ids)
    slabs = [Slab(config, shape, target.dtype, device) for _ in range(config.target.postprocess_depth + 1)]
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # weights and slabs were filled on another stream than the forward's
    if config.target.warm_up:
        warm_up(forward, slabs[0], config, data.longest, device)
    return Started(data, target, shape, forward, slabs, device)


def open_slots(config: Config, started: Started, folder: Path, incarnation: str) -> SlotWriter:
    """The arena of this incarnation, in `folder`.

    Raises:
        ArenaFull: the file system has no room for it.
    """
    shape, plan = started.shape, config.plan
    documents = max(rows_limit(edge, plan.token_budget) for edge in plan.bucket_edges)
    size = slot_bytes(config, hidden=shape.hidden_size, taps=shape.taps, max_documents=documents)
    writer = SlotWriter.create(
        folder,
        incarnation,
        slots=config.target.slots,
        slot_bytes=size,
        kind=config.arena.kind,
        checksum=config.arena.checksum,
        device=started.device,
    )
    log.info("arena", extra={"kind": writer.kind, "slots": writer.slots, "slot_bytes": writer.slot_bytes})
    return writer


def run_fingerprint(config: Config, started: Started) -> str:
    """Of this process's options, data and model, which have to be the run's."""
    return fingerprint(config, started.data.fingerprint, model_fingerprint(Path(config.model.path)))


def hello(writer: SlotWriter, incarnation: str, index: int | None, of_run: str) -> TargetHello:
    """What this target says of itself; `of_run` is its `run_fingerprint`."""
    return TargetHello(
        incarnation=incarnation,
        seq=0,
        protocol=PROTOCOL_VERSION,
        fingerprint=of_run,
        host=re.sub(r"[^A-Za-z0-9_.\-]", "_", socket.gethostname()) or "host",
        index=index,
        arena=writer.arena_name,
        slots=writer.slots,
        slot_bytes=writer.slot_bytes,
    )
