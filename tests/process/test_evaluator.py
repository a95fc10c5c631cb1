"""An evaluator beside a real run: every line once, over a kill too, the best kept, the weights untouched."""

import json
import os
import signal

import pytest
from harness import Run, write_data, write_model
from test_up_real import start_up  # noqa: F401 - a fixture
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast

from services.dflash.checkpoint import read_checkpoint
from services.dflash.evaluate import load_drafter
from services.lifecycle import ExitCode

pytestmark = pytest.mark.process

OPTIONS = """
[eval]
prompts = "{prompts}"
max_new_tokens = 12
[evaluator]
count = 1
threads = 1
"""
LINGER = """
[watch]
linger = true
"""


@pytest.fixture
def make_evaluated(tmp_path):
    """As `make_run`, with the same weights and data, and what an evaluator needs beside them."""
    model = write_model(tmp_path / "model")
    words = Tokenizer(WordLevel({f"w{number}": number for number in range(64)}, unk_token="w0"))
    words.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(model)
    data = write_data(tmp_path / "data")
    write_data(data / "validation", rows=12, seed=6)
    prompts = tmp_path / "prompts.jsonl"
    rows = [{"prompt": f"w{9 + row} w4 w{50 - row}", "domain": "ab"[row % 2]} for row in range(4)]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    runs = []

    def make(extra: str = "") -> Run:
        runs.append(Run(tmp_path, "run", model, data, extra=OPTIONS.format(prompts=prompts) + extra))
        return runs[-1]

    yield make
    for run in runs:
        run.close()


def lines(run) -> list[dict]:
    file = run.dir / "acceptance.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def total_steps(run) -> int:
    (step,) = run.query("SELECT max(step) FROM checkpoints")[0]
    return step


def assert_each_once_and_the_best_kept(run) -> None:
    found = lines(run)
    names = [line["checkpoint"] for line in found]
    assert len(set(names)) == len(names)
    assert set(names) <= {name for (name,) in run.query("SELECT name FROM checkpoints")}
    steps = [line["step"] for line in found]
    assert steps == sorted(steps) and steps[-1] == total_steps(run)
    for line in found:
        assert 1.0 <= line["acceptance_length"] <= 4.0 and line["lossless"] is True
        assert len(line["by_position"]) == len(line["held_out_accuracy_by_position"]) == 3
        assert line["held_out_loss"] > 0.0 and line["held_out_samples"] == 12
        assert set(line["acceptance_length_by_domain"]) == {"a", "b"}
    assert found[-1]["epoch"] == 1
    best = max(found, key=lambda line: line["acceptance_length"])  # the first of equal ones
    assert json.loads((run.dir / "best" / "evaluation.json").read_text())["checkpoint"] == best["checkpoint"]
    assert found[-1]["best_step"] == best["step"]
    saved = read_checkpoint(run.dir / "best", None)
    assert saved.state["step"] == best["step"] and load_drafter(run.dir / "best").config.block_size == 4
    assert [folder.name for folder in (run.dir / "evaluated").iterdir()] == [best["checkpoint"]]


def test_a_killed_evaluator_repeats_nothing_and_the_run_does_not_notice(make_evaluated, undisturbed):
    run = make_evaluated(LINGER)
    targets = [name for name in run.names() if name.startswith("target")]
    run.start("coordinator", "drafter-0", "evaluator")  # no step without a target
    run.wait(lambda: bool(lines(run)), "an evaluation of the initial weights")
    run.kill("evaluator")
    before = lines(run)
    assert [line["step"] for line in before] == [0]
    run.start(*targets, "evaluator")
    run.wait(lambda: run.finished() and lines(run)[-1]["step"] == total_steps(run), "the last evaluation")
    assert lines(run)[: len(before)] == before
    run.wait(lambda: "resting" in run.log("evaluator"), "the evaluator at rest")
    assert_each_once_and_the_best_kept(run)
    assert lines(run)[-1]["held_out_loss"] != before[0]["held_out_loss"]
    step = float(total_steps(run))
    run.wait(lambda: f"draftmill_evaluated_step {step}" in run.get("/metrics"), "the metric")
    metrics = run.get("/metrics")
    assert f"draftmill_evaluated_acceptance_tokens {lines(run)[-1]['acceptance_length']}" in metrics
    assert run.final_weights() == undisturbed


def test_an_evaluator_ends_on_a_signal(make_evaluated):
    run = make_evaluated()
    run.start("evaluator")  # of a run that nobody has started
    run.wait(lambda: "held_out=12" in run.log("evaluator"), "a loaded evaluator")
    run.kill("evaluator", signal.SIGTERM)
    assert run.processes["evaluator"].returncode == ExitCode.STOPPED
    assert lines(run) == []


@pytest.mark.long
def test_up_starts_it_again_and_waits_for_the_last_checkpoint(make_evaluated, start_up):  # noqa: F811
    run = make_evaluated()
    up = start_up(run)
    run.wait(lambda: "evaluator started" in up.text(), "the evaluator")
    os.kill(up.pid("evaluator"), signal.SIGKILL)
    assert up.wait() == ExitCode.FINISHED, up.text()
    assert up.text().count("evaluator started") == 2, up.text()
    run.assert_exactly_once()
    run.assert_nothing_left()
    assert_each_once_and_the_best_kept(run)
