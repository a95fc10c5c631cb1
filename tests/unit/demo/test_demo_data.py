"""The demo's shipped data: whole, varied, small, and without its held-out topics."""

from __future__ import annotations

import json
import runpy
from collections import Counter
from pathlib import Path

import pytest

from services.config.load import load
from services.local.status import RESULT, Status

DEMO = Path(__file__).parents[3] / "examples" / "demo"
# fmt: off
SUMMARY_KEYS = [
    "samples_total", "samples_committed", "samples_failed", "steps", "epochs", "final_loss",
    "acceptance_length_before", "acceptance_length_after", "lossless", "target_tokens_per_s",
    "drafter_tokens_per_s", "arena_bytes_left", "restarts", "export_dir", "wall_s",
]
# fmt: on


@pytest.fixture(scope="module")
def conversations() -> list[list[dict[str, str]]]:
    return [json.loads(line)["messages"] for line in (DEMO / "train.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def held_out() -> list[dict[str, str]]:
    return [json.loads(line) for line in (DEMO / "heldout.jsonl").read_text().splitlines()]


def test_every_conversation_is_one_question_and_one_answer(conversations: list[list[dict[str, str]]]) -> None:
    assert len(conversations) >= 300
    for messages in conversations:
        assert [message["role"] for message in messages] == ["user", "assistant"]
        assert all(message["content"] == message["content"].strip() != "" for message in messages)


def test_prompts_are_all_different(conversations: list[list[dict[str, str]]]) -> None:
    prompts = Counter(messages[0]["content"].lower() for messages in conversations)
    assert [prompt for prompt, count in prompts.items() if count > 1] == []


def test_answers_end_with_a_sentence_or_were_ended_by_the_model(
    conversations: list[list[dict[str, str]]],
) -> None:
    """A cut answer ends with a sentence or a closed code fence; few of the model's own do without."""
    loose = [m[1]["content"] for m in conversations if m[1]["content"][-1] not in ".!?\"')*`"]
    assert len(loose) < 0.15 * len(conversations)
    assert all(m[1]["content"].count("```") % 2 == 0 for m in conversations)


def test_the_file_is_small(conversations: list[list[dict[str, str]]]) -> None:
    assert (DEMO / "train.jsonl").stat().st_size < 1_000_000


def test_training_prompts_come_from_the_shipped_list(conversations: list[list[dict[str, str]]]) -> None:
    lines = (DEMO / "prompts.txt").read_text().splitlines()
    assert {messages[0]["content"] for messages in conversations} <= set(lines)


def test_held_out_topics_are_not_trained_on(
    conversations: list[list[dict[str, str]]], held_out: list[dict[str, str]]
) -> None:
    lines = (DEMO / "prompts.txt").read_text().splitlines()
    trained = {line[2:] for line in lines if line.startswith("# ")}
    assert len(held_out) >= 24
    assert not {row["category"] for row in held_out} & trained
    assert not {row["prompt"] for row in held_out} & {messages[0]["content"] for messages in conversations}


def test_the_configuration_is_valid_and_has_two_targets_and_one_drafter() -> None:
    config = load(DEMO / "demo.toml", [("--model.path", "anywhere")], environ={}).config
    assert (config.target.count, config.drafter.count) == (2, 1)
    assert (config.target.threads, config.drafter.threads) == (1, 1)
    assert config.eval.prompts == "examples/demo/heldout.jsonl"


def test_the_summary_has_the_promised_keys_and_its_exit_status_tells_a_bad_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    demo = runpy.run_path(str(DEMO / "run.py"))
    flags = [("--model.path", "anywhere"), ("--arena.dir", str(tmp_path / "arenas"))]
    config = load(DEMO / "demo.toml", flags, environ={}).config
    config.run.dir.mkdir(parents=True)
    working = Status(state="running", target_tokens_per_s=900.0, drafter_tokens_per_s=300.0)
    ended = Status(state="finished", samples_total=4, samples_committed=4, step=2, epochs=2, restarts=1)
    (config.run.dir / RESULT).write_text(ended.model_dump_json())
    (config.run.dir / "metrics.jsonl").write_text('{"step": 1, "loss": 4.0}\n{"step": 2, "loss": 2.0}\n')
    after = {"acceptance_length": 1.31, "lossless": True, "per_request": [[1, 2], [2]]}
    after["acceptance_length_by_domain"] = {"music": 1.31}
    found = {"before": {"acceptance_length": 1.0}, "after": after, "zlab_agrees": True}

    summary = demo["summarise"](config, [working, Status()], found, Path("out"))
    assert list(summary) == SUMMARY_KEYS
    assert (summary["final_loss"], summary["target_tokens_per_s"], summary["restarts"]) == (3.0, 900.0, 1)
    assert demo["report"](summary, found, Path("summary.json")) == 0
    assert demo["report"](summary | {"samples_committed": 3}, found, Path("summary.json")) == 1
    assert demo["report"](summary, found | {"zlab_agrees": False}, Path("summary.json")) == 1
