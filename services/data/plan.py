"""The epoch plan: which samples travel together, and in which order. Pure, torch-free, lengths only.

    shuffle -> bucket by padded length -> fill batches up to the token budget -> shuffle batches

The plan of an epoch is a function of (seed, epoch, dataset fingerprint, bucket edges, token budget)
and nothing else, so coordinator and drafters work it out for themselves and agree, whatever happened
before. Batches hold samples of one bucket, so the target pads little; their real tokens come near
the budget and never exceed it, so packs are of even size. Random keys are raw Philox output, a
stream that numpy promises never to change, sorted stably: same plan on every machine and version.

    a million samples, budget 4096   1.1 s an epoch, batches 88 % full; budget 16384: 0.7 s, 98 %
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from protocol.errors import ConfigError, DataError
from services import seeds
from services.config.rules import rows_limit
from services.config.schema import Config
from services.data.training_data import TrainingData

OPEN_BATCHES = 8
"""Batches of a bucket that are filled at a time: more fill better, and cost time."""


@dataclass(frozen=True, slots=True)
class EpochPlan:
    """The batches of one epoch as sample ids; a batch's index is its plan position."""

    epoch: int
    batches: tuple[tuple[int, ...], ...]


def epoch_plan(
    *,
    seed: int,
    epoch: int,
    fingerprint: str,
    lengths: np.ndarray,
    bucket_edges: Sequence[int],
    token_budget: int,
) -> EpochPlan:
    """Every sample exactly once, in batches of at most `token_budget` real tokens.

    `lengths` int32 [samples]. Raises DataError for a sample that fits no batch, ConfigError for bad edges.
    """
    check_lengths(lengths, bucket_edges, token_budget)
    order = _permutation(len(lengths), "plan samples", seed, epoch, fingerprint)
    bucket_of = np.searchsorted(np.asarray(bucket_edges), lengths)[order]
    batches: list[tuple[int, ...]] = []
    for bucket, edge in enumerate(bucket_edges):
        members = order[bucket_of == bucket]
        limit = rows_limit(edge, token_budget)
        batches += _fill(members.tolist(), lengths[members].tolist(), token_budget, limit)
    shuffled = _permutation(len(batches), "plan batches", seed, epoch, fingerprint)
    return EpochPlan(epoch, tuple(batches[at] for at in shuffled.tolist()))


def padded_length(length: int, bucket_edges: Sequence[int]) -> int:
    """The bucket edge that a sample of `length` tokens is padded to."""
    return bucket_edges[bisect_left(bucket_edges, length)]


def check_lengths(lengths: np.ndarray, bucket_edges: Sequence[int], token_budget: int) -> None:
    """Raise DataError naming the longest sample if no batch can hold it, ConfigError for bad edges."""
    if list(bucket_edges) != sorted(set(bucket_edges)) or not bucket_edges or bucket_edges[0] < 1:
        raise ConfigError(f"plan.bucket_edges = {tuple(bucket_edges)}: must be positive and ascending")
    if len(lengths) == 0:
        raise DataError("the dataset is empty; a plan needs at least one sample")
    shortest, longest = int(np.argmin(lengths)), int(np.argmax(lengths))
    if lengths[shortest] < 1:
        raise DataError(f"sample {shortest} has no tokens; prepare the dataset again")
    for option, limit in (
        ("plan.token_budget", token_budget),
        ("the last of plan.bucket_edges", bucket_edges[-1]),
    ):
        if lengths[longest] > limit:
            raise DataError(
                f"sample {longest} has {lengths[longest]} tokens, more than {option} = {limit}; "
                f"raise it, or prepare the data with a smaller data.max_length"
            )


def _permutation(count: int, purpose: str, *parts: int | str) -> np.ndarray:
    """int64 [count]: a permutation drawn from (purpose, parts)."""
    keys = np.random.Philox(key=seeds.seed(purpose, *parts)).random_raw(count)
    return np.argsort(keys, kind="stable")


def _fill(samples: list[int], lengths: list[int], token_budget: int, rows: int) -> list[tuple[int, ...]]:
    """Put each sample into the fullest open batch that takes it; close the fullest when none does."""
    free: list[tuple[int, int]] = []  # (free tokens, batch), ascending, of the open batches
    batches: list[list[int]] = []
    for sample, length in zip(samples, lengths, strict=True):
        at = bisect_left(free, (length, 0))
        if at < len(free):
            space, number = free.pop(at)
        else:
            space, number = token_budget, len(batches)
            batches.append([])
            if len(free) == OPEN_BATCHES:
                free.pop(0)
        batch = batches[number]
        batch.append(sample)
        if space > length and len(batch) < rows:
            insort(free, (space - length, number))
    return [tuple(batch) for batch in batches]


class Schedule:
    """Which steps there are, and which plan positions each takes: `packs_per_step` of one epoch.

    The last step of an epoch may be short. Step counts need every epoch's plan once (1.1 s an epoch
    of a million samples, at the first use of `total_steps`); two plans are kept.
    """

    def __init__(self, config: Config, data: TrainingData) -> None:
        self.epochs = config.run.epochs
        self.samples_total = data.samples(self.epochs)
        self._config = config
        self._data = data
        self._plans: dict[int, EpochPlan] = {}
        self._first_step = [0]  # of epoch 0, 1, ... as far as they are known; one more than epochs planned

    def epoch(self, epoch: int) -> EpochPlan:
        """The plan of an epoch, from 0."""
        if not 0 <= epoch < self.epochs:
            raise IndexError(f"epoch {epoch}: the run has epochs 0 to {self.epochs - 1}")
        if epoch not in self._plans:
            while len(self._plans) > 1:
                self._plans.pop(next(iter(self._plans)))
            dataset = self._data.of(epoch)
            self._plans[epoch] = epoch_plan(
                seed=self._config.run.seed, epoch=epoch,
                fingerprint=dataset.fingerprint, lengths=dataset.lengths,
                bucket_edges=self._config.plan.bucket_edges, token_budget=self._config.plan.token_budget,
            )  # fmt: skip
        return self._plans[epoch]

    def tokens(self, epoch: int, batch: int) -> int:
        """Real tokens of a batch."""
        return int(self._data.of(epoch).lengths[list(self.epoch(epoch).batches[batch])].sum())

    @property
    def total_steps(self) -> int:
        return self.first_step(self.epochs)

    def steps_in_epoch(self, epoch: int) -> int:
        return self.first_step(epoch + 1) - self.first_step(epoch)

    def first_step(self, epoch: int) -> int:
        """The number of steps before `epoch`; `epochs` itself is allowed, and gives `total_steps`."""
        while len(self._first_step) <= epoch:
            batches = len(self.epoch(len(self._first_step) - 1).batches)
            self._first_step.append(self._first_step[-1] + -(-batches // self._config.plan.packs_per_step))
        return self._first_step[epoch]

    def locate(self, step: int) -> tuple[int, range]:
        """(epoch, plan positions) of a step, from 0. Raises IndexError past the last one."""
        epoch = 0
        while step >= self.first_step(epoch + 1):
            epoch += 1
        packs = self._config.plan.packs_per_step
        start = (step - self.first_step(epoch)) * packs
        return epoch, range(start, min(start + packs, len(self.epoch(epoch).batches)))
