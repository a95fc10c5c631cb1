"""A checkpoint is whole or refused: every file, truncated or altered, at any byte."""

import json

import pytest
import torch
from dflash_tiny import drafter_config

from protocol import files as files_module
from protocol.errors import CheckpointError
from services.dflash.checkpoint import (
    checkpoint_name,
    is_training_checkpoint,
    read_checkpoint,
    write_checkpoint,
)
from services.dflash.drafter import Drafter


def write(folder, seed=1):
    drafter = Drafter(drafter_config(), seed=seed)
    weights = {name: tensor.detach() for name, tensor in drafter.state_dict().items()}
    moments = {f"exp_avg.{name}": torch.full_like(tensor, 0.5) for name, tensor in weights.items()}
    sha256 = write_checkpoint(
        folder, weights=weights, optimizer=moments, state={"timeline": 2, "step": 7}, drafter=drafter.config
    )
    return sha256, weights, moments


def test_what_was_written_is_read(tmp_path):
    folder = tmp_path / "checkpoints" / checkpoint_name(2, 7, "drafter-3f9c")
    assert folder.name == "ckpt-2-7-drafter-3f9c"
    sha256, weights, moments = write(folder)
    found = read_checkpoint(folder, sha256)
    assert (
        found.state == {"timeline": 2, "step": 7}
        and found.drafter == drafter_config()
        and found.sha256 == sha256
    )
    for mine, theirs in ((found.weights, weights), (found.optimizer, moments)):
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(tensor, theirs[name]) for name, tensor in mine.items())
    assert is_training_checkpoint(folder)
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


def test_equal_content_has_an_equal_hash(tmp_path):
    assert write(tmp_path / "a")[0] == write(tmp_path / "b")[0] != write(tmp_path / "c", seed=2)[0]


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "state.json"])
@pytest.mark.parametrize("damage", ["truncated", "altered", "missing"])
def test_damage_is_named(tmp_path, name, damage):
    sha256, *_ = write(tmp_path / "ckpt")
    file = tmp_path / "ckpt" / name
    content = file.read_bytes()
    if damage == "missing":
        file.unlink()
    elif damage == "truncated":
        file.write_bytes(content[:-1])
    else:
        middle = len(content) // 2
        file.write_bytes(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])
    with pytest.raises(
        CheckpointError, match=name if name != "state.json" or damage == "missing" else "SHA-256"
    ):
        read_checkpoint(tmp_path / "ckpt", sha256)


def test_truncated_state_is_refused_without_a_recorded_hash(tmp_path):
    write(tmp_path / "ckpt")
    state = tmp_path / "ckpt" / "state.json"
    state.write_text(state.read_text()[:100])
    with pytest.raises(CheckpointError, match="not JSON"):
        read_checkpoint(tmp_path / "ckpt", None)
    state.write_text(json.dumps({"state": {}}))
    with pytest.raises(CheckpointError, match="missing"):
        read_checkpoint(tmp_path / "ckpt", None)


def test_an_existing_checkpoint_is_never_overwritten(tmp_path):
    sha256, *_ = write(tmp_path / "ckpt")
    with pytest.raises(CheckpointError, match="exists"):
        write(tmp_path / "ckpt", seed=2)
    read_checkpoint(tmp_path / "ckpt", sha256)


def test_what_fails_after_the_renaming_can_be_tried_again_under_the_same_name(tmp_path, monkeypatch):
    """The last checkpoint of a run has no later one to make up for it."""
    folder, sync = tmp_path / "checkpoints" / "ckpt-2-7-d", files_module.sync_folder
    failed = []

    def fail_once(path):
        if path == folder.parent and not failed:
            failed.append(path)
            raise OSError(5, "Input/output error")
        sync(path)

    monkeypatch.setattr(files_module, "sync_folder", fail_once)
    with pytest.raises(OSError, match="Input/output"):
        write(folder)
    assert failed and list(folder.parent.iterdir()) == []
    sha256, _, _ = write(folder)
    assert read_checkpoint(folder, sha256).sha256 == sha256


def test_a_failed_write_leaves_nothing(tmp_path):
    shared = torch.zeros(4)
    with pytest.raises(RuntimeError, match="share memory"):
        write_checkpoint(
            tmp_path / "ckpt",
            weights={"a": shared, "b": shared},
            optimizer={},
            state={},
            drafter=drafter_config(),
        )
    assert list(tmp_path.iterdir()) == []
