"""A checkpoint on a full disk: said, nothing left of it, written once there is room."""

import errno
import os
import subprocess
import threading
from pathlib import Path

import pytest
from drafter_cases import CPU, tiny_config, tiny_shape

from protocol.messages import Saved, StepAt
from services.dflash.checkpoint import read_checkpoint
from services.dflash.drafter import Drafter
from services.drafter.saver import Saver, Unsaved
from services.drafter.weights import Weights

AT = StepAt(0, 4)


@pytest.fixture
def small_disk(tmp_path: Path):
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")
    folder = tmp_path / "small"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "draftmill-test", str(folder)], check=True)
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def save(saver: Saver, done: threading.Event) -> Saved | Unsaved | None:
    weights = Weights(Drafter(tiny_shape(), seed=1), tiny_config().recipe, CPU)
    done.clear()
    saver.start(AT, weights.snapshot())
    assert done.wait(20.0)
    return saver.take_result()


def test_a_full_disk_leaves_nothing_and_the_next_try_is_whole(small_disk: Path) -> None:
    filler = small_disk / "filler"
    with filler.open("wb", buffering=0) as stream, pytest.raises(OSError, match="No space") as full:
        while True:
            stream.write(bytes(4096))
    assert full.value.errno == errno.ENOSPC
    root, done = small_disk / "checkpoints", threading.Event()
    saver = Saver(root, "drafter-1", tiny_shape(), done.set)
    result = save(saver, done)
    assert isinstance(result, Unsaved) and result.at == AT and "free some space" in result.why
    assert list(root.glob("*")) == []
    filler.unlink()
    again = save(saver, done)
    assert isinstance(again, Saved)
    assert read_checkpoint(root / again.name, again.sha256).state["step"] == 4
