"""Who sees whom: block rows against context and blocks, as one rule in three forms.

    keys:      context tokens of the pack                 | rows of all blocks
    row k of   same document, strictly before the anchor  | its own block, both directions
    the block  (sliding layers: within the window too)    | (sliding layers: slots up to k, in the window)

The anchor's own context row is not seen: at serving time the target has not computed it yet. A block
never sees another one, also when a tile of the GPU kernel holds parts of both.

`visible` is the rule itself, element by element; `dense_mask` evaluates it everywhere (tests, and the
reference), `block_mask` gives it to flex attention with the tiles worked out from offsets and sorted
anchors by arithmetic on [query tiles, key tiles], never over all elements: 64 x 96 tiles, not 8192 x 12288.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from services.dflash.anchors import Anchors, document_of_tokens

TILE = 128


class BlockLayout(NamedTuple):
    """Where the A blocks of a pack lie. Unused slots see nothing but themselves."""

    block_size: int
    tokens: int  # context tokens T
    anchor_A: Tensor  # int64 position in the pack; T if unused
    start_A: Tensor  # first token of the anchor's document; T if unused
    end_A: Tensor  # one past its last token; T if unused
    valid_A: Tensor  # bool

    @property
    def rows(self) -> int:
        return self.anchor_A.numel() * self.block_size


def block_layout(anchors: Anchors, document_offsets: Tensor, tokens: int, block_size: int) -> BlockLayout:
    """Looks up the document of every anchor; no host synchronisation."""
    offsets = document_offsets.to(torch.int64)
    document_A = document_of_tokens(document_offsets, tokens)[anchors.positions_A.clamp(max=tokens - 1)]
    start_A = torch.where(anchors.valid_A, offsets[document_A], tokens)
    end_A = torch.where(anchors.valid_A, offsets[document_A + 1], tokens)
    return BlockLayout(block_size, tokens, anchors.positions_A, start_A, end_A, anchors.valid_A)


def visible(layout: BlockLayout, window: int, row: Tensor, key: Tensor) -> Tensor:
    """bool for broadcast `row` (of block rows) and `key` (context, then block rows); window 0: none."""
    size, tokens = layout.block_size, layout.tokens
    block, slot = row // size, row % size
    anchor = layout.anchor_A[block]
    in_context = (key >= layout.start_A[block]) & (key < anchor)
    own_row = key - tokens
    in_block = (own_row >= 0) & (own_row // size == block)
    if window:
        key_slot = own_row - block * size
        in_context = in_context & (anchor + slot - key < window)
        in_block = in_block & (key_slot <= slot) & (slot - key_slot < window)
    return in_context | in_block


def dense_mask(layout: BlockLayout, window: int) -> Tensor:
    """bool [R, T + R]; quadratic in the anchors, for tests and references."""
    device = layout.anchor_A.device
    rows = torch.arange(layout.rows, device=device)[:, None]
    keys = torch.arange(layout.tokens + layout.rows, device=device)[None, :]
    return visible(layout, window, rows, keys)


def _tiles(layout: BlockLayout, window: int) -> tuple[Tensor, Tensor]:
    """(touched, full) bool [query tiles, key tiles] over keys of context and rows.

    A tile is touched if any of its rows may see any of its keys, full if every row sees every key.
    """
    size, tokens, rows = layout.block_size, layout.tokens, layout.rows
    device = layout.anchor_A.device
    row = torch.arange(-(-rows // TILE) * TILE, device=device).clamp_(max=rows - 1)
    block, slot = row // size, row % size
    end = layout.anchor_A[block]
    start = layout.start_A[block]
    if window:
        start = torch.maximum(start, end + slot - window + 1)
    # Context columns of each row, [start, end), as bounds over the rows of a query tile.
    start, end = start.view(-1, TILE), end.view(-1, TILE)
    key = torch.arange(0, tokens + rows, TILE, device=device)
    key_end = (key + TILE).clamp(max=tokens + rows)
    seen = (start < end)[:, :, None] & (start[:, :, None] < key_end) & (end[:, :, None] > key)
    full = (start.amax(1)[:, None] <= key) & (end.amin(1)[:, None] >= key_end)
    first_own = tokens + (block.view(-1, TILE)[:, 0] * size)
    last_own = tokens + (block.view(-1, TILE)[:, -1] + 1) * size
    own = (first_own[:, None] < key_end) & (last_own[:, None] > key)
    return seen.any(1) | own, full & ~own


def block_mask(layout: BlockLayout, window: int) -> BlockMask:
    """The mask for `flex_attention` with queries [R] and keys [T + R]; built on the layout's device."""
    touched, full = _tiles(layout, window)
    partial = touched & ~full

    def listed(tiles: Tensor) -> tuple[Tensor, Tensor]:
        order = torch.argsort(tiles.to(torch.int8), dim=-1, descending=True, stable=True)
        return tiles.sum(-1, dtype=torch.int32)[None, None], order.to(torch.int32)[None, None]

    # The kernel works the rule out for each element of a partial tile: 32-bit integers are cheaper.
    narrow = layout._replace(anchor_A=layout.anchor_A.int(), start_A=layout.start_A.int())

    def rule(_batch: Tensor, _head: Tensor, row: Tensor, key: Tensor) -> Tensor:
        return visible(narrow, window, row, key)

    partial_count, partial_tiles = listed(partial)
    full_count, full_tiles = listed(full)
    return BlockMask.from_kv_blocks(
        partial_count,
        partial_tiles,
        full_count,
        full_tiles,
        BLOCK_SIZE=TILE,
        mask_mod=rule,
        seq_lengths=(layout.rows, layout.tokens + layout.rows),
    )
