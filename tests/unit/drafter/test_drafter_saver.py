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
from services.drafter.weights import Snapshot, Weights

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


class WrittenMeanwhile(Saver):
    """Has its result as soon as somebody has seen that there is none."""

    def __init__(self, folder: Path, written: threading.Event) -> None:
        self.asked, self.written = threading.Event(), written
        self.kept: Saved | Unsaved | None = None
        super().__init__(folder, "drafter-1", tiny_shape(), written.set)

    @property
    def _result(self) -> Saved | Unsaved | None:
        found = self.kept
        if found is None and self._thread is not threading.current_thread():
            self.asked.set()
            assert self.written.wait(20.0)
        return found

    @_result.setter
    def _result(self, result: Saved | Unsaved | None) -> None:
        self.kept = result

    def _write(self, at: StepAt, snapshot: Snapshot) -> None:
        assert self.asked.wait(20.0)
        super()._write(at, snapshot)


def test_a_result_that_comes_while_it_is_looked_for_is_kept(tmp_path: Path) -> None:
    saver = WrittenMeanwhile(tmp_path, threading.Event())
    saver.start(AT, Weights(Drafter(tiny_shape(), seed=1), tiny_config().recipe, CPU).snapshot())
    assert saver.take_result() is None
    assert isinstance(saver.take_result(), Saved)


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
