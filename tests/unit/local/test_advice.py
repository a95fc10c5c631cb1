"""Advice follows from who waited for whom."""

from services.local.advice import advice, side
from services.local.status import Role, Status


def role(name: str, index: int, rate: float, **phases: float) -> Role:
    return Role(role=name, index=index, tokens_per_s=rate, phases=phases)


def test_drafters_that_wait_want_more_targets():
    status = Status(
        roles=(
            role("target", 0, 100.0, forward=10.0, wait_lease=0.0),
            role("drafter", 0, 100.0, forward=2.5, backward=2.5, wait_pack=5.0),
        )
    )
    text = advice(status)
    assert text.startswith(
        "drafters wait 50% of their time: 2 targets a drafter would keep both busy; it has 1."
    )
    assert "anchor_draws" in text


def test_targets_that_wait_want_more_drafters():
    status = Status(
        roles=(
            role("target", 0, 50.0, forward=5.0, wait_slot=5.0),
            role("target", 1, 50.0, forward=5.0, wait_slot=5.0),
            role("drafter", 0, 100.0, forward=10.0),
        )
    )
    found = side(status, "target")
    assert found is not None
    assert (found.roles, found.waiting, found.capacity) == (2, 0.5, 100.0)
    assert advice(status).startswith("targets wait 50% of their time: 1 targets a drafter")


def test_a_balanced_run_is_told_so_and_a_young_one_nothing():
    busy = (role("target", 0, 9.0, forward=10.0, wait_slot=1.0), role("drafter", 0, 9.0, forward=10.0))
    assert advice(Status(roles=busy)).startswith("balanced")
    assert advice(Status()).startswith("no advice yet")
    assert advice(Status(roles=busy[:1])).startswith("no advice yet")
