"""Targets to measure with, as a run's inputs: a model folder and a dataset, made in seconds at any size.

    model/config.json          the shape's
    model/model.safetensors    every tensor in its header; only embedding and LM head have bytes, and they
                               are one random block over and over. The rest is a hole: no memory, no time
    data/                      random tokens, all of one length

A drafter and `draftmill plan` read such a folder as they would a real one. A target must not: it makes
random weights where it computes (`random_target`), because zeros multiply faster than numbers do. So a
model of 54 GB costs 5 GB of memory and no reading.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, Qwen3Config
from transformers.models.qwen3_5 import Qwen3_5TextConfig

from services.config.schema import Model
from services.data.dataset import Sample
from services.data.writer import write_dataset
from services.dflash.target_model import Target, torch_dtype, wrap_target

STORED_AS = {torch.float32: "F32", torch.bfloat16: "BF16"}
ENDS = ("embed_tokens.weight", "lm_head.weight")
BLOCK_WEIGHTS = 1 << 24
DEVIATION = 0.02
GPU = {
    "target.gpus": "0", "drafter.gpus": "1", "plan.token-budget": "4096", "plan.bucket-edges": "1024",
    "recipe.anchors-per-pack": "512", "drafter.block-size": "16",
}  # fmt: skip
CPU = {
    "plan.token-budget": "256", "plan.bucket-edges": "64", "recipe.anchors-per-pack": "16",
    "drafter.layers": "2", "drafter.taps": "2", "drafter.block-size": "8", "drafter.mask-token-id": "511",
    "target.threads": "1", "drafter.threads": "1",
}  # fmt: skip
SMALL = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 6}
SPECIAL = {"eos_token_id": 1, "bos_token_id": 2, "pad_token_id": 1}


class Shape(NamedTuple):
    model: PreTrainedConfig
    dtype: torch.dtype
    tokens: int  # of a sample
    batches: int  # of the target run alone: a few seconds
    options: dict[str, str]


def shapes() -> dict[str, Shape]:
    qwen3_8b = Qwen3Config(
        vocab_size=151936, hidden_size=4096, intermediate_size=12288, num_hidden_layers=36,
        num_attention_heads=32, num_key_value_heads=8, head_dim=128, tie_word_embeddings=False, **SPECIAL,
    )  # fmt: skip
    qwen3_06b = Qwen3Config(  # so small that hosts, not GPUs, are what is short
        vocab_size=151936, hidden_size=1024, intermediate_size=3072, num_hidden_layers=28,
        num_attention_heads=16, num_key_value_heads=8, head_dim=128, tie_word_embeddings=False, **SPECIAL,
    )  # fmt: skip
    tiny = LlamaConfig(**SMALL, num_attention_heads=4, num_key_value_heads=2, **SPECIAL)
    # heads of 128, as drafters for this target have: its own are 24 of 256
    heads = {"drafter.heads": "32", "drafter.kv-heads": "8", "drafter.head-dim": "128"}
    gpu_27b = GPU | heads | {"drafter.mask-token-id": "248070"}
    return {
        "qwen3-8b": Shape(
            qwen3_8b, torch.bfloat16, 1024, 40, GPU | {"drafter.mask-token-id": "151669"}
        ),
        "qwen3-0.6b": Shape(
            qwen3_06b, torch.bfloat16, 1024, 200, GPU | {"drafter.mask-token-id": "151669"}
        ),
        "qwen3.6-27b": Shape(qwen36_27b(), torch.bfloat16, 1024, 12, gpu_27b),
        "tiny": Shape(tiny, torch.float32, 64, 12, CPU),
        "tiny-hybrid": Shape(hybrid_tiny(), torch.float32, 64, 12, CPU),
    }  # fmt: skip


def qwen36_27b() -> PreTrainedConfig:
    """The text tower: 48 gated delta nets and 16 attention layers, 26.9 G weights."""
    return Qwen3_5TextConfig(
        vocab_size=248320, hidden_size=5120, intermediate_size=17408, num_hidden_layers=64,
        num_attention_heads=24, num_key_value_heads=4, head_dim=256,
        linear_num_key_heads=16, linear_num_value_heads=48, linear_key_head_dim=128,
        linear_value_head_dim=128, max_position_embeddings=262144, tie_word_embeddings=False,
        rope_parameters=_sections([11, 11, 10]), **SPECIAL,
    )  # fmt: skip


def hybrid_tiny() -> PreTrainedConfig:
    return Qwen3_5TextConfig(
        **SMALL, num_attention_heads=4, num_key_value_heads=2, head_dim=32, linear_num_key_heads=2,
        linear_num_value_heads=4, linear_key_head_dim=16, linear_value_head_dim=16,
        rope_parameters=_sections([2, 1, 1]), **SPECIAL,
    )  # fmt: skip


def _sections(sizes: list[int]) -> dict[str, object]:
    return {
        "rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25,
        "mrope_section": sizes, "mrope_interleaved": True,
    }  # fmt: skip


def write_inputs(shape: Shape, folder: Path, samples: int) -> None:
    """`model/` and `data/` in `folder`."""
    write_model(shape, folder / "model")
    random = np.random.default_rng(0)
    rows = (
        Sample(random.integers(10, 500, shape.tokens).astype(np.int32), np.ones(shape.tokens, np.uint8))
        for _ in range(samples)
    )
    write_dataset(folder / "data", rows, {"max_length": shape.tokens})


def write_model(shape: Shape, folder: Path) -> None:
    folder.mkdir(parents=True)
    shape.model.save_pretrained(folder)
    with torch.device("meta"):
        tensors = AutoModelForCausalLM.from_config(shape.model, dtype=shape.dtype).state_dict()
    names = sorted(tensors, key=lambda name: not name.endswith(ENDS))
    header, at, filled = {}, 0, 0
    for name in names:
        end = at + tensors[name].nbytes
        stored = {"dtype": STORED_AS[tensors[name].dtype], "shape": list(tensors[name].shape)}
        header[name] = stored | {"data_offsets": [at, end]}
        at, filled = end, end if name.endswith(ENDS) else filled
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        _write_noise(file, shape.dtype, filled)
        file.truncate(8 + len(text) + at)


def _write_noise(file: BinaryIO, dtype: torch.dtype, size: int) -> None:
    generator = torch.Generator().manual_seed(0)
    block = (torch.randn(BLOCK_WEIGHTS, generator=generator) * DEVIATION).to(dtype)
    data = block.view(torch.uint8).numpy().data
    for start in range(0, size, len(data)):
        file.write(data[: size - start])


def random_target(options: Model, device: torch.device) -> Target:
    """Of the shape in `options.path`, with weights drawn on `device`."""
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(options.path)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch_dtype(options.dtype), attn_implementation=options.attention
        )
    return wrap_target(model)
