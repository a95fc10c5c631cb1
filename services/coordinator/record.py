"""What happened, for people and dashboards: rates, events, last metrics. Decides nothing."""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from dataclasses import dataclass

from protocol.messages import StepMetrics, StepTry
from services.coordinator.members import DrafterMember, TargetMember

log = logging.getLogger(__name__)

EVENTS_KEPT = 50


@dataclass(frozen=True)
class Event:
    at_unix_s: float
    text: str


class Record:
    """Counters since this coordinator's start, the newest step metrics, the last events."""

    def __init__(self, samples_total: int) -> None:
        self.samples_total = samples_total
        self.events: deque[Event] = deque(maxlen=EVENTS_KEPT)
        self.stale_messages = 0
        self.refused_messages = 0
        self.aborted_tries = 0
        self.roll_backs = 0
        self._rolled_back_to: int | None = None
        self.lost_steps = 0
        self.joins: Counter[str] = Counter()
        self.deaths: Counter[str] = Counter()
        self.committed_steps = 0
        self.committed_tokens = 0
        self.last_commit_s: float | None = None
        self.commit_times: deque[float] = deque(maxlen=64)
        self.latest: StepMetrics | None = None
        self._new_metrics: list[StepMetrics] = []
        self.recovery_s: dict[str, float] = {}  # by role: from the last death of a place to its next report
        self._vacant_since_s: dict[tuple[str, int], float] = {}
        self._places: dict[str, tuple[str, int]] = {}
        self._errors: dict[str, str] = {}

    def event(self, text: str) -> None:
        self.events.append(Event(time.time(), text))
        log.info("event", extra={"text": text})

    def joined(self, member: TargetMember | DrafterMember) -> None:
        self.joins[f"{member.role} {member.index}"] += 1
        self._places[member.incarnation] = (member.role, member.index)
        self.event(f"{member.role} {member.index} joined as {member.incarnation}")

    def left(self, now_s: float, name: str, reason: str) -> None:
        place = self._places.get(name, (name.split("-")[0], 0))
        self.deaths[place[0]] += 1
        self._vacant_since_s.setdefault(place, now_s)
        self.event(f"{name} is gone: {reason}")

    def ready(self, now_s: float, member: TargetMember | DrafterMember) -> None:
        """The first report of an incarnation: its place works again."""
        since_s = self._vacant_since_s.pop((member.role, member.index), None)
        if since_s is not None:
            self.recovery_s[member.role] = now_s - since_s

    @property
    def restarts(self) -> int:
        """Incarnations beyond the first in each place."""
        return sum(count - 1 for count in self.joins.values())

    def committed(self, now_s: float, *, tokens: int) -> None:
        self.committed_steps += 1
        self.committed_tokens += tokens
        self.last_commit_s = now_s
        self.commit_times.append(now_s)

    def seconds_per_step(self) -> float | None:
        if len(self.commit_times) < 2:
            return None
        return (self.commit_times[-1] - self.commit_times[0]) / (len(self.commit_times) - 1)

    def aborted(self, step_try: StepTry, reason: str) -> None:
        self.aborted_tries += 1
        self.event(f"step {step_try.step}: try aborted, {reason}")

    def rolled_back(self, timeline: int, step: int, lost: int) -> None:
        self.roll_backs += 1
        self.lost_steps += lost
        self.event(f"rolled back {lost} steps to the checkpoint of step {step}: timeline {timeline}")
        if step == self._rolled_back_to:
            self.event(
                f"no checkpoint since the last roll-back to step {step}: drafters die more often than "
                "checkpoint.every_steps; lower it, or the run may never end",
            )
        self._rolled_back_to = step

    def error(self, name: str, error: str) -> bool:
        """True when this error of this member is news."""
        if self._errors.get(name) == error:
            return False
        self._errors[name] = error
        self.event(f"{name}: {error}")
        return True

    def metrics(self, metrics: StepMetrics) -> None:
        """Keep each step's figures once, in order; reports repeat the last few."""
        if self.latest is None or metrics.at > self.latest.at:
            self.latest = metrics
            self._new_metrics.append(metrics)

    def take_metrics(self) -> list[StepMetrics]:
        """Figures not taken before, for whoever writes them to disk."""
        taken, self._new_metrics = self._new_metrics, []
        return taken
