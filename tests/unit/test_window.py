"""The profile line of a role."""

from __future__ import annotations

import logging

import pytest

from services.target.profile import PHASES, Totals
from services.window import Window


def test_a_window_logs_what_was_added_since_the_last_one(caplog: pytest.LogCaptureFixture) -> None:
    now_s, totals = [0.0], Totals()
    window = Window(10.0, lambda: now_s[0])
    totals.add(tokens_total=500.0, packs_total=2, bytes_total=4e9, phase_forward_seconds=6.0)
    with caplog.at_level(logging.INFO):
        now_s[0] = 9.0
        window.look(totals.snapshot())
        assert caplog.records == []
        now_s[0] = 20.0
        window.look(totals.snapshot())
        totals.add(tokens_total=100.0)
        now_s[0] = 30.0
        window.look(totals.snapshot())
    first, second = (vars(record) for record in caplog.records)
    figures = ("packs", "tokens_per_s", "gb_per_s", "forward_s")
    assert [first[name] for name in figures] == [2, 25.0, 0.2, 6.0]
    assert [second[name] for name in figures] == [0, 10.0, 0.0, 0.0]
    assert all(f"{phase}_s" in first for phase in PHASES)


def test_a_phase_may_begin_within_a_window_and_bytes_may_not_be_counted(caplog) -> None:
    times = iter([0.0, 10.0, 10.0, 20.0, 20.0])
    window = Window(5.0, lambda: next(times))
    with caplog.at_level(logging.INFO):
        window.look({"tokens_total": 10.0, "packs_total": 1.0})
        window.look({"tokens_total": 50.0, "packs_total": 2.0, "phase_step_seconds": 0.5})
    record = vars(caplog.records[-1])
    assert (record["tokens_per_s"], record["packs"], record["step_s"]) == (4.0, 1, 0.5)
    assert "gb_per_s" not in record


def test_no_window_is_logged_when_the_interval_is_zero(caplog: pytest.LogCaptureFixture) -> None:
    seconds = iter(range(1000))
    window = Window(0.0, lambda: float(next(seconds)))
    with caplog.at_level(logging.INFO):
        window.look({"tokens_total": 10.0, "packs_total": 1.0})
    assert caplog.records == []
