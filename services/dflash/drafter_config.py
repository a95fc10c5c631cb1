"""The drafter's shape, derived once from a target's configuration and from then on only stored.

Tap ids, mask row and widths are written into every checkpoint and export and never recomputed on
load: a formula that changes between training and serving is how drafters end up accepting nothing.
No torch and no weights here, so `check` and `plan` can print a parameter count in milliseconds.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from protocol.errors import ModelError
from services.config import schema

FULL, SLIDING = "full_attention", "sliding_attention"

_MASK_NAME = re.compile(r"^[<\[][|\W]*mask(_token)?[|\W]*[>\]]$", re.IGNORECASE)
_SGLANG_MASK = "<|MASK|>"
_UNUSED_NAME = re.compile(r"^[<\[].*(reserved|unused|dummy|extra_id|place.?holder).*[>\]]$", re.IGNORECASE)


@dataclass(frozen=True)
class DrafterConfig:
    """Everything that decides the drafter's tensors and what they mean; `ModelError` if inconsistent.

    `vocab_size` counts rows of the target's embedding. `final_logit_softcapping` 0.0 and
    `sliding_window` 0 mean none.
    """

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    num_target_layers: int
    target_layer_ids: tuple[int, ...]
    block_size: int
    mask_token_id: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    layer_types: tuple[str, ...]
    sliding_window: int = 0
    input_embedding_scale: float = 1.0
    output_multiplier: float = 1.0
    final_logit_softcapping: float = 0.0
    tie_word_embeddings: bool = False

    def __post_init__(self) -> None:
        _check_taps(self.target_layer_ids, self.num_target_layers)
        _check_attention(self)
        if self.block_size < 2:
            raise ModelError(
                f"block_size {self.block_size}: a block is one clean token and drafts; use 2 or more"
            )
        _check_mask_row(self.mask_token_id, self.vocab_size)

    @property
    def taps(self) -> int:
        return len(self.target_layer_ids)

    @property
    def feature_size(self) -> int:
        """Width of the concatenated taps."""
        return self.taps * self.hidden_size

    @property
    def parameter_count(self) -> int:
        """Trained parameters; embedding and LM head are the target's and not counted."""
        hidden, query = self.hidden_size, self.num_attention_heads * self.head_dim
        key_value = self.num_key_value_heads * self.head_dim
        attention = hidden * (2 * query + 2 * key_value) + 2 * self.head_dim
        layer = attention + 3 * hidden * self.intermediate_size + 2 * hidden
        return self.feature_size * hidden + 2 * hidden + self.num_hidden_layers * layer

    def window(self, layer: int) -> int:
        """Tokens a query of this layer looks back; 0: all of its document."""
        return self.sliding_window if self.layer_types[layer] == SLIDING else 0

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready; `from_dict` gives an equal object."""
        return {
            name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()
        }

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> DrafterConfig:
        """Raises `ModelError` on a missing or unknown field."""
        values: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()
        }
        try:
            return cls(**values)
        except TypeError as error:
            raise ModelError(
                f"drafter configuration {fields}: {error}; it was written by another version"
            ) from error


class Misfit(NamedTuple):
    """An option of the schema that does not fit the target, and the rule with its remedy."""

    option: str
    rule: str


def _check_mask_row(row: int, rows: int) -> None:
    if not 0 <= row < rows:
        raise ModelError(
            f"mask_token_id {row}: the target's embedding has rows 0..{rows - 1} and none can be added; "
            "choose an existing row that data never uses"
        )


def _check_taps(ids: tuple[int, ...], target_layers: int) -> None:
    if not ids:
        raise ModelError("target_layer_ids (): at least one tapped layer is needed")
    for tap in ids:
        if tap == target_layers - 1:
            raise ModelError(
                f"target_layer_ids {ids}: {tap} is the last of {target_layers} layers, whose output some "
                "loaders take before and some after the final norm; tap an earlier layer"
            )
        if not 0 <= tap < target_layers:
            raise ModelError(
                f"target_layer_ids {ids}: {tap} is no layer; the target has layers 0..{target_layers - 1}"
            )
    if list(ids) != sorted(set(ids)):
        raise ModelError(
            f"target_layer_ids {ids}: name each layer once, in ascending order, as servers capture them"
        )


def _check_attention(config: DrafterConfig) -> None:
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    if heads < 1 or kv_heads < 1 or heads % kv_heads:
        raise ModelError(f"heads {heads}, kv_heads {kv_heads}: heads must be a multiple of kv_heads")
    if config.head_dim % 2 or config.head_dim < 2:
        raise ModelError(f"head_dim {config.head_dim}: rotary positions need an even number")
    if len(config.layer_types) != config.num_hidden_layers or not set(config.layer_types) <= {FULL, SLIDING}:
        raise ModelError(
            f"layer_types {config.layer_types}: one of {FULL!r}, {SLIDING!r} for each of the "
            f"{config.num_hidden_layers} layers"
        )
    if SLIDING in config.layer_types and config.sliding_window < 1:
        raise ModelError(
            f"sliding_window {config.sliding_window}: sliding layers need a window of at least one token"
        )


def spread_taps(target_layers: int, taps: int) -> tuple[int, ...]:
    """Evenly spread 0-based layer ids from 1 to N-3, the middle one for a single tap (paper, section 3)."""
    if taps == 1:
        return (target_layers // 2,)
    return tuple(round(1 + i * (target_layers - 4) / (taps - 1)) for i in range(taps))


def most_taps(target_layers: int) -> int:
    """How many `spread_taps` can spread: one a layer from 1 to N-3, and one in the middle of three layers."""
    return max(target_layers - 3, min(1, target_layers // 3))


def misfits(
    text_config: Any, options: schema.Drafter, tokenizer: Any | None, *, stop_ids: tuple[int, ...] = ()
) -> list[Misfit]:
    """What a target lacks for these options, all of it at once; `derive` raises the first."""
    found = []
    taps = "drafter.target_layer_ids" if options.target_layer_ids else "drafter.taps"
    for option, choose in (
        (taps, lambda: _taps(text_config, options)),
        ("drafter.mask_token_id", lambda: _mask_row(text_config, options.mask_token_id, tokenizer, stop_ids)),
    ):
        try:
            choose()
        except ModelError as error:
            found.append(Misfit(option, str(error).partition(": ")[2]))
    return found


def derive(
    text_config: Any, options: schema.Drafter, tokenizer: Any | None, *, stop_ids: tuple[int, ...] = ()
) -> DrafterConfig:
    """The drafter for a target, from the configuration of its text tower and the `[drafter]` options.

    `tokenizer` may be None when `options.mask_token_id` names the row. Raises `ModelError`.
    """
    hidden, target_layers = text_config.hidden_size, text_config.num_hidden_layers
    heads, kv_heads, head_dim = _head_shape(text_config)
    scale, multiplier, softcap = logit_rules(text_config)
    sliding = options.sliding_layers
    if sliding > options.layers:
        raise ModelError(
            f"drafter.sliding_layers {sliding}: there are only {options.layers} layers; lower it"
        )
    return DrafterConfig(
        hidden_size=hidden,
        intermediate_size=options.intermediate_size or _mlp_width(text_config),
        num_hidden_layers=options.layers,
        num_attention_heads=options.heads or heads,
        num_key_value_heads=options.kv_heads or kv_heads,
        head_dim=options.head_dim or head_dim,
        vocab_size=text_config.vocab_size,
        num_target_layers=target_layers,
        target_layer_ids=_taps(text_config, options),
        block_size=options.block_size,
        mask_token_id=_mask_row(text_config, options.mask_token_id, tokenizer, stop_ids),
        rms_norm_eps=_first(
            text_config, ("rms_norm_eps", "layer_norm_eps", "norm_eps", "layer_norm_epsilon"), 1e-6
        ),
        rope_theta=_rope_theta(text_config),
        max_position_embeddings=_positions(text_config),
        layer_types=(SLIDING,) * sliding + (FULL,) * (options.layers - sliding),
        sliding_window=options.sliding_window if sliding else 0,
        input_embedding_scale=scale,
        output_multiplier=multiplier,
        final_logit_softcapping=softcap,
        tie_word_embeddings=bool(getattr(text_config, "tie_word_embeddings", False)),
    )


def _taps(config: Any, options: schema.Drafter) -> tuple[int, ...]:
    layers = config.num_hidden_layers
    if options.target_layer_ids:
        _check_taps(options.target_layer_ids, layers)
        return options.target_layer_ids
    most = most_taps(layers)
    if options.taps <= most:
        return spread_taps(layers, options.taps)
    fits = f"at most {most} can be spread; lower drafter.taps to {most}" if most else "too few for any"
    more = ", or name drafter.target_layer_ids (any but the last)" if layers > 1 else ""
    raise ModelError(f"drafter.taps {options.taps}: the target has {layers} layers, {fits}{more}")


def _first(config: Any, names: tuple[str, ...], default: Any) -> Any:
    for name in names:
        value = getattr(config, name, None)
        if value is not None:
            return value
    return default


def _head_shape(config: Any) -> tuple[int, int, int]:
    """(heads, key-value heads, head dimension); latent attention has none like these: 128-wide ones."""
    if getattr(config, "kv_lora_rank", None):
        heads = max(1, config.hidden_size // 128)
        return heads, next(count for count in (8, 4, 2, 1) if heads % count == 0), 128
    if getattr(config, "is_heterogeneous", False):  # layers differ (Gemma 4): the drafter is like the first
        config = config.per_layer_config[0]
    heads = config.num_attention_heads
    kv_heads = _first(config, ("num_key_value_heads",), heads)
    return heads, kv_heads, _first(config, ("head_dim",), config.hidden_size // heads)


def _mlp_width(config: Any) -> int:
    width = _first(config, ("intermediate_size", "ffn_dim", "n_inner"), None)
    if isinstance(width, (list, tuple)):  # per-layer widths: the widest
        width = max(width)
    return int(width or 3 * config.hidden_size)


def _positions(config: Any) -> int:
    """As many as any server derives for the target, whose drafter may not have fewer: some take a rope's
    factor times the length that it started from, or `max_position_embeddings` where it names none.
    """
    positions = int(_first(config, ("max_position_embeddings", "n_positions"), 131072))
    rope = _rope(config)
    started_from = rope.get("original_max_position_embeddings") or positions
    if rope.get("rope_type") == "llama3":
        return positions
    return max(positions, int(started_from * float(rope.get("factor") or 1.0)))


def _rope_theta(config: Any) -> float:
    return float(_rope(config).get("rope_theta") or getattr(config, "rope_theta", None) or 10000.0)


def _rope(config: Any) -> dict[str, Any]:
    """The rule of full attention, where each kind of layer has one."""
    rope: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    if any(isinstance(value, dict) for value in rope.values()):
        rope = rope.get(FULL) or next(value for value in rope.values() if isinstance(value, dict))
    return rope


def logit_rules(config: Any) -> tuple[float, float, float]:
    """(input embedding scale, output multiplier, final soft-cap or 0.0) of a target's text configuration.

    A drafter fed unscaled rows, or trained on logits without the cap, is served with other numbers
    than it learned.
    """
    scale = _first(config, ("embedding_multiplier", "scale_emb"), 1.0)
    if "gemma" in str(getattr(config, "model_type", "")):
        scale = config.hidden_size**0.5
    multiplier = _first(config, ("logit_scale", "lm_head_multiplier"), 1.0)
    divisor = _first(config, ("logits_scaling",), 1.0)
    softcap = getattr(config, "final_logit_softcapping", None) or 0.0
    return float(scale), float(multiplier) / float(divisor), float(softcap)


def _token_ids(*values: int | list[int] | tuple[int, ...] | None) -> set[int]:
    found: set[int] = set()
    for value in values:
        if value is not None:
            found.update([value] if isinstance(value, int) else value)
    return found


def special_ids(config: Any, tokenizer: Any | None, stop_ids: tuple[int, ...]) -> set[int]:
    """Pad, eos, bos and stop tokens: data have them, whatever their texts say."""
    names = ("pad_token_id", "eos_token_id", "bos_token_id")
    return _token_ids(
        stop_ids, *(getattr(owner, name, None) for owner in (config, tokenizer) for name in names)
    )


def _mask_row(config: Any, wanted: int, tokenizer: Any | None, stop_ids: tuple[int, ...]) -> int:
    special = special_ids(config, tokenizer, stop_ids)
    if wanted >= 0:
        if wanted in special:
            raise ModelError(
                f"drafter.mask_token_id {wanted}: it is the target's pad, eos, bos or stop token, which data "
                "uses; choose a row that data never uses"
            )
        _check_mask_row(wanted, config.vocab_size)
        return wanted
    if tokenizer is None:
        raise ModelError(
            "drafter.mask_token_id -1: no tokenizer to choose from; name a row that your data never uses"
        )
    return choose_mask_token_id(tokenizer, config.vocab_size, special)


def choose_mask_token_id(
    tokenizer: Any, embedding_rows: int, special: set[int] | frozenset[int] = frozenset()
) -> int:
    """A row of the embedding that data never uses, by how sure that is. Raises `ModelError` if none is.

    In order: a token that SGLang takes for the mask whatever the drafter says; the tokenizer's mask token or
    one named so; the first row behind the tokenizer; a reserved or unused token; the last added special token
    that the chat template does not mention.
    """
    vocabulary: dict[str, int] = tokenizer.get_vocab()
    special = (
        special | special_ids(None, tokenizer, ()) | _token_ids(getattr(tokenizer, "unk_token_id", None))
    )

    def usable(ids: list[int]) -> list[int]:
        return sorted(token for token in ids if token not in special and 0 <= token < embedding_rows)

    named = vocabulary.get(_SGLANG_MASK, getattr(tokenizer, "mask_token_id", None))
    if named is not None and usable([named]):
        return int(named)
    masks = usable([token for text, token in vocabulary.items() if _MASK_NAME.match(text)])
    if masks:
        return masks[0]
    behind = max(vocabulary.values(), default=-1) + 1
    if behind < embedding_rows and behind not in special:
        return behind
    unused = usable([token for text, token in vocabulary.items() if _UNUSED_NAME.match(text)])
    if unused:
        return unused[0]
    template = str(getattr(tokenizer, "chat_template", None) or "")
    added = usable([token for text, token in tokenizer.get_added_vocab().items() if text not in template])
    if not added:
        raise ModelError(
            f"drafter.mask_token_id -1: none of the target's {embedding_rows} embedding rows is a mask, "
            "reserved, unused or idle special token; name a row that your data never uses"
        )
    return added[-1]
