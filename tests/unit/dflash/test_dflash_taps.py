"""Captured hidden states are the model's own, for packed ragged batches, joined or split (traps 5, 6, 10)."""

from dataclasses import replace

import pytest
import torch
from dflash_tiny import FAMILIES, tiny_target

from protocol.errors import ModelError
from services.dflash.self_check import self_check
from services.dflash.taps import PackBuffer, TapCapture, packed_rows

LENGTHS = (5, 1, 11, 8)
PADDED = 16
TAPS = (1, 2, 4)


def capture(target, split, last_hidden, lengths=LENGTHS, ids=None, capacity=40):
    if ids is None:
        ids = torch.randint(3, 96, (len(lengths), PADDED), generator=torch.Generator().manual_seed(3))
    buffer = PackBuffer.allocate(
        capacity, len(TAPS), 32, split=split, last_hidden=last_hidden, dtype=torch.float32, device="cpu"
    )
    with TapCapture(target, TAPS, last_hidden=last_hidden) as taps:
        taps.run(ids, packed_rows(lengths, PADDED), buffer)
    return ids, buffer


@pytest.mark.parametrize("family", FAMILIES)
def test_self_check_passes_with_rounding_errors_only(family):
    errors = self_check(tiny_target(family), TAPS)
    assert errors["taps"] == 0.0
    assert max(errors.values()) < 1e-5


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_rows_equal_each_sample_alone(family):
    target = tiny_target(family)
    ids, buffer = capture(target, split=False, last_hidden=True)
    first = 0
    for sample, length in enumerate(LENGTHS):
        alone = target.model(input_ids=ids[sample : sample + 1, :length], output_hidden_states=True)
        wanted = torch.cat([alone.hidden_states[tap + 1][0] for tap in TAPS], dim=-1)
        torch.testing.assert_close(buffer.features[first : first + length], wanted, atol=1e-4, rtol=1e-4)
        logits = target.logits(buffer.last_hidden[first : first + length])
        torch.testing.assert_close(logits, alone.logits[0], atol=1e-4, rtol=1e-4)
        first += length


def test_split_and_joined_capture_the_same_bits():
    target = tiny_target("qwen3")
    _, joined = capture(target, split=False, last_hidden=False)
    _, split = capture(target, split=True, last_hidden=False)
    tokens = sum(LENGTHS)
    assert list(split.sections(tokens)) == ["features.0", "features.1", "features.2"]
    assert torch.equal(
        torch.cat(list(split.sections(tokens).values()), dim=-1), joined.sections(tokens)["features"]
    )


def test_rows_behind_the_pack_stay_as_they_were():
    _, buffer = capture(tiny_target("llama"), split=False, last_hidden=False)
    assert not buffer.features[sum(LENGTHS) :].any()
    assert buffer.features[: sum(LENGTHS)].any(dim=1).all()


def test_layers_behind_the_last_tap_are_not_run_and_come_back():
    target = tiny_target("llama")
    ran = []
    hook = target.layers[-1].register_forward_hook(lambda *_: ran.append(1))
    capture(target, split=False, last_hidden=False)
    assert not ran and len(target.layers) == 7
    capture(target, split=False, last_hidden=True)
    hook.remove()
    assert ran


class NormedTwice(torch.nn.Module):
    def __init__(self, base):
        super().__init__()
        self.base = base

    def forward(self, **inputs):
        output = self.base(**inputs)
        output.last_hidden_state = self.base.norm(output.last_hidden_state * 3.0)
        return output


@pytest.mark.parametrize("change", ["normed twice", "no soft-cap"])
def test_self_check_names_logits_that_are_not_the_models(change):
    target = tiny_target("gemma2")
    with torch.no_grad():
        target.base.norm.weight.uniform_(0.5, 2.0)  # a norm of ones is nearly its own square
    if change == "normed twice":
        broken = replace(target, base=NormedTwice(target.base))
    else:
        broken = replace(target, head=target.head._replace(softcap=0.0))
    with pytest.raises(ModelError, match="logits"):
        self_check(broken, TAPS)


def test_self_check_names_shifted_taps():
    target = tiny_target("qwen3")
    with pytest.raises(ModelError, match="taps"):
        self_check(replace(target, layers=torch.nn.ModuleList(list(target.layers)[1:])), TAPS)


def test_packed_rows_skips_padding():
    assert packed_rows((2, 1, 3), 4).tolist() == [0, 1, 4, 8, 9, 10]
