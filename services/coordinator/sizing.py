"""What the coordinator must know of the model without loading it: identity, bytes of a pack, devices.

Read from `config.json` alone, so that the coordinator needs neither torch nor a GPU.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from protocol.errors import ModelError
from services.config.fingerprint import identity, model_fingerprint
from services.config.schema import Config, Drafter, Target
from services.coordinator.coordinator import PackSize
from services.data.plan import rows_limit
from services.data.training_data import TrainingData
from services.transport.layout import bytes_per_token, slot_bytes


def text_config(folder: Path) -> dict[str, Any]:
    """The text tower's part of a model folder's config.json. ModelError when there is none."""
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text())
    except FileNotFoundError as error:
        raise ModelError(
            f"model folder {folder}: has no config.json; model.path must be a local folder"
        ) from error
    except ValueError as error:
        raise ModelError(f"{path}: {error}; it must be the model's JSON configuration") from error
    text = config.get("text_config", config) if isinstance(config, dict) else None
    if not isinstance(text, dict):
        raise ModelError(f"{path}: describes no model; it must be the model's JSON configuration")
    return text


def identity_and_size(config: Config, data: TrainingData) -> tuple[dict[str, Any], PackSize]:
    """The run's identity (for the ledger) and what a pack of it takes."""
    folder = Path(config.model.path)
    hidden = text_config(folder).get("hidden_size")
    if not isinstance(hidden, int):
        raise ModelError(
            f"{folder / 'config.json'}: no hidden_size; it must describe a causal language model"
        )
    taps = len(config.drafter.target_layer_ids) or config.drafter.taps
    plan = config.plan
    documents = max(rows_limit(edge, plan.token_budget) for edge in plan.bucket_edges)
    size = PackSize(
        bytes_per_token(config, hidden=hidden, taps=taps),
        slot_bytes(config, hidden=hidden, taps=taps, max_documents=documents),
    )
    return identity(config, data.fingerprint, model_fingerprint(folder)), size


def devices(config: Config) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(targets', drafters') device names by place; "" lets the role choose (the CPU without a GPU)."""
    return _of_places(config.target), _of_places(config.drafter)


def _of_places(section: Target | Drafter) -> tuple[str, ...]:
    """A device a place: more may be listed than are used, or none."""
    named = tuple(f"cuda:{gpu}" if gpu.isdigit() else gpu for gpu in section.gpus[: section.count])
    return named or ("",) * section.count
