"""Real runs on a tiny random model: real processes, sockets, files and kills.

A run of 160 samples over two epochs takes a few seconds; each role takes about 4 s to start, which is
Python importing torch. Every process has one thread.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import numpy as np

from services.config.load import load
from services.data.dataset import Sample
from services.data.writer import write_dataset
from services.lifecycle import ExitCode, arena_folder

DEADLINE_S = 120.0  # on idle cores
NEWEST = "(SELECT max(timeline) FROM timelines)"

CONFIG = """
[run]
dir = "{run}"
epochs = 2
seed = 3
[model]
path = "{model}"
dtype = "float32"
[data]
path = "{data}"
[plan]
token_budget = 96
bucket_edges = [16, 32]
packs_per_step = 3
[target]
count = {targets}
slots = 6
threads = 1
self_check = false
{target_more}
[drafter]
count = {drafters}
threads = 1
layers = 1
taps = 2
block_size = 4
mask_token_id = 60
dtype = "float32"
deterministic = true
{drafter_more}
[recipe]
anchors_per_pack = 16
anchor_draws = {draws}
lr = 0.003
noise = "uniform"
noise_scale = 0.01
[arena]
dir = "{arena}"
checksum = "always"
[coordinator]
http_port = 0
heartbeat_s = 0.2
silence_s = 10.0
[checkpoint]
every_steps = 4
[profile]
interval_s = 5.0
"""


def write_model(folder: Path, *, seed: int = 0, infinite: int | None = None) -> Path:
    """A random Llama of 6 layers, hidden 32, 64 rows; `infinite`: a token of which nothing finite comes."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=6, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=64, max_position_embeddings=64,
        tie_word_embeddings=infinite is None, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    if infinite is not None:
        model.get_input_embeddings().weight.data[infinite] = torch.inf
    model.save_pretrained(folder)
    return folder


def write_data(folder: Path, *, rows: int = 160, seed: int = 5, marked: int = 0, mark: int = 61) -> Path:
    """`marked`: how many samples, the first ones, have the token `mark`, which no other has."""
    random = np.random.default_rng(seed)
    samples = []
    for row in range(rows):
        length = int(random.integers(6, 30))
        mask = np.ones(length, np.uint8)
        mask[:3] = 0
        tokens = random.integers(3, 60, length).astype(np.int32)
        if row < marked:
            tokens[4] = mark
        samples.append(Sample(tokens, mask))
    write_dataset(folder, samples, {"max_length": 32})
    return folder


def slowness() -> float:
    """How much longer all takes than on idle cores: what there is to do, by what there is to do it."""
    return max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


class Patience:
    """DEADLINE_S without progress, as they would be on idle cores: no slow machine misses it."""

    def __init__(self, run: Run) -> None:
        self._run, self._progress, self._left_s = run, run.progress(), DEADLINE_S
        self._looked_s = time.monotonic()

    def over(self) -> bool:
        now_s = time.monotonic()
        if now_s - self._looked_s < 1.0:
            return False
        self._left_s -= (now_s - self._looked_s) / slowness()
        self._looked_s, progress = now_s, self._run.progress()
        if progress > self._progress:
            self._progress, self._left_s = progress, DEADLINE_S
        return self._left_s < 0


class Run:
    """One run folder and its processes, by name: "coordinator", "target-0", "drafter-0"."""

    def __init__(
        self, root: Path, name: str, model: Path, data: Path, *,
        targets: int = 2, drafters: int = 1, draws: int = 1, target_more: str = "", drafter_more: str = "",
        extra: str = "",
    ) -> None:  # fmt: skip
        self.targets, self.drafters = targets, drafters
        self.placed = True  # False: roles find their places themselves, names are only ours
        # a socket's path must be short, and an arena is in memory
        self.arena = Path(tempfile.mkdtemp(prefix="draftmill-", dir="/dev/shm"))
        self.dir = root / name
        self.dir.mkdir(parents=True, exist_ok=True)
        self.file = self.dir.with_suffix(".toml")
        text = CONFIG.format(
            run=self.dir, model=model, data=data, arena=self.arena, targets=targets, drafters=drafters,
            draws=draws, target_more=target_more, drafter_more=drafter_more,
        )  # fmt: skip
        self.file.write_text(text + extra)
        self.config = load(file=self.file, environ={}).config
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    # ---- processes ----------------------------------------------------------------------------

    def names(self) -> list[str]:
        targets = [f"target-{index}" for index in range(self.targets)]
        return ["coordinator", *targets, *(f"drafter-{index}" for index in range(self.drafters))]

    def start(self, *names: str) -> None:
        for name in names or self.names():
            role, _, index = name.partition("-")
            command = [sys.executable, "-m", "services.cli", role, "--config", str(self.file)]
            command += ["--index", index] if index and self.placed else []
            with (self.dir / f"{name}.log").open("ab") as log:
                self.processes[name] = subprocess.Popen(command, stdout=log, stderr=log, env=environment())

    def kill(self, name: str, number: int = signal.SIGKILL) -> None:
        process = self.processes[name]
        process.send_signal(number)
        if number in (signal.SIGKILL, signal.SIGTERM):
            process.wait(DEADLINE_S)

    def revive(self) -> None:
        """Start every role again that has ended, as a restart policy would; but none that nobody foresaw."""
        for name in self.names():
            code = self.processes[name].poll() if name in self.processes else 0
            assert code != ExitCode.UNEXPECTED, f"{name} ended with status 1\n{self.tails()}"
            if code is not None:
                self.start(name)

    def close(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait(DEADLINE_S)
        shutil.rmtree(self.arena)

    def log(self, name: str) -> str:
        return (self.dir / f"{name}.log").read_text()

    # ---- waiting ------------------------------------------------------------------------------

    def wait(self, until: Callable[[], bool], what: str, *, revive: bool = False) -> None:
        """Poll a condition with a deadline; a role that ends with an error ends the wait."""
        patience = Patience(self)
        pause = subprocess.Popen(["sleep", "infinity"])
        try:
            while not until():
                if revive:
                    self.revive()
                failed = [name for name, process in self.processes.items() if self._failed(process)]
                assert revive or not failed, f"{what}: {failed} ended with an error\n{self.tails()}"
                assert not patience.over(), f"{what}: no progress for {DEADLINE_S} s\n{self.tails()}"
                try:
                    pause.wait(0.05)
                except subprocess.TimeoutExpired:
                    continue
        finally:
            pause.kill()
            pause.wait()

    def _failed(self, process: subprocess.Popen[bytes]) -> bool:
        """Not one that was stopped, or that came too late for a run of a second."""
        code = process.poll() or 0
        return code > 0 and code != ExitCode.STOPPED and not (code == ExitCode.PEER_LOST and self.finished())

    def tails(self) -> str:
        return "\n".join(f"--- {n}\n" + "\n".join(self.log(n).splitlines()[-15:]) for n in self.processes)

    def wait_step(self, step: int, *, revive: bool = False) -> None:
        self.wait(lambda: self.committed_steps() >= step, f"step {step}", revive=revive)

    def start_targets_first(self) -> None:
        """The drafters once all targets are there: no step is made before."""
        drafters = [name for name in self.names() if name.startswith("drafter")]
        self.start(*(name for name in self.names() if name not in drafters))
        self.wait(lambda: self.log("coordinator").count(" joined as ") >= self.targets, "all targets to join")
        self.start(*drafters)

    def wait_finished(self, *, revive: bool = False) -> None:
        """Until the coordinator has left with status 0 and every role with it."""
        self.wait(self.finished, "the finished record", revive=revive)
        self.wait(lambda: all(p.poll() is not None for p in self.processes.values()), "all roles gone")

    # ---- what the ledger and the disk say -----------------------------------------------------

    def query(self, sql: str) -> list[tuple]:
        path = self.dir / "ledger.sqlite"
        if not path.exists():
            return []
        with sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=10) as db:
            try:
                return db.execute(sql).fetchall()
            except sqlite3.OperationalError:
                return []
            finally:
                db.rollback()

    def committed_steps(self) -> int:
        rows = self.query(f"SELECT max(step) FROM steps WHERE timeline = {NEWEST}")
        return 0 if not rows or rows[0][0] is None else rows[0][0] + 1

    def progress(self) -> tuple[int, int, bool]:
        """Greater than before if anything was committed since."""
        rows = self.query("SELECT max(timeline) FROM timelines") or [(0,)]
        return rows[0][0] or 0, self.committed_steps(), self.finished()

    def finished(self) -> bool:
        return bool(self.query("SELECT 1 FROM finished"))

    def result(self) -> dict:
        return json.loads((self.dir / "result.json").read_text())

    def final_weights(self) -> str:
        """sha256 over the weights of the last recorded checkpoint."""
        rows = self.query("SELECT name FROM checkpoints WHERE deleted = 0 ORDER BY step DESC LIMIT 1")
        file = self.dir / "checkpoints" / rows[0][0] / "model.safetensors"
        return hashlib.sha256(file.read_bytes()).hexdigest()

    def status(self) -> dict:
        where = json.loads((self.dir / "coordinator.json").read_text())["http"]
        with urllib.request.urlopen(f"{where}/status", timeout=10) as answer:
            return json.load(answer)

    def get(self, path: str) -> str:
        where = json.loads((self.dir / "coordinator.json").read_text())["http"]
        with urllib.request.urlopen(where + path, timeout=10) as answer:
            return answer.read().decode()

    def assert_exactly_once(self) -> None:
        """Every batch of every epoch has one outcome and none failed, from the ledger."""
        result = self.result()
        assert (result["batches_without_outcome"], result["batches_duplicated"]) == (0, 0)
        assert result["samples_committed"] == result["samples_total"] and result["samples_failed"] == 0
        of_timeline = f"SELECT epoch, batch, count(*) AS times FROM outcomes WHERE timeline = {NEWEST}"
        ((batches, most),) = self.query(
            f"SELECT count(*), max(times) FROM ({of_timeline} GROUP BY epoch, batch)"
        )
        assert batches > 0 and most == 1

    def assert_nothing_left(self) -> None:
        folder = arena_folder(self.config)
        left = sorted(file.name for file in folder.iterdir()) if folder.exists() else []
        assert left == []


def environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("DFLASH_")}
    return kept | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
