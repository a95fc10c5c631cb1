"""What makes two runs the same run: the training options and the contents of dataset and model.

`identity` is the canonical tree, `fingerprint` its sha256. A ledger keeps both, so that a refused
resume can name the option that changed. Paths do not count, contents do: a run may be moved.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from protocol.errors import ModelError
from services.config.names import OPTIONS
from services.config.schema import Config

_SAMPLE_BYTES = 4096
_SAMPLES_PER_FILE = 64


def identity(config: Config, dataset_fingerprint: str, model_fingerprint: str) -> dict[str, Any]:
    """JSON-able: every training option by path, `dataset` and `model` by content."""
    dumped = config.model_dump(mode="json")
    options = {option.path: dumped[option.section][option.name] for option in OPTIONS if option.training}
    return {"options": options, "dataset": dataset_fingerprint, "model": model_fingerprint}


def fingerprint(config: Config, dataset_fingerprint: str, model_fingerprint: str) -> str:
    """sha256 hex of the identity's canonical JSON. Options that leave the weights alone do not enter."""
    return identity_sha256(identity(config, dataset_fingerprint, model_fingerprint))


def identity_sha256(tree: Mapping[str, Any]) -> str:
    """sha256 hex of a tree that `identity` made."""
    return hashlib.sha256(json.dumps(tree, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def differences(recorded: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:
    """`recipe.lr: 0.0006 in the run, 0.001 now`, one line each, for two identities; of hashes 12 digits."""
    old = {"dataset": recorded.get("dataset"), "model": recorded.get("model"), **recorded.get("options", {})}
    new = {"dataset": current.get("dataset"), "model": current.get("model"), **current.get("options", {})}
    return [
        f"{name}: {_short(old.get(name, 'absent'))} in the run, {_short(new.get(name, 'absent'))} now"
        for name in sorted(old.keys() | new.keys())
        if old.get(name) != new.get(name)
    ]


def _short(value: Any) -> str:
    return re.sub(r"\b([0-9a-f]{12})[0-9a-f]{52}\b", r"\1", str(value))


def remedy(recorded: Mapping[str, Any], current: Mapping[str, Any]) -> str:
    """What to do about the differences; names `draftmill extend` where that would take them."""
    choices = ["Restore them, choose another run.dir, or remove this one if nothing in it is worth keeping"]
    if only_extends(recorded, current):
        choices.append("or let `draftmill extend` make them the run's, from the next epoch on")
    return "; ".join(choices)


def only_extends(recorded: Mapping[str, Any], current: Mapping[str, Any]) -> bool:
    """Whether nothing but datasets and the number of epochs differs."""
    return not differences(without_plan(recorded), without_plan(current))


def without_plan(tree: Mapping[str, Any]) -> dict[str, Any]:
    """An identity but for what `draftmill extend` may change."""
    options = {name: value for name, value in tree.get("options", {}).items() if name != "run.epochs"}
    return {"options": options, "model": tree.get("model")}


def model_fingerprint(folder: Path) -> str:
    """sha256 hex over config.json and, of each safetensors file, name, size and 64 samples of 4 KiB.

    Reads 256 KiB a file instead of all of it: 27 billion parameters take milliseconds, and another
    fine-tune still differs. Raises ModelError when config.json or all weights are missing.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not (folder / "config.json").is_file() or not files or not all(map(Path.is_file, files)):
        raise ModelError(
            f"model folder {folder}: needs config.json and *.safetensors; convert or download it"
        )
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for file in files:
        digest.update(f"{file.name}:{file.stat().st_size}".encode())
        _digest_samples(digest, file)
    return digest.hexdigest()


def _digest_samples(digest: hashlib._Hash, file: Path) -> None:
    size = file.stat().st_size
    stride = max(_SAMPLE_BYTES, size // _SAMPLES_PER_FILE)
    with file.open("rb") as handle:
        for start in range(0, size, stride):
            handle.seek(start)
            digest.update(handle.read(_SAMPLE_BYTES))
