"""Keys and values of rows that stand at different positions, for the target and the drafter, and the masks.

A row's token at position p lies at index p of its buffers; each forward writes at the row's own positions:

    index    0 ..          start                start + S             end
    row      tokens kept   the block            earlier blocks' rest, zeros
             seen          seen, as slots may   hidden by the mask, overwritten before it is seen

So nothing is ever cropped. Keys are returned up to the longest row's end: short rows pay for long ones.

Shapes: B rows, S slots of a block, R = B * S, K keys, N heads, G key-value heads, E head dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.cache_utils import CacheLayerMixin

from services.dflash.drafter import KeyValue
from services.dflash.drafter_config import DrafterConfig


class Cursor:
    """Where the next forward writes, index [B, S], and where the keys end that it meets; for all layers."""

    index_BS: Tensor
    end: int

    def move(self, index_BS: Tensor, end: int) -> None:
        self.index_BS, self.end = index_BS, end

    @property
    def keys_K(self) -> Tensor:
        return torch.arange(self.end, device=self.index_BS.device)


class RowLayer(CacheLayerMixin):
    """One layer of the target's cache or of the drafter's context: keys and values [B, G, capacity, E].

    Zeroed at first: what a mask hides has weight 0, and 0 times NaN would be NaN.
    """

    def __init__(self, cursor: Cursor, capacity: int) -> None:
        super().__init__()
        self.cursor, self.capacity = cursor, capacity

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        def buffer(like: Tensor) -> Tensor:
            return like.new_zeros(*like.shape[:2], self.capacity, like.shape[-1])

        self.keys, self.values = buffer(key_states), buffer(value_states)
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Writes [B, G, S, E] at the cursor; returns what lies before its end."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        index = self.cursor.index_BS[:, None, :, None]
        self.both.key.scatter_(2, index.expand_as(key_states), key_states)
        self.both.value.scatter_(2, index.expand_as(value_states), value_states)
        return self.both.key[:, :, : self.cursor.end], self.both.value[:, :, : self.cursor.end]

    def write(self, rows: KeyValue) -> tuple[Tensor, Tensor]:
        """`update` with the drafter's flat rows, [R, G, E]."""
        shape_BS = self.cursor.index_BS.shape
        return self.update(*(part.unflatten(0, shape_BS).transpose(1, 2) for part in rows))

    def regroup(self, kept_B: Tensor, more: RowLayer | None, capacity: int) -> None:
        """Keeps some rows, appends those of `more`, cuts what none of them needs."""
        assert capacity <= self.both.key.shape[2], "buffers do not grow: the longest rows come first"
        self.keys, self.values = (buffer[:, :, :capacity].index_select(0, kept_B) for buffer in self.both)
        if more is not None:
            self.keys, self.values = (torch.cat(pair) for pair in zip(self.both, more.both, strict=True))
        self.capacity = capacity

    @property
    def both(self) -> KeyValue:
        assert self.keys is not None and self.values is not None, "nothing has been written yet"
        return KeyValue(self.keys, self.values)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0

    def get_seq_length(self) -> int:
        """Asked for the prompts' forward alone, which finds nothing; later ones bring their masks."""
        return 0

    def get_max_length(self) -> int:
        return -1


class RowsAttention:
    """The drafter's: each row's block behind its own context, its keys where the next tokens' will lie.

    Slots at positions from `end_B` on, behind a row's limit, are seen by none before them.
    """

    def __init__(
        self,
        config: DrafterConfig,
        layers: Sequence[RowLayer],
        cursor: Cursor,
        end_B: Tensor,
        dtype: torch.dtype,
    ) -> None:
        self.config, self.layers, self.shape_BS = config, layers, cursor.index_BS.shape
        self.repeats = config.num_attention_heads // config.num_key_value_heads
        self.masks = {
            window: hiding_mask(_visible(cursor, end_B, window), dtype).repeat(1, 1, self.repeats, 1)
            for window in {config.window(layer) for layer in range(config.num_hidden_layers)}
        }

    def __call__(self, layer: int, query_RNE: Tensor, _context: KeyValue, block: KeyValue) -> Tensor:
        key, value = self.layers[layer].write(block)
        query = query_RNE.unflatten(1, (-1, self.repeats)).unflatten(0, self.shape_BS)  # [B, S, G, N/G, E]
        query = query.permute(0, 2, 3, 1, 4).flatten(2, 3)  # a group's heads meet the same keys: no copies
        mixed = F.scaled_dot_product_attention(
            query, key, value, attn_mask=self.masks[self.config.window(layer)]
        )
        return mixed.unflatten(2, (self.repeats, -1)).permute(0, 3, 1, 2, 4).reshape(query_RNE.shape)


def _visible(cursor: Cursor, end_B: Tensor, window: int) -> Tensor:
    """bool [B, S, K], as in `mask.visible`: sliding layers look back alone, others see the whole block."""
    position, key = cursor.index_BS[:, :, None], cursor.keys_K
    if window:
        return (key <= position) & (position - key < window)
    return (key < end_B[:, None, None]).expand(-1, position.shape[1], -1)


def causal(cursor: Cursor) -> Tensor:
    """bool [B, S, K] for the target."""
    return cursor.keys_K <= cursor.index_BS[:, :, None]


def hiding_mask(visible_BSK: Tensor, dtype: torch.dtype) -> Tensor:
    """[B, 1, S, K] to be added to scores: made once for all layers, and understood by "sdpa" and "eager"."""
    mask = torch.zeros(visible_BSK.shape, dtype=dtype, device=visible_BSK.device)
    return mask.masked_fill_(~visible_BSK, torch.finfo(dtype).min)[:, None]
