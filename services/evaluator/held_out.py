"""Loss and accuracy on the samples that `draftmill prepare` held out, as training would have counted them.

    data.path/validation -> packs by length -> target: taps -> drafter: blocks -> head -> sums, divided once

The same samples, packs and anchors for every checkpoint of a run, without feature noise: figures differ
because the weights do. The type is the one the target is served in. On a CPU about the cost of a training
step without its backward pass for each pack.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from services.config.schema import Config
from services.data.batch import HostBatch, gather
from services.data.dataset import MANIFEST, VALIDATION, Dataset
from services.dflash.anchors import draw_anchors
from services.dflash.drafter import Drafter
from services.dflash.loss import LossOptions
from services.dflash.pack import PackLoss, pack_loss, targets_labels
from services.dflash.taps import PackBuffer, TapCapture, packed_rows
from services.dflash.target_model import Target
from services.seeds import seed


@dataclass(frozen=True)
class HeldOut:
    """Means over all blocks; None where there was nothing to count."""

    loss: float | None
    accuracy: float | None
    accuracy_by_position: list[float | None]  # slot 1, 2, ..
    accepted_length: float | None  # 1 + slots right before the first wrong one, on the recorded answers
    samples: int

    def to_dict(self) -> dict[str, Any]:
        return {f"held_out_{name}": value for name, value in vars(self).items()}


class Validation:
    """The held-out samples of a run, in packs."""

    def __init__(self, config: Config, dataset: Dataset) -> None:
        self._config, self._dataset = config, dataset
        rows = config.eval.validation_limit or len(dataset)
        self.packs = packs_of(dataset.lengths[:rows], config.plan.token_budget)

    @classmethod
    def open(cls, config: Config) -> Validation | None:
        """None if no samples were held out. Raises DataError if they cannot be read."""
        folder = Path(config.data.path) / VALIDATION
        return cls(config, Dataset.open(folder)) if (folder / MANIFEST).is_file() else None

    @torch.no_grad()
    def measure(self, target: Target, drafter: Drafter, after_pack: Callable[[], None]) -> HeldOut:
        """`drafter` on the target's device and in its type; `after_pack` is called between packs."""
        config, total = self._config, _Sums(drafter.config.block_size - 1)
        last_hidden = config.recipe.needs_last_hidden
        most = max((int(self._dataset.lengths[list(pack)].sum()) for pack in self.packs), default=0)
        buffer = PackBuffer.allocate(
            most, drafter.config.taps, drafter.config.hidden_size,
            split=False, last_hidden=last_hidden, dtype=target.dtype, device=target.device,
        )  # fmt: skip
        with TapCapture(target, drafter.config.target_layer_ids, last_hidden=last_hidden) as capture:
            for number, pack in enumerate(self.packs):
                longest = int(self._dataset.lengths[list(pack)].max())
                rows = target.embed_weight_VH.shape[0]
                batch = gather(self._dataset, pack, edges=(longest,), vocabulary=rows)
                if batch.documents:
                    total.add(self._pack(number, batch, capture, buffer, drafter), len(batch.documents))
                after_pack()
        return total.means()

    def _pack(
        self, number: int, batch: HostBatch, capture: TapCapture, buffer: PackBuffer, drafter: Drafter
    ) -> PackLoss:
        target, config, device = capture.target, self._config, capture.target.device
        ids_BS = torch.empty(len(batch.documents), batch.padded_length, dtype=torch.int64)
        batch.fill(ids_BS)
        rows_T = packed_rows(batch.lengths, batch.padded_length)
        capture.run(ids_BS.to(device), rows_T.to(device), buffer)
        computed = buffer.sections(batch.tokens)
        known = {name: tensor.to(device) for name, tensor in batch.sections().items()}
        loss_mask_T, offsets = known["loss_mask"], known["document_offsets"]
        last_hidden_TH, label_ids_T = computed.get("last_hidden"), known["input_ids"]
        if config.recipe.labels == "target":
            assert last_hidden_TH is not None, "the capture keeps it where labels need it"
            label_ids_T = targets_labels(last_hidden_TH, target.head, label_ids_T)
        drawn = seed(config.run.seed, "held out", number)
        anchors = draw_anchors(loss_mask_T, offsets, config.recipe.anchors_per_pack, drawn)
        return pack_loss(
            drafter, target.embed_weight_VH, target.head,
            features_TF=computed["features"], last_hidden_TH=last_hidden_TH,
            input_ids_T=known["input_ids"], label_ids_T=label_ids_T,
            loss_mask_T=loss_mask_T, document_offsets=offsets,
            position_ids_T=known["position_ids"],
            anchors=anchors, loss=LossOptions.of(config.recipe),
            attention=config.drafter.attention, dtype=target.dtype,
        )  # fmt: skip


def packs_of(lengths: np.ndarray, token_budget: int) -> tuple[tuple[int, ...], ...]:
    """Rows in packs whose padded tokens stay within the budget, shortest first; longer ones are left out."""
    packs: list[list[int]] = []
    for row in np.argsort(lengths, kind="stable").tolist():
        length = int(lengths[row])
        if length > token_budget:
            break
        if not packs or length * (len(packs[-1]) + 1) > token_budget:
            packs.append([])
        packs[-1].append(row)
    return tuple(map(tuple, packs))


class _Sums:
    """Of all packs, in float64 on the host."""

    def __init__(self, slots: int) -> None:
        self._loss = self._weight = self._accepted = self._blocks = 0.0
        self._samples = 0
        self._right = torch.zeros(slots, dtype=torch.float64)
        self._rows = torch.zeros(slots, dtype=torch.float64)

    def add(self, pack: PackLoss, samples: int) -> None:
        self._samples += samples
        self._loss += float(pack.loss_sum)
        self._weight += float(pack.weight_sum)
        self._accepted += float(pack.accepted_sum)
        self._blocks += float(pack.blocks)
        self._right += pack.correct_K.cpu()
        self._rows += pack.count_K.cpu()

    def means(self) -> HeldOut:
        by_position = [_ratio(*pair) for pair in zip(self._right.tolist(), self._rows.tolist(), strict=True)]
        return HeldOut(
            loss=_ratio(self._loss, self._weight),
            accuracy=_ratio(float(self._right.sum()), float(self._rows.sum())),
            accuracy_by_position=by_position,
            accepted_length=_ratio(self._accepted, self._blocks),
            samples=self._samples,
        )


def _ratio(part: float, whole: float) -> float | None:
    """None for 0/0, and for what is not finite: JSON has no NaN."""
    return part / whole if whole and np.isfinite(part) else None
