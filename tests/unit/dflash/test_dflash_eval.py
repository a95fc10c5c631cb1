"""`draftmill eval`: several block sizes at once, thinking as asked for, its table, JSON and picture."""

import json
import math
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import replace

import pytest
from dflash_tiny import tiny_target
from dflash_trained import PROMPTS, train_drafter
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast

from protocol.errors import CheckpointError, ConfigError
from services.config.schema import Config
from services.dflash import evaluate as evaluate_module
from services.dflash.checkpoint import OPTIMIZER, write_checkpoint
from services.dflash.eval_parts import run_evals_in_parts
from services.dflash.eval_picture import by_position_svg, picture
from services.dflash.eval_result import comparison, to_json
from services.dflash.evaluate import evaluate, load_drafter, load_held_out, run_evals, template_options
from services.dflash.prompts import Prompt
from services.dflash.sampling import Sampling
from services.dflash.speculate import Generation, speculate
from services.lifecycle import ExitCode

SVG = "{http://www.w3.org/2000/svg}"
TEMPLATE = "{% for m in messages %}{{ m.content }} {% endfor %}{{ 'w8' if enable_thinking else 'w9' }}"


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A trained tiny pair on disk, with prompts of two domains: their options as flags."""
    folder = tmp_path_factory.mktemp("eval")
    target, drafter, *_ = train_drafter("llama")
    target.model.save_pretrained(folder / "target")
    words = Tokenizer(WordLevel({f"w{i}": i for i in range(97)}, unk_token="w0"))
    words.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(folder / "target")
    state = {"weights": dict(drafter.state_dict()), "optimizer": {}, "state": {}, "drafter": drafter.config}
    write_checkpoint(folder / "ckpt", **state)
    rows = [
        {"prompt": " ".join(f"w{token}" for token in prompt), "category": "even" if n % 2 == 0 else "odd"}
        for n, prompt in enumerate(PROMPTS[:4])
    ]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def options(files, **more) -> Config:
    sections = {
        "model": {"path": str(files / "target"), "dtype": "float32"},
        "data": {"path": "none", **more.pop("data", {})},
        "eval": {"prompts": str(files / "prompts.jsonl"), "max_new_tokens": 12, **more},
    }
    return Config.model_validate(sections)


@pytest.fixture(scope="module")
def results(files):
    return run_evals(files / "ckpt", options(files), block_sizes=[2, 4, 6])


def test_each_block_size_has_its_result_and_plain_decoding_is_done_once(files, results, monkeypatch):
    assert [result.block_size for result in results] == [2, 4, 6]
    assert results[0].plain == results[1].plain == results[2].plain
    assert all(result.lossless for result in results)
    lengths = [result.acceptance.pooled_mean for result in results]
    assert lengths == sorted(lengths) and lengths[0] <= 2.0 < lengths[2]
    calls = []
    decode = evaluate_module.decode_plainly
    monkeypatch.setattr(evaluate_module, "decode_plainly", lambda *a, **k: calls.append(1) or decode(*a, **k))
    seen = []
    run_evals(
        files / "ckpt", options(files), block_sizes=[3, 6], progress=lambda *done_of: seen.append(done_of)
    )
    assert len(calls) == 4
    assert seen == [(done, 8) for done in range(1, 9)]


def test_without_plain_decoding_prompts_are_decoded_in_batches(files, results):
    found = [
        run_evals(files / "ckpt", options(files, batch=batch), block_sizes=[6], plain=False)[0].to_dict()
        for batch in (1, 3)
    ]
    assert found[0]["per_request"] == found[1]["per_request"] == results[2].to_dict()["per_request"]
    assert found[0]["drafted_tokens_per_s"] > 0 and found[1]["drafted_tokens_per_s"] is None
    assert found[1]["lossless"] is True


def test_without_plain_decoding_one_forward_tells_whether_an_answer_is_the_targets(monkeypatch):
    target, drafter, *_ = train_drafter("llama")
    prompts = [Prompt(tuple(PROMPTS[0]), "", 0), Prompt(tuple(PROMPTS[1]), "", 1)]
    asked = {"max_new_tokens": 12, "stop_ids": ()}
    whole = evaluate(target, drafter, prompts, **asked)
    alone = evaluate(target, drafter, prompts, plain=False, **asked)
    assert alone.lossless and whole.lossless and not alone.plain
    assert [answer.tokens for answer in alone.drafted] == [answer.tokens for answer in whole.drafted]

    decode = evaluate_module.speculate

    def one_token_wrong(*given, **more):
        answer = decode(*given, **more)
        if given[2] == prompts[1].ids:
            wrong = (answer.tokens[7] + 1) % 97
            answer = replace(answer, tokens=(*answer.tokens[:7], wrong, *answer.tokens[8:]))
        return answer

    monkeypatch.setattr(evaluate_module, "speculate", one_token_wrong)
    for plain in (True, False):
        result = evaluate(target, drafter, prompts, plain=plain, **asked)
        assert result.lossless is False and result.differing == (1,)


def test_a_last_token_that_is_not_the_targets_is_seen_without_plain_decoding(monkeypatch):
    target, drafter, *_ = train_drafter("llama")
    prompts = [Prompt(tuple(PROMPTS[0]), "", 0)]
    for place in (0, 11):

        def wrong_at(*given, place=place, **more):
            tokens = list(speculate(*given, **more).tokens)
            tokens[place] = (tokens[place] + 1) % 97
            return Generation(tuple(tokens), (1,) * 11, 0.1, 0.1)

        monkeypatch.setattr(evaluate_module, "speculate", wrong_at)
        result = evaluate(target, drafter, prompts, max_new_tokens=12, stop_ids=(), plain=False)
        assert result.lossless is False, place


@pytest.mark.parametrize("tokens", [0, 5, 13])
def test_an_answer_with_another_end_than_the_targets_is_seen_without_plain_decoding(monkeypatch, tokens):
    target, drafter, *_ = train_drafter("llama")
    prompts = [Prompt(tuple(PROMPTS[0]), "", 0)]
    own = speculate(target, drafter, prompts[0].ids, max_new_tokens=13, stop_ids=()).tokens
    answer = Generation(own[:tokens], (1,), 0.1, 0.1)
    monkeypatch.setattr(evaluate_module, "speculate", lambda *_, **__: answer)
    for stops in ((), own[7:8]):
        result = evaluate(target, drafter, prompts, max_new_tokens=12, stop_ids=stops, plain=False)
        assert result.lossless is False, stops


@pytest.mark.parametrize("batch", [1, 2])
def test_a_target_that_computes_nan_has_no_best_token(batch):
    target, drafter = tiny_target("llama"), train_drafter("llama").drafter
    target.layers[0].mlp.down_proj.weight.fill_(math.nan)
    prompts = [Prompt(tuple(PROMPTS[0]), "", 0)]
    result = evaluate(target, drafter, prompts, max_new_tokens=12, stop_ids=(), plain=False, batch=batch)
    assert result.lossless is False


@pytest.mark.parametrize("size", [1, 7])
def test_a_block_that_the_drafter_was_not_trained_for_is_refused(files, size):
    with pytest.raises(ConfigError, match=f"block size {size}: .* choose 2 to 6"):
        run_evals(files / "ckpt", options(files), block_sizes=[4, size])


def test_sampled_evaluation_repeats_with_its_seed_and_claims_nothing_lossless():
    target, drafter, *_ = train_drafter("llama")
    prompts = [Prompt(tuple(PROMPTS[0]), "", number) for number in (0, 1)]
    runs = [
        evaluate(target, drafter, prompts, max_new_tokens=12, sampling=Sampling(1.5, 0.9, seed))
        for seed in (3, 3, 4)
    ]
    answers = [[answer.tokens for answer in run.drafted] for run in runs]
    assert answers[0] == answers[1] != answers[2]
    assert answers[0][0] != answers[0][1]  # each prompt has a seed of its own
    assert runs[0].lossless is None and runs[0].to_dict()["sampling"]["top_p"] == 0.9
    assert runs[0].to_dict()["plain_tokens_per_s"] > 0


def test_parts_decoded_by_processes_give_the_whole(files):
    told: list[tuple[int, int]] = []
    for sampling in (None, Sampling(1.5, 0.9, 3)):
        asked = {"sampling": sampling, "block_sizes": [3, 6], "progress": lambda *of: told.append(of)}
        whole = run_evals(files / "ckpt", options(files), **asked)
        parts = run_evals_in_parts(files / "ckpt", options(files), processes=3, **asked)
        assert told[-1] == (8, 8)
        for one, other in zip(whole, parts, strict=True):
            found, wanted = other.to_dict(), one.to_dict()
            for name in ("drafted_tokens_per_s", "plain_tokens_per_s", "speedup"):
                del found[name], wanted[name]
            assert found == wanted
            assert [a.tokens for a in one.drafted] == [a.tokens for a in other.drafted]


def test_a_part_that_fails_fails_the_whole(files):
    with pytest.raises(CheckpointError, match="no such folder"):
        run_evals_in_parts(files / "nothing", options(files), processes=2)


def test_json_of_several_sizes_reads_like_the_largest_alone(results):
    found = json.loads(json.dumps(to_json(results), allow_nan=False))
    assert found["block_size"] == 6 and len(found["block_sizes"]) == 3
    assert {**found, "block_sizes": 0} == {**to_json([results[2]]), "block_sizes": 0}
    assert set(found["by_position_by_domain"]) == {"even", "odd"}
    for domain, shares in found["by_position_by_domain"].items():
        assert 1 + sum(shares) == pytest.approx(found["acceptance_length_by_domain"][domain])
    assert comparison(results).row_count == 3


def curves(svg: str) -> list[list[tuple[float, float]]]:
    lines = ElementTree.fromstring(svg).findall(f"{SVG}polyline")
    return [[tuple(map(float, point.split(","))) for point in line.get("points").split()] for line in lines]


def test_the_picture_has_a_curve_a_block_size_or_a_domain(results):
    assert [len(curve) for curve in curves(picture(results))] == [1, 3, 5]
    alone = picture(results[2:])
    assert len(curves(alone)) == 3 and ">even: " in alone and ">odd: " in alone
    (falling, *_) = curves(alone)
    heights = [y for _, y in falling]
    assert heights == sorted(heights)  # downwards: later slots are kept less often


def test_the_picture_is_well_formed_whatever_it_shows():
    svg = by_position_svg({"<a> & b": [1.0, math.nan, 0.0], "none": []})
    one, none = curves(svg)
    assert len(one) == 2 and none == []
    assert one[0][1] < one[1][1] and one[0][0] < one[1][0]
    assert "<a> & b" in [text.text for text in ElementTree.fromstring(svg).findall(f"{SVG}text")]


@pytest.mark.parametrize(
    ("data", "asked", "thinks"),
    [("train", "data", True), ("strip", "data", False), ("train", "off", False), ("strip", "on", True)],
)
def test_the_template_is_asked_for_the_thinking_that_is_served(files, tmp_path, data, asked, thinks):
    config = options(files, data={"thinking": data}, thinking=asked, limit=1)
    assert template_options(config) == {"enable_thinking": thinks, "thinking": thinks}
    tokenizer = PreTrainedTokenizerFast.from_pretrained(files / "target")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(tmp_path / "thinks")
    changed = config.model_copy(
        update={"model": config.model.model_copy(update={"path": tmp_path / "thinks"})}
    )
    (prompt,) = load_held_out(changed)
    assert prompt.ids == (*PROMPTS[0], 8 if thinks else 9)


def test_a_drafter_is_read_without_its_optimizer(files, tmp_path):
    _, drafter, *_ = train_drafter("llama")
    state = {"weights": dict(drafter.state_dict()), "optimizer": {}, "state": {}, "drafter": drafter.config}
    write_checkpoint(tmp_path / "ckpt", **state)
    (tmp_path / "ckpt" / OPTIMIZER).unlink()
    assert load_drafter(tmp_path / "ckpt").config == drafter.config


def draftmill(files, *words: str) -> subprocess.CompletedProcess[str]:
    given = [
        "--model.path", str(files / "target"), "--model.dtype", "float32",
        "--eval.prompts", str(files / "prompts.jsonl"), "--eval.max-new-tokens", "8",
    ]  # fmt: skip
    command = [sys.executable, "-m", "services.cli", "eval", str(files / "ckpt"), *given, *words]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_command_writes_json_and_a_picture(files, tmp_path):
    svg = tmp_path / "by_position.svg"
    ran = draftmill(files, "--block-sizes", "2,6", "--picture", str(svg), "--json", "--device", "cpu")
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)
    assert [each["block_size"] for each in found["block_sizes"]] == [2, 6] and found["lossless"] is True
    assert found["speedup"] > 0 and len(curves(svg.read_text())) == 2


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--block-sizes", "4,x"], "--block-sizes 4,x: must be whole numbers"),
        (["--top-p", "0.9"], "give a --temperature too"),
    ],
)
def test_the_command_refuses_what_it_cannot_mean(files, words, told):
    ran = draftmill(files, *words)
    assert ran.returncode == ExitCode.CONFIGURATION and told in ran.stderr.replace("\n", " ")
