"""A stage of the pipeline alone, on the pipeline's own options, batches and devices.

    target     the real server, threads, arena and sockets included, lease to Ready (benchmarks/target.py)
    drafter    the real step: forward and backward of each pack, reduction, clip, AdamW; one wait a step

Each stage is a process of its own: it compiles at once, measures when it is told to, and gives its GPU back
by ending. So two compile side by side, and none is measured beside another.

    python -m stages.alone target --model.path ... --data.path ...      "ready", a line in, figures out
"""

from __future__ import annotations

import contextlib
import json
import queue
import subprocess
import sys
import threading
import time
import traceback
from typing import Any

import torch
from target import assembled, served

from protocol.messages import BatchId, StepTry
from services.config.environment import keep_compiled
from services.config.load import load
from services.config.schema import Config
from services.config.sources import split_flags
from services.data.batch import gather
from services.data.plan import Schedule
from services.data.training_data import TrainingData
from services.drafter import start as drafter_start
from services.drafter.reduce import LocalReducer
from services.target import start as target_start
from services.target.forward import compile_layers
from stages.shapes import DEVIATION, random_target

MARK = "@ "  # before a line that is meant for who started us
WARM_PACKS, WARM_STEPS, STEPS = 4, 2, 12
MEASURE_S, END_S = 40.0, 20.0  # a stage may take to measure, and to end


class Alone:
    """A stage's process, from outside; it has until `ready_until_s` (perf_counter) to get ready."""

    def __init__(self, stage: str, flags: list[str], environ: dict[str, str], ready_until_s: float) -> None:
        command = [sys.executable, "-m", "stages.alone", stage, *flags]
        self.name, self._ready_until_s = stage, ready_until_s
        self._process = subprocess.Popen(
            command, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._answers: queue.Queue[Any] = queue.Queue()
        threading.Thread(target=self._read, name=stage, daemon=True).start()

    def ready(self) -> None:
        assert self._answer(self._ready_until_s - time.perf_counter()) == "ready"

    def measure(self, until_s: float) -> dict[str, Any]:
        """Its figures, by `until_s` (perf_counter) at the latest; the process is gone afterwards."""
        assert self._process.stdin is not None
        self._process.stdin.write("go\n")
        self._process.stdin.flush()
        found: dict[str, Any] = self._answer(min(MEASURE_S, until_s - time.perf_counter()))
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(END_S)
        return found

    def close(self) -> None:
        self._process.kill()
        self._process.wait(END_S)

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(MARK):
                self._answers.put(json.loads(line.removeprefix(MARK)))
        self._answers.put(None)

    def _answer(self, patience_s: float) -> Any:
        with contextlib.suppress(queue.Empty):
            answer = self._answers.get(timeout=max(0.0, patience_s))
            if answer is not None:
                return answer
        raise RuntimeError(f"{self.name} alone: ended, or was not in time")


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# ---- the target -------------------------------------------------------------------------------


class TargetAlone:
    """Measured as the pipeline runs it and, if that is compiled, uncompiled as well."""

    def __init__(self, config: Config, packs: int) -> None:
        device = target_start.device_of(config, 0)
        if config.target.threads:
            torch.set_num_threads(config.target.threads)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        self.compiled = config.target.compile
        plain = config.target.model_copy(update={"compile": False})  # `assemble` would compile each time
        self.config = config.model_copy(update={"target": plain})
        self.target = random_target(config.model, device)
        self.data = TrainingData.open(config.data).of(0)
        self.batches = list(Schedule(config, TrainingData.open(config.data)).epoch(0).batches[:packs])
        if self.compiled:
            compile_layers(self.target)
        self._speed(WARM_PACKS)

    def measure(self) -> dict[str, Any]:
        packs = len(self.batches)
        found = {"compiled": self.compiled, "packs": packs, "tokens_per_s": self._speed(packs)}
        if self.compiled:
            for layer in self.target.layers:
                del layer.forward  # the class's own again
            self._speed(WARM_PACKS)
            found["uncompiled_tokens_per_s"] = self._speed(packs)
        return found

    def _speed(self, packs: int) -> float:
        with assembled(self.config, self.data, self.target) as started:
            return served(self.config, started, self.batches[:packs])[0]


# ---- the drafter ------------------------------------------------------------------------------


def random_drafter(config: Config, device: torch.device) -> drafter_start.Started:
    """As the role builds it, in a usable state; drawing initial weights on the host would take seconds."""
    started = drafter_start.start(config, device)
    torch.manual_seed(0)
    with torch.no_grad():
        for place in started.weights.places:
            part = place.of(started.weights.state[0])
            part.normal_(0.0, DEVIATION) if part.dim() > 1 else part.fill_(1.0)
    return started


class DrafterAlone:
    def __init__(self, config: Config, _packs: int) -> None:
        self.device = drafter_start.device_of(config, 0)
        self.started = random_drafter(config, self.device)
        self.count = config.plan.packs_per_step
        self.steps_done = 0
        shape, data = self.started.shape, TrainingData.open(config.data)
        batch = gather(
            data.of(0), Schedule(config, data).epoch(0).batches[0],
            edges=config.plan.bucket_edges, vocabulary=shape.vocab_size,
        )  # fmt: skip
        self.tokens = batch.tokens
        features = torch.randn(batch.tokens, shape.feature_size, device=self.device)
        sections = {name: tensor.to(self.device) for name, tensor in batch.sections().items()}
        self.pack = {"features": features.to(getattr(torch, config.model.dtype)), **sections}
        begun_s = time.perf_counter()
        self._step()
        self.first_step_s = time.perf_counter() - begun_s
        for _ in range(WARM_STEPS):
            self._step()

    def measure(self) -> dict[str, Any]:
        wait(self.device)
        begun_s = time.perf_counter()
        for _ in range(STEPS):
            self._step()
        wait(self.device)
        step_s = (time.perf_counter() - begun_s) / STEPS
        tokens_per_s = self.count * self.tokens / step_s
        return {"tokens_per_s": tokens_per_s, "step_ms": 1e3 * step_s, "first_step_s": self.first_step_s}

    def _step(self) -> None:
        step, at = self.started.step, self.steps_done
        for position in range(self.count):
            step.add(position, BatchId(0, self.count * at + position), self.pack)
        step.apply(at, step.seal(LocalReducer(), StepTry(0, at, 1, at + 1)))
        self.steps_done += 1


STAGES: dict[str, Any] = {"target": TargetAlone, "drafter": DrafterAlone}


def say(content: Any) -> None:
    print(MARK + json.dumps(content), flush=True)


def main() -> None:
    flags, (stage, packs) = split_flags(sys.argv[1:])
    config = load(None, flags).config
    keep_compiled(config.run.compile_cache)
    try:
        alone = STAGES[stage](config, int(packs))
        say("ready")
        if sys.stdin.readline():
            say(alone.measure())
    except Exception:  # noqa: BLE001 - the process ends here
        traceback.print_exc()
        sys.exit(1)


if __name__ == "__main__":
    main()
