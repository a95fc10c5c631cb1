"""Each arena kind between two real processes on a GPU: every bit of every pack, and what a death leaves."""

import logging
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transport_peer import pack

from protocol.arena import Arena
from protocol.errors import ArenaFull, ConfigError
from protocol.messages import BatchId, Stamp
from services.transport.pinned import pin
from services.transport.reader import SlotReader
from services.transport.writer import SlotWriter

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

PEER = Path(__file__).with_name("transport_peer.py")
ROOT = Path(__file__).parents[2]
PACKS, SLOTS = 12, 3
PATIENCE_S = 60.0  # a deadline, not a wait


@pytest.fixture
def folder() -> Iterator[Path]:
    """In /dev/shm, as in a run: pinning and tmpfs have to get on."""
    with tempfile.TemporaryDirectory(prefix="draftmill-", dir="/dev/shm") as name:
        yield Path(name)


def start(*arguments: object, expandable: bool = True) -> subprocess.Popen[str]:
    settings = f"expandable_segments:{expandable}"
    environment = os.environ | {"PYTORCH_ALLOC_CONF": settings, "PYTORCH_CUDA_ALLOC_CONF": settings}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), environment.get("PYTHONPATH", "")])
    return subprocess.Popen(
        [sys.executable, str(PEER), *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )


def ask(peer: subprocess.Popen[str], line: str) -> str:
    assert peer.stdin is not None
    peer.stdin.write(line if line.endswith("\n") else line + "\n")
    peer.stdin.flush()
    return hear(peer)


def hear(peer: subprocess.Popen[str]) -> str:
    """Its next line; one that says nothing is killed, so that no test waits for ever."""
    assert peer.stdout is not None
    watch = threading.Timer(PATIENCE_S, peer.kill)
    watch.start()
    line = peer.stdout.readline()
    watch.cancel()
    assert line, f"the peer ended with status {peer.wait(timeout=PATIENCE_S)}"
    return line.strip()


def send_all(target: subprocess.Popen[str], drafter: subprocess.Popen[str]) -> None:
    line = hear(target)
    for _ in range(SLOTS - 1):
        assert ask(drafter, line) == "ok"
        line = hear(target)
    for _ in range(PACKS - SLOTS):
        assert ask(drafter, line) == "ok"
        line = ask(target, "next")
    assert ask(drafter, line) == "ok"


def exchange(folder: Path, kind: str, split: str, devices: tuple[str, str], expandable: bool) -> None:
    with (
        start("target", folder, kind, split, devices[0], PACKS, SLOTS, expandable=expandable) as target,
        start("drafter", folder, devices[1], expandable=expandable) as drafter,
    ):
        assert hear(target) == f"{kind} {kind == 'pinned'}"
        send_all(target, drafter)
        assert drafter.stdin is not None
        drafter.stdin.close()
        assert hear(drafter) == "mapped []"
        assert target.stdin is not None
        target.stdin.write("done\n" * SLOTS)
        target.stdin.flush()
        assert hear(target) == "left ['target-gpu.lock']"
        assert (target.wait(timeout=PATIENCE_S), drafter.wait(timeout=PATIENCE_S)) == (0, 0)


@pytest.mark.parametrize("expandable", [True, False], ids=["expandable", "plain"])
@pytest.mark.parametrize("split", ["joined", "split"])
@pytest.mark.parametrize("kind", ["shm", "pinned", "cuda_ipc"])
def test_every_bit_arrives(folder: Path, kind: str, split: str, expandable: bool) -> None:
    exchange(folder, kind, split, ("cuda:0", "cuda:0"), expandable)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one CUDA device")
@pytest.mark.parametrize("kind", ["pinned", "cuda_ipc"])
def test_every_bit_arrives_on_another_gpu(folder: Path, kind: str) -> None:
    exchange(folder, kind, "split", ("cuda:0", "cuda:1"), expandable=True)


@pytest.mark.parametrize(("kind", "found"), [("pinned", "ok"), ("cuda_ipc", "StalePack")])
def test_what_a_dead_target_leaves(folder: Path, kind: str, found: str) -> None:
    """Host memory outlives its writer once it is mapped; a ring does not, and is never trained on."""
    with (
        start("target", folder, kind, "joined", "cuda:0", PACKS, SLOTS) as target,
        start("drafter", folder, "cuda:0") as drafter,
    ):
        hear(target)
        lines = [hear(target) for _ in range(SLOTS)]
        assert ask(drafter, lines[0]) == "ok"
        target.kill()
        target.wait(timeout=PATIENCE_S)
        assert ask(drafter, lines[1]) == found


def test_a_refused_pin_costs_speed_and_nothing_else(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    device = torch.device("cuda:0")
    arena = Arena.create(folder, "target-1", kind="pinned", slots=1, slot_bytes=1 << 20)
    unpin = pin(arena, device, None)
    assert unpin is not None
    with caplog.at_level(logging.WARNING):
        assert pin(arena, device, None) is None  # the same memory twice
    assert "not pinned" in caplog.text
    assert float(torch.ones(8, device=device).sum()) == 8.0  # no error is left pending
    unpin()


def test_a_ring_larger_than_the_gpu_is_refused_with_numbers(folder: Path) -> None:
    with pytest.raises(ArenaFull, match=r"needs [\d,]+ bytes of cuda:0, [\d,]+ are free; lower target.slots"):
        SlotWriter.create(
            folder, "target-1", slots=1024, slot_bytes=1 << 31, kind="cuda_ipc", device=torch.device("cuda:0")
        )
    assert list(folder.iterdir()) == []


def test_auto_pins_and_moves_to_the_gpu_when_the_folder_is_too_small(folder: Path) -> None:
    device = torch.device("cuda")
    small = SlotWriter.create(folder, "target-1", slots=1, slot_bytes=1 << 20, kind="auto", device=device)
    assert small.kind == "pinned"
    small.close()
    free = os.statvfs(folder).f_bavail * os.statvfs(folder).f_frsize
    if free > torch.cuda.mem_get_info()[0] // 2:
        pytest.skip("this /dev/shm is larger than the GPU")
    large = SlotWriter.create(folder, "target-2", slots=1, slot_bytes=free + 1, kind="auto", device=device)
    assert large.kind == "cuda_ipc"
    large.close()


def test_a_drafter_on_a_cpu_cannot_read_a_ring(folder: Path) -> None:
    device = torch.device("cuda:0")
    writer = SlotWriter.create(
        folder, "target-1", slots=1, slot_bytes=1 << 24, kind="cuda_ipc", device=device
    )
    ready = torch.cuda.Event()
    tensors = pack(0, False, device)
    ready.record()
    descriptor = writer.write(0, BatchId(0, 0), Stamp(1, 0), tensors, ready=ready)
    with pytest.raises(ConfigError, match="pinned"):
        SlotReader(folder, torch.device("cpu")).open(descriptor)
    writer.close()
