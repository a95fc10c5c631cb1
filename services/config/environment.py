"""What a child process finds in its environment: this process's, and how many threads it may use.

Two torch processes with default thread counts on the same cores are ten times slower each, and OpenMP
threads that spin while they wait take the cores from the others.
"""

from __future__ import annotations

import os

_THREAD_COUNTS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


def child_environment(threads: int) -> dict[str, str]:
    """A copy of the environment in which numeric libraries use `threads` threads; 0 leaves them alone."""
    environ = os.environ | {"TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1"}
    if threads:
        environ |= dict.fromkeys(_THREAD_COUNTS, str(threads)) | {"OMP_WAIT_POLICY": "PASSIVE"}
    return environ
