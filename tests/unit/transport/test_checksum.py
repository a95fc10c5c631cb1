"""What the checksum finds: any change, any row that moved."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.transport.checksum import ROW_WORDS, SAMPLE_EVERY, checksum, wants_checksum

ROW_BYTES = ROW_WORDS * 8


def payload(size: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (size,), generator=torch.Generator().manual_seed(seed)).to(torch.uint8)


@settings(deadline=None)
@given(st.integers(1, 300), st.data())
def test_one_changed_byte_changes_it(units: int, data: st.DataObject) -> None:
    payload_B = payload(units * 64)
    before = checksum(payload_B)
    assert 0 <= before < 2**63
    at = data.draw(st.integers(0, units * 64 - 1))
    bit = data.draw(st.integers(0, 7))
    payload_B[at] ^= 1 << bit
    after = checksum(payload_B)
    top_bit_lost = at % 8 == 7 and bit == 7  # 63 bits of 64 are kept
    assert after != before or top_bit_lost


@pytest.mark.parametrize("size", [64, ROW_BYTES, ROW_BYTES * 3 + 64])
def test_it_is_the_sum_it_says_it_is(size: int) -> None:
    words = payload(size).view(torch.int64).tolist()
    rows = [words[at : at + ROW_WORDS] for at in range(0, len(words), ROW_WORDS)]
    if size % ROW_BYTES == 0:
        rows.append([])
    expected = sum((2 * row + 1) * sum(row_words) for row, row_words in enumerate(rows))
    assert checksum(payload(size)) == expected % 2**63


def test_rows_that_swapped_places_are_found() -> None:
    payload_B = payload(4 * ROW_BYTES)
    swapped_B = payload_B.view(4, ROW_BYTES)[[1, 0, 2, 3]].reshape(-1)
    shifted_B = payload_B.roll(ROW_BYTES)
    assert len({checksum(payload_B), checksum(swapped_B), checksum(shifted_B)}) == 3


def test_sampling_is_by_attempt() -> None:
    counters = range(SAMPLE_EVERY)
    assert [wants_checksum("sampled", c) for c in counters].count(True) == 1
    assert all(wants_checksum("always", c) for c in counters)
    assert not any(wants_checksum("off", c) for c in counters)
