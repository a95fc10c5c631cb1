"""The coordinator against simulated roles: to the end, whatever is lost, killed or restarted."""

import random

import numpy as np
import pytest
from cluster import Cluster, SimDrafter, SimTarget
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from protocol.messages import BatchId, Saved
from services.config.schema import Config
from services.coordinator.troubles import LOAD_PATIENCE_S
from services.data.dataset import Sample
from services.data.training_data import TrainingData
from services.data.writer import write_dataset


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    lengths = random.Random(7)
    samples = [
        Sample(np.ones(n, np.int32), np.ones(n, np.uint8))
        for n in (lengths.randint(4, 16) for _ in range(30))
    ]
    return TrainingData(write_dataset(tmp_path_factory.mktemp("data") / "data", samples, {}))


def config(**sections) -> Config:
    tree = {
        "model": {"path": "m"},
        "data": {"path": "d"},
        "run": {"epochs": 2, "max_failed_ratio": 1.0},
        "plan": {"token_budget": 32, "bucket_edges": (8, 16), "packs_per_step": 3, "min_ready": 0},
        "target": {"count": 2, "slots": 3},
        "checkpoint": {"every_steps": 2},
    }
    for name, values in sections.items():
        tree[name] = tree.get(name, {}) | values
    return Config(**tree)


def test_an_undisturbed_run_commits_everything_once(tmp_path, dataset):
    cluster = Cluster(tmp_path, config(), dataset, seed=1)
    cluster.run()
    cluster.check()
    assert cluster.core.finished and cluster.core.record.aborted_tries == 0


def test_arrival_order_commits_everything_once(tmp_path, dataset):
    cluster = Cluster(tmp_path, config(plan={"order": "arrival", "min_ready": 4}), dataset, seed=1)
    cluster.run()
    cluster.check()


def test_one_slot_per_target_is_enough(tmp_path, dataset):
    cluster = Cluster(tmp_path, config(target={"slots": 2, "count": 2}), dataset, seed=1)
    cluster.run()
    cluster.check()


def test_a_poisoned_batch_fails_alone(tmp_path, dataset):
    poison = BatchId(0, 4)
    cluster = Cluster(tmp_path, config(), dataset, seed=1, poison=[poison])
    cluster.run()
    assert [batch for batch, _ in cluster.ledger.failures()] == [poison]
    assert cluster.ledger.deaths() == {poison: 3}
    cluster.check()


def test_a_non_finite_pack_fails_and_the_rest_of_its_step_is_trained(tmp_path, dataset):
    bad = BatchId(1, 2)
    cluster = Cluster(tmp_path, config(), dataset, seed=1, bad=[bad])
    cluster.run()
    assert [batch for batch, _ in cluster.ledger.failures()] == [bad]
    cluster.check()


def test_a_step_of_failed_packs_only_still_counts(tmp_path, dataset):
    bad = [BatchId(0, index) for index in range(3)]
    cluster = Cluster(tmp_path, config(), dataset, seed=1, bad=bad)
    cluster.run()
    assert [batch for batch, _ in cluster.ledger.failures()] == bad
    cluster.check()


def test_too_many_failures_stop_the_run(tmp_path, dataset):
    cluster = Cluster(
        tmp_path, config(run={"epochs": 2, "max_failed_ratio": 0.0}), dataset, seed=1, bad=[BatchId(0, 0)]
    )
    cluster.run()
    assert "max_failed_ratio" in cluster.core.failed_reason and not cluster.core.finished


def test_a_stop_ends_on_a_checkpoint_and_the_run_resumes_from_it(tmp_path, dataset):
    cluster = Cluster(tmp_path, config(), dataset, seed=1)
    run_to(3, cluster)
    cluster.core.stop()
    cluster.run()
    stopped_at = cluster.core.step
    assert cluster.ledger.checkpoints()[-1].at.step == stopped_at and not cluster.core.finished
    for name in list(cluster.roles):
        cluster.kill(name)
    cluster.restart_coordinator()
    cluster.run()
    cluster.check()
    assert cluster.ledger.timeline == 0, "nothing was rolled back"


def run_to(step: int, cluster: Cluster) -> None:
    while cluster.core.step < step:
        cluster.respawn()
        cluster.turn()


def end_by_itself(cluster: Cluster, turns: int = 300) -> None:
    """Nobody is started again, as by a supervisor that stops, too."""
    for _ in range(turns):
        if cluster.core.done:
            return
        cluster.turn()
    raise AssertionError(f"not done: {cluster.describe()}")


@pytest.mark.parametrize("order", ["plan", "arrival"])
@pytest.mark.parametrize("seed", range(5))
def test_a_stop_does_not_wait_for_packs_that_died_with_their_targets(tmp_path, dataset, order, seed):
    cluster = Cluster(
        tmp_path, config(plan={"order": order}, checkpoint={"every_steps": 50}), dataset, seed=seed
    )
    run_to(3, cluster)
    for name in [name for name in cluster.roles if name.startswith("target")]:
        cluster.kill(name)
    for _ in range(seed):
        cluster.turn()
    cluster.core.stop()
    end_by_itself(cluster)
    assert cluster.ledger.checkpoints()[-1].at.step == cluster.core.step >= 3
    cluster.restart_coordinator()
    cluster.run()
    cluster.check()
    assert cluster.ledger.timeline == 0, "nothing was rolled back"


def test_a_stop_before_the_first_target_came_ends_at_once(tmp_path, dataset):
    cluster = Cluster(tmp_path, config(), dataset, seed=1)
    cluster.roles["drafter-1"] = SimDrafter("drafter-1", set())
    for _ in range(10):
        cluster.turn()
    assert cluster.core.current is not None, "a step is open, whose packs nobody computes"
    cluster.core.stop()
    end_by_itself(cluster, turns=10)


def test_a_stop_during_recovery_waits_for_those_who_hold_unsaved_steps(tmp_path, dataset):
    cluster = Cluster(tmp_path, config(checkpoint={"every_steps": 50}), dataset, seed=1)
    run_to(3, cluster)
    cluster.restart_coordinator()
    cluster.core.stop()
    assert cluster.core.recovering and not cluster.core.done
    end_by_itself(cluster)
    assert cluster.ledger.checkpoints()[-1].at.step == cluster.core.step >= 3


def test_a_stop_during_recovery_ends_although_nobody_returns(tmp_path, dataset):
    cluster = Cluster(tmp_path, config(checkpoint={"every_steps": 50}), dataset, seed=1)
    run_to(3, cluster)
    cluster.roles.clear()  # on a host that is gone: no lock tells of their death
    cluster.restart_coordinator()
    cluster.core.stop()
    end_by_itself(cluster)
    assert not cluster.core.recovering


def test_a_stop_does_not_wait_for_a_full_disk_for_ever(tmp_path, dataset):
    options = config(watch={"stop_s": 40.0}, checkpoint={"every_steps": 50})
    cluster = Cluster(tmp_path, options, dataset, seed=1)
    run_to(3, cluster)
    cluster.disk_full = True
    cluster.core.stop()
    for _ in range(int(20.0 / 0.4) - 5):
        cluster.turn()
    assert not cluster.core.done and cluster.core.troubles.unsaved == "disk full"
    end_by_itself(cluster)
    assert cluster.ledger.last_checkpoint().at.step == 0 and cluster.core.step >= 3
    assert any("stopped without a checkpoint" in event.text for event in cluster.core.record.events)


def test_a_stop_ends_on_a_checkpoint_once_there_is_room_again(tmp_path, dataset):
    cluster = Cluster(tmp_path, config(checkpoint={"every_steps": 50}), dataset, seed=1)
    run_to(3, cluster)
    cluster.disk_full = True
    cluster.core.stop()
    for _ in range(50):
        cluster.turn()
    cluster.disk_full = False
    end_by_itself(cluster)
    assert cluster.ledger.last_checkpoint().at.step == cluster.core.step
    assert not cluster.core.troubles.unsaved


def both_drafters_return(cluster: Cluster) -> list[SimDrafter]:
    """Dead after step 5, the new ones have to load the checkpoint of step 4."""
    run_to(5, cluster)
    for name in [name for name in cluster.roles if name.startswith("drafter")]:
        cluster.kill(name)
    found = [SimDrafter(f"drafter-new-{number}", set()) for number in range(2)]
    cluster.roles |= {drafter.name: drafter for drafter in found}
    return found


def test_a_checkpoint_that_one_drafter_cannot_read_comes_from_the_other(tmp_path, dataset):
    cluster = Cluster(tmp_path, config(drafter={"count": 2}), dataset, seed=1)
    both_drafters_return(cluster)[0].unreadable = True
    cluster.run()
    cluster.check()
    assert cluster.core.finished and any("Input/output error" in e.text for e in cluster.core.record.events)


def test_a_disk_that_comes_back_in_time_costs_no_run(tmp_path, dataset):
    cluster = Cluster(tmp_path, config(drafter={"count": 2}), dataset, seed=1)
    drafters = both_drafters_return(cluster)
    for drafter in drafters:
        drafter.unreadable = True
    for _ in range(int(LOAD_PATIENCE_S / 0.4) - 5):
        cluster.turn()
    assert not cluster.core.done
    drafters[1].unreadable = False
    cluster.run()
    cluster.check()


def test_a_checkpoint_that_nobody_can_read_ends_the_run(tmp_path, dataset):
    cluster = Cluster(tmp_path, config(drafter={"count": 2}), dataset, seed=1)
    for drafter in both_drafters_return(cluster):
        drafter.unreadable = True
    end_by_itself(cluster)
    assert "no drafter could load its state: OSError" in cluster.core.failed_reason


def test_a_checkpoint_that_was_deleted_since_is_reported_once_and_no_more(tmp_path, dataset):
    cluster = Cluster(tmp_path, config(), dataset, seed=1)
    run_to(5, cluster)
    (drafter,) = (role for role in cluster.roles.values() if isinstance(role, SimDrafter))
    (row,) = (row for row in cluster.ledger.checkpoints() if row.at.step == 2)
    cluster.ledger.forget_checkpoint(row.name)  # what `checkpoint.keep` does, before the drafter heard of it
    drafter.saved[row.at] = Saved(at=row.at, name=row.name, sha256=row.sha256)
    for _ in range(3):
        cluster.turn()
    assert row.at not in drafter.saved
    assert sum(f"{row.name} recorded" in event.text for event in cluster.core.record.events) == 1


def test_more_devices_than_drafters_are_no_drafters_to_wait_for(tmp_path, dataset):
    options = config(drafter={"gpus": ("5", "6", "7"), "count": 2, "elastic": "wait"}, target={"slots": 8})
    cluster = Cluster(tmp_path, options, dataset, seed=1)
    cluster.run()
    cluster.check()


def test_a_drafter_death_rolls_back_to_the_last_checkpoint(tmp_path, dataset):
    cluster = Cluster(tmp_path, config(), dataset, seed=1)
    run_to(3, cluster)
    cluster.kill(next(name for name in cluster.roles if name.startswith("drafter")))
    cluster.run()
    assert cluster.ledger.timeline == 1
    cluster.check()


def full_disk_up_to(step: int, cluster: Cluster) -> None:
    cluster.disk_full = True
    while cluster.core.step < step:
        cluster.respawn()
        cluster.turn()
    assert cluster.ledger.checkpoints() == ()
    cluster.disk_full = False


def test_a_disk_that_was_full_at_a_checkpoint_keeps_out_no_later_one(tmp_path, dataset):
    cluster = Cluster(tmp_path, config(), dataset, seed=1)
    full_disk_up_to(1, cluster)
    cluster.run()
    cluster.check()
    assert cluster.ledger.timeline == 0


def test_a_run_that_has_no_checkpoint_yet_rolls_back_to_the_seed(tmp_path, dataset):
    cluster = Cluster(tmp_path, config(), dataset, seed=1)
    full_disk_up_to(3, cluster)
    cluster.kill(next(name for name in cluster.roles if name.startswith("drafter")))
    cluster.run()
    cluster.check()
    assert cluster.ledger.lineage() == [(1, None), (0, 0)]


def test_checkpoints_that_are_further_apart_than_kills_are_told_of(tmp_path, dataset):
    cluster = Cluster(tmp_path, config(checkpoint={"every_steps": 100}), dataset, seed=1)
    for _ in range(2):
        steps = cluster.core.record.committed_steps
        while cluster.core.record.committed_steps < steps + 2:
            cluster.respawn()
            cluster.turn()
        cluster.kill(next(name for name in cluster.roles if name.startswith("drafter")))
    cluster.run()
    cluster.check()
    texts = [event.text for event in cluster.core.record.events]
    assert sum("lower it, or the run may never end" in text for text in texts) == 1


def test_a_coordinator_restart_loses_no_ready_pack_and_no_step(tmp_path, dataset):
    cluster = Cluster(tmp_path, config(), dataset, seed=1)
    run_to(3, cluster)
    ready = {flight.attempt for flight in cluster.core.pool if flight.ready}
    step = cluster.core.step
    cluster.restart_coordinator()
    while cluster.core.recovering:
        cluster.turn()
    assert ready and ready <= {flight.attempt for flight in cluster.core.pool}
    assert (cluster.core.step, cluster.ledger.timeline) == (step, 0)
    cluster.run()
    cluster.check()
    assert cluster.ledger.timeline == 0


def test_a_pack_of_before_a_restart_that_was_revoked_is_not_taken_over_again(tmp_path, dataset):
    """Else its slot is promised twice: the batch that it gave way to finds none, and stays queued."""
    cluster = Cluster(tmp_path, config(), dataset, seed=1)
    run_to(3, cluster)
    cluster.restart_coordinator()
    while cluster.core.recovering:
        cluster.turn()
    core = cluster.core
    flight = next(f for f in core.pool if f.target and f.attempt.coordinator_epoch < core.epoch_number)
    target = cluster.roles[flight.target]
    assert flight.attempt in target.work
    core.pool.revoke(flight)
    assert core.report(target.report(), cluster.now_s) and flight.batch not in core.pool.flights
    cluster.run()
    cluster.check()


def test_a_batch_that_turns_out_to_be_suspect_while_it_is_queued_among_others_runs_alone(tmp_path, dataset):
    cluster = Cluster(tmp_path, config(), dataset, seed=1)
    cluster.respawn()
    while not (queued := [f for f in cluster.core.pool if cluster.core.pool.unfinished(f.target) > 1]):
        cluster.turn()
    batch = queued[-1].batch
    for late in ("target-late-1", "target-late-2"):
        cluster.core.lost(late, "its process died", cluster.now_s, computing=batch)
    assert batch not in cluster.core.pool.flights
    cluster.run()
    cluster.check()


def test_a_suspect_that_a_target_has_queued_among_others_is_not_taken_over_after_a_restart(tmp_path, dataset):
    cluster = Cluster(tmp_path, config(), dataset, seed=1)
    cluster.respawn()
    while not any(len(role.work) > 2 for role in cluster.roles.values() if isinstance(role, SimTarget)):
        cluster.turn()
    target = next(r for r in cluster.roles.values() if isinstance(r, SimTarget) and len(r.work) > 2)
    batch = next(slot.batch for slot in reversed(target.work.values()) if slot.state == "queued")
    for _ in range(2):
        cluster.ledger.count_death(batch)
    cluster.restart_coordinator()
    core = cluster.core
    assert core.hello(target.hello(core.ledger.fingerprint), 0.0) and core.report(target.report(), 0.0)
    assert batch not in core.pool.flights and len(core.pool.flights) == len(target.work) - 1
    core.outbox.clear()
    cluster.run()
    cluster.check()


@pytest.mark.parametrize("elastic", ["shrink", "wait"])
def test_a_group_that_does_not_come_about_is_numbered_anew(tmp_path, dataset, elastic):
    options = config(drafter={"count": 3, "elastic": elastic})
    cluster = Cluster(tmp_path, options, dataset, seed=4, flaky=0.3)
    cluster.run()
    cluster.check()
    assert any("is over" in event.text for event in cluster.core.record.events)


def test_a_newcomer_takes_the_weights_of_a_member_and_nothing_is_rolled_back(tmp_path, dataset):
    cluster = Cluster(tmp_path, config(drafter={"count": 3, "elastic": "wait"}), dataset, seed=1)
    run_to(3, cluster)
    cluster.kill(next(name for name in cluster.roles if name.startswith("drafter")))
    cluster.run()
    cluster.check()
    assert cluster.ledger.timeline == 0 and cluster.core.record.roll_backs == 0


def test_a_second_drafter_that_claims_a_rank_is_refused_and_the_first_goes_on(tmp_path, dataset):
    cluster = Cluster(tmp_path, config(), dataset, seed=1)
    while cluster.core.step < 2:
        cluster.respawn()
        cluster.turn()
    (first,) = cluster.core.members.drafters.values()
    double = SimDrafter("drafter-double", set())
    hello = double.hello(cluster.core.ledger.fingerprint).model_copy(update={"index": first.index})
    assert not cluster.core.hello(hello, cluster.now_s)
    ((name, answer),) = cluster.core.outbox
    assert name == "drafter-double" and "place 0 for a drafter is taken by a living process" in answer.reason
    cluster.core.outbox.clear()
    cluster.run()
    cluster.check()
    assert cluster.ledger.timeline == 0


def test_a_batch_that_came_back_never_stands_before_an_earlier_pending_one(tmp_path, dataset):
    """Else a batch of a later step, for which there is no room, keeps the step that is waited for out."""
    cluster = Cluster(tmp_path, config(), dataset, seed=1)
    core = cluster.core
    core.pool.returned |= {BatchId(0, 9), BatchId(1, 0)}
    wanted = [item.batch for item in core.work.wanted()]
    assert wanted[0] == BatchId(0, 0) and sorted(set(wanted)) == list(dict.fromkeys(wanted))
    assert len(set(wanted)) == sum(core.work.batches_per_epoch)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 2**32),
    drafters=st.integers(1, 3),
    elastic=st.sampled_from(["shrink", "wait"]),
    order=st.sampled_from(["plan", "arrival"]),
    loss=st.sampled_from([0.0, 0.1, 0.4]),
    cap=st.sampled_from([0, 5]),
    flaky=st.sampled_from([0.0, 0.2]),
)
def test_whatever_is_killed_every_batch_counts_once(
    tmp_path_factory, dataset, seed, drafters, elastic, order, loss, cap, flaky
):
    options = config(
        drafter={"count": drafters, "elastic": elastic},
        plan={"order": order},
        coordinator={"in_flight_cap_packs": cap, "silence_s": 1000.0},
    )
    chaos = random.Random(seed)
    cluster = Cluster(
        tmp_path_factory.mktemp("run"), options, dataset, seed=seed, loss=loss, flaky=flaky,
        poison=[BatchId(0, 5)] if chaos.random() < 0.3 else [],
        bad=[BatchId(1, 1)] if chaos.random() < 0.3 else [],
    )  # fmt: skip
    for _ in range(chaos.randint(0, 120)):
        cluster.respawn()
        cluster.turn()
        if cluster.core.done:
            break
        if chaos.random() < 0.15 and cluster.roles:
            cluster.kill(chaos.choice(sorted(cluster.roles)))
        if chaos.random() < 0.05:
            cluster.restart_coordinator()
    cluster.run()
    cluster.check()


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    seed=st.integers(0, 2**32),
    drafters=st.integers(1, 3),
    elastic=st.sampled_from(["shrink", "wait"]),
    order=st.sampled_from(["plan", "arrival"]),
    loss=st.sampled_from([0.0, 0.1, 0.4]),
    supervised=st.booleans(),
)
def test_whenever_it_is_stopped_it_stops_and_undoes_no_step_that_a_member_holds(
    tmp_path_factory, dataset, seed, drafters, elastic, order, loss, supervised
):
    """`supervised`: roles that die while the run stops are started again, as by compose."""
    options = config(
        drafter={"count": drafters, "elastic": elastic}, plan={"order": order},
        coordinator={"silence_s": 1000.0}, checkpoint={"every_steps": 100},
    )  # fmt: skip
    chaos = random.Random(seed)
    cluster = Cluster(tmp_path_factory.mktemp("run"), options, dataset, seed=seed, loss=loss)
    for _ in range(20):  # stops and starts, until the run is finished or they are over
        for _ in range(chaos.randint(0, 30)):
            cluster.respawn()
            cluster.turn()
        if cluster.core.done:
            break
        if chaos.random() < 0.2:
            cluster.restart_coordinator()
        cluster.core.stop()
        drafters_here = [role for role in cluster.roles.values() if isinstance(role, SimDrafter)]
        holders = {drafter.name for drafter in drafters_here if drafter.complete == cluster.core.here}
        for _ in range(400):
            if cluster.core.done:
                break
            if supervised:
                cluster.respawn()
            if chaos.random() < 0.1 and cluster.roles:
                cluster.kill(chaos.choice(sorted(cluster.roles)))
            cluster.turn()
        assert cluster.core.done, cluster.describe()
        if cluster.core.step and holders and not holders & cluster.dead.keys():
            assert cluster.ledger.last_checkpoint().at.step == cluster.core.step, cluster.describe()
        for name in list(cluster.roles):
            cluster.kill(name)
        cluster.restart_coordinator()
    cluster.run()
    cluster.check()
