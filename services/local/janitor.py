"""Removes what dead processes left in the run's folder in memory: arenas can be tens of gigabytes.

Each incarnation's files are `<incarnation>.<kind>`, and `<incarnation>.lock` is held while it lives; free
or missing means dead. The coordinator does the same while it runs; this is for when it does not.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

from protocol.files import is_alive


def sweep(folder: Path) -> int:
    """Unlink files of dead incarnations, then the folder if it is empty. Returns the bytes freed."""
    if not folder.is_dir():
        return 0
    freed_bytes = 0
    for file in sorted(folder.iterdir()):
        incarnation = file.name.partition(".")[0]
        if not is_alive(folder / f"{incarnation}.lock"):
            with contextlib.suppress(FileNotFoundError):  # another one sweeps, too
                freed_bytes += file.stat().st_size
                file.unlink()
    with contextlib.suppress(OSError):  # not empty: somebody lives
        folder.rmdir()
    return freed_bytes
