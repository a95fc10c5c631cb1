"""What `draftmill status` prints, and the rates that `draftmill plan` may take from a run."""

from __future__ import annotations

from pathlib import Path

from rich.console import Group, RenderableType
from rich.table import Table

from protocol.errors import PeerGone
from services.local.advice import advice, side
from services.local.status import OVER, Status, fetch, read_address
from services.local.view import render


def status_report(status: Status) -> RenderableType:
    """The live view, then every slot with its holder, checkpoints, and advice or how the run ended."""
    slots = Table(box=None, header_style="dim", padding=(0, 2, 0, 0))
    for title in ("role", "epoch", "batch", "state", "held by"):
        slots.add_column(title)
    for role in status.roles:
        for slot in role.slots:
            epoch, batch = slot.batch
            name = f"{role.role}-{role.index}"  # epochs count from 1, as in the view above
            slots.add_row(name, str(epoch + 1), str(batch), slot.state, slot.holder or "")
    outcomes = f"ledger: {status.batches.committed} batches committed, {status.batches.failed} failed"
    kept = ", ".join(checkpoint.name for checkpoint in status.checkpoints) or "none"
    lines = [outcomes, f"checkpoints: {kept}", *_evaluated(status)]
    lines.append(ending(status) if status.state in OVER else advice(status))
    return Group(render(status, {}), slots, *lines)


def ending(status: Status) -> str:
    """One line: how a run that is over ended, and what follows from it."""
    at = f"step {status.step} of {status.total_steps}"
    if status.state == "finished":
        return f"finished: {status.step} steps, {status.samples_committed} samples"
    if status.state == "failed":
        return f"failed at {at}: {status.reason}"
    if status.reason:
        saved = max((checkpoint.step for checkpoint in status.checkpoints), default=0)
        return (
            f"{status.state} at {at}, not saved ({status.reason}); `draftmill up` resumes from step {saved}"
        )
    return f"{status.state} at {at}; `draftmill up` resumes it"


def _evaluated(status: Status) -> list[str]:
    """What the evaluator found last, if the run has one."""
    found = status.evaluation
    if found is None or found.acceptance_length is None:
        return []
    line = f"evaluated: step {found.step}, acceptance length {found.acceptance_length:.3f}"
    if found.held_out_loss is not None:
        line += f", held-out loss {found.held_out_loss:.3f}"
    if found.best_acceptance_length is not None:
        line += f"; best {found.best_acceptance_length:.3f} at step {found.best_step}"
    return [line]


def live_rates(run_dir: Path) -> tuple[float, float] | None:
    """tok/s of one target and of one drafter that never wait, from a live run; None: there is none."""
    try:
        status = fetch(read_address(run_dir))
    except PeerGone:
        return None
    targets, drafters = side(status, "target"), side(status, "drafter")
    if targets is None or drafters is None or not targets.capacity or not drafters.capacity:
        return None
    return targets.capacity, drafters.capacity
