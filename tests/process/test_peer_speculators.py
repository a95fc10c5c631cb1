"""speculators' drafter, exported by our comparison, is accepted as often as it was trained to be.

Taps, label shift, mask row, positions and names are each of them right, or acceptance would be near 1.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from services.data.dataset import Sample
from services.data.writer import write_dataset
from services.dflash.evaluate import evaluate
from services.dflash.export import load_zlab
from services.dflash.prompts import Prompt
from services.dflash.target_model import load_target

LOOP = Path(__file__).parents[2] / "benchmarks" / "peers" / "speculators_loop.py"
PROMPTS = [[3 + seed, 40 - seed, 17, 60 + seed] for seed in range(10)]
LENGTH, BLOCK = 30, 6
ONE_PACK = ("--packs-per-step", "1", "--token-budget", "320")
TWO_PACKS = ("--packs-per-step", "2", "--token-budget", "160")

pytestmark = [
    pytest.mark.process,
    pytest.mark.long,
    pytest.mark.skipif(not importlib.util.find_spec("speculators"), reason="speculators is not installed"),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("peer") / "model"
    config = LlamaConfig(
        vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=7, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        initializer_range=0.3, tie_word_embeddings=True,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def data(model: Path) -> Path:
    """The target's own greedy answers, each another length, so that packs are padded and ragged."""
    target = load_target(model)
    ids = torch.tensor(PROMPTS)
    with torch.inference_mode():
        while ids.shape[1] < LENGTH:
            best = target.model(input_ids=ids, use_cache=False).logits[:, -1].argmax(-1, keepdim=True)
            ids = torch.cat((ids, best), dim=1)
    samples = []
    for number, row in enumerate(ids.numpy().astype(np.int32)):
        mask = np.ones(LENGTH - number % 3, np.uint8)
        mask[:4] = 0
        samples.append(Sample(row[: len(mask)], mask))
    folder = model.parent / "data"
    write_dataset(folder, samples, {})
    return folder


def run_loop(model: Path, data: Path, out: Path, *more: str) -> dict[str, object]:
    command = [
        sys.executable, LOOP, "--model", model, "--data", data, "--out", out, "--bucket-edges", "16", "32",
        "--anchors", "128", "--layers", "2",
        "--block-size", BLOCK, "--taps", "1", "2", "4", "--mask-token-id", "96", "--device", "cpu", *more,
    ]  # fmt: skip
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(json.loads(done.stdout.splitlines()[-1]))


def test_its_drafter_is_accepted_by_our_evaluator(model: Path, data: Path, tmp_path: Path) -> None:
    out = tmp_path / "drafter"
    result = run_loop(model, data, out, "--steps", "400", "--lr", "0.006", "--dtype", "float32", *ONE_PACK)
    assert result["steps"] == 400

    prompts = [Prompt(ids=tuple(ids), domain="") for ids in PROMPTS]
    found = evaluate(load_target(model), load_zlab(out), prompts, max_new_tokens=LENGTH - 6, stop_ids=())
    lengths = [length for one in found.drafted for length in one.accepted]
    assert not found.differing
    assert sum(lengths) / len(lengths) > 4.0, result  # 5.75 would be all of them


def test_a_limit_of_time_ends_the_training_and_not_the_export(
    model: Path, data: Path, tmp_path: Path
) -> None:
    out = tmp_path / "drafter"
    result = run_loop(model, data, out, "--steps", "100000", "--seconds", "1", "--recipe", "own", *TWO_PACKS)
    assert 0 < int(str(result["steps"])) < 100000
    assert load_zlab(out).config.block_size == BLOCK
