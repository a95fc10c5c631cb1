"""The evaluator's newest figures, for status and metrics: the last line of run.dir/acceptance.jsonl.

The evaluator is no member of the run and says nothing to the coordinator. Its file is looked at a few times a
second (2 us) and read when it has grown, and only numbers are taken from it, so that nothing which stands
there can hurt a run.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

HISTORY = "acceptance.jsonl"
_TAIL_BYTES = 65536
_TAKEN = (
    "timeline", "step", "acceptance_length", "best_acceptance_length", "best_step",
    "held_out_loss", "held_out_accuracy", "seconds", "at",
)  # fmt: skip


class Evaluation:
    """Figures by name, of the last whole line."""

    def __init__(self, run_dir: Path) -> None:
        self._file = run_dir / HISTORY
        self._size = -1
        self._newest: dict[str, float] = {}

    def newest(self) -> dict[str, float] | None:
        """None before the first evaluation; what was not measured is missing."""
        try:
            size = self._file.stat().st_size
            if size != self._size:
                self._size = size
                self._newest = self._read(size) or self._newest
        except OSError:  # not there yet, or no file that can be read
            return None
        return self._newest or None

    def _read(self, size: int) -> dict[str, float]:
        with self._file.open("rb") as file:
            file.seek(max(0, size - _TAIL_BYTES))
            whole = file.read().rpartition(b"\n")[0]
        try:
            return _figures(json.loads(whole.rpartition(b"\n")[2] or b"{}"))
        except (ValueError, RecursionError, OverflowError):  # no JSON, too deep, an integer beyond any float
            return {}


def _figures(line: object) -> dict[str, float]:
    if not isinstance(line, dict):
        return {}
    taken = {name: line.get(name) for name in _TAKEN}
    return {name: v for name, v in taken.items() if isinstance(v, int | float) and math.isfinite(v)}
