"""A finished run is given other data and more epochs: killed in between, every sample counts once."""

import subprocess
import sys

import pytest
from harness import DEADLINE_S, NEWEST, environment, slowness, write_data

from services.config.load import load
from services.data.plan import Schedule
from services.data.training_data import TrainingData
from services.lifecycle import ExitCode

pytestmark = [pytest.mark.process, pytest.mark.long]

CONSTANT_LR = ("lr = 0.003", "lr = 0.003\nwarmup_ratio = 0.0\nmin_lr_ratio = 1.0")
"""So that what is trained does not depend on the number of steps, which an extension changes."""


def command(run, *words: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "services.cli", *words, "--config", str(run.file)]
    return subprocess.run(
        line, capture_output=True, text=True, timeout=DEADLINE_S * slowness(), env=environment(), check=False
    )


def rewrite(run, *pairs: tuple[str, str]) -> None:
    text = run.file.read_text()
    for old, new in pairs:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    run.file.write_text(text)


def committed_samples(run) -> list[tuple[int, int]]:
    """(epoch, row of its dataset) of every committed sample, from the ledger's outcomes and datasets."""
    config = load(file=run.file, environ={}).config
    data = TrainingData.open(config.data)
    assert run.query("SELECT first_epoch, fingerprint FROM datasets ORDER BY 1") == [
        (epoch, fingerprint) for epoch, fingerprint, _ in data.places
    ]
    schedule = Schedule(config, data)
    outcomes = run.query(f"SELECT epoch, batch FROM outcomes WHERE timeline = {NEWEST} AND failed IS NULL")
    return sorted((epoch, row) for epoch, batch in outcomes for row in schedule.epoch(epoch).batches[batch])


def test_a_run_is_extended_killed_and_rolled_back_across_the_border(make_run, data, tmp_path):
    more = write_data(tmp_path / "more", rows=100, seed=9)
    takes_over = (f'path = "{data}"', f'path = "{data}"\nlater = ["1:{more}"]')
    planned = make_run("planned", targets=1)
    rewrite(planned, CONSTANT_LR, takes_over, ("epochs = 2", "epochs = 3"))
    planned.start()
    planned.wait_finished()
    planned.assert_exactly_once()

    run = make_run("extended", targets=1)
    rewrite(run, CONSTANT_LR, ("epochs = 2", "epochs = 1"), ("every_steps = 4", "every_steps = 4\nkeep = 99"))
    run.start()
    run.wait_finished()
    border = run.committed_steps()
    assert run.result()["samples_total"] == 160

    rewrite(run, takes_over, ("epochs = 1", "epochs = 3"))
    refused = command(run, "coordinator")
    assert refused.returncode != 0 and "other training options: dataset:" in refused.stderr
    assert "`draftmill extend`" in refused.stderr and run.committed_steps() == border
    extended = command(run, "extend")
    assert extended.returncode == 0, extended.stderr
    assert f"from epoch 1 on: {planned.committed_steps()} steps, {border} of them done" in extended.stdout
    told = command(run, "status", str(run.dir)).stdout
    assert f"{border}/{planned.committed_steps()}" in told
    again = command(run, "extend")
    assert again.returncode == ExitCode.CONFIGURATION and "just start it" in again.stderr

    run.start()
    for victim, step in (("target-0", 1), ("drafter-0", 3), ("coordinator", 5)):
        run.wait_step(border + step, revive=True)
        run.kill(victim)
    run.wait_finished(revive=True)
    run.assert_exactly_once()
    every = [(0, row) for row in range(160)] + [(e, row) for e in (1, 2) for row in range(100)]
    assert committed_samples(run) == every
    assert run.result()["samples_total"] == len(every)
    assert run.committed_steps() == planned.committed_steps()
    assert run.final_weights() == planned.final_weights()

    (back,) = run.query(f"SELECT max(step) FROM checkpoints WHERE step < {border}")[0]
    rolled = command(run, "rollback", str(back))
    assert rolled.returncode == 0 and run.committed_steps() == back > 0, rolled.stderr
    told = run.result()
    ((timeline,),) = run.query("SELECT max(timeline) FROM timelines")
    assert (told["state"], told["step"], told["timeline"]) == ("stopped", back, timeline)
    assert told["checkpoints"][-1]["step"] == back and told["samples_total"] == len(every)
    assert told["batches"]["pending"] > 0 and told["samples_committed"] < len(every)
    run.start()
    run.wait(lambda: run.committed_steps() > border, "the border, once more")
    run.wait_finished()
    assert committed_samples(run) == every
    assert run.final_weights() == planned.final_weights()
