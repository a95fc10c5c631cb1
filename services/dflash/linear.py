"""Matrix products between low-precision activations and float32 master weights.

On a CPU, and wherever no gradient is recorded, a weight is cast where it is used. A GPU in training
does three things more, worth some 6 ms of a pack with a billion weights on an H200:

- a weight's copy in the activations' type is made once an optimizer step, not once a use, if whoever
  owns the masters keeps one (`Linear.copy`);
- a weight's gradient is added to its float32 buffer `weight.grad` by the matrix product that makes it,
  unrounded. Autograd sees no gradient of the weight: `Linear.on_gradient` is called instead of its hooks;
- several maps of one input add up that input's gradient in the same way.

The gated product of the MLP is recomputed in the backward pass: 192 MiB a layer for 8,192 rows of
12,288, for one more write of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from services.dflash.compiled import compiled, trains_on_gpu


class Linear(nn.Linear):
    """Without bias; float32 weight [outputs, inputs], used in the input's type."""

    copy: Tensor | None = None  # of the weight, in another type; its owner keeps it up to date
    on_gradient: Callable[[], None] | None = None  # each time that a backward pass has added to weight.grad

    def watch(self, seen: Callable[[], None]) -> None:
        """Call `seen` as `on_gradient`, whichever way gradients come here."""
        self.on_gradient = seen
        self.weight.register_post_accumulate_grad_hook(lambda _weight: seen())

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)

    def reset_parameters(self) -> None:
        """Nothing: `Drafter` draws every weight itself, without touching torch's global generator."""

    def forward(self, x: Tensor) -> Tensor:
        return project(x, self)[0]

    def weight_as(self, dtype: torch.dtype) -> Tensor:
        """Without a gradient."""
        if self.copy is not None and self.copy.dtype == dtype:
            return self.copy
        return self.weight.detach().to(dtype)


def project(x: Tensor, *maps: Linear) -> tuple[Tensor, ...]:
    """`x` [rows, inputs] through several maps, each [rows, outputs of that map]."""
    if trains_on_gpu(x):
        return _Projections.apply(x, maps, *(each.weight for each in maps))
    return tuple(F.linear(x, each.weight.to(x.dtype)) for each in maps)


def project_gated(gate: Tensor, up: Tensor, down: Linear) -> Tensor:
    """silu(gate) * up through `down`; both [rows, inputs]."""
    if trains_on_gpu(gate):
        return _GatedProjection.apply(gate, up, down, down.weight)
    return down(_gated(gate, up))


class _Projections(torch.autograd.Function):
    """The weights are arguments for autograd's eyes only: they make the outputs require a gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, maps: tuple[Linear, ...], *_weights: Tensor) -> tuple[Tensor, ...]:
        weights = [each.weight_as(x.dtype) for each in maps]
        ctx.maps = maps
        ctx.save_for_backward(x, *weights)
        return tuple(F.linear(x, weight) for weight in weights)

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        slope_x: Tensor | None = None
        for each, weight, slope in zip(ctx.maps, weights, slopes, strict=True):
            _add_gradient(each, slope, x)
            if ctx.needs_input_grad[0]:
                slope_x = slope @ weight if slope_x is None else slope_x.addmm_(slope, weight)
        return (slope_x, None, *(None for _ in weights))


class _GatedProjection(torch.autograd.Function):
    """Keeps gate and up, not their product."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, down: Linear, _weight: Tensor) -> Tensor:
        weight = down.weight_as(gate.dtype)
        ctx.down = down
        ctx.save_for_backward(gate, up, weight)
        return F.linear(compiled(_gated)(gate, up), weight)

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:
        gate, up, weight = ctx.saved_tensors
        product, slope_gate, slope_up = compiled(_gated_backward)(gate, up, slope @ weight)
        _add_gradient(ctx.down, slope, product)
        return slope_gate, slope_up, None, None


def _gated(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def _gated_backward(gate: Tensor, up: Tensor, slope: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(product, d/d gate, d/d up) for the gradient `slope` of the product."""
    wide = gate.float()
    open_ = wide.sigmoid()
    silu = wide * open_
    slope_gate = slope * up * (open_ + silu * (1.0 - open_))
    return (silu * up).to(gate.dtype), slope_gate.to(gate.dtype), (slope * silu).to(gate.dtype)


def _add_gradient(each: Linear, slope: Tensor, x: Tensor) -> None:
    """weight.grad += slope.T @ x, in float32 within the matrix product."""
    if not each.weight.requires_grad:
        return
    gradient = each.weight.grad
    if gradient is None:
        gradient = each.weight.grad = torch.zeros_like(each.weight)
    torch.addmm(gradient, slope.T, x, out_dtype=gradient.dtype, out=gradient)
    if each.on_gradient is not None:
        each.on_gradient()
