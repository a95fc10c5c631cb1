"""Prometheus metrics of the whole run, from the coordinator's snapshot: one endpoint, no stale series.

A collector builds every family anew from the newest snapshot, so the series of a dead role are gone
with it. `FAMILIES` is also the metrics reference (docs/metrics.md is made from it).
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
    name: str  # without the counter's _total; a unit other than a count is its last word
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
    states = ("starting", "running", "stopping", "stopped", "finished", "failed")
    return [((state,), float(state == snapshot["state"])) for state in states]


def _known(key: str) -> Callable[[Snapshot], Samples]:
    """A figure that may be unknown as yet: no series then."""
    return lambda s: [] if s[key] is None else [((), float(s[key]))]


def _last_commit(snapshot: Snapshot) -> Samples:
    age_s = snapshot["counters"]["last_commit_age_s"]
    return [] if age_s is None else [((), float(age_s))]


def _part(part: str, key: str) -> Callable[[Snapshot], Samples]:
    """A figure of a part that a run may not have: no series then."""
    return lambda s: [((), float(s[part][key]))] if s[part] else []


def _evaluated(key: str) -> Callable[[Snapshot], Samples]:
    """A figure of the newest evaluation; no series before the first, or where it was not measured."""
    return lambda s: [((), float(s["evaluation"][key]))] if key in (s["evaluation"] or {}) else []


def _restarts(snapshot: Snapshot) -> Samples:
    """`joins` is by "target 0"; the first incarnation of a place is no restart."""
    for place, joins in snapshot["counters"]["joins"].items():
        role, _, index = place.partition(" ")
        yield (role, index), float(joins - 1)


def _waiting(snapshot: Snapshot) -> Samples:
    return [((r["role"], str(r["index"]), r["waits_for"]), 1.0) for r in snapshot["roles"] if r["waits_for"]]


ROLE = ("role", "index", "device")

FAMILIES: tuple[Family, ...] = (
    Family(
        "draftmill_run_info", "gauge", "always 1; names the run",
        ("run",), lambda s: [((s["run"],), 1.0)],
    ),
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
    Family("draftmill_samples_planned", "gauge", "samples of all epochs", (), _value("samples_total")),
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
        "draftmill_batches_failed", "gauge", "failed batches by cause: non_finite, poison, other",
        ("cause",), _map(lambda s: s["failed_by_cause"]),
    ),
    Family(
        "draftmill_batches_without_outcome", "gauge", "of a finished run: batches with no outcome, must be 0",
        (), _known("batches_without_outcome"),
    ),
    Family(
        "draftmill_batches_duplicated", "gauge", "after the end: outcomes beyond one a batch, must be 0",
        (), _known("batches_duplicated"),
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
        "draftmill_slots_used", "gauge", "slots that hold or will hold a pack",
        (), _counter("slots_used"),
    ),
    Family(
        "draftmill_credits", "gauge", "batches that the targets could be given now", (), _counter("credits")
    ),
    Family(
        "draftmill_arena_bytes", "gauge", "size of the arenas of this run in memory",
        (), _part("arena", "used"),
    ),
    Family(
        "draftmill_arena_free_bytes", "gauge", "free in the file system that holds arenas",
        (), _part("arena", "free"),
    ),
    Family(
        "draftmill_arena_limit_bytes", "gauge", "size of the file system that holds arenas",
        (), _part("arena", "limit"),
    ),
    Family(
        "draftmill_upload_pending", "gauge", "recorded checkpoints not yet at checkpoint.upload",
        (), _part("upload", "pending"),
    ),
    Family(
        "draftmill_upload_errors", "counter", "copies that failed; they are tried again",
        (), _part("upload", "errors"),
    ),
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
        "draftmill_role_restarts", "counter", "incarnations beyond the first of each place",
        ("role", "index"), _restarts,
    ),
    Family(
        "draftmill_role_recovery_seconds", "gauge", "from the last death in a place to its next report",
        ("role",), _map(lambda s: s["counters"]["recovery_s"]),
    ),
    Family(
        "draftmill_roles_wanted", "gauge", "places of the run: how many roles should live",
        ("role",), _map(lambda s: s["places"]),
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
        "draftmill_role_waiting", "gauge", "1 for what a role waits for most of its time, if it waits",
        ("role", "index", "reason"), _waiting,
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
    Family(
        "draftmill_accepted_tokens", "gauge", "1 + drafted tokens of a block before the first wrong one",
        (), _metric("accepted_length"),
    ),
    Family(
        "draftmill_evaluated_step", "gauge", "step of the checkpoint that was evaluated last",
        (), _evaluated("step"),
    ),
    Family(
        "draftmill_evaluated_acceptance_tokens", "gauge",
        "its acceptance length with the target on eval.prompts", (), _evaluated("acceptance_length"),
    ),
    Family(
        "draftmill_evaluated_best_acceptance_tokens", "gauge", "the best one's, kept in run.dir/best",
        (), _evaluated("best_acceptance_length"),
    ),
    Family(
        "draftmill_evaluated_loss", "gauge", "its loss on the held-out samples",
        (), _evaluated("held_out_loss"),
    ),
    Family(
        "draftmill_evaluated_accuracy_ratio", "gauge", "drafted tokens that equal the label, on those",
        (), _evaluated("held_out_accuracy"),
    ),
    Family(
        "draftmill_gpu_utilization_ratio", "gauge", "share of the last second in which a kernel ran",
        ROLE, _total("gpu_utilization_ratio"),
    ),
    Family(
        "draftmill_gpu_memory_used_bytes", "gauge", "memory in use on the GPU, by all processes",
        ROLE, _total("gpu_memory_used_bytes"),
    ),
    Family(
        "draftmill_gpu_memory_limit_bytes", "gauge", "memory of the GPU",
        ROLE, _total("gpu_memory_limit_bytes"),
    ),
    Family(
        "draftmill_gpu_power_watts", "gauge", "power draw of the GPU",
        ROLE, _total("gpu_power_watts"),
    ),
    Family(
        "draftmill_gpu_temperature_celsius", "gauge", "temperature of the GPU",
        ROLE, _total("gpu_temperature_celsius"),
    ),
)  # fmt: skip

_HEAD = """# Metrics

Generated by `draftmill metrics` from the code; a test fails when it lags. The coordinator serves
all of them at `/metrics`, in Prometheus' text format. Series of a role vanish with its incarnation; counters
of a role start at 0 with each. Figures that nobody has reported yet have no series; those of a GPU exist
where `nvidia-ml-py` is installed (extra `gpu`).

| metric | type | unit | labels | meaning |
|---|---|---|---|---|
"""
_UNITS = ("seconds", "bytes", "tokens", "ratio", "watts", "celsius", "packs", "steps")


def exposed_name(family: Family) -> str:
    """As it is scraped and queried."""
    return family.name + ("_total" if family.kind == "counter" else "")


def metrics_markdown() -> str:
    """docs/metrics.md"""
    rows = [
        f"| `{exposed_name(f)}` | {f.kind} | {unit(f)} | {', '.join(f.labels)} | {f.meaning} |"
        for f in FAMILIES
    ]
    return _HEAD + "\n".join(rows) + "\n"


def unit(family: Family) -> str:
    """The last word of a name, if it is one; "" is a plain number."""
    word = family.name.rpartition("_")[2]
    return word if word in _UNITS else ""


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
