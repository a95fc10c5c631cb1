"""Many prompts decoded at a time: the tokens and lists that each has alone, and only where that holds."""

import threading
from dataclasses import replace

import pytest
import torch
from dflash_tiny import FAMILIES, drafter_config, tiny_target
from dflash_trained import PROMPTS, train_drafter
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    Gemma2Config,
    GPT2Config,
    GraniteConfig,
    Lfm2Config,
    LlamaConfig,
    PreTrainedConfig,
)

from services.config.schema import Config
from services.dflash import speculate_batch as batch_module
from services.dflash.checkpoint import write_checkpoint
from services.dflash.drafter import Drafter
from services.dflash.eval_result import EvalResult
from services.dflash.evaluate import evaluate
from services.dflash.prompts import Prompt
from services.dflash.sampling import Sampling
from services.dflash.speculate import speculate
from services.dflash.speculate_batch import can_batch, speculate_batch
from services.dflash.target_model import Target, wrap_target
from services.evaluator.agenda import Recorded
from services.evaluator.evaluator import Evaluator, Interrupted
from services.evaluator.run_state import Run

MIXED = [PROMPTS[0], PROMPTS[1][:1], [*PROMPTS[2], *PROMPTS[3]], PROMPTS[4][:3], PROMPTS[5]]
SHAPE = {
    name: getattr(FAMILIES["llama"], name)
    for name in (
        "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
        "num_key_value_heads", "max_position_embeddings", "pad_token_id", "bos_token_id", "eos_token_id",
        "initializer_range",
    )
}  # fmt: skip


@pytest.fixture(scope="module", params=["llama", "sliding drafter"])
def trained(request):
    if request.param == "llama":
        return train_drafter("llama")
    return train_drafter("qwen3", sliding=True, steps=50)


def alone(target, drafter, prompts, **limits):
    return [decoded(speculate(target, drafter, prompt, **limits)) for prompt in prompts]


def together(target, drafter, prompts, **limits):
    answers = speculate_batch(target, drafter, prompts, **limits)
    assert all(answer.prefill_s == answer.decode_s == 0.0 for answer in answers)
    return [decoded(answer) for answer in answers]


def decoded(answer):
    return answer.tokens, answer.accepted


def made(config: PreTrainedConfig, attention: str = "sdpa") -> Target:
    torch.manual_seed(0)
    return wrap_target(
        AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=torch.float32)
    )


class Sizes:
    """Rows of every forward of a target, told by its first layer."""

    def __init__(self, target: Target) -> None:
        self.seen: list[int] = []
        self._hook = target.layers[0].register_forward_pre_hook(
            lambda _layer, inputs: self.seen.append(inputs[0].shape[0])
        )

    def __enter__(self) -> list[int]:
        return self.seen

    def __exit__(self, *_: object) -> None:
        self._hook.remove()


def hooks(target: Target) -> int:
    return sum(len(layer._forward_hooks) + len(layer._forward_pre_hooks) for layer in target.layers)


@pytest.mark.parametrize(
    ("limit", "size", "rows"),
    [
        (1, None, (3,)),
        (2, None, (3,)),
        (17, None, (1, 5)),
        (25, None, (3, 5)),
        (5, 1, (5,)),
        (9, 2, (4,)),
        (17, 4, (3,)),
    ],
)
def test_each_prompt_has_the_tokens_and_lists_that_it_has_alone(trained, limit, size, rows):
    limits = {"max_new_tokens": limit, "stop_ids": (), "block_size": size}
    expected = alone(trained.target, trained.drafter, MIXED, **limits)
    if limit > 2 and size is None:
        assert len({length for _, lists in expected for length in lists}) > 2, "rows would not part"
    for count in rows:
        assert together(trained.target, trained.drafter, MIXED, rows=count, **limits) == expected, count


def test_rows_that_stop_early_make_room(trained):
    target, drafter = trained.target, trained.drafter
    free = together(target, drafter, MIXED, max_new_tokens=17, stop_ids=())
    stops = (free[0][0][6], free[2][0][0], free[3][0][11])  # in the midst, as the very first, late
    limits = {"max_new_tokens": 17, "stop_ids": stops}
    expected = alone(target, drafter, MIXED, **limits)
    lengths = sorted(len(tokens) for tokens, _ in expected)
    assert lengths[0] == 1 and lengths[0] < lengths[-1]
    for rows in (2, 5):
        assert together(target, drafter, MIXED, rows=rows, **limits) == expected


def test_the_batch_is_refilled_and_shrinks_at_the_end():
    target, drafter, *_ = train_drafter("llama")
    prompts = [prompt[: 1 + row % 4] for row, prompt in enumerate(PROMPTS[:7])]
    stop = alone(target, drafter, prompts[3:4], max_new_tokens=9, stop_ids=())[0][0][4]
    limits = {"max_new_tokens": 9, "stop_ids": (stop,)}
    with Sizes(target) as seen:
        found = together(target, drafter, prompts, rows=3, **limits)
    assert found == alone(target, drafter, prompts, **limits)
    assert seen[0] == max(seen) == 3 and seen[-1] < 3
    assert 3 in seen[seen.index(1) :]  # a newcomer's own forward, and then it is one of three


def test_memory_bounds_the_rows(monkeypatch):
    target, drafter, *_ = train_drafter("llama")
    limits = {"max_new_tokens": 6, "stop_ids": ()}
    expected = alone(target, drafter, MIXED, **limits)
    for tokens, most in ((128, 4), (32, 2), (1, 1)):  # 8 + 6 + 6 tokens need 32, the other prompts' 16
        monkeypatch.setattr(batch_module, "TOKENS", tokens)
        with Sizes(target) as seen:
            assert together(target, drafter, MIXED, **limits) == expected
        assert max(seen) == most


def test_progress_is_told_every_round_and_nothing_is_decoded_of_nothing():
    target, drafter, *_ = train_drafter("llama")
    told: list[tuple[int, int]] = []
    answers = speculate_batch(
        target, drafter, MIXED, max_new_tokens=12, stop_ids=(), rows=3, progress=lambda *of: told.append(of)
    )
    assert told == sorted(told) and told[-1] == (5, 5)
    assert len(told) >= max(len(answer.accepted) for answer in answers)
    assert speculate_batch(target, drafter, [], max_new_tokens=12, stop_ids=()) == []


UNTRAINED = {
    "experts": (FAMILIES["qwen3_moe"], "sdpa"),
    "capped logits": (
        Gemma2Config(**SHAPE, head_dim=16, final_logit_softcapping=3.0, layer_types=["full_attention"] * 7),
        "eager",
    ),
    "divided logits": (GraniteConfig(**SHAPE, logits_scaling=4.0, embedding_multiplier=3.0), "eager"),
    "multiplied logits": (CohereConfig(**SHAPE, logit_scale=0.25), "sdpa"),
}


@pytest.mark.parametrize("name", UNTRAINED)
def test_experts_and_ways_to_make_logits_agree(name):
    target, drafter = made(*UNTRAINED[name]), Drafter(drafter_config(), seed=1).eval()
    limits = {"max_new_tokens": 9, "stop_ids": ()}
    assert together(target, drafter, MIXED, rows=4, **limits) == alone(target, drafter, MIXED, **limits)


def test_a_block_at_the_limit_stays_in_the_table_of_positions():
    config = GPT2Config(
        vocab_size=97, n_embd=32, n_layer=7, n_head=4, n_positions=8 + 13, initializer_range=0.3,
        bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    target, drafter = made(config), Drafter(drafter_config(), seed=1).eval()
    limits = {"max_new_tokens": 13, "stop_ids": ()}  # the longest of MIXED fills the table
    assert together(target, drafter, MIXED, **limits) == alone(target, drafter, MIXED, **limits)


def test_targets_that_rows_at_different_positions_would_confuse_are_left_out():
    by_family = {family: can_batch(tiny_target(family)) for family in FAMILIES}
    assert by_family == {
        "llama": True, "qwen3": True, "qwen3_moe": True, "gemma2": False, "gemma3": False,
    }  # fmt: skip
    hybrid = Lfm2Config(**SHAPE, layer_types=["conv", "full_attention"] * 3 + ["conv"])
    growing = LlamaConfig(**SHAPE, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0})
    assert not can_batch(made(hybrid)) and not can_batch(made(growing))
    several = replace(target := tiny_target("llama"), config=type(target.config)(**SHAPE))
    several.config._attn_implementation = "flash_attention_2"
    assert not can_batch(several)
    several.config._attn_implementation = "sdpa"
    assert can_batch(several)
    several.config.rope_parameters["mrope_section"] = [2, 1, 1]
    assert not can_batch(several)


def without_speeds(result: EvalResult) -> dict[str, object]:
    rates = ("drafted_tokens_per_s", "plain_tokens_per_s", "speedup")
    return {name: value for name, value in result.to_dict().items() if name not in rates}


def test_an_evaluation_in_batches_finds_what_one_by_one_finds():
    target, drafter, *_ = train_drafter("llama")
    prompts = [Prompt(tuple(prompt), f"domain {n % 2}", n) for n, prompt in enumerate(MIXED)]
    asked = {"max_new_tokens": 12, "plain": False}
    told: list[tuple[int, int]] = []
    one_by_one = evaluate(target, drafter, prompts, **asked)
    in_batches = evaluate(target, drafter, prompts, batch=4, progress=lambda *of: told.append(of), **asked)
    assert without_speeds(in_batches) == without_speeds(one_by_one) and in_batches.lossless
    assert in_batches.to_dict()["drafted_tokens_per_s"] is None
    assert [decoded(a) for a in in_batches.drafted] == [decoded(a) for a in one_by_one.drafted]
    assert told[-1] == (5, 5)


@pytest.mark.parametrize(
    ("family", "asked"),
    [
        ("llama", {"plain": True}),
        ("llama", {"plain": False, "sampling": Sampling(1.5, 0.9, 3)}),
        ("gemma2", {"plain": False}),
    ],
)
def test_speeds_samples_and_windows_are_decoded_one_by_one(family, asked):
    target, drafter = tiny_target(family), Drafter(drafter_config(), seed=0)
    prompts = [Prompt(tuple(prompt), "", n) for n, prompt in enumerate(PROMPTS[:2])]
    with Sizes(target) as seen:
        result = evaluate(target, drafter, prompts, max_new_tokens=6, batch=4, **asked)
    assert set(seen) == {1} and result.to_dict()["drafted_tokens_per_s"] > 0


class Stopped(Exception):
    pass


def test_what_ends_the_decoding_leaves_no_hook_behind():
    target, drafter, *_ = train_drafter("llama")
    limits = {"max_new_tokens": 12, "stop_ids": ()}
    expected, rounds = alone(target, drafter, MIXED, **limits), []

    def stop(*_: int) -> None:
        rounds.append(1)
        if len(rounds) == 2:
            raise Stopped

    with pytest.raises(Stopped):
        speculate_batch(target, drafter, MIXED, rows=3, progress=stop, **limits)
    assert hooks(target) == 0
    assert together(target, drafter, MIXED, rows=3, **limits) == expected


def test_the_evaluator_decodes_in_batches_and_hears_a_signal_between_rounds(tmp_path):
    target, drafter, *_ = train_drafter("llama")
    state = {"weights": dict(drafter.state_dict()), "optimizer": {}, "state": {}, "drafter": drafter.config}
    write_checkpoint(tmp_path / "ckpt", **state)
    config = Config.model_validate({
        "run": {"dir": str(tmp_path)}, "model": {"path": "none", "dtype": "float32"},
        "data": {"path": "none"}, "eval": {"max_new_tokens": 12, "batch": 3},
    })  # fmt: skip
    prompts = [Prompt(tuple(prompt), "", n) for n, prompt in enumerate(MIXED)]
    signal, recorded = threading.Event(), Recorded("ckpt", 1, 1)
    with Sizes(target) as seen:
        line = Evaluator(config, target, prompts, None, Run(config.run.dir), signal)._evaluate(
            recorded, tmp_path / "ckpt"
        )
    expected = evaluate(target, drafter, prompts, max_new_tokens=12, plain=False)
    assert max(seen) == 3 and line["lossless"] is True
    assert line["acceptance_length"] == expected.to_dict()["acceptance_length"]

    signal.set()
    with Sizes(target) as seen, pytest.raises(Interrupted):
        Evaluator(config, target, prompts, None, Run(config.run.dir), signal)._evaluate(
            recorded, tmp_path / "ckpt"
        )
    assert seen == [3, 3] and hooks(target) == 0  # the prompts' forward and one round
