"""The drafter's step on a GPU: equal to the CPU's, one wait a step, and an NCCL group that can be left."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import time
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
from torch import Tensor

from protocol.errors import GroupBroken
from protocol.messages import BatchId, Group, Member, StepTry
from services.config.schema import Config
from services.dflash.drafter import Drafter
from services.dflash.drafter_config import DrafterConfig
from services.dflash.head import FrozenHead
from services.drafter.meeting import Standing, meet
from services.drafter.metrics import Phases
from services.drafter.reduce import GroupReducer, LocalReducer
from services.drafter.step import LastPack, StepGradient
from services.drafter.weights import Weights

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
    pytest.mark.filterwarnings("default"),  # torch warns of its own debug mode
]

HIDDEN, VOCABULARY, TAPS = 64, 128, 2
TRY = StepTry(0, 0, 1, 1)
SECONDS = 120.0  # a deadline, not a wait


def shape() -> DrafterConfig:
    return DrafterConfig(
        hidden_size=HIDDEN, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, vocab_size=VOCABULARY, num_target_layers=6,
        target_layer_ids=(1, 3), block_size=4, mask_token_id=0, rms_norm_eps=1e-6,
        rope_theta=10000.0, max_position_embeddings=256, layer_types=("full_attention",) * 2,
    )  # fmt: skip


def config(dtype: str = "float32", **drafter: object) -> Config:
    return Config.model_validate(
        {
            "model": {"path": "none", "dtype": dtype},
            "data": {"path": Path("none")},
            "drafter": {"dtype": dtype, "attention": "dense"} | drafter,
            "recipe": {"anchors_per_pack": 16, "anchor_draws": 2, "lr": 1e-2, "warmup_ratio": 0.0},
        }
    )


def step_on(device: torch.device, options: Config) -> StepGradient:
    drafter = Drafter(shape(), seed=1)
    ends = torch.randn(VOCABULARY, HIDDEN, generator=torch.Generator().manual_seed(5))
    ends = ends.to(device, getattr(torch, options.drafter.dtype))
    return StepGradient(
        options, drafter, Weights(drafter, options.recipe, device), ends, FrozenHead(ends),
        total_steps=100, phases=Phases(device),
    )  # fmt: skip


def pack(seed: int, device: torch.device, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    positions = torch.cat([torch.arange(40), torch.arange(60)]).to(torch.int32)
    sections = {
        "features": torch.randn(100, TAPS * HIDDEN, generator=generator).to(dtype),
        "input_ids": torch.randint(1, VOCABULARY, (100,), generator=generator, dtype=torch.int32),
        "loss_mask": (positions >= 3).to(torch.uint8),
        "position_ids": positions,
        "document_offsets": torch.tensor([0, 40, 100], dtype=torch.int32),
    }
    return {name: tensor.to(device) for name, tensor in sections.items()}


def train(device: torch.device, options: Config, steps: int = 3) -> tuple[StepGradient, dict[str, float]]:
    step = step_on(device, options)
    figures: dict[str, float] = {}
    for number in range(steps):
        for position in range(3):
            batch = BatchId(0, 10 * number + position)
            dtype = getattr(torch, options.drafter.dtype)
            step.add(position, batch, pack(batch.index, device, dtype))
        figures = step.apply(number, step.seal(LocalReducer(), TRY))
    return step, figures


GPU = torch.device("cuda", 0)


def test_steps_are_those_of_the_cpu():
    on_gpu, gpu_figures = train(GPU, config())
    on_cpu, cpu_figures = train(torch.device("cpu"), config())
    torch.testing.assert_close(on_gpu._weights.masters.cpu(), on_cpu._weights.masters, rtol=1e-2, atol=1e-3)
    for name in ("loss", "grad_norm", "anchors", "tokens", "lr"):
        assert gpu_figures[name] == pytest.approx(cpu_figures[name], rel=1e-3), name


def test_deterministic_steps_are_bit_equal():
    torch.use_deterministic_algorithms(True)
    try:
        one, _ = train(GPU, config("bfloat16"))
        two, _ = train(GPU, config("bfloat16"))
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for a, b in zip(one._weights.state, two._weights.state, strict=True))


def test_only_the_vote_waits_for_the_gpu():
    step = step_on(GPU, config("bfloat16"))
    packs = [pack(seed, GPU, torch.bfloat16) for seed in range(3)]
    step.add(0, BatchId(0, 0), packs[0])
    step.apply(0, step.seal(LocalReducer(), TRY))
    torch.cuda.set_sync_debug_mode("error")
    try:
        for position, sections in enumerate(packs):
            step.add(position, BatchId(0, position), sections)
        outcome = step.seal(LocalReducer(), TRY)
        step.apply(1, outcome)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    totals = step._phases.totals()
    assert {"phase_forward_seconds", "phase_backward_seconds", "phase_reduce_seconds"} <= totals.keys()
    assert all(0.0 < seconds < 60.0 for seconds in totals.values())


def test_non_finite_features_are_flagged_on_a_gpu():
    step = step_on(GPU, config())
    step.add(0, BatchId(0, 0), pack(0, GPU))
    bad = pack(1, GPU)
    bad["features"][50, 3] = float("nan")
    step.add(1, BatchId(0, 1), bad)
    outcome = step.seal(LocalReducer(), TRY)
    assert outcome.own_bad == (1,) and outcome.gradient_finite


def test_a_snapshot_restores_bit_equal():
    step, _ = train(GPU, config(), steps=2)
    snapshot = step._weights.snapshot()
    other = step_on(GPU, config())
    other._weights.load(snapshot.weights, snapshot.optimizer)
    assert all(torch.equal(a, b) for a, b in zip(step._weights.state, other._weights.state, strict=True))


# ---- two GPUs ---------------------------------------------------------------------------------

needs_two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two GPUs")


class Pair:
    """Two processes, one a GPU, each with a pipe to the test."""

    def __init__(self, run) -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        members = tuple(Member(rank=rank, incarnation=f"drafter-{rank}") for rank in range(2))
        group = Group(generation=1, members=members, store=f"127.0.0.1:{port}")
        context = multiprocessing.get_context("spawn")
        self.pipes, self.processes = [], []
        for rank in range(2):
            ours, theirs = context.Pipe()
            process = context.Process(target=run, args=(rank, group, theirs), daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def __enter__(self) -> Pair:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.kill()
            process.join()

    def hear(self, rank: int):
        assert self.pipes[rank].poll(SECONDS), f"rank {rank} says nothing"
        return self.pipes[rank].recv()


def form(rank: int, group: Group, wanted=lambda _try: True):
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    meeting = meet(group, f"drafter-{rank}", wanted)
    meeting.share(Standing(None, "", None))
    return meeting, GroupReducer(meeting, device), device


def train_and_hand_over(rank: int, group: Group, pipe: Connection) -> None:
    _, reducer, device = form(rank, group)
    step = step_on(device, config())
    for position in (0, 2) if rank == 0 else (1,):
        step.add(position, BatchId(0, position), pack(position, device))
    outcome = step.seal(reducer, TRY)
    step.apply(0, outcome)
    pipe.send((outcome.tally, step._weights.masters.tolist()))
    if rank == 0:
        reducer.send(step._weights.state, 1)
    else:
        step._weights.masters.zero_()
        reducer.receive(step._weights.state, 0)
    pipe.send(step._weights.masters.tolist())
    pipe.recv()
    reducer.close()
    pipe.send("closed")


@needs_two
def test_two_gpus_train_what_one_does_and_hand_their_state_over():
    with Pair(train_and_hand_over) as pair:
        first, second = pair.hear(0), pair.hear(1)
        handed = pair.hear(1)
        assert pair.hear(0) == handed == first[1]
        for pipe in pair.pipes:
            pipe.send("close")
        assert pair.hear(0) == pair.hear(1) == "closed"
    assert first == second
    one, _ = train(GPU, config(), steps=1)
    torch.testing.assert_close(torch.tensor(first[1]), one._weights.masters.cpu(), rtol=1e-3, atol=1e-4)


def sum_during_and_after(rank: int, group: Group, pipe: Connection) -> None:
    """Two packs a rank, the gradient of the last one summed piece by piece, or not: gradients, in float32."""
    _, reducer, device = form(rank, group)
    step = step_on(device, config())
    packs = [(2 * rank + number, pack(2 * rank + number, device)) for number in range(2)]
    found = []
    for number, during in enumerate((False, True)):
        step_try = TRY._replace(step=number)
        (first, second) = packs
        step.add(first[0], BatchId(0, first[0]), first[1])
        torch.cuda.set_sync_debug_mode("error" if number else "default")
        last = LastPack(reducer, step_try) if during else None
        step.add(second[0], BatchId(0, second[0]), second[1], last=last)
        torch.cuda.set_sync_debug_mode("default")
        handed = step._handed
        outcome = step.seal(reducer, step_try)
        found.append((handed, outcome.tally, step._weights.gradient.tolist()))
        step.clear()
    pipe.send(found)
    pipe.recv()
    reducer.close()


@needs_two
def test_sums_during_the_last_backward_pass_are_the_sums_after_it():
    with Pair(sum_during_and_after) as pair:
        first, second = pair.hear(0), pair.hear(1)
        for pipe in pair.pipes:
            pipe.send("close")
    assert first == second
    (none, tally, after), (early, same, during) = first
    assert (none, early) == (0, 4) and tally == same
    torch.testing.assert_close(torch.tensor(during), torch.tensor(after), rtol=1e-5, atol=1e-6)


def lose_a_rank_in_a_backward_pass(rank: int, group: Group, pipe: Connection) -> None:
    """Rank 1 arrives and dies; rank 0 has sums under way that nobody answers, until its orders change."""
    _, reducer, device = form(rank, group, wanted=lambda _try: not pipe.poll())
    step = step_on(device, config())
    step.add(0, BatchId(0, 0), pack(0, device))
    step.apply(0, step.seal(reducer, TRY))
    pipe.send("ready")
    lost = TRY._replace(step=1)
    if rank == 1:
        reducer.arrive(lost)
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)
    before = step._weights.masters.clone()
    try:
        step.add(0, BatchId(0, 1), pack(1, device), last=LastPack(reducer, lost))
        step.seal(reducer, lost)
        pipe.send("not broken")
    except GroupBroken as error:
        pipe.send(str(error))
    step.clear()
    reducer.close()
    step.add(0, BatchId(0, 1), pack(1, device))
    outcome = step.seal(LocalReducer(), TRY)
    pipe.send((outcome.gradient_finite, outcome.any_bad, torch.equal(before, step._weights.masters)))


@needs_two
def test_a_rank_lost_in_the_last_backward_pass_costs_the_try_and_nothing_else():
    with Pair(lose_a_rank_in_a_backward_pass) as pair:
        assert pair.hear(0) == pair.hear(1) == "ready"
        pair.processes[1].join(SECONDS)
        pair.pipes[0].send("another generation")
        why = pair.hear(0)
        assert "aborted" in why or "lost" in why
        assert pair.hear(0) == (True, False, True)


def sum_over(reducer: GroupReducer, tensors: list[Tensor], step_try: StepTry) -> None:
    reducer.arrive(step_try)
    for tensor in tensors:
        reducer.start(tensor)
    reducer.finish()


def lose_a_rank(rank: int, group: Group, pipe: Connection) -> None:
    """Rank 1 dies inside a reduction; the orders of rank 0 change once the test has seen that."""
    meeting, reducer, device = form(rank, group, wanted=lambda _try: not pipe.poll())
    tensors = [torch.ones(1 << 24, device=device)]
    sum_over(reducer, tensors, TRY)
    torch.cuda.synchronize()
    pipe.send("summed")
    second = TRY._replace(step=1)
    if rank == 1:
        meeting.gather("try/" + "-".join(map(str, second)), None)
        os.kill(os.getpid(), signal.SIGKILL)
    start_s = time.monotonic()
    try:
        sum_over(reducer, tensors, second)
        torch.cuda.synchronize()
        reducer.confirm()
        pipe.send("not broken")
    except GroupBroken as error:
        pipe.send((time.monotonic() - start_s, str(error)))
    reducer.close()
    pipe.send(torch.ones(4, device=device).sum().item())


@needs_two
def test_a_stuck_reduction_ends_when_the_orders_change():
    with Pair(lose_a_rank) as pair:
        assert pair.hear(0) == pair.hear(1) == "summed"
        pair.processes[1].join(SECONDS)
        changed_s = time.monotonic()
        pair.pipes[0].send("another generation")
        _, why = pair.hear(0)
        assert time.monotonic() - changed_s < 2.0
        assert "aborted" in why or "lost" in why
        assert pair.hear(0) == 4.0, "the GPU is usable after the abort"
