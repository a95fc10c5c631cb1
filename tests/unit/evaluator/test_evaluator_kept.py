"""The files of an evaluator: held while they are read, the best kept, a history without a half line."""

import errno
import shutil

import pytest

from protocol.errors import CheckpointError, DiskFull
from services.evaluator import kept as kept_module
from services.evaluator.kept import BEST, History, Kept


@pytest.fixture
def checkpoints(tmp_path):
    """Makes `ckpt-0-<step>-d` with two files whose content is the step."""

    def make(step: int):
        folder = tmp_path / "checkpoints" / f"ckpt-0-{step}-d"
        folder.mkdir(parents=True)
        for name in ("model.safetensors", "state.json"):
            (folder / name).write_text(str(step))
        return folder

    return make


def line(step: int) -> dict:
    return {"checkpoint": f"ckpt-0-{step}-d", "step": step, "acceptance_length": 1.5}


def read(folder) -> str:
    return (folder / "model.safetensors").read_text() + (folder / "state.json").read_text()


def test_a_held_checkpoint_outlives_its_removal(tmp_path, checkpoints):
    source = checkpoints(4)
    held = Kept(tmp_path).hold(source)
    assert held.joinpath("state.json").samefile(source / "state.json")  # a link: no second copy
    shutil.rmtree(source)
    assert read(held) == "44"
    assert Kept(tmp_path).hold(source) == held  # also for the next process


def test_a_checkpoint_that_is_gone_is_named_and_leaves_nothing(tmp_path, checkpoints):
    source = checkpoints(4)
    shutil.rmtree(source)
    with pytest.raises(CheckpointError, match="ckpt-0-4-d: it was removed"):
        Kept(tmp_path).hold(source)
    assert list((tmp_path / "evaluated").iterdir()) == []


def test_the_best_replaces_the_former_and_the_rest_is_let_go(tmp_path, checkpoints):
    kept = Kept(tmp_path)
    assert kept.best() is None
    for step in (4, 8, 12):
        held = kept.hold(checkpoints(step))
        kept.write_figures(held, line(step))
        if step != 12:
            kept.promote(held)
        kept.release()
    shutil.rmtree(tmp_path / "checkpoints")
    assert read(tmp_path / BEST) == "88"
    assert kept.figures(tmp_path / BEST) == line(8)
    assert [folder.name for folder in (tmp_path / "evaluated").iterdir()] == ["ckpt-0-8-d"]


def test_a_run_that_is_moved_keeps_its_best(tmp_path, checkpoints):
    kept = Kept(tmp_path)
    kept.promote(kept.hold(checkpoints(4)))
    moved = shutil.copytree(tmp_path, tmp_path / "moved", symlinks=True)
    shutil.rmtree(tmp_path / "evaluated")
    assert read(moved / BEST) == "44" and Kept(moved).best() == moved / "evaluated" / "ckpt-0-4-d"


def test_what_was_finished_is_found_after_a_restart_and_what_was_not_is_released(tmp_path, checkpoints):
    kept = Kept(tmp_path)
    done, _half = kept.hold(checkpoints(4)), kept.hold(checkpoints(8))
    kept.write_figures(done, line(4))
    again = Kept(tmp_path)
    assert again.evaluated() == [done]
    again.promote(done)
    again.release()
    assert [folder.name for folder in (tmp_path / "evaluated").iterdir()] == [done.name]


def test_without_hard_links_files_are_copied(tmp_path, checkpoints, monkeypatch):
    def refuse(_source, _name):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(kept_module.os, "link", refuse)
    source = checkpoints(4)
    (source / "optimizer.safetensors").write_text("two thirds of it, which nobody reads")
    held = Kept(tmp_path).hold(source)
    assert sorted(file.name for file in held.iterdir()) == ["model.safetensors", "state.json"]
    assert read(held) == "44" and not held.joinpath("state.json").samefile(source / "state.json")


def test_a_disk_that_is_full_leaves_no_half_copy(tmp_path, checkpoints, monkeypatch):
    def refuse(_source, _name):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(kept_module.os, "link", refuse)
    monkeypatch.setattr(kept_module.shutil, "copyfile", refuse)
    with pytest.raises(DiskFull, match="no room to work in"):
        Kept(tmp_path).hold(checkpoints(4))
    assert list((tmp_path / "evaluated").iterdir()) == []


def test_the_history_loses_half_a_line_and_nothing_else(tmp_path):
    history = History(tmp_path / "acceptance.jsonl")
    assert history.read() == []
    history.append(line(4))
    history.append(line(8))
    with (tmp_path / "acceptance.jsonl").open("a") as file:
        file.write('{"step": 1')
    assert history.read() == [line(4), line(8)]
    history.append(line(12))
    assert history.read() == [line(4), line(8), line(12)]
    with pytest.raises(ValueError, match="not JSON compliant"):
        history.append({"loss": float("nan")})
    assert len(history.read()) == 3


@pytest.mark.parametrize("garbage", [b"\x00\xff\x80", b"[]", b'{"step": 6}', b"", b"[" * 100_000])
def test_what_is_no_evaluation_counts_as_none(tmp_path, checkpoints, garbage):
    history, kept = History(tmp_path / "acceptance.jsonl"), Kept(tmp_path)
    history.append(line(4))
    with (tmp_path / "acceptance.jsonl").open("ab") as file:
        file.write(garbage + b"\n")
    history.append(line(8))
    assert history.read() == [line(4), line(8)]
    held = kept.hold(checkpoints(4))
    (held / "evaluation.json").write_bytes(garbage)
    assert kept.evaluated() == []
    kept.write_figures(held, line(4))
    assert kept.evaluated() == [held]
