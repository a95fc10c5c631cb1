"""A role that was not told its place takes the lowest free one: a file lock in the run's folder in memory.

    <arena folder>/target-0.place     held by a living target, for its life

With the place comes the device: entry 0 of target.gpus is target 0's. A place is free a millisecond after
its process died, so a container that is started anew finds its own again, before it loads a model and
whether or not a coordinator is up. The Hello then asks for that place, and the coordinator has the last
word. Roles of one run either all name their place (`--index`) or all leave it open. 20 us.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Literal

from protocol.errors import AlreadyRunning
from protocol.files import FileLock, private_lock
from services.config.schema import Config
from services.lifecycle import arena_folder

SUFFIX = ".place"


def places(config: Config, role: Literal["target", "drafter"]) -> int:
    """How many of `role` the run has room for. More devices may be listed than are used."""
    return config.target.count if role == "target" else config.drafter.count


def claim_place(config: Config, role: Literal["target", "drafter"]) -> tuple[FileLock, int]:
    """The lock, to be held to the end, and the index. AlreadyRunning: every place has a living owner."""
    folder, count = arena_folder(config), places(config, role)
    for index in range(count):
        with suppress(AlreadyRunning):
            return private_lock(folder, f"{role}-{index}{SUFFIX}"), index
    raise AlreadyRunning(
        f"{role}: each of its {count} places in {folder} has a living process; raise {role}.count, "
        f"or list more devices in {role}.gpus"
    )


def forget_places(folder: Path) -> None:
    """At the end of a run: the files that killed roles left behind, not those of roles that still load."""
    for file in folder.glob(f"*{SUFFIX}"):
        with suppress(AlreadyRunning, FileNotFoundError):
            FileLock(file).acquire().release(unlink=True)
