"""Where `up` shows a run: redrawn in place on a terminal, a line every few seconds elsewhere."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.live import Live
from rich.markup import escape

from services.local.status import Status
from services.local.view import plain_line, render

LINE_EVERY_S = 5.0


class Display(Protocol):
    """`show` is called about once a second, `say` for what must stay readable."""

    def show(self, status: Status | None, restarts: Mapping[str, int], note: str) -> None: ...

    def say(self, text: str) -> None: ...


class Terminal:
    """Keeps the view at the bottom of a terminal."""

    def __init__(self, live: Live) -> None:
        self._live = live

    def show(self, status: Status | None, restarts: Mapping[str, int], note: str) -> None:
        self._live.update(render(status, restarts, note), refresh=True)

    def say(self, text: str) -> None:
        self._live.console.print(f"[dim]{time.strftime('%H:%M:%S')}[/] {escape(text)}", highlight=False)


class Lines:
    """Plain lines for logs and pipes: every few seconds, and when the run's state changes."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._next_s = 0.0
        self._state = ""

    def show(self, status: Status | None, restarts: Mapping[str, int], note: str) -> None:
        state = status.state if status else ""
        if time.monotonic() < self._next_s and state == self._state:
            return
        self.say(f"{plain_line(status, sum(restarts.values()))} {note}".rstrip())
        self._next_s, self._state = time.monotonic() + LINE_EVERY_S, state

    def say(self, text: str) -> None:
        self._console.print(
            f"{time.strftime('%H:%M:%S')} {text}", markup=False, highlight=False, soft_wrap=True
        )


@contextmanager
def display(console: Console) -> Iterator[Display]:
    """The one that fits `console`."""
    if not console.is_terminal:
        yield Lines(console)
        return
    with Live(console=console, auto_refresh=False, vertical_overflow="crop") as live:
        yield Terminal(live)
