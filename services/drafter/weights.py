"""Everything that a committed step changes: float32 masters, AdamW's moments and its step count.

All parameters lie in one flat buffer, and so do their gradients and both moments: a reduction is one
collective, a norm one pass, a peer's copy three sends. The model's parameters are views into it.

    flat [P]   | matrices: weight decay ............................ | norm weights: none |
               parameters in the model's order within each part

Norm weights take no decay (pulling a scale to zero is no regulariser; the habit of the field).
16 bytes a parameter. An update reads and writes 28 of them: about 6 ms for 1 G parameters on an H200.
Two more bytes where a GPU computes in bfloat16: the matrices' copies, which every pack of a step reads.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from protocol.errors import CheckpointError
from services.config.schema import Recipe
from services.dflash.linear import Linear


def learning_rate(recipe: Recipe, step: int, total_steps: int) -> float:
    """Of the step from `step` to `step + 1`: a linear warm-up, then a cosine to `min_lr_ratio`. Pure."""
    warmup_steps = round(recipe.warmup_ratio * total_steps)
    if step < warmup_steps:
        return recipe.lr * (step + 1) / warmup_steps
    progress = (step - warmup_steps) / max(1, total_steps - warmup_steps)
    cosine = 0.5 * (1.0 + math.cos(math.pi * min(1.0, progress)))
    return recipe.lr * (recipe.min_lr_ratio + (1.0 - recipe.min_lr_ratio) * cosine)


@dataclass(frozen=True)
class Place:
    """Where one parameter lies in the flat buffers."""

    name: str
    start: int
    shape: torch.Size

    @property
    def stop(self) -> int:
        return self.start + self.shape.numel()

    def of(self, flat: Tensor) -> Tensor:
        return flat[self.start : self.stop].view(self.shape)


@dataclass(frozen=True)
class Snapshot:
    """A copy of the whole state on the CPU, by parameter name; nothing later changes it."""

    weights: dict[str, Tensor]
    optimizer: dict[str, Tensor]


class Weights:
    """Takes over the parameters of `drafter`: they become views of flat float32 buffers on `device`."""

    def __init__(self, drafter: nn.Module, recipe: Recipe, device: torch.device) -> None:
        self.recipe = recipe
        named = list(drafter.named_parameters())
        named.sort(key=lambda item: item[1].dim() < 2)  # stable: matrices first
        self._decayed = sum(parameter.numel() for _, parameter in named if parameter.dim() >= 2)
        self.places: list[Place] = []
        size = 0
        for name, parameter in named:
            self.places.append(Place(name, size, parameter.shape))
            size += parameter.numel()
        drafter.to(device)
        self.masters, self.gradient, self.first, self.second = (
            torch.zeros(size, dtype=torch.float32, device=device) for _ in range(4)
        )
        self.updates = torch.zeros((), dtype=torch.float32, device=device)
        self._copies: Tensor | None = None
        self._copies_stale = True
        with torch.no_grad():
            for place, (_, parameter) in zip(self.places, named, strict=True):
                place.of(self.masters).copy_(parameter)
                parameter.data = place.of(self.masters)
                parameter.grad = place.of(self.gradient)

    @property
    def state(self) -> tuple[Tensor, ...]:
        """What makes a member complete, as the tensors that a newcomer receives into."""
        self._copies_stale = True
        return self.masters, self.first, self.second, self.updates

    def keep_copies(self, drafter: nn.Module, dtype: torch.dtype) -> None:
        """Give every `Linear` of `drafter` a place where its weight lies in `dtype`."""
        self._copies = torch.empty(self._decayed, dtype=dtype, device=self.masters.device)
        modules = dict(drafter.named_modules())
        for place in self.places:
            module = modules[place.name.removesuffix(".weight")]
            if isinstance(module, Linear):
                module.copy = place.of(self._copies)

    @torch.no_grad()
    def refresh_copies(self) -> None:
        """Due before a forward pass. Only the first after a change costs something: 6 bytes a weight."""
        if self._copies is not None and self._copies_stale:
            self._copies.copy_(self.masters[: self._decayed])
            self._copies_stale = False

    @torch.no_grad()
    def update(self, *, lr: float, gradient_scale: float) -> None:
        """One AdamW update with `gradient * gradient_scale`, all of it finite."""
        self._copies_stale = True
        self.gradient.mul_(gradient_scale)
        for (start, stop), decay in zip(self._parts(), (self.recipe.weight_decay, 0.0), strict=True):
            if start == stop:
                continue
            steps = self.updates.clone()  # each call counts its own up by one
            adamw(
                [self.masters[start:stop]], [self.gradient[start:stop]],
                [self.first[start:stop]], [self.second[start:stop]], [], [steps],
                fused=True, amsgrad=False, maximize=False, lr=lr, weight_decay=decay,
                beta1=self.recipe.beta1, beta2=self.recipe.beta2, eps=self.recipe.eps,
            )  # fmt: skip
        self.updates += 1

    def _parts(self) -> Iterator[tuple[int, int]]:
        return pairwise((0, self._decayed, self.masters.numel()))

    # ---- checkpoints --------------------------------------------------------------------------

    def snapshot(self) -> Snapshot:
        """Blocking copy to the CPU, at about 12 GB/s from a GPU: a second for 1 G parameters."""
        masters, first, second, updates = (tensor.to("cpu", copy=True) for tensor in self.state)
        optimizer = {"updates": updates}
        for place in self.places:
            optimizer[f"first.{place.name}"] = place.of(first)
            optimizer[f"second.{place.name}"] = place.of(second)
        return Snapshot({place.name: place.of(masters) for place in self.places}, optimizer)

    def check(self, weights: Mapping[str, Tensor], optimizer: Mapping[str, Tensor]) -> None:
        """CheckpointError unless every tensor is there in its shape and no other is."""
        expected = {place.name: place.shape for place in self.places}
        moments = {
            f"{part}.{name}": shape for part in ("first", "second") for name, shape in expected.items()
        }
        for kind, tensors, shapes in (
            ("weights", weights, expected),
            ("optimizer", optimizer, {**moments, "updates": torch.Size()}),
        ):
            for name in sorted(tensors.keys() ^ shapes.keys()):
                problem = "missing" if name in shapes else "unknown"
                raise CheckpointError(
                    f"{kind} tensor {name} is {problem}: the checkpoint is of another drafter"
                )
            for name, shape in shapes.items():
                if tensors[name].shape != shape:
                    found, wanted = tuple(tensors[name].shape), tuple(shape)
                    raise CheckpointError(
                        f"{kind} tensor {name} has shape {found}, this drafter's is {wanted}"
                    )

    @torch.no_grad()
    def load(self, weights: Mapping[str, Tensor], optimizer: Mapping[str, Tensor]) -> None:
        """Take a snapshot's state. CheckpointError, with nothing changed, if it does not fit."""
        self.check(weights, optimizer)
        self._copies_stale = True
        for place in self.places:
            place.of(self.masters).copy_(weights[place.name])
            place.of(self.first).copy_(optimizer[f"first.{place.name}"])
            place.of(self.second).copy_(optimizer[f"second.{place.name}"])
        self.updates.copy_(optimizer["updates"])

    @torch.no_grad()
    def start(self, weights: Mapping[str, Tensor]) -> None:
        """Initial weights, no update yet."""
        self._copies_stale = True
        for place in self.places:
            place.of(self.masters).copy_(weights[place.name])
        for tensor in (self.first, self.second, self.updates):
            tensor.zero_()
