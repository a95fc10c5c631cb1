"""Where a role's seconds went: one line `profile` in the log for each window of its totals."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping

log = logging.getLogger(__name__)


class Window:
    """Logs what the totals gained every `interval_s` seconds (0: never), while `look` is called."""

    def __init__(self, interval_s: float, now_s: Callable[[], float] = time.monotonic) -> None:
        self._interval_s, self._now_s = interval_s, now_s
        self._begun_s, self._before = now_s(), dict[str, float]()

    def look(self, totals: Mapping[str, float]) -> None:
        """Monotone totals: `packs_total`, `tokens_total`, maybe `bytes_total`, `phase_<name>_seconds`."""
        elapsed_s = self._now_s() - self._begun_s
        if not self._interval_s or elapsed_s < self._interval_s:
            return
        gained = {name: value - self._before.get(name, 0.0) for name, value in totals.items()}
        figures = {
            "window_s": round(elapsed_s, 1),
            "packs": int(gained["packs_total"]),
            "tokens_per_s": round(gained["tokens_total"] / elapsed_s, 1),
        }
        if "bytes_total" in gained:
            figures["gb_per_s"] = round(gained["bytes_total"] / elapsed_s / 1e9, 3)
        phases = {
            name.removeprefix("phase_").removesuffix("_seconds") + "_s": round(value, 3)
            for name, value in gained.items()
            if name.startswith("phase_")
        }
        log.info("profile", extra=figures | phases)
        self._begun_s, self._before = self._now_s(), dict(totals)
