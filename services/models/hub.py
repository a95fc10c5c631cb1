"""A hub id in `model.path` becomes the local folder of its files; everything else wants a folder.

Downloaded once into Hugging Face's cache (0.5 s to look up when it is there), found there offline
(`HF_HUB_OFFLINE=1`). Safetensors, configurations and tokenizer only. No torch.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from protocol.errors import ModelError
from services.config.load import REQUIRED, Loaded, load

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.\-]*/[\w.\-]+")
_WANTED = ("*.json", "*.jinja", "*.txt", "*.model", "README.md", "LICENSE*")
_WEIGHTS = "*.safetensors"
_TOKENIZERS = ("tokenizer*", "*.model", "vocab.*", "*.tiktoken")
_OTHER_COPIES = ("original/*", "consolidated*", "onnx/*")


def load_local(
    file: Path | None = None, flags: Sequence[tuple[str, str]] = (), needs: Sequence[str] = REQUIRED,
    *, weights: bool = True, missing_ok: bool = False,
) -> Loaded:  # fmt: skip
    """As `load`, with the target's files (or all but its weights) here.

    Raises ConfigError, and ModelError when they are nowhere; with `missing_ok` who opens the folder says so.
    """
    loaded = load(file, flags, needs=needs)
    model = loaded.config.model
    folder = local_folder(model.path, weights=weights)
    if not missing_ok and not Path(folder).is_dir():  # loaders would ask the hub for it, half a minute long
        raise ModelError(
            f"model.path = {folder}: is no folder; give the local folder of a model, with config.json and "
            "*.safetensors, or a hub id (ORGANISATION/NAME)"
        )
    if folder == model.path:
        return loaded
    changed = loaded.config.model_copy(update={"model": model.model_copy(update={"path": folder})})
    return loaded._replace(config=changed)


def local_folder(path: str, cache: Path | None = None, *, weights: bool = True) -> str:
    """`path` itself if it is a folder or no hub id (then who opens it says so), else its snapshot.

    Without `weights` only what describes the model is downloaded. `cache` None is Hugging Face's own. Raises
    ModelError when the files can be had from nowhere.
    """
    if Path(path).exists() or not _HUB_ID.fullmatch(path):
        return path
    from huggingface_hub import constants, snapshot_download

    wanted = [*_WANTED, _WEIGHTS] if weights else list(_WANTED)
    try:
        return snapshot_download(
            path, cache_dir=cache, allow_patterns=wanted, ignore_patterns=list(_OTHER_COPIES)
        )
    except OSError as error:  # connection, unknown or gated repository, nothing in the cache
        why = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else _first_line(error)
        raise ModelError(
            f"model.path {path}: no such folder, and as a hub id it is not in the local cache and cannot be "
            f"downloaded ({why}); run `hf download {path}` where there is a network, or give a folder"
        ) from error


def check_tokenizer(path: str | Path, remedy: str) -> None:
    """Raise ModelError for a folder without tokenizer files, out of which loaders would make an empty one."""
    if not has_tokenizer(path):
        raise ModelError(
            f"model.path = {path}: there is no tokenizer in it (tokenizer.json, tokenizer_config.json); "
            f"{remedy}"
        )


def has_tokenizer(path: str | Path) -> bool:
    """Of a hub id its loader knows."""
    folder = Path(path)
    return not folder.is_dir() or any(any(folder.glob(pattern)) for pattern in _TOKENIZERS)


def _first_line(error: OSError) -> str:
    return str(error).strip().partition("\n")[0]
