"""The table that `draftmill plan` prints."""

from __future__ import annotations

from rich.console import RenderableType
from rich.table import Table

from services.config.schema import Config
from services.data.forecast import Forecast
from services.data.gpu_memory import Memory
from services.local.view import duration, size


def show(made: Forecast, config: Config) -> RenderableType:
    """The table that `draftmill plan` prints."""
    counts, table = made.counts, Table(show_header=False)
    low, mean, high = counts.tokens_per_pack
    budget, epoch_bytes = config.plan.token_budget, size(made.bytes_per_token * counts.tokens)
    slots = f"{config.target.slots} slots of {size(made.slot_bytes)}"
    padding = f"{counts.padding_share:.1%} of the target's forward"
    rows = [
        ("samples", f"{counts.samples:,}, {counts.tokens:,} tokens, {counts.supervised:,} supervised"),
        ("packs an epoch", f"{counts.packs:,} of {mean:,} tokens ({low:,} to {high:,}; budget {budget:,})"),
        ("padding", f"{padding}, which has up to {counts.largest_forward:,} positions"),
        ("steps", f"{counts.steps:,} in {config.run.epochs} epochs, {counts.steps_per_epoch:,} in the first"),
        ("transfer", f"{made.bytes_per_token:,} bytes a token, {epoch_bytes} an epoch"),
        ("arenas", f"{size(made.arena_bytes)} of {config.arena.dir}: two a target, {slots} each"),
        ("a target", _memory_row(made.target)),
        ("a drafter", f"{made.drafter_parameters / 1e6:,.1f} M parameters; {_memory_row(made.drafter)}"),
        *_time_rows(made, config),
    ]  # fmt: skip
    for name, text in rows:
        table.add_row(name, text)
    return table


def _time_rows(made: Forecast, config: Config) -> list[tuple[str, str]]:
    if made.hours is None or made.targets_per_drafter is None or made.advised is None:
        return [("time", "unknown; give --target-rate and --drafter-rate, as `draftmill status` shows them")]
    rate = made.counts.tokens_of_all_epochs / (made.hours * 3600)
    (targets, drafters), each = made.advised, made.targets_per_drafter
    took = duration(3600 * made.hours)
    return [
        ("time", f"{took} at {rate:,.0f} tok/s, {size(rate * made.bytes_per_token)}/s"),
        (
            "advice",
            f"targets: {targets}, drafters: {drafters} is the fastest of {targets + drafters} roles; "
            f"{each:.2f} targets keep a drafter busy",
        ),
    ]  # fmt: skip


def _memory_row(memory: Memory) -> str:
    parts = ", ".join(f"{name} {size(taken)}" for name, taken in memory.parts.items() if taken)
    return f"about {size(memory.total)}: {parts}"
