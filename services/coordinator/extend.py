"""`draftmill extend`: a stopped run takes over the datasets and epochs that its options name now.

A run does not resume with other data than it began with, unless it is told to on purpose: this is how.
Epochs that have begun keep dataset and plan, and with them every step and outcome of the ledger; all
later epochs are planned anew. The learning rate follows the new number of steps from the next step on.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from protocol.errors import ConfigError, LedgerError
from protocol.files import FileLock
from services.config.fingerprint import differences, without_plan
from services.config.schema import Config
from services.coordinator.ledger import Ledger
from services.coordinator.result import revise
from services.coordinator.sizing import identity_and_size
from services.data.plan import Schedule
from services.data.training_data import TrainingData, fingerprint_of


class Extended(NamedTuple):
    """What the run is now."""

    first_epoch: int  # the first that is planned anew
    committed_steps: int
    total_steps: int


def extend(config: Config) -> Extended:
    """Make the datasets and epochs of `config` the run's.

    AlreadyRunning: the run has a coordinator. LedgerError: there is no run. ConfigError: nothing differs,
    another training option differs, or an epoch that has begun would change.
    """
    path = config.run.dir / "ledger.sqlite"
    if not path.is_file():
        raise LedgerError(f"run {config.run.dir}: it has no ledger yet; just start it with the data it needs")
    data = TrainingData.open(config.data)
    identity, _ = identity_and_size(config, data)
    with FileLock(config.run.dir / "coordinator.lock"):
        ledger = Ledger(path, None)
        try:
            first = first_changed_epoch(ledger.identity, identity, ledger.begun_epochs)
            plan_anew(ledger, identity, first)
            ledger.name_datasets(data.places)
            schedule = Schedule(config, data)
            revise(config.run.dir, ledger, schedule)
            return Extended(first, ledger.committed_steps, schedule.total_steps)
        finally:
            ledger.close()


def first_changed_epoch(recorded: Mapping[str, Any], wanted: Mapping[str, Any], begun: int) -> int:
    """The first epoch whose dataset differs between two identities, not below `begun`. ConfigError else."""
    if not differences(recorded, wanted):
        raise ConfigError("data.later, run.epochs: they are what the run has already; just start it")
    if others := differences(without_plan(recorded), without_plan(wanted)):
        raise ConfigError(
            f"a run can only be given other datasets and epochs, but also differ {'; '.join(others)}; "
            "restore them"
        )
    old, new = _datasets(recorded), _datasets(wanted)
    if len(new) < begun:
        raise ConfigError(
            f"run.epochs: {begun} have begun, so it cannot be less; give the number wanted in all"
        )
    longest = max(len(old), len(new))
    first = next((e for e in range(longest) if old[e : e + 1] != new[e : e + 1]), longest)
    if first < begun:
        raise ConfigError(
            f"data.path, data.later, run.epochs: epoch {first} has begun, so it keeps its data. The next one "
            f'that can change is {begun}: data.later = ["{begun}:PATH"], with run.epochs above {begun}'
        )
    return first


def plan_anew(ledger: Ledger, identity: Mapping[str, Any], first_epoch: int) -> None:
    """Write the new identity; the old one is kept. The run is not finished any more. Close the ledger after.

    Batches of the old plan that failed ahead of their epoch, and deaths counted for them, are forgotten:
    there are no such batches now.
    """
    old, new = (json.dumps(tree, sort_keys=True) for tree in (ledger.identity, identity))
    here = (ledger.timeline, first_epoch)
    with ledger.transaction() as db:
        db.execute("INSERT INTO extensions VALUES(?, ?, ?, ?)", (*here, ledger.committed_steps, old))
        db.execute("UPDATE run SET value = ? WHERE key = 'identity'", (new,))
        db.execute("DELETE FROM outcomes WHERE timeline = ? AND epoch >= ?", here)
        db.execute("DELETE FROM deaths WHERE epoch >= ?", (first_epoch,))
        db.execute("DELETE FROM finished WHERE timeline = ?", (ledger.timeline,))


def _datasets(identity: Mapping[str, Any]) -> list[str]:
    """The fingerprint of each epoch's dataset."""
    epochs = identity["options"]["run.epochs"]
    return [fingerprint_of(identity["dataset"], epoch) for epoch in range(epochs)]
