"""Figures of a step and totals of a drafter."""

from __future__ import annotations

import pytest
from drafter_cases import CPU

from services.drafter.metrics import POSITIONS_REPORTED, Phases, TallyLayout


def test_figures_are_means_over_the_tally():
    layout = TallyLayout(predicted=3, packs=2)
    tally = [6.0, 4.0, 15.0, 10.0, 200.0, 2.0, 9.0, 4.0, 2.0, 10.0, 10.0, 5.0, 0.0, 1.0]
    assert len(tally) == layout.size
    values = layout.values(tally)
    assert values["loss"] == 1.5
    assert values["accuracy"] == pytest.approx(15 / 25)
    assert [values[f"accuracy_{k}"] for k in (1, 2, 3)] == [0.9, 0.4, 0.4]
    assert values["accepted_length"] == 1.5
    assert (values["anchors"], values["tokens"], values["packs"]) == (10.0, 200.0, 2.0)
    assert tally[layout.bad] == [0.0, 1.0]


def test_a_step_without_weight_has_zeros():
    layout = TallyLayout(predicted=3, packs=2)
    assert set(layout.values([0.0] * layout.size).values()) == {0.0}


def test_long_blocks_fit_a_report():
    layout = TallyLayout(predicted=127, packs=1)
    values = layout.values([1.0] * layout.size)
    assert len(values) + 2 <= 64 and f"accuracy_{POSITIONS_REPORTED}" in values


def test_phases_add_up_also_when_what_they_time_fails():
    phases = Phases(CPU)
    with phases("step"):
        pass
    with pytest.raises(KeyError), phases("step"):
        raise KeyError
    first = phases.totals()["phase_step_seconds"]
    with phases("step"):
        pass
    assert phases.totals()["phase_step_seconds"] > first > 0.0


def test_totals_may_be_read_while_a_phase_begins():
    """Thread intake reports them while the trainer's thread works."""
    phases = Phases(CPU)

    class Name(str):
        def __format__(self, spec: str) -> str:
            phases.seconds[f"begun while {self!s} was read"] += 1.0
            return str(self)

    phases.seconds[Name("step")] = 2.0
    assert phases.totals() == {"phase_step_seconds": 2.0}
