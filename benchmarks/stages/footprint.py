"""Bytes a running pipeline takes, beside what `draftmill plan` and `draftmill check` foretell.

GPU    of a process, as the driver counts it (context and the allocator's reserve included), and what
       torch's allocator held at most; the forecast counts tensors only
arena  files in arena.dir; check wants room for two incarnations of each target, one is alive
host   anonymous memory of each process, and the arenas once, while no checkpoint is written
"""

from __future__ import annotations

import contextlib
import importlib
import json
from pathlib import Path
from typing import Any, NamedTuple

from protocol.arena import arena_bytes
from services.check.machine import host_memory
from services.check.model import check_model
from services.config.load import Loaded
from services.config.schema import Config
from services.data.forecast import plan_of_run
from services.lifecycle import arena_folder

ROLES = ("coordinator", "target", "drafter")
KINDS = ("RssAnon", "RssFile", "RssShmem")


class Found(NamedTuple):
    """One look at the run; `gpu` and `torch` are empty on a CPU."""

    host: dict[str, dict[str, int]]  # of each role, by kind
    gpu: dict[str, int]  # of each role
    torch: dict[str, dict[str, int]]  # of each role: allocated and reserved at most
    arena: int


def look(config: Config, pids: dict[str, int]) -> Found:
    memory = {role: config.run.dir / f"memory-{role}.json" for role in ("target", "drafter")}
    return Found(
        host={role: host_bytes(pid) for role, pid in pids.items()},
        gpu=gpu_bytes(pids),
        torch={role: json.loads(file.read_text()) for role, file in memory.items() if file.exists()},
        arena=sum(file.stat().st_blocks * 512 for file in arena_folder(config).glob("*.arena")),
    )


def role_pids(up: int) -> dict[str, int]:
    """The children of `up` by role; those that have started."""
    found = {}
    for pid in Path(f"/proc/{up}/task/{up}/children").read_text().split():
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
            found |= {role: int(pid) for role in ROLES if role in words[:4]}
    return found


def host_bytes(pid: int) -> dict[str, int]:
    with contextlib.suppress(OSError):
        lines = [line.split() for line in Path(f"/proc/{pid}/status").read_text().splitlines()]
        sizes = {words[0].removesuffix(":"): 1024 * int(words[1]) for words in lines if words[-1:] == ["kB"]}
        return {kind: sizes.get(kind, 0) for kind in KINDS}
    return dict.fromkeys(KINDS, 0)


def gpu_bytes(pids: dict[str, int]) -> dict[str, int]:
    """By role, over all GPUs; nothing without a driver or its package, or where it does not tell."""
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        return {}
    used: dict[int, int] = {}
    try:
        nvml.nvmlInit()
        for index in range(nvml.nvmlDeviceGetCount()):
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            for process in nvml.nvmlDeviceGetComputeRunningProcesses(handle):
                used[process.pid] = used.get(process.pid, 0) + (process.usedGpuMemory or 0)
    except nvml.NVMLError:
        return {}
    return {role: used[pid] for role, pid in pids.items() if used.get(pid)}


def compare(loaded: Loaded, found: Found, totals: dict[str, dict[str, float]]) -> dict[str, Any]:
    """`totals`: the roles' own, which have the whole GPU's memory in use: what the driver says of a process
    is missing on some machines."""
    config = loaded.config
    made = plan_of_run(config, Path(config.model.path), None)
    foretold = {"target": made.target, "drafter": made.drafter}
    result: dict[str, Any] = {}
    for role, memory in foretold.items():
        measured = dict(found.torch.get(role, {}))
        if role in found.gpu:
            measured["process_bytes"] = found.gpu[role]
        if "gpu_memory_used_bytes" in totals.get(role, {}):
            measured["whole_gpu_bytes"] = int(totals[role]["gpu_memory_used_bytes"])
        ratios = {f"{name}_to_forecast": round(size / memory.total, 4) for name, size in measured.items()}
        result[role] = {"forecast_bytes": memory.total, "parts": memory.parts, **measured, **ratios}
    one = arena_bytes(found_kind(config), config.target.slots, made.slot_bytes) * config.target.count
    result["arena"] = {
        "forecast_bytes": one, "room_wanted_bytes": 2 * one, "measured_bytes": found.arena,
        "measured_to_forecast": round(found.arena / one, 4),
    }  # fmt: skip
    result["host"] = _host(loaded, found)
    return result


def found_kind(config: Config) -> Any:
    return "cuda_ipc" if config.arena.kind == "cuda_ipc" else "shm"


def _host(loaded: Loaded, found: Found) -> dict[str, Any]:
    model, findings = check_model(loaded)
    assert model is not None, findings
    parts = host_memory(loaded.config, model)
    del parts["a checkpoint being written"]
    forecast = sum(parts.values())
    measured = sum(sizes["RssAnon"] for sizes in found.host.values()) + found.arena
    return {
        "forecast_bytes": forecast, "parts": parts, "anonymous_and_arenas_bytes": measured,
        "measured_to_forecast": round(measured / forecast, 4), "roles": found.host,
    }  # fmt: skip
