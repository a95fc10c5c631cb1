"""`result.json`, what a coordinator leaves behind, after a change to a run that has none at the moment.

`draftmill status` and `stop` tell from it how far a run is that nobody runs.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from protocol.files import write_durably
from services.coordinator.ledger import Ledger
from services.coordinator.status import checkpoints, epoch_before
from services.data.plan import Schedule

RESULT = "result.json"


def revise(run_dir: Path, ledger: Ledger, schedule: Schedule) -> None:
    """Bring it to what the ledger says now; a run that has none gets none. Figures of the end stay."""
    file = run_dir / RESULT
    try:
        told, left_ns = json.loads(file.read_bytes()), file.stat().st_mtime_ns
    except (FileNotFoundError, ValueError):
        return
    write_durably(file, json.dumps(told | _now(ledger, schedule), indent=1).encode())
    os.utime(file, ns=(left_ns, left_ns))  # it is of the coordinator that left it, no later one's


def _now(ledger: Ledger, schedule: Schedule) -> dict[str, Any]:
    done = ledger.accounting()
    planned = sum(len(schedule.epoch(epoch).batches) for epoch in range(schedule.epochs))
    pending = planned - done.committed_batches - done.failed_batches
    return {
        "state": "finished" if ledger.finished else "stopped", "reason": "",
        "epoch": epoch_before(schedule, ledger.committed_steps), "epochs": schedule.epochs,
        "step": ledger.committed_steps, "total_steps": schedule.total_steps, "timeline": ledger.timeline,
        "samples_total": schedule.samples_total,
        "samples_committed": done.committed_samples, "samples_failed": done.failed_samples,
        "batches": {
            "pending": pending, "assigned": 0, "ready": 0, "leased": 0,
            "committed": done.committed_batches, "failed": done.failed_batches,
        },
        "checkpoints": checkpoints(ledger, schedule), "eta_s": None, "batches_without_outcome": None,
    }  # fmt: skip
