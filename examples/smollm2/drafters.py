"""Each row of runs.toml: trained through the pipeline itself, exported, and measured with its target.

    runs/ROW         the run; a later start of the script goes on where it stopped
    exports/ROW      the drafter, complete with exports/ROW.json
    evals/ROW.json   what it is worth

What is there is not done again. A row that the deadline cut has ROW-at-STEP in place of ROW; evaluations of
few prompts are named ...-few.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any, NamedTuple

from commands import BASE, ROOT, Failed, Interrupted, Places, began_s, draftmill, run, say, signals
from prompts import tokens

from services.config.load import load
from services.config.schema import Config
from services.data.dataset import Dataset
from services.data.plan import epoch_plan

FIRST_STEP_S = 120.0
MEASURE_S = 150.0  # before the deadline: an export and an evaluation of few prompts, eight rows at a time
FEW = 24  # prompts


class Row(NamedTuple):
    """A table of runs.toml."""

    name: str
    epochs: int = 1
    data: str = "all"
    prompts: str = "few"
    peer: bool = False
    flags: dict[str, Any] = {}


class Times(NamedTuple):
    """Until when (monotonic): training and answers, and everything."""

    train_s: float = math.inf
    all_s: float = math.inf

    @classmethod
    def within(cls, deadline_s: float) -> Times:
        """Of `deadline_s` seconds since the start; 0: as long as it takes."""
        return cls(began_s + deadline_s - MEASURE_S, began_s + deadline_s) if deadline_s else cls()


class Drafters:
    """Rows that fail, and why, are in `failures`."""

    def __init__(self, model: str, out: Path, places: Places, processes: int, times: Times) -> None:
        self._model, self._out, self._places, self._processes = model, out, places, processes
        self._times = times
        self._compiled = threading.Event()  # the first run has compiled what the others find in the cache
        self.failures: dict[str, str] = {}

    def make(self, rows: list[Row]) -> Iterator[str]:
        """The rows' names as they end. One that fails is said so, and the others go on."""
        first = next((row for row in rows if not row.peer and not self._record(row.name).exists()), None)
        with ThreadPoolExecutor(self._places.count) as pool:
            jobs = {pool.submit(self._one, row, first=row is first): row.name for row in rows}
            for job in as_completed(jobs):
                if error := job.exception():
                    known = isinstance(error, Failed | Interrupted)
                    self.failures[jobs[job]] = str(error) if known else f"{type(error).__name__}: {error}"
                    say(f"{jobs[job]}: {self.failures[jobs[job]]}", "red")
                yield jobs[job]

    def _one(self, row: Row, *, first: bool) -> None:
        with self._places.one() as env:
            try:
                if self._record(row.name).exists():
                    name = row.name
                elif row.peer:
                    name = self._train_peer(row, env)
                else:
                    if not first:
                        self._compiled.wait(FIRST_STEP_S)
                    name = self._train(row, env)
            finally:
                if first:
                    self._compiled.set()
            self._measure(row, name, env)

    def _record(self, name: str) -> Path:
        """What the command that made the export of this name printed: without it the export is not whole."""
        return self._out / "exports" / f"{name}.json"

    def _begin(self, row: Row) -> Path:
        """The run's folder, and no half export in the way."""
        if signals or time.monotonic() > self._times.train_s:
            raise Interrupted("not begun: a signal came, or the time for training is over")
        say(f"{row.name}: training")
        shutil.rmtree(self._out / "exports" / row.name, ignore_errors=True)
        (self._out / "exports").mkdir(exist_ok=True)
        folder = self._out / "runs" / row.name
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    # ---- ours ---------------------------------------------------------------------------------

    def _train(self, row: Row, env: dict[str, str]) -> str:
        """The name of its export: the row's, or ROW-at-STEP if its time was up."""
        folder = self._begin(row)
        metrics = folder / "metrics.jsonl"

        def look() -> None:
            if not self._compiled.is_set() and metrics.exists() and metrics.stat().st_size:
                self._compiled.set()

        words = ["--config", str(BASE), *flags(self._options(row, env))]
        ended = draftmill(folder / "up.log", "up", *words, env=env, until_s=self._times.train_s, look=look)
        if signals:
            raise Interrupted("stopped by a signal; the next start goes on from its last checkpoint")
        if ended.code and not ended.cut:
            raise Failed(f"`up` ended with {ended.code}, see {folder}/up.log and {folder}/logs")
        step, newest = newest_checkpoint(folder)
        name = f"{row.name}-at-{step}" if ended.code else row.name
        if not self._record(name).exists():
            out = self._out / "exports" / name
            shutil.rmtree(out, ignore_errors=True)
            found = draftmill(
                folder / "up.log", "export", str(newest), str(out),
                env=env, into=self._record(name), until_s=self._times.all_s,
            )  # fmt: skip
            if found.code:
                raise Failed(f"`export` ended with {found.code}, see {folder}/up.log")
        return name

    def _options(self, row: Row, env: dict[str, str]) -> dict[str, Any]:
        on_cpu = {"target.gpus": "cpu", "drafter.gpus": "cpu", "evaluator.gpu": "cpu"}
        return {
            "model.path": self._model, "data.path": self._out / "data" / row.data,
            "run.epochs": self._epochs(row), "run.dir": self._out / "runs" / row.name,
            "eval.prompts": self._out / "few.jsonl", **row.flags,
            **({} if env["CUDA_VISIBLE_DEVICES"] else on_cpu),
        }  # fmt: skip

    def _epochs(self, row: Row) -> int:
        """Fewer data are repeated until the steps are those of the same epochs of all."""
        return row.epochs * max(1, round(tokens(self._out, "all") / tokens(self._out, row.data)))

    # ---- the peer -----------------------------------------------------------------------------

    def _train_peer(self, row: Row, env: dict[str, str]) -> str:
        """The same data, order, steps and shape through a plain loop around another project's model."""
        folder = self._begin(row)
        data = self._out / "data" / row.data
        config = load(BASE, [("--model.path", self._model), ("--data.path", str(data))]).config
        plan, drafter, recipe = config.plan, config.drafter, config.recipe
        given = {
            "model": self._model, "data": data, "out": self._out / "exports" / row.name,
            "steps": epoch_steps(config) * self._epochs(row),
            "packs-per-step": plan.packs_per_step, "token-budget": plan.token_budget, "seed": config.run.seed,
            "anchors": recipe.anchors_per_pack, "layers": drafter.layers, "block-size": drafter.block_size,
            "mask-token-id": drafter.mask_token_id, "lr": recipe.lr, "warmup-ratio": recipe.warmup_ratio,
        }  # fmt: skip
        script = str(ROOT / "benchmarks" / "peers" / "speculators_loop.py")
        words = [*flags(given), "--bucket-edges", *map(str, plan.bucket_edges)]
        ended = run(
            [sys.executable, script, *words], folder / "peer.log", into=self._record(row.name),
            env={**env, "PYTHONPATH": f"{ROOT}:{env.get('PYTHONPATH', '')}"}, until_s=self._times.train_s,
        )  # fmt: skip
        if ended.code:
            raise Failed(f"the peer ended with {ended.code}, see {folder}/peer.log")
        return self._renamed(row.name) if ended.cut else row.name

    def _renamed(self, name: str) -> str:
        """It exports when it is cut as well, and cannot go on later: the row itself is still to be made."""
        steps = json.loads(last_line(self._record(name)))["steps"]
        now = f"{name}-at-{steps}"
        shutil.rmtree(self._out / "exports" / now, ignore_errors=True)
        (self._out / "exports" / name).rename(self._out / "exports" / now)
        self._record(name).rename(self._record(now))
        return now

    # ---- what they are worth ------------------------------------------------------------------

    def _measure(self, row: Row, name: str, env: dict[str, str]) -> None:
        """Ahead of a deadline a few prompts come first: an evaluation that is cut leaves nothing."""
        (self._out / "evals").mkdir(exist_ok=True)
        whole = name == row.name
        if not whole or self._times.all_s < math.inf:
            self._evaluate(row, name, f"{name}-few", env, limit=FEW)
        if whole:
            self._evaluate(row, name, name, env)

    def _evaluate(self, row: Row, name: str, called: str, env: dict[str, str], *, limit: int = 0) -> None:
        """evals/CALLED.json: of the first `limit` prompts of GSM8K, or of all that the row asks for."""
        found = self._out / "evals" / f"{called}.json"
        if found.exists():
            return
        prompts = "few" if limit else row.prompts
        say(f"{called}: evaluating")
        options = {
            "model.path": self._model, "model.dtype": "float32",
            "eval.prompts": self._out / f"{prompts}.jsonl", "eval.limit": limit,
        }  # fmt: skip
        words = [
            str(self._out / "exports" / name), "--config", str(BASE), *flags(options), "--json",
            f"--processes={self._processes}", f"--picture={found.with_suffix('.svg')}", "--no-plain",
        ]  # fmt: skip
        log = found.with_suffix(".log")
        ended = draftmill(log, "eval", *words, env=env, into=found, until_s=self._times.all_s)
        if ended.code:
            raise Failed(f"`eval` {'was cut' if ended.cut else f'ended with {ended.code}'}, see {log}")
        say(f"{called}: acceptance {json.loads(found.read_text())['acceptance_length_by_domain']}")


def flags(options: dict[str, Any]) -> list[str]:
    return [f"--{name}={value}" for name, value in options.items()]


def newest_checkpoint(run_folder: Path) -> tuple[int, Path]:
    """(step, folder). Raises Failed if there is none but the initial weights."""
    places = {}
    for folder in (run_folder / "checkpoints").glob("ckpt-*"):
        _, timeline, step, _ = folder.name.split("-", 3)
        places[int(timeline), int(step)] = folder
    _, newest = max(places, default=(0, 0))
    if not newest:
        raise Failed("no checkpoint but the initial weights")
    return newest, places[max(places)]


def last_line(path: Path) -> str:
    return path.read_text(encoding="utf-8").rstrip("\n").rpartition("\n")[2]


def epoch_steps(config: Config) -> int:
    """Of the first epoch: others have as many, give or take a few."""
    data, plan = Dataset.open(config.data.path), config.plan
    planned = epoch_plan(
        seed=config.run.seed, epoch=0, fingerprint=data.fingerprint, lengths=data.lengths,
        bucket_edges=plan.bucket_edges, token_budget=plan.token_budget,
    )  # fmt: skip
    return -(-len(planned.batches) // plan.packs_per_step)


def speed(model: str, out: Path, gpu: str, row: Row, times: Times) -> None:
    """evals/ROW-speed.json: bfloat16 with nothing beside it, for tokens/s; several block sizes."""
    found, export = out / "evals" / f"{row.name}-speed.json", out / "exports" / row.name
    if found.exists():
        return
    largest = json.loads((export / "config.json").read_text())["block_size"]
    sizes = ",".join(str(size) for size in (4, 8, 16) if size <= largest)
    options = {
        "model.path": model, "eval.prompts": out / "few.jsonl", "eval.limit": 8,
        "eval.max-new-tokens": 128,
    }  # fmt: skip
    words = [str(export), "--config", str(BASE), *flags(options), "--json", f"--block-sizes={sizes}"]
    env, log = {**os.environ, "CUDA_VISIBLE_DEVICES": gpu}, found.with_suffix(".log")
    found.parent.mkdir(exist_ok=True)
    say(f"{row.name}: speed, alone")
    if draftmill(log, "eval", *words, env=env, into=found, until_s=times.all_s).code:
        raise Failed(f"{row.name}: its speed was not measured, or not to the end, see {log}")
