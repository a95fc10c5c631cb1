"""Arena files: whole or not at all, sealed or invalid, and read after their owner's death."""

import gc
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.arena import (
    Arena,
    Computing,
    SlotHeader,
    arena_bytes,
    arena_name,
    free_bytes,
    lock_name,
    read_computing,
    sweep,
)
from protocol.errors import ArenaFull, CorruptPack, DecodeError, RetryError, StalePack
from protocol.files import FileLock
from protocol.messages import BatchId, Stamp

HEADER = SlotHeader(BatchId(1, 7), Stamp(2, 40), 900, 2**63 - 1)
COMPUTING = Computing(BatchId(3, 9), Stamp(2, 41))


def arena(folder: Path, kind: str = "shm", incarnation: str = "target-1") -> Arena:
    return Arena.create(folder, incarnation, kind=kind, slots=3, slot_bytes=1000)


def test_a_reader_sees_what_the_writer_sealed(tmp_path: Path) -> None:
    writer = arena(tmp_path)
    reader = Arena.open(tmp_path, "target-1.arena")
    assert (reader.slots, reader.slot_bytes, reader.kind, reader.incarnation) == (3, 1000, "shm", "target-1")
    assert reader.header(1) is None
    writer.payload(1)[:3] = b"abc"
    writer.seal(1, HEADER)
    assert reader.header(1) == HEADER
    assert bytes(reader.payload(1)[:4]) == b"abc\0"
    assert reader.header(0) is None
    assert reader.header(2) is None
    writer.seal(1, HEADER._replace(checksum=None))
    assert reader.header(1) == HEADER._replace(checksum=None)
    writer.invalidate(1)
    assert reader.header(1) is None


def test_its_owner_finds_out_that_the_file_was_cut_or_removed(tmp_path: Path) -> None:
    writer = arena(tmp_path)
    writer.check_file()
    os.truncate(writer.path, 5000)
    with pytest.raises(RetryError, match="was cut to 5,000 bytes"):
        writer.check_file()
    writer.path.unlink()
    with pytest.raises(RetryError, match="was removed by another process"):
        writer.check_file()


def test_payloads_are_apart_from_each_other_and_from_the_headers(tmp_path: Path) -> None:
    writer = arena(tmp_path)
    for slot in range(3):
        writer.seal(slot, HEADER._replace(attempt=Stamp(1, slot)))
        assert len(writer.payload(slot)) == 1000
        writer.payload(slot)[:] = bytes([slot + 1]) * 1000
    assert [writer.payload(slot)[0] for slot in range(3)] == [1, 2, 3]
    assert [writer.payload(slot)[-1] for slot in range(3)] == [1, 2, 3]
    assert [writer.header(slot).attempt.counter for slot in range(3)] == [0, 1, 2]


def test_the_file_is_private_and_has_the_size_announced(tmp_path: Path) -> None:
    for kind in ("shm", "pinned", "cuda_ipc"):
        made = arena(tmp_path, kind, f"target-{kind}")
        found = made.path.stat()
        assert found.st_mode & 0o777 == 0o600
        assert found.st_size == arena_bytes(kind, 3, 1000)
        assert found.st_blocks * 512 >= found.st_size  # allocated, not sparse
    assert arena_bytes("cuda_ipc", 3, 1 << 40) == 8192


def test_a_view_outlives_the_arena_it_came_from(tmp_path: Path) -> None:
    made = arena(tmp_path)
    view = made.payload(0)[:3]
    view[:] = b"abc"
    made.close()
    made.unlink()
    assert mappings(made.path) == 1
    assert bytes(view) == b"abc"
    with pytest.raises(ValueError, match="released"):
        made.header(0)
    del view
    gc.collect()
    assert mappings(made.path) == 0


def mappings(path: Path) -> int:
    """Of that file: other tests may have left one of the same name mapped."""
    return Path("/proc/self/maps").read_text().count(str(path))


def test_an_incarnation_is_never_reused(tmp_path: Path) -> None:
    arena(tmp_path)
    with pytest.raises(FileExistsError):
        arena(tmp_path)


def test_no_space_is_said_at_the_start_and_leaves_nothing(tmp_path: Path) -> None:
    shm = Path("/dev/shm")
    folder = shm if shm.is_dir() and os.access(shm, os.W_OK) else tmp_path
    too_much = free_bytes(folder) + (64 << 30)
    with pytest.raises(ArenaFull, match=r"needs [\d,]+ bytes, [\d,]+ are free; lower target.slots"):
        Arena.create(folder, "draftmill-test-full", kind="shm", slots=1, slot_bytes=too_much)
    assert not (folder / "draftmill-test-full.arena").exists()


def test_what_is_gone_is_stale_and_what_is_wrong_is_corrupt(tmp_path: Path) -> None:
    with pytest.raises(StalePack, match="is gone"):
        Arena.open(tmp_path, "target-0.arena")
    made = arena(tmp_path)
    for name in ("../target-1.arena", "target-1.lock", "..", "."):
        with pytest.raises(DecodeError, match="no name of an arena"):
            Arena.open(tmp_path, name)
    (tmp_path / "other.arena").write_bytes(made.path.read_bytes())
    with pytest.raises(CorruptPack, match="written by b'target-1'"):
        Arena.open(tmp_path, "other.arena")
    (tmp_path / "empty.arena").touch()
    with pytest.raises(CorruptPack, match="too short"):
        Arena.open(tmp_path, "empty.arena")
    (tmp_path / "zero.arena").write_bytes(bytes(8192))
    with pytest.raises(CorruptPack, match="no arena of version"):
        Arena.open(tmp_path, "zero.arena")
    short = arena(tmp_path, incarnation="short")
    os.truncate(short.path, 8192)
    with pytest.raises(StalePack, match="3 slots of 1,000 do not fit its 8,192 bytes"):
        Arena.open(tmp_path, "short.arena")


def test_a_header_of_another_incarnation_is_corrupt(tmp_path: Path) -> None:
    one, two = arena(tmp_path), arena(tmp_path, incarnation="target-2")
    one.seal(0, HEADER)
    two.memory[4096 : 4096 + 128] = one.memory[4096 : 4096 + 128]
    with pytest.raises(CorruptPack, match="not written by target-2"):
        two.header(0)
    two.memory[4096] = 1
    with pytest.raises(CorruptPack, match="not written by target-2"):
        two.header(0)


def test_who_was_computing_is_read_after_death(tmp_path: Path) -> None:
    assert read_computing(tmp_path, "target-1") is None
    made = arena(tmp_path)
    assert read_computing(tmp_path, "target-1") is None
    made.set_computing(COMPUTING)
    made.close()
    assert read_computing(tmp_path, "target-1") == COMPUTING
    Arena.open(tmp_path, "target-1.arena").set_computing(None)
    assert read_computing(tmp_path, "target-1") is None


@settings(deadline=None)
@given(st.binary(max_size=5000))
def test_a_damaged_file_accuses_nobody(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    folder = tmp_path_factory.mktemp("damaged")
    (folder / "target-1.arena").write_bytes(content)
    assert read_computing(folder, "target-1") is None
    with pytest.raises(CorruptPack):
        Arena.open(folder, "target-1.arena")


def test_the_handle_of_a_ring_is_kept(tmp_path: Path) -> None:
    made = arena(tmp_path, "cuda_ipc")
    made.ring_handle = bytes(range(64))
    assert Arena.open(tmp_path, "target-1.arena").ring_handle == bytes(range(64))


def test_sweeping_removes_the_dead_and_nothing_else(tmp_path: Path) -> None:
    for incarnation in ("alive-1", "dead-1", "kept-1", "unlocked-1"):
        arena(tmp_path, incarnation=incarnation)
    for name in ("dead-1.lock", "dead-2.inbox", "dead-2.inbox.lock", "control", "control.lock", "notes.txt"):
        (tmp_path / name).touch()
    (tmp_path / lock_name("kept-1")).touch()
    with FileLock(tmp_path / lock_name("alive-1")):
        swept = sweep(tmp_path, keep={"kept-1"})
    assert swept.incarnations == ("dead-1", "dead-2", "unlocked-1")
    assert swept.freed_bytes >= 2 * arena_bytes("shm", 3, 1000)
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {
        *(arena_name("alive-1"), lock_name("alive-1"), arena_name("kept-1"), lock_name("kept-1")),
        *("control", "control.lock", "notes.txt"),
    }
    assert sweep(tmp_path / "nowhere") == ((), 0)
