"""Decoding with a drafter: z-lab's lists one by one, lossless, and as good served as trained (trap 5)."""

import time
from dataclasses import replace

import pytest
import torch
from dflash_tiny import FAMILIES
from dflash_trained import PROMPTS, train_drafter
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast

from protocol.errors import ConfigError, ModelError
from services.config.schema import Config
from services.dflash.acceptance import Acceptance
from services.dflash.checkpoint import write_checkpoint
from services.dflash.evaluate import check_fit, evaluate, run_eval
from services.dflash.export import export_drafter
from services.dflash.export_check import load_with_zlab, zlab_installed
from services.dflash.prompts import Prompt
from services.dflash.sampling import Sampling, accept, pick
from services.dflash.speculate import decode_plainly, speculate

PAIRS = {"llama": ("llama", False), "qwen3 sliding": ("qwen3", True), "gemma2": ("gemma2", False)}


@pytest.fixture(scope="module", params=PAIRS)
def trained(request):
    family, sliding = PAIRS[request.param]
    return train_drafter(family, sliding=sliding)


def unseen():
    return [[90 - seed, 5, 5 + seed, 33, 60 - seed] for seed in range(2)]


def test_served_acceptance_is_what_training_counted(trained):
    counted = float(trained.last.accepted_sum / trained.last.blocks)
    assert counted > 2.0
    limits = {"max_new_tokens": 26, "stop_ids": ()}
    answers = [speculate(trained.target, trained.drafter, prompt, **limits) for prompt in PROMPTS[:5]]
    served = Acceptance(6, tuple(answer.accepted for answer in answers)).pooled_mean
    assert served > 0.7 * counted  # both are cut by the ends of answers, a little differently


@pytest.mark.skipif(not zlab_installed(), reason="z-lab's package (PyPI dflash 0.1.0) is not installed")
def test_acceptance_lists_equal_zlabs_prompt_by_prompt(trained, tmp_path, monkeypatch):
    target, drafter = trained.target, trained.drafter
    import dflash.model

    monkeypatch.setattr(dflash.model, "_cuda_time", time.perf_counter)
    export_drafter(drafter, tmp_path / "out", dtype="float32")
    theirs = load_with_zlab(tmp_path / "out")
    some_stop = decode_plainly(target, PROMPTS[0], max_new_tokens=9, stop_ids=()).tokens[-1]
    for prompt in PROMPTS[:2] + unseen():
        for limit, stops in ((1, ()), (2, ()), (17, ()), (25, (some_stop, 2))):
            expected = dflash.model.dflash_generate(
                theirs, target.model, torch.tensor([prompt]), limit, list(stops) or None, return_stats=True
            )
            mine = speculate(target, drafter, prompt, max_new_tokens=limit, stop_ids=stops)
            assert list(mine.accepted) == expected.acceptance_lengths
            assert list(mine.tokens) == expected.output_ids[0, len(prompt) :].tolist()


def test_greedy_decoding_is_lossless(trained):
    target, drafter = trained.target, trained.drafter
    for prompt in PROMPTS[:1] + unseen():
        for limit in (1, 7, 20):
            plain = decode_plainly(target, prompt, max_new_tokens=limit, stop_ids=(2,))
            mine = speculate(target, drafter, prompt, max_new_tokens=limit, stop_ids=(2,))
            assert mine.tokens == plain.tokens
            assert sum(mine.accepted) == len(mine.tokens) - 1
    for size in (1, 2, 4):
        assert speculate(
            target, drafter, PROMPTS[0], max_new_tokens=20, stop_ids=(), block_size=size
        ).tokens == (decode_plainly(target, PROMPTS[0], max_new_tokens=20, stop_ids=()).tokens)


def test_evaluation_reports_what_was_decoded():
    target, drafter, *_ = train_drafter("llama")
    prompts = [Prompt(tuple(prompt), f"domain {i % 2}") for i, prompt in enumerate(PROMPTS[:4])]
    seen = []
    result = evaluate(
        target, drafter, prompts, max_new_tokens=12, progress=lambda done, total: seen.append((done, total))
    )
    found = result.to_dict()
    assert result.lossless and found["lossless"] and not found["differing"] and seen[-1] == (4, 4)
    lists = found["per_request"]
    assert found["acceptance_length"] == pytest.approx(sum(map(sum, lists)) / sum(map(len, lists)))
    assert found["acceptance_length_by_request"] == pytest.approx(sum(sum(x) / len(x) for x in lists) / 4)
    assert sum(found["histogram"]) == sum(map(len, lists)) and len(found["histogram"]) == 6
    assert (
        found["by_position"] == sorted(found["by_position"], reverse=True) and len(found["by_position"]) == 5
    )
    assert 1 + sum(found["by_position"]) == pytest.approx(found["acceptance_length"])
    assert set(found["acceptance_length_by_domain"]) == {"domain 0", "domain 1"}
    assert result.table().row_count >= 8


def test_run_eval_opens_everything_from_disk(tmp_path):
    target, drafter, *_ = train_drafter("llama")
    target.model.save_pretrained(tmp_path / "target")
    words = Tokenizer(WordLevel({f"w{i}": i for i in range(97)}, unk_token="w0"))
    words.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(tmp_path / "target")
    contents = {"weights": drafter.state_dict(), "optimizer": {}, "state": {}, "drafter": drafter.config}
    write_checkpoint(tmp_path / "ckpt", **contents)
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "w3 w40 w17 w60"}\n{"prompt": "w4 w39 w17 w61"}\n')
    options = {
        "model": {"path": str(tmp_path / "target"), "dtype": "float32"},
        "data": {"path": tmp_path / "none"},
        "eval": {"prompts": str(tmp_path / "prompts.jsonl"), "max_new_tokens": 9, "limit": 2},
    }
    result = run_eval(tmp_path / "ckpt", Config(**options))
    expected = [speculate(target, drafter, prompt, max_new_tokens=9, stop_ids=(2,)) for prompt in PROMPTS[:2]]
    assert [answer.tokens for answer in result.drafted] == [answer.tokens for answer in expected]
    assert result.lossless and result.stop_ids == (2,)
    with pytest.raises(ConfigError, match=r"eval\.prompts"):
        run_eval(tmp_path / "ckpt", target="somewhere")


def test_evaluation_notices_a_target_that_decodes_otherwise(monkeypatch):
    target, drafter, *_ = train_drafter("llama")
    prompts = [Prompt(tuple(PROMPTS[0]), "")]

    def wrong(*args, **limits):
        answer = decode_plainly(*args, **limits)
        return replace(answer, tokens=(*answer.tokens[:3], 95, *answer.tokens[4:]))

    monkeypatch.setattr("services.dflash.evaluate.decode_plainly", wrong)
    assert evaluate(target, drafter, prompts, max_new_tokens=8).lossless is False


def test_a_drafter_of_another_target_is_refused():
    target, drafter, *_ = train_drafter("llama")
    other = type(drafter.config)(**{**vars(drafter.config), "num_target_layers": 9})
    with pytest.raises(ModelError, match="layers 9, not 7"):
        check_fit(other, target)


@pytest.mark.parametrize("family", FAMILIES)
def test_training_steps_lower_the_loss_of_each_family(family):
    trained = train_drafter(family, steps=8)
    first, last = (result.loss_sum / result.weight_sum for result in (trained.first, trained.last))
    assert last < first


def test_rejection_keeps_the_targets_distribution():
    """Whatever the draft's distribution, the first token follows p: 20,000 draws within four deviations."""
    generator = torch.Generator().manual_seed(0)
    p = torch.tensor([[0.5, 0.2, 0.2, 0.1, 0.0], [0.2, 0.2, 0.2, 0.2, 0.2]])
    q = torch.tensor([[0.1, 0.6, 0.1, 0.1, 0.1]])
    counts, rounds = torch.zeros(5), 20_000
    for draft in torch.multinomial(q[0], rounds, replacement=True, generator=generator):
        kept, following = accept(draft[None], p, q, generator)
        counts[int(draft) if kept else following] += 1
    deviation = (p[0] * (1 - p[0]) / rounds).sqrt()
    assert ((counts / rounds - p[0]).abs() <= 4 * deviation).all()


def test_sampling_is_seeded_and_top_p_cuts():
    target, drafter, *_ = train_drafter("llama")
    limits = {"max_new_tokens": 12, "stop_ids": ()}
    samplings = [Sampling(1.5, 0.9, seed=seed) for seed in (1, 1, 2)]
    once, again, other = (
        speculate(target, drafter, PROMPTS[0], sampling=sampling, **limits).tokens for sampling in samplings
    )
    assert once == again != other
    probabilities = Sampling(1.0, 0.7).probabilities(torch.log(torch.tensor([0.4, 0.05, 0.35, 0.2])))
    torch.testing.assert_close(probabilities, torch.tensor([0.4 / 0.75, 0.0, 0.35 / 0.75, 0.0]))
    with pytest.raises(ConfigError, match="top_p 0"):
        Sampling(1.0, 0.0)


def test_sampled_decoding_follows_the_targets_distribution():
    """Second tokens of many short answers, drafted and plain: the same few, about as often."""
    target, drafter, *_ = train_drafter("llama")
    limits = {"max_new_tokens": 2, "stop_ids": ()}
    count, frequency = 150, []
    for decode in (
        lambda s: speculate(target, drafter, PROMPTS[0], sampling=s, **limits),
        lambda s: decode_plainly(target, PROMPTS[0], sampling=s, **limits),
    ):
        tokens = torch.tensor([decode(Sampling(1.0, 0.25, seed=seed)).tokens[1] for seed in range(count)])
        frequency.append(torch.bincount(tokens, minlength=97) / count)
    assert (frequency[1] > 0).sum() > 2
    assert float((frequency[0] - frequency[1]).abs().sum()) / 2 < 0.25


def test_a_pick_inverts_the_distribution_at_its_bits():
    p_V = torch.tensor([0.0, 0.5, 0.0, 0.25, 0.25, 0.0])
    bits = torch.linspace(0, 2**32 - 1, 4097, dtype=torch.float64).long()
    counts = torch.bincount(pick(p_V.expand(4097, -1), bits), minlength=6) / 4097
    torch.testing.assert_close(counts, p_V, atol=1e-3, rtol=0)
    assert counts[p_V == 0].sum() == 0


def test_the_largest_bits_pick_a_token_that_can_come():
    torch.manual_seed(0)
    p_BV = torch.rand(64, 1000).mul(torch.rand(64, 1000) < 0.1)
    p_BV = p_BV / p_BV.sum(-1, keepdim=True)
    picked = pick(p_BV, torch.full((64,), 2**32 - 1))
    assert (p_BV.gather(1, picked[:, None]) > 0).all()
