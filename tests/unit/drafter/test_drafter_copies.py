"""Weights' copies in the compute type: never older than the masters when a forward pass begins."""

from __future__ import annotations

import torch
from drafter_cases import CPU, tiny_config, tiny_shape

from services.dflash.drafter import Drafter
from services.dflash.linear import Linear
from services.drafter.weights import Weights


def current(weights: Weights, drafter: Drafter) -> bool:
    weights.refresh_copies()
    maps = [module for module in drafter.modules() if isinstance(module, Linear)]
    assert len(maps) == 1 + 7 * tiny_shape().num_hidden_layers
    return all(torch.equal(each.copy, each.weight.to(torch.bfloat16)) for each in maps)


def test_copies_follow_whatever_changes_the_masters():
    drafter = Drafter(tiny_shape(), seed=1)
    weights = Weights(drafter, tiny_config().recipe, CPU)
    weights.keep_copies(drafter, torch.bfloat16)
    assert current(weights, drafter)
    weights.gradient += 1.0
    weights.update(lr=0.1, gradient_scale=1.0)
    assert current(weights, drafter)
    snapshot = weights.snapshot()
    weights.start(Drafter(tiny_shape(), seed=2).state_dict())
    assert current(weights, drafter)
    weights.load(snapshot.weights, snapshot.optimizer)
    assert current(weights, drafter)
    masters, *_ = weights.state  # as a newcomer receives
    masters.mul_(0.5)
    assert current(weights, drafter)
