"""A batch on the host: its documents, how they are laid out for the forward, and as what they travel.

    forward   ids_BS     B documents right-padded to S, the plan's bucket edge of the longest one
    pack      *_T        the real tokens of all documents, back to back, T = sum of the lengths

B and S depend on the batch alone, never on what else is in flight, so the same batch gives the same bits on
any target of the same kind. Padding rows are computed and thrown away: causal attention keeps them out of the
real rows. Gathering reads the dataset's map and copies 5 bytes a token: about 0.2 ms a pack.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from protocol.messages import SkippedSample
from services.data.dataset import Dataset
from services.data.plan import padded_length

PADDING_ID = 0  # any row of the embedding: nothing real ever sees it


@dataclass(frozen=True)
class Document:
    """One sample of a batch. input_ids int32 [t], loss_mask uint8 [t]."""

    sample: int
    input_ids: np.ndarray
    loss_mask: np.ndarray


@dataclass(frozen=True)
class HostBatch:
    """The documents that are computed together, and the samples of the batch that are left out."""

    documents: tuple[Document, ...]
    padded_length: int
    skipped: tuple[SkippedSample, ...] = ()

    @property
    def lengths(self) -> list[int]:
        return [len(document.input_ids) for document in self.documents]

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    def fill(self, ids_BS: Tensor) -> None:
        """Write the right-padded ids into `ids_BS` (int64, B x S)."""
        ids_BS.fill_(PADDING_ID)
        rows = ids_BS.numpy()
        for row, document in zip(rows, self.documents, strict=True):
            row[: len(document.input_ids)] = document.input_ids

    def sections(self) -> dict[str, Tensor]:
        """Everything of a pack that does not come from the forward, as messages.Descriptor lists it."""
        lengths = self.lengths
        return {
            "input_ids": _joined([document.input_ids for document in self.documents], np.int32),
            "loss_mask": _joined([document.loss_mask for document in self.documents], np.uint8),
            "position_ids": _joined([np.arange(length) for length in lengths], np.int32),
            "document_offsets": torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32),
            "sample_ids": torch.tensor([d.sample for d in self.documents], dtype=torch.int64),
        }

    def without(self, bad: Collection[int], reason: str) -> tuple[HostBatch, Tensor]:
        """Leave out the documents at positions `bad`; also returns the pack rows (int64 [T']) that stay."""
        keep = np.array([position not in bad for position in range(len(self.documents))])
        rows = torch.from_numpy(np.flatnonzero(np.repeat(keep, self.lengths)))
        left = tuple(SkippedSample(sample=self.documents[p].sample, reason=reason) for p in sorted(bad))
        stay = tuple(d for d, kept in zip(self.documents, keep, strict=True) if kept)
        return replace(self, documents=stay, skipped=self.skipped + left), rows


def gather(dataset: Dataset, samples: Sequence[int], *, edges: Sequence[int], vocabulary: int) -> HostBatch:
    """Read the samples of a batch, whose lengths the plan has checked against `edges`.

    A sample with ids outside the embedding is left out with its reason: on a GPU it would end the process.
    Raises DataError for a sample that the dataset does not have.
    """
    documents, skipped = [], []
    for sample in samples:
        input_ids, loss_mask = dataset.sample(sample)
        wrong = input_ids[(input_ids < 0) | (input_ids >= vocabulary)]
        if len(wrong):
            reason = f"token id {wrong[0]}: the target's embedding has rows 0 to {vocabulary - 1}"
            skipped.append(SkippedSample(sample=sample, reason=reason))
        else:
            documents.append(Document(sample, input_ids, loss_mask))
    longest = max((len(document.input_ids) for document in documents), default=0)
    return HostBatch(tuple(documents), padded_length(longest, edges), tuple(skipped))


def _joined(parts: Sequence[np.ndarray], dtype: type[np.generic]) -> Tensor:
    return torch.from_numpy(np.concatenate([np.asarray(part, dtype=dtype) for part in parts]))


def made_up(documents: int, padded_length: int, token_budget: int) -> HostBatch:
    """A batch of the shape given with as many real tokens as the budget allows, for warming up."""
    length = min(padded_length, token_budget // documents)
    blank = Document(0, np.full(length, PADDING_ID, np.int32), np.ones(length, np.uint8))
    return HostBatch((blank,) * documents, padded_length)
