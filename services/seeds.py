"""Everything random comes from a name, never from timing: `seed(run_seed, "anchors", epoch, batch, draw)`.

A 63-bit number from BLAKE2b over the parts' canonical text; 2 us a call, no state, no torch.
"""

from __future__ import annotations

import hashlib


def seed(*parts: int | str) -> int:
    """A 63-bit seed that is a pure function of `parts` (each an int or a str; 1 and "1" differ)."""
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def noise_seed(run_seed: int, epoch: int, index: int) -> int:
    """Of the feature noise of batch (epoch, index): whoever adds it, target or drafter, draws the same."""
    return seed(run_seed, "noise", epoch, index)
