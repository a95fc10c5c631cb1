"""Each row of runs.toml: trained through the pipeline itself, exported, and measured with its target."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any, NamedTuple

from commands import BASE, ROOT, Places, draftmill, say
from prompts import tokens

from services.config.load import load
from services.config.schema import Config
from services.data.dataset import Dataset
from services.data.plan import epoch_plan

FIRST_STEP_S = 240.0


class Row(NamedTuple):
    """A table of runs.toml."""

    name: str
    epochs: int = 1
    data: str = "all"
    prompts: str = "few"
    plain: bool = False
    peer: bool = False
    flags: dict[str, Any] = {}


class Drafters:
    def __init__(self, model: str, out: Path, places: Places, processes: int) -> None:
        self._model, self._out, self._places, self._processes = model, out, places, processes
        self._compiled = threading.Event()  # the first run has compiled what the others find in the cache

    def make(self, rows: list[Row]) -> Iterator[str]:
        """The rows' names as they end. One that fails is said so, and the others go on."""
        with ThreadPoolExecutor(self._places.count) as pool:
            jobs = {pool.submit(self._one, row, first=row is rows[0]): row.name for row in rows}
            for job in as_completed(jobs):
                if error := job.exception():
                    say(f"[red]{jobs[job]}: {type(error).__name__}: {error}[/red]")
                yield jobs[job]

    def _one(self, row: Row, *, first: bool) -> None:
        with self._places.one() as env:
            try:
                if not first:
                    self._compiled.wait(FIRST_STEP_S)
                export = self._train_peer(row, env) if row.peer else self._train(row, env, first)
                if export is not None:
                    self._evaluate(row, export, env)
            finally:
                self._compiled.set()

    def _flags(self, row: Row, env: dict[str, str]) -> list[str]:
        given = {
            "model.path": self._model, "data.path": self._out / "data" / row.data,
            "run.epochs": self._epochs(row),
            "run.dir": self._out / "runs" / row.name, "eval.prompts": self._out / "few.jsonl",
            **row.flags,
        }  # fmt: skip
        if not env["CUDA_VISIBLE_DEVICES"]:
            given |= {"target.gpus": "cpu", "drafter.gpus": "cpu", "evaluator.gpu": "cpu"}
        return [f"--{name}={value}" for name, value in given.items()]

    def _epochs(self, row: Row) -> int:
        """Fewer data are repeated until the steps are those of the same epochs of all."""
        return row.epochs * max(1, round(tokens(self._out, "all") / tokens(self._out, row.data)))

    def _train(self, row: Row, env: dict[str, str], first: bool) -> Path | None:
        export, run = self._out / "exports" / row.name, self._out / "runs" / row.name
        if export.exists():
            return export
        run.mkdir(parents=True, exist_ok=True)
        if first:
            threading.Thread(target=self._await_first_step, args=(run,), daemon=True).start()
        say(f"{row.name}: training")
        words = ["--config", str(BASE), *self._flags(row, env)]
        if not draftmill(run / "up.log", "up", *words, env=env):
            return None
        newest = max((run / "checkpoints").iterdir(), key=lambda folder: folder.stat().st_mtime_ns)
        done = draftmill(run / "up.log", "export", str(newest), str(export), env=env)
        return export if done else None

    def _await_first_step(self, run: Path) -> None:
        deadline_s = time.monotonic() + FIRST_STEP_S
        metrics = run / "metrics.jsonl"
        while time.monotonic() < deadline_s and not (metrics.exists() and metrics.stat().st_size):
            time.sleep(1.0)
        say("the first step is done; the others begin")
        self._compiled.set()

    def _train_peer(self, row: Row, env: dict[str, str]) -> Path | None:
        """The same data, order, steps and shape through a plain loop around another project's model."""
        export, run = self._out / "exports" / row.name, self._out / "runs" / row.name
        if export.exists():
            return export
        run.mkdir(parents=True, exist_ok=True)
        say(f"{row.name}: training")
        data = self._out / "data" / row.data
        config = load(BASE, [("--model.path", self._model), ("--data.path", str(data))]).config
        plan, drafter, recipe = config.plan, config.drafter, config.recipe
        given = {
            "model": self._model, "data": data, "out": export,
            "steps": epoch_steps(config) * self._epochs(row),
            "packs-per-step": plan.packs_per_step, "token-budget": plan.token_budget, "seed": config.run.seed,
            "anchors": recipe.anchors_per_pack, "layers": drafter.layers, "block-size": drafter.block_size,
            "mask-token-id": drafter.mask_token_id, "lr": recipe.lr, "warmup-ratio": recipe.warmup_ratio,
        }  # fmt: skip
        words = [f"--{name}={value}" for name, value in given.items()]
        words += ["--bucket-edges", *map(str, plan.bucket_edges)]
        with (run / "peer.log").open("w") as log, (run / "peer.json").open("w") as result:
            script = ROOT / "benchmarks" / "peers" / "speculators_loop.py"
            code = subprocess.run(
                [sys.executable, str(script), *words], cwd=ROOT, check=False, stdout=result, stderr=log,
                env={**env, "PYTHONPATH": f"{ROOT}:{env.get('PYTHONPATH', '')}"},
            ).returncode  # fmt: skip
        if code:
            say(f"[red]the peer ended with {code}[/red]: {run}/peer.log")
        return None if code else export

    def _evaluate(self, row: Row, export: Path, env: dict[str, str]) -> None:
        found = self._out / "evals" / f"{row.name}.json"
        if found.exists():
            return
        found.parent.mkdir(exist_ok=True)
        say(f"{row.name}: evaluating")
        words = [
            str(export), "--config", str(BASE), *self._flags(row, env), "--model.dtype=float32", "--json",
            f"--eval.prompts={self._out / row.prompts}.jsonl", "--eval.limit=0",
            f"--processes={self._processes if row.prompts == 'all' else 4}",
            f"--picture={found.with_suffix('.svg')}", "--plain" if row.plain else "--no-plain",
        ]  # fmt: skip
        if draftmill(found.with_suffix(".log"), "eval", *words, env=env, into=found):
            say(f"{row.name}: acceptance {json.loads(found.read_text())['acceptance_length_by_domain']}")


def epoch_steps(config: Config) -> int:
    """Of the first epoch: others have as many, give or take a few."""
    data, plan = Dataset.open(config.data.path), config.plan
    planned = epoch_plan(
        seed=config.run.seed, epoch=0, fingerprint=data.fingerprint, lengths=data.lengths,
        bucket_edges=plan.bucket_edges, token_budget=plan.token_budget,
    )  # fmt: skip
    return -(-len(planned.batches) // plan.packs_per_step)


def speed(model: str, out: Path, gpu: str, row: Row) -> None:
    """One evaluation in bfloat16 with nothing beside it, for tokens/s; several block sizes."""
    found = out / "speed.json"
    if found.exists() or not (out / "exports" / row.name).exists():
        return
    words = [
        str(out / "exports" / row.name), f"--model.path={model}", f"--eval.prompts={out / 'few.jsonl'}",
        f"--data.path={out / 'data' / 'all'}", "--eval.limit=8", "--eval.max-new-tokens=128", "--json",
        "--block-sizes=4,8,16",
    ]  # fmt: skip
    draftmill(out / "speed.log", "eval", *words, env={**os.environ, "CUDA_VISIBLE_DEVICES": gpu}, into=found)
