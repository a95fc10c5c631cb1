"""An evaluation by several processes side by side: each has its own target and every n-th prompt.

Decoding one sequence of a small model keeps a GPU busy for a tenth of the time: the host launches kernels
and waits. Acceptance lengths are the same whoever decodes; seconds are not: processes wait for each other's
kernels, so take speeds from an evaluation by one. Costs a start and a copy of the target a process.
"""

from __future__ import annotations

import multiprocessing
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

from protocol.errors import ConfigError, FatalError
from services.config.schema import Config
from services.dflash.eval_result import EvalResult, interleaved
from services.dflash.evaluate import Progress, run_evals


def run_evals_in_parts(
    checkpoint: Path, config: Config, *, processes: int, progress: Progress | None = None, **options: Any
) -> list[EvalResult]:
    """`run_evals` with the prompts shared out. Raises what a part raised; the others are then ended."""
    if processes == 1:
        return run_evals(checkpoint, config, progress=progress, **options)
    spawn = multiprocessing.get_context("spawn")
    threads = max(1, torch.get_num_threads() // processes)
    readers: dict[Connection, int] = {}
    workers = []
    for number in range(processes):
        reader, writer = spawn.Pipe(duplex=False)
        call = (writer, checkpoint, config, (number, processes), threads, options)
        worker = spawn.Process(target=_part, args=call, name=f"eval-{number}", daemon=True)
        worker.start()
        writer.close()
        readers[reader] = number
        workers.append(worker)
    try:
        return _collect(readers, processes, progress)
    finally:
        for worker in workers:
            worker.terminate()  # those that are done are not harmed
            worker.join()


def _collect(readers: dict[Connection, int], processes: int, progress: Progress | None) -> list[EvalResult]:
    done, of = [0] * processes, [0] * processes
    found: dict[int, list[EvalResult]] = {}
    while readers:
        for reader in wait(list(readers)):
            assert isinstance(reader, Connection)
            number = readers[reader]
            try:
                said = reader.recv()
            except EOFError:
                raise ConfigError(
                    f"part {number} of the evaluation died (its traceback is above; without one it was "
                    f"killed); if memory was short, try fewer than {processes} processes"
                ) from None
            if isinstance(said, FatalError):
                raise said
            if isinstance(said, list):
                found[number] = said
                del readers[reader]
                continue
            done[number], of[number] = said
            if progress is not None:
                progress(sum(done), sum(of))
    by_size = zip(*(found[number] for number in range(processes)), strict=True)
    return [interleaved(parts) for parts in by_size]


def _part(
    to: Connection, checkpoint: Path, config: Config, part: tuple[int, int], threads: int,
    options: dict[str, Any],
) -> None:  # fmt: skip
    torch.set_num_threads(threads)
    try:
        to.send(
            run_evals(checkpoint, config, part=part, progress=lambda done, of: to.send((done, of)), **options)
        )
    except FatalError as error:
        to.send(error)
