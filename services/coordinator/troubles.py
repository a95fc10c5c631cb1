"""States that cannot be read from a disk, or written to it: how long that is put up with. Decisions only.

A load: as long as another drafter may succeed, who would give the state to the others; then the run has
failed. A save: while the run goes on a later checkpoint makes up for it, but a stop has no later one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from protocol.messages import Failure

LOAD_PATIENCE_S = 20.0
"""For how long no drafter may be able to load a recorded checkpoint: a disk may be away for a moment."""


class Troubles:
    """`unsaved`: why a stop has no checkpoint to end on yet, "" if nothing is wrong."""

    def __init__(self) -> None:
        self.unsaved = ""
        self._unsaved_from_s = 0.0
        self._cannot_load: dict[str, tuple[float, str]] = {}  # drafters without a state: since, and why

    def heard(self, name: str, *, has_state: bool, failures: Iterable[Failure], now_s: float) -> None:
        """What a drafter reports, every time."""
        reasons = [failure.reason for failure in failures if failure.order == "adopt"]
        if has_state or not reasons:
            self.forget(name)
        else:
            self._cannot_load.setdefault(name, (now_s, reasons[0]))

    def forget(self, name: str) -> None:
        self._cannot_load.pop(name, None)

    def not_saved(self, failures: Iterable[Failure], now_s: float) -> None:
        """Of the checkpoint that a stop is to end on."""
        reasons = [failure.reason for failure in failures if failure.order == "save"]
        if reasons and not self.unsaved:
            self.unsaved, self._unsaved_from_s = reasons[0], now_s

    def saved(self) -> None:
        self.unsaved = ""

    def unsaved_for_s(self, now_s: float) -> float:
        return now_s - self._unsaved_from_s if self.unsaved else 0.0

    def forgive(self, stall_s: float) -> None:
        """The coordinator itself did not listen for so long."""
        self._unsaved_from_s += stall_s
        self._cannot_load = {name: (s + stall_s, why) for name, (s, why) in self._cannot_load.items()}

    def nobody_loads(self, drafters: Collection[str], now_s: float, *, from_disk: bool) -> str:
        """Why no drafter will have a state, or "". Initial weights are the same at every try."""
        if not drafters or self._cannot_load.keys() != set(drafters):
            return ""
        since_s, error = max(self._cannot_load.values())
        patience_s = LOAD_PATIENCE_S if from_disk else 0.0
        return f"no drafter could load its state: {error}" if now_s - since_s >= patience_s else ""
