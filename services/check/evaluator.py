"""What an evaluator takes where it runs: both models, and what it decodes `eval.batch` prompts with.

Caches and logits are counted at their largest. Activations are not: they depend on prompts that nobody has
tokenized yet.
"""

from __future__ import annotations

from services.check.model import ModelFacts
from services.config.schema import Config
from services.data.forecast import ITEM_BYTES
from services.dflash.lossless import LOOK_ROWS
from services.dflash.speculate_batch import TOKENS


def evaluator_memory(config: Config, model: ModelFacts) -> dict[str, int]:
    """Bytes, by what takes them."""
    drafter, item = model.drafter, ITEM_BYTES[config.model.dtype]
    context_width = 2 * drafter.num_hidden_layers * drafter.num_key_value_heads * drafter.head_dim
    tokens = min(TOKENS, config.eval.batch * drafter.max_position_embeddings)
    rows = max(LOOK_ROWS, config.eval.batch * drafter.block_size)
    return {
        "weights": model.loaded_bytes,
        "drafter": drafter.parameter_count * item,
        "caches": tokens * (model.cache_width + context_width) * item,
        "logits": rows * model.rows * item,
    }
