"""Small pieces of the drafter compiled for training on a GPU; anywhere else the function as written.

Between two matrix products a step only moves bytes, and every operation that PyTorch runs on its own
moves them once more: at the shape of Qwen3-8B that was 50 of 170 ms. Each piece here becomes one kernel,
or two with a reduction over rows. Pieces and not layers: they are small and all layers share them,
and the matrix products, three quarters of a step, stay with the library that does them best.

Shapes are fixed, so each number of rows is compiled once. Decoding (no gradients, another length every
block) is never compiled.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from typing import Any, ParamSpec, TypeVar

import torch

SHAPES = 64  # of one function; beyond that PyTorch would silently run it uncompiled

P = ParamSpec("P")
R = TypeVar("R")


@cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` for fixed shapes; compiled at its first call with each of them."""
    torch._dynamo.config.recompile_limit = max(SHAPES, torch._dynamo.config.recompile_limit)
    return torch.compile(function, dynamic=False)


def trains_on_gpu(tensor: torch.Tensor) -> bool:
    return tensor.is_cuda and torch.is_grad_enabled()


def fused(function: Callable[P, R]) -> Callable[P, R]:
    """Compiled if its first argument, a tensor, is on a GPU and gradients are recorded."""

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        first = args[0]
        assert isinstance(first, torch.Tensor)
        chosen = compiled(function) if trains_on_gpu(first) else function
        return chosen(*args, **kwargs)

    return call
