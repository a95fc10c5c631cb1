"""What the pipeline costs on a CPU: tokens/s of 1 target + 1 drafter against the two stages run alone.

    alone      the same forward, then the same step (forward, backward, clip, AdamW), one process, one thread
    pipeline   `draftmill up` on the same batches: separate processes, slots, sockets, ledger, checkpoints

At best the pipeline runs at the speed of its slower stage. The demo's model, data and recipe; the rate
of the pipeline is taken between its first and its last commit. `--out FILE` writes the JSON there too.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from protocol.errors import ConfigError, RetryError
from protocol.messages import BatchId, StepTry
from services.config.load import load
from services.config.schema import Config
from services.data.batch import gather
from services.data.plan import Schedule
from services.data.prepare import prepare
from services.data.training_data import TrainingData
from services.drafter.reduce import LocalReducer
from services.drafter.start import initial_weights
from services.drafter.start import start as start_drafter
from services.local.status import fetch_json, read_address
from services.models.convert import smollm2_from_package
from services.target.start import start as start_target

ROOT = Path(__file__).parents[1]
CPU = torch.device("cpu")


def alone(config: Config, packs: int) -> dict[str, float]:
    """Real tokens per second of each stage over the first `packs` batches, after one pack of warm-up."""
    target, drafter = start_target(config, CPU), start_drafter(config, CPU)
    drafter.weights.start(initial_weights(config, drafter.shape))
    schedule = Schedule(config, TrainingData.open(config.data))
    forward_s = step_s = 0.0
    tokens = 0
    for step in range(packs + 1):
        batch = gather(
            target.data.of(0), schedule.epoch(0).batches[step],
            edges=config.plan.bucket_edges, vocabulary=target.shape.vocab_size,
        )  # fmt: skip
        slab = target.slabs[0]
        begun_s = time.perf_counter()
        target.forward.run(batch, slab)
        computed_s = time.perf_counter()
        sections = slab.taps.sections(batch.tokens) | batch.sections()
        drafter.step.add(0, BatchId(0, step), sections)
        drafter.step.apply(step, drafter.step.seal(LocalReducer(), StepTry(0, step, 1, step)))
        if step:
            forward_s += computed_s - begun_s
            step_s += time.perf_counter() - computed_s
            tokens += batch.tokens
    return {"forward_tokens_per_s": tokens / forward_s, "step_tokens_per_s": tokens / step_s}


def pipeline(config: Config, flags: list[str]) -> float:
    """Committed real tokens per second between the first and the last commit seen."""
    command = [sys.executable, "-m", "services.cli", "up", "--config", str(ROOT / "examples/demo/demo.toml")]
    up = subprocess.Popen([*command, *flags], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    seen: list[tuple[float, int]] = []
    while up.poll() is None:
        try:
            up.wait(0.5)
        except subprocess.TimeoutExpired:
            tokens = committed_tokens(config)
            if tokens and (not seen or tokens > seen[-1][1]):
                seen.append((time.perf_counter(), tokens))
    assert up.returncode == 0, f"`draftmill up` ended with {up.returncode}"
    (first_s, first), (last_s, last) = seen[0], seen[-1]
    return (last - first) / (last_s - first_s)


def committed_tokens(config: Config) -> int:
    try:
        status = fetch_json(read_address(config.run.dir))
        return int(status["counters"]["committed_tokens"])
    except (RetryError, ConfigError, TypeError):  # not serving yet, no snapshot yet, or no longer
        return 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--packs", type=int, default=40, help="packs of the stages run alone")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        model = smollm2_from_package()
        flags = {
            "run.dir": f"{folder}/run", "data.path": f"{folder}/data", "model.path": str(model),
            "target.count": "1", "run.epochs": "1", "checkpoint.every-steps": "1000",
            "model.dtype": "float32", "drafter.dtype": "float32",  # the slower CPUs have no bfloat16 products
        }  # fmt: skip
        config = load(
            ROOT / "examples/demo/demo.toml", [(f"--{n}", v) for n, v in flags.items()], environ={}
        ).config
        prepare([ROOT / "examples/demo/train.jsonl"], config.data.path, config.model.path, config.data)
        stages = alone(config, options.packs)
        rate = pipeline(config, [f"--{name}={value}" for name, value in flags.items()])
    slower = min(stages.values())
    result = {
        "machine": {"cores": os.cpu_count(), "python": platform.python_version(), "torch": torch.__version__},
        **stages,
        "pipeline_tokens_per_s": rate,
        "pipeline_of_slower_stage": rate / slower,
    }
    text = json.dumps(result, indent=1)
    print(text)
    if options.out:
        options.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
