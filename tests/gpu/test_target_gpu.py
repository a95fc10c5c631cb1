"""The target on a GPU with everything overlapping: each pack has the bits of a synchronous capture."""

import os
import random
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest
import torch
from target_peer import digest
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from protocol.arena import lock_name
from protocol.codec import encode
from protocol.errors import ModelError
from protocol.files import FileLock
from protocol.messages import BatchId, Pack, Stamp
from services.config.schema import Config
from services.data.dataset import Dataset, Sample
from services.data.plan import epoch_plan
from services.data.training_data import TrainingData
from services.data.writer import write_dataset
from services.dflash.drafter_config import derive
from services.dflash.noise import join_taps
from services.dflash.target_model import Target, wrap_target
from services.seeds import seed
from services.target.batch import gather
from services.target.board import Job, Outcome
from services.target.copier import Blame, Copier, Launched, Slabs
from services.target.profile import Totals
from services.target.start import Started, assemble, open_slots

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu", 0)
PEER = Path(__file__).with_name("target_peer.py")
ROOT = Path(__file__).parents[2]
NAME = "target-gpu"
EDGES, BUDGET, VOCABULARY = (256, 512, 1024), 2048, 2000


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="draftmill-", dir="/dev/shm") as name:
        yield Path(name)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    draw = np.random.default_rng(5)
    rows = [draw.integers(0, VOCABULARY, length).astype(np.int32) for length in draw.integers(30, 1025, 90)]
    samples = [Sample(row, np.ones(len(row), np.uint8)) for row in rows]
    return write_dataset(tmp_path_factory.mktemp("data") / "set", samples, {})


@pytest.fixture
def target() -> Target:
    return make_target(DEVICE)


def make_target(device: torch.device) -> Target:
    torch.manual_seed(2)
    shape = Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=1024, intermediate_size=2048, num_hidden_layers=8,
        num_attention_heads=8, num_key_value_heads=4, head_dim=128, bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    return wrap_target(Qwen3ForCausalLM(shape).to(device, torch.bfloat16))


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


class Overlap:
    """Forward, copier and a reading process, each as far ahead of the next as slabs and slots allow."""

    def __init__(self, config: Config, started: Started, folder: Path) -> None:
        self._started = started
        self._lock = FileLock(folder / lock_name(NAME)).acquire()
        self._writer = open_slots(config, started, folder, NAME)
        self._slabs = Slabs(list(started.slabs))
        self._blame = Blame(self._writer)
        self._done: SimpleQueue[Outcome | None] = SimpleQueue()
        self._free: SimpleQueue[int] = SimpleQueue()
        for slot in range(config.target.slots):
            self._free.put(slot)
        self._copier = Copier(
            config, shape=started.shape, writer=self._writer, slabs=self._slabs, blame=self._blame,
            totals=Totals(), device=DEVICE, finish=lambda _attempt, outcome: self._done.put(outcome),
        )  # fmt: skip
        self._found: dict[int, str] = {}
        environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
        self._peer = subprocess.Popen(
            [sys.executable, str(PEER), str(folder), str(DEVICE)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
        )  # fmt: skip

    def run(self, batches: list[tuple[int, ...]]) -> dict[int, str]:
        """Digest of the features of each batch, by its place in the list."""
        copier, reader = (threading.Thread(target=run) for run in (self._copier.run, self._read))
        copier.start()
        reader.start()
        for number, samples in enumerate(batches):
            job = Job(BatchId(0, number), Stamp(1, number), samples, self._free.get(timeout=60))
            slab = self._slabs.take()
            assert slab is not None
            self._blame.begin(job)
            batch = gather(self._started.data.of(0), samples, edges=EDGES, vocabulary=VOCABULARY)
            self._started.forward.run(batch, slab)
            self._copier.submit(Launched(job, batch, slab))
        self._copier.close()
        copier.join()
        self._done.put(None)
        reader.join()
        self._writer.close()
        self._lock.release()
        return self._found

    def _read(self) -> None:
        assert self._peer.stdin is not None and self._peer.stdout is not None
        for outcome in iter(self._done.get, None):
            assert outcome.descriptor is not None
            message = Pack(target=NAME, lease=Stamp(1, 0), descriptor=outcome.descriptor)
            self._peer.stdin.write(encode(message)[1].hex() + "\n")
            self._peer.stdin.flush()
            self._found[outcome.descriptor.batch.index] = self._peer.stdout.readline().strip()
            self._free.put(outcome.descriptor.slot)
        self._peer.stdin.close()
        assert self._peer.wait(60) == 0


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
@pytest.mark.parametrize("split", [False, True], ids=["joined", "split"])
@pytest.mark.parametrize("kind", ["shm", "pinned", "cuda_ipc"])
def test_overlapped_packs_have_the_bits_of_a_synchronous_capture(
    folder: Path, dataset: Dataset, target: Target, kind: str, split: bool, depth: int
) -> None:
    options = {"postprocess_depth": depth, "split_fc_layers": split, "slots": 4, "self_check": depth == 1}
    config = make_config(dataset, target=options, arena={"kind": kind})
    started = make_started(config, dataset, target)
    unique = batches_of(dataset)
    expected = [digest(captured(started, samples)) for samples in unique]
    order = list(range(len(unique))) * 2
    random.Random(depth).shuffle(order)
    found = Overlap(config, started, folder).run([unique[number] for number in order])
    assert [found[place] for place in range(len(order))] == [expected[number] for number in order]
    assert len(set(expected)) == len(unique)


@pytest.mark.parametrize("kind", ["uniform", "normal"])
def test_noise_beside_the_next_forward_is_what_a_drafter_adds(
    folder: Path, dataset: Dataset, target: Target, kind: str
) -> None:
    config = make_config(dataset, recipe={"noise": kind, "noise_scale": 0.05}, target={"slots": 3})
    started = make_started(config, dataset, target)
    unique = batches_of(dataset)
    expected = []
    for number, samples in enumerate(unique):
        taps = captured(started, samples)["features"].to(DEVICE).chunk(3, dim=1)
        noise_seed = seed(11, "noise", 0, number)
        joined = join_taps(taps, kind=kind, scale=0.05, seed=noise_seed)  # type: ignore[arg-type]
        expected.append(digest({"features": joined}))
    found = Overlap(config, started, folder).run(list(unique))
    assert [found[number] for number in range(len(unique))] == expected


def test_a_forward_never_waits_for_the_gpu(dataset: Dataset, target: Target) -> None:
    started = make_started(make_config(dataset), dataset, target)
    batch = gather(dataset, batches_of(dataset)[0], edges=EDGES, vocabulary=VOCABULARY)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for slab in started.slabs:
            started.forward.run(batch, slab)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    assert bool(started.slabs[0].finite_T[: batch.tokens].all())


def test_a_sample_with_infinite_embeddings_is_flagged_on_the_gpu(dataset: Dataset, target: Target) -> None:
    samples = next(batch for batch in batches_of(dataset) if len(batch) > 2)
    others = {int(t) for s in samples[:1] + samples[2:] for t in dataset.sample(s).input_ids}
    poison = next(int(t) for t in dataset.sample(samples[1]).input_ids if int(t) not in others)
    target.embed_weight_VH[poison] = torch.inf
    started = make_started(make_config(dataset, target={"self_check": False}), dataset, target)
    batch = gather(dataset, samples, edges=EDGES, vocabulary=VOCABULARY)
    started.forward.run(batch, started.slabs[0])
    started.slabs[0].packed.wait()
    rows = started.slabs[0].finite_T[: batch.tokens].split(batch.lengths)
    assert [bool(r.all()) for r in rows] == [position != 1 for position in range(len(samples))]


def test_a_bucket_that_does_not_fit_is_named_before_the_first_lease(dataset: Dataset, target: Target) -> None:
    config = make_config(dataset, plan={"token_budget": 65536, "bucket_edges": (256, 512, 1024)})
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(DEVICE).total_memory
    slabs = 2 * 65536 * 3 * 1024 * 2
    torch.cuda.set_per_process_memory_fraction(
        (torch.cuda.memory_reserved(DEVICE) + slabs + 2**28) / total, DEVICE
    )
    try:
        with pytest.raises(ModelError, match=r"bucket \d+: \d+ documents .* lower plan.token_budget = 65536"):
            make_started(config, dataset, target)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, DEVICE)
        torch.cuda.empty_cache()


@pytest.mark.slow
def test_nothing_is_compiled_after_the_warm_up(dataset: Dataset, target: Target) -> None:
    plain = make_started(make_config(dataset), dataset, target)
    unique = batches_of(dataset)
    expected = [captured(plain, samples)["features"] for samples in unique]
    plain.forward.close()
    started = make_started(make_config(dataset, target={"compile": True}), dataset, target)
    with torch._dynamo.config.patch(error_on_recompile=True):
        found = [captured(started, samples)["features"] for samples in unique]
        again = [captured(started, samples)["features"] for samples in unique]
    assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True))
    for a, b in zip(found, expected, strict=True):
        error = (a.float() - b.float()).norm() / b.float().norm()
        assert float(error) < 0.02


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one CUDA device")
def test_another_gpu_gives_the_same_bits(dataset: Dataset, target: Target) -> None:
    first = make_started(make_config(dataset), dataset, target)
    second = make_started(make_config(dataset), dataset, make_target(torch.device("cuda", 1)))
    for samples in batches_of(dataset):
        one = captured(first, samples)["features"]
        with torch.cuda.device(1):
            assert torch.equal(captured(second, samples)["features"], one)
