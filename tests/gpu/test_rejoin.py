"""A drafter is killed in an all-reduce, the survivor goes on alone, a newcomer joins: time after time.

The survivor lives through all rounds. In the first half it hosts the group's store, in the second half the
victim does; victims die in turns at the door of a sum, which leaves the survivor inside it, and at a random
moment. What is timed begins with the kill: until the survivor has summed alone, and until it has summed with
the newcomer, who was started before, so that it is the group's time and not that of a process's start.

A member may also be lost before its group has summed anything: while NCCL connects, which nothing can abort,
or with its arrival. The survivor is out within seconds of its orders' change, and its process good for the
next group.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import statistics
import time
from multiprocessing.connection import wait
from typing import Any

import pytest
import rejoin_peer
import torch

from protocol.messages import Group, Member

FORKSERVER = multiprocessing.get_context("forkserver")  # imports torch once, and never asks it for GPUs
FORKSERVER.set_forkserver_preload(
    ["services.drafter.reduce", "services.transport.reader", "services.transport.writer"]
)
ROUNDS = os.environ.get("TORTURE_ROUNDS")
PATIENCE_S, ALL_S = 40.0, 145.0  # deadlines, not waits
ALONE_S, TOGETHER_S = 5.0, 20.0  # bounds: a machine may be busy, what is measured is printed


class Child:
    """A process, and the pipe to it."""

    def __init__(self, run: Any, device: str, elements: int) -> None:
        self.pipe, theirs = FORKSERVER.Pipe()
        arguments = (theirs, torch.device(device), elements)
        self.process = FORKSERVER.Process(target=run, args=arguments, daemon=True)
        self.process.start()
        theirs.close()

    def hear(self) -> Any:
        assert self.pipe.poll(PATIENCE_S), "the child says nothing"
        try:
            return self.pipe.recv()
        except (EOFError, ConnectionResetError):
            self.process.join(PATIENCE_S)
            raise AssertionError(f"the child ended with status {self.process.exitcode}") from None

    def end(self) -> None:
        self.process.kill()
        self.process.join(PATIENCE_S)
        self.pipe.close()


def needs_two_gpus(test: Any) -> Any:
    lacks = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two GPUs")
    return pytest.mark.gpu(lacks(test))


def group_of(generation: int, survivor_rank: int) -> Group:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    members = (
        Member(rank=survivor_rank, incarnation=rejoin_peer.SURVIVOR),
        Member(rank=1 - survivor_rank, incarnation=rejoin_peer.NEWCOMER),
    )
    return Group(generation=generation, members=members, store=f"127.0.0.1:{port}")


def run_rounds(devices: tuple[str, str], elements: int, rounds: int) -> None:
    survivor = Child(rejoin_peer.survive, devices[0], elements)
    following = Child(rejoin_peer.join, devices[1], elements)
    children, begun_s = [survivor, following], time.monotonic()
    alone_s: list[float] = []
    together_s: list[float] = []
    killed_s = 0.0
    try:
        assert survivor.hear() == "ready"
        for number in range(rounds):
            assert time.monotonic() - begun_s < ALL_S, f"only {number} rounds in time"
            victim, following = following, Child(rejoin_peer.join, devices[1], elements)
            children.append(following)
            assert victim.hear() == "ready"
            how = rejoin_peer.ANY_MOMENT if number % 2 else rejoin_peer.DOOR
            group = group_of(number + 1, survivor_rank=0 if number < (rounds + 1) // 2 else 1)
            for child in (survivor, victim):
                child.pipe.send(("form", group, how))
            (count, mine), (others, theirs) = survivor.hear(), victim.hear()
            assert count == others == 2.0 and mine == theirs, "state or sum differs"
            if number:
                together_s.append(time.monotonic() - killed_s)
            assert wait([victim.process.sentinel], PATIENCE_S), "the victim lives on"
            killed_s = time.monotonic()
            survivor.pipe.send("changed")
            why = survivor.hear()
            assert survivor.hear()[0] == 1.0
            alone_s.append(time.monotonic() - killed_s)
            victim.end()
            print(f"round {number + 1} ({how}): alone after {alone_s[-1]:.3f} s; broken in sum {why}")
        survivor.pipe.send(("leave",))
        print(f"survivor holds {survivor.hear()}")
    finally:
        for child in children:
            child.end()
        for what, seconds in (("alone", alone_s), ("with the newcomer", together_s)):
            if seconds:
                print(
                    f"{len(seconds)} times from the kill to the survivor's next sum {what}: "
                    f"median {statistics.median(seconds):.3f} s, worst {max(seconds):.3f} s"
                )
        print(f"{time.monotonic() - begun_s:.0f} s in all")
    assert max(alone_s) < ALONE_S and max(together_s, default=0.0) < TOGETHER_S


@pytest.mark.process
def test_a_survivor_goes_on_and_takes_newcomers_in() -> None:
    run_rounds(("cpu", "cpu"), elements=1 << 18, rounds=int(ROUNDS or 4))


@needs_two_gpus
def test_a_survivor_on_a_gpu_goes_on_and_takes_newcomers_in() -> None:
    run_rounds(("cuda:0", "cuda:1"), elements=1 << 28, rounds=int(ROUNDS or 20))


def lose_early(devices: tuple[str, str], where: str, survivor_rank: int) -> None:
    """A group whose other member ends at `where`, then one with a newcomer."""
    roles = ((rejoin_peer.outlive, 0), (rejoin_peer.vanish, 1), (rejoin_peer.join, 1))
    children = [Child(run, devices[place], elements=1 << 20) for run, place in roles]
    survivor, victim, newcomer = children
    try:
        assert [child.hear() for child in children] == ["ready"] * 3
        group = group_of(1, survivor_rank)
        survivor.pipe.send(group)
        victim.pipe.send(("form", group, where))
        assert wait([victim.process.sentinel], PATIENCE_S), "the victim lives on"
        assert victim.process.exitcode == 1, "it ended elsewhere"
        changed_s = time.monotonic()
        survivor.pipe.send("changed")
        why = survivor.hear()
        left_s = time.monotonic() - changed_s
        print(f"{where}, survivor of rank {survivor_rank}: out after {left_s:.3f} s: {why}")
        assert why != "not broken" and left_s < ALONE_S
        assert survivor.hear() == 1.0
        group = group_of(2, survivor_rank)
        survivor.pipe.send(group)
        newcomer.pipe.send(("form", group, rejoin_peer.DOOR))
        assert survivor.hear() == newcomer.hear()[0] == 2.0
        assert time.monotonic() - changed_s < TOGETHER_S
    finally:
        for child in children:
            child.end()


early = pytest.mark.parametrize("where", [rejoin_peer.CONNECTING, rejoin_peer.ARRIVED])
of_either_rank = pytest.mark.parametrize("survivor_rank", [0, 1])


@pytest.mark.process
@early
@of_either_rank
def test_a_member_lost_before_the_first_sum_holds_nobody(where: str, survivor_rank: int) -> None:
    lose_early(("cpu", "cpu"), where, survivor_rank)


@needs_two_gpus
@early
@of_either_rank
def test_a_member_lost_before_the_first_sum_holds_nobody_on_a_gpu(where: str, survivor_rank: int) -> None:
    lose_early(("cuda:0", "cuda:1"), where, survivor_rank)
