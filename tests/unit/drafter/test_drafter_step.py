"""Gradients, normaliser and updates of a step, on a drafter of 6,000 weights in float32."""

from __future__ import annotations

import math

import pytest
import torch
from drafter_cases import CPU, add_packs, random_pack, tiny_config, tiny_shape, tiny_step

from protocol.errors import CheckpointError
from protocol.messages import BatchId, StepTry
from services.dflash.anchors import draw_anchors
from services.dflash.drafter import Drafter
from services.dflash.head import FrozenHead
from services.dflash.loss import LossOptions
from services.dflash.pack import pack_loss
from services.drafter.reduce import LocalReducer
from services.drafter.weights import Weights, learning_rate
from services.seeds import seed as derive_seed

TRY = StepTry(0, 0, 1, 1)


def run_steps(config, steps: int, *, first: int = 0, step=None):
    step = step or tiny_step(config)
    figures = []
    for number in range(first, first + steps):
        add_packs(step, [10 * number + k for k in range(3)])
        figures.append(step.apply(number, step.seal(LocalReducer(), TRY)))
    return step, figures


def test_two_runs_are_bit_equal_and_learn():
    config = tiny_config()
    one, figures = run_steps(config, 6)
    two, again = run_steps(config, 6)
    assert torch.equal(one._weights.masters, two._weights.masters)
    assert torch.equal(one._weights.second, two._weights.second)
    assert figures == again
    assert not torch.equal(one._weights.masters, tiny_step(config)._weights.masters)
    assert all(math.isfinite(value) for step in figures for value in step.values())


def test_parameters_and_gradients_are_views_of_the_flat_buffers():
    drafter = Drafter(tiny_shape(), seed=1)
    before = {name: parameter.clone() for name, parameter in drafter.named_parameters()}
    weights = Weights(drafter, tiny_config().recipe, CPU)
    weights.masters += 1.0
    for name, parameter in drafter.named_parameters():
        assert torch.equal(parameter, before[name] + 1.0)
    assert weights.masters.numel() == tiny_shape().parameter_count


def plain_gradient(config, packs: list[tuple[BatchId, dict]]) -> dict[str, torch.Tensor]:
    """The same step as one sum and one division by autograd alone, without flat buffers."""
    step = tiny_step(config)
    drafter = Drafter(tiny_shape(), seed=1)
    loss_sum, weight_sum = torch.zeros(()), torch.zeros(())
    for batch, pack in packs:
        for draw in range(config.recipe.anchor_draws):
            anchors = draw_anchors(
                pack["loss_mask"], pack["document_offsets"], config.recipe.anchors_per_pack,
                derive_seed(config.run.seed, "anchors", batch.epoch, batch.index, draw),
            )  # fmt: skip
            sums = pack_loss(
                drafter, step._embed_weight_VH, FrozenHead(step._embed_weight_VH),
                features_TF=pack["features"], input_ids_T=pack["input_ids"], loss_mask_T=pack["loss_mask"],
                position_ids_T=pack["position_ids"], document_offsets=pack["document_offsets"],
                anchors=anchors, loss=LossOptions.of(config.recipe),
            )  # fmt: skip
            loss_sum, weight_sum = loss_sum + sums.loss_sum, weight_sum + sums.weight_sum
    (loss_sum / weight_sum).backward()
    return {name: parameter.grad for name, parameter in drafter.named_parameters()}


@pytest.mark.parametrize("draws", [1, 2, 3])
def test_packs_and_draws_add_up_to_one_gradient_with_one_normaliser(draws):
    config = tiny_config(recipe={"anchor_draws": draws, "grad_clip": 0.0})
    packs = [(BatchId(0, k), random_pack(k, lengths)) for k, lengths in enumerate([(9,), (5, 20), (7, 7, 7)])]
    step = tiny_step(config)
    for position, (batch, pack) in enumerate(packs):
        step.add(position, batch, pack)
    outcome = step.seal(LocalReducer(), TRY)
    expected = plain_gradient(config, packs)
    gradient = step._weights.gradient / outcome.weight
    for place in step._weights.places:
        torch.testing.assert_close(place.of(gradient), expected[place.name], rtol=1e-4, atol=1e-6)
    assert outcome.gradient_norm == pytest.approx(torch.linalg.vector_norm(gradient).item(), rel=1e-5)


def test_two_draws_are_the_sum_of_two_single_ones():
    pack, batch = random_pack(3), BatchId(0, 3)
    both = tiny_step(tiny_config(recipe={"anchor_draws": 2}))
    both.add(0, batch, pack)
    single = tiny_step(tiny_config())
    first = single._forward(batch, 0, pack["features"], pack["input_ids"], pack)
    first.loss_sum.backward()
    second = single._forward(batch, 1, pack["features"], pack["input_ids"], pack)
    second.loss_sum.backward()
    assert torch.equal(both._weights.gradient, single._weights.gradient)
    weight = both._tally[both.layout.WEIGHT].item()
    assert weight == pytest.approx((first.weight_sum + second.weight_sum).item())
    assert weight > first.weight_sum.item()


def test_labels_of_the_target_are_those_of_its_own_text():
    """Of a pack whose text is what the target finds best, both kinds of labels give one gradient."""
    pack, step = random_pack(3), tiny_step(tiny_config())
    tokens = len(pack["input_ids"])
    pack["last_hidden"] = torch.randn(tokens, 16, generator=torch.Generator().manual_seed(6))
    pack["input_ids"][1:] = step._head.logits(pack["last_hidden"]).argmax(-1)[:-1]
    own = tiny_step(tiny_config(recipe={"labels": "target", "anchor_draws": 2}))
    data = tiny_step(tiny_config(recipe={"anchor_draws": 2}))
    for one in (own, data):
        one.add(0, BatchId(0, 3), pack)
    assert torch.equal(own._weights.gradient, data._weights.gradient)
    other = pack | {"last_hidden": pack["last_hidden"].flip(0)}
    own.clear()
    own.add(0, BatchId(0, 3), other)
    assert not torch.equal(own._weights.gradient, data._weights.gradient)


def test_a_pack_without_a_valid_anchor_adds_zero():
    step, alone = tiny_step(tiny_config()), tiny_step(tiny_config())
    step.add(0, BatchId(0, 5), random_pack(5, supervised=False))
    add_packs(step, [1], first_position=1)
    add_packs(alone, [1])
    outcome = step.seal(LocalReducer(), TRY)
    assert outcome.weight == alone.seal(LocalReducer(), TRY).weight
    assert torch.equal(step._weights.gradient, alone._weights.gradient)
    assert outcome.own_bad == () and outcome.gradient_finite


@pytest.mark.parametrize("packs", [0, 1])
def test_a_step_without_weight_changes_nothing_but_counts(packs):
    step, _ = run_steps(tiny_config(), 2)
    before = [tensor.clone() for tensor in step._weights.state]
    for position in range(packs):
        step.add(position, BatchId(0, position), random_pack(position, supervised=False))
    outcome = step.seal(LocalReducer(), TRY)
    assert outcome.weight == 0.0 and outcome.gradient_finite
    figures = step.apply(2, outcome)
    assert figures["loss"] == 0.0 and figures["grad_norm"] == 0.0
    assert all(torch.equal(a, b) for a, b in zip(before, step._weights.state, strict=True))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_non_finite_features_are_flagged_by_position_and_never_applied(value):
    step = tiny_step(tiny_config())
    before = step._weights.masters.clone()
    add_packs(step, [1])
    bad = random_pack(2)
    bad["features"][4, 7] = value
    step.add(2, BatchId(0, 2), bad)
    outcome = step.seal(LocalReducer(), TRY)
    assert outcome.own_bad == (2,) and outcome.any_bad
    assert outcome.gradient_finite, "a poisoned share joins with zeros"
    with pytest.raises(AssertionError, match="through a NaN"):
        step.apply(0, outcome)
    assert torch.equal(step._weights.masters, before)


def test_the_first_flag_is_the_guilty_pack_although_later_ones_inherit_it():
    step = tiny_step(tiny_config())
    bad = random_pack(2)
    bad["features"][:] = math.nan
    step.add(0, BatchId(0, 2), bad)
    add_packs(step, [3], first_position=1)
    assert min(step.seal(LocalReducer(), TRY).own_bad) == 0


def test_a_discarded_try_leaves_no_trace():
    config = tiny_config()
    step, reference = tiny_step(config), tiny_step(config)
    bad = random_pack(2)
    bad["features"][:] = math.nan
    step.add(0, BatchId(0, 2), bad)
    step.seal(LocalReducer(), TRY)
    step.clear()
    _, figures = run_steps(config, 2, step=step)
    _, expected = run_steps(config, 2, step=reference)
    assert figures == expected
    assert torch.equal(step._weights.masters, reference._weights.masters)


def test_split_taps_are_joined_as_the_target_joins_them():
    noisy = tiny_config(recipe={"noise": "uniform", "noise_scale": 0.1})
    pack, step = random_pack(1), tiny_step(noisy)
    split = {name: tensor for name, tensor in pack.items() if name != "features"}
    split |= {f"features.{tap}": part for tap, part in enumerate(pack["features"].chunk(2, dim=1))}
    joined = step._features(BatchId(1, 2), split)
    assert joined.shape == pack["features"].shape
    difference = (joined - pack["features"]).abs()
    assert 0.0 < difference.max() <= 0.1 + 1e-6
    plain = tiny_step(tiny_config())._features(BatchId(1, 2), split)
    assert torch.equal(plain, pack["features"])


def test_clipping_scales_to_the_limit():
    config = tiny_config(recipe={"grad_clip": 1e-3, "weight_decay": 0.0})
    step = tiny_step(config)
    add_packs(step, [1, 2])
    outcome = step.seal(LocalReducer(), TRY)
    gradient = step._weights.gradient / outcome.weight
    assert outcome.gradient_norm > 1e-3
    step.apply(0, outcome)
    clipped = gradient * (1e-3 / outcome.gradient_norm)
    torch.testing.assert_close(step._weights.first, 0.1 * clipped, rtol=1e-4, atol=1e-12)


def test_updates_equal_torch_adamw_with_decay_on_matrices_only():
    config = tiny_config(recipe={"weight_decay": 0.1, "beta2": 0.95})
    recipe = config.recipe
    drafter = Drafter(tiny_shape(), seed=1)
    matrices = [p for p in drafter.parameters() if p.dim() >= 2]
    norms = [p for p in drafter.parameters() if p.dim() < 2]
    reference = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": norms, "weight_decay": 0.0}],
        betas=(recipe.beta1, recipe.beta2), eps=recipe.eps,
    )  # fmt: skip
    weights = Weights(Drafter(tiny_shape(), seed=1), recipe, CPU)
    for number in range(3):
        weights.gradient.normal_(generator=torch.Generator().manual_seed(number))
        for place in weights.places:
            drafter.get_parameter(place.name).grad = place.of(weights.gradient).clone() * 0.5
        for group in reference.param_groups:
            group["lr"] = 1e-2 / (number + 1)
        reference.step()
        weights.update(lr=1e-2 / (number + 1), gradient_scale=0.5)
    for place in weights.places:
        torch.testing.assert_close(place.of(weights.masters), drafter.get_parameter(place.name))


def test_a_restored_run_goes_on_bit_equal():
    config = tiny_config()
    undisturbed, _ = run_steps(config, 5)
    first, _ = run_steps(config, 2)
    snapshot = first._weights.snapshot()
    run_steps(config, 1, first=2, step=first)  # goes on: the snapshot must not follow it
    second = tiny_step(config, seed=99)
    second._weights.load(snapshot.weights, snapshot.optimizer)
    run_steps(config, 3, first=2, step=second)
    for one, two in zip(undisturbed._weights.state, second._weights.state, strict=True):
        assert torch.equal(one, two)


def test_a_state_that_does_not_fit_is_refused_and_nothing_changes():
    weights = tiny_step(tiny_config())._weights
    snapshot = weights.snapshot()
    before = weights.masters.clone()
    missing = {name: t + 1 for name, t in snapshot.weights.items() if name != "fc.weight"}
    with pytest.raises(CheckpointError, match=r"fc\.weight is missing"):
        weights.load(missing, snapshot.optimizer)
    with pytest.raises(CheckpointError, match=r"fc\.weight has shape"):
        weights.load(snapshot.weights | {"fc.weight": torch.zeros(2, 2)}, snapshot.optimizer)
    with pytest.raises(CheckpointError, match="extra is unknown"):
        weights.load(snapshot.weights, snapshot.optimizer | {"extra": torch.zeros(1)})
    assert torch.equal(weights.masters, before)


def test_learning_rate_warms_up_then_follows_a_cosine_to_its_floor():
    recipe = tiny_config(recipe={"lr": 1.0, "warmup_ratio": 0.1, "min_lr_ratio": 0.2}).recipe
    rates = [learning_rate(recipe, step, 100) for step in range(100)]
    assert rates[:10] == pytest.approx([(step + 1) / 10 for step in range(10)])
    assert rates[10] == pytest.approx(1.0)
    assert rates[55] == pytest.approx(0.6)
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert learning_rate(recipe, 100, 100) == pytest.approx(0.2)
    assert learning_rate(recipe, 0, 1) == 1.0
