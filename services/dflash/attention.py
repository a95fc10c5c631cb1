"""Three ways to compute the same attention, equal to 1e-5 in float32; each an `Attend` for the drafter.

- `DocumentAttention`: CPU. Blocks of a document are contiguous because anchors are sorted, so their
  rows meet the document's own context in one product and their own block in another; softmax runs
  over both, and nothing of size R x (T + R) is made. A whole step of the demo's drafter is a tenth
  faster than with the reference at 64 blocks of 8, a quarter at 256, and needs linear memory.
- `FlexAttention`: GPU, one compiled kernel over tiles.
- `DenseAttention`: the reference, with a boolean mask over everything.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import flex_attention

from services.dflash.compiled import compiled
from services.dflash.drafter import KeyValue
from services.dflash.drafter_config import DrafterConfig
from services.dflash.mask import BlockLayout, block_mask, dense_mask

SPAN_BLOCKS = 32

# Tiles of the backward kernel. PyTorch's own for Hopper, 64 x 128 with 8 warps, take 1.3 times as long
# under this mask, where few tiles are full: 1.75 against 1.36 ms a layer on an H200, 512 blocks of 16,
# four documents. Not ROWS_GUARANTEED_SAFE: a row that sees nothing of its first tile becomes NaN.
FLEX_TILES = {
    "bwd_BLOCK_M1": 64, "bwd_BLOCK_N1": 64, "bwd_BLOCK_M2": 64, "bwd_BLOCK_N2": 64,
    "bwd_num_warps": 4, "bwd_num_stages": 2,
}  # fmt: skip


class DenseAttention:
    """Softmax over all keys under a boolean mask; quadratic in the anchors."""

    def __init__(self, config: DrafterConfig, layout: BlockLayout) -> None:
        self.config = config
        self.masks = {window: dense_mask(layout, window) for window in _windows(config)}

    def __call__(self, layer: int, query_RNE: Tensor, context: KeyValue, block: KeyValue) -> Tensor:
        return _masked(query_RNE, context, block, self.masks[self.config.window(layer)])


class FlexAttention:
    """Flex attention over tiles; the only one that fits a GPU at 512 blocks of 16."""

    def __init__(self, config: DrafterConfig, layout: BlockLayout) -> None:
        self.config = config
        self.masks = {window: block_mask(layout, window) for window in _windows(config)}

    def __call__(self, layer: int, query_RNE: Tensor, context: KeyValue, block: KeyValue) -> Tensor:
        key, value = (torch.cat(pair).transpose(0, 1)[None] for pair in zip(context, block, strict=True))
        kernel: Callable[..., Tensor] = flex_attention
        if query_RNE.is_cuda:
            kernel = compiled(flex_attention)
        mask = self.masks[self.config.window(layer)]
        query = query_RNE.transpose(0, 1)[None]
        tiles = FLEX_TILES if query.dtype == torch.bfloat16 else None  # float32 ones would not fit
        mixed = kernel(query, key, value, block_mask=mask, enable_gqa=True, kernel_options=tiles)
        return mixed[0].transpose(0, 1)


class ServingAttention:
    """One block behind its whole context, as a server runs it: masks for sliding layers only."""

    def __init__(self, config: DrafterConfig, context_tokens: int, size: int, device: torch.device) -> None:
        self.config = config
        at = torch.tensor([context_tokens], device=device)
        layout = BlockLayout(size, context_tokens, at, torch.zeros_like(at), at + size, at >= 0)
        self.masks = {window: dense_mask(layout, window) for window in _windows(config) if window}

    def __call__(self, layer: int, query_RNE: Tensor, context: KeyValue, block: KeyValue) -> Tensor:
        return _masked(query_RNE, context, block, self.masks.get(self.config.window(layer)))


class Span(NamedTuple):
    """Neighbouring blocks of one document and the context that any of them sees, all half-open."""

    row: int
    row_end: int
    token: int
    token_end: int


class DocumentAttention:
    """Block rows against their own document's context and their own block, a few blocks at a time.

    Reads anchors on the host: for tensors on a CPU, and only for blocks that are all valid.
    """

    def __init__(self, config: DrafterConfig, layout: BlockLayout) -> None:
        assert bool(layout.valid_A.all()), "unused slots are dropped before"
        self.config, self.size = config, layout.block_size
        self.spans = _spans(layout)
        windows = _windows(config)
        self.hidden_context = {w: [_hidden_context(layout, span, w) for span in self.spans] for w in windows}
        distance = torch.arange(self.size)[:, None] - torch.arange(self.size)
        self.hidden_slots = {w: (distance < 0) | (distance >= w) for w in windows if w}

    def __call__(self, layer: int, query_RNE: Tensor, context: KeyValue, block: KeyValue) -> Tensor:
        window = self.config.window(layer)
        query_RNE = query_RNE * query_RNE.shape[-1] ** -0.5
        mixed = [
            self._span(span, hidden, self.hidden_slots.get(window), query_RNE, context, block)
            for span, hidden in zip(self.spans, self.hidden_context[window], strict=True)
        ]
        return torch.cat(mixed)

    def _span(
        self,
        span: Span,
        hidden_context: Tensor,
        hidden_slots: Tensor | None,
        query_RNE: Tensor,
        context: KeyValue,
        block: KeyValue,
    ) -> Tensor:
        rows, tokens = slice(span.row, span.row_end), slice(span.token, span.token_end)
        groups = context.key.shape[1]
        query = query_RNE[rows].unflatten(1, (groups, -1)).permute(1, 2, 0, 3)  # [G, N/G, rows, E]
        flat = query.flatten(1, 2)  # all heads of a group meet the same keys in one product
        far = torch.bmm(flat, context.key[tokens].permute(1, 2, 0)).unflatten(1, query.shape[1:3])
        far = far.masked_fill(hidden_context, float("-inf"))

        own_key = block.key[rows].unflatten(0, (-1, self.size)).permute(2, 0, 3, 1)  # [G, blocks, E, B]
        near = query.unflatten(2, (-1, self.size)) @ own_key[:, None]  # [G, N/G, blocks, B, B]
        if hidden_slots is not None:
            near = near.masked_fill(hidden_slots, float("-inf"))

        weight = torch.cat((far, near.flatten(2, 3)), dim=-1).softmax(-1, dtype=torch.float32).to(query.dtype)
        far_weight, near_weight = weight.split((far.shape[-1], self.size), dim=-1)
        mixed = torch.bmm(far_weight.flatten(1, 2), context.value[tokens].transpose(0, 1)).view(query.shape)
        own_value = block.value[rows].unflatten(0, (-1, self.size)).permute(2, 0, 1, 3)  # [G, blocks, B, E]
        mixed = mixed + (near_weight.unflatten(2, (-1, self.size)) @ own_value[:, None]).flatten(2, 3)
        return mixed.permute(2, 0, 1, 3).flatten(1, 2)


def _spans(layout: BlockLayout) -> list[Span]:
    """Sorted blocks in runs of one document and at most SPAN_BLOCKS, so that early ones skip late context."""
    size, spans = layout.block_size, []
    anchors, starts = layout.anchor_A.tolist(), layout.start_A.tolist()
    first = 0
    for block in range(1, len(anchors) + 1):
        if block == len(anchors) or starts[block] != starts[first] or block - first == SPAN_BLOCKS:
            spans.append(Span(first * size, block * size, starts[first], anchors[block - 1]))
            first = block
    return spans


def _hidden_context(layout: BlockLayout, span: Span, window: int) -> Tensor:
    """bool [rows, tokens] of a span: context that a row must not see."""
    size = layout.block_size
    anchor_A = layout.anchor_A[span.row // size : span.row_end // size]
    token = torch.arange(span.token, span.token_end)
    row_position = (anchor_A[:, None] + torch.arange(size)).view(-1, 1)
    hidden = token >= anchor_A.repeat_interleave(size)[:, None]
    return hidden | (row_position - token >= window) if window else hidden


def _masked(query_RNE: Tensor, context: KeyValue, block: KeyValue, mask: Tensor | None) -> Tensor:
    key, value = (torch.cat(pair).transpose(0, 1)[None] for pair in zip(context, block, strict=True))
    mixed = F.scaled_dot_product_attention(
        query_RNE.transpose(0, 1)[None], key, value, attn_mask=mask, enable_gqa=True
    )
    return mixed[0].transpose(0, 1)


def _windows(config: DrafterConfig) -> list[int]:
    return sorted({config.window(layer) for layer in range(config.num_hidden_layers)})
