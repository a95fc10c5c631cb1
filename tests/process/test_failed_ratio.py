"""Samples of which nothing finite comes: as many as run.max_failed_ratio allows, and one more."""

import json
import math

import pytest
from harness import DEADLINE_S, Run, slowness, write_data, write_model
from safetensors.numpy import load_file

from services.lifecycle import ExitCode

pytestmark = pytest.mark.process

EPOCHS, ROWS, LIMIT = 2, 160, 0.05
ALLOWED = int(LIMIT * ROWS)  # of each epoch's samples
MARK = 61
REASON = "the target's hidden states are not finite"


@pytest.fixture
def run_with_bad(tmp_path):
    runs = []

    def make(bad: int) -> Run:
        model = write_model(tmp_path / "model", infinite=MARK)
        data = write_data(tmp_path / "data", rows=ROWS, marked=bad, mark=MARK)
        run = Run(tmp_path, "run", model, data)
        text = run.file.read_text().replace("seed = 3", f"seed = 3\nmax_failed_ratio = {LIMIT}")
        run.file.write_text(text)
        runs.append(run)
        return run

    yield make
    for run in runs:
        run.close()


def assert_only_finite_steps(run: Run) -> None:
    """Neither in the kept checkpoints nor in any step's figures."""
    names = [name for (name,) in run.query("SELECT name FROM checkpoints WHERE deleted = 0")]
    assert len(names) > 1
    for name in names:
        for tensor in load_file(run.dir / "checkpoints" / name / "model.safetensors").values():
            assert math.isfinite(float(abs(tensor).sum()))
    lines = [json.loads(line) for line in (run.dir / "metrics.jsonl").read_text().splitlines()]
    assert lines and all(math.isfinite(line["loss"]) for line in lines)


def listed(result: dict) -> list[int]:
    return sorted(skip["sample"] for skip in result["skipped"])


def test_as_many_failed_samples_as_the_limit_allows_are_listed_and_the_run_finishes(run_with_bad):
    run = run_with_bad(ALLOWED)
    run.start()
    run.wait_finished()
    result = run.result()
    assert result["samples_failed"] == ALLOWED * EPOCHS
    assert result["samples_committed"] == (ROWS - ALLOWED) * EPOCHS
    assert (result["batches_without_outcome"], result["batches_duplicated"]) == (0, 0)
    assert result["failures"] == [] and listed(result) == sorted(list(range(ALLOWED)) * EPOCHS)
    assert {skip["reason"] for skip in result["skipped"]} == {REASON}
    assert_only_finite_steps(run)
    run.assert_nothing_left()


def test_one_more_ends_the_run_with_the_ratio_the_option_and_a_reason(run_with_bad):
    run = run_with_bad(ALLOWED + 1)
    run.start()
    deadline_s = DEADLINE_S * slowness()
    assert run.processes["coordinator"].wait(deadline_s) == ExitCode.RUN_FAILED, run.tails()
    roles = {name: run.processes[name].wait(deadline_s) for name in run.names()[1:]}
    assert roles == dict.fromkeys(roles, ExitCode.REFUSED), run.tails()
    result = run.result()
    failed = result["samples_failed"]
    assert ALLOWED * EPOCHS < failed <= (ALLOWED + 1) * EPOCHS and len(listed(result)) == failed
    assert set(listed(result)) <= set(range(ALLOWED + 1))
    expected = (
        f"{failed} of {ROWS * EPOCHS} samples failed, more than run.max_failed_ratio = {LIMIT:g}; sample "
    )
    assert result["state"] == "failed" and result["reason"].startswith(expected)
    assert result["reason"].endswith(REASON)
    for name in run.names():
        assert "run.max_failed_ratio" in run.log(name) and REASON in run.log(name), name
    assert not run.finished() and 0 < run.committed_steps() <= result["total_steps"]
    assert_only_finite_steps(run)
    run.assert_nothing_left()
