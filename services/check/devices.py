"""Whether each GPU has room for the roles that share it, from headers and configurations: nothing is loaded.

A role runs on one GPU; it would otherwise find out minutes later, after reading all weights. Of a target is
counted what is sure: weights in the type they are loaded as (headers of the files; a vision tower that is
not loaded counts, too, a percent or two) and packs, no activations. A drafter's memory is the forecast's, an
evaluator's is both models and its caches.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from protocol.errors import ConfigError
from services.check.evaluator import evaluator_memory
from services.check.machine import slot_size
from services.check.model import ModelFacts
from services.config.load import Loaded
from services.config.schema import Config
from services.config.sources import Finding
from services.data.forecast import CUDA_BYTES, drafter_memory
from services.evaluator.evaluator import device_of
from services.local.view import size


class Share(NamedTuple):
    """Bytes that one role takes on its GPU, by what takes them."""

    role: str
    parts: dict[str, int]

    def __str__(self) -> str:
        named = ", ".join(f"{name} {size(count)}" for name, count in self.parts.items() if count)
        return f"{self.role} {size(sum(self.parts.values()))} ({named})"


def gpu_memory() -> dict[int, int]:
    """Bytes of each visible GPU, whoever uses them now; empty without one."""
    import torch

    if not torch.cuda.is_available():
        return {}
    return {n: torch.cuda.get_device_properties(n).total_memory for n in range(torch.cuda.device_count())}


def check_devices(loaded: Loaded, model: ModelFacts, memory: Mapping[int, int]) -> Iterator[Finding]:
    """A finding for each GPU of `memory` whose roles need more than it has, or that is not there."""
    config, shares = loaded.config, defaultdict[int, list[Share]](list)
    places = list(_roles(config, model, len(memory)))
    try:
        places += _evaluators(config, model, len(memory))
    except ConfigError as error:
        yield Finding(loaded.describe("evaluator.gpu"), str(error).removeprefix("evaluator.gpu: "))
    if config.arena.kind in ("pinned", "cuda_ipc"):
        yield from _without_gpu(loaded, len(memory))
    for option, gpu, share in places:
        if gpu in memory:
            shares[gpu].append(share)
        else:
            yield Finding(loaded.describe(option), f"{share.role}: there is no GPU {gpu} here")
    for gpu, together in sorted(shares.items()):
        wanted = sum(sum(share.parts.values()) for share in together)
        if wanted > memory[gpu]:
            subject = loaded.describe("model.path", "target.gpus", "drafter.gpus")
            rule = (
                f"GPU {gpu} has {size(memory[gpu])}, {' and '.join(map(str, together))} take {size(wanted)} "
                "without activations of a target; a role runs on one GPU: give it a larger one or one of its "
                "own, quantise the target, or lower target.slots, plan.token_budget, "
                "recipe.anchors_per_pack, drafter.layers or eval.batch"
            )
            yield Finding(subject, rule)


def _without_gpu(loaded: Loaded, count: int) -> Iterator[Finding]:
    """Roles on a CPU that the arena's kind leaves out: both kinds are filled by a target's GPU."""
    config, subject = loaded.config, loaded.describe("arena.kind", "target.gpus", "target.count")
    kind = config.arena.kind
    targets = [index for index in range(config.target.count) if _gpu(config, "target", index, count) is None]
    if targets:
        rule = f"target {targets[0]} is on a CPU, {kind} needs every target on a GPU; use shm or auto"
        yield Finding(subject, rule)
    drafters = [n for n in range(config.drafter.count) if _gpu(config, "drafter", n, count) is None]
    if drafters and not targets and kind == "cuda_ipc":
        rule = f"drafter {drafters[0]} is on a CPU, which cannot read GPU memory; use pinned or auto"
        yield Finding(loaded.describe("arena.kind", "drafter.gpus", "drafter.count"), rule)


def _roles(config: Config, model: ModelFacts, count: int) -> Iterator[tuple[str, int, Share]]:
    """(option, number of the GPU, what is taken there) of each target and drafter that takes one."""
    drafter = drafter_memory(config, model.drafter, slot_size(config, model)).parts
    for role, number, parts in (
        ("target", config.target.count, _target(config, model)),
        ("drafter", config.drafter.count, drafter),
    ):
        for index in range(number):
            gpu = _gpu(config, role, index, count)
            if gpu is not None:
                yield f"{role}.gpus", gpu, Share(f"{role} {index}", parts | {"CUDA": CUDA_BYTES[role]})


def _evaluators(config: Config, model: ModelFacts, count: int) -> Iterator[tuple[str, int, Share]]:
    """The same of an evaluator. Raises ConfigError: none is named, and none is free."""
    device = device_of(config, count) if config.evaluator.count else None
    if device is not None and device.type == "cuda":
        share = Share("evaluator", evaluator_memory(config, model, on_gpu=True))
        yield "evaluator.gpu", device.index or 0, share


def _gpu(config: Config, role: str, index: int, count: int) -> int | None:
    """Number of the GPU that a role takes, as the roles themselves choose; None on a CPU."""
    gpus = config.target.gpus if role == "target" else config.drafter.gpus
    if index < len(gpus):
        name = gpus[index].removeprefix("cuda:")
        return int(name) if name.isdigit() else None
    if gpus or not count:
        return None
    if role == "target":
        return index if index < count else None
    return max(0, min(count - 1, count - config.drafter.count + index))


def _target(config: Config, model: ModelFacts) -> dict[str, int]:
    slot = slot_size(config, model)
    parts = {"weights": model.loaded_bytes, "pack buffers": (config.target.postprocess_depth + 1) * slot}
    if config.arena.kind == "cuda_ipc":
        parts["slots"] = config.target.slots * slot
    return parts
