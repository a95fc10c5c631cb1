"""Whether the target's folder holds what a run needs: configuration, whole safetensors, a fitting tokenizer.

No weights are read, only the headers of their files. Slow for one reason: importing transformers, 2 to 8 s.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from protocol.errors import DataError, ModelError
from services.config.load import Loaded
from services.config.schema import Config
from services.config.sources import Finding
from services.data.convert import check_vocabulary
from services.data.dataset import Dataset
from services.data.gpu_memory import TargetWidths, widths_of
from services.data.token_use import idle_rows
from services.dflash.drafter_config import DrafterConfig, derive, misfits, special_ids
from services.dflash.speculate_batch import MASKED_ATTENTION, rows_may_differ
from services.dflash.target_model import check_attention, load_stop_ids, load_text_config, load_tokenizer
from services.models.hub import check_tokenizer, has_tokenizer

_PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_STORED_AS = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
_OFFERED = 3
_EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "embed_in.weight", "word_embeddings.weight")


class ModelFacts(NamedTuple):
    """What the other checks need to know of the target."""

    folder: Path
    rows: int  # of the embedding
    weight_bytes: int
    loaded_bytes: int  # of the weights in `model.dtype`
    shared: bool  # stored in that type: targets on a CPU map the files and have one copy between them
    tokenizer: Any | None  # None: the folder has none, and none is needed
    drafter: DrafterConfig
    widths: TargetWidths
    cache_width: int  # values that its cache keeps of each token, all layers together
    in_batches: bool  # whether an evaluator may decode several prompts at a time


def check_model(loaded: Loaded) -> tuple[ModelFacts | None, list[Finding]]:
    """Facts None: the folder is too wrong for the checks that build on it."""
    folder, subject = Path(loaded.config.model.path), loaded.describe("model.path")
    findings = [Finding(subject, rule) for rule in _broken_files(folder)]
    if findings:
        return None, findings
    try:
        check_attention(folder, loaded.config.model.attention)
        text_config, tokenizer = load_text_config(folder), _tokenizer(folder, loaded.config)
        rows = _embedding_rows(folder) or text_config.vocab_size
        if tokenizer is not None:
            check_vocabulary(tokenizer, rows, str(folder))
        stop_ids = load_stop_ids(folder)
        if findings := list(_misfits(loaded, text_config, tokenizer, stop_ids, rows)):
            return None, findings
        shape = derive(text_config, loaded.config.drafter, tokenizer, stop_ids=stop_ids)
    except ModelError as error:
        return None, [Finding(subject, str(error).removeprefix(f"model.path = {folder}: "))]
    weight_bytes = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    loaded_bytes, shared = _loaded_bytes(folder, loaded.config.model.dtype)
    in_batches = loaded.config.model.attention in MASKED_ATTENTION and rows_may_differ(text_config)
    facts = ModelFacts(
        folder, rows, weight_bytes, loaded_bytes, shared, tokenizer, shape,
        widths_of(text_config), _cache_width(text_config), in_batches,
    )  # fmt: skip
    if rows != text_config.vocab_size:
        rule = (
            f"{rows} rows of embedding, {text_config.vocab_size} in config.json; they do not belong together"
        )
        findings.append(Finding(subject, rule))
    return facts, findings


def _tokenizer(folder: Path, config: Config) -> Any | None:
    """None: there is none, and none is needed, because the mask token is named and data are tokenized."""
    if config.drafter.mask_token_id >= 0 and not has_tokenizer(folder):
        return None
    check_tokenizer(folder, "copy the model's own there; tokenized data also do with a drafter.mask_token_id")
    return load_tokenizer(folder)


def _misfits(
    loaded: Loaded, text_config: Any, tokenizer: Any | None, stop_ids: tuple[int, ...], rows: int
) -> Iterator[Finding]:
    for option, rule in misfits(text_config, loaded.config.drafter, tokenizer, stop_ids=stop_ids):
        if option == "drafter.mask_token_id":
            rule += _idle_rows(loaded.config, rows, special_ids(text_config, tokenizer, stop_ids))
        yield Finding(loaded.describe(option), rule)


def _idle_rows(config: Config, rows: int, special: set[int]) -> str:
    """Rows to name, as the dataset shows them; nothing without a dataset."""
    try:
        idle = idle_rows(Dataset.open(config.data.path), rows, special)
    except DataError:
        return ""  # reported as a finding on data.path
    if not idle:
        return (
            f". The data use all {rows}: add a token and a row to the model (add_special_tokens and "
            "resize_token_embeddings of Transformers), then prepare the data again"
        )
    return f". No sample of data.path uses {', '.join(map(str, idle[-_OFFERED:]))}"


def _broken_files(folder: Path) -> Iterator[str]:
    if folder.suffix == ".gguf":
        yield "is a GGUF file; `draftmill convert FILE FOLDER` makes a folder of it"
        return
    if not folder.is_dir():
        yield "is no folder; give the local folder of a model, with config.json and *.safetensors"
        return
    if not (folder / "config.json").is_file():
        yield "has no config.json; give the folder of a Hugging Face model"
    weights = sorted(folder.glob("*.safetensors"))
    pickled = [file.name for pattern in _PICKLED for file in folder.glob(pattern)]
    if not weights and pickled:
        yield f"has pickled weights only ({pickled[0]}), which may run code; convert them to safetensors"
    elif not weights:
        yield "has no *.safetensors; convert or download the weights"
    yield from _missing_shards(folder)
    for file in weights:
        yield from _truncated(file)


def _missing_shards(folder: Path) -> Iterator[str]:
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return
    named = set(json.loads(index.read_text()).get("weight_map", {}).values())
    missing = sorted(name for name in named if not (folder / name).is_file())
    if missing:
        yield f"{len(missing)} of {len(named)} weight files are missing ({missing[0]} ...); download it again"


def _truncated(file: Path) -> Iterator[str]:
    try:
        header, data_starts = _header(file)
    except (ValueError, struct.error):
        yield f"{file.name} is no safetensors file; download it again"
        return
    ends = max(
        (entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"), default=0
    )
    size = file.stat().st_size
    if size != data_starts + ends:
        yield f"{file.name} has {size:,} bytes, its header says {data_starts + ends:,}; download it again"


def _header(file: Path) -> tuple[dict[str, Any], int]:
    with file.open("rb") as stream:
        (length,) = struct.unpack("<Q", stream.read(8))
        if length > file.stat().st_size:
            raise ValueError(f"header of {length} bytes")
        return json.loads(stream.read(length)), 8 + length


def _loaded_bytes(folder: Path, dtype: str) -> tuple[int, bool]:
    """Bytes in memory and whether none is converted. Plain floating tensors count in `dtype`, others (packed,
    counters) as they are stored.
    """
    item, total, shared = 4 if dtype == "float32" else 2, 0, True
    for file in folder.glob("*.safetensors"):
        for name, entry in _header(file)[0].items():
            if name != "__metadata__" and not name.startswith("mtp."):
                start, end = entry["data_offsets"]
                total += (
                    item * math.prod(entry["shape"]) if entry["dtype"] in _STORED_AS.values() else end - start
                )
                # experts are stacked into new tensors on loading
                shared &= entry["dtype"] == _STORED_AS[dtype] and ".experts." not in name
    return total, shared


def _cache_width(text: Any) -> int:
    """Of the layers that keep every token: windows and recurrent states do not grow with them."""

    def width(layer: Any) -> int:
        heads = layer.num_attention_heads
        if latent := getattr(layer, "kv_lora_rank", None):
            return int(latent + layer.qk_rope_head_dim)
        size = getattr(layer, "head_dim", None) or layer.hidden_size // heads
        return int(2 * size * (getattr(layer, "num_key_value_heads", None) or heads))

    kinds = [type(layer) for layer in DynamicCache(config=text).layers]  # fewer, where some share theirs
    several = getattr(text, "is_heterogeneous", False)
    layers = text.per_layer_config if several else [text] * text.num_hidden_layers
    return sum(
        width(layer)
        for layer, kind in zip(layers, kinds, strict=False)
        if issubclass(kind, DynamicLayer) and not issubclass(kind, DynamicSlidingWindowLayer)
    )


def _embedding_rows(folder: Path) -> int | None:
    """Rows of the tensor itself; None when no file has one under a usual name."""
    for file in sorted(folder.glob("*.safetensors")):
        for name, entry in _header(file)[0].items():
            if name.endswith(_EMBEDDINGS):
                return int(entry["shape"][0])
    return None
