"""The plan as properties: exactly once, within the budget, pure, and another one each epoch."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.errors import ConfigError, DataError
from protocol.messages import MAX_ITEMS, Assignment, BatchId, Stamp
from services.config.rules import PADDED_LIMIT, rows_limit
from services.config.schema import Config, Data, Model, Plan, Run
from services.data.dataset import Sample
from services.data.plan import Schedule, epoch_plan, padded_length
from services.data.training_data import TrainingData, fingerprint_of
from services.data.writer import write_dataset

EDGES = (8, 16, 32, 64)


def plan_of(lengths, *, seed=3, epoch=0, fingerprint="f", edges=EDGES, budget=64):
    return epoch_plan(
        seed=seed, epoch=epoch, fingerprint=fingerprint, lengths=np.asarray(lengths, np.int32),
        bucket_edges=edges, token_budget=budget,
    )  # fmt: skip


length_lists = st.lists(st.integers(1, 64), min_size=1, max_size=300)


@given(length_lists, st.integers(0, 2**62), st.integers(0, 5), st.integers(64, 400))
def test_every_sample_is_planned_exactly_once_and_no_batch_exceeds_the_budget(lengths, seed, epoch, budget):
    plan = plan_of(lengths, seed=seed, epoch=epoch, budget=budget)
    assert sorted(sample for batch in plan.batches for sample in batch) == list(range(len(lengths)))
    assert all(0 < sum(lengths[sample] for sample in batch) <= budget for batch in plan.batches)


@given(length_lists, st.integers(64, 400))
def test_a_batch_holds_one_bucket_and_pads_within_the_limit(lengths, budget):
    for batch in plan_of(lengths, budget=budget).batches:
        padded = {padded_length(lengths[sample], EDGES) for sample in batch}
        assert len(padded) == 1
        edge = padded.pop()
        assert len(batch) <= rows_limit(edge, budget)
        assert len(batch) == 1 or len(batch) * edge <= PADDED_LIMIT * budget


def test_a_batch_has_no_more_samples_than_a_message_carries():
    plan = plan_of([4] * 20_000, edges=(16, 64), budget=65_536)
    assert max(map(len, plan.batches)) == MAX_ITEMS
    for index, samples in enumerate(plan.batches):
        Assignment(batch=BatchId(0, index), attempt=Stamp(1, 1), samples=samples, publish=None)


@given(length_lists)
def test_the_plan_is_pure_and_names_its_epoch(lengths):
    assert plan_of(lengths, epoch=2) == plan_of(list(lengths), epoch=2)
    assert plan_of(lengths, epoch=2).epoch == 2


def test_seed_epoch_and_fingerprint_each_change_the_plan():
    lengths = [1 + at % 64 for at in range(400)]
    plans = [
        plan_of(lengths),
        plan_of(lengths, epoch=1),
        plan_of(lengths, seed=4),
        plan_of(lengths, fingerprint="g"),
    ]
    assert len({plan.batches for plan in plans}) == 4


def test_the_plan_never_changes_between_versions():
    """A resumed run must find the same plan after an upgrade: these batches are frozen."""
    assert plan_of([5, 9, 3, 60, 17, 8, 31, 2]).batches == ((4, 6), (2, 0, 5, 7), (1,), (3,))


@given(st.lists(st.integers(9, 16), min_size=30, max_size=200))
def test_batches_come_near_the_budget(lengths):
    """All but the ones that stay open at the end are filled to within one sample of the bucket."""
    batches = plan_of(lengths, budget=256).batches
    full = [batch for batch in batches if sum(lengths[sample] for sample in batch) > 256 - 16]
    assert len(batches) - len(full) <= 1


@pytest.mark.parametrize(
    ("lengths", "edges", "budget", "error", "words"),
    [
        ([5, 65], (8, 128), 64, DataError, "sample 1 has 65 tokens, more than plan.token_budget = 64"),
        (
            [5, 65],
            EDGES,
            128,
            DataError,
            "sample 1 has 65 tokens, more than the last of plan.bucket_edges = 64",
        ),
        ([], EDGES, 64, DataError, "empty"),
        ([3, 0], EDGES, 64, DataError, "sample 1 has no tokens"),
        ([3], (16, 8), 64, ConfigError, "ascending"),
        ([3], (), 64, ConfigError, "ascending"),
    ],
)
def test_what_fits_no_plan_is_refused_by_name(lengths, edges, budget, error, words):
    with pytest.raises(error, match=words.replace(".", r"\.")):
        plan_of(lengths, edges=edges, budget=budget)


def schedule_of(path, lengths, *, epochs, packs_per_step):
    samples = [Sample(np.arange(length, dtype=np.int32), np.ones(length, np.uint8)) for length in lengths]
    dataset = write_dataset(path, samples, {})
    config = Config(
        run=Run(seed=7, epochs=epochs), model=Model(path="m"), data=Data(path=path),
        plan=Plan(token_budget=64, bucket_edges=EDGES, packs_per_step=packs_per_step),
    )  # fmt: skip
    return Schedule(config, TrainingData(dataset))


@pytest.mark.parametrize("packs_per_step", [1, 3, 1000])
def test_steps_cover_every_plan_position_once_and_never_cross_an_epoch(tmp_path, packs_per_step):
    lengths = [1 + (at * 7) % 64 for at in range(60)]
    schedule = schedule_of(tmp_path / "d", lengths, epochs=3, packs_per_step=packs_per_step)
    seen = {epoch: [] for epoch in range(3)}
    for step in range(schedule.total_steps):
        epoch, positions = schedule.locate(step)
        assert 1 <= len(positions) <= packs_per_step
        assert (
            schedule.first_step(epoch) <= step < schedule.first_step(epoch) + schedule.steps_in_epoch(epoch)
        )
        seen[epoch] += positions
    for epoch, positions in seen.items():
        assert positions == list(range(len(schedule.epoch(epoch).batches)))
    assert schedule.first_step(0) == 0
    assert schedule.first_step(3) == schedule.total_steps


def test_the_schedule_ends(tmp_path):
    schedule = schedule_of(tmp_path / "d", [4, 4], epochs=1, packs_per_step=2)
    assert schedule.locate(0) == (0, range(1))
    with pytest.raises(IndexError):
        schedule.locate(schedule.total_steps)
    with pytest.raises(IndexError):
        schedule.epoch(1)


@settings(max_examples=20, deadline=None)
@given(st.permutations(list(range(6))))
def test_a_schedule_gives_the_same_epochs_in_whatever_order_they_are_asked(tmp_path_factory, asked):
    path = tmp_path_factory.mktemp("plan") / "d"
    schedule = schedule_of(path, [1 + at % 64 for at in range(40)], epochs=6, packs_per_step=2)
    plans = {epoch: schedule.epoch(epoch) for epoch in asked}
    again = schedule_of(path.with_name("e"), [1 + at % 64 for at in range(40)], epochs=6, packs_per_step=2)
    assert [plans[epoch] for epoch in range(6)] == [again.epoch(epoch) for epoch in range(6)]


def two_datasets(path, *, epochs, takes_over_at):
    """(config, lengths of the first, of the second, both as training data)"""
    lengths = [[1 + (at * step) % 64 for at in range(rows)] for rows, step in ((40, 7), (70, 11))]
    made = [
        write_dataset(path / name, [Sample(np.full(n, 5, np.int32), np.ones(n, np.uint8)) for n in rows], {})
        for name, rows in zip("ab", lengths, strict=True)
    ]
    config = Config(
        run=Run(seed=7, epochs=epochs), model=Model(path="m"),
        data=Data(path=path / "a", later=(f"{takes_over_at}:{path / 'b'}",)),
        plan=Plan(token_budget=64, bucket_edges=EDGES, packs_per_step=3),
    )  # fmt: skip
    assert TrainingData.open(config.data).places == [
        (0, made[0].fingerprint, str(path / "a")), (takes_over_at, made[1].fingerprint, str(path / "b")),
    ]  # fmt: skip
    return config, *made


def test_a_dataset_takes_over_at_its_epoch_and_changes_nothing_before(tmp_path):
    config, first, second = two_datasets(tmp_path, epochs=5, takes_over_at=2)
    schedule = Schedule(config, TrainingData.open(config.data))
    alone = Schedule(config, TrainingData(first))
    assert [schedule.epoch(e) for e in (0, 1)] == [alone.epoch(e) for e in (0, 1)]
    assert schedule.first_step(2) == alone.first_step(2)
    for epoch in range(5):
        rows = sorted(row for batch in schedule.epoch(epoch).batches for row in batch)
        assert rows == list(range(40 if epoch < 2 else 70))
    assert schedule.epoch(2) == Schedule(config, TrainingData(second)).epoch(2)
    assert schedule.samples_total == 2 * 40 + 3 * 70


def test_steps_and_tokens_go_on_across_the_border(tmp_path):
    config, first, second = two_datasets(tmp_path, epochs=3, takes_over_at=1)
    schedule = Schedule(config, TrainingData.open(config.data))
    located = [schedule.locate(step) for step in range(schedule.total_steps)]
    for epoch, dataset in ((0, first), (1, second), (2, second)):
        positions = [at for of_epoch, positions in located for at in positions if of_epoch == epoch]
        assert positions == list(range(len(schedule.epoch(epoch).batches)))
        tokens = sum(schedule.tokens(epoch, batch) for batch in positions)
        assert tokens == dataset.lengths.sum()
    assert [epoch for epoch, _ in located] == sorted(epoch for epoch, _ in located)


def test_the_fingerprint_tells_every_epochs_dataset(tmp_path):
    config, first, second = two_datasets(tmp_path, epochs=5, takes_over_at=2)
    a, b = first.fingerprint, second.fingerprint
    assert TrainingData(first).fingerprint == a
    both = TrainingData(first, (2, second), (4, first))
    assert both.fingerprint == f"{a} 2:{b} 4:{a}"
    assert [fingerprint_of(both.fingerprint, epoch) for epoch in range(6)] == [a, a, b, b, a, a]
    assert [fingerprint_of(a, epoch) for epoch in (0, 7)] == [a, a]
    assert both.longest == max(first.lengths.max(), second.lengths.max())
    with pytest.raises(DataError, match="no prepared dataset"):
        TrainingData.open(config.data.model_copy(update={"later": (f"1:{tmp_path / 'none'}",)}))
