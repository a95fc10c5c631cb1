"""Checkpoint folders against the ledger: which are kept, and what nobody will ever load again.

A folder is known while its row is not deleted. Rows go first, then files: a coordinator that dies in
between leaves a folder without a row, and so does a drafter that dies while it writes, or before its
checkpoint is recorded. Those are swept at the coordinator's start and after a drafter's death.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from protocol.errors import LedgerError
from services.coordinator.ledger import Ledger

_PARTIAL = ".partial-"


def retire(ledger: Ledger, root: Path, *, keep: int, busy: str = "") -> None:
    """Delete what is older than the newest `keep` of this timeline's history; the initial weights stay.

    `busy`, which is being copied elsewhere, goes another time.
    """
    rows = [row for row in ledger.checkpoints() if row.at.step > 0 and row.name != busy]
    for row in rows[:-keep]:
        ledger.forget_checkpoint(row.name)
        shutil.rmtree(root / row.name, ignore_errors=True)


def refuse_strangers(ledger: Ledger, root: Path) -> None:
    """Checkpoints beside a new ledger are not swept: theirs was lost, and they are all that is left.

    Raises LedgerError.
    """
    if not ledger.knows_anybody() and (rule := strangers(root)):
        raise LedgerError(rule)


def strangers(root: Path) -> str:
    """What is wrong with whole checkpoints in `root` that no ledger has written of; "" if there are none."""
    names = sorted(folder.name for folder in root.glob("ckpt-*")) if root.is_dir() else []
    if not names:
        return ""
    return (
        f"{root}: {len(names)} checkpoints ({names[-1]}) of a ledger that is gone; "
        "restore ledger.sqlite from a backup, or move them away to begin anew"
    )


def sweep_unknown(ledger: Ledger, root: Path, lives: Callable[[str], bool]) -> list[str]:
    """Remove folders that the ledger does not know, unless their writer lives; returns their names."""
    if not root.is_dir():
        return []
    known = ledger.kept_names()
    unknown = [
        folder
        for folder in sorted(root.iterdir())
        if folder.name not in known and (writer := _writer(folder.name)) and not lives(writer)
    ]
    for folder in unknown:
        shutil.rmtree(folder, ignore_errors=True)
    return [folder.name for folder in unknown]


def _writer(name: str) -> str:
    """The incarnation in `ckpt-<timeline>-<step>-<incarnation>`; "" for any other name."""
    parts = name.removeprefix(_PARTIAL).split("-", 3)
    return parts[3] if len(parts) == 4 and parts[0] == "ckpt" else ""
