"""GGUF files of further families become folders whose targets compute what the original computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from target_families import SHAPE, Family, model_of

from services.dflash.self_check import self_check
from services.dflash.target_model import load_target, load_tokenizer
from services.models.convert import convert_gguf

TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"] + [chr(33 + i) for i in range(92)] + ["ab", "cd"]
FAMILIES = {
    "qwen2": Family("biases", "Qwen2Config", SHAPE),
    "qwen3": Family("normed queries and keys, heads of 128", "Qwen3Config", {**SHAPE, "head_dim": 128}),
}
NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    **{f"self_attn.{part}_proj": f"attn_{part}" for part in "qkv"},
    "self_attn.o_proj": "attn_output",
    **{f"mlp.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")},
}


def gguf_name(name: str) -> str:
    """Of a tensor of the model: `model.layers.3.mlp.up_proj.weight` is `blk.3.ffn_up.weight`."""
    ends = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
    }
    if name in ends:
        return ends[name]
    _, _, layer, *part, kind = name.split(".")
    return f"blk.{layer}.{NAMES['.'.join(part)]}.{kind}"


def write_gguf(path: Path, architecture: str, model: Any) -> None:
    config = model.config
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3, 3] + [1] * 94)
    writer.add_token_merges(["a b", "c d"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    for name, weight in model.state_dict().items():
        writer.add_tensor(gguf_name(name), weight.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("name", FAMILIES)
def test_a_converted_target_is_the_original(name, tmp_path):
    original = model_of(FAMILIES[name], tied=False)
    write_gguf(tmp_path / "tiny.gguf", name, original)
    target = load_target(convert_gguf(tmp_path / "tiny.gguf", tmp_path / "tiny", dtype="float32"))
    assert max(self_check(target, (1, 4)).values()) <= 1e-5
    ids = torch.arange(3, 60)[None]
    with torch.inference_mode():
        torch.testing.assert_close(target.model(ids).logits, original(ids).logits)
    assert target.stop_ids == (2,) == (load_tokenizer(tmp_path / "tiny").eos_token_id,)
