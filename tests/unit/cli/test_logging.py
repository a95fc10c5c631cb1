"""Lines that both people and machines can read."""

import json
import logging

import pytest

from services.config.schema import Log
from services.logging import setup


@pytest.fixture(autouse=True)
def root_as_before():
    root = logging.getLogger()
    before = root.handlers[:], root.level
    yield
    for handler in root.handlers:
        if handler not in before[0]:
            handler.close()
    root.handlers[:], root.level = before
    logging.captureWarnings(False)


def test_a_line_names_time_role_place_thread_event_and_fields(tmp_path):
    file = tmp_path / "target-0.log"
    formatter = setup(Log(), "target", file=file)
    logging.getLogger("x").info("starting")
    formatter.index = 3
    logging.getLogger("x").warning(
        "pack %d ready", 7, extra={"tokens": 4096, "why": "a b", "s": 0.1234567, "no": ""}
    )
    first, second = file.read_text().splitlines()
    assert first.startswith("time=20")
    assert first.endswith("level=info role=target thread=MainThread event=starting")
    assert 'index=3 thread=MainThread event="pack 7 ready" tokens=4096 why="a b" s=0.123457 no=""' in second


def test_json_lines_keep_their_types_and_the_traceback(tmp_path):
    file = tmp_path / "log"
    setup(Log(format="json"), "drafter", 0, file)
    try:
        raise ValueError("bad")
    except ValueError:
        logging.getLogger("x").exception("failed", extra={"step": 3})
    (line,) = file.read_text().splitlines()
    fields = json.loads(line)
    assert (fields["role"], fields["index"], fields["step"], fields["event"]) == ("drafter", 0, 3, "failed")
    assert "ValueError: bad" in fields["traceback"]


def test_a_traceback_is_indented_below_its_line(tmp_path):
    file = tmp_path / "log"
    setup(Log(), "drafter", 0, file)
    try:
        raise ValueError("bad")
    except ValueError:
        logging.getLogger("x").exception("failed")
    lines = file.read_text().splitlines()
    assert lines[0].endswith("event=failed")
    assert all(line.startswith("    ") for line in lines[1:])


def test_a_newline_in_a_value_stays_in_its_line(tmp_path):
    file = tmp_path / "log"
    setup(Log(), "target", 0, file)
    logging.getLogger("x").info("a\nb")
    assert len(file.read_text().splitlines()) == 1


def test_levels_below_the_option_are_not_written(tmp_path):
    file = tmp_path / "log"
    setup(Log(level="warning"), "target", 0, file)
    logging.getLogger("x").info("quiet")
    assert file.read_text() == ""
