"""Held-out figures, devices and a whole evaluation of a tiny target in this process."""

import json
import math
import shutil
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from protocol.errors import ConfigError
from services.config.schema import Config
from services.data.dataset import Dataset, Sample
from services.data.writer import write_dataset
from services.dflash.checkpoint import read_checkpoint, write_checkpoint
from services.dflash.drafter import Drafter
from services.dflash.prompts import Prompt
from services.evaluator.agenda import Recorded
from services.evaluator.evaluator import Evaluator, device_of
from services.evaluator.held_out import Validation, packs_of
from services.evaluator.run_state import Run
from services.lifecycle import ExitCode

sys.path.append(str(Path(__file__).parents[1] / "dflash"))
from dflash_trained import PROMPTS, train_drafter


def config(folder: Path, **sections) -> Config:
    base = {
        "model": {"path": "none", "dtype": "float32"},
        "data": {"path": folder / "data"},
        "run": {"dir": folder / "run"},
        "plan": {"token_budget": 96, "bucket_edges": [32]},
        "eval": {"prompts": "none", "max_new_tokens": 8},
    }
    return Config.model_validate(base | sections)


def answers(target) -> list[Sample]:
    """What the drafter was trained on: prompts with the target's own greedy answers, of several lengths."""
    samples = []
    for number, prompt in enumerate(PROMPTS):
        ids = torch.tensor([prompt])
        for _ in range(10 + number):
            best = target.model(input_ids=ids, use_cache=False).logits[:, -1].argmax(-1, keepdim=True)
            ids = torch.cat((ids, best), dim=1)
        mask = np.ones(ids.shape[1], np.uint8)
        mask[:4] = 0
        samples.append(Sample(ids[0].numpy().astype(np.int32), mask))
    return samples


@pytest.fixture(scope="module")
def trained():
    return train_drafter("llama")


@pytest.fixture
def validation(tmp_path, trained):
    write_dataset(tmp_path / "data" / "validation", answers(trained.target), {})
    return Validation.open(config(tmp_path))


@pytest.mark.parametrize("budget", [12, 40, 1000])
def test_packs_hold_every_sample_that_fits_once_within_the_budget(budget):
    lengths = np.array([5, 30, 9, 12, 7, 40, 3], np.int32)
    packs = packs_of(lengths, budget)
    rows = [row for pack in packs for row in pack]
    assert sorted(rows) == [row for row, length in enumerate(lengths) if length <= budget]
    assert all(len(pack) * max(lengths[list(pack)]) <= budget for pack in packs)


def test_a_trained_drafter_is_right_on_what_it_learned_and_a_random_one_is_not(validation, trained):
    rested = []
    good = validation.measure(trained.target, trained.drafter, lambda: rested.append(1))
    again = validation.measure(trained.target, trained.drafter, lambda: None)
    bad = validation.measure(trained.target, Drafter(trained.drafter.config, seed=1).eval(), lambda: None)
    assert good == again and good.samples == len(PROMPTS) and len(rested) == len(validation.packs) > 1
    assert good.accuracy > 0.5 > 0.2 > bad.accuracy and good.loss < bad.loss
    assert good.accepted_length > bad.accepted_length >= 1.0
    assert len(good.accuracy_by_position) == trained.drafter.config.block_size - 1
    assert all(0.0 <= share <= 1.0 for share in good.accuracy_by_position)


def test_the_loss_of_a_drafter_that_knows_nothing_is_that_of_a_guess(validation, trained):
    drafter = Drafter(trained.drafter.config, seed=1).eval()
    with torch.no_grad():
        drafter.norm.weight.zero_()  # equal logits for all 97 tokens
    found = validation.measure(trained.target, drafter, lambda: None)
    assert found.loss == pytest.approx(math.log(97), rel=1e-4)


def test_kl_is_measured_against_the_targets_own_distribution(tmp_path, trained, validation):
    options = config(tmp_path, recipe={"loss": "kl"})
    found = Validation.open(options).measure(trained.target, trained.drafter, lambda: None)
    plain = validation.measure(trained.target, trained.drafter, lambda: None)
    assert 0.0 < found.loss != plain.loss
    assert found.accuracy_by_position == plain.accuracy_by_position


def test_the_targets_labels_are_measured_as_they_are_trained(tmp_path, trained, validation):
    """The held-out samples are the target's own greedy answers: it finds best what they say."""
    options = config(tmp_path, recipe={"labels": "target"})
    found = Validation.open(options).measure(trained.target, trained.drafter, lambda: None)
    plain = validation.measure(trained.target, trained.drafter, lambda: None)
    assert found.loss == pytest.approx(plain.loss, rel=1e-5)
    assert found.accuracy_by_position == plain.accuracy_by_position


def test_the_limit_of_held_out_samples_counts(tmp_path, trained, validation):
    few = config(tmp_path, eval={"prompts": "none", "validation_limit": 3})
    assert sum(map(len, Validation(few, Dataset.open(tmp_path / "data" / "validation")).packs)) == 3
    assert Validation.open(config(tmp_path / "elsewhere")) is None


def test_the_target_is_left_as_it_was(validation, trained):
    layers = len(trained.target.layers)
    with pytest.raises(ZeroDivisionError):
        validation.measure(trained.target, trained.drafter, lambda: 1 // 0)
    assert len(trained.target.layers) == layers
    assert all(not layer._forward_hooks for layer in trained.target.layers)


@pytest.mark.parametrize(
    ("count", "sections", "device"),
    [
        (0, {}, "cpu"),
        (4, {"target": {"count": 2}, "drafter": {"count": 1}}, "cuda:2"),
        (4, {"target": {"gpus": ["0", "cuda:1"]}, "drafter": {"gpus": ["2"]}}, "cuda:3"),
        (1, {"evaluator": {"gpu": "0"}}, "cuda:0"),
        (8, {"evaluator": {"gpu": "cpu"}}, "cpu"),
    ],
)
def test_the_device_is_the_one_named_or_one_that_nobody_has(tmp_path, count, sections, device):
    assert device_of(config(tmp_path, **sections), count) == torch.device(device)


def test_a_device_is_never_shared_unasked(tmp_path):
    with pytest.raises(ConfigError, match=r"evaluator\.gpu: .* all 2 GPUs"):
        device_of(config(tmp_path), 2)


# ---- whole evaluations ------------------------------------------------------------------------


class FinishedRun:
    """A run folder as a finished coordinator leaves it, with real checkpoints."""

    def __init__(self, options: Config, drafters: dict[int, Drafter]) -> None:
        self.dir = options.run.dir
        self.dir.mkdir(parents=True)
        for step, drafter in drafters.items():
            write_checkpoint(
                self.dir / "checkpoints" / f"ckpt-0-{step}-d", weights=dict(drafter.state_dict()),
                optimizer={}, state={"step": step}, drafter=drafter.config,
            )  # fmt: skip
        (self.dir / "coordinator.json").write_text(json.dumps({"http": "http://127.0.0.1:9", "host": ""}))
        self.record(*drafters)

    def record(self, *steps: int) -> None:
        rows = [{"timeline": 0, "step": step, "name": f"ckpt-0-{step}-d", "epoch": 0} for step in steps]
        (self.dir / "result.json").write_text(json.dumps({"state": "finished", "checkpoints": rows}))

    def lines(self) -> list[dict]:
        return [json.loads(line) for line in (self.dir / "acceptance.jsonl").read_text().splitlines()]


@pytest.fixture
def finished(tmp_path, trained):
    """(run with a random drafter at step 2 and the trained one at step 4, a maker of evaluators)."""
    options = config(tmp_path)
    run = FinishedRun(options, {2: Drafter(trained.drafter.config, seed=1), 4: trained.drafter})
    prompts = [Prompt(tuple(prompt), "") for prompt in PROMPTS[:3]]
    return run, lambda stop: Evaluator(options, trained.target, prompts, None, Run(run.dir), stop)


def test_each_checkpoint_is_evaluated_once_and_the_best_survives_its_pruning(finished):
    run, make = finished
    for steps in ((2,), (2, 4), (2, 4)):
        run.record(*steps)
        assert make(threading.Event()).run() is ExitCode.FINISHED
    found = run.lines()
    assert [line["step"] for line in found] == [2, 4]
    assert found[1]["acceptance_length"] > found[0]["acceptance_length"] and found[1]["lossless"]
    assert "held_out_loss" not in found[0]
    shutil.rmtree(run.dir / "checkpoints")
    assert read_checkpoint(run.dir / "best", None).state == {"step": 4}


def test_the_former_best_stays_when_a_later_checkpoint_is_worse(finished):
    run, make = finished
    for steps in ((4,), (4, 2)):  # the worse one recorded last
        run.record(*steps)
        make(threading.Event()).run()
    assert [line["best_step"] for line in run.lines()] == [4, 4]
    assert read_checkpoint(run.dir / "best", None).state == {"step": 4}


def test_a_checkpoint_that_vanished_or_is_damaged_ends_nothing(finished):
    run, make = finished
    shutil.rmtree(run.dir / "checkpoints" / "ckpt-0-4-d")
    assert make(threading.Event()).run() is ExitCode.FINISHED
    (run.dir / "checkpoints" / "ckpt-0-2-d" / "model.safetensors").write_bytes(b"")
    run.record(2)
    assert make(threading.Event()).run() is ExitCode.FINISHED
    assert not (run.dir / "acceptance.jsonl").exists() and not (run.dir / "best").exists()


def test_what_was_measured_before_a_crash_is_recorded_after_it_without_measuring_again(finished, trained):
    run, make = finished
    run.record(4)
    make(threading.Event()).run()
    (line,) = run.lines()
    (run.dir / "acceptance.jsonl").unlink()  # as if it had died between the figures and the line
    (run.dir / "best").unlink()
    shutil.rmtree(run.dir / "checkpoints")
    assert make(threading.Event()).run() is ExitCode.FINISHED
    assert run.lines() == [line]
    assert read_checkpoint(run.dir / "best", None).state == {"step": 4}


def test_a_signal_between_two_prompts_ends_it_and_nothing_is_recorded(finished, monkeypatch):
    run, make = finished
    stop = threading.Event()
    evaluator = make(stop)
    asked = []
    rest = evaluator._rest

    def rest_then_stop() -> None:
        asked.append(1)
        stop.set()
        rest()

    monkeypatch.setattr(evaluator, "_rest", rest_then_stop)
    assert evaluator.run() is ExitCode.STOPPED
    assert len(asked) == 1 and not (run.dir / "acceptance.jsonl").exists()
    assert list((run.dir / "evaluated").iterdir()) == []


class Timed(threading.Event):
    """Counts the seconds that somebody waited for it."""

    waited_s = 0.0

    def wait(self, timeout: float | None = None) -> bool:
        began_s = time.monotonic()
        try:
            return super().wait(timeout)
        finally:
            self.waited_s += time.monotonic() - began_s


def test_it_rests_as_its_share_demands(tmp_path, trained, finished):
    run, _make = finished
    stop, prompts = Timed(), [Prompt(tuple(prompt), "") for prompt in PROMPTS[:3]]
    options = config(tmp_path, evaluator={"share": 0.25})
    evaluator = Evaluator(options, trained.target, prompts, None, Run(options.run.dir), stop)
    evaluator._take(Recorded("ckpt-0-4-d", 0, 4, 0))
    (line,) = run.lines()
    worked_s = line["seconds"] - stop.waited_s
    assert stop.waited_s > 2.0 * worked_s > 0.0  # three times, but for what comes after the last rest
