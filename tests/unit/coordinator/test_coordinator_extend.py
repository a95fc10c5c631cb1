"""More data and epochs for a run that exists: what may change, and that every sample still counts once."""

import numpy as np
import pytest
from cluster import Cluster
from test_coordinator import config, dataset  # noqa: F401 - a fixture

from protocol.errors import ConfigError, LedgerError
from protocol.messages import BatchId, StepAt, StepTry
from services.coordinator.extend import extend, first_changed_epoch, plan_anew
from services.coordinator.ledger import Ledger
from services.data.dataset import Sample
from services.data.training_data import TrainingData
from services.data.writer import write_dataset


def run_of(data: str, epochs: int, lr: float = 1.0) -> dict:
    return {"options": {"run.epochs": epochs, "recipe.lr": lr}, "dataset": data, "model": "m"}


@pytest.mark.parametrize(
    ("recorded", "wanted", "begun", "first"),
    [
        (run_of("a", 1), run_of("a 1:b", 3), 1, 1),  # a run that is over
        (run_of("a", 4), run_of("a 2:b", 4), 1, 2),  # in the middle of its first epoch
        (run_of("a", 2), run_of("b", 2), 0, 0),  # nothing committed yet
        (run_of("a", 2), run_of("a", 5), 2, 2),  # more epochs of the same
        (run_of("a 1:b", 3), run_of("a 1:b 3:c", 5), 3, 3),  # again
        (run_of("a 2:b", 4), run_of("a", 4), 2, 2),  # taken back in time
        (run_of("a", 2), run_of("a 1:a", 2), 1, 2),  # only said differently
    ],
)
def test_epochs_are_planned_anew_from_the_first_that_differs(recorded, wanted, begun, first):
    assert first_changed_epoch(recorded, wanted, begun) == first


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        (run_of("b", 3), r'epoch 0 has begun.*data\.later = \["2:PATH"\]'),
        (run_of("a 1:b", 3), "epoch 1 has begun"),
        (run_of("a", 1), "run.epochs: 2 have begun, so it cannot be less"),
        (run_of("a 2:b", 3, lr=2.0), r"recipe\.lr: 1\.0 in the run, 2\.0 now"),
        (run_of("a", 2), "just start it"),
    ],
)
def test_what_has_begun_and_all_other_options_stay(wanted, words):
    with pytest.raises(ConfigError, match=words):
        first_changed_epoch(run_of("a", 2), wanted, begun=2)


def test_a_run_without_a_ledger_needs_no_extension(tmp_path):
    with pytest.raises(LedgerError, match="no ledger yet"):
        extend(config(run={"dir": str(tmp_path)}))


def commit(ledger: Ledger, step: int, epoch: int) -> None:
    batch = BatchId(epoch, step)
    ledger.commit_step(StepTry(ledger.timeline, step, 1, step + 1), epoch, [(batch, 2)], [])


def test_the_ledger_keeps_the_old_plan_and_what_was_committed_under_it(tmp_path):
    path, old, new = tmp_path / "ledger.sqlite", run_of("a", 2), run_of("a 1:b", 3)
    ledger = Ledger(path, old)
    commit(ledger, 0, 0)
    ledger.fail_batch(BatchId(1, 0), 1, 2, "poison: ahead of its epoch", poison=True)
    ledger.count_death(BatchId(0, 3))
    ledger.count_death(BatchId(1, 0))
    ledger.finish()
    assert ledger.begun_epochs == 1
    plan_anew(ledger, new, 1)
    ledger.close()
    with pytest.raises(LedgerError, match="dataset: a 1:b in the run, a now"):
        Ledger(path, old)
    again = Ledger(path, new)
    assert (again.committed_steps, again.finished) == (1, False)
    assert again.outcomes(0) == {0: "committed"} and again.outcomes(1) == {}
    assert again.deaths() == {BatchId(0, 3): 1}
    assert again.accounting().failed_samples == 0
    ((first_epoch, step, identity),) = again._db.execute("SELECT first_epoch, step, identity FROM extensions")
    assert (first_epoch, step) == (1, 1) and '"dataset": "a"' in identity


def test_a_refused_resume_names_the_way_only_where_it_leads_somewhere(tmp_path):
    path = tmp_path / "ledger.sqlite"
    Ledger(path, run_of("a", 2)).close()
    with pytest.raises(LedgerError, match=r"dataset: a in the run, b now.*`draftmill extend`"):
        Ledger(path, run_of("b", 2))
    with pytest.raises(LedgerError) as refused:
        Ledger(path, run_of("b", 2, lr=2.0))
    assert "extend" not in str(refused.value)


def test_a_ledger_from_before_there_were_extensions_is_read(tmp_path):
    path, identity = tmp_path / "ledger.sqlite", run_of("a", 2)
    ledger = Ledger(path, identity)
    commit(ledger, 0, 0)
    for table in ("datasets", "extensions"):
        ledger._db.execute(f"DROP TABLE {table}")
    ledger.close()
    again = Ledger(path, identity)
    again.name_datasets([(0, "a", "/data/a")])
    assert again.committed_steps == 1


@pytest.fixture
def more(tmp_path):
    random = np.random.default_rng(3)
    samples = [Sample(np.ones(n, np.int32), np.ones(n, np.uint8)) for n in random.integers(4, 16, 45)]
    return write_dataset(tmp_path / "more", samples, {})


@pytest.mark.parametrize("order", ["plan", "arrival"])
def test_a_finished_run_goes_on_with_other_data_through_deaths_and_a_rollback(
    tmp_path, dataset, more, order  # noqa: F811
):  # fmt: skip
    first = dataset.of(0)
    cluster = Cluster(tmp_path, config(run={"epochs": 1}, plan={"order": order}), dataset, seed=1)
    cluster.run()
    cluster.check()
    border = cluster.core.step
    assert cluster.core.record.samples_total == len(first)

    wanted = Cluster.identity | {"dataset": "d 1:e"}
    plan_anew(cluster.ledger, wanted, cluster.ledger.begun_epochs)
    cluster.identity, cluster.dataset = wanted, TrainingData(first, (1, more))
    cluster.config = config(run={"epochs": 3}, plan={"order": order})
    cluster.restart_coordinator()
    assert not cluster.core.finished and cluster.core.step == border
    while cluster.core.step < border + 3:
        cluster.respawn()
        cluster.turn()
    cluster.kill(next(name for name in cluster.roles if name.startswith("drafter")))
    cluster.kill(next(name for name in cluster.roles if name.startswith("target")))
    cluster.restart_coordinator()
    cluster.run()
    cluster.check()
    committed = "SELECT epoch, sum(samples) FROM outcomes WHERE timeline = ? GROUP BY epoch"
    ledger = cluster.ledger
    samples = [(0, len(first)), (1, len(more)), (2, len(more))]
    assert ledger._db.execute(committed, (ledger.timeline,)).fetchall() == samples
    assert cluster.core.record.samples_total == len(first) + 2 * len(more)

    back = next(row for row in ledger.checkpoints() if 0 < row.at.step < border)  # across the border
    timeline = ledger.open_timeline(back.at)
    for name in list(cluster.roles):
        cluster.kill(name)
    cluster.restart_coordinator()
    assert cluster.core.here == StepAt(timeline, back.at.step)
    cluster.run()
    cluster.check()
    assert cluster.ledger._db.execute(committed, (timeline,)).fetchall() == samples
