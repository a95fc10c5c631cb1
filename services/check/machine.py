"""Whether this machine has room for the run: memory for arenas, disk for checkpoints, a port, short paths.

Arenas are counted twice for each target, because a dead target's file lives until its last pack is trained.
"""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from protocol.arena import arena_bytes, free_bytes
from protocol.sockets import MAX_IPC_PATH_BYTES
from services.check.evaluator import LOADING_BYTES, evaluator_memory
from services.check.model import ModelFacts
from services.config.load import Loaded
from services.config.rules import packs_needed
from services.config.schema import Config
from services.config.sources import Finding
from services.data.gpu_memory import drafter_memory
from services.data.plan import rows_limit
from services.lifecycle import arena_folder
from services.local.view import size
from services.transport.layout import slot_bytes

PROCESS_BYTES = {"coordinator": 80_000_000, "target": 330_000_000, "drafter": 320_000_000}
"""Of a process itself (Python, torch, its threads), measured: on a CPU, and"""
PROCESS_BYTES_ON_GPU = {"target": 1_120_000_000, "drafter": 1_420_000_000}
"""with a driver's context and pinned buffers."""

_IN_MEMORY = {"tmpfs", "ramfs", "hugetlbfs", ""}
_STATE_COPIES = 3  # float32 masters and AdamW's two moments
_LONGEST_NAME = "drafter-0123456789ab.inbox"


def slot_size(config: Config, model: ModelFacts) -> int:
    """Payload bytes of one slot."""
    documents = max(rows_limit(edge, config.plan.token_budget) for edge in config.plan.bucket_edges)
    shape = model.drafter
    return slot_bytes(config, hidden=shape.hidden_size, taps=shape.taps, max_documents=documents)


def arenas_size(config: Config, model: ModelFacts) -> int:
    """Bytes in `arena.dir` of two incarnations of every target. With `cuda_ipc` only headers are there."""
    each = arena_bytes(
        "cuda_ipc" if config.arena.kind == "cuda_ipc" else "shm",
        config.target.slots,
        slot_size(config, model),
    )
    return 2 * config.target.count * each


def host_memory(config: Config, model: ModelFacts) -> dict[str, int]:
    """Bytes of this machine's memory that a run takes at most while no dead target's arena is still in use,
    by what takes them.
    """
    targets_on_cpu, drafters_on_cpu = _on_cpu(config.target.gpus), _on_cpu(config.drafter.gpus)
    copies = (1 if model.shared else config.target.count) if targets_on_cpu else 0
    state = drafter_memory(config, model.drafter, slot_size(config, model)).total if drafters_on_cpu else 0
    return {
        "arenas": arenas_size(config, model) // 2,
        "target weights": copies * model.loaded_bytes,
        "drafters": config.drafter.count * state,
        "a checkpoint being written": checkpoint_size(model),
        "processes": PROCESS_BYTES["coordinator"]
        + config.target.count * _process("target", targets_on_cpu)
        + config.drafter.count * _process("drafter", drafters_on_cpu),
        "evaluator": config.evaluator.count * _evaluator(config, model),
    }


def named(parts: dict[str, int]) -> str:
    """For a reader; what takes nothing is left out."""
    return ", ".join(f"{name} {size(count)}" for name, count in parts.items() if count)


def _evaluator(config: Config, model: ModelFacts) -> int:
    """As a process it is a target; a drafter is loaded on the host, also for a GPU."""
    gpu = config.evaluator.gpu
    on_cpu = _on_cpu((gpu,) if gpu else ())
    loading = LOADING_BYTES * model.drafter.parameter_count
    return _process("target", on_cpu) + (sum(evaluator_memory(config, model).values()) if on_cpu else loading)


def _process(role: str, on_cpu: bool) -> int:
    return (PROCESS_BYTES if on_cpu else PROCESS_BYTES_ON_GPU)[role]


def checkpoint_size(model: ModelFacts) -> int:
    """Bytes of one checkpoint: weights and optimizer in float32."""
    return 4 * _STATE_COPIES * model.drafter.parameter_count


def check_room(loaded: Loaded, model: ModelFacts) -> list[Finding]:
    """Memory and disk, from the model's numbers."""
    return [*_arenas(loaded, model), *_cap(loaded, model), *_memory(loaded, model), *_disk(loaded, model)]


def check_places(loaded: Loaded, *, port_is_ours: bool) -> list[Finding]:
    """Folders, paths and the port. `port_is_ours`: a live coordinator of this run has it."""
    port = [] if port_is_ours else _port(loaded)
    return [*_folders(loaded), *_socket_path(loaded), *port]


def _arenas(loaded: Loaded, model: ModelFacts) -> Iterator[Finding]:
    config = loaded.config
    wanted, folder = arenas_size(config, model), nearest(config.arena.dir)
    free = free_bytes(folder) + _bytes_in(arena_folder(config))
    if wanted > free:
        subject = loaded.describe("arena.dir", "target.count", "target.slots", "plan.token_budget")
        count, slots, each = config.target.count, config.target.slots, size(slot_size(config, model))
        rule = (
            f"two arenas a target take {size(wanted)} (2 x {count} targets x {slots} slots x {each}), "
            f"{size(free)} are free in {folder}; lower target.slots or "
            "plan.token_budget, enlarge the tmpfs (compose: ARENA_SIZE), or choose another arena.dir"
        )
        yield Finding(subject, rule)


def _cap(loaded: Loaded, model: ModelFacts) -> Iterator[Finding]:
    config = loaded.config
    cap, needed = config.coordinator.in_flight_cap_bytes, packs_needed(config, config.target.count)
    wanted = needed * slot_size(config, model)
    if 0 < cap < wanted:
        rule = f"{needed} full packs must fit into it, {wanted} bytes; raise it to that"
        yield Finding(loaded.describe("coordinator.in_flight_cap_bytes", "plan.packs_per_step"), rule)


def _memory(loaded: Loaded, model: ModelFacts) -> Iterator[Finding]:
    parts = host_memory(loaded.config, model)
    wanted, available = sum(parts.values()), _available_memory()
    if wanted > available:
        rule = (
            f"the run takes up to {size(wanted)} ({named(parts)}), {size(available)} of memory are available"
        )
        yield Finding(loaded.describe("target.count", "target.slots"), f"{rule}; lower them")


def _disk(loaded: Loaded, model: ModelFacts) -> Iterator[Finding]:
    config = loaded.config
    kept = config.checkpoint.keep + 2  # the initial weights, and one being written
    wanted, folder = kept * checkpoint_size(model), nearest(config.run.dir)
    free = free_bytes(folder) + _bytes_in(config.run.dir / "checkpoints")
    if wanted > free:
        rule = f"{kept} checkpoints take {size(wanted)}, {size(free)} are free in {folder}; keep fewer"
        rule += " or move the run"
        yield Finding(loaded.describe("run.dir", "checkpoint.keep"), rule)


def _folders(loaded: Loaded) -> Iterator[Finding]:
    config = loaded.config
    folders = {"run.dir": config.run.dir, "arena.dir": config.arena.dir}
    if config.target.compile or not _on_cpu(config.drafter.gpus):
        folders["run.compile_cache"] = config.run.compile_cache.expanduser()
    for option, path in folders.items():
        folder = nearest(path)
        if not folder.is_dir():
            yield Finding(loaded.describe(option), f"{folder} is a file; choose a folder")
        elif not os.access(folder, os.W_OK | os.X_OK):
            yield Finding(
                loaded.describe(option), f"this user may not write into {folder}; choose another folder"
            )


def _socket_path(loaded: Loaded) -> Iterator[Finding]:
    length = len(str(arena_folder(loaded.config).resolve() / _LONGEST_NAME).encode())
    if length > MAX_IPC_PATH_BYTES:
        rule = (
            f"paths of sockets in it have {length} bytes, the kernel takes {MAX_IPC_PATH_BYTES}; shorten it"
        )
        yield Finding(loaded.describe("arena.dir"), rule)


def check_worth(loaded: Loaded) -> list[Finding]:
    """What works, but less well than its owner may think: to be told, not to be refused."""
    config, found = loaded.config, list[Finding]()
    kind = file_system(config.arena.dir)
    if kind not in _IN_MEMORY:
        rule = f"on {kind}, which is no memory: packs may wait for a disk; choose a tmpfs, as /dev/shm is"
        found.append(Finding(loaded.describe("arena.dir"), rule))
    idle = config.drafter.count - config.plan.packs_per_step
    if idle > 0:
        rule = (
            f"a drafter trains on whole packs, so {idle} of them always wait; more packs, or fewer drafters"
        )
        found.append(Finding(loaded.describe("drafter.count", "plan.packs_per_step"), rule))
    return found


def file_system(path: Path) -> str:
    """Kind of the one that holds `path`, or would: `tmpfs`, `ext4`; "" if the kernel does not tell."""
    inside, kind, depth = nearest(path).resolve(), "", 0
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, mounted, its_kind, *_ = line.split()
        point = Path(mounted.replace("\\040", " "))
        if inside.is_relative_to(point) and len(point.parts) >= depth:
            kind, depth = its_kind, len(point.parts)
    return kind


def _port(loaded: Loaded) -> Iterator[Finding]:
    options = loaded.config.coordinator
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((options.http_host, options.http_port))
        except OSError as error:
            rule = f"cannot listen there ({error.strerror}); choose a free port, or 0 for any"
            subject = loaded.describe("coordinator.http_host", "coordinator.http_port")
            yield Finding(subject, rule, in_use=error.errno == errno.EADDRINUSE)


def nearest(path: Path) -> Path:
    """`path`, or its first parent that exists: where it would be made."""
    path = path.absolute()
    return next(folder for folder in (path, *path.parents) if folder.exists())


def _bytes_in(folder: Path) -> int:
    """What a restart of the same run gives back: files of dead incarnations, older checkpoints."""
    return sum(file.lstat().st_blocks * 512 for file in folder.rglob("*")) if folder.is_dir() else 0


def _on_cpu(gpus: tuple[str, ...]) -> bool:
    return all(gpu == "cpu" for gpu in gpus) if gpus else not Path("/proc/driver/nvidia/version").exists()


def _available_memory() -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    (available,) = (line.split()[1] for line in lines if line.startswith("MemAvailable:"))
    return 1024 * int(available)
