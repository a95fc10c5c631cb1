"""One optimizer step's gradient: packs added in plan order, reduced, then applied or thrown away.

    clear -> add(pack)* -> seal(reducer): zero a poisoned share, sum over ranks, one wait -> Outcome
                                              -> apply (commit) | clear (discard)

Where the reducer overlaps, the last `add` hands it each piece of the gradient as soon as the backward
pass has completed it, and `seal` what is left. A poisoned share's NaNs may then be summed: nothing comes of
them, since all ranks throw a step with a bad pack away.

Loss and weights are sums until the group has added them up; the gradient is divided by the weight of
the whole step, over all ranks and packs, exactly once. Nothing here touches the weights but `apply`,
so a try that ends any other way leaves them alone. Given the packs and a thread count, every bit is
the same on a CPU.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from protocol.messages import BatchId, StepTry
from services.config.schema import Config
from services.dflash.anchors import draw_anchors
from services.dflash.drafter import Drafter
from services.dflash.head import FrozenHead
from services.dflash.loss import LossOptions
from services.dflash.noise import join_taps
from services.dflash.pack import PackLoss, pack_loss, targets_labels
from services.drafter.metrics import Phases, TallyLayout
from services.drafter.pieces import Pieces
from services.drafter.reduce import Reducer
from services.drafter.weights import Weights, learning_rate
from services.seeds import noise_seed, seed

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
CLIP_EPS = 1e-6


@dataclass(frozen=True)
class Outcome:
    """A reduced step as the host knows it; equal on all ranks but for `own_bad`."""

    tally: tuple[float, ...]
    weight: float
    gradient_norm: float  # after division by the weight; 0.0 without weight
    own_bad: tuple[int, ...]  # positions of this rank's non-finite packs
    any_bad: bool
    gradient_finite: bool  # or known to hold a bad pack


class LastPack(NamedTuple):
    """Where the gradient of a rank's last pack goes while it is being computed."""

    reducer: Reducer
    step_try: StepTry


class StepGradient:
    """Accumulates into the flat gradient of `weights`, whose parameters are `drafter`'s."""

    def __init__(
        self, config: Config, drafter: Drafter, weights: Weights, embed_weight_VH: Tensor, head: FrozenHead,
        *, total_steps: int, phases: Phases,
    ) -> None:  # fmt: skip
        self._config, self._drafter, self._weights = config, drafter, weights
        self._embed_weight_VH, self._head = embed_weight_VH, head
        self._total_steps, self._phases = total_steps, phases
        self._device = weights.masters.device
        if self._device.type == "cuda":
            weights.keep_copies(drafter, DTYPES[config.drafter.dtype])
        self._loss = LossOptions.of(config.recipe)
        self.layout = TallyLayout(drafter.config.block_size - 1, config.plan.packs_per_step)
        self._tally = torch.zeros(self.layout.size, dtype=torch.float64, device=self._device)
        self._pieces = Pieces(drafter, weights.places)
        self._handed = 0  # of the pieces: over to the reducer
        self._arrived = False
        size = self.layout.size + 1 + self.layout.packs
        self._host = torch.zeros(size, dtype=torch.float64, pin_memory=self._device.type == "cuda")

    def clear(self) -> None:
        self._weights.gradient.zero_()
        self._tally.zero_()
        self._handed, self._arrived = 0, False

    # ---- packs --------------------------------------------------------------------------------

    def add(
        self, position: int, batch: BatchId, sections: Mapping[str, Tensor], *, last: LastPack | None = None
    ) -> None:
        """Forward and backward of one pack, every anchor set of it. Does not wait for a GPU.

        `sections` as in messages.Descriptor. A non-finite loss or gradient raises the flag of
        `position`; later packs of the try may inherit it through the sum. `last`: the reduction begins here,
        with its waits and errors (see `seal`).
        """
        features_TF = self._features(batch, sections)
        layout, tally = self.layout, self._tally
        self._weights.refresh_copies()
        finite = torch.ones((), dtype=torch.bool, device=self._device)
        draws, label_ids_T = self._config.recipe.anchor_draws, self._labels(sections)
        for draw in range(draws):
            with self._phases("forward"):
                sums = self._forward(batch, draw, features_TF, label_ids_T, sections)
            with self._reduction(last if draw == draws - 1 else None, finite), self._phases("backward"):
                sums.loss_sum.backward()
            finite &= sums.loss_sum.detach().isfinite()
            tally[layout.LOSS] += sums.loss_sum.detach()
            tally[layout.WEIGHT] += sums.weight_sum
            tally[layout.ACCEPTED] += sums.accepted_sum
            tally[layout.BLOCKS] += sums.blocks
            tally[layout.hits] += sums.correct_K
            tally[layout.rows] += sums.count_K
        tally[layout.TOKENS] += features_TF.shape[0]
        tally[layout.PACKS] += 1
        for piece in self._pieces.slices[self._handed :] if self._handed else (slice(None),):
            finite &= self._weights.gradient[piece].sum().isfinite()
        tally[layout.bad][position] = (~finite).to(tally.dtype)

    @contextmanager
    def _reduction(self, last: LastPack | None, finite: Tensor) -> Iterator[None]:
        """Hands over what the backward pass inside completes, checked before others' sums come into it."""
        if last is None:
            yield
            return
        with self._phases("reduce"):
            last.reducer.arrive(last.step_try)
        self._arrived = True

        def complete(piece: slice) -> None:
            gradient = self._weights.gradient[piece]
            finite.logical_and_(gradient.sum().isfinite())
            last.reducer.start(gradient)
            self._handed += 1

        with self._pieces.told(complete):
            yield

    def _features(self, batch: BatchId, sections: Mapping[str, Tensor]) -> Tensor:
        """[T, taps * hidden]: as shipped, or joined and noised here exactly as a target would have."""
        if "features" in sections:
            return sections["features"]
        recipe, taps = self._config.recipe, self._drafter.config.taps
        return join_taps(
            [sections[f"features.{tap}"] for tap in range(taps)],
            kind=recipe.noise, scale=recipe.noise_scale,
            seed=noise_seed(self._config.run.seed, *batch),
        )  # fmt: skip

    def _labels(self, sections: Mapping[str, Tensor]) -> Tensor:
        if self._config.recipe.labels == "data":
            return sections["input_ids"]
        return targets_labels(sections["last_hidden"], self._head, sections["input_ids"])

    def _forward(
        self, batch: BatchId, draw: int, features_TF: Tensor, label_ids_T: Tensor,
        sections: Mapping[str, Tensor],
    ) -> PackLoss:  # fmt: skip
        config = self._config
        anchors = draw_anchors(
            sections["loss_mask"], sections["document_offsets"], config.recipe.anchors_per_pack,
            seed(config.run.seed, "anchors", batch.epoch, batch.index, draw),
        )  # fmt: skip
        return pack_loss(
            self._drafter, self._embed_weight_VH, self._head,
            features_TF=features_TF, input_ids_T=sections["input_ids"], loss_mask_T=sections["loss_mask"],
            position_ids_T=sections["position_ids"], document_offsets=sections["document_offsets"],
            label_ids_T=label_ids_T, last_hidden_TH=sections.get("last_hidden"),
            anchors=anchors, loss=self._loss,
            attention=config.drafter.attention, dtype=DTYPES[config.drafter.dtype],
        )  # fmt: skip

    # ---- the end of a try ---------------------------------------------------------------------

    @torch.no_grad()
    def seal(self, reducer: Reducer, step_try: StepTry) -> Outcome:
        """Sum over the group and wait for it. GroupBroken, TryLeft: the sum is worthless, `clear` it.

        A rank with a non-finite pack joins with what it has: by the flags nobody applies the sum.
        """
        layout, gradient, tally = self.layout, self._weights.gradient, self._tally
        with self._phases("reduce"):
            if not self._arrived:
                reducer.arrive(step_try)
            own_bad = tally[layout.bad].clone()
            poisoned = own_bad.any()
            tally[: layout.bad.start].masked_fill_(poisoned, 0.0)
            for piece in self._pieces.slices[self._handed :]:
                reducer.start(gradient[piece])
            reducer.start(tally)
            reducer.finish()
            norm = torch.linalg.vector_norm(gradient).to(torch.float64)
            self._host.copy_(torch.cat((tally, norm[None], own_bad)), non_blocking=True)
        self._wait_for_host()
        reducer.confirm()
        self._phases.settle()
        return self._outcome(self._host.tolist())

    def _wait_for_host(self) -> None:
        """The only wait of a step. `blocking`: the thread sleeps, it does not spin."""
        if self._device.type == "cuda":
            event = torch.cuda.Event(blocking=True)
            event.record()
            event.synchronize()

    def _outcome(self, host: list[float]) -> Outcome:
        size = self.layout.size
        tally, norm, own_bad = tuple(host[:size]), host[size], host[size + 1 :]
        weight, any_bad = tally[self.layout.WEIGHT], any(tally[self.layout.bad])
        return Outcome(
            tally=tally,
            weight=weight,
            gradient_norm=norm / weight if weight else 0.0,
            own_bad=tuple(position for position, bad in enumerate(own_bad) if bad),
            any_bad=any_bad,
            gradient_finite=any_bad or (math.isfinite(norm) and math.isfinite(weight)),
        )

    def apply(self, step: int, outcome: Outcome) -> dict[str, float]:
        """The update from `step` to `step + 1`; returns the step's figures. Clears the gradient.

        Without weight there is nothing to learn: AdamW does not run, the step still counts.
        """
        assert outcome.gradient_finite and not outcome.any_bad, f"step {step} committed through a NaN"
        recipe = self._config.recipe
        lr = learning_rate(recipe, step, self._total_steps)
        with self._phases("step"):
            if outcome.weight:
                clip = 1.0
                if recipe.grad_clip:
                    clip = min(1.0, recipe.grad_clip / (outcome.gradient_norm + CLIP_EPS))
                self._weights.update(lr=lr, gradient_scale=clip / outcome.weight)
            self.clear()
        return {**self.layout.values(outcome.tally), "grad_norm": outcome.gradient_norm, "lr": lr}
