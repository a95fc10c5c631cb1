"""The datasets of a run, by epoch: `data.path` from the start, each of `data.later` from its epoch on.

    data.path = a, data.later = 2:b,5:c     epoch   0 1 | 2 3 4 | 5 ...
                                            data     a      b      c

Every role makes this from its options and says its fingerprint in the Hello, so all plan every epoch from
the same samples. An epoch's plan depends on its own dataset alone: one that takes over later changes
nothing of what was planned before. Torch-free; opens all datasets, 0.1 s a million samples.
"""

from __future__ import annotations

from bisect import bisect_right

from services.config.schema import Data
from services.data.dataset import Dataset


class TrainingData:
    """Which dataset an epoch is trained on."""

    def __init__(self, first: Dataset, *later: tuple[int, Dataset]) -> None:
        """`first` from epoch 0, each of `later` from its epoch on, ascending."""
        self.parts: tuple[tuple[int, Dataset], ...] = ((0, first), *later)
        self._starts = [start for start, _ in self.parts]

    @classmethod
    def open(cls, options: Data) -> TrainingData:
        """Map all datasets. Raises DataError if one is missing, of another format, truncated or empty."""
        return cls(
            Dataset.open(options.path), *((start, Dataset.open(path)) for start, path in options.takeovers)
        )

    def of(self, epoch: int) -> Dataset:
        return self.parts[bisect_right(self._starts, epoch) - 1][1]

    @property
    def fingerprint(self) -> str:
        """`A` for one dataset, `A 2:B` when B takes over from epoch 2 on."""
        first, *later = self.parts
        return " ".join([first[1].fingerprint, *(f"{start}:{data.fingerprint}" for start, data in later)])

    @property
    def places(self) -> list[tuple[int, str, str]]:
        """(first epoch, fingerprint, path) of each part."""
        return [(start, dataset.fingerprint, str(dataset.path)) for start, dataset in self.parts]

    @property
    def longest(self) -> int:
        """Tokens of the longest sample of any epoch."""
        return max(int(dataset.lengths.max()) for _, dataset in self.parts)

    def samples(self, epochs: int) -> int:
        """Samples of that many epochs together."""
        return sum(len(self.of(epoch)) for epoch in range(epochs))


def fingerprint_of(fingerprint: str, epoch: int) -> str:
    """The fingerprint of one epoch's dataset, out of `TrainingData.fingerprint`."""
    first, *later = fingerprint.split(" ")
    for part in later:
        start, _, of_part = part.partition(":")
        if int(start) <= epoch:
            first = of_part
    return first
