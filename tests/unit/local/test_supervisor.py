"""When a role is started again, and when a run is over or hopeless."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.lifecycle import ExitCode
from services.local.progress import Progress
from services.local.status import Evaluation, Role, Status
from services.local.supervisor import (
    COORDINATOR,
    EVALUATOR,
    LONGEST_DELAY_S,
    RoleId,
    Supervisor,
    describe,
)

TARGET, DRAFTER = RoleId("target", 0), RoleId("drafter", 0)


def running(give_up_after: int = 3) -> Supervisor:
    supervisor = Supervisor([COORDINATOR, TARGET, DRAFTER], restart_delay_s=0.5, give_up_after=give_up_after)
    for role in supervisor.due(0.0):
        supervisor.started(role)
    return supervisor


def test_all_roles_start_at_once_the_coordinator_first():
    supervisor = Supervisor([COORDINATOR, TARGET, DRAFTER], 0.5, 3)
    assert supervisor.due(0.0) == [COORDINATOR, TARGET, DRAFTER]
    assert running().due(1e9) == []


def test_a_dead_role_returns_after_a_delay_that_doubles_until_it_progresses():
    supervisor = running(give_up_after=9)
    delays = []
    for now_s in (100.0, 200.0, 300.0):
        supervisor.exited(TARGET, -9, now_s)
        delays.append(supervisor.next_due_s() - now_s)
        supervisor.started(TARGET)
    assert delays == [0.5, 1.0, 2.0]
    supervisor.progressed(TARGET)
    supervisor.exited(TARGET, -9, 400.0)
    assert supervisor.next_due_s() == 400.5
    assert supervisor.places[TARGET].restarts == 3


def test_deaths_in_a_row_without_progress_end_the_run_and_name_the_role():
    supervisor = running(give_up_after=2)
    supervisor.exited(DRAFTER, 1, 0.0)
    supervisor.started(DRAFTER)
    assert supervisor.verdict is None
    supervisor.exited(DRAFTER, -11, 1.0)
    assert supervisor.verdict is not None
    assert supervisor.verdict.code is ExitCode.RUN_FAILED
    assert supervisor.verdict.culprit == DRAFTER
    assert "drafter-0 died 2 times in a row without progress" in supervisor.verdict.reason
    assert "signal 11" in supervisor.verdict.reason


@pytest.mark.parametrize("role", [COORDINATOR, TARGET, DRAFTER])
def test_a_wrong_configuration_is_not_tried_again(role):
    supervisor = running()
    supervisor.exited(role, ExitCode.CONFIGURATION, 0.0)
    assert supervisor.verdict is not None
    assert (supervisor.verdict.code, supervisor.verdict.culprit) == (ExitCode.CONFIGURATION, role)


@pytest.mark.parametrize("code", [ExitCode.FINISHED, ExitCode.STOPPED])
def test_the_coordinators_exit_decides(code):
    supervisor = running()
    supervisor.exited(COORDINATOR, code, 0.0)
    assert supervisor.verdict is not None
    assert (supervisor.verdict.code, supervisor.verdict.culprit) == (code, None)


@pytest.mark.parametrize("code", [ExitCode.REFUSED, ExitCode.RUN_FAILED])
def test_a_refused_coordinator_ends_the_run_but_a_refused_role_returns(code):
    supervisor = running()
    supervisor.exited(TARGET, code, 0.0)
    assert supervisor.verdict is None
    assert supervisor.due(1.0) == [TARGET]
    supervisor.exited(COORDINATOR, code, 2.0)
    assert supervisor.verdict is not None


def test_a_role_told_that_the_run_is_finished_stays_away():
    supervisor = running()
    supervisor.exited(TARGET, ExitCode.FINISHED, 0.0)
    assert supervisor.due(1e9) == []
    assert supervisor.verdict is None


def test_a_role_stopped_by_somebody_returns():
    supervisor = running()
    supervisor.exited(TARGET, ExitCode.STOPPED, 0.0)
    assert supervisor.due(1.0) == [TARGET]


def test_while_the_run_ends_only_the_coordinator_is_started_again():
    supervisor = running()
    supervisor.run_is_ending(True, 0.0)
    supervisor.exited(TARGET, ExitCode.REFUSED, 0.0)
    supervisor.exited(COORDINATOR, -9, 0.0)
    assert supervisor.due(1.0) == [COORDINATOR]
    assert supervisor.next_due_s() == 0.5
    supervisor.started(COORDINATOR)
    supervisor.run_is_ending(False, 5.0)
    assert supervisor.due(5.0) == [TARGET]


@given(
    st.lists(st.tuples(st.sampled_from([TARGET, DRAFTER, COORDINATOR]), st.sampled_from([-9, 1, 4, 5, 7, 8])))
)
def test_whatever_dies_is_started_again_or_the_run_has_a_verdict(deaths):
    supervisor = running(give_up_after=4)
    now_s = 0.0
    for role, code in deaths:
        if not supervisor.places[role].running:
            continue
        now_s += 1.0
        supervisor.exited(role, code, now_s)
        if supervisor.verdict:
            assert supervisor.verdict.reason or supervisor.verdict.code is ExitCode.STOPPED
            return
        due_s = supervisor.next_due_s()
        assert due_s is not None
        assert due_s <= now_s + LONGEST_DELAY_S
        now_s = due_s
        for waiting in supervisor.due(now_s):
            supervisor.started(waiting)
        assert all(place.running for place in supervisor.places.values())


@pytest.mark.parametrize("code", [ExitCode.CONFIGURATION, ExitCode.USAGE])
def test_an_evaluator_that_cannot_work_is_left_alone_and_the_run_goes_on(code):
    supervisor = Supervisor([COORDINATOR, TARGET, EVALUATOR], restart_delay_s=0.5, give_up_after=2)
    for role in supervisor.due(0.0):
        supervisor.started(role)
    supervisor.exited(EVALUATOR, code, 0.0)
    assert supervisor.verdict is None and supervisor.due(1e9) == []


def test_an_evaluator_is_started_again_until_it_has_died_too_often():
    supervisor = Supervisor([COORDINATOR, EVALUATOR], restart_delay_s=0.5, give_up_after=3)
    for role in supervisor.due(0.0):
        supervisor.started(role)
    for now_s in (10.0, 20.0):
        supervisor.exited(EVALUATOR, -9, now_s)
        assert supervisor.due(now_s + 9.0) == [EVALUATOR]
        supervisor.started(EVALUATOR)
    supervisor.exited(EVALUATOR, -9, 30.0)
    assert supervisor.due(1e9) == [] and supervisor.verdict is None
    supervisor.exited(COORDINATOR, ExitCode.FINISHED, 40.0)
    assert supervisor.verdict is not None and supervisor.verdict.code is ExitCode.FINISHED


def test_somebody_elses_evaluator_is_no_concern():
    supervisor = running()
    supervisor.progressed(EVALUATOR)
    assert EVALUATOR not in supervisor.places


def test_exits_are_described_for_people():
    assert describe(-9) == "signal 9"
    assert describe(5) == "status 5 (stuck)"
    assert describe(42) == "status 42"


def member(role: RoleId, incarnation: str, rate: float) -> Role:
    return Role(role=role.role, index=role.index, incarnation=incarnation, tokens_per_s=rate)


def test_a_role_progresses_by_tokens_under_a_new_incarnation():
    progress = Progress()
    assert progress.of(Status(roles=(member(TARGET, "target-a", 0.0),))) == []
    assert progress.of(Status(roles=(member(TARGET, "target-a", 9.0),))) == [TARGET]
    progress.exited(TARGET)
    assert progress.of(Status(roles=(member(TARGET, "target-a", 9.0),))) == []
    assert progress.of(Status(roles=(member(TARGET, "target-b", 9.0),))) == [TARGET]


def test_the_coordinator_progresses_by_outcomes_of_its_own_life():
    progress = Progress()
    assert progress.of(Status(samples_committed=40)) == []
    assert progress.of(Status(samples_committed=41)) == [COORDINATOR]
    progress.exited(COORDINATOR)
    assert progress.of(Status(samples_committed=41)) == []
    assert progress.of(Status(samples_committed=41, samples_failed=1)) == [COORDINATOR]


def test_the_evaluator_progresses_by_a_checkpoint_of_its_own_life():
    progress = Progress()
    one, two = Evaluation(step=4, acceptance_length=2.0), Evaluation(step=8, acceptance_length=2.5)
    assert progress.of(Status()) == []
    assert progress.of(Status(evaluation=one)) == [EVALUATOR]
    progress.exited(EVALUATOR)
    assert progress.of(Status(evaluation=one)) == []
    assert progress.of(Status(evaluation=two)) == [EVALUATOR]
