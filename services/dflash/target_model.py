"""The frozen target: loaded for its hidden states, or only its embedding and head for a drafter.

Any Hugging Face causal LM with a stack of decoder layers; of a vision-language model the text tower.
Safetensors only, no remote code. A drafter process reads two tensors (one if tied) instead of the
model: 57 MB instead of 270 MB for the demo's target, 1.2 GB instead of 16 GB for an 8B one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    GenerationConfig,
)
from transformers.utils import cached_file

from protocol.errors import ConfigError, ModelError
from services.dflash.drafter_config import logit_rules
from services.dflash.head import FrozenHead
from services.models.hub import check_tokenizer

_EMBEDDING_NAMES = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight", "tok_embeddings.weight")
_HEAD_NAMES = ("lm_head.weight", "embed_out.weight", "output.weight")
DTYPES = ("float32", "bfloat16", "float16")
# "layers": DeepSeek's and GLM's layer for several tokens at once has an embedding and head of its own
_OTHER_TOWERS = ("vision", "visual", "audio", "mtp", "assistant", "layers")


@dataclass(frozen=True)
class Target:
    """A loaded target in evaluation mode, without gradients."""

    model: nn.Module  # the causal LM
    base: nn.Module  # its text tower: embedding, layers, final norm, no head
    layers: nn.ModuleList
    config: Any  # configuration of the text tower
    head: FrozenHead
    embed_weight_VH: Tensor
    stop_ids: tuple[int, ...]

    @property
    def device(self) -> torch.device:
        return self.embed_weight_VH.device

    @property
    def dtype(self) -> torch.dtype:
        return self.embed_weight_VH.dtype

    def logits(self, last_hidden: Tensor) -> Tensor:
        """float32 [..., V] of hidden rows after the final norm."""
        return self.head.logits(last_hidden)


def torch_dtype(name: str | torch.dtype) -> torch.dtype:
    """`float32`, `bfloat16`, `float16` or a dtype. ConfigError for another name."""
    if isinstance(name, torch.dtype):
        return name
    if name not in DTYPES:
        raise ConfigError(f"type {name}: weights are {', '.join(DTYPES)}")
    return getattr(torch, name)


def load_target(
    path: str | Path,
    *,
    dtype: str | torch.dtype = "float32",
    device: str | torch.device = "cpu",
    attention: str = "sdpa",
) -> Target:
    """Loads a local folder or hub id. Raises `ModelError` if it is missing, unsafe or no such model."""
    loader = check_attention(path, attention)
    with _model_errors(path):
        model, report = loader.from_pretrained(
            str(path),
            config=_load_config(path),
            dtype=torch_dtype(dtype),
            attn_implementation=attention,
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    if report["missing_keys"]:
        names = sorted(report["missing_keys"])
        raise ModelError(
            f"target {path}: no weights for {names[:5]} ({len(names)} tensors); they would be random"
        )
    try:
        return wrap_target(model.to(device))
    except torch.OutOfMemoryError as error:
        raise ModelError(
            f"target {path}: no room on {device} ({error}); `draftmill check` tells what each role takes"
        ) from error


def loader_of(config: Any) -> tuple[Any, Any]:
    """(class that loads this configuration, class of the model): a causal LM, else a vision-language model
    around one.

    Raises `ModelError`.
    """
    kind = type(config)
    if kind in MODEL_FOR_CAUSAL_LM_MAPPING:
        return AutoModelForCausalLM, MODEL_FOR_CAUSAL_LM_MAPPING[kind]
    if kind in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        return AutoModelForImageTextToText, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[kind]
    raise ModelError(
        f"{kind.__name__}: no causal language model; drafters are trained for models that write text from "
        "left to right"
    )


def check_attention(path: str | Path, attention: str) -> Any:
    """The class that loads the model, from its configuration alone.

    Raises `ModelError` where Transformers lacks this attention, or would compute, without a word, another
    than every server.
    """
    config = _load_config(path)
    loader, model_class = loader_of(config)
    if attention == "sdpa" and not getattr(model_class, "_supports_sdpa", True):
        raise ModelError(
            f'model.attention "sdpa": target {path} is a {model_class.__name__}, which has none; set '
            'model.attention = "eager"'
        )
    softcap = getattr(config.get_text_config(decoder=True), "attn_logit_softcapping", None)
    if softcap and attention == "sdpa":
        raise ModelError(
            f'model.attention "sdpa": target {path} caps attention scores at {softcap}, which sdpa leaves '
            'out; set model.attention = "eager" or "flash_attention_2"'
        )
    return loader


def wrap_target(model: Any) -> Target:
    """A `Target` around a causal LM that is in memory already; freezes it."""
    model.eval().requires_grad_(False)
    config = model.config.get_text_config(decoder=True)
    base = model.get_decoder()
    output = model.get_output_embeddings()
    if output is None:
        raise ModelError(f"target {type(model).__name__}: it has no LM head; name a causal language model")
    for name, end in (("embedding", model.get_input_embeddings()), ("LM head", output)):
        if not _is_plain(getattr(end, "weight", None)):
            raise ModelError(
                f"target {type(model).__name__}: its {name} is quantised, but a drafter is trained through "
                "it and served with it; quantise the target without embedding and LM head"
            )
    if getattr(output, "bias", None) is not None:
        raise ModelError(
            f"target {type(model).__name__}: its LM head has a bias, which drafters are served without"
        )
    _, multiplier, softcap = logit_rules(config)
    return Target(
        model=model,
        base=base,
        layers=_decoder_layers(base, config.num_hidden_layers),
        config=config,
        head=FrozenHead(output.weight, multiplier, softcap),
        embed_weight_VH=model.get_input_embeddings().weight,
        stop_ids=_stop_ids(getattr(model, "generation_config", None), config),
    )


def _is_plain(weight: Tensor | None) -> bool:
    """Neither packed nor of a class that stands for packed numbers."""
    return (
        weight is not None
        and type(weight.data) is Tensor
        and weight.dtype in (torch.float32, torch.bfloat16, torch.float16)
    )


def _decoder_layers(base: nn.Module, count: int) -> nn.ModuleList:
    """The one list of `count` layers in the text tower, whatever the family calls it."""
    lists = [
        (name, m) for name, m in base.named_modules() if isinstance(m, nn.ModuleList) and len(m) == count
    ]
    if not lists:
        raise ModelError(f"target {type(base).__name__}: found no list of its {count} decoder layers to tap")
    return min(lists, key=lambda entry: entry[0].count("."))[1]


def load_text_config(path: str | Path) -> Any:
    """Configuration of the text tower; no weights are read. Raises `ModelError`."""
    return _load_config(path).get_text_config(decoder=True)


def _load_config(path: str | Path) -> Any:
    """The whole configuration. Wrappers may say at the top only that the text tower's head is its embedding;
    a text tower that is loaded alone would have a random one.
    """
    with _model_errors(path):
        config = AutoConfig.from_pretrained(str(path), trust_remote_code=False)
    text = config.get_text_config(decoder=True)
    said, known = (bool(getattr(one, "tie_word_embeddings", False)) for one in (config, text))
    if said and not known and _one_name(_weight_files(path), _HEAD_NAMES) is None:
        text.tie_word_embeddings = True
    return config


def load_tokenizer(path: str | Path) -> Any:
    """The target's tokenizer. Raises `ModelError`."""
    check_tokenizer(path, "copy the model's own there")
    with _model_errors(path):
        return AutoTokenizer.from_pretrained(str(path), trust_remote_code=False)


def load_stop_ids(path: str | Path) -> tuple[int, ...]:
    """Tokens that end an answer, from the generation and model configurations.

    Not the tokenizer's `eos_token`: converted tokenizers name a wrong one.
    """
    file = _file_of(path, "generation_config.json")
    generation = GenerationConfig(**json.loads(file.read_text())) if file else None
    return _stop_ids(generation, load_text_config(path))


def _stop_ids(*sources: Any) -> tuple[int, ...]:
    found: set[int] = set()
    for source in sources:
        value = getattr(source, "eos_token_id", None)
        if value is not None:
            found.update([value] if isinstance(value, int) else value)
    return tuple(sorted(found))


def load_embedding_and_head(
    path: str | Path, *, dtype: str | torch.dtype = "float32", device: str | torch.device = "cpu"
) -> tuple[Tensor, FrozenHead]:
    """The embedding rows [V, H] and the LM head, without building the model; tied: one tensor for both.

    Falls back to loading the model where the names of its files do not tell. Raises `ModelError`.
    """
    config = load_text_config(path)
    files = _weight_files(path)
    embedding, head = _one_name(files, _EMBEDDING_NAMES), _one_name(files, _HEAD_NAMES)
    tied = bool(getattr(config, "tie_word_embeddings", False))
    if embedding is None or (head is None and not tied):
        target = load_target(path, dtype=dtype, device=device, attention="eager")  # which all families have
        return target.embed_weight_VH, target.head
    if any(name.endswith("lm_head.bias") for name in files):
        raise ModelError(f"target {path}: its LM head has a bias, which drafters are served without")
    embed_weight_VH = head_weight_VH = _read_tensor(files[embedding], embedding)
    if head is not None:  # also where the configuration ties them: Transformers does only if they are equal
        read = _read_tensor(files[head], head)
        head_weight_VH = embed_weight_VH if tied and torch.equal(read, embed_weight_VH) else read
    shared = head_weight_VH is embed_weight_VH
    embed_weight_VH = embed_weight_VH.to(device, torch_dtype(dtype))
    head_weight_VH = embed_weight_VH if shared else head_weight_VH.to(device, torch_dtype(dtype))
    _, multiplier, softcap = logit_rules(config)
    return embed_weight_VH, FrozenHead(head_weight_VH, multiplier, softcap)


def _weight_files(path: str | Path) -> dict[str, Path]:
    """The file that holds each tensor."""
    index = _file_of(path, "model.safetensors.index.json")
    if index is not None:
        names: dict[str, str] = json.loads(index.read_text())["weight_map"]
        wanted = {
            n: f for n, f in names.items() if n.endswith(_EMBEDDING_NAMES + _HEAD_NAMES + ("lm_head.bias",))
        }
        files = {file: _file_of(path, file) for file in set(wanted.values())}
        return {name: found for name, file in wanted.items() if (found := files[file]) is not None}
    single = _file_of(path, "model.safetensors")
    if single is None:
        raise ModelError(f"target {path}: no model.safetensors in it; convert its weights to safetensors")
    with safe_open(single, "pt") as file:
        return dict.fromkeys(file.keys(), single)


def _one_name(files: dict[str, Path], endings: tuple[str, ...]) -> str | None:
    """The only tensor of the text tower with such a name; None if there are none or several."""
    found = [
        name
        for name in files
        if any(name == ending or name.endswith("." + ending) for ending in endings)
        and not any(part.startswith(_OTHER_TOWERS) for part in name.split("."))
    ]
    return found[0] if len(found) == 1 else None


def _read_tensor(file: Path, name: str) -> Tensor:
    with safe_open(file, "pt") as opened:
        return opened.get_tensor(name)


def _file_of(path: str | Path, name: str) -> Path | None:
    """A file of a local folder or hub id; None if it has none of that name."""
    local = Path(path)
    if local.is_dir():
        return local / name if (local / name).is_file() else None
    with _model_errors(path):
        found = cached_file(str(path), name, _raise_exceptions_for_missing_entries=False)
    return Path(found) if found else None


@contextmanager
def _model_errors(path: str | Path) -> Iterator[None]:
    """What loaders raise for a missing, unsafe or unknown model, as the error of this project."""
    try:
        yield
    except ImportError as error:
        raise ModelError(f"target {path}: {error}; install what its quantisation needs") from error
    except (OSError, ValueError) as error:
        raise ModelError(f"target {path}: {error}; name a local folder or hub id with safetensors") from error
