"""What summing the gradient over two drafters adds to a step: after the last backward pass, and during it.

    python benchmarks/reduction.py                     two GPUs, Qwen3-8B shape, NCCL
    python benchmarks/reduction.py --shape tiny        also on a CPU, gloo

Two processes, each with a drafter of its own and packs of its own, take the same steps three ways:

    alone     nobody to sum with
    after     the last pack, then the sums
    during    the sums begin with the last pack's backward pass, as soon as a piece is complete

Both ranks must end with the same bits, and both ways of summing with weights that are close. Medians of
STEPS steps in one run; the slower rank's, since each waits for the other.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import socket
import statistics
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from drafter_step import SHAPES, VARIANTS, Case, machine, shape_of, wait

from protocol.messages import BatchId, Group, Member, StepTry
from services.drafter.meeting import meet
from services.drafter.reduce import GroupReducer, LocalReducer, Reducer
from services.drafter.step import LastPack

WARM_STEPS, STEPS = 2, 8
WAYS = ("alone", "after", "during")


class Rank:
    """One of the two drafters, with the case it trains."""

    def __init__(self, rank: int, shape: str, anchors: int, devices: tuple[str, str], group: Group) -> None:
        self.rank, self.device = rank, torch.device(devices[rank])
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        else:
            torch.set_num_threads(1)
        torch.manual_seed(0)
        self.case = Case(shape_of(shape), VARIANTS["four"], self.device, anchors)
        self.start = self.case.weights.masters.clone()
        torch.manual_seed(rank + 1)
        self.case.pack = self.case.draw_pack()
        self.group: Reducer = GroupReducer(
            meet(group, group.members[rank].incarnation, lambda _try: True), self.device
        )
        self.counter = 0

    def step(self, way: str, packs: int) -> None:
        """All of a step, until the weights are changed."""
        case, reducer = self.case, LocalReducer() if way == "alone" else self.group
        self.counter += 1
        step_try = StepTry(0, self.counter, 1, self.counter)
        for position in range(packs):
            last = LastPack(reducer, step_try) if way == "during" and position == packs - 1 else None
            case.step.add(position, BatchId(self.rank, position), case.pack, last=last)
        case.step.apply(case.steps_done, case.step.seal(reducer, step_try))

    def measure(self, way: str, packs: int) -> tuple[float, list[int]]:
        """(median ms of a step, digest of the weights) from the weights that all ways begin with."""
        masters, *moments = self.case.weights.state
        masters.copy_(self.start)
        for tensor in moments:
            tensor.zero_()
        took_ms = []
        for number in range(WARM_STEPS + STEPS):
            wait(self.device)
            begun_s = time.perf_counter()
            self.step(way, packs)
            wait(self.device)
            if number >= WARM_STEPS:
                took_ms.append((time.perf_counter() - begun_s) * 1e3)
        return statistics.median(took_ms), digest(self.case.weights.masters)


def digest(weights: torch.Tensor) -> list[int]:
    """Equal only for equal bits, all but surely."""
    bits = weights.view(torch.int32).to(torch.int64)
    return [int(bits.sum()), int((bits * torch.arange(1, bits.numel() + 1, device=bits.device)).sum())]


def run_rank(pipe: Connection, rank: int, options: argparse.Namespace, group: Group) -> None:
    one = Rank(rank, options.shape, options.anchors, devices(), group)
    for packs in options.packs:
        for way in WAYS:
            took_ms, bits = one.measure(way, packs)
            change = float((one.case.weights.masters - one.start).norm())
            pipe.send((took_ms, bits, change))
    pipe.recv()
    one.group.close()


def devices() -> tuple[str, str]:
    return ("cuda:0", "cuda:1") if torch.cuda.device_count() > 1 else ("cpu", "cpu")


def run(options: argparse.Namespace) -> dict[str, Any]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        store = f"127.0.0.1:{server.getsockname()[1]}"
    members = tuple(Member(rank=rank, incarnation=f"drafter-{rank}") for rank in range(2))
    group = Group(generation=1, members=members, store=store)
    spawn = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    for rank in range(2):
        ours, theirs = spawn.Pipe()
        process = spawn.Process(target=run_rank, args=(theirs, rank, options, group), daemon=True)
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    steps: dict[str, dict[str, float]] = {}
    for packs in options.packs:
        changes = {}
        for way in WAYS:
            (took_ms, bits, changes[way]), (other_ms, others, _) = (pipe.recv() for pipe in pipes)
            if way != "alone" and bits != others:
                raise SystemExit(f"{way}, {packs} packs: the ranks' weights differ")
            steps.setdefault(f"packs_{packs}", {})[f"{way}_ms"] = max(took_ms, other_ms)
        if abs(changes["after"] - changes["during"]) > 1e-2 * changes["after"]:
            raise SystemExit(f"{packs} packs: the weights were changed by {changes}")
    for pipe, process in zip(pipes, processes, strict=True):
        pipe.send("close")
        process.join(20)
    for found in steps.values():
        shown = {way: found[f"{way}_ms"] - found["alone_ms"] for way in WAYS[1:]}
        found |= {f"added_{way}_ms": added for way, added in shown.items()}
    return {
        "benchmark": "reduction", "machine": machine(torch.device(devices()[0])), "shape": options.shape,
        "anchors": options.anchors, "parameters": shape_of(options.shape).parameter_count, "steps": steps,
    }  # fmt: skip


def main() -> None:
    on_gpus = torch.cuda.device_count() > 1
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen3-8b" if on_gpus else "tiny")
    parser.add_argument("--anchors", type=int, default=512 if on_gpus else 32)
    parser.add_argument("--packs", type=int, nargs="+", default=[1, 4], help="of a step, each rank's")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    text = json.dumps(run(options), indent=1)
    print(text)
    if options.out:
        options.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
