"""What a child process and torch's compiler find in the environment.

Two torch processes with default thread counts on the same cores are ten times slower each, and OpenMP
threads that spin while they wait take the cores from the others.
"""

from __future__ import annotations

import os
from pathlib import Path

_THREAD_COUNTS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


def child_environment(threads: int) -> dict[str, str]:
    """A copy of the environment in which numeric libraries use `threads` threads; 0 leaves them alone."""
    environ = os.environ | {"TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1"}
    if threads:
        environ |= dict.fromkeys(_THREAD_COUNTS, str(threads)) | {"OMP_WAIT_POLICY": "PASSIVE"}
    return environ


def keep_compiled(folder: Path) -> None:
    """Have torch's compiler keep its kernels in `folder` (made when it first compiles), Triton's among them.

    Without it they lie in the temporary folder, and after a restart of the machine or the container every
    role compiles again: a drafter's first step took 35 s instead of 10 (docs/performance.md).
    """
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder.expanduser().absolute())
