"""A run at a glance: a live table on a terminal, one plain line elsewhere. Pure functions of a Status.

Costs 3 ms to draw, once a second.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from services.local.status import Role, Status

_EVENTS = 6
_STATES = {
    "running": "green",
    "finished": "green",
    "stopping": "yellow",
    "stopped": "yellow",
    "failed": "red",
}


def render(status: Status | None, restarts: Mapping[str, int], note: str = "") -> RenderableType:
    """The live view. `restarts` by role name as RoleId writes it; `note` is what `up` itself does."""
    if status is None:
        return Group(Text("waiting for the coordinator", style="yellow"), Text(note, style="dim"))
    parts: list[RenderableType] = [
        _headline(status, sum(restarts.values())),
        _progress(status),
        _flow(status),
    ]
    if status.roles:
        parts.append(_roles(status, restarts))
    parts += [Text(f"{_clock(event.at)} {event.text}", style="dim") for event in status.events[-_EVENTS:]]
    if status.reason or note:
        parts.append(Text(" ".join(filter(None, (status.reason, note))), style="yellow"))
    return Group(*parts)


def plain_line(status: Status | None, restarts: int) -> str:
    """Everything of the view that fits into one line of a log."""
    if status is None:
        return f"waiting for the coordinator restarts={restarts}"
    waits = ", ".join(f"{_name(role)} for {role.waits_for}" for role in status.roles if role.waits_for)
    fields = {
        "state": status.state,
        "epoch": f"{min(status.epoch + 1, status.epochs)}/{status.epochs}",
        "step": f"{status.step}/{status.total_steps}",
        "samples": f"{status.samples_committed}+{status.samples_failed}/{status.samples_total}",
        "eta": duration(status.eta_s),
        "target": f"{status.target_tokens_per_s:.0f}tok/s",
        "drafter": f"{status.drafter_tokens_per_s:.0f}tok/s",
        "in_flight": _against_cap(status),
        "ready": str(status.batches.ready),
        "loss": "-" if status.loss is None else f"{status.loss:.3f}",
        "restarts": str(restarts),
    }
    line = " ".join(f"{name}={value}" for name, value in fields.items())
    return f"{line} waits: {waits}" if waits else line


def duration(seconds: float | None) -> str:
    """`1h02m`, `3m20s`, `45s`; `-` when unknown."""
    if seconds is None:
        return "-"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}h{minutes:02}m"
    return f"{minutes}m{rest:02}s" if minutes else f"{rest}s"


def size(count: float) -> str:
    """Bytes in binary units, to three digits: `1.5 GiB`, `1023 B`."""
    unit = "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if count < 1024 or unit == "TiB":
            break
        count /= 1024
    return f"{count:.0f} {unit}" if count >= 100 else f"{count:.3g} {unit}"


def _headline(status: Status, restarts: int) -> RenderableType:
    line = Text.assemble((status.state, _STATES.get(status.state, "")), f"  {status.run}")
    line.append(
        f"  epoch {min(status.epoch + 1, status.epochs)}/{status.epochs}  up {duration(status.wall_s)}"
    )
    if status.timeline:
        line.append(f"  timeline {status.timeline}", style="yellow")
    if restarts:
        line.append(f"  restarts {restarts}", style="yellow")
    return line


def _progress(status: Status) -> RenderableType:
    grid = Table.grid(padding=(0, 1))
    bar = ProgressBar(total=max(1, status.total_steps), completed=status.step, width=40)
    failed = f", {status.samples_failed} failed" if status.samples_failed else ""
    samples = f"{status.samples_committed}/{status.samples_total} samples{failed}"
    grid.add_row(bar, f"step {status.step}/{status.total_steps}", f"ETA {duration(status.eta_s)}", samples)
    return grid


def _flow(status: Status) -> RenderableType:
    grid = Table.grid(padding=(0, 2))
    batches = status.batches
    ahead = f"pending {batches.pending}  assigned {batches.assigned}"
    pool = f"{ahead}  ready {batches.ready}  leased {batches.leased}"
    grid.add_row("pool", pool, f"in flight {_against_cap(status)} packs", size(status.in_flight_bytes))
    loss = "-" if status.loss is None else f"{status.loss:.4f}"
    rate = "-" if status.lr is None else f"{status.lr:.3g}"
    targets, drafters = f"{status.target_tokens_per_s:,.0f}", f"{status.drafter_tokens_per_s:,.0f}"
    grid.add_row("tok/s", f"targets {targets}  drafters {drafters}", f"loss {loss}", f"lr {rate}")
    return grid


def _roles(status: Status, restarts: Mapping[str, int]) -> RenderableType:
    table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0))
    for title in ("role", "device", "state", "tok/s", "waits for", "slots", "restarts"):
        table.add_column(title, justify="right" if title in ("tok/s", "restarts") else "left")
    for role in status.roles:
        silence = f" silent {role.silent_s:.0f}s" if role.silent_s > 5 else ""
        name, rate = _name(role), f"{role.tokens_per_s:,.0f}"
        again = str(restarts.get(name, 0) or "")
        table.add_row(
            name, role.device, role.state + silence, rate, role.waits_for or "", _slots(role), again
        )
    return table


def _slots(role: Role) -> str:
    counts: dict[str, int] = {}
    for slot in role.slots:
        counts[slot.state] = counts.get(slot.state, 0) + 1
    return " ".join(f"{count} {state}" for state, count in sorted(counts.items()))


def _against_cap(status: Status) -> str:
    return f"{status.in_flight_packs}/{status.in_flight_cap_packs or '-'}"


def _name(role: Role) -> str:
    return f"{role.role}-{role.index}"


def _clock(unix_s: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(unix_s))
