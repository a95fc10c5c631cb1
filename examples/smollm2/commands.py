"""Commands as a user would type them, GPUs lent to several jobs at a time, and lines that say when."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue

from rich.console import Console

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
BASE = HERE / "smollm2.toml"

console = Console(highlight=False, width=140)
began_s = time.monotonic()


class Places:
    """GPUs, each lent to `side_by_side` jobs at a time."""

    def __init__(self, gpus: list[str], side_by_side: int) -> None:
        self.count = len(gpus) * side_by_side
        self._free: SimpleQueue[str] = SimpleQueue()
        for _ in range(side_by_side):
            for gpu in gpus:
                self._free.put(gpu)

    @contextmanager
    def one(self) -> Iterator[dict[str, str]]:
        """The environment of a job that has the GPU for itself as device 0."""
        gpu = self._free.get()
        try:
            yield {**os.environ, "CUDA_VISIBLE_DEVICES": gpu, "OMP_NUM_THREADS": "2" if gpu else "1"}
        finally:
            self._free.put(gpu)


def draftmill(log: Path, *words: str, env: dict[str, str] | None = None, into: Path | None = None) -> bool:
    """One command, its output in `log`, its result in `into`; whether it ended well."""
    with log.open("a") as written:
        print("$ draftmill", *words, file=written, flush=True)
        found = subprocess.run(
            [sys.executable, "-m", "services.cli", *words], cwd=ROOT, env=env, check=False,
            stdout=subprocess.PIPE if into else written, stderr=written, text=True,
        )  # fmt: skip
    if found.returncode:
        say(f"[red]{words[0]} ended with {found.returncode}[/red]: {log}")
        return False
    if into:
        aside = into.with_name(f".{into.name}")
        aside.write_text(found.stdout)
        aside.rename(into)
    return True


def say(text: str) -> None:
    console.print(f"[dim]{time.monotonic() - began_s:6.0f} s[/dim] {text}")
