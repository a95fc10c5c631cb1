"""Figures of steps into files and sinks, one of which always fails."""

from __future__ import annotations

import json
import sys
import types

import pytest

from protocol.errors import ConfigError
from protocol.messages import StepAt
from services.config.schema import Config
from services.coordinator.sinks import SINKS, Logged, StepLog


class Listening:
    """A sink of the test's own: keeps what it hears."""

    def __init__(self, config) -> None:
        self.heard, self.closed = [], False

    def write(self, at, values) -> None:
        self.heard.append((at, dict(values)))

    def close(self) -> None:
        self.closed = True


class Failing(Listening):
    def write(self, at, values) -> None:
        raise ConnectionError("the service is down")


def config(folder, *sinks) -> Config:
    return Config(model={"path": "m"}, data={"path": "d"}, run={"dir": folder}, log={"sinks": sinks})


def test_every_step_is_a_line_of_json_at_once(tmp_path):
    log = StepLog(config(tmp_path))
    log.write(StepAt(0, 3), {"loss": 2.5})
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [{"timeline": 0, "step": 3, "loss": 2.5}]
    log.close()


def test_a_step_that_is_told_again_after_a_restart_is_no_second_line(tmp_path):
    log = StepLog(config(tmp_path))
    for step in (3, 4):
        log.write(StepAt(0, step), {"loss": 2.5})
    log.close()
    again = StepLog(config(tmp_path))
    for at in (StepAt(0, 3), StepAt(0, 4), StepAt(0, 5), StepAt(1, 4)):  # the last after a roll-back
        again.write(at, {"loss": 2.0})
    again.close()
    assert told(tmp_path) == [(0, 3), (0, 4), (0, 5), (1, 4)]


def test_what_an_older_ledger_repeats_is_written_again(tmp_path):
    """A backup of it was restored."""
    log = StepLog(config(tmp_path))
    for step in (3, 4, 5):
        log.write(StepAt(0, step), {"loss": 2.5})
    log.close()
    again = StepLog(config(tmp_path), here=StepAt(0, 4))
    for step in (4, 5):
        again.write(StepAt(0, step), {"loss": 2.0})
    again.close()
    assert told(tmp_path) == [(0, 3), (0, 4), (0, 5), (0, 5)]


def test_half_a_line_that_a_power_cut_left_spoils_no_other(tmp_path):
    whole = '{"timeline": 0, "step": 3, "loss": 1.0}\n'
    (tmp_path / "metrics.jsonl").write_text(whole + '{"timeline": 0, "st')
    log = StepLog(config(tmp_path))
    log.write(StepAt(0, 4), {"loss": 2.0})
    log.close()
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in (lines[0], lines[2])] == [3, 4] and len(lines) == 3


def told(folder) -> list[tuple[int, int]]:
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [(line["timeline"], line["step"]) for line in lines]


def test_a_sink_that_fails_is_dropped_and_the_others_hear_everything(tmp_path):
    made = []

    def listening(config):
        made.append(Listening(config))
        return made[-1]

    log = StepLog(config(tmp_path, "wandb", "trackio"), {"wandb": Failing, "trackio": listening})
    for step in range(3):
        log.write(StepAt(1, step), {"loss": float(step)})
    log.close()
    assert [at.step for at, _ in made[0].heard] == [0, 1, 2] and made[0].closed
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 3


def test_a_missing_package_is_told_at_the_start(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"log\.sinks = wandb: .* pip install"):
        StepLog(config(tmp_path, "wandb"))


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_a_service_gets_name_project_timeline_and_step(tmp_path, monkeypatch, name):
    """Their packages are heavy and want an account: a module of the same interface stands in."""
    calls = []
    module = types.ModuleType(name)
    module.init = lambda **words: calls.append(("init", words))
    module.log = lambda values: calls.append(("log", values))
    module.finish = lambda: calls.append(("finish", {}))
    monkeypatch.setitem(sys.modules, name, module)
    sink = SINKS[name](config(tmp_path / "the-run"))
    assert isinstance(sink, Logged)
    sink.write(StepAt(1, 7), {"loss": 2.0})
    sink.close()
    kinds, words = zip(*calls, strict=True)
    assert kinds == ("init", "log", "finish")
    assert (words[0]["project"], words[0]["name"], words[0]["resume"]) == ("draftmill", "the-run", "allow")
    assert words[1] == {"loss": 2.0, "step": 7, "timeline": 1}


def test_tensorboard_files_hold_the_figures(tmp_path):
    pytest.importorskip("tensorboard", reason="needs the extra tensorboard")
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    log = StepLog(config(tmp_path, "tensorboard"))
    log.write(StepAt(0, 1), {"loss": 2.0, "lr": 0.5})
    log.write(StepAt(1, 1), {"loss": 1.5})
    log.close()
    found = {}
    for file in sorted((tmp_path / "tensorboard").glob("timeline-*/*")):
        for event in EventFileLoader(str(file)).Load():
            for value in event.summary.value:
                found[file.parent.name, event.step, value.tag] = value.tensor.float_val[0]
    assert found == {
        ("timeline-0", 1, "loss"): 2.0, ("timeline-0", 1, "lr"): 0.5, ("timeline-1", 1, "loss"): 1.5,
    }  # fmt: skip
