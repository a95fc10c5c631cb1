"""Drafters that reduce, die, survive and take over state, led through a pipe; children of a forkserver.

    survive   ("form", Group) -> (members summed, digest), why the group ended, (members summed, when) alone
              "changed" in the pipe: its orders want another group      ("leave",) -> what it still holds
    join      ("form", Group, how) -> (members summed, digest); dies at the door of a sum or at any moment
    vanish    ("form", Group, where); ends before its group is connected, or before its first sum
    outlive   Group -> why it ended, members summed alone; Group -> members summed in it

Where a survivor and a newcomer sum, they begin as trainers do, by copying the survivor's state. Not a test
module: a forkserver that asked for GPUs could not have children that use them.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from protocol.errors import GroupBroken
from protocol.messages import Group, StepAt, StepTry
from services.drafter.meeting import Meeting, Standing, meet, plan_copies
from services.drafter.reduce import GroupReducer, LocalReducer, TryLeft

SURVIVOR, NEWCOMER = "drafter-survivor", "drafter-newcomer"
DOOR, ANY_MOMENT = "door", "any moment"
CONNECTING, ARRIVED = "connecting", "arrived"


class Member:
    """One drafter: a state, a gradient, and the groups it stands in."""

    def __init__(self, name: str, pipe: Connection, device: torch.device, elements: int) -> None:
        torch.set_num_threads(1)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        self.name, self.pipe, self.device = name, pipe, device
        self.state = torch.full((elements,), 0.0, device=device)
        self.gradient = torch.zeros(elements, device=device)
        self.step = 0

    def form(self, group: Group, wanted: Any) -> tuple[Meeting, GroupReducer]:
        """As a trainer does: meet, tell, copy the state to whom it lacks."""
        at = StepAt(0, self.step)
        if self.name == SURVIVOR:
            standing = Standing(at, "", None)
        else:
            standing = Standing(None, SURVIVOR, StepAt(0, group.generation))
        meeting = meet(group, self.name, wanted)
        standings = meeting.share(standing)
        reducer = GroupReducer(meeting, self.device)
        for source, receiver in plan_copies(meeting.names, standings):
            if meeting.rank == source:
                reducer.send([self.state], receiver)
            else:
                reducer.receive([self.state], source)
        return meeting, reducer

    def sum_(self, reducer: Any, generation: int, counter: int) -> float:
        """One sum of ones: how many stood in it."""
        self.gradient.fill_(1.0)
        reducer.arrive(StepTry(0, generation, 1, counter))
        reducer.start(self.gradient)
        reducer.finish()
        self.wait()
        reducer.confirm()
        low, high = float(self.gradient.min()), float(self.gradient.max())
        assert low == high, f"torn: {low} to {high}"
        return low

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def digest(self) -> int:
        return int(self.state.view(torch.int32).sum(dtype=torch.int64))


def survive(pipe: Connection, device: torch.device, elements: int) -> None:
    """Lives through all rounds; a message in the pipe means that its orders have changed."""
    member = Member(SURVIVOR, pipe, device, elements)
    pipe.send("ready")
    while True:
        what, *rest = pipe.recv()
        if what == "leave":
            pipe.send(account(device))
            return
        group: Group = rest[0]
        member.step = group.generation
        member.state.copy_(torch.arange(elements, device=device) * float(group.generation))
        _, reducer = member.form(group, lambda _try: not pipe.poll())
        pipe.send((member.sum_(reducer, group.generation, 1), member.digest()))
        pipe.send(until_broken(member, reducer, group.generation))
        reducer.close()
        changed = pipe.recv()
        assert changed == "changed", changed
        pipe.send((member.sum_(LocalReducer(), group.generation, 0), time.monotonic()))


def until_broken(member: Member, reducer: GroupReducer, generation: int) -> str:
    """Sum until a member is lost; why it ended."""
    counter = 1
    while True:
        counter += 1
        try:
            assert member.sum_(reducer, generation, counter) == 2.0
        except (GroupBroken, TryLeft) as error:  # it died inside a sum, or before one
            return f"{counter}: {error}"


def join(pipe: Connection, device: torch.device, elements: int) -> None:
    """A newcomer that is ready before it is needed, takes the state over, and dies."""
    member = Member(NEWCOMER, pipe, device, elements)
    member.wait()
    pipe.send("ready")
    _, group, how = pipe.recv()
    meeting, reducer = member.form(group, lambda _try: True)
    pipe.send((member.sum_(reducer, group.generation, 1), member.digest()))
    if how == ANY_MOMENT:
        delay_s = random.Random(group.generation).uniform(0.0, 0.05)
        timer = threading.Timer(delay_s, os.kill, [os.getpid(), signal.SIGKILL])
        timer.daemon = True
        timer.start()
        until_broken(member, reducer, group.generation)
    member.sum_(reducer, group.generation, 2)
    step_try = StepTry(0, group.generation, 1, 3)
    meeting.gather("try/" + "-".join(map(str, step_try)), None)
    threading.Event().wait(0.05)  # the survivor is to read the verdict in a store that may die with this one
    os.kill(os.getpid(), signal.SIGKILL)


def vanish(pipe: Connection, device: torch.device, elements: int) -> None:
    """A newcomer that is gone before the survivor knows it from a collective."""
    member = Member(NEWCOMER, pipe, device, elements)
    member.wait()
    pipe.send("ready")
    _, group, where = pipe.recv()
    meeting = meet(group, NEWCOMER, lambda _try: True)
    meeting.share(Standing(None, "", None))
    if where == CONNECTING:
        os._exit(1)
    GroupReducer(meeting, device).arrive(StepTry(0, group.generation, 1, 1))
    os._exit(1)


def outlive(pipe: Connection, device: torch.device, elements: int) -> None:
    """Loses a group before its first sum, and stands in another one, in the same process."""
    member = Member(SURVIVOR, pipe, device, elements)
    member.wait()
    pipe.send("ready")
    group = pipe.recv()
    try:
        meeting = meet(group, SURVIVOR, lambda _try: not pipe.poll())
        meeting.share(Standing(None, "", None))
        reducer = GroupReducer(meeting, device)
        try:
            member.sum_(reducer, group.generation, 1)
        finally:
            reducer.close()
        pipe.send("not broken")
    except (GroupBroken, TryLeft) as error:
        pipe.send(str(error))
    changed = pipe.recv()
    assert changed == "changed", changed
    pipe.send(member.sum_(LocalReducer(), group.generation, 0))
    group = pipe.recv()
    member.step = group.generation
    _, reducer = member.form(group, lambda _try: True)
    pipe.send(member.sum_(reducer, group.generation, 1))
    pipe.recv()


def account(device: torch.device) -> dict[str, float]:
    """What a survivor holds after all the groups it has been in."""
    lines = Path("/proc/self/status").read_text().splitlines()
    found = {
        "threads": float(next(line.split()[1] for line in lines if line.startswith("Threads"))),
        "files": float(len(list(Path("/proc/self/fd").iterdir()))),
        "gpu_used_mib": 0.0,
    }
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        found["gpu_used_mib"] = (total - free) / 2**20
    return found
