"""`draftmill rollback STEP`: a stopped run goes on from an earlier checkpoint, on a new timeline.

Nothing is deleted: the old timeline stays in the ledger, its later checkpoints on the disk. What was
trained after the checkpoint is trained again; batches that failed for good stay failed.
"""

from __future__ import annotations

from protocol.errors import CheckpointError
from protocol.files import FileLock
from services.config.schema import Config
from services.coordinator.ledger import CheckpointRow, Ledger
from services.coordinator.result import revise
from services.coordinator.sizing import identity_and_size
from services.data.plan import Schedule
from services.data.training_data import TrainingData


def roll_back(config: Config, step: int) -> tuple[int, CheckpointRow]:
    """The new timeline and the checkpoint that it starts from.

    AlreadyRunning: the run has a coordinator. CheckpointError: no checkpoint of that step is kept.
    """
    path = config.run.dir / "ledger.sqlite"
    if not path.is_file():
        raise CheckpointError(
            f"run {config.run.dir}: it has no ledger yet, so there is nothing to go back to"
        )
    data = TrainingData.open(config.data)
    identity, _ = identity_and_size(config, data)
    with FileLock(config.run.dir / "coordinator.lock"):
        ledger = Ledger(path, identity)
        try:
            row = _kept(ledger, config, step)
            timeline = ledger.open_timeline(row.at)
            revise(config.run.dir, ledger, Schedule(config, data))
            return timeline, row
        finally:
            ledger.close()


def _kept(ledger: Ledger, config: Config, step: int) -> CheckpointRow:
    root = config.run.dir / "checkpoints"
    kept = [row for row in ledger.checkpoints() if (root / row.name).is_dir()]
    found = [row for row in kept if row.at.step == step]
    if not found:
        steps = ", ".join(str(number) for number in sorted({row.at.step for row in kept})) or "none"
        raise CheckpointError(
            f"checkpoint of step {step}: it is not kept; kept are {steps} (of {ledger.committed_steps} "
            "committed steps); choose one of them"
        )
    return found[-1]
