"""A small target with everything overlapping, and what its packs are compared with.

Works on a CPU as well, with arenas in shared memory, so that only what CUDA does is left to a GPU.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import torch
from target_peer import digest
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from protocol.arena import lock_name
from protocol.codec import encode
from protocol.files import FileLock
from protocol.messages import BatchId, Pack, Stamp
from services.config.schema import Config
from services.data.batch import gather
from services.data.dataset import Block, Dataset
from services.data.plan import epoch_plan
from services.data.training_data import TrainingData
from services.dflash.drafter_config import derive
from services.dflash.target_model import Target, wrap_target
from services.target.board import Job, Outcome
from services.target.copier import Blame, Copier, Launched, Slabs
from services.target.profile import Totals
from services.target.start import Started, assemble, open_slots

PEER = Path(__file__).with_name("target_peer.py")
ROOT = Path(__file__).parents[2]
EDGES, BUDGET, VOCABULARY = (256, 512, 1024), 2048, 2000
PATIENCE_S = 60.0  # a deadline, not a wait


def make_dataset(path: Path, samples: int = 90) -> Dataset:
    """Random samples of 30 to 1,024 tokens, in memory."""
    draw = np.random.default_rng(5)
    lengths = draw.integers(30, 1025, samples)
    ids = draw.integers(0, VOCABULARY, int(lengths.sum())).astype(np.int32)
    offsets = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
    zeros = np.zeros(samples, np.int32)
    block = Block(offsets, ids, np.ones(len(ids), np.uint8), lengths.astype(np.int32), zeros, zeros)
    return Dataset(path, {"fingerprint": "in memory", "info": {}}, [block])


def make_target(device: torch.device) -> Target:
    torch.manual_seed(2)
    shape = Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=1024, intermediate_size=2048, num_hidden_layers=8,
        num_attention_heads=8, num_key_value_heads=4, head_dim=128, bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    model = Qwen3ForCausalLM(shape).to(device=device, dtype=torch.bfloat16)  # type: ignore[call-arg]
    return wrap_target(model)


def make_config(dataset: Dataset, **sections: dict[str, Any]) -> Config:
    tree: dict[str, dict[str, Any]] = {
        "run": {"seed": 11},
        "model": {"path": "in memory"},
        "data": {"path": dataset.path},
        "plan": {"token_budget": BUDGET, "bucket_edges": EDGES},
        "target": {"slots": 4},
        "drafter": {"taps": 3, "mask_token_id": VOCABULARY - 1},
        "arena": {"checksum": "always"},
    }
    for section, options in sections.items():
        tree.setdefault(section, {}).update(options)
    return Config.model_validate(tree)


def make_started(config: Config, dataset: Dataset, target: Target) -> Started:
    return assemble(config, TrainingData(dataset), target, derive(target.config, config.drafter, None))


def batches_of(dataset: Dataset) -> tuple[tuple[int, ...], ...]:
    plan = epoch_plan(
        seed=1, epoch=0, fingerprint="x", lengths=dataset.lengths, bucket_edges=EDGES, token_budget=BUDGET
    )
    return plan.batches


def captured(started: Started, samples: tuple[int, ...]) -> dict[str, Tensor]:
    """Sections of one forward with nothing beside it."""
    batch = gather(started.data.of(0), samples, edges=EDGES, vocabulary=VOCABULARY)
    started.forward.run(batch, started.slabs[0])
    started.slabs[0].packed.wait()
    return {name: x.cpu() for name, x in started.slabs[0].taps.sections(batch.tokens).items()}


class Reference:
    """The digest of each batch of a dataset, captured one at a time on one stream."""

    def __init__(self, dataset: Dataset, target: Target) -> None:
        started = make_started(make_config(dataset), dataset, target)
        self.batches = batches_of(dataset)
        self.digests = []
        for samples in self.batches:
            taps = captured(started, samples)
            assert all(bool(x.isfinite().all()) for x in taps.values())
            self.digests.append(digest(taps))
        started.forward.close()
        assert len(set(self.digests)) == len(self.batches)

    def order(self, packs: int, seed: int) -> list[int]:
        """`packs` batches by number, shuffled: each as often as the next, give or take one."""
        numbers = [number % len(self.batches) for number in range(packs)]
        random.Random(seed).shuffle(numbers)
        return numbers


class Peer:
    """A process that reads packs on `device`; it may outlive the arenas it reads from."""

    def __init__(self, folder: Path, device: torch.device) -> None:
        self.device = device
        environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
        self._process = subprocess.Popen(
            [sys.executable, str(PEER), str(folder), str(device)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
        )  # fmt: skip

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def digest_of(self, message: Pack) -> str:
        """Empty if the process has died."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(encode(message)[1].hex() + "\n")
        self._process.stdin.flush()
        return self._process.stdout.readline().strip()

    def kill(self) -> None:
        self._process.kill()

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.close()
            assert self._process.wait(PATIENCE_S) == 0
        finally:
            self._process.kill()
            self._process.wait()
            self._process.stdout.close()


class Overlap:
    """Forward, copier and a reading process, each as far ahead of the next as slabs and slots allow."""

    def __init__(self, config: Config, started: Started, folder: Path, peer: Peer, name: str) -> None:
        self._started, self._peer, self._name = started, peer, name
        self._lock = FileLock(folder / lock_name(name)).acquire()
        self._writer = open_slots(config, started, folder, name)
        self._slabs = Slabs(list(started.slabs))
        self._blame = Blame(self._writer)
        self._done: SimpleQueue[Outcome | None] = SimpleQueue()
        self._free: SimpleQueue[int] = SimpleQueue()
        for slot in range(config.target.slots):
            self._free.put(slot)
        self._copier = Copier(
            config, shape=started.shape, writer=self._writer, slabs=self._slabs, blame=self._blame,
            totals=Totals(), device=started.device, finish=lambda _attempt, outcome: self._done.put(outcome),
        )  # fmt: skip
        self._found: dict[int, str] = {}
        self._failures: list[BaseException] = []

    def run(self, batches: Sequence[tuple[int, ...]]) -> list[str]:
        """Digest of the features of each batch. Whatever stands still for a minute ends with an error."""
        watch = threading.Timer(PATIENCE_S, self._give_up, [TimeoutError("no end in time")])
        threads = [threading.Thread(target=self._guard, args=[run]) for run in (self._copier.run, self._read)]
        for thread in (watch, *threads):
            thread.daemon = True
            thread.start()
        try:
            for number, samples in enumerate(batches):
                if not self._launch(number, samples):
                    break
            self._copier.close()
            threads[0].join(PATIENCE_S)
            self._done.put(None)
            threads[1].join(PATIENCE_S)
        finally:
            watch.cancel()
        if self._failures:
            raise self._failures[0]
        self._writer.close()
        self._lock.release(unlink=True)
        return [self._found.get(number, "missing") for number in range(len(batches))]

    def _launch(self, number: int, samples: tuple[int, ...]) -> bool:
        job = Job(BatchId(0, number), Stamp(1, number), samples, self._free.get(timeout=PATIENCE_S))
        slab = self._slabs.take()
        if slab is None:
            return False
        self._blame.begin(job)
        batch = gather(self._started.data.of(0), samples, edges=EDGES, vocabulary=VOCABULARY)
        self._started.forward.run(batch, slab)
        self._copier.submit(Launched(job, batch, slab))
        return True

    def _read(self) -> None:
        for outcome in iter(self._done.get, None):
            assert outcome.descriptor is not None
            message = Pack(target=self._name, lease=Stamp(1, 0), descriptor=outcome.descriptor)
            self._found[outcome.descriptor.batch.index] = self._peer.digest_of(message)
            self._free.put(outcome.descriptor.slot)

    def _guard(self, run: Any) -> None:
        try:
            if self._started.device.type == "cuda":
                torch.cuda.set_device(self._started.device)
            run()
        except BaseException as error:  # noqa: BLE001 - `run` raises it
            self._give_up(error)

    def _give_up(self, error: BaseException) -> None:
        """Nobody waits any longer for what has failed."""
        self._failures.append(error)
        self._peer.kill()
        self._copier.close()
        self._done.put(None)
