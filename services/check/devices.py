"""Whether each GPU has room for the roles that share it, from headers and configurations: nothing is loaded.

A role runs on one GPU; it would otherwise find out minutes later, after reading all weights. Targets and
drafters are counted as `draftmill plan` does (services/data/gpu_memory.py), but for a target's weights: in
the type they are loaded as, by the headers of the files (a vision tower that is not loaded counts, too, a
percent or two). An evaluator's memory is both models and its caches.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from protocol.errors import ConfigError
from services.check.evaluator import evaluator_memory
from services.check.machine import named, slot_size
from services.check.model import ModelFacts
from services.config.load import Loaded
from services.config.schema import Config
from services.config.sources import Finding
from services.data.gpu_memory import CUDA_BYTES, drafter_memory, target_memory
from services.evaluator.evaluator import device_of
from services.local.view import size

_ADVICE = (
    "a role runs on one GPU: give it a larger one or one of its own, quantise the target, or lower "
    "target.slots, plan.token_budget, recipe.anchors_per_pack, drafter.layers or eval.batch"
)


class Share(NamedTuple):
    """Bytes that one role takes on its GPU, by what takes them."""

    role: str
    parts: dict[str, int]
    guessed: int = 0  # of them, what the library's kernels may make less of

    @property
    def total(self) -> int:
        return sum(self.parts.values())

    def __str__(self) -> str:
        return f"{self.role} {size(self.total)} ({named(self.parts)})"


class Devices(NamedTuple):
    """`facts` as (name, value): what is taken of each GPU. Findings: a role has no GPU, or too small a one;
    a warning if it is too small only when a target's activations are as large as estimated.
    """

    facts: list[tuple[str, str]]
    findings: list[Finding]
    warnings: list[Finding]


def gpu_memory() -> dict[int, int]:
    """Bytes of each visible GPU, whoever uses them now; empty without one."""
    import torch

    if not torch.cuda.is_available():
        return {}
    return {n: torch.cuda.get_device_properties(n).total_memory for n in range(torch.cuda.device_count())}


def check_devices(loaded: Loaded, model: ModelFacts, positions: int, memory: Mapping[int, int]) -> Devices:
    """What is taken of each GPU of `memory`; a target's largest forward has that many `positions`."""
    config, shares, found = loaded.config, defaultdict[int, list[Share]](list), Devices([], [], [])
    places = list(_roles(config, model, positions, len(memory)))
    try:
        places += _evaluators(config, model, len(memory))
    except ConfigError as error:
        rule = str(error).removeprefix("evaluator.gpu: ")
        found.findings.append(Finding(loaded.describe("evaluator.gpu"), rule))
    if config.arena.kind in ("pinned", "cuda_ipc"):
        found.findings.extend(_without_gpu(loaded, len(memory)))
    for option, gpu, share in places:
        if gpu in memory:
            shares[gpu].append(share)
        else:
            rule = f"{share.role}: there is no GPU {gpu} here"
            found.findings.append(Finding(loaded.describe(option), rule))
    for gpu, together in sorted(shares.items()):
        roles, room = " and ".join(map(str, together)), memory[gpu]
        wanted = sum(share.total for share in together)
        found.facts.append((f"GPU {gpu}", f"{size(wanted)} of {size(room)}: {roles}"))
        small = Finding(
            loaded.describe("model.path", "target.gpus", "drafter.gpus"),
            f"GPU {gpu} has {size(room)}, {roles} take {size(wanted)}; {_ADVICE}",
        )
        if wanted - sum(share.guessed for share in together) > room:
            found.findings.append(small)
        elif wanted > room:
            found.warnings.append(small)
    return found


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


def _roles(config: Config, model: ModelFacts, positions: int, count: int) -> Iterator[tuple[str, int, Share]]:
    """(option, number of the GPU, what is taken there) of each target and drafter that takes one."""
    slot = slot_size(config, model)
    target = target_memory(config, model.loaded_bytes, model.widths, positions, slot).parts
    if config.arena.kind == "cuda_ipc":
        target["slots"] = config.target.slots * slot
    for role, number, parts, guessed in (
        ("target", config.target.count, target, target["activations"]),
        ("drafter", config.drafter.count, drafter_memory(config, model.drafter, slot).parts, 0),
    ):
        for index in range(number):
            gpu = _gpu(config, role, index, count)
            if gpu is not None:
                share = Share(f"{role} {index}", parts | {"CUDA": CUDA_BYTES[role]}, guessed)
                yield f"{role}.gpus", gpu, share


def _evaluators(config: Config, model: ModelFacts, count: int) -> Iterator[tuple[str, int, Share]]:
    """The same of an evaluator. Raises ConfigError: none is named, and none is free."""
    device = device_of(config, count) if config.evaluator.count else None
    if device is not None and device.type == "cuda":
        parts = evaluator_memory(config, model, on_gpu=True) | {"CUDA": CUDA_BYTES["evaluator"]}
        yield "evaluator.gpu", device.index or 0, Share("evaluator", parts)


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
