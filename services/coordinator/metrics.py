"""Prometheus metrics of the whole run, from the coordinator's snapshot: one endpoint, no stale series.

A collector builds every family anew from the newest snapshot, so the series of a dead role are gone
with it. `FAMILIES` is also the metrics reference (docs/metrics.md is generated from it).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Literal, NamedTuple

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

Snapshot = dict[str, Any]
Samples = Iterable[tuple[tuple[str, ...], float]]


class Family(NamedTuple):
    name: str  # without the counter's _total
    kind: Literal["counter", "gauge"]
    meaning: str
    labels: tuple[str, ...]
    samples: Callable[[Snapshot], Samples]


def _value(key: str) -> Callable[[Snapshot], Samples]:
    return lambda s: [((), float(s[key]))]


def _counter(key: str) -> Callable[[Snapshot], Samples]:
    return lambda s: [((), float(s["counters"][key]))]


def _map(read: Callable[[Snapshot], dict[str, float]]) -> Callable[[Snapshot], Samples]:
    return lambda s: [((key,), float(value)) for key, value in read(s).items()]


def _metric(key: str) -> Callable[[Snapshot], Samples]:
    """A figure of the last step whose figures are known; no series before the first."""
    return lambda s: [((), float(s["metrics"][key]))] if key in s["metrics"] else []


def _roles(read: Callable[[Snapshot], float]) -> Callable[[Snapshot], Samples]:
    return lambda s: [((r["role"], str(r["index"]), r["device"]), float(read(r))) for r in s["roles"]]


def _total(name: str) -> Callable[[Snapshot], Samples]:
    return lambda s: [
        ((r["role"], str(r["index"]), r["device"]), float(r["totals"][name]))
        for r in s["roles"]
        if name in r["totals"]
    ]


def _phases(snapshot: Snapshot) -> Samples:
    return [
        ((r["role"], str(r["index"]), phase), float(seconds))
        for r in snapshot["roles"]
        for phase, seconds in r["phases"].items()
    ]


def _state(snapshot: Snapshot) -> Samples:
    states = ("starting", "running", "stopping", "finished", "failed")
    return [((state,), float(state == snapshot["state"])) for state in states]


def _last_commit(snapshot: Snapshot) -> Samples:
    age_s = snapshot["counters"]["last_commit_age_s"]
    return [] if age_s is None else [((), float(age_s))]


ROLE = ("role", "index", "device")

FAMILIES: tuple[Family, ...] = (
    Family("draftmill_run_state", "gauge", "1 for the state the run is in", ("state",), _state),
    Family(
        "draftmill_step", "gauge", "committed optimizer steps on the current timeline",
        (), _value("step"),
    ),
    Family(
        "draftmill_steps_planned", "gauge", "optimizer steps of the whole run",
        (), _value("total_steps"),
    ),
    Family("draftmill_epoch", "gauge", "epoch of the current step, from 0", (), _value("epoch")),
    Family(
        "draftmill_timeline", "gauge", "history of weights; grows by a roll-back",
        (), _value("timeline"),
    ),
    Family("draftmill_samples_planned", "gauge", "samples x epochs", (), _value("samples_total")),
    Family(
        "draftmill_samples_committed", "gauge", "samples in the weights",
        (), _value("samples_committed"),
    ),
    Family("draftmill_samples_failed", "gauge", "samples listed as failed", (), _value("samples_failed")),
    Family(
        "draftmill_batches", "gauge", "batches of the run by state",
        ("state",), _map(lambda s: s["batches"]),
    ),
    Family(
        "draftmill_in_flight_packs", "gauge", "packs between order and outcome",
        (), _value("in_flight_packs"),
    ),
    Family(
        "draftmill_in_flight_cap_packs", "gauge", "cap on packs in flight; 0: none", (),
        _value("in_flight_cap_packs"),
    ),
    Family("draftmill_in_flight_bytes", "gauge", "payload bytes in flight", (), _value("in_flight_bytes")),
    Family(
        "draftmill_in_flight_cap_bytes", "gauge", "cap on bytes in flight; 0: none", (),
        _value("in_flight_cap_bytes"),
    ),
    Family("draftmill_slots", "gauge", "slots of all living targets", (), _counter("slots")),
    Family(
        "draftmill_capped", "gauge", "1 while the in-flight cap holds back assignments",
        (), _counter("capped"),
    ),
    Family(
        "draftmill_committed_steps", "counter", "steps committed by this coordinator",
        (), _counter("committed_steps"),
    ),
    Family(
        "draftmill_committed_tokens", "counter", "real tokens of committed packs",
        (), _counter("committed_tokens"),
    ),
    Family("draftmill_last_commit_age_seconds", "gauge", "since the last commit", (), _last_commit),
    Family(
        "draftmill_aborted_tries", "counter", "step tries aborted before their commit",
        (), _counter("aborted_tries"),
    ),
    Family("draftmill_roll_backs", "counter", "returns to a checkpoint", (), _counter("roll_backs")),
    Family("draftmill_lost_steps", "counter", "steps undone by roll-backs", (), _counter("lost_steps")),
    Family(
        "draftmill_evictions", "counter", "ready packs that gave way to an earlier one",
        (), _counter("evictions"),
    ),
    Family(
        "draftmill_stale_messages", "counter", "messages of an older level or incarnation",
        (), _counter("stale_messages"),
    ),
    Family(
        "draftmill_refused_messages", "counter", "bytes on the socket that are no message",
        (), _counter("refused_messages"),
    ),
    Family(
        "draftmill_role_deaths", "counter", "incarnations gone",
        ("role",), _map(lambda s: s["counters"]["deaths"]),
    ),
    Family(
        "draftmill_role_restarts", "gauge", "incarnations beyond the first of each place",
        (), _value("restarts"),
    ),
    Family(
        "draftmill_role_up", "gauge", "1 for every living role, 0 while it starts",
        ROLE, _roles(lambda r: r["state"] == "ready"),
    ),
    Family(
        "draftmill_role_silent_seconds", "gauge", "since the role's last message",
        ROLE, _roles(lambda r: r["silent_s"]),
    ),
    Family(
        "draftmill_role_tokens", "counter", "real tokens processed by this incarnation",
        ROLE, _total("tokens_total"),
    ),
    Family(
        "draftmill_role_packs", "counter", "packs processed by this incarnation",
        ROLE, _total("packs_total"),
    ),
    Family(
        "draftmill_role_bytes", "counter", "payload bytes written by this incarnation",
        ROLE, _total("bytes_total"),
    ),
    Family(
        "draftmill_role_phase_seconds", "counter", "where the time of a role went",
        ("role", "index", "phase"), _phases,
    ),
    Family("draftmill_loss", "gauge", "training loss of the last reported step", (), _metric("loss")),
    Family("draftmill_learning_rate", "gauge", "learning rate of that step", (), _metric("lr")),
    Family(
        "draftmill_gradient_norm", "gauge", "gradient norm of that step before clipping",
        (), _metric("grad_norm"),
    ),
    Family(
        "draftmill_accuracy_ratio", "gauge", "drafted tokens that equal the label",
        (), _metric("accuracy"),
    ),
)  # fmt: skip


class RunCollector(Collector):
    """Yields every family from what `read` returns; nothing before the first snapshot."""

    def __init__(self, read: Callable[[], Snapshot | None]) -> None:
        self._read = read

    def collect(self) -> Iterable[Metric]:
        snapshot = self._read()
        if snapshot is None:
            return
        for family in FAMILIES:
            kind = CounterMetricFamily if family.kind == "counter" else GaugeMetricFamily
            metric = kind(family.name, family.meaning, labels=family.labels)
            for labels, value in family.samples(snapshot):
                metric.add_metric(labels, value)
            yield metric


def registry(read: Callable[[], Snapshot | None]) -> CollectorRegistry:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(RunCollector(read))
    return registry
