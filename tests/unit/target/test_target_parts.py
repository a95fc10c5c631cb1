"""The small parts: counters, slabs, blame, devices."""

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from protocol.arena import Computing, read_computing
from protocol.errors import ConfigError
from protocol.messages import BatchId, Stamp
from services.config.schema import Config
from services.target.board import Job
from services.target.copier import Blame, Slabs
from services.target.profile import Totals
from services.target.start import device_of
from services.transport.writer import SlotWriter


def test_phases_count_also_what_ends_in_an_error() -> None:
    totals = Totals()
    with pytest.raises(ValueError, match="x"), totals.phase("copy"):
        raise ValueError("x")
    assert totals.snapshot()["phase_copy_seconds"] > 0


def test_the_oldest_forward_is_blamed(tmp_path: Path) -> None:
    device = torch.device("cpu")
    writer = SlotWriter.create(tmp_path, "target-1", slots=1, slot_bytes=64, kind="shm", device=device)
    blame = Blame(writer)
    first, second = (Job(BatchId(0, n), Stamp(1, n), (n,), 0) for n in (1, 2))
    seen = []
    for step in (lambda: blame.begin(first), lambda: blame.begin(second), lambda: blame.end(first)):
        step()
        seen.append(read_computing(tmp_path, "target-1"))
    blame.begin(first)
    blame.only(first)  # the host failed in it, with another on its way
    assert read_computing(tmp_path, "target-1") == Computing(BatchId(0, 1), Stamp(1, 1))
    blame.begin(second)
    blame.only(second)
    blame.end(first)  # it ended well meanwhile
    assert read_computing(tmp_path, "target-1") == Computing(BatchId(0, 2), Stamp(1, 2))
    blame.end(second)
    assert seen == [Computing(BatchId(0, n), Stamp(1, n)) for n in (1, 1, 2)]
    assert read_computing(tmp_path, "target-1") is None
    writer.close()


def test_who_waits_for_a_slab_gets_none_when_the_target_leaves() -> None:
    slabs = Slabs([])
    taken: list[object] = []
    thread = threading.Thread(target=lambda: taken.append(slabs.take()))
    thread.start()
    slabs.close()
    thread.join(10)
    assert taken == [None]


def test_devices_are_named_by_the_option(make_config: Callable[..., Config]) -> None:
    config = make_config(target={"gpus": ("2", "cpu", "cuda:1"), "count": 3})
    assert [str(device_of(config, index)) for index in (0, 1, 2, None)] == [
        "cuda:2",
        "cpu",
        "cuda:1",
        "cuda:2",
    ]
    with pytest.raises(ConfigError, match=r"target 3: target.gpus = 2, cpu, cuda:1 names 3"):
        device_of(config, 3)
    if not torch.cuda.is_available():
        assert device_of(make_config(), 1) == torch.device("cpu")
