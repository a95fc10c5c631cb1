"""Whether each GPU has room for the roles that share it, from headers and configurations: nothing is loaded.

A role runs on one GPU; it would otherwise find out minutes later, after reading all weights. Of a target is
counted what is sure: weights in the type they are loaded as (headers of the files; a vision tower that is
not loaded counts, too, a percent or two) and packs, no activations. A drafter's memory is the forecast's.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from services.check.machine import slot_size
from services.check.model import ModelFacts
from services.config.load import Loaded
from services.config.schema import Config
from services.config.sources import Finding
from services.data.forecast import drafter_memory
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
    config = loaded.config
    drafter = drafter_memory(config, model.drafter, slot_size(config, model))
    shares: dict[int, list[Share]] = defaultdict(list)
    for role, count, parts in (
        ("target", config.target.count, _target(config, model)),
        ("drafter", config.drafter.count, drafter.parts),
    ):
        for index in range(count):
            gpu = _gpu(config, role, index, len(memory))
            if gpu is None:
                continue
            if gpu in memory:
                shares[gpu].append(Share(f"{role} {index}", parts))
            else:
                yield Finding(loaded.describe(f"{role}.gpus"), f"{role} {index}: there is no GPU {gpu} here")
    for gpu, together in sorted(shares.items()):
        wanted = sum(sum(share.parts.values()) for share in together)
        if wanted > memory[gpu]:
            subject = loaded.describe("model.path", "target.gpus", "drafter.gpus")
            rule = (
                f"GPU {gpu} has {size(memory[gpu])}, {' and '.join(map(str, together))} take {size(wanted)} "
                "without a target's activations; a role runs on one GPU: give it a larger one or one of its "
                "own, quantise the target, or lower target.slots, plan.token_budget, "
                "recipe.anchors_per_pack or drafter.layers"
            )
            yield Finding(subject, rule)


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
