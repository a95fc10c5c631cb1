"""z-lab's checkpoint layout: what vLLM, SGLang and z-lab's own class load, written and read back.

Servers skip keys they do not know and fill in defaults without a word, so a drafter with one wrong
name or one dropped field is served as noise. Hence everything is written out that any loader reads,
in both places where two loaders read it from different ones, and reading is strict: a layout that
only looks alike is refused by its name.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from protocol.errors import CheckpointError, ModelError
from services.dflash.drafter import Drafter
from services.dflash.drafter_config import FULL, SLIDING, DrafterConfig
from services.dflash.target_model import torch_dtype

WEIGHTS, CONFIG = "model.safetensors", "config.json"
_DFLASH2_KEYS = {"conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"}
_AT_THE_TOP = (
    "num_target_layers", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "vocab_size", "rms_norm_eps", "max_position_embeddings",
)  # fmt: skip
_IN_EITHER_PLACE = ("target_layer_ids", "mask_token_id", "block_size")


def zlab_config(config: DrafterConfig, dtype: str) -> dict[str, Any]:
    """`config.json` of an export."""
    inner: dict[str, Any] = {
        "mask_token_id": config.mask_token_id,
        "target_layer_ids": list(config.target_layer_ids),
        "block_size": config.block_size,
    }
    if config.input_embedding_scale != 1.0:
        inner["input_embedding_scale"] = config.input_embedding_scale
    if config.output_multiplier != 1.0:
        inner["output_multiplier"] = config.output_multiplier
    if config.final_logit_softcapping:
        inner["final_logit_softcapping"] = config.final_logit_softcapping
    fields: dict[str, Any] = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "block_size": config.block_size,
        "dflash_config": inner,
        "num_target_layers": config.num_target_layers,
        "num_hidden_layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "rope_theta": config.rope_theta,
        "max_position_embeddings": config.max_position_embeddings,
        "layer_types": list(config.layer_types),
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": config.tie_word_embeddings,
        "dtype": dtype,
    }
    if SLIDING in config.layer_types:  # without both, loaders drop the window silently
        fields |= {"use_sliding_window": True, "sliding_window": config.sliding_window}
    return fields


def export_drafter(drafter: Drafter, out: Path, *, dtype: str = "bfloat16") -> None:
    """Writes the folder `out`, complete or not at all. Raises `CheckpointError` if it exists, `ConfigError`
    for a type that weights cannot have.
    """
    stored_as = torch_dtype(dtype)
    if out.exists():
        raise CheckpointError(
            f"export {out}: it exists already and is never overwritten; name another folder"
        )
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.with_name(f".partial-{out.name}")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    weights = {
        name: tensor.detach().to("cpu", stored_as).contiguous()
        for name, tensor in drafter.state_dict().items()
    }
    save_file(weights, partial / WEIGHTS, metadata={"format": "pt"})
    (partial / CONFIG).write_text(json.dumps(zlab_config(drafter.config, dtype), indent=2) + "\n")
    (partial / WEIGHTS).chmod((partial / CONFIG).stat().st_mode)  # safetensors writes for its owner alone
    partial.rename(out)


def load_zlab(path: Path) -> Drafter:
    """A drafter from a folder in z-lab's layout, float32 on the CPU.

    Raises `CheckpointError` naming what does not fit: DFlash 2, pruned vocabularies, the `speculators`
    layout, two block sizes, a dropped window, missing or unknown tensors.
    """
    config_path = path / CONFIG
    if not config_path.is_file():
        raise CheckpointError(f"drafter {path}: there is no {CONFIG} in it; name a folder in z-lab's layout")
    try:
        fields: dict[str, Any] = json.loads(config_path.read_text())
    except ValueError as error:
        raise CheckpointError(
            f"drafter {config_path}: not JSON ({error}); it is truncated or altered"
        ) from error
    _refuse_other_layouts(path, fields)
    weights = _read_weights(path)
    if {"d2t", "t2d"} & weights.keys():
        raise CheckpointError(
            f"drafter {path}: it has a pruned draft vocabulary (d2t, t2d), which is not supported"
        )
    try:
        drafter = Drafter(_config_of(path, fields), seed=None)
    except ModelError as error:
        raise CheckpointError(f"drafter {path}: {error}") from error
    load_weights(drafter, weights, str(path))
    return drafter


def load_weights(drafter: Drafter, weights: dict[str, Tensor], origin: str) -> None:
    """Copies weights by name, all of them and no others. Raises `CheckpointError`."""
    own = drafter.state_dict()
    missing, unknown = sorted(own.keys() - weights.keys()), sorted(weights.keys() - own.keys())
    if missing or unknown:
        raise CheckpointError(
            f"drafter {origin}: missing tensors {missing[:5]} ({len(missing)}), unknown {unknown[:5]} "
            f"({len(unknown)}); a server would fill or skip them silently"
        )
    for name, tensor in weights.items():
        if tensor.shape != own[name].shape:
            raise CheckpointError(
                f"drafter {origin}: {name} is {tuple(tensor.shape)}, its configuration says "
                f"{tuple(own[name].shape)}"
            )
    drafter.load_state_dict(weights)


def _read_weights(path: Path) -> dict[str, Tensor]:
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise CheckpointError(
            f"drafter {path}: there is no {WEIGHTS} in it; convert its weights to safetensors"
        )
    weights: dict[str, Tensor] = {}
    for file in files:
        try:
            weights |= load_file(file)
        except SafetensorError as error:
            raise CheckpointError(f"drafter {file}: {error}; it is truncated or damaged") from error
    return weights


def _refuse_other_layouts(path: Path, fields: dict[str, Any]) -> None:
    names, inner = fields.get("architectures") or [], fields.get("dflash_config") or {}
    if "DFlash2DraftModel" in names or _DFLASH2_KEYS & inner.keys():
        raise CheckpointError(
            f"drafter {path}: it is a DFlash 2 drafter, another architecture; not supported yet"
        )
    if {"speculators_config", "speculators_model_type", "transformer_layer_config"} & fields.keys():
        raise CheckpointError(f"drafter {path}: it is in the `speculators` layout; convert it to z-lab's")
    if fields.get("draft_vocab_size") not in (None, fields.get("vocab_size")):
        raise CheckpointError(
            f"drafter {path}: draft_vocab_size {fields['draft_vocab_size']} is not vocab_size "
            f"{fields.get('vocab_size')}: pruned draft vocabularies are not supported"
        )
    if "DFlashDraftModel" not in names:
        raise CheckpointError(
            f"drafter {path}: architectures {names}; only DFlashDraftModel in z-lab's layout loads"
        )
    outer, own = fields.get("block_size"), inner.get("block_size")
    if outer is not None and own is not None and outer != own:
        raise CheckpointError(
            f"drafter {path}: block_size is {outer} at the top and {own} in dflash_config; loaders read one "
            "or the other: make them equal"
        )


def _config_of(path: Path, fields: dict[str, Any]) -> DrafterConfig:
    inner = fields.get("dflash_config") or {}
    merged = {**fields, **inner}
    rope = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    kind = rope.get("rope_type") or rope.get("type") or "default"
    partial = rope.get("partial_rotary_factor", fields.get("partial_rotary_factor", 1.0))
    theta: Any = rope.get("rope_theta") or fields.get("rope_theta")
    missing = [name for name in _AT_THE_TOP if name not in fields]
    missing += [name for name in _IN_EITHER_PLACE if name not in merged] + ([] if theta else ["rope_theta"])
    if missing:
        raise CheckpointError(f"drafter {path}: {CONFIG} lacks {missing}")
    layer_types = tuple(fields.get("layer_types") or (FULL,) * fields["num_hidden_layers"])
    sliding = SLIDING in layer_types
    problems = {
        "attention_bias": bool(fields.get("attention_bias")),
        f"rope type {kind!r}": kind != "default",
        "partial_rotary_factor": partial != 1.0,
        "is_causal": fields.get("is_causal") is not None and bool(fields["is_causal"]) != sliding,
        "sliding layers without use_sliding_window and sliding_window": sliding
        and not (fields.get("use_sliding_window") and fields.get("sliding_window")),
    }
    if any(problems.values()):
        named = ", ".join(name for name, found in problems.items() if found)
        raise CheckpointError(f"drafter {path}: {named}: not supported, or ignored by servers")
    return DrafterConfig(
        hidden_size=fields["hidden_size"],
        intermediate_size=fields["intermediate_size"],
        num_hidden_layers=fields["num_hidden_layers"],
        num_attention_heads=fields["num_attention_heads"],
        num_key_value_heads=fields["num_key_value_heads"],
        head_dim=fields["head_dim"],
        vocab_size=fields["vocab_size"],
        num_target_layers=fields["num_target_layers"],
        target_layer_ids=tuple(merged["target_layer_ids"]),
        block_size=merged["block_size"],
        mask_token_id=merged["mask_token_id"],
        rms_norm_eps=fields["rms_norm_eps"],
        rope_theta=float(theta),
        max_position_embeddings=fields["max_position_embeddings"],
        layer_types=layer_types,
        sliding_window=fields["sliding_window"] if sliding else 0,
        input_embedding_scale=float(merged.get("input_embedding_scale") or 1.0),
        output_multiplier=float(merged.get("output_multiplier") or 1.0),
        final_logit_softcapping=float(merged.get("final_logit_softcapping") or 0.0),
        tie_word_embeddings=bool(fields.get("tie_word_embeddings")),
    )
