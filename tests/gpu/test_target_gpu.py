"""The target on a GPU with everything overlapping: each pack has the bits of a synchronous capture."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from target_overlap import (
    EDGES,
    VOCABULARY,
    Overlap,
    Peer,
    Reference,
    batches_of,
    captured,
    make_config,
    make_dataset,
    make_started,
    make_target,
)
from target_peer import digest

from protocol.errors import ModelError
from services.data.batch import gather
from services.data.dataset import Dataset
from services.dflash.noise import join_taps
from services.dflash.target_model import Target
from services.seeds import seed

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.filterwarnings("default"),  # torch warns, once a process, of its own debug mode
]

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu", 0)
KINDS, DEPTHS, SPLITS = ("shm", "pinned", "cuda_ipc"), (1, 2, 3, 4), (False, True)
PACKS = int(os.environ.get("TORTURE_PACKS", "1000"))
"""Of the torture, on each GPU that reads: over all kinds, depths and layouts together."""


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="draftmill-", dir="/dev/shm") as name:
        yield Path(name)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return make_dataset(tmp_path_factory.mktemp("data") / "set")


@pytest.fixture
def target() -> Target:
    return make_target(DEVICE)


class Torture:
    """What all cases share: one model, its synchronous capture, and a reading process on each GPU."""

    def __init__(self, dataset: Dataset, folder: Path) -> None:
        readers = [torch.device("cuda", index) for index in range(min(2, torch.cuda.device_count()))]
        self.peers = [Peer(folder, device) for device in readers or [torch.device("cpu")]]
        self.dataset, self.folder = dataset, folder
        self.target = make_target(DEVICE)
        self.reference = Reference(dataset, self.target)
        self.packs = 0

    def run(self, kind: str, split: bool, depth: int, reader: int, packs: int) -> None:
        options = {"postprocess_depth": depth, "split_fc_layers": split, "slots": 4, "self_check": False}
        config = make_config(self.dataset, target=options, arena={"kind": kind})
        started = make_started(config, self.dataset, self.target)
        order = self.reference.order(packs, seed=depth)
        name = f"target-{kind}-{split}-{depth}-{reader}"
        if not self.peers[reader].alive:  # an earlier case has failed
            self.peers[reader] = Peer(self.folder, self.peers[reader].device)
        try:
            overlap = Overlap(config, started, self.folder, self.peers[reader], name)
            found = overlap.run([self.reference.batches[number] for number in order])
        finally:
            started.forward.close()
        assert found == [self.reference.digests[number] for number in order]
        self.packs += packs


@pytest.fixture(scope="module")
def torture(dataset: Dataset) -> Iterator[Torture]:
    with tempfile.TemporaryDirectory(prefix="draftmill-", dir="/dev/shm") as name:
        made = Torture(dataset, Path(name))
        try:
            yield made
        finally:
            for peer in made.peers:
                peer.close()
        print(f"{made.packs} packs, each bit as in a synchronous capture")
        assert list(Path(name).iterdir()) == [], "nothing is left in the folder"


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("split", SPLITS, ids=["joined", "split"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("reader", [0, 1], ids=["same-gpu", "other-gpu"])
def test_overlapped_packs_have_the_bits_of_a_synchronous_capture(
    torture: Torture, reader: int, kind: str, split: bool, depth: int
) -> None:
    if reader >= len(torture.peers):
        pytest.skip("one CUDA device")
    torture.run(kind, split, depth, reader, -(-PACKS // (len(KINDS) * len(SPLITS) * len(DEPTHS))))


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
    peer = Peer(folder, DEVICE)
    found = Overlap(config, started, folder, peer, "target-noise").run(unique)
    peer.close()
    assert found == expected


def test_a_forward_never_waits_for_the_gpu(dataset: Dataset, target: Target) -> None:
    started = make_started(make_config(dataset), dataset, target)
    batch = gather(dataset, batches_of(dataset)[0], edges=EDGES, vocabulary=VOCABULARY)
    try:
        torch.cuda.set_sync_debug_mode("error")
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
