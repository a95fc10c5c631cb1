"""A target that is too large for its GPU is refused by the numbers, before anything is loaded."""

from __future__ import annotations

import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from target_families import FAMILIES, model_of
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache

from services.check.devices import Devices, check_devices
from services.check.evaluator import evaluator_memory, logit_bytes
from services.check.model import ModelFacts, check_model
from services.config.load import load
from services.dflash.drafter import Drafter
from services.dflash.head import FrozenHead
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
    devices = devices_of(folder, memory, weights, **options)
    assert not devices.warnings
    return [str(finding) for finding in devices.findings]


def devices_of(folder, memory, weights=60 * GIB, positions=1024, **options) -> Devices:
    loaded, facts = facts_of(folder, **options)
    return check_devices(loaded, facts._replace(loaded_bytes=weights), positions, memory)


def test_weights_count_in_the_type_they_are_loaded_as(folder):
    parameters = sum(p.numel() for p in model_of(FAMILIES["qwen3"], tied=False).parameters())
    for dtype, item in (("float32", 4), ("bfloat16", 2), ("float16", 2)):
        assert facts_of(folder, model__dtype=dtype)[1].loaded_bytes == item * parameters


def test_a_target_larger_than_its_gpu_is_refused_by_the_numbers(folder):
    (finding,) = found(folder, {0: 48 * GIB, 1: 48 * GIB})
    assert "GPU 0 has 48 GiB, target 0 60.8 GiB (weights 60 GiB, activations" in finding
    assert "CUDA 858 MiB" in finding
    assert "quantise the target" in finding and f"model.path = {folder}" in finding


def test_a_targets_activations_count_and_are_warned_of(folder):
    """The library may have kernels that take less, so nothing is refused for them alone."""
    memory = {0: 80 * GIB, 1: 80 * GIB}
    fits = devices_of(folder, memory, positions=16 << 20)
    assert not fits.findings and not fits.warnings and "activations 11 GiB" in dict(fits.facts)["GPU 0"]
    tight = devices_of(folder, memory, positions=64 << 20)
    (warning,) = tight.warnings
    assert "activations 44 GiB" in str(warning) and "plan.token_budget" in str(warning)
    assert not tight.findings
    too_large = devices_of(folder, memory, weights=80 * GIB, positions=64 << 20)
    assert len(too_large.findings) == 1 and not too_large.warnings


def test_roles_that_share_a_gpu_are_added_up(folder):
    assert not found(folder, {0: 80 * GIB})
    (finding,) = found(folder, {0: 80 * GIB}, target__count="2", target__gpus="0,0")
    assert "target 0 60.8 GiB" in finding and "target 1 60.8 GiB" in finding and "drafter 0" in finding
    assert not found(folder, {0: 80 * GIB, 1: 80 * GIB, 2: 80 * GIB}, target__count="2")


def test_a_drafters_copies_and_activations_count(folder):
    options = {"target__gpus": "0", "drafter__gpus": "1", "recipe__anchors_per_pack": "65536"}
    (finding,) = found(folder, {0: 80 * GIB, 1: 2 * GIB}, **options)
    assert "GPU 1 has 2 GiB, drafter 0" in finding and "recipe.anchors_per_pack" in finding
    assert "compute copy" in finding and "activations" in finding
    assert not found(folder, {0: 80 * GIB, 1: 2 * GIB}, **options | {"recipe__anchors_per_pack": "64"})


EVALUATED = {
    "target__gpus": "0", "drafter__gpus": "1", "evaluator__count": "1", "eval__prompts": "unused",
}  # fmt: skip


def test_an_evaluator_counts_where_it_runs_with_its_caches(folder):
    memory = {0: 80 * GIB, 1: 80 * GIB, 2: 48 * GIB}
    (finding,) = found(folder, memory, **EVALUATED)  # the GPU that nobody else has
    assert "GPU 2 has 48 GiB, evaluator 60.9 GiB (weights 60 GiB, drafter" in finding and "caches" in finding
    assert not found(folder, memory, **EVALUATED, evaluator__gpu="1")
    (finding,) = found(folder, memory, **EVALUATED, evaluator__gpu="0")
    assert "GPU 0 has 80 GiB, target 0 60.8 GiB" in finding and "and evaluator 60.9 GiB" in finding
    assert not found(folder, memory, **EVALUATED, evaluator__gpu="cpu")


def test_an_evaluator_without_a_gpu_of_its_own_must_be_given_one(folder):
    (finding,) = found(folder, {0: 80 * GIB, 1: 80 * GIB}, **EVALUATED)
    assert finding.startswith("evaluator.gpu") and "targets and drafters have all 2 GPUs" in finding
    (finding,) = found(folder, {0: 80 * GIB, 1: 80 * GIB}, **EVALUATED, evaluator__gpu="7")
    assert "evaluator: there is no GPU 7 here" in finding


@pytest.mark.parametrize("name", FAMILIES)
def test_what_a_targets_cache_keeps_of_a_token_beyond_its_windows_is_counted(tmp_path, name):
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

    assert kept(40) - kept(39) == facts.cache_width
    assert facts.in_batches == can_batch(target)
    if can_batch(target):  # what is decoded in batches keeps all of it
        assert kept(40) == 40 * facts.cache_width


def test_short_prompts_take_short_caches(folder, tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "w5"}\n' + '{"prompt": "' + "w9 " * 90 + '"}\n')
    sizes = []
    for limit in ("1", "0"):
        options = {"eval__prompts": str(file), "eval__limit": limit, "eval__max_new_tokens": "20"}
        loaded, facts = facts_of(folder, **options)
        facts = facts._replace(drafter=replace(facts.drafter, max_position_embeddings=100_000))
        sizes.append(evaluator_memory(loaded.config, facts, on_gpu=True)["caches"])
    tokens = [int(size / sizes[0] * (17 + 256 + 20 + facts.drafter.block_size)) for size in sizes]
    assert tokens[1] - tokens[0] == len(file.read_bytes().splitlines()[1]) + 1 - 17


def test_an_evaluators_caches_are_those_of_its_batch_or_of_as_many_tokens_as_it_ever_keeps(folder):
    _, facts = facts_of(folder)
    drafter = facts.drafter
    context_width = 2 * drafter.num_hidden_layers * drafter.num_key_value_heads * drafter.head_dim
    for batch, tokens in ((1, drafter.max_position_embeddings), (10**9, TOKENS)):
        loaded, _ = facts_of(folder, eval__batch=str(batch), model__dtype="float32")
        caches = evaluator_memory(loaded.config, facts)["caches"]
        assert caches == 4 * tokens * (facts.cache_width + context_width)
        one_by_one = facts._replace(in_batches=False)
        caches = evaluator_memory(loaded.config, one_by_one)["caches"]
        assert caches == 4 * drafter.max_position_embeddings * (facts.cache_width + context_width)


class Live(TorchDispatchMode):
    """Bytes of the tensors that operations make, and the most that there were at once."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        known = {tensor.untyped_storage().data_ptr() for tensor in args if isinstance(tensor, torch.Tensor)}
        if made.untyped_storage().data_ptr() not in known:
            self.now += made.untyped_storage().nbytes()
            self.most = max(self.most, self.now)
            weakref.finalize(made, self._gone, made.untyped_storage().nbytes())
        return made

    def _gone(self, size: int) -> None:
        self.now -= size


@pytest.mark.parametrize("rules", [{}, {"multiplier": 0.5}, {"softcap": 3.0}])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_logits_are_counted_as_they_are_made(folder, rules, dtype):
    facts, item = facts_of(folder)[1], getattr(torch, dtype).itemsize
    shape = replace(
        facts.drafter,
        output_multiplier=rules.get("multiplier", 1.0), final_logit_softcapping=rules.get("softcap", 0.0),
    )  # fmt: skip
    head = FrozenHead(torch.ones(1000, 2, dtype=getattr(torch, dtype)), **rules)
    hidden = torch.ones(10, 2, dtype=getattr(torch, dtype))
    with Live() as live:
        head.logits(hidden)
    assert live.most == 10 * 1000 * logit_bytes(item, shape)


def test_a_drafter_is_loaded_in_float32_on_the_host_before_anything_is_decoded(folder):
    loaded, facts = facts_of(folder, model__dtype="bfloat16")
    own_bytes = sum(p.numel() * p.element_size() for p in Drafter(facts.drafter, seed=None).parameters())
    assert own_bytes == 4 * facts.drafter.parameter_count  # and the file's tensors beside it
    tiny = facts._replace(rows=1, cache_width=0)
    large = tiny._replace(drafter=replace(facts.drafter, intermediate_size=1 << 20))
    for model, on_gpu, item in ((tiny, True, 2), (large, True, 2), (large, False, 8)):
        parts = evaluator_memory(loaded.config, model, on_gpu=on_gpu)
        assert parts["drafter"] == item * model.drafter.parameter_count
        assert ("caches" in parts) == (item == 2)


def test_a_gpu_that_is_not_there_is_named(folder):
    (finding,) = found(folder, {0: 80 * GIB}, target__gpus="3")
    assert "target 0: there is no GPU 3 here" in finding


def test_a_cpu_has_no_gpu_to_be_too_small(folder):
    assert not found(folder, {})
    assert not found(folder, {0: GIB}, target__gpus="cpu", drafter__gpus="cpu")
