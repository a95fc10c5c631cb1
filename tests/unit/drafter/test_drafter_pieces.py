"""A gradient handed over piece by piece during a backward pass: all of it, once, in one order, complete."""

from __future__ import annotations

import pytest
import torch
from drafter_cases import CPU, add_packs, random_pack, tiny_config, tiny_shape, tiny_step

from protocol.messages import BatchId, StepTry
from services.dflash.drafter import Drafter
from services.drafter.pieces import Pieces
from services.drafter.reduce import TryLeft
from services.drafter.step import LastPack
from services.drafter.weights import Weights

TRY = StepTry(0, 0, 1, 1)


class Recorder:
    """A group of one that notes what it is handed, and when."""

    overlaps = True

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.started: list[torch.Tensor] = []
        self.copies: list[torch.Tensor] = []

    def arrive(self, step_try: StepTry) -> None:
        self.calls.append("arrive")

    def start(self, tensor: torch.Tensor) -> None:
        self.calls.append("start")
        self.started.append(tensor)
        self.copies.append(tensor.clone())

    def finish(self) -> None:
        self.calls.append("finish")

    def confirm(self) -> None:
        pass


def test_the_pieces_are_the_whole_gradient_and_most_of_it_is_early():
    drafter = Drafter(tiny_shape(), seed=1)
    weights = Weights(drafter, tiny_config().recipe, CPU)
    pieces = Pieces(drafter, weights.places)
    covered = torch.zeros(weights.gradient.numel())
    for piece in pieces.slices:
        covered[piece] += 1
    assert bool((covered == 1).all())
    names = {place.start: place.name for place in weights.places}
    assert [names[piece.start] for piece in pieces.slices] == [
        "layers.1.self_attn.o_proj.weight", "layers.1.self_attn.q_proj.weight",
        "layers.0.self_attn.o_proj.weight", "layers.0.self_attn.q_proj.weight",
        "fc.weight", "layers.0.self_attn.k_proj.weight", "layers.1.self_attn.k_proj.weight",
        "hidden_norm.weight",
    ]  # fmt: skip


@pytest.mark.parametrize("supervised", [True, False])
def test_each_piece_is_complete_when_it_is_handed_over(supervised):
    step, alone = (tiny_step(tiny_config(recipe={"anchor_draws": 3})) for _ in range(2))
    reducer, pack = Recorder(), random_pack(4, supervised=supervised)
    for one in (step, alone):
        add_packs(one, [1, 2])
    alone.add(2, BatchId(0, 4), pack)
    step.add(2, BatchId(0, 4), pack, last=LastPack(reducer, TRY))
    during = len(reducer.started)
    assert reducer.calls == ["arrive"] + ["start"] * 4
    outcome = step.seal(reducer, TRY)
    slices = step._pieces.slices
    assert reducer.calls == ["arrive", *["start"] * (len(slices) + 1), "finish"] and during == 4
    for piece, copy in zip(slices, reducer.copies[:-1], strict=True):
        assert torch.equal(copy, alone._weights.gradient[piece])
    assert outcome == alone.seal(Recorder(), TRY)


def test_the_next_step_begins_with_a_reduction_of_its_own():
    step, reducer = tiny_step(tiny_config()), Recorder()
    for number in range(2):
        step.add(0, BatchId(0, number), random_pack(number), last=LastPack(reducer, TRY))
        step.apply(number, step.seal(reducer, TRY))
    assert reducer.calls.count("arrive") == 2 and reducer.calls.count("finish") == 2
    step.clear()
    add_packs(step, [3])
    step.seal(reducer, TRY)
    assert reducer.calls.count("arrive") == 3


def test_a_try_that_a_member_has_left_ends_before_the_backward_pass():
    class Left(Recorder):
        def arrive(self, step_try: StepTry) -> None:
            raise TryLeft("left")

    step, reducer = tiny_step(tiny_config()), Left()
    with pytest.raises(TryLeft):
        step.add(0, BatchId(0, 1), random_pack(1), last=LastPack(reducer, TRY))
    assert not reducer.started and not step._weights.gradient.any()
    step.clear()
    step.add(0, BatchId(0, 1), random_pack(1), last=LastPack(good := Recorder(), TRY))
    assert len(good.started) == 4


def test_what_others_add_to_a_piece_is_not_blamed_on_the_own_pack():
    class Poisoned(Recorder):
        def start(self, tensor: torch.Tensor) -> None:
            super().start(tensor)
            tensor.fill_(float("nan"))

    step, reducer = tiny_step(tiny_config()), Poisoned()
    step.add(0, BatchId(0, 1), random_pack(1), last=LastPack(reducer, TRY))
    assert step._tally[step.layout.bad][0] == 0.0
