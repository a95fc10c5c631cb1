"""Attention kernels for decoding, where each forward meets another number of keys."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch.nn.attention import SDPBackend, sdpa_kernel

_KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


@contextmanager
def growing_keys() -> Iterator[None]:
    """`scaled_dot_product_attention` without cuDNN inside, in the whole process; a decorator as well.

    cuDNN builds a plan for each shape it has not met, keys included: 23 to 37 ms on the host, as long as
    a forward from Python. On Hopper and Blackwell PyTorch takes it first in 16-bit types, from the release
    whose wheels bring cuDNN 9.15.1 or later (2.11). Where shapes return, as in a target server, it may stay.
    """
    with sdpa_kernel(_KERNELS):
        yield
