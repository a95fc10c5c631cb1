"""What is evaluated next, what is best, and how long an evaluator rests."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.evaluator.agenda import Agenda, Recorded, better, pause_s


def recorded(*steps: int, timeline: int = 0) -> list[Recorded]:
    return [Recorded(f"ckpt-{timeline}-{step}-drafter-a", timeline, step) for step in steps]


def line(checkpoint: Recorded, length: float | None = 2.0) -> dict:
    return {"checkpoint": checkpoint.name, "acceptance_length": length, "step": checkpoint.step}


def test_the_newest_of_several_waiting_is_next_and_what_was_missed_is_left_out():
    agenda = Agenda()
    assert agenda.next([]) is None
    first = recorded(0, 4, 8)
    assert agenda.next(first) == first[-1]
    agenda.add(line(first[-1]))
    assert agenda.next(first) is None
    later = recorded(4, 8, 12, 16)
    assert agenda.next(later) == later[-1]


def test_a_restart_goes_on_where_the_history_ends():
    first, second = recorded(4, 8)
    agenda = Agenda([line(first), line(second)])
    assert first.name in agenda and agenda.next([first, second]) is None
    (third,) = recorded(12)
    assert agenda.next([first, second, third]) == third


def test_after_a_roll_back_the_new_timeline_is_followed():
    old, (again,) = recorded(4, 8), recorded(8, timeline=1)
    agenda = Agenda(map(line, old))
    assert agenda.next(old[:1]) is None  # its history ends at a checkpoint that is done
    assert agenda.next([old[0], again]) == again


def test_what_is_gone_or_damaged_is_not_tried_again():
    agenda, (one, two) = Agenda(), recorded(4, 8)
    agenda.set_aside(one.name)
    assert agenda.next([one]) is None
    assert agenda.next([one, two]) == two
    assert one.name not in agenda and agenda.best is None


def test_the_best_is_the_longest_and_the_earlier_of_equals():
    one, two, three, four = recorded(4, 8, 12, 16)
    agenda = Agenda([line(one, None)])
    assert agenda.best is None
    for checkpoint, length in ((two, 2.5), (three, 2.5), (four, 2.4)):
        agenda.add(line(checkpoint, length))
    assert agenda.best is not None and agenda.best["checkpoint"] == two.name
    assert better(line(one, 2.51), agenda.best) and not better(line(one, None), agenda.best)


@given(st.lists(st.one_of(st.none(), st.floats(1.0, 16.0)), max_size=12))
def test_the_best_does_not_depend_on_when_the_evaluator_was_restarted(lengths):
    lines = [line(c, length) for c, length in zip(recorded(*range(len(lengths))), lengths, strict=True)]
    whole = Agenda(lines)
    for cut in range(len(lines)):
        again = Agenda(lines[:cut])
        for each in lines[cut:]:
            again.add(each)
        assert again.best == whole.best


@given(worked_s=st.floats(0.0, 1e4), share=st.floats(0.01, 1.0))
def test_work_is_the_share_of_all_time(worked_s, share):
    rest_s = pause_s(worked_s, share)
    assert rest_s >= 0.0
    assert worked_s == pytest.approx(share * (worked_s + rest_s))
