"""`draftmill export`: the drafter in z-lab's layout, checked, with its model card, and on the hub if asked.

What the card says is gathered before anything is written, so a wrong evaluation file or another target costs
nothing; what is pushed has passed the export's check.
"""

from __future__ import annotations

import json
import sqlite3
from importlib import metadata
from pathlib import Path
from typing import Any, Protocol

from protocol.errors import CheckpointError, DataError, ModelError
from services.check.run_folder import LEDGER, recorded_identity
from services.config.fingerprint import model_fingerprint
from services.models.card import Origin, TargetName, render
from services.models.hub import local_folder

_PACKAGES = ("draftmill", "torch", "transformers", "safetensors")


class Hub(Protocol):
    """What is used of `huggingface_hub.HfApi`."""

    def create_repo(self, repo_id: str, *, private: bool, exist_ok: bool) -> Any: ...

    def upload_folder(self, *, repo_id: str, folder_path: str, commit_message: str) -> Any: ...


def export(
    checkpoint: Path,
    out: Path,
    *,
    dtype: str = "bfloat16",
    target: str = "",
    evaluation: Path | None = None,
    push_to_hub: str = "",
    hub: Hub | None = None,
) -> dict[str, Any]:
    """Writes and checks `out`, then its README.md, then pushes; returns what the check found, and `pushed`.

    `target` (folder or hub id) is named in the card; `evaluation` is a file of `draftmill eval --json`; `hub`
    None is Hugging Face's. Raises CheckpointError, ModelError (another target), DataError (evaluation).
    """
    from services.dflash.evaluate import run_export

    if push_to_hub:
        _check_repository(push_to_hub)
    origin = read_origin(checkpoint)
    named = read_target_name(target, origin) if target else None
    measured = read_evaluation(evaluation) if evaluation else None
    found = run_export(checkpoint, out, dtype=dtype)
    card = render(
        fields=json.loads((out / "config.json").read_text()),
        target=named,
        origin=origin,
        evaluation=measured,
        checked=found,
        versions={name: version(name) for name in _PACKAGES},
    )
    (out / "README.md").write_text(card, encoding="utf-8")
    if not push_to_hub:
        return found
    return {**found, "pushed": push(out, push_to_hub, hub)}


def version(package: str) -> str:
    """As installed; a package that runs from its source tree has no version to name."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "from source"


def read_origin(checkpoint: Path) -> Origin:
    """From `state.json` and, of a checkpoint in its run's folder, the ledger. An export has neither."""
    state_path = checkpoint / "state.json"
    # `best` of a run is a link into a folder of it
    runs = (checkpoint.parent.parent, checkpoint.resolve().parent.parent)
    ledger = next((run / LEDGER for run in runs if (run / LEDGER).is_file()), runs[0] / LEDGER)
    if not state_path.is_file():
        return Origin(None, None, "", None)
    from services.dflash.checkpoint import state_sha256

    state = json.loads(state_path.read_text()).get("state", {})
    identity = None
    if ledger.is_file():
        try:
            identity = recorded_identity(ledger) or None
        except sqlite3.DatabaseError as error:
            raise CheckpointError(
                f"export: the ledger {ledger} of this checkpoint's run cannot be read ({error}); restore it, "
                "or export a copy of the checkpoint that lies elsewhere"
            ) from error
    return Origin(state.get("step"), state.get("timeline"), state_sha256(checkpoint), identity)


def read_target_name(target: str, origin: Origin) -> TargetName:
    """Name and licence by the target's folder. Raises ModelError if the run was trained for other weights."""
    folder = Path(local_folder(target))
    if origin.identity is not None and model_fingerprint(folder) != origin.identity["model"]:
        raise ModelError(
            f"--target {target}: its weights are not those that this run was trained for "
            f"({origin.identity['model'][:12]}...); name the run's own target"
        )
    hub_id = "" if Path(target).exists() else target
    repository = next((part for part in folder.parts if part.startswith("models--")), "")
    hub_id = hub_id or repository.removeprefix("models--").replace("--", "/", 1)
    said = _front_matter(folder / "README.md")
    license_keys = [key for key in ("license", "license_name", "license_link") if said.get(key)]
    return TargetName(hub_id or folder.name, hub_id, {key: str(said[key]) for key in license_keys})


def _front_matter(card: Path) -> dict[str, Any]:
    from huggingface_hub import metadata_load

    return (metadata_load(card) or {}) if card.is_file() else {}


def read_evaluation(file: Path) -> dict[str, Any]:
    """Raises DataError unless it is what `draftmill eval --json` prints."""
    needed = {"acceptance_length", "acceptance_length_by_request", "acceptance_length_by_domain", "lossless",
              "prompts", "max_new_tokens", "block_size", "sampling"}  # fmt: skip
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"--evaluation {file}: {error}; give what `draftmill eval --json` printed") from error
    missing = sorted(needed - found.keys()) if isinstance(found, dict) else sorted(needed)
    if missing:
        raise DataError(f"--evaluation {file}: lacks {missing}; give what `draftmill eval --json` printed")
    return dict(found)


def _check_repository(name: str) -> None:
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise ModelError(f"--push-to-hub {name}: {error}") from error


def push(folder: Path, repository: str, hub: Hub | None = None) -> str:
    """Uploads the folder as one commit, into a new private repository if there is none; returns its address.

    Raises ModelError when the hub refuses; the folder stays.
    """
    from huggingface_hub import HfApi

    api: Hub = hub or HfApi()
    try:
        api.create_repo(repository, private=True, exist_ok=True)
        done = api.upload_folder(
            repo_id=repository, folder_path=str(folder), commit_message="Add a DFlash drafter"
        )
    except OSError as error:  # connection, login, rights
        raise ModelError(
            f"--push-to-hub {repository}: {error}; the export itself is complete in {folder}: log in with "
            "`hf auth login` and run `hf upload`"
        ) from error
    return str(done)
