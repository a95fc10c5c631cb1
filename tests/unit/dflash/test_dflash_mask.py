"""Visibility: brute force from the words of the rule = the rule = tiles = flex (traps 1, 2, 9)."""

import pytest
import torch
from dflash_packs import tiny_pack
from dflash_tiny import drafter_config
from hypothesis import given, settings
from hypothesis import strategies as st

from services.dflash.anchors import draw_anchors
from services.dflash.attention import DenseAttention, DocumentAttention, FlexAttention
from services.dflash.drafter import KeyValue
from services.dflash.mask import TILE, block_layout, block_mask, dense_mask

CONFIG = drafter_config()


def layout_of(lengths, slots, size, *, supervised=0.7, seed=0):
    pack = tiny_pack(lengths, CONFIG, supervised=supervised, seed=seed)
    anchors = draw_anchors(pack.loss_mask_T, pack.document_offsets, slots, seed)
    return block_layout(anchors, pack.document_offsets, sum(lengths), size)


def brute_force(lengths, layout, window):
    """Element by element, in plain Python."""
    size, tokens = layout.block_size, layout.tokens
    document = [d for d, length in enumerate(lengths) for _ in range(length)]
    seen = torch.zeros(layout.rows, tokens + layout.rows, dtype=torch.bool)
    for block, anchor in enumerate(layout.anchor_A.tolist()):
        for slot in range(size):
            row = block * size + slot
            if anchor < tokens:
                for key in range(tokens):
                    near = not window or anchor + slot - key < window
                    seen[row, key] = document[key] == document[anchor] and key < anchor and near
            for other in range(size):
                causal = not window or (other <= slot and slot - other < window)
                seen[row, tokens + block * size + other] = causal
    return seen


@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=4),
    slots=st.integers(1, 12),
    size=st.integers(2, 6),
    window=st.sampled_from([0, 1, 3, 9]),
    seed=st.integers(0, 99),
)
@settings(max_examples=60, deadline=None)
def test_the_rule_is_what_it_says(lengths, slots, size, window, seed):
    layout = layout_of(lengths, slots, size, seed=seed)
    assert torch.equal(dense_mask(layout, window), brute_force(lengths, layout, window))


@given(
    lengths=st.lists(st.integers(1, 300), min_size=1, max_size=5),
    slots=st.integers(1, 70),
    size=st.integers(2, 17),
    window=st.sampled_from([0, 5, 100, 300]),
    seed=st.integers(0, 99),
)
@settings(max_examples=60, deadline=None)
def test_tiles_hold_all_that_is_visible_and_full_ones_are_full(lengths, slots, size, window, seed):
    """Blocks straddle tiles whenever 128 is no multiple of the block size: nothing may leak or be lost."""
    layout = layout_of(lengths, slots, size, seed=seed)
    mask, dense = block_mask(layout, window), dense_mask(layout, window)
    full = torch.zeros_like(dense)
    touched = torch.zeros_like(dense)
    for tile in range(mask.kv_num_blocks.shape[-1]):
        rows = slice(tile * TILE, (tile + 1) * TILE)
        for which, count, index in (
            (touched, mask.kv_num_blocks, mask.kv_indices),
            (full, mask.full_kv_num_blocks, mask.full_kv_indices),
        ):
            for key in index[0, 0, tile, : count[0, 0, tile]].tolist():
                which[rows, key * TILE : (key + 1) * TILE] = True
    assert not (dense & ~(touched | full)).any()
    assert not (full & ~dense).any()
    assert not (touched & full).any()


def random_parts(layout, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def draw(rows, heads):
        return torch.randn(rows, heads, 16, generator=generator)

    context = KeyValue(draw(layout.tokens, 2), draw(layout.tokens, 2))
    return draw(layout.rows, 4), context, KeyValue(draw(layout.rows, 2), draw(layout.rows, 2))


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize(("layer_types", "window"), [("full_attention", 0), ("sliding_attention", 7)])
@pytest.mark.parametrize("size", [4, 6, 16])
def test_three_attentions_agree(layer_types, window, size):
    config = drafter_config(layer_types=(layer_types,) * 3, sliding_window=window)
    layout = layout_of([90, 3, 70, 1, 150], 40, size, supervised=0.9)
    assert layout.valid_A.all()
    query, context, block = random_parts(layout)
    dense = DenseAttention(config, layout)(0, query, context, block)
    by_document = DocumentAttention(config, layout)(0, query, context, block)
    flex = FlexAttention(config, layout)(0, query, context, block)
    torch.testing.assert_close(by_document, dense, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(flex, dense, atol=1e-5, rtol=1e-5)


def test_a_block_does_not_hear_its_neighbours_or_its_anchors_own_row():
    layout = layout_of([90, 3, 70], 40, 7, supervised=0.9)
    attention = DocumentAttention(CONFIG, layout)
    query, context, block = random_parts(layout)
    before = attention(0, query, context, block)
    changed = 11
    mine = slice(changed * 7, changed * 7 + 7)
    block.value[mine] += 5.0
    anchor = int(layout.anchor_A[changed])
    context.value[anchor] += 5.0
    after = attention(0, query, context, block)
    moved = (after != before).flatten(1).any(1).unflatten(0, (-1, 7)).any(1).nonzero().flatten().tolist()
    later = [b for b, a in enumerate(layout.anchor_A.tolist()) if a > anchor and layout.start_A[b] <= anchor]
    assert sorted(moved) == sorted({changed, *later})


def test_unused_slots_give_finite_rows():
    layout = layout_of([9], 5, 4, supervised=0.4)
    assert not layout.valid_A.all()
    query, context, block = random_parts(layout)
    assert DenseAttention(CONFIG, layout)(0, query, context, block).isfinite().all()
