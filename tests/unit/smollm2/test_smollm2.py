"""The measurement of SmolLM2 ends when it is told to, keeps what is there, and reads runs under way."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[3] / "examples" / "smollm2"
sys.path.insert(0, str(FOLDER))

import commands  # noqa: E402
import drafters  # noqa: E402
import results  # noqa: E402

SAYS_AND_STAYS = "import signal; print('there', flush=True); signal.pause()"
STAYS_ANYHOW = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {SAYS_AND_STAYS}"


@pytest.fixture(autouse=True)
def signals_are_the_scripts() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    commands.watch_signals()
    yield
    for number, handler in before.items():
        signal.signal(number, handler)
    commands.signals.clear()


def run_until_signal(code: str, folder: Path) -> commands.Outcome:
    """With the script's own `run`; the script gets a SIGTERM once the command has spoken."""
    log = folder / "log"

    def look() -> None:
        if "there\n" in log.read_text():
            os.kill(os.getpid(), signal.SIGTERM)

    return commands.run([sys.executable, "-c", code], log, look=look)


def test_a_command_is_asked_to_end_when_its_time_is_up(tmp_path: Path) -> None:
    command = [sys.executable, "-c", SAYS_AND_STAYS]
    ended = commands.run(command, tmp_path / "log", until_s=time.monotonic() + 0.5)
    assert ended == (-signal.SIGTERM, True)


def test_a_command_that_does_not_leave_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "LEAVE_S", 0.1)
    assert run_until_signal(STAYS_ANYHOW, tmp_path) == (-signal.SIGKILL, True)


def test_a_signal_ends_commands_and_begins_no_other(tmp_path: Path) -> None:
    assert run_until_signal(SAYS_AND_STAYS, tmp_path) == (-signal.SIGTERM, True)
    with pytest.raises(commands.Interrupted):
        commands.run([sys.executable, "-c", "print('never')"], tmp_path / "log")


def test_a_result_is_there_only_if_its_command_ended_well(tmp_path: Path) -> None:
    for code, wanted in ((3, False), (0, True)):
        command = [sys.executable, "-c", f"print('half'); raise SystemExit({code})"]
        ended = commands.run(command, tmp_path / "log", into=tmp_path / "found.json")
        assert ended == (code, False) and (tmp_path / "found.json").exists() == wanted


def test_the_newest_checkpoint_is_the_one_of_the_last_step(tmp_path: Path) -> None:
    for name in (
        "ckpt-0-500-drafter-a",
        "ckpt-0-1500-drafter-a",
        "ckpt-0-0-drafter-a",
        ".partial-x",
    ):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    assert drafters.newest_checkpoint(tmp_path) == (1500, tmp_path / "checkpoints" / "ckpt-0-1500-drafter-a")


def test_initial_weights_are_no_checkpoint_to_measure(tmp_path: Path) -> None:
    (tmp_path / "checkpoints" / "ckpt-0-0-drafter-a").mkdir(parents=True)
    with pytest.raises(commands.Failed):
        drafters.newest_checkpoint(tmp_path)


def test_runs_under_way_are_read_as_far_as_they_are_written(tmp_path: Path) -> None:
    row, run_folder = drafters.Row("base"), tmp_path / "runs" / "base"
    assert "steps" not in results.result(tmp_path, row, None)
    run_folder.mkdir(parents=True)
    lines = run_folder / "metrics.jsonl"
    lines.touch()  # as a coordinator leaves it until the first step
    assert "steps" not in results.result(tmp_path, row, None)
    steps = [{"step": n, "tokens": 10.0, "loss": 4.0 - n, "accepted_length": 1.5} for n in (1, 2, 2)]
    lines.write_text("".join(json.dumps(step) + "\n" for step in steps) + '{"step": 3, "tok')
    found = results.result(tmp_path, row, "why")
    assert (found["steps"], found["tokens"], found["loss"], found["failed"]) == (2, 20, 2.5, "why")


def test_a_whole_evaluation_is_preferred_to_one_of_a_run_that_was_cut(tmp_path: Path) -> None:
    row = drafters.Row("base")
    for name in ("exports/base-at-90.json", "exports/base-at-100.json", "evals/base-at-90-few.json",
                 "evals/base-at-100-few.json"):  # fmt: skip
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert results.evaluations(tmp_path, row)[0].stem == "base-at-100-few"
    for name in ("base-few", "base"):
        (tmp_path / "evals" / f"{name}.json").touch()
        assert results.evaluations(tmp_path, row)[0].stem == name


def test_a_row_that_is_not_there_is_refused() -> None:
    import run as script

    with pytest.raises(SystemExit, match=r"no row bsae; runs\.toml has block-16"):
        script.chosen("bsae")
    assert [row.name for row in script.chosen("kl,base")] == ["base", "kl"]


def test_the_pictures_have_a_curve_for_each_row_with_figures(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "base"
    run.mkdir(parents=True)
    steps = [{"step": step, "accepted_length": 1.0 + step / 100} for step in range(1, 121)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    assert results.averaged(steps) == [(50, 1.255), (100, 1.755), (120, 2.105)]
    found = {
        "base": {
            "acceptance": {"gsm8k": 1.5}, "by_position": {"gsm8k": [0.4, 0.1]},
            "while_training": [{"step": step, "acceptance_length": 1.4} for step in (60, 120)],
        },
        "peer": {},
    }  # fmt: skip
    assert results.by_position(found).count("<polyline") == 1 and ">base: 1.50<" in results.by_position(found)
    drawn = results.while_training(tmp_path, found)
    assert drawn.count("<polyline") == 2 and ">base, decoded<" in drawn
    assert "<polyline" not in results.while_training(tmp_path, {"peer": {}})


@pytest.mark.parametrize("length", [1.0, None])
def test_initial_weights_alone_are_drawn_too(tmp_path: Path, length: float | None) -> None:
    found = {"block-16": {"while_training": [{"step": 0, "acceptance_length": length}]}}
    assert results.while_training(tmp_path, found).count("<polyline") == (length is not None)


def test_what_the_peer_says_of_its_own_blocks_is_kept_apart_from_decoding(tmp_path: Path) -> None:
    (tmp_path / "exports").mkdir()
    said = {"peer": "another 1.0", "steps": 7, "acceptance": 2.5, "export": "left out"}
    (tmp_path / "exports" / "peer.json").write_text(f"step 7\n{json.dumps(said)}\n")
    found = results.result(tmp_path, drafters.Row("peer", peer=True), None)
    assert found["acceptance_of_its_own_blocks"] == 2.5
    assert "acceptance" not in found and "export" not in found
