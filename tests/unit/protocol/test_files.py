"""Locks of real processes, really killed; folders and writes on a real disk."""

import fcntl
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from protocol import files as files_module
from protocol.errors import AlreadyRunning, ConfigError, RetryError
from protocol.files import (
    FileLock,
    if_dead,
    is_alive,
    private_folder,
    private_lock,
    publish_folder,
    write_durably,
)

HOLDER = """
import sys
from pathlib import Path
from protocol.files import FileLock
lock = FileLock(Path(sys.argv[1])).acquire()
sys.stdout.write("held\\n")
sys.stdout.flush()
sys.stdin.read()
"""


def test_a_lock_is_alive_while_held_and_dead_after(tmp_path: Path) -> None:
    path = tmp_path / "x.lock"
    assert not is_alive(path)
    with FileLock(path) as lock:
        assert lock.held
        assert is_alive(path)
        assert path.stat().st_mode & 0o777 == 0o600
    assert not is_alive(path)
    assert path.exists()


def test_a_second_owner_is_refused(tmp_path: Path) -> None:
    with FileLock(tmp_path / "x.lock"), pytest.raises(AlreadyRunning, match="held by another"):
        FileLock(tmp_path / "x.lock").acquire()
    FileLock(tmp_path / "x.lock").acquire().release(unlink=True)
    assert not (tmp_path / "x.lock").exists()


def test_a_killed_owner_is_dead_at_once(tmp_path: Path) -> None:
    path = tmp_path / "x.lock"
    owner = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == "held\n"
        assert is_alive(path)
        owner.send_signal(signal.SIGKILL)
        owner.wait(timeout=10)
    assert not is_alive(path)
    FileLock(path).acquire().release()


def test_probes_never_keep_an_owner_out_nor_make_one_look_dead(tmp_path: Path) -> None:
    path = tmp_path / "x.lock"
    path.touch(0o600)
    stop = threading.Event()

    def probe() -> None:
        while not stop.is_set():
            is_alive(path)

    probers = [threading.Thread(target=probe) for _ in range(2)]
    for prober in probers:
        prober.start()
    try:
        for _ in range(100):
            with FileLock(path):
                assert is_alive(path)
    finally:
        stop.set()
        for prober in probers:
            prober.join()


def test_an_owner_waits_for_a_probe_that_rests_in_the_middle(tmp_path: Path) -> None:
    path = tmp_path / "x.lock"
    path.touch(0o600)
    probe = os.open(path, os.O_RDONLY)
    fcntl.flock(probe, fcntl.LOCK_SH)
    with ThreadPoolExecutor(1) as pool:
        owner = pool.submit(FileLock(path).acquire)
        with pytest.raises(TimeoutError):
            owner.result(0.2)
        os.close(probe)
        owner.result(4.0).release()


def test_who_comes_while_the_dead_are_removed_gets_a_file_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "x.lock"
    FileLock(path).acquire().release()
    with ThreadPoolExecutor(1) as pool:
        with if_dead(path) as dead:
            assert dead
            newcomer = pool.submit(FileLock(path).acquire)
            time.sleep(0.05)
            assert not newcomer.done()
            path.unlink()
        assert newcomer.result(10).held and is_alive(path)
    with if_dead(path) as dead:
        assert not dead
    with if_dead(tmp_path / "never.lock") as dead:
        assert dead


@pytest.mark.parametrize("times", [2, 100])
def test_a_lock_is_taken_in_a_folder_that_others_remove(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    """Between making it and making a file in it; but not for ever."""
    make, removed = files_module.private_folder, []

    def make_and_lose(path: Path) -> Path:
        make(path)
        if len(removed) < times:
            removed.append(path)
            path.rmdir()
        return path

    monkeypatch.setattr(files_module, "private_folder", make_and_lose)
    if times == 2:
        assert private_lock(tmp_path / "private", "x.lock").held and len(removed) == 2
    else:
        with pytest.raises(RetryError, match="removed again and again"):
            private_lock(tmp_path / "private", "x.lock")


def test_a_folder_that_is_removed_while_it_is_made_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, removed = files_module._make_folders, []

    def make_and_lose(path: Path) -> None:
        make(path)
        if not removed:
            removed.append(path)
            path.rmdir()

    monkeypatch.setattr(files_module, "_make_folders", make_and_lose)
    assert private_folder(tmp_path / "private").is_dir() and removed


def test_an_unlinked_lock_is_not_mistaken_for_the_new_one(tmp_path: Path) -> None:
    path = tmp_path / "x.lock"
    first = FileLock(path).acquire()
    first.release(unlink=True)
    with FileLock(path):
        assert is_alive(path)


def test_a_private_folder_is_made_and_checked(tmp_path: Path) -> None:
    path = private_folder(tmp_path / "a" / "b")
    assert path.stat().st_mode & 0o777 == 0o700
    assert private_folder(path) == path
    path.chmod(0o750)
    with pytest.raises(ConfigError, match="chmod 700"):
        private_folder(path)
    (tmp_path / "link").symlink_to(tmp_path / "a")
    with pytest.raises(ConfigError, match="symbolic link"):
        private_folder(tmp_path / "link")
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="no folder"):
        private_folder(tmp_path / "file")
    with pytest.raises(ConfigError, match="file/below"):
        private_folder(tmp_path / "file" / "below")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_a_folder_of_another_user_is_refused(tmp_path: Path) -> None:
    path = private_folder(tmp_path / "a")
    os.chown(path, 12345, 12345)
    with pytest.raises(ConfigError, match="user 12345"):
        private_folder(path)


def test_a_durable_write_replaces_all_or_nothing(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    write_durably(path, b"one")
    write_durably(path, b"two")
    assert path.read_bytes() == b"two"
    assert path.stat().st_mode & 0o777 == 0o600
    assert [path.name for path in tmp_path.iterdir()] == ["state.json"]


def test_a_failed_write_leaves_the_old_file_and_nothing_aside(tmp_path: Path) -> None:
    (tmp_path / "state.json").mkdir()
    with pytest.raises(IsADirectoryError):
        write_durably(tmp_path / "state.json", b"new")
    assert [path.name for path in tmp_path.iterdir()] == ["state.json"]


def test_a_folder_is_published_whole_and_replaces_nothing(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name / "deep").mkdir(parents=True)
        (tmp_path / name / "deep" / "file").write_text(name)
    publish_folder(tmp_path / "one", tmp_path / "final")
    assert (tmp_path / "final/deep/file").read_text() == "one"
    with pytest.raises(OSError, match="not empty"):
        publish_folder(tmp_path / "two", tmp_path / "final")
    assert (tmp_path / "final/deep/file").read_text() == "one"
