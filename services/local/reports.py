"""What `draftmill status` and `draftmill plan` print."""

from __future__ import annotations

from pathlib import Path

from rich.console import Group, RenderableType
from rich.table import Table

from protocol.errors import PeerGone
from services.config.schema import Config
from services.data.dataset import Dataset
from services.data.plan import Schedule, padded_length
from services.local.advice import advice
from services.local.status import Status, fetch, read_address
from services.local.view import render


def status_report(status: Status) -> RenderableType:
    """The live view, then every slot with its holder, checkpoints and advice."""
    slots = Table(box=None, header_style="dim", padding=(0, 2, 0, 0))
    for title in ("role", "epoch", "batch", "state", "held by"):
        slots.add_column(title)
    for role in status.roles:
        for slot in role.slots:
            epoch, batch = map(str, slot.batch)
            slots.add_row(f"{role.role}-{role.index}", epoch, batch, slot.state, slot.holder or "")
    outcomes = f"ledger: {status.batches.committed} batches committed, {status.batches.failed} failed"
    kept = ", ".join(checkpoint.name for checkpoint in status.checkpoints) or "none"
    return Group(render(status, {}), slots, outcomes, f"checkpoints: {kept}", advice(status))


def live_advice(run_dir: Path) -> str:
    """Advice from the run in `run_dir`, if it runs."""
    try:
        return advice(fetch(read_address(run_dir)))
    except PeerGone:
        return "none: the run must be under way for that"


def plan_report(config: Config, dataset: Dataset) -> list[tuple[str, str]]:
    """The first epoch's plan in numbers, as (name, value)."""
    schedule = Schedule(config, dataset)
    batches = schedule.epoch(0).batches
    tokens = [int(dataset.lengths[list(batch)].sum()) for batch in batches]
    padded = sum(
        len(batch) * padded_length(int(dataset.lengths[list(batch)].max()), config.plan.bucket_edges)
        for batch in batches
    )
    fill = sum(tokens) / (len(batches) * config.plan.token_budget)
    return [
        ("samples", f"{len(dataset):,} in each of {config.run.epochs} epochs"),
        (
            "batches",
            f"{len(batches):,} an epoch, {min(tokens):,} to {max(tokens):,} tokens, {fill:.0%} of the budget",
        ),
        ("padding", f"{padded / sum(tokens) - 1:.1%} of the targets' rows"),
        ("steps", f"{schedule.steps_in_epoch(0):,} an epoch, {schedule.total_steps:,} in all"),
    ]
