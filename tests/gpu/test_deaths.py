"""kill -9 in the middle of a copy: nothing stale is ever trusted, and nothing is left on host or GPU.

Lanes run side by side, one a kind of arena and a victim. In a lane one process survives all deaths of its
partner: a drafter whose targets die while they copy into a slot, or a target whose drafters die while they
copy out of one. Starting a process is nearly all of a death's cost (one to four seconds with a GPU), so the
next victim starts while this one dies. TORTURE_KILLS says how many die in all (50); one case needs no GPU.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import death_peer
import pytest
import torch

from protocol.arena import Arena, sweep
from protocol.codec import decode, encode
from protocol.messages import BatchId, Pack, Stamp

FORKSERVER = multiprocessing.get_context("forkserver")  # imports torch once, and never asks it for GPUs
FORKSERVER.set_forkserver_preload(
    ["services.drafter.reduce", "services.transport.reader", "services.transport.writer"]
)
PROCESSES = threading.Lock()  # multiprocessing reaps any child in any thread that starts another
KILLS = os.environ.get("TORTURE_KILLS")
PATIENCE_S, ALL_S = 60.0, 110.0  # deadlines, not waits
SLOTS, WARM = 3, 3
MIB = 1 << 20


class Child:
    """A process, and the pipe to it."""

    def __init__(self, run: Callable[..., None], *arguments: Any) -> None:
        self.pipe, theirs = FORKSERVER.Pipe()
        self.process = FORKSERVER.Process(target=run, args=(theirs, *arguments), daemon=True)
        with PROCESSES:
            self.process.start()
        theirs.close()

    def hear(self) -> Any:
        assert self.pipe.poll(PATIENCE_S), "the child says nothing"
        try:
            return self.pipe.recv()
        except (EOFError, ConnectionResetError):
            raise AssertionError(f"the child ended with status {self.ended()}") from None

    def ask(self, *what: Any) -> Any:
        self.pipe.send(what)
        return self.hear()

    def ended(self) -> int | None:
        """Its exit code, once it has one."""
        assert wait([self.process.sentinel], PATIENCE_S), "the child lives on"
        with PROCESSES:
            self.process.join(PATIENCE_S)
            return self.process.exitcode

    def last_words(self) -> list[Any]:
        """What a dead child had said before it died."""
        said = []
        while self.pipe.poll(0):
            try:
                said.append(self.pipe.recv())
            except (EOFError, OSError):
                break
        return said

    def end(self) -> None:
        if self.process.pid is not None:
            self.process.kill()
        self.ended()
        self.pipe.close()


@dataclass
class Lane:
    """One kind of arena, one kind of victim, one folder."""

    folder: Path
    kind: str
    devices: tuple[torch.device, torch.device]  # of target and drafter
    tokens: int
    deaths: int
    late: int = 0  # the copy was over before its process was
    torn: int = 0  # slots that hold rows of two packs
    lost: int = 0  # drafters whose CUDA did not survive the death of a ring's owner
    done: int = 0
    number: int = 0
    children: list[Child] = field(default_factory=list)
    chance: random.Random = field(default_factory=lambda: random.Random(7))

    def target(self) -> tuple[str, Child]:
        self.number += 1
        name = f"target-{self.kind}-{self.number}"
        options = (self.folder, name, self.kind, self.devices[0], self.tokens, SLOTS)
        return name, self._kept(Child(death_peer.target, *options))

    def drafter(self) -> Child:
        return self._kept(Child(death_peer.drafter, self.folder, self.devices[1]))

    def write(self, target: Child, slot: int) -> str:
        """A new pack in `slot`: the hex of its message."""
        self.number += 1
        said, message = target.ask("write", self.number, slot)
        assert said == "written"
        return str(message)

    def end(self) -> None:
        for child in self.children:
            child.end()

    def _kept(self, child: Child) -> Child:
        self.children.append(child)
        return child


def targets_die(lane: Lane) -> None:
    """A drafter sees one target after the other die while it writes."""
    drafter, following = lane.drafter(), lane.target()
    assert drafter.hear() == "ready"
    for _ in range(lane.deaths):
        (name, target), following = following, lane.target()
        assert target.hear() == (lane.kind, lane.kind == "pinned")
        messages = [lane.write(target, slot) for slot in range(SLOTS)]
        assert [drafter.ask("open", message) for message in messages] == ["ok"] * SLOTS
        drafter = one_target_dies(lane, target, drafter, messages)
        tear(lane, name, messages[0])
        swept = sweep(lane.folder, keep=(following[0],))
        assert name in swept.incarnations
        kept = drafter.ask("keep", ())
        assert kept == {"mapped": [], "deleted_maps": [], "allocated": 0}, kept
        lane.done += 1
    check_leaving(drafter, mapped=True)
    assert following[1].hear() == (lane.kind, lane.kind == "pinned")
    check_leaving(following[1])


def one_target_dies(lane: Lane, target: Child, drafter: Child, messages: list[str]) -> Child:
    """The first slot is overwritten, its old pack being read; only whole packs are good afterwards."""
    lane.number += 1
    target.pipe.send(("die", lane.number, 0, lane.chance.uniform(0.1, 0.9)))
    seen = drafter.ask("open", messages[0])
    assert target.ended() == -9
    late = target.last_words()
    whole = "StalePack" if lane.kind == "cuda_ipc" else "ok"  # a ring dies with its target
    if seen.startswith("CUDA") and lane.kind == "cuda_ipc":
        lane.lost += 1
        drafter = lane.drafter()
        assert drafter.hear() == "ready"
    else:
        assert seen in ("ok", "StalePack"), seen
    assert drafter.ask("open", messages[0]) == "StalePack", "the pack before"
    assert drafter.ask("open", messages[1]) == whole, "a pack in a slot beside it"
    if late:
        lane.late += 1
        assert drafter.ask("open", late[0][1]) == whole, "a pack written whole before the death"
    else:
        found = drafter.ask("open", forged(messages[0], lane.number))
        # DecodeError: sealed, and killed before it could tell; what is forged contradicts the seal
        assert found in ("StalePack", "DecodeError"), f"the pack half written: {found}"
    return drafter


def forged(message: str, number: int) -> str:
    """What a target would have said of pack `number`, had it lived to say it."""
    pack = decode([b"Pack", bytes.fromhex(message)])
    assert isinstance(pack, Pack)
    descriptor = pack.descriptor.model_copy(
        update={"batch": BatchId(0, number), "attempt": Stamp(1, number), "checksum": None}
    )
    return encode(pack.model_copy(update={"descriptor": descriptor}))[1].hex()


def tear(lane: Lane, name: str, message: str) -> None:
    """Count the slot if it holds rows of the pack before and of the pack that was being written."""
    if lane.kind == "cuda_ipc":
        return
    old = decode([b"Pack", bytes.fromhex(message)])
    assert isinstance(old, Pack)
    arena = Arena.open(lane.folder, f"{name}.arena")
    words_W = torch.frombuffer(arena.payload(0), dtype=torch.int64)[: lane.tokens * death_peer.WIDTH // 4]
    places = torch.linspace(0, words_W.numel() - 1, 4096, dtype=torch.float64).to(torch.int64)
    line = words_W[places] - places * death_peer.ODD
    before = line == old.descriptor.batch.index * 7919
    after = line == lane.number * 7919
    assert bool((before | after).all()), "rows that nobody wrote"
    lane.torn += bool(before.any() and after.any())


def drafters_die(lane: Lane) -> None:
    """A target sees one drafter after the other die while it reads; the next one reads the same pack."""
    (_, target), following = lane.target(), lane.drafter()
    assert target.hear() == (lane.kind, lane.kind == "pinned")
    messages = [lane.write(target, slot) for slot in range(SLOTS)]
    for _ in range(lane.deaths):
        drafter, following = following, lane.drafter()
        assert drafter.hear() == "ready"
        assert drafter.ask("open", messages[0]) == "ok", "the pack that the dead one was reading"
        for slot in range(SLOTS):
            stale, messages[slot] = messages[slot], lane.write(target, slot)
            assert drafter.ask("open", stale) == "StalePack"
            assert drafter.ask("open", messages[slot]) == "ok"
        drafter.pipe.send(("die", messages[0], lane.chance.uniform(0.1, 0.9)))
        assert drafter.ended() == -9
        lane.late += bool(drafter.last_words())
        lane.done += 1
    assert following.hear() == "ready"
    assert following.ask("open", messages[0]) == "ok"
    check_leaving(following, mapped=True)
    check_leaving(target)


def check_leaving(child: Child, *, mapped: bool = False) -> None:
    """It leaves in order, and holds nothing then (`mapped`: it is a drafter)."""
    held = child.ask("leave")
    assert held["deleted_maps"] == [], held
    if mapped:
        assert held["mapped"] == [] and held["allocated"] == 0, held
    assert child.ended() == 0


def run_all(folder: Path, kinds: tuple[str, ...], devices: tuple[str, str], mib: int, kills: int) -> None:
    """Kill `kills` processes in as many lanes as there are kinds and victims."""
    plays = [play for play in (targets_die, drafters_die) for _ in kinds]
    lanes = []
    for number, (play, kind) in enumerate(zip(plays, kinds * 2, strict=True)):
        where = folder / f"{kind}-{play.__name__}"
        where.mkdir()
        deaths = kills // len(plays) + (number < kills % len(plays))
        places = (torch.device(devices[0]), torch.device(devices[1]))
        lanes.append(Lane(where, kind, places, mib * MIB // (2 * death_peer.WIDTH), deaths))
    begun_s = time.monotonic()
    with ThreadPoolExecutor(len(lanes)) as pool:
        futures = [pool.submit(play, lane) for play, lane in zip(plays, lanes, strict=True)]
        try:
            wait_for(futures, ALL_S)
        finally:
            for lane in lanes:  # whoever still waits for a child hears that it is dead
                lane.end()
    print(f"\n{time.monotonic() - begun_s:.0f} s")
    for play, lane in zip(plays, lanes, strict=True):
        print(
            f"{lane.kind} {play.__name__}: {lane.done} of {lane.deaths} deaths, "
            f"{lane.late} after the copy, {lane.torn} torn slots, {lane.lost} drafters lost"
        )
    for future in futures:
        future.result(timeout=0)
    torn = sum(lane.torn for lane in lanes)
    assert torn or kills < 20, "no death was inside a copy: the clock of death is wrong"  # a few may all miss
    for lane in lanes:
        sweep(lane.folder)
        assert list(lane.folder.iterdir()) == []


def free_of_gpus(count: int) -> list[int]:
    child = Child(death_peer.free_bytes, count)
    free = child.hear()
    child.end()
    return list(free)


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="draftmill-", dir="/dev/shm") as name:
        yield Path(name)


@pytest.mark.process
def test_deaths_inside_copies_leave_nothing_stale_and_nothing_behind(folder: Path) -> None:
    run_all(folder, ("shm",), ("cpu", "cpu"), mib=16, kills=int(KILLS or 4))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_deaths_inside_copies_of_gpus_leave_nothing_stale_and_nothing_behind(folder: Path) -> None:
    gpus = torch.cuda.device_count()
    before, shm_before = free_of_gpus(gpus), os.statvfs("/dev/shm").f_bfree
    devices = ("cuda:0", f"cuda:{min(1, gpus - 1)}")
    run_all(folder, ("pinned", "shm", "cuda_ipc"), devices, mib=128, kills=int(KILLS or 50))
    deadline_s, after = time.monotonic() + 20.0, free_of_gpus(gpus)
    while any(had - has > 32 * MIB for had, has in zip(before, after, strict=True)):
        assert time.monotonic() < deadline_s, f"GPU memory is gone: {before} free before, {after} after"
        after = free_of_gpus(gpus)
    print(f"free before {before}, after {after}")
    kept = (shm_before - os.statvfs("/dev/shm").f_bfree) * os.statvfs("/dev/shm").f_frsize
    assert kept < 32 * MIB, f"{kept:,} bytes of /dev/shm are gone"
