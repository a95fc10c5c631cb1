"""`draftmill up`, coordinator, target and drafter as they are, but for a target's weights: random, and made
where they are used.

    python -m stages.roles up --run.dir ...      starts its roles with this program
    python -m stages.roles target --index 0 ...

Target and drafter leave in run.dir/memory-ROLE.json, once a second, what torch's allocator held at most: a
target's since its weights were made, which a real one reads, a drafter's since its start.
"""

from __future__ import annotations

import json
import sys
import threading
import traceback
from pathlib import Path
from typing import Any

from rich.console import Console

from protocol.errors import DraftmillError
from services import cli
from services import logging as events
from services.config.environment import keep_compiled
from services.config.load import load
from services.config.schema import Config
from services.config.sources import split_flags
from services.lifecycle import ExitCode, exit_code, exit_on_thread_failure, leave, new_incarnation
from services.local.display import display
from services.local.up import Up
from services.local.wakeups import wakeups

PROGRAM = (sys.executable, "-m", "stages.roles")
PERIOD_S = 1.0


def main() -> None:
    """Torch is imported by those roles only that need it."""
    flags, words = split_flags(sys.argv[1:])
    config = load(None, flags).config
    index = int(words[-1]) if "--index" in words else 0
    match words[0]:
        case "up":
            leave(run_up(config, [f"{flag}={value}" for flag, value in flags]))
        case "target":
            leave(guarded_target(config, index))
        case "drafter":
            from services.drafter.start import device_of

            watch_memory(config, "drafter", device_of(config, index))
            cli.main()
        case _:
            cli.main()


def run_up(config: Config, words: list[str]) -> ExitCode:
    console = Console(highlight=False)
    with wakeups() as waits, display(console) as shown:
        up = Up(config, words, shown, waits, program=PROGRAM)
        verdict = up.run()
    up.conclude(console, verdict)
    return verdict.code


def guarded_target(config: Config, index: int) -> ExitCode:
    """As services/cli.py ends a role: what went wrong is in its log and decides the exit code."""
    try:
        return serve_target(config, index)
    except DraftmillError as error:
        traceback.print_exc()
        return exit_code(error)
    except Exception:  # noqa: BLE001 - the process ends here
        traceback.print_exc()
        return ExitCode.UNEXPECTED


def serve_target(config: Config, index: int) -> ExitCode:
    """What services/target/server.py does, around another model."""
    keep_compiled(config.run.compile_cache)
    events.setup(config.log, "target", index)
    exit_on_thread_failure()
    import torch

    from services.data.training_data import TrainingData
    from services.dflash.drafter_config import derive
    from services.target import start
    from services.target.server import join_run
    from stages.shapes import random_target

    if config.target.threads:
        torch.set_num_threads(config.target.threads)
    device = start.device_of(config, index)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    target = random_target(config.model, device)
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    watch_memory(config, "target", device)
    shape = derive(target.config, config.drafter, None, stop_ids=target.stop_ids)
    started = start.assemble(config, TrainingData.open(config.data), target, shape)
    return join_run(config, started, new_incarnation("target"), index)


def watch_memory(config: Config, role: str, device: Any) -> None:
    """In a thread that ends with the process. Never the first to touch the device."""
    file = config.run.dir / f"memory-{role}.json"
    waiting = threading.Event()

    def watch() -> None:
        while not waiting.wait(PERIOD_S):
            write(file, figures(device))

    threading.Thread(target=watch, name="memory", daemon=True).start()


def figures(device: Any) -> dict[str, int]:
    import torch

    if device.type != "cuda" or not torch.cuda.is_initialized():
        return {}
    return {
        "allocated_peak_bytes": torch.cuda.max_memory_allocated(device),
        "reserved_peak_bytes": torch.cuda.max_memory_reserved(device),
    }


def write(file: Path, content: dict[str, int]) -> None:
    """Whole or not at all: somebody may be reading."""
    if not file.parent.is_dir():
        return
    aside = file.with_suffix(".partial")
    aside.write_text(json.dumps(content))
    aside.rename(file)


if __name__ == "__main__":
    main()
