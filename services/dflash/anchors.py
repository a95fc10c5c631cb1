"""Where blocks start: seeded, in proportion to each document's supervised tokens, always A slots.

An anchor is a token that is supervised itself and whose successor in the same document is too; no
more is asked of it, or the tails of answers would never be trained on. Slots that find no anchor
stay unused, so every pack has the same shapes and compiled code is compiled once.

Only integer tensor operations of fixed shape: no host synchronisation on a GPU, the same anchors on
every device. 0.6 ms for 4,096 tokens and 512 slots on a CPU core.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from services.dflash.counter_random import hash_bits

_KEY_BITS = 31


class Anchors(NamedTuple):
    """A slots in ascending order; unused ones come last, with position T and `valid` False."""

    positions_A: Tensor  # int64, index into the pack
    valid_A: Tensor  # bool


def document_of_tokens(document_offsets: Tensor, tokens: int) -> Tensor:
    """The index of each token's document, int64 [T], from offsets [documents + 1]."""
    positions = torch.arange(tokens, device=document_offsets.device)
    ends = document_offsets[1:].to(torch.int64)
    return torch.searchsorted(ends, positions, right=True).clamp_(max=ends.numel() - 1)


def anchor_candidates(loss_mask_T: Tensor, document_T: Tensor) -> Tensor:
    """bool [T]: supervised, and so is the next token of the same document."""
    supervised = loss_mask_T != 0
    pairs = supervised[:-1] & supervised[1:] & (document_T[:-1] == document_T[1:])
    return torch.cat((pairs, pairs.new_zeros(1)))


def share_out(counts_D: Tensor, slots: int) -> Tensor:
    """Slots for each document, int64 [D]: at most its count, `min(slots, sum)` in all.

    One each while that is possible (a sample without an anchor would train nothing), the rest in
    proportion, largest remainder first, ties to the earlier document.
    """
    total = counts_D.sum()
    wanted = total.clamp(max=slots)
    filled = (counts_D > 0).to(torch.int64)
    base = filled * (filled.sum() <= wanted)
    spare, rest = counts_D - base, wanted - base.sum()
    product = spare * rest
    divisor = spare.sum().clamp(min=1)
    share, remainder = product // divisor, product % divisor
    place = torch.argsort(torch.argsort(remainder, descending=True, stable=True), stable=True)
    return base + share + (place < rest - share.sum())


def draw_anchors(loss_mask_T: Tensor, document_offsets: Tensor, slots: int, seed: int) -> Anchors:
    """`slots` anchors of a pack, without replacement, a pure function of the arguments' values.

    `loss_mask_T` uint8 or bool [T]; `document_offsets` integers [documents + 1] from 0 to T.
    A document, or a whole pack, without a valid anchor leaves slots unused.
    """
    tokens = loss_mask_T.numel()
    document_T = document_of_tokens(document_offsets, tokens)
    candidate_T = anchor_candidates(loss_mask_T, document_T)
    counts_D = torch.zeros(document_offsets.numel() - 1, dtype=torch.int64, device=loss_mask_T.device)
    counts_D.index_add_(0, document_T, candidate_T.to(torch.int64))

    positions = torch.arange(tokens, device=loss_mask_T.device)
    keys_T = hash_bits(positions, torch.zeros_like(positions), seed) & ((1 << _KEY_BITS) - 1)
    # Documents in order, in each the candidates first, among them by random key.
    order = torch.argsort((document_T << 1 | ~candidate_T) << _KEY_BITS | keys_T, stable=True)
    place_T = torch.empty_like(order).scatter_(0, order, positions)
    within_T = place_T - document_offsets.to(torch.int64)[document_T]
    drawn_T = candidate_T & (within_T < share_out(counts_D, slots)[document_T])

    drawn = torch.where(drawn_T, positions, tokens).sort().values[:slots]
    if tokens < slots:
        drawn = torch.cat((drawn, drawn.new_full((slots - tokens,), tokens)))
    return Anchors(drawn, drawn < tokens)
