"""Places taken by roles that were not told theirs."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from protocol.errors import AlreadyRunning
from services.config.schema import Config
from services.coordinator.sizing import devices
from services.lifecycle import arena_folder
from services.place import claim_place, forget_places, places


@pytest.fixture
def config(tmp_path):
    with tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
        yield Config(
            model={"path": "m"}, data={"path": "d"}, run={"dir": tmp_path}, arena={"dir": memory},
            target={"count": 2}, drafter={"count": 3, "gpus": ("5", "6", "7", "8")},
        )  # fmt: skip


def test_the_lowest_free_place_is_taken(config):
    first, index = claim_place(config, "target")
    second, other = claim_place(config, "target")
    assert (index, other) == (0, 1)
    first.release(unlink=True)
    assert claim_place(config, "target")[1] == 0
    second.release()


def test_roles_have_places_of_their_own_and_a_device_each(config):
    assert places(config, "drafter") == 3  # not four: a device more than roles makes no place
    assert devices(config) == (("", ""), ("cuda:5", "cuda:6", "cuda:7"))
    held = [claim_place(config, "drafter") for _ in range(3)]
    assert [index for _, index in held] == [0, 1, 2]
    assert claim_place(config, "target")[1] == 0


def test_no_place_is_an_error_that_names_the_options(config):
    held = [claim_place(config, "target") for _ in range(2)]
    with pytest.raises(AlreadyRunning, match=r"each of its 2 places .* target\.count"):
        claim_place(config, "target")
    assert held


def test_a_killed_process_gives_its_place_back(config):
    code = (
        "import sys; from services.config.load import load; from services.place import claim_place\n"
        "lock, index = claim_place(load(flags=[a.split('=') for a in sys.argv[1:]], environ={}).config, "
        "'target')\nprint(index, flush=True); sys.stdin.read()"
    )
    words = [
        "--model.path=m", "--data.path=d", f"--run.dir={config.run.dir}", f"--arena.dir={config.arena.dir}",
    ]  # fmt: skip
    held = subprocess.Popen(
        [sys.executable, "-c", code, *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[3],
    )  # fmt: skip
    assert held.stdout.readline() == b"0\n"
    assert claim_place(config, "target")[1] == 1
    held.kill()
    held.communicate()
    assert claim_place(config, "target")[1] == 0


def test_a_role_that_still_loads_keeps_its_place_when_the_coordinator_leaves(config):
    lock, _ = claim_place(config, "target")
    forget_places(arena_folder(config))
    assert claim_place(config, "target")[1] == 1
    assert lock.held


def test_nothing_is_left_of_places_at_the_end(config):
    claim_place(config, "target")[0].release()
    forget_places(arena_folder(config))
    assert list(arena_folder(config).iterdir()) == []
