"""Anchors: two supervised tokens in a row, every document its share, always A slots (traps 1-3)."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from services.dflash.anchors import Anchors, anchor_candidates, document_of_tokens, draw_anchors, share_out

documents = st.lists(st.lists(st.booleans(), min_size=1, max_size=30), min_size=1, max_size=6)


def as_pack(masks):
    offsets = torch.tensor([0, *(len(mask) for mask in masks)]).cumsum(0).to(torch.int32)
    return torch.tensor([bit for mask in masks for bit in mask], dtype=torch.uint8), offsets


def allowed(masks):
    """Candidate positions by document, straight from the definition."""
    found, first = [], 0
    for mask in masks:
        found.append([first + i for i in range(len(mask) - 1) if mask[i] and mask[i + 1]])
        first += len(mask)
    return found


@given(masks=documents, slots=st.integers(1, 80), seed=st.integers(0, 2**63 - 1))
def test_drawn_anchors_are_distinct_sorted_candidates_shared_out_fairly(masks, slots, seed):
    loss_mask, offsets = as_pack(masks)
    anchors = draw_anchors(loss_mask, offsets, slots, seed)
    by_document = allowed(masks)
    everything = {position for group in by_document for position in group}
    assert anchors.positions_A.numel() == anchors.valid_A.numel() == slots
    drawn = anchors.positions_A[anchors.valid_A].tolist()
    assert drawn == sorted(set(drawn)) and set(drawn) <= everything
    assert len(drawn) == min(slots, len(everything))
    assert anchors.positions_A.tolist() == drawn + [loss_mask.numel()] * (slots - len(drawn))
    some = [group for group in by_document if group]
    if len(some) <= slots:
        assert all(set(group) & set(drawn) for group in some)


@given(counts=st.lists(st.integers(0, 400), min_size=1, max_size=8), slots=st.integers(1, 600))
def test_shares_stay_within_one_of_proportional(counts, slots):
    shares = share_out(torch.tensor(counts), slots).tolist()
    total, wanted = sum(counts), min(slots, sum(counts))
    assert sum(shares) == wanted
    assert all(0 <= share <= count for share, count in zip(shares, counts, strict=True))
    filled = sum(count > 0 for count in counts)
    if total > slots >= filled:
        spare, rest = total - filled, wanted - filled
        for share, count in zip(shares, counts, strict=True):
            if count:
                assert abs(share - 1 - (count - 1) * rest / spare) < 1


def test_the_same_seed_draws_the_same_and_another_seed_another_set():
    loss_mask, offsets = as_pack([[True] * 200, [True] * 60])
    first = draw_anchors(loss_mask, offsets, 32, 5)
    assert torch.equal(first.positions_A, draw_anchors(loss_mask, offsets, 32, 5).positions_A)
    assert not torch.equal(first.positions_A, draw_anchors(loss_mask, offsets, 32, 6).positions_A)


def test_tails_shorter_than_a_block_are_anchored():
    """Demanding a whole block behind an anchor would never train the ends of answers."""
    loss_mask, offsets = as_pack([[False] * 5 + [True] * 3])
    assert draw_anchors(loss_mask, offsets, 8, 0).positions_A[:3].tolist() == [5, 6, 8]


def test_every_candidate_is_drawn_about_equally_often():
    loss_mask, offsets = as_pack([[True] * 41, [False] * 3, [True] * 21])
    hits = torch.zeros(66)
    for seed in range(400):
        hits[draw_anchors(loss_mask, offsets, 12, seed).positions_A] += 1
    candidates = anchor_candidates(loss_mask, document_of_tokens(offsets, 65))
    rate = hits[:65][candidates] / 400
    assert rate.min() > 0.12 and rate.max() < 0.28
    assert not hits[:65][~candidates].any()


def test_documents_and_packs_without_an_anchor():
    loss_mask, offsets = as_pack([[False, True, False], [True], [True, True, True]])
    assert draw_anchors(loss_mask, offsets, 4, 0).positions_A.tolist() == [4, 5, 7, 7]
    nothing = draw_anchors(torch.zeros(7, dtype=torch.uint8), offsets, 4, 0)
    assert isinstance(nothing, Anchors) and not nothing.valid_A.any()


def test_padding_behind_the_last_document_is_never_anchored():
    loss_mask = torch.tensor([1, 1, 1, 0, 0, 0], dtype=torch.uint8)
    offsets = torch.tensor([0, 3, 3, 3], dtype=torch.int32)  # empty documents fill up a fixed shape
    assert draw_anchors(loss_mask, offsets, 3, 9).positions_A.tolist() == [0, 1, 6]
