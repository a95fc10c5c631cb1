"""What a GPU computes in its own way, run on a CPU uncompiled: the formulas, not the kernels."""

from __future__ import annotations

import pytest
import torch

from services.dflash.head import _losses, _losses_in_one_kernel
from services.dflash.linear import Linear, _gated, _gated_backward, _GatedProjection, _Projections


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_the_gated_product_has_autograds_gradient():
    gate, up = (random(7, 12, seed=seed).requires_grad_() for seed in (0, 1))
    slope = random(7, 12, seed=2)
    product = _gated(gate, up)
    wanted = torch.autograd.grad(product, (gate, up), slope)
    found = _gated_backward(gate.detach(), up.detach(), slope)
    for mine, theirs in zip(found, (product, *wanted), strict=True):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("teacher", [False, True])
@pytest.mark.parametrize(("multiplier", "softcap"), [(1.0, 0.0), (0.6, 0.0), (1.3, 5.0)])
def test_losses_for_a_compiler_equal_those_in_place(multiplier, softcap, teacher):
    raw, wanted = random(9, 31), random(9, 31, seed=1) if teacher else None
    labels = torch.randint(0, 31, (9,), generator=torch.Generator().manual_seed(2))
    rest = (multiplier, softcap)
    plain = _losses(raw.clone(), labels, wanted.clone() if teacher else None, *rest)
    fused = _losses_in_one_kernel(raw.clone(), labels, wanted, *rest)
    for mine, theirs in zip(fused, plain, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_of_equal_logits_the_one_counts_that_decoding_takes():
    raw = torch.tensor([[1.0, 3.0, 3.0, 0.0]] * 4).bfloat16()
    for losses in (_losses, _losses_in_one_kernel):
        assert losses(raw.clone(), torch.arange(4), None, 1.0, 0.0)[1].tolist() == [False, True, False, False]


@pytest.fixture
def product_into_gradient(monkeypatch):
    """CPUs have no product of bfloat16 matrices with a float32 sum: here in two operations."""

    def add(each: Linear, slope: torch.Tensor, x: torch.Tensor) -> None:
        each.weight.grad += slope.T @ x

    monkeypatch.setattr("services.dflash.linear._add_gradient", add)
    monkeypatch.setattr("services.dflash.linear.compiled", lambda function: function)


def linear(inputs: int, outputs: int, seed: int) -> Linear:
    each = Linear(inputs, outputs)
    with torch.no_grad():
        each.weight.copy_(random(outputs, inputs, seed=seed))
    each.weight.grad = torch.ones_like(each.weight)
    return each


def test_projections_add_to_weight_gradients_and_sum_that_of_their_input(product_into_gradient):
    maps = [linear(5, size, seed=size) for size in (3, 8, 4)]
    x = random(6, 5).requires_grad_()
    slopes = [random(6, size, seed=9) for size in (3, 8, 4)]
    outputs = _Projections.apply(x, tuple(maps), *(each.weight for each in maps))
    torch.autograd.backward(outputs, slopes)
    torch.testing.assert_close(
        x.grad, sum(slope @ each.weight for slope, each in zip(slopes, maps, strict=True))
    )
    for slope, each in zip(slopes, maps, strict=True):
        torch.testing.assert_close(each.weight.grad, 1.0 + slope.T @ x.detach())


def test_a_gated_projection_equals_its_parts(product_into_gradient):
    down, plain = linear(12, 5, seed=3), linear(12, 5, seed=3)
    pairs = [tuple(random(7, 12, seed=seed).requires_grad_() for seed in (0, 1)) for _ in range(2)]
    slope = random(7, 5, seed=4)
    _GatedProjection.apply(*pairs[0], down, down.weight).backward(slope)
    plain(_gated(*pairs[1])).backward(slope)
    for mine, theirs in zip((*pairs[0], down.weight), (*pairs[1], plain.weight), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)


def test_a_kept_copy_is_used_for_its_own_type_alone():
    each = linear(4, 3, seed=0)
    each.copy = torch.zeros(3, 4, dtype=torch.bfloat16)
    assert each.weight_as(torch.bfloat16) is each.copy
    assert torch.equal(each.weight_as(torch.float32), each.weight)
    assert list(each.state_dict()) == ["weight"]
