"""Whoever decodes leaves out the kernels that plan for each number of keys, and puts them back."""

import pytest
import torch
from dflash_tiny import drafter_config, tiny_target
from torch.backends.cuda import cudnn_sdp_enabled as allows_cudnn

from services.dflash.drafter import Drafter
from services.dflash.growing_keys import growing_keys
from services.dflash.lossless import compare, look_again
from services.dflash.prompts import Prompt
from services.dflash.speculate import Generation, decode_plainly, speculate
from services.dflash.speculate_batch import speculate_batch

PROMPT = (5, 6, 7, 8)
LIMITS = {"max_new_tokens": 6, "stop_ids": ()}


@pytest.fixture
def target():
    return tiny_target("llama")


@pytest.fixture
def seen(target):
    """Whether cuDNN was allowed, at every forward."""
    allowed = []
    target.layers[0].register_forward_pre_hook(lambda *_: allowed.append(allows_cudnn()))
    return allowed


def answer(*tokens: int) -> Generation:
    return Generation(tokens, (), 0.0, 0.0)


WAYS = {
    "with a drafter": lambda target, drafter: speculate(target, drafter, PROMPT, **LIMITS),
    "in batches": lambda target, drafter: speculate_batch(target, drafter, [PROMPT] * 3, rows=2, **LIMITS),
    "plainly": lambda target, _: decode_plainly(target, PROMPT, **LIMITS),
    "looking again": lambda target, _: look_again(target, [Prompt(PROMPT, "d")], [answer(1, 2)], 2, (), None),
    "comparing": lambda target, _: compare(target, [Prompt(PROMPT, "d")], [answer(1)], [answer(2)]),
}


@pytest.mark.parametrize("way", WAYS)
def test_every_way_of_decoding_leaves_cudnn_out_and_puts_it_back(target, seen, way):
    WAYS[way](target, Drafter(drafter_config(), seed=0).eval())
    assert seen and not any(seen)
    assert allows_cudnn()


def test_other_forwards_may_have_it_and_what_was_forbidden_stays_so(target, seen):
    target.base(input_ids=torch.tensor([PROMPT]))
    assert seen == [True]
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        with growing_keys():
            assert torch.backends.cuda.flash_sdp_enabled()
        assert not allows_cudnn()
    finally:
        torch.backends.cuda.enable_cudnn_sdp(True)


def test_it_comes_back_after_an_error(target):
    with pytest.raises(IndexError):
        decode_plainly(target, [10**6], **LIMITS)
    assert allows_cudnn()
