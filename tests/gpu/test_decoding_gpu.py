"""Decoding in 16 bits on a GPU: no kernel that plans for each number of keys."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention import SDPBackend
from transformers import LlamaConfig, LlamaForCausalLM

from services.dflash.drafter import Drafter
from services.dflash.drafter_config import DrafterConfig
from services.dflash.speculate import speculate
from services.dflash.target_model import wrap_target

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_no_attention_of_a_decode_goes_to_cudnn():
    sizes = {"vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4}
    config = LlamaConfig(**sizes, num_hidden_layers=4, num_key_value_heads=2, max_position_embeddings=512)
    target = wrap_target(LlamaForCausalLM(config).to("cuda", torch.bfloat16))
    shape = DrafterConfig(
        **sizes, num_hidden_layers=2, num_key_value_heads=2, head_dim=64, num_target_layers=4,
        target_layer_ids=(0, 2), block_size=8, mask_token_id=0, rms_norm_eps=1e-5, rope_theta=1e4,
        max_position_embeddings=512, layer_types=("full_attention",) * 2,
    )  # fmt: skip
    query = torch.zeros(1, 4, 16, 64, device="cuda", dtype=torch.bfloat16)
    chosen: list[int] = []
    target.layers[0].register_forward_pre_hook(
        lambda *_: chosen.append(torch._fused_sdp_choice(query, query, query))
    )
    drafter = Drafter(shape, seed=0).to("cuda", torch.bfloat16).eval()
    answer = speculate(target, drafter, [5, 6, 7], max_new_tokens=40, stop_ids=())
    assert len(chosen) == 1 + len(answer.accepted)
    assert SDPBackend.CUDNN_ATTENTION.value not in chosen
