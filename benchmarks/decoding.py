"""Speculative decoding for an evaluation: one prompt at a time against batches, in rounds a second.

    python benchmarks/decoding.py                    SmolLM2-135M's shape, on a GPU if there is one
    python benchmarks/decoding.py --shape tiny
    python benchmarks/decoding.py --dtype bfloat16   as an evaluation of speed is

Random weights, in float32 as evaluations of acceptance are: a drafter that knows nothing, so that each round
yields about one token and all ways take as many rounds. One at a time is measured on fewer prompts, as is
plain decoding, in tokens a second, which are its rounds.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from drafter_step import machine
from transformers import LlamaConfig, LlamaForCausalLM

from services.dflash.drafter import Drafter
from services.dflash.drafter_config import DrafterConfig
from services.dflash.speculate import Generation, decode_plainly, speculate
from services.dflash.speculate_batch import speculate_batch
from services.dflash.target_model import wrap_target

SHAPES = {
    "smollm2-135m": {
        "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
        "num_attention_heads": 9, "num_key_value_heads": 3,
    },
    "tiny": {
        "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 6,
        "num_attention_heads": 4, "num_key_value_heads": 2,
    },
}  # fmt: skip


def measure(shape: str, device: torch.device, options: argparse.Namespace) -> dict[str, Any]:
    torch.manual_seed(0)
    sizes = SHAPES[shape]
    dtype = getattr(torch, options.dtype)
    model = LlamaForCausalLM(LlamaConfig(**sizes, max_position_embeddings=2048)).to(device, dtype)
    target = wrap_target(model)
    layers = sizes["num_hidden_layers"]
    config = DrafterConfig(
        **{name: size for name, size in sizes.items() if name != "num_hidden_layers"}, num_hidden_layers=5,
        head_dim=sizes["hidden_size"] // sizes["num_attention_heads"], num_target_layers=layers,
        target_layer_ids=(1, layers - 3), block_size=16, mask_token_id=0, rms_norm_eps=1e-5, rope_theta=1e4,
        max_position_embeddings=2048, layer_types=("full_attention",) * 5,
    )  # fmt: skip
    drafter = Drafter(config, seed=0).to(device, dtype).eval()
    lengths = torch.randint(60, 160, (options.prompts,)).tolist()
    prompts = [torch.randint(1, sizes["vocab_size"], (length,)).tolist() for length in lengths]
    limits: dict[str, Any] = {"max_new_tokens": options.tokens, "stop_ids": ()}

    def rate(answers: list[Generation], begun_s: float) -> float:
        if device.type == "cuda":
            torch.cuda.synchronize()
        return sum(len(answer.accepted) for answer in answers) / (time.perf_counter() - begun_s)

    speculate(target, drafter, prompts[0], **limits)
    begun_s = time.perf_counter()
    alone = [speculate(target, drafter, prompt, **limits) for prompt in prompts[: options.alone]]
    found = {"one": rate(alone, begun_s)}
    decode_plainly(target, prompts[0], **limits)
    plain = [decode_plainly(target, prompt, **limits) for prompt in prompts[: options.alone]]
    found["plain"] = sum(len(one.tokens) - 1 for one in plain) / sum(one.decode_s for one in plain)
    for rows in options.rows:
        begun_s = time.perf_counter()
        batch = speculate_batch(target, drafter, prompts, rows=rows, **limits)
        found[f"batch_{rows}"] = rate(batch, begun_s)
        same = sum(a.tokens == b.tokens for a, b in zip(alone, batch, strict=False))
        found[f"batch_{rows}_same_answers"] = f"{same} of {len(alone)}"
    return found


def main() -> None:
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=sorted(SHAPES), default="smollm2-135m" if on_gpu else "tiny")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--alone", type=int, default=4, help="prompts decoded one at a time")
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--rows", type=int, nargs="+", default=[8, 32, 64])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    device = torch.device("cuda" if on_gpu else "cpu")
    text = json.dumps(
        {
            "benchmark": "decoding", "machine": machine(device), "shape": options.shape,
            "dtype": options.dtype, "prompts": options.prompts,
            "rounds_per_s": measure(options.shape, device, options),
        },
        indent=1,
    )  # fmt: skip
    print(text)
    if options.out:
        options.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
