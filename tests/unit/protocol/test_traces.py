"""Requests for a trace: who may ask for what, who takes it, and what nobody takes any more."""

import os
import stat
import time

import pytest

from protocol.errors import AlreadyRunning, ConfigError, DecodeError
from protocol.traces import FOLDER, VOID_S, ask, take


def test_a_request_is_taken_once_and_both_sides_name_the_same_answer(tmp_path):
    asked = ask(tmp_path, "target-0", 2.5)
    assert asked.waits()
    assert take(tmp_path, "target-1") is None and asked.waits()
    assert take(tmp_path, "target-0") == asked
    assert take(tmp_path, "target-0") is None and not asked.waits()
    assert asked.trace.parent == tmp_path / FOLDER
    assert asked.trace.name.startswith("target-0-2") and asked.trace.name.endswith(".json.gz")
    assert list((tmp_path / FOLDER).iterdir()) == []


def test_only_the_user_can_read_what_is_asked(tmp_path):
    ask(tmp_path, "drafter-12", 1)
    assert stat.S_IMODE((tmp_path / FOLDER).stat().st_mode) == 0o700
    assert stat.S_IMODE((tmp_path / FOLDER / "drafter-12.request").stat().st_mode) == 0o600


@pytest.mark.parametrize("seconds", [0.0, 0.99, 30.1, -3.0, float("nan"), float("inf")])
def test_a_trace_is_neither_too_short_nor_too_long(tmp_path, seconds):
    with pytest.raises(ConfigError, match="must be 1 to 30"):
        ask(tmp_path, "target-0", seconds)
    assert not (tmp_path / FOLDER).exists()


@pytest.mark.parametrize("role", ["coordinator", "target", "target-", "target-x", "../target-0"])
def test_only_targets_and_drafters_can_be_asked(tmp_path, role):
    with pytest.raises(ConfigError, match="as in target-0"):
        ask(tmp_path, role, 3)


def test_a_folder_that_is_no_run_is_not_made(tmp_path):
    with pytest.raises(ConfigError, match="no folder of a run"):
        ask(tmp_path / "missing", "target-0", 3)
    assert not (tmp_path / "missing").exists()


@pytest.mark.parametrize("text", ["", "three", "0", "31", "nan", "3" * 1000, "\0\xff"])
def test_what_is_no_number_of_seconds_is_refused_and_gone(tmp_path, text):
    asked = ask(tmp_path, "target-0", 3)
    (tmp_path / FOLDER / "target-0.request").write_text(text, encoding="latin-1")
    with pytest.raises(DecodeError, match=r"target-0\.request.*must be 1 to 30"):
        take(tmp_path, "target-0")
    assert not asked.waits() and take(tmp_path, "target-0") is None


def test_a_second_request_is_refused_until_the_first_is_taken_or_withdrawn(tmp_path):
    first = ask(tmp_path, "target-0", 3)
    with pytest.raises(AlreadyRunning, match="asked for already"):
        ask(tmp_path, "target-0", 3)
    assert ask(tmp_path, "target-1", 3).waits()
    first.withdraw()
    second = ask(tmp_path, "target-0", 3)
    first.withdraw()  # not its own any more
    assert second.waits() and second.trace != first.trace


def test_a_request_that_nobody_took_for_a_minute_is_void(tmp_path):
    def age() -> None:
        old_s = time.time() - VOID_S - 1
        os.utime(tmp_path / FOLDER / "target-0.request", (old_s, old_s))

    ask(tmp_path, "target-0", 3)
    age()
    assert take(tmp_path, "target-0") is None  # its role was dead; the next one does not record for nobody
    assert not (tmp_path / FOLDER / "target-0.request").exists()
    ask(tmp_path, "target-0", 3)
    age()
    assert ask(tmp_path, "target-0", 3).waits()
