"""Checkpoints at a local folder and at an S3 server, whole or not at all."""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
import subprocess
import threading
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import fsspec
import pytest

from protocol.errors import ConfigError
from services.coordinator.upload import LAST_STILL_S, MARK, Uploader, protocols_of


def checkpoint(root, name: str, size: int = 1000) -> None:
    (root / name).mkdir(parents=True)
    (root / name / "model.safetensors").write_bytes(bytes(range(256)) * (size // 256 + 1))
    (root / name / "checkpoint.json").write_text("{}")


def settle(uploader: Uploader, names: list[str]) -> None:
    """Offer again and again, as the coordinator does, until all is there."""

    def settled() -> bool:
        uploader.offer(names)
        return not uploader.pending

    until(settled, uploader)


def until(reached: Callable[[], bool], uploader: Uploader) -> None:
    pause, deadline_s = subprocess.Popen(["sleep", "60"]), time.monotonic() + 30
    try:
        while not reached():
            assert time.monotonic() < deadline_s, f"{uploader.pending} pending, {uploader.errors} errors"
            with contextlib.suppress(subprocess.TimeoutExpired):
                pause.wait(0.02)
    finally:
        pause.kill()
        pause.wait()


def test_recorded_checkpoints_arrive_with_their_mark_last(tmp_path):
    root, there = tmp_path / "checkpoints", tmp_path / "there"
    for step in (4, 8):
        checkpoint(root, f"ckpt-0-{step}-d")
    uploader = Uploader(str(there), root)
    settle(uploader, ["ckpt-0-4-d", "ckpt-0-8-d"])
    uploader.close()
    for step in (4, 8):
        folder = there / f"ckpt-0-{step}-d"
        sizes = json.loads((folder / MARK).read_text())
        assert sizes == {name: (folder / name).stat().st_size for name in sizes}
        assert set(sizes) == {"model.safetensors", "checkpoint.json"}
        assert {file.name for file in folder.iterdir()} == {*sizes, MARK}
    assert uploader.errors == 0


def test_what_is_there_is_not_sent_again(tmp_path):
    root, there = tmp_path / "checkpoints", tmp_path / "there"
    checkpoint(root, "ckpt-0-4-d")
    settle(Uploader(str(there), root), ["ckpt-0-4-d"])
    before = (there / "ckpt-0-4-d" / "model.safetensors").stat().st_mtime_ns
    settle(Uploader(str(there), root), ["ckpt-0-4-d"])
    assert (there / "ckpt-0-4-d" / "model.safetensors").stat().st_mtime_ns == before


def offered_to_a_file(tmp_path) -> tuple[Uploader, Path]:
    """ckpt-0-4-d on its way to a folder whose name a file has: it fails until that is gone."""
    root, there = tmp_path / "checkpoints", tmp_path / "there"
    checkpoint(root, "ckpt-0-4-d")
    there.write_text("a file where a folder should be")
    uploader = Uploader(str(there), root)
    uploader.offer(["ckpt-0-4-d"])
    return uploader, there


def test_a_copy_that_fails_leaves_no_mark_and_is_tried_again(tmp_path):
    uploader, there = offered_to_a_file(tmp_path)
    until(lambda: uploader.errors > 0, uploader)
    there.unlink()
    settle(uploader, ["ckpt-0-4-d"])
    assert (there / "ckpt-0-4-d" / MARK).exists()


def test_a_copy_that_failed_stays_pending_without_another_offer(tmp_path):
    """A coordinator that leaves waits for its last checkpoint as long as it is pending."""
    uploader, there = offered_to_a_file(tmp_path)
    until(lambda: uploader.errors > 0 and not uploader.busy, uploader)
    assert uploader.pending == 1
    there.unlink()
    until(lambda: not uploader.pending, uploader)
    assert (there / "ckpt-0-4-d" / MARK).exists()
    uploader.close()


def test_who_is_in_a_hurry_does_not_wait_for_a_long_pause(tmp_path, monkeypatch):
    """It had failed so often that the next try is minutes away."""
    monkeypatch.setattr("services.coordinator.upload.FIRST_PAUSE_S", 60.0)
    uploader, there = offered_to_a_file(tmp_path)
    until(lambda: uploader.errors == 1 and not uploader.busy, uploader)
    there.unlink()
    uploader.hurry()
    until(lambda: not uploader.pending, uploader)
    assert (there / "ckpt-0-4-d" / MARK).exists()
    uploader.close()


def test_who_leaves_waits_for_what_moves_but_not_for_what_hangs_or_fails_on(tmp_path, monkeypatch):
    root, there = tmp_path / "checkpoints", tmp_path / "there"
    checkpoint(root, "ckpt-0-4-d", size=4000)
    reached, go_on = threading.Event(), threading.Event()
    pour = Uploader._pour

    def hang(self, source, sink):
        pour(self, source, sink)
        reached.set()
        go_on.wait()

    monkeypatch.setattr(Uploader, "_pour", hang)
    uploader = Uploader(str(there), root)
    uploader.offer(["ckpt-0-4-d"])
    assert reached.wait(30)
    uploader._moved_s -= LAST_STILL_S
    uploader.hurry()  # what rested before is not held against it
    assert uploader.arriving
    uploader.look()
    assert uploader.errors == 0
    uploader._moved_s -= LAST_STILL_S
    assert not uploader.arriving and uploader.pending
    uploader.look()
    uploader.look()
    assert uploader.errors == 1
    monkeypatch.undo()
    go_on.set()
    until(lambda: not uploader.pending, uploader)
    assert not uploader.arriving
    uploader.close()


def test_who_leaves_does_not_wait_after_three_more_failures(tmp_path):
    uploader, _there = offered_to_a_file(tmp_path)
    until(lambda: uploader.errors > 0, uploader)
    failed = uploader.errors
    uploader.hurry()
    until(lambda: not uploader.arriving, uploader)
    assert uploader.pending and uploader.errors >= failed + 3
    uploader.close()


def test_a_service_is_met_in_the_thread_and_again_if_it_is_not_there(tmp_path, monkeypatch):
    """Some log in as soon as they are made: that may take long, or fail for now."""
    root, there = tmp_path / "checkpoints", tmp_path / "there"
    checkpoint(root, "ckpt-0-4-d")
    connect, threads = fsspec.core.url_to_fs, []

    def refuse_once(url):
        threads.append(threading.current_thread().name)
        if len(threads) == 1:
            raise TypeError("no connection")
        return connect(url)

    monkeypatch.setattr("services.coordinator.upload.fsspec.core.url_to_fs", refuse_once)
    uploader = Uploader(str(there), root)
    assert threads == []
    settle(uploader, ["ckpt-0-4-d"])
    assert threads == ["upload", "upload"] and uploader.errors == 1
    assert (there / "ckpt-0-4-d" / MARK).exists()
    uploader.close()


def test_an_unknown_protocol_is_refused_by_name(tmp_path):
    with pytest.raises(ConfigError, match=r"checkpoint\.upload = nowhere://x"):
        Uploader("nowhere://x", tmp_path)
    with pytest.raises(ConfigError, match="nope"):
        Uploader("nope::memory://x", tmp_path)
    assert [protocols_of(url) for url in ("/a/b", "s3://b/c", "simplecache::memory://x")] == [
        ["file"], ["s3"], ["simplecache", "memory"],
    ]  # fmt: skip


@pytest.fixture
def s3(monkeypatch):
    """A bucket of a local server; s3fs takes the address from its own variables."""
    pytest.importorskip("s3fs", reason="needs the extra s3")
    server = shutil.which("moto_server")
    if server is None:
        pytest.skip("needs moto_server (PyPI: moto[server])")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    process = subprocess.Popen(
        [server, "-H", "127.0.0.1", "-p", str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        env={"PATH": "/usr/local/bin:/usr/bin:/bin"},
    )  # fmt: skip
    url = f"http://127.0.0.1:{port}"
    for name, value in (("AWS_ACCESS_KEY_ID", "test"), ("AWS_SECRET_ACCESS_KEY", "test"),
                        ("AWS_DEFAULT_REGION", "us-east-1"), ("AWS_ENDPOINT_URL", url)):  # fmt: skip
        monkeypatch.setenv(name, value)
    try:
        deadline_s = time.monotonic() + 60
        while not _answers(url):
            assert process.poll() is None and time.monotonic() < deadline_s, "moto_server does not answer"
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0.1)
        urllib.request.urlopen(urllib.request.Request(f"{url}/bucket", method="PUT"), timeout=10).close()
        yield url
    finally:
        process.kill()
        process.wait()


def _answers(url: str) -> bool:
    try:
        urllib.request.urlopen(f"{url}/moto-api/", timeout=1).close()
    except OSError:
        return False
    return True


def test_an_s3_bucket_gets_whole_objects(s3, tmp_path):
    root = tmp_path / "checkpoints"
    checkpoint(root, "ckpt-0-4-d", size=9 << 20)  # more than one part
    uploader = Uploader("s3://bucket/run", root)
    settle(uploader, ["ckpt-0-4-d"])
    uploader.close()
    assert uploader.errors == 0
    for name in ("model.safetensors", "checkpoint.json"):
        with urllib.request.urlopen(f"{s3}/bucket/run/ckpt-0-4-d/{name}", timeout=10) as answer:
            assert answer.read() == (root / "ckpt-0-4-d" / name).read_bytes()
    with urllib.request.urlopen(f"{s3}/bucket/run/ckpt-0-4-d/{MARK}", timeout=10) as answer:
        assert json.load(answer)["model.safetensors"] > 9 << 20
