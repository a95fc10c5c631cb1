"""The forecast counts what the run will do, and its memory terms come near what was measured."""

import io
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from tiny_tokenizers import make_tokenizer
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.qwen3_5 import Qwen3_5TextConfig

from protocol.errors import ModelError
from services.config.schema import Config, Data, Drafter, Model, Plan, Recipe, Run, Target
from services.data.dataset import Sample
from services.data.forecast import Rates, TargetShape, best_split, forecast, plan_of_run, read_target
from services.data.forecast_view import show
from services.data.gpu_memory import (
    CUDA_BYTES,
    HEAD_CHUNK_ROWS,
    TargetWidths,
    drafter_memory,
    most_positions,
    target_memory,
)
from services.data.plan import Schedule, padded_length
from services.data.training_data import TrainingData
from services.data.writer import write_dataset
from services.dflash.drafter_config import DrafterConfig
from services.dflash.head import GPU_CHUNK_ROWS

EDGES = (16, 32, 64)
GIB = 2**30
RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"
MEASURED = RESULTS / "drafter_step_h200.json"


def config_of(path, **sections):
    return Config(
        run=Run(epochs=3), model=Model(path="m"), data=Data(path=path),
        plan=Plan(token_budget=64, bucket_edges=EDGES, packs_per_step=4), **sections,
    )  # fmt: skip


@pytest.fixture
def dataset(tmp_path):
    lengths = [1 + (at * 11) % 64 for at in range(200)]
    samples = [Sample(np.arange(length, dtype=np.int32), np.ones(length, np.uint8)) for length in lengths]
    return write_dataset(tmp_path / "d", samples, {})


EIGHT_B = TargetShape(8_190_000_000, TargetWidths(4096, 12288, 6144))
EIGHT_B_DRAFTER = DrafterConfig(
    hidden_size=4096,
    intermediate_size=12288,
    num_hidden_layers=5,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    vocab_size=151936,
    num_target_layers=36,
    target_layer_ids=(1, 9, 17, 25, 33),
    block_size=16,
    mask_token_id=151669,
    rms_norm_eps=1e-6,
    rope_theta=1e6,
    max_position_embeddings=40960,
    layer_types=("full_attention",) * 5,
)


def test_the_counts_are_those_of_the_plan(dataset):
    config = config_of(dataset.path)
    made = forecast(config, TrainingData(dataset), EIGHT_B, EIGHT_B_DRAFTER, None)
    schedule = Schedule(config, TrainingData(dataset))
    batches = schedule.epoch(0).batches
    padded = [sum(padded_length(int(dataset.lengths[row]), EDGES) for row in batch) for batch in batches]
    assert made.counts.packs == len(batches)
    assert made.counts.steps == schedule.total_steps
    assert made.counts.tokens == dataset.lengths.sum()
    assert made.counts.largest_forward == max(padded)
    assert made.counts.padding_share == pytest.approx(1 - dataset.lengths.sum() / sum(padded))
    assert made.bytes_per_token == 5 * 4096 * 2 + 9
    assert made.hours is None


@pytest.mark.parametrize("warm_up", [True, False])
def test_a_targets_memory_is_that_of_its_largest_warm_up_or_forward(dataset, warm_up):
    """Buckets of 16, 32 and 64 may hold 16, 8 and 4 samples each at a budget of 64."""
    config = config_of(dataset.path, target=Target(warm_up=warm_up))
    assert most_positions(config, 16) == most_positions(config, 64) == 256
    made = forecast(config, TrainingData(dataset), EIGHT_B, EIGHT_B_DRAFTER, None)
    positions = 256 if warm_up else made.counts.largest_forward
    weights = 2 * EIGHT_B.parameters
    assert made.target == target_memory(config, weights, EIGHT_B.widths, positions, made.slot_bytes)
    assert made.counts.largest_forward < 256


def test_hours_follow_the_slower_side_and_the_advice_their_ratio(dataset):
    config = config_of(dataset.path, target=Target(count=2), drafter=Drafter(count=1))
    made = forecast(config, TrainingData(dataset), EIGHT_B, EIGHT_B_DRAFTER, Rates(100.0, 500.0))
    assert made.hours == pytest.approx(3 * made.counts.tokens / 200 / 3600)
    assert made.targets_per_drafter == 5.0
    assert made.advised == (2, 1)


@pytest.mark.parametrize(
    ("roles", "rates", "best"),
    [
        (8, Rates(6.0, 10.0), (5, 3)),
        (8, Rates(1.0, 1.0), (4, 4)),
        (2, Rates(1.0, 9.0), (1, 1)),
        (8, Rates(1.0, 100.0), (7, 1)),
    ],
)
def test_the_advised_split_is_the_fastest_of_all(roles, rates, best):
    assert best_split(roles, rates) == best
    speeds = {
        (t, roles - t): min(t * rates.target_tokens_per_s, (roles - t) * rates.drafter_tokens_per_s)
        for t in range(1, roles)
    }
    assert speeds[best] == max(speeds.values())


@pytest.mark.parametrize(
    ("variant", "tokens", "rows"), [("four", 4096, 5), ("one", 4096, 5), ("long", 32768, 5), ("kl", 4096, 6)]
)
def test_a_drafters_memory_comes_near_what_was_measured(variant, tokens, rows):
    """One H200, five layers at Qwen3-8B's shape, 512 blocks of 16; the benchmark has one pack on the GPU."""
    measured = json.loads(MEASURED.read_text())[variant]
    config = Config(
        model=Model(path="m"), data=Data(path="d"), plan=Plan(token_budget=tokens),
        recipe=Recipe(anchors_per_pack=512, loss="kl" if variant == "kl" else "ce"),
        drafter=Drafter(prefetch_packs=0),
    )  # fmt: skip
    made = drafter_memory(config, EIGHT_B_DRAFTER, slot=tokens * rows * 4096 * 2)
    lasting = made.total - made.parts["activations"]
    assert lasting / GIB == pytest.approx(measured["lasting_gib"], rel=0.02)
    assert made.parts["activations"] / GIB == pytest.approx(measured["peak_above_lasting_gib"], rel=0.03)
    assert made.total / GIB == pytest.approx(measured["peak_gib"], rel=0.05)
    moments = 8 * EIGHT_B_DRAFTER.parameter_count
    assert (made.total - moments) / GIB == pytest.approx(measured["peak_without_moments_gib"], rel=0.05)


@pytest.mark.parametrize("shape", ["", "_06b", "_27b"])
def test_memory_is_foretold_whatever_the_size(shape):
    """The pipeline's roles on H200s, 512 blocks of 16: torch's peak, and the process with all of CUDA."""
    results = RESULTS / f"pipeline{shape}_h200x2.json"
    measured = json.loads(results.read_text())["memory"]
    hidden, mlp, heads, vocabulary = {
        "": (4096, 12288, 32, 151936), "_06b": (1024, 3072, 16, 151936), "_27b": (5120, 17408, 32, 248320),
    }[shape]  # fmt: skip
    drafter = replace(
        EIGHT_B_DRAFTER, hidden_size=hidden, intermediate_size=mlp, num_attention_heads=heads,
        vocab_size=vocabulary,
    )  # fmt: skip
    config = Config(
        model=Model(path="m"), data=Data(path="d"), plan=Plan(token_budget=4096),
        recipe=Recipe(anchors_per_pack=512),
    )  # fmt: skip
    packs = measured["drafter"]["parts"]["packs"]
    foretold = drafter_memory(config, drafter, slot=packs // (1 + config.drafter.prefetch_packs))
    assert foretold.parts["packs"] == pytest.approx(packs, abs=8)
    foretold_bytes = {"drafter": foretold.total}
    if shape != "_27b":  # whose linear attention has a test of its own, below
        parts = measured["target"]["parts"]
        slot = parts["pack buffers"] // (config.target.postprocess_depth + 1)
        widths = TargetWidths(hidden, mlp, 128 * (heads + 2 * 8))
        foretold_bytes["target"] = target_memory(config, parts["weights"], widths, 16 * 1024, slot).total
    for role, size in foretold_bytes.items():
        assert size == pytest.approx(measured[role]["allocated_peak_bytes"], rel=0.04)
        assert size + CUDA_BYTES[role] == pytest.approx(measured[role]["process_bytes"], rel=0.1)


def test_the_heads_chunk_is_that_of_the_head():
    assert HEAD_CHUNK_ROWS == GPU_CHUNK_ROWS


def test_in_float32_there_is_no_compute_copy_and_everything_else_is_twice_as_large():
    half, single = (
        drafter_memory(
            Config(model=Model(path="m"), data=Data(path="d"), drafter=Drafter(dtype=dtype)),
            EIGHT_B_DRAFTER,
            slot=GIB,
        ).parts
        for dtype in ("bfloat16", "float32")
    )
    assert half["compute copy"] == 2 * EIGHT_B_DRAFTER.parameter_count and single["compute copy"] == 0
    for name in ("embedding and head", "activations"):
        assert single[name] == 2 * half[name]
    assert single["masters and optimizer"] == half["masters and optimizer"]


def test_a_targets_memory_is_its_weights_and_a_little():
    config = Config(model=Model(path="m"), data=Data(path="d"))
    target = target_memory(config, 2 * EIGHT_B.parameters, EIGHT_B.widths, 8192, slot=160 * 2**20)
    assert 15 * GIB < target.total < 19 * GIB
    assert target.total == sum(target.parts.values())


def test_a_target_with_linear_attention_comes_near_what_was_measured(tmp_path):
    """The peak that torch told on an H200: the largest warm-up has 16 samples of 1,024 in float32 tensors."""
    config = Qwen3_5TextConfig(
        vocab_size=248320, hidden_size=5120, intermediate_size=17408, num_hidden_layers=64,
        num_attention_heads=24, num_key_value_heads=4, head_dim=256, linear_num_key_heads=16,
        linear_num_value_heads=48, linear_key_head_dim=128, linear_value_head_dim=128,
        tie_word_embeddings=False,
    )  # fmt: skip
    config.save_pretrained(tmp_path)
    shape = read_target(str(tmp_path))
    assert shape.widths.delta == 48 * 128
    assert 2 * shape.parameters == 53_791_996_928
    options = Config(model=Model(path="m"), data=Data(path="d"))
    found = target_memory(options, 2 * shape.parameters, shape.widths, 16384, slot=419_504_640 // 2)
    measured = json.loads((RESULTS / "pipeline_27b_h200x2.json").read_text())["memory"]["target"]
    assert found.total == pytest.approx(measured["allocated_peak_bytes"], rel=0.02)
    assert found.total + CUDA_BYTES["target"] == pytest.approx(measured["process_bytes"], rel=0.05)


def test_a_target_is_read_from_its_configuration_without_weights(tmp_path):
    config = LlamaConfig(
        vocab_size=300, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=True,
    )  # fmt: skip
    config.save_pretrained(tmp_path)
    shape = read_target(str(tmp_path))
    parameters = sum(parameter.numel() for parameter in LlamaForCausalLM(config).parameters())
    assert shape == TargetShape(parameters, TargetWidths(32, 48, 8 * (4 + 2 * 2)))
    with pytest.raises(ModelError, match="no causal language model"):
        read_target(str(tmp_path / "none"))


def test_the_whole_forecast_is_printed(tmp_path, dataset):
    model = tmp_path / "model"
    make_tokenizer().save_pretrained(model)
    LlamaConfig(
        vocab_size=1024, hidden_size=32, intermediate_size=48, num_hidden_layers=8, num_attention_heads=4
    ).save_pretrained(model)
    config = config_of(dataset.path, drafter=Drafter(layers=2, taps=2))
    for rates, words in ((None, "unknown"), (Rates(50.0, 100.0), "2.00 targets keep a drafter busy")):
        console = Console(file=io.StringIO(), width=160)
        console.print(show(plan_of_run(config, model, rates), config))
        printed = console.file.getvalue()
        assert words in printed
        for title in ("packs an epoch", "padding", "steps", "a target", "a drafter", "arenas"):
            assert title in printed
