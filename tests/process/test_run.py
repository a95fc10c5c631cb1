"""Whole runs: to the end, with 1 and 3 targets, stopped and resumed, and with every role killed once."""

import signal

import pytest

pytestmark = pytest.mark.process


def test_weights_do_not_depend_on_the_number_of_targets(make_run, undisturbed):
    for targets in (1, 3):
        run = make_run(targets=targets)
        run.start()
        run.wait_finished()
        run.assert_exactly_once()
        assert run.final_weights() == undisturbed


@pytest.mark.parametrize("killed", [("target-0", "target-1"), pytest.param((), marks=pytest.mark.long)])
def test_weights_survive_a_stop_half_way_and_a_resume(make_run, undisturbed, killed):
    run = make_run()
    run.start_targets_first()
    run.wait_step(5)
    for name in killed:  # packs that nobody computes again are not waited for
        run.kill(name)
    run.kill("coordinator", signal.SIGTERM)
    run.wait(lambda: all(p.poll() is not None for p in run.processes.values()), "all roles gone")
    assert not run.finished() and run.committed_steps() >= 5
    run.assert_nothing_left()
    run.start()
    run.wait_finished()
    run.assert_exactly_once()
    assert run.final_weights() == undisturbed


@pytest.mark.parametrize("victim", ["target-0", "drafter-0", "coordinator"])
def test_weights_survive_a_kill(make_run, undisturbed, victim):
    run = make_run()
    run.start()
    run.wait_step(2)
    run.kill(victim)
    run.wait_finished(revive=True)
    run.assert_exactly_once()
    run.assert_nothing_left()
    assert run.final_weights() == undisturbed
