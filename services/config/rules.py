"""Rules between options that need nothing but their numbers.

Plain functions of a Config; `broken_rules` calls them all, and `draftmill check` adds rules about the
world. `packs_needed` is asked again by the coordinator when the number of live targets changes, `rows_limit`
by the plan and by all who make room for a batch.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

from protocol.codec import MAX_MESSAGE_BYTES
from protocol.messages import MAX_ITEMS
from services.config.schema import Config

PADDED_LIMIT = 4
"""A batch of several samples pads to at most this many times the budget, which bounds the target's memory."""

ASSIGNMENT_BYTES, SAMPLE_BYTES = 512, 5
"""Of one batch in a target's orders, without its samples, and of one sample: ids below 2^32."""


class Broken(NamedTuple):
    """Paths of the options that do not fit together, and the rule with its remedy."""

    options: tuple[str, ...]
    rule: str


def broken_rules(config: Config) -> list[Broken]:
    """Every rule that `config` breaks."""
    rules = (
        _later_data,
        _bucket_edges,
        _devices,
        _drafter_layers,
        _recipe,
        _timeouts,
        _endpoint,
        _slots,
        _orders,
        _cap,
        _evaluator,
    )
    return [broken for rule in rules for broken in rule(config)]


def packs_needed(config: Config, targets: int) -> int:
    """Packs that must be able to exist at once, or the run could wait for itself for ever.

    One step (or what arrival order waits for), what each drafter holds beyond it, and one in each of
    `targets` forwards.
    """
    step = config.plan.packs_per_step
    waiting = max(step, config.plan.min_ready) if config.plan.order == "arrival" else step
    return waiting + config.drafter.prefetch_packs * config.drafter.count + targets


def rows_limit(edge: int, token_budget: int) -> int:
    """Samples that a batch padded to `edge` may hold: what a target warms up, and lays its slots out for."""
    return max(1, min(token_budget, PADDED_LIMIT * token_budget // edge, MAX_ITEMS))


def _later_data(config: Config) -> Iterator[Broken]:
    starts = [epoch for epoch, _ in config.data.takeovers]
    if any(low >= high for low, high in pairwise(starts)):
        yield Broken(("data.later",), "the epochs must ascend, each once; sort them")
    elif starts and starts[-1] >= config.run.epochs:
        last = config.run.epochs - 1
        rule = f"epochs are 0 to {last}, so the last dataset would never be used; raise run.epochs"
        yield Broken(("data.later", "run.epochs"), rule)


def _bucket_edges(config: Config) -> Iterator[Broken]:
    edges, budget = config.plan.bucket_edges, config.plan.token_budget
    if not edges:
        yield Broken(("plan.bucket_edges",), "at least one padded length is needed; e.g. 512,1024,2048")
    elif any(low >= high for low, high in pairwise(edges)):
        yield Broken(("plan.bucket_edges",), "padded lengths must ascend, each once; sort them")
    elif edges[-1] > budget:
        rule = (
            "a sample of the longest padded length must fit into one pack; raise the budget or drop the edge"
        )
        yield Broken(("plan.token_budget", "plan.bucket_edges"), rule)


def _devices(config: Config) -> Iterator[Broken]:
    for role, section in (("target", config.target), ("drafter", config.drafter)):
        if section.gpus and len(section.gpus) < section.count:
            rule = f"each {role} needs a device of the list; add devices or lower the count"
            yield Broken((f"{role}.gpus", f"{role}.count"), rule)
    evaluator = (config.evaluator.gpu,) if config.evaluator.gpu else ()
    for option, names in (
        ("target.gpus", config.target.gpus),
        ("drafter.gpus", config.drafter.gpus),
        ("evaluator.gpu", evaluator),
    ):
        if strange := [name for name in names if not re.fullmatch(r"cpu|(cuda:)?(0|[1-9][0-9]*)", name)]:
            rule = f"{', '.join(strange)}: a device is the number of a GPU as torch counts them, or cpu"
            yield Broken((option,), rule)


def _drafter_layers(config: Config) -> Iterator[Broken]:
    ids = config.drafter.target_layer_ids
    if any(low >= high for low, high in pairwise(ids)) or any(number < 0 for number in ids):
        yield Broken(("drafter.target_layer_ids",), "0-based layer numbers must ascend, each once; sort them")
    if config.drafter.sliding_layers > config.drafter.layers:
        rule = "no more layers can slide than there are; lower drafter.sliding_layers"
        yield Broken(("drafter.sliding_layers", "drafter.layers"), rule)


def _recipe(config: Config) -> Iterator[Broken]:
    for name, value in (("recipe.beta1", config.recipe.beta1), ("recipe.beta2", config.recipe.beta2)):
        if value >= 1.0:
            yield Broken((name,), "AdamW divides by 1 - beta; choose a value below 1")


def _timeouts(config: Config) -> Iterator[Broken]:
    timing = config.coordinator
    if timing.silence_s < 3 * timing.heartbeat_s:
        rule = "a member may miss two heartbeats before it is fenced; raise silence_s to 3 x heartbeat_s"
        yield Broken(("coordinator.silence_s", "coordinator.heartbeat_s"), rule)


def _endpoint(config: Config) -> Iterator[Broken]:
    endpoint = config.coordinator.endpoint
    if endpoint and not endpoint.startswith(("ipc://", "tcp://")):
        yield Broken(
            ("coordinator.endpoint",), "the control plane speaks ipc:// and tcp:// only; empty: ipc://"
        )
    if endpoint.startswith("tcp://") and not config.coordinator.keys and not config.coordinator.insecure:
        rule = (
            "tcp:// without CURVE keys lets anybody command the run; make keys with `draftmill keys`, use "
            "ipc://, or set coordinator.insecure on a closed network"
        )
        yield Broken(("coordinator.endpoint", "coordinator.keys"), rule)


def _slots(config: Config) -> Iterator[Broken]:
    targets, each = config.target.count, config.target.slots
    needed = packs_needed(config, targets)
    if targets * each < needed:
        enough = -(-needed // targets)
        rule = f"{targets} x {each} slots must hold {needed} packs ({_needed(config)}); raise it to {enough}"
        yield Broken(("target.slots", *_needed_from(config)), rule)


def _orders(config: Config) -> Iterator[Broken]:
    edges, slots = config.plan.bucket_edges, config.target.slots
    rows = max((rows_limit(edge, config.plan.token_budget) for edge in edges), default=1)
    most = MAX_MESSAGE_BYTES // (ASSIGNMENT_BYTES + rows * SAMPLE_BYTES) - 1
    if slots > most:
        rule = (
            f"orders to a target name the samples of all its packs, up to {rows} in each, and a message has "
            f"at most {MAX_MESSAGE_BYTES >> 20} MiB; lower target.slots to {most}, or raise the first edge"
        )
        yield Broken(("target.slots", "plan.token_budget", "plan.bucket_edges"), rule)


def _cap(config: Config) -> Iterator[Broken]:
    cap, needed = config.coordinator.in_flight_cap_packs, packs_needed(config, config.target.count)
    if 0 < cap < needed:
        rule = f"the cap must allow {needed} packs ({_needed(config)}); raise it to that"
        yield Broken(("coordinator.in_flight_cap_packs", *_needed_from(config)), rule)


def _evaluator(config: Config) -> Iterator[Broken]:
    if config.evaluator.count and not config.eval.prompts:
        rule = "an evaluator decodes held-out prompts; give a JSONL file of them, or set evaluator.count = 0"
        yield Broken(("evaluator.count", "eval.prompts"), rule)


def _needed(config: Config) -> str:
    step = "a step, or plan.min_ready" if config.plan.order == "arrival" else "a step"
    return f"{step}, the prefetch, one in each target's forward"


def _needed_from(config: Config) -> tuple[str, ...]:
    waits = ("plan.min_ready",) if config.plan.order == "arrival" else ()
    return ("target.count", "plan.packs_per_step", *waits, "drafter.prefetch_packs", "drafter.count")
