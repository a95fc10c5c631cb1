"""Everything a drafter does before the coordinator hears of it, so that no group waits for a start.

    data -> schedule -> target's embedding and head -> drafter -> flat weights

Nothing outside this process is touched: a wrong option leaves no trace.
"""

from __future__ import annotations

import logging
import os
import re
import socket
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from protocol.errors import CheckpointError, ConfigError
from protocol.messages import PROTOCOL_VERSION, DrafterHello
from services.config.fingerprint import fingerprint, model_fingerprint
from services.config.schema import Config
from services.data.plan import Schedule
from services.data.training_data import TrainingData
from services.device import use_device
from services.dflash.drafter import Drafter
from services.dflash.drafter_config import DrafterConfig, derive
from services.dflash.export import load_zlab
from services.dflash.target_model import (
    load_embedding_and_head,
    load_stop_ids,
    load_text_config,
    load_tokenizer,
)
from services.drafter.metrics import Phases
from services.drafter.step import StepGradient
from services.drafter.weights import Weights
from services.seeds import seed

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Started:
    """A drafter that could train, with no usable state and nobody to train with yet."""

    data_fingerprint: str
    shape: DrafterConfig
    weights: Weights
    step: StepGradient
    phases: Phases
    device: torch.device


def device_of(config: Config, index: int | None) -> torch.device:
    """Where drafter `index` (None: the first) runs: its entry of drafter.gpus, else one of the last
    `drafter.count` GPUs, else the CPU.

    Raises:
        ConfigError: drafter.gpus has no such entry.
    """
    place, gpus = index or 0, config.drafter.gpus
    if gpus:
        if place >= len(gpus):
            raise ConfigError(
                f"drafter {place}: drafter.gpus = {', '.join(gpus)} names {len(gpus)}; name one a drafter"
            )
        return torch.device(f"cuda:{gpus[place]}" if gpus[place].isdigit() else gpus[place])
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count == 0:
        return torch.device("cpu")
    return torch.device("cuda", max(0, min(count - 1, count - config.drafter.count + place)))


def start(config: Config, device: torch.device) -> Started:
    """Open the data, load the target's two ends, build the drafter.

    Raises:
        ConfigError: there is no such GPU.
        ModelError: target, tokenizer and drafter do not fit each other.
        DataError: no dataset, or one whose samples do not fit the plan.
    """
    _prepare_torch(config, device)
    data = TrainingData.open(config.data)
    total_steps = Schedule(config, data).total_steps
    tokenizer = load_tokenizer(config.model.path) if config.drafter.mask_token_id < 0 else None
    shape = derive(
        load_text_config(config.model.path),
        config.drafter,
        tokenizer,
        stop_ids=load_stop_ids(config.model.path),
    )
    embed_weight_VH, head = load_embedding_and_head(
        config.model.path, dtype=config.drafter.dtype, device=device
    )
    drafter = Drafter(shape, seed=None)  # a state is adopted before anything is trained
    weights = Weights(drafter, config.recipe, device)
    phases = Phases(device)
    step = StepGradient(
        config, drafter, weights, embed_weight_VH, head, total_steps=total_steps, phases=phases
    )
    log.info(
        "drafter",
        extra={
            "parameters": shape.parameter_count, "layers": shape.num_hidden_layers,
            "taps": ",".join(map(str, shape.target_layer_ids)), "block_size": shape.block_size,
            "mask_token_id": shape.mask_token_id, "steps": total_steps, "device": str(device),
        },
    )  # fmt: skip
    return Started(data.fingerprint, shape, weights, step, phases, device)


def _prepare_torch(config: Config, device: torch.device) -> None:
    if config.drafter.threads:
        torch.set_num_threads(config.drafter.threads)
    if config.drafter.deterministic:
        os.putenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read by cuBLAS when it is first used
        torch.use_deterministic_algorithms(True)
    use_device(device)


def initial_weights(config: Config, shape: DrafterConfig) -> dict[str, Tensor]:
    """The weights of step 0 on the CPU: `drafter.init_from`, else drawn from the run's seed.

    Raises:
        CheckpointError: `init_from` cannot be read, or is of another drafter.
    """
    if not config.drafter.init_from:
        return dict(Drafter(shape, seed=seed(config.run.seed, "drafter")).state_dict())
    drafter = load_zlab(Path(config.drafter.init_from))
    for name in ("target_layer_ids", "block_size", "mask_token_id"):
        found, wanted = getattr(drafter.config, name), getattr(shape, name)
        if found != wanted:
            raise CheckpointError(
                f"drafter.init_from {config.drafter.init_from}: {name} is {found}, this run's is {wanted}; "
                f"set the drafter options to the checkpoint's"
            )
    return dict(drafter.state_dict())


def hello(config: Config, started: Started, incarnation: str, index: int | None, inbox: str) -> DrafterHello:
    """What this drafter says of itself."""
    return DrafterHello(
        incarnation=incarnation,
        seq=0,
        protocol=PROTOCOL_VERSION,
        fingerprint=fingerprint(config, started.data_fingerprint, model_fingerprint(Path(config.model.path))),
        host=re.sub(r"[^A-Za-z0-9_.\-]", "_", socket.gethostname()) or "host",
        index=index,
        inbox=inbox,
    )
