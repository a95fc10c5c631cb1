"""The whole pipeline on random weights of a given shape: committed tokens/s of `draftmill up`.

    python benchmarks/pipeline.py --shape qwen3-8b --steps 60      one target on GPU 0, one drafter on GPU 1
    python benchmarks/pipeline.py --shape tiny --steps 40          on a CPU, to try the script

Writes a model and a dataset of random tokens into memory, then runs the real services. The rate is
taken between the commit of a fifth of the steps and the last one, so start-up and compilation are left
out; who waited for whom comes from the roles' own totals. The slower stage's share of its time that was
spent working is how near the pipeline is to that stage run alone.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, Qwen3Config

from protocol.errors import RetryError
from services.data.dataset import Sample
from services.data.writer import write_dataset
from services.local.status import fetch_json, read_address

POLL_S = 0.5


class Shape(NamedTuple):
    model: PreTrainedConfig
    dtype: torch.dtype
    tokens: int  # of a sample
    options: dict[str, str]


def shapes() -> dict[str, Shape]:
    qwen3_8b = Qwen3Config(
        vocab_size=151936, hidden_size=4096, intermediate_size=12288, num_hidden_layers=36,
        num_attention_heads=32, num_key_value_heads=8, head_dim=128, tie_word_embeddings=False,
        eos_token_id=1, bos_token_id=2, pad_token_id=1,
    )  # fmt: skip
    tiny = LlamaConfig(
        vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=6, num_attention_heads=4,
        num_key_value_heads=2, eos_token_id=1, bos_token_id=2, pad_token_id=1,
    )  # fmt: skip
    gpu = {
        "target.gpus": "0", "drafter.gpus": "1", "plan.token-budget": "4096", "plan.bucket-edges": "1024",
        "recipe.anchors-per-pack": "512", "drafter.block-size": "16", "drafter.mask-token-id": "151669",
    }  # fmt: skip
    cpu = {
        "plan.token-budget": "256", "plan.bucket-edges": "64", "recipe.anchors-per-pack": "16",
        "drafter.layers": "2", "drafter.taps": "2", "drafter.block-size": "8", "drafter.mask-token-id": "511",
        "target.threads": "1", "drafter.threads": "1",
    }  # fmt: skip
    return {
        "qwen3-8b": Shape(qwen3_8b, torch.bfloat16, 1024, gpu),
        "tiny": Shape(tiny, torch.float32, 64, cpu),
    }


def write_inputs(shape: Shape, folder: Path, samples: int) -> None:
    """`model/` and `data/` with random weights and tokens; on a GPU if there is one, for speed."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(shape.model, dtype=shape.dtype)
    model.save_pretrained(folder / "model")
    random = np.random.default_rng(0)
    rows = (
        Sample(
            random.integers(10, 500, shape.tokens).astype(np.int32), np.ones(shape.tokens, np.uint8)
        )
        for _ in range(samples)
    )  # fmt: skip
    write_dataset(folder / "data", rows, {"max_length": shape.tokens})


def run_up(folder: Path, shape: Shape, extra: list[str]) -> list[tuple[float, Any]]:
    """(seconds, status) as polled until `draftmill up` has ended."""
    options = shape.options | {
        "run.dir": str(folder / "run"), "model.path": str(folder / "model"),
        "data.path": str(folder / "data"),
        "model.dtype": str(shape.dtype).removeprefix("torch."), "drafter.dtype": str(shape.dtype)[6:],
        "coordinator.http-port": "0", "checkpoint.every-steps": "100000", "target.self-check": "false",
    }  # fmt: skip
    flags = [f"--{name}={value}" for name, value in options.items()]
    up = subprocess.Popen([sys.executable, "-m", "services.cli", "up", *flags, *extra])
    seen: list[tuple[float, Any]] = []
    while up.poll() is None:
        try:
            up.wait(POLL_S)
        except subprocess.TimeoutExpired:
            try:
                status = fetch_json(read_address(folder / "run"))
            except RetryError:
                continue
            if status is not None:
                seen.append((time.perf_counter(), status))
    assert up.returncode == 0, f"`draftmill up` ended with {up.returncode}"
    return seen


def summarise(seen: list[tuple[float, Any]], steps: int) -> dict[str, Any]:
    steady = [(at, s) for at, s in seen if steps // 5 <= s["step"] < s["total_steps"]]
    (first_s, first), (last_s, last) = steady[0], steady[-1]
    wall_s = last_s - first_s
    tokens = last["counters"]["committed_tokens"] - first["counters"]["committed_tokens"]
    roles = {}
    for before, after in zip(first["roles"], last["roles"], strict=True):
        grown = {name: after["phases"][name] - before["phases"].get(name, 0.0) for name in after["phases"]}
        roles[f"{after['role']} {after['index']}"] = {
            "device": after["device"],
            "phase_share": {name: round(value / wall_s, 4) for name, value in sorted(grown.items())},
        }
    return {
        "steps": last["step"] - first["step"],
        "wall_s": round(wall_s, 2),
        "committed_tokens_per_s": round(tokens / wall_s, 1),
        "loss": last["loss"],
        "roles": roles,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=sorted(shapes()), default="tiny")
    parser.add_argument("--steps", type=int, default=40, help="optimizer steps of 4 packs")
    parser.add_argument("--memory", type=Path, default=Path("/dev/shm"), help="where model and data go")
    parser.add_argument("--out", type=Path)
    options, extra = parser.parse_known_args()
    shape = shapes()[options.shape]
    per_pack = int(shape.options["plan.token-budget"]) // shape.tokens
    with tempfile.TemporaryDirectory(prefix="draftmill-", dir=options.memory) as name:
        folder = Path(name)
        write_inputs(shape, folder, samples=options.steps * 4 * per_pack)
        result = summarise(run_up(folder, shape, extra), options.steps)
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    machine = {
        "gpus": gpus, "cores": os.cpu_count(), "python": platform.python_version(),
        "torch": torch.__version__, "transformers": transformers.__version__,
    }  # fmt: skip
    text = json.dumps({"machine": machine, "shape": options.shape, "extra": extra, **result}, indent=1)
    print(text)
    if options.out:
        options.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
