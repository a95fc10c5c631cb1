"""What an evaluator takes where it runs: both models, and what it decodes `eval.batch` prompts with.

Caches and logits are counted at their largest, from the bytes of the prompts, which nobody has tokenized yet.
Windows and recurrent states are not, being small, nor are activations.
"""

from __future__ import annotations

from itertools import islice
from pathlib import Path

from services.check.model import ModelFacts
from services.config.schema import Config
from services.data.gpu_memory import ITEM_BYTES
from services.dflash.drafter_config import DrafterConfig
from services.dflash.lossless import LOOK_ROWS
from services.dflash.speculate_batch import TOKENS

TEMPLATE_TOKENS = 256  # that a chat template may add to a prompt
LOADING_BYTES = 8
"""Of a drafter's parameter on the host while it is loaded: float32 in the file and in the model."""


def evaluator_memory(config: Config, model: ModelFacts, *, on_gpu: bool = False) -> dict[str, int]:
    """Bytes, by what takes them; on a CPU at the larger of loading a drafter and decoding with it."""
    drafter, item = model.drafter, ITEM_BYTES[config.model.dtype]
    prompts = config.eval.batch if model.in_batches else 1
    context_width = 2 * drafter.num_hidden_layers * drafter.num_key_value_heads * drafter.head_dim
    longest = min(drafter.max_position_embeddings, _longest(config) + drafter.block_size)
    tokens = min(TOKENS, prompts * longest)
    rows = max(LOOK_ROWS, prompts * drafter.block_size)
    decoding = {
        "drafter": drafter.parameter_count * item,
        "caches": tokens * (model.cache_width + context_width) * item,
        "logits": rows * model.rows * logit_bytes(item, drafter),
    }
    loading = {"drafter": drafter.parameter_count * LOADING_BYTES}
    larger = decoding if on_gpu else max(decoding, loading, key=lambda parts: sum(parts.values()))
    return {"weights": model.loaded_bytes} | larger


def _longest(config: Config) -> int:
    """Tokens of the longest prompt with its answer, at most: a token has a byte or more of its line."""
    try:
        with Path(config.eval.prompts).open("rb") as lines:
            line = max(map(len, islice(lines, config.eval.limit or None)), default=0)
    except OSError:
        return TOKENS  # reported as a finding on eval.prompts
    return line + TEMPLATE_TOKENS + config.eval.max_new_tokens


def logit_bytes(item: int, drafter: DrafterConfig) -> int:
    """Of one logit in `FrozenHead.logits` at most: as the product leaves it and float32; then float32 twice,
    where it is scaled or capped.
    """
    again = drafter.output_multiplier != 1.0 or drafter.final_logit_softcapping != 0.0
    return max(4 if item == 4 else item + 4, 8 if again else 0)
