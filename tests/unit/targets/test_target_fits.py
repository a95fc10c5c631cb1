"""A target that is too large for its GPU is refused by the numbers, before anything is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from target_families import FAMILIES, model_of
from transformers import DynamicCache

from services.check.devices import check_devices
from services.check.evaluator import evaluator_memory
from services.check.model import ModelFacts, check_model
from services.config.load import load
from services.dflash.speculate_batch import TOKENS, can_batch
from services.dflash.target_model import load_target

GIB = 2**30


def facts_of(folder: Path, **options: str):
    """Options and facts of a saved model that is said to have 60 billion bytes in bfloat16."""
    words = {
        "model.path": str(folder), "data.path": "unused", "drafter.mask_token_id": "96", "drafter.taps": "2",
    } | {name.replace("__", "."): value for name, value in options.items()}  # fmt: skip
    loaded = load(None, [(f"--{name}", value) for name, value in words.items()], {})
    facts, findings = check_model(loaded)
    assert isinstance(facts, ModelFacts) and not findings
    return loaded, facts


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    found = tmp_path_factory.mktemp("fits")
    model_of(FAMILIES["qwen3"], tied=False).save_pretrained(found)
    return found


def found(folder, memory, weights=60 * GIB, **options):
    loaded, facts = facts_of(folder, **options)
    return [str(finding) for finding in check_devices(loaded, facts._replace(loaded_bytes=weights), memory)]


def test_weights_count_in_the_type_they_are_loaded_as(folder):
    parameters = sum(p.numel() for p in model_of(FAMILIES["qwen3"], tied=False).parameters())
    for dtype, item in (("float32", 4), ("bfloat16", 2), ("float16", 2)):
        assert facts_of(folder, model__dtype=dtype)[1].loaded_bytes == item * parameters


def test_a_target_larger_than_its_gpu_is_refused_by_the_numbers(folder):
    (finding,) = found(folder, {0: 48 * GIB, 1: 48 * GIB})
    assert "GPU 0 has 48 GiB, target 0 60 GiB (weights 60 GiB, pack buffers" in finding
    assert "quantise the target" in finding and f"model.path = {folder}" in finding


def test_roles_that_share_a_gpu_are_added_up(folder):
    assert not found(folder, {0: 80 * GIB})
    (finding,) = found(folder, {0: 80 * GIB}, target__count="2", target__gpus="0,0")
    assert "target 0 60 GiB" in finding and "target 1 60 GiB" in finding and "drafter 0" in finding
    assert not found(folder, {0: 80 * GIB, 1: 80 * GIB, 2: 80 * GIB}, target__count="2")


def test_a_drafters_copies_and_activations_count(folder):
    options = {"target__gpus": "0", "drafter__gpus": "1", "recipe__anchors_per_pack": "65536"}
    (finding,) = found(folder, {0: 80 * GIB, 1: GIB}, **options)
    assert "GPU 1 has 1 GiB, drafter 0" in finding and "recipe.anchors_per_pack" in finding
    assert "compute copy" in finding and "activations" in finding
    assert not found(folder, {0: 80 * GIB, 1: GIB}, **options | {"recipe__anchors_per_pack": "64"})


EVALUATED = {
    "target__gpus": "0", "drafter__gpus": "1", "evaluator__count": "1", "eval__prompts": "unused",
}  # fmt: skip


def test_an_evaluator_counts_where_it_runs_with_its_caches(folder):
    memory = {0: 80 * GIB, 1: 80 * GIB, 2: 48 * GIB}
    (finding,) = found(folder, memory, **EVALUATED)  # the GPU that nobody else has
    assert "GPU 2 has 48 GiB, evaluator 60 GiB (weights 60 GiB, drafter" in finding and "caches" in finding
    assert not found(folder, memory, **EVALUATED, evaluator__gpu="1")
    (finding,) = found(folder, memory, **EVALUATED, evaluator__gpu="0")
    assert "GPU 0 has 80 GiB, target 0 60 GiB" in finding and "and evaluator 60 GiB" in finding
    assert not found(folder, memory, **EVALUATED, evaluator__gpu="cpu")


def test_an_evaluator_without_a_gpu_of_its_own_must_be_given_one(folder):
    (finding,) = found(folder, {0: 80 * GIB, 1: 80 * GIB}, **EVALUATED)
    assert finding.startswith("evaluator.gpu") and "targets and drafters have all 2 GPUs" in finding
    (finding,) = found(folder, {0: 80 * GIB, 1: 80 * GIB}, **EVALUATED, evaluator__gpu="7")
    assert "evaluator: there is no GPU 7 here" in finding


@pytest.mark.parametrize("name", FAMILIES)
def test_what_a_targets_cache_keeps_of_a_token_is_no_more_than_is_counted(tmp_path, name):
    attention = FAMILIES[name].attention
    model_of(FAMILIES[name], tied=False).save_pretrained(tmp_path)
    _, facts = facts_of(tmp_path, model__attention=attention)
    target = load_target(str(tmp_path), attention=attention)

    def kept(tokens: int) -> int:
        ids = torch.arange(3, 3 + tokens)[None]
        output = target.base(input_ids=ids, past_key_values=DynamicCache(config=target.model.config))
        layers = output.past_key_values.layers
        return sum(
            getattr(layer, part).numel()
            for layer in layers
            for part in ("keys", "values")
            if part in vars(layer)
        )

    found = kept(3) - kept(2)
    assert 0 < found <= facts.cache_width
    if can_batch(target):  # what is decoded in batches keeps all of it
        assert found == facts.cache_width


def test_an_evaluators_caches_are_those_of_its_batch_or_of_as_many_tokens_as_it_ever_keeps(folder):
    _, facts = facts_of(folder)
    drafter = facts.drafter
    context_width = 2 * drafter.num_hidden_layers * drafter.num_key_value_heads * drafter.head_dim
    for batch, tokens in ((1, drafter.max_position_embeddings), (10**9, TOKENS)):
        loaded, _ = facts_of(folder, eval__batch=str(batch), model__dtype="float32")
        caches = evaluator_memory(loaded.config, facts)["caches"]
        assert caches == 4 * tokens * (facts.cache_width + context_width)


def test_a_gpu_that_is_not_there_is_named(folder):
    (finding,) = found(folder, {0: 80 * GIB}, target__gpus="3")
    assert "target 0: there is no GPU 3 here" in finding


def test_a_cpu_has_no_gpu_to_be_too_small(folder):
    assert not found(folder, {})
    assert not found(folder, {0: GIB}, target__gpus="cpu", drafter__gpus="cpu")
