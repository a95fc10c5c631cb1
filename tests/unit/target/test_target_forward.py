"""What the forward leaves in a slab: the right rows, the same bits every time, and which are finite."""

import logging
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from services.config.schema import Config
from services.data.batch import HostBatch, gather
from services.data.dataset import Dataset
from services.dflash.drafter_config import derive
from services.dflash.target_model import Target, load_target
from services.target.forward import Cancelled, Forward, Slab, compile_layers, max_padded_tokens, warm_up

CPU = torch.device("cpu")


def load(config: Config) -> Target:
    return load_target(config.model.path, dtype=config.model.dtype)


def build(config: Config, target: Target) -> tuple[Forward, Slab]:
    shape = derive(target.config, config.drafter, None)
    return Forward(config, target, shape.target_layer_ids), Slab(config, shape, target.dtype, CPU)


def batch_of(dataset: Dataset, *samples: int) -> HostBatch:
    return gather(dataset, samples, edges=(16, 32), vocabulary=64)


def features(forward: Forward, slab: Slab, batch: HostBatch) -> Tensor:
    forward.run(batch, slab)
    slab.packed.wait()
    return torch.cat([x.clone() for x in slab.taps.sections(batch.tokens).values()], dim=-1)


def test_a_ragged_batch_equals_single_samples_and_the_models_own_states(
    make_config: Callable[..., Config], dataset: Dataset
) -> None:
    config = make_config(recipe={"loss": "kl"})
    target = load(config)
    own = {}
    for sample in (0, 3, 4):
        ids = torch.from_numpy(dataset.sample(sample).input_ids.astype("int64"))[None]
        states = target.base(input_ids=ids, output_hidden_states=True, use_cache=False).hidden_states
        own[sample] = torch.cat([states[2][0], states[4][0], states[6][0]], dim=-1)
    config = make_config(recipe={"loss": "kl"}, drafter={"target_layer_ids": (1, 3)})
    forward, slab = build(config, target)
    whole = features(forward, slab, batch_of(dataset, 0, 3, 4))
    torch.testing.assert_close(whole, torch.cat([own[0], own[3], own[4]]), rtol=1e-4, atol=1e-5)
    for sample in (0, 3, 4):
        alone = features(forward, slab, batch_of(dataset, sample))
        torch.testing.assert_close(alone, own[sample], rtol=1e-4, atol=1e-5)


def test_the_same_batch_gives_the_same_bits_whatever_ran_before(
    make_config: Callable[..., Config], dataset: Dataset
) -> None:
    config = make_config()
    forward, slab = build(config, load(config))
    first = features(forward, slab, batch_of(dataset, 0, 1, 2))
    for others in ((4,), (5, 6), (7, 3, 0)):
        features(forward, slab, batch_of(dataset, *others))
    assert torch.equal(features(forward, slab, batch_of(dataset, 0, 1, 2)), first)
    other_forward, other_slab = build(config, load(config))
    features(other_forward, other_slab, batch_of(dataset, 6))
    assert torch.equal(features(other_forward, other_slab, batch_of(dataset, 0, 1, 2)), first)


def test_split_taps_are_the_joined_ones(make_config: Callable[..., Config], dataset: Dataset) -> None:
    joined, split = make_config(), make_config(target={"split_fc_layers": True})
    forward, slab = build(split, load(split))
    apart = features(forward, slab, batch_of(dataset, 0, 1, 2))
    assert list(slab.taps.sections(1)) == ["features.0", "features.1"]
    assert torch.equal(features(*build(joined, load(joined)), batch_of(dataset, 0, 1, 2)), apart)


def test_rows_that_are_not_finite_are_flagged_in_their_own_document_only(
    make_config: Callable[..., Config], dataset: Dataset
) -> None:
    config = make_config(recipe={"loss": "kl"})
    target = load(config)
    batch = batch_of(dataset, 0, 3, 7)
    others = {int(token) for position in (0, 2) for token in batch.documents[position].input_ids}
    poison = next(int(token) for token in dataset.sample(3).input_ids if int(token) not in others)
    with torch.no_grad():
        target.embed_weight_VH[poison] = torch.inf
    forward, slab = build(config, target)
    forward.run(batch, slab)
    finite_T = slab.finite_T[: batch.tokens]
    assert [bool(rows.all()) for rows in finite_T.split(batch.lengths)] == [True, False, True]


def test_a_cancelled_forward_is_left_between_layers(
    make_config: Callable[..., Config], dataset: Dataset
) -> None:
    config = make_config()
    forward, slab = build(config, load(config))
    forward.cancel()
    with pytest.raises(Cancelled):
        forward.run(batch_of(dataset, 0), slab)


def test_every_bucket_that_the_data_reaches_is_warmed(
    make_config: Callable[..., Config], caplog: pytest.LogCaptureFixture
) -> None:
    config = make_config(plan={"bucket_edges": (8, 16, 32, 64)})
    forward, slab = build(config, load(config))
    with caplog.at_level(logging.INFO):
        warm_up(forward, slab, config, 31, CPU)
    assert [(r.__dict__["bucket"], r.__dict__["documents"]) for r in caplog.records] == [
        (8, 1),
        (16, 1),
        (32, 1),
    ]


def test_a_slab_stages_the_most_padded_batch_of_the_plan(make_config: Callable[..., Config]) -> None:
    config = make_config(plan={"bucket_edges": (8, 16, 100), "token_budget": 64})
    assert max_padded_tokens(config) == 256  # 32 x 8, 16 x 16 and 2 x 100


def test_compiling_keeps_the_hooks_and_the_values(
    make_config: Callable[..., Config], dataset: Dataset
) -> None:
    config = make_config()
    plain = features(*build(config, load(config)), batch_of(dataset, 0, 3))
    target = load(config)
    calls = 0

    def counted(graph: torch.fx.GraphModule, _inputs: list[Tensor]) -> Callable[..., object]:
        nonlocal calls
        calls += 1
        return graph.forward

    compile_layers(target, backend=counted)
    compiled = features(*build(config, target), batch_of(dataset, 0, 3))
    torch.testing.assert_close(compiled, plain, rtol=1e-4, atol=1e-5)
    assert 1 <= calls <= 2  # one graph for all layers, not one each
