"""The file a target keeps its packs in: who wrote which slot for which attempt, and what ran when it died.

    0        file header   magic, version, kind, slots, slot bytes, incarnation, GPU ring handle
    1024     computing     the batch and attempt in the forward right now, or none
    4096     slot headers  128 bytes each: magic, incarnation, attempt, batch, bytes, checksum
    aligned  payloads      one a slot, each on its own pages; none if they live in GPU memory

One file per incarnation, `<incarnation>.arena`, allocated whole at the start: a full tmpfs is an error
then, not a SIGBUS later. 0600, never inherited, never a `multiprocessing.shared_memory`, whose tracker
unlinks under other processes. A slot header is invalidated before the first byte of a pack is written
and sealed after the last: a check, not a synchronisation, which is the message's task.

Mapping 1 GiB costs 0.1 s once; sealing a slot 3 us. Torch-free.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import mmap
import os
import struct
from collections.abc import Collection
from pathlib import Path
from typing import Literal, NamedTuple, Self

from protocol.descriptors import align
from protocol.errors import ArenaFull, CorruptPack, DecodeError, RetryError, StalePack
from protocol.files import FILE_MODE, if_dead
from protocol.messages import BatchId, Stamp

Kind = Literal["shm", "pinned", "cuda_ipc"]
KINDS: tuple[Kind, ...] = ("shm", "pinned", "cuda_ipc")
PAGE_BYTES = 4096
HANDLE_BYTES = 64

_MAGIC = b"DRAFTMIL"
_VERSION = 1
_FILE = struct.Struct(f"<8sIIQQB128s{HANDLE_BYTES}s")
_HANDLE_AT = _FILE.size - HANDLE_BYTES
_COMPUTING_AT = 1024
_COMPUTING = struct.Struct("<4Q")  # after one byte that says whether it holds
_MOST_OF_A_LEDGER = 2**63 - 1
_SLOT_MAGIC = b"PACKHERE"
_SLOT_INVALID = bytes(len(_SLOT_MAGIC))
_SLOT = struct.Struct("<16s6QB")  # after the magic
_SLOT_HEADER_BYTES = 128
_SUFFIXES = (".arena", ".inbox", ".inbox.lock", ".lock")


class SlotHeader(NamedTuple):
    """What a sealed slot holds."""

    batch: BatchId
    attempt: Stamp
    payload_bytes: int
    checksum: int | None  # None: not sampled for this pack


class Computing(NamedTuple):
    """The batch whose forward runs now."""

    batch: BatchId
    attempt: Stamp


class Swept(NamedTuple):
    """What `sweep` removed: files of these dead incarnations, so many bytes."""

    incarnations: tuple[str, ...]
    freed_bytes: int


def arena_name(incarnation: str) -> str:
    """File name of an incarnation's arena, which is how descriptors call it."""
    return f"{incarnation}.arena"


def lock_name(incarnation: str) -> str:
    """File name of the lock that an incarnation holds for its life."""
    return f"{incarnation}.lock"


def arena_bytes(kind: Kind, slots: int, slot_bytes: int) -> int:
    """Size of the arena file, to be compared with `free_bytes` of its folder."""
    payload = 0 if kind == "cuda_ipc" else slots * align(slot_bytes, PAGE_BYTES)
    return _payload_at(slots) + payload


def free_bytes(folder: Path) -> int:
    """Bytes an arena in `folder` may still take."""
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize


class Arena:
    """One mapped arena file. Views from `payload` keep the mapping alive beyond `close`."""

    def __init__(self, path: Path, memory: memoryview) -> None:
        """Of a mapped file with a valid header; use `create` or `open`."""
        _, _, kind, self.slots, self.slot_bytes, length, name, _ = _FILE.unpack_from(memory)
        self.path = path
        self.kind = KINDS[kind]
        self.incarnation = name[:length].decode()
        self.memory = memory
        self._mark = hashlib.blake2b(self.incarnation.encode(), digest_size=16).digest()

    @classmethod
    def create(cls, folder: Path, incarnation: str, *, kind: Kind, slots: int, slot_bytes: int) -> Self:
        """Make and map the arena of a new incarnation.

        ArenaFull: no space for all of it. FileExistsError: the incarnation is not new.
        """
        assert len(incarnation) <= 120, "the name of the file has at most 128 characters"
        path = folder / arena_name(incarnation)
        size = arena_bytes(kind, slots, slot_bytes)
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, FILE_MODE)
        try:
            _allocate(file, path, size)
            name = incarnation.encode()
            fields = (_VERSION, KINDS.index(kind), slots, slot_bytes, len(name), name, b"")
            os.pwrite(file, _FILE.pack(_MAGIC, *fields), 0)
            return cls(path, _map(file, size))
        except BaseException:
            path.unlink()
            raise
        finally:
            os.close(file)

    @classmethod
    def open(cls, folder: Path, name: str) -> Self:
        """Map the arena file `name`, which a message gave.

        StalePack: it is gone, or was cut, which ends its owner. CorruptPack: it is not what its name says.
        DecodeError: no arena's name.
        """
        path = folder / name
        if path.name != name or not name.endswith(".arena"):
            raise DecodeError(f"{name!r} is no name of an arena; those are <incarnation>.arena")
        try:
            file = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            raise StalePack(f"{path} is gone: its target died and its packs with it") from None
        try:
            size = os.fstat(file).st_size
            _check_file(path, os.pread(file, _FILE.size, 0), size)
            return cls(path, _map(file, size))
        finally:
            os.close(file)

    def payload(self, slot: int) -> memoryview:
        """The `slot_bytes` bytes of `slot`, read and written in place."""
        start = self._checked(slot) * align(self.slot_bytes, PAGE_BYTES)
        return self.payloads()[start : start + self.slot_bytes]

    def payloads(self) -> memoryview:
        """All slots, from the first page to the last, as they are pinned."""
        assert self.kind != "cuda_ipc", "the payload is in GPU memory"
        return self.memory[_payload_at(self.slots) :]

    def invalidate(self, slot: int) -> None:
        """From here on `slot` holds no pack. Before the first byte of a new one."""
        at = _slot_at(self._checked(slot))
        self.memory[at : at + len(_SLOT_INVALID)] = _SLOT_INVALID

    def seal(self, slot: int, header: SlotHeader) -> None:
        """`slot` holds this pack. After the last byte of it; the magic goes last."""
        at = _slot_at(self._checked(slot))
        checksum = 0 if header.checksum is None else header.checksum
        numbers = (*header.attempt, *header.batch, header.payload_bytes, checksum)
        _SLOT.pack_into(self.memory, at + len(_SLOT_MAGIC), self._mark, *numbers, header.checksum is not None)
        self.memory[at : at + len(_SLOT_MAGIC)] = _SLOT_MAGIC

    def header(self, slot: int) -> SlotHeader | None:
        """What `slot` holds, None while it holds nothing whole. CorruptPack: bytes no owner wrote."""
        at = _slot_at(self._checked(slot))
        raw = bytes(self.memory[at : at + _SLOT_HEADER_BYTES])
        magic = raw[: len(_SLOT_MAGIC)]
        if magic == _SLOT_INVALID:
            return None
        mark, epoch, counter, batch_epoch, index, size, checksum, known = _SLOT.unpack_from(
            raw, len(_SLOT_MAGIC)
        )
        if magic != _SLOT_MAGIC or mark != self._mark:
            raise CorruptPack(f"header of slot {slot} in {self.path} was not written by {self.incarnation}")
        return SlotHeader(
            BatchId(batch_epoch, index), Stamp(epoch, counter), size, checksum if known else None
        )

    def set_computing(self, computing: Computing | None) -> None:
        """Say whose forward runs now. The first byte goes first and last, so a death in between says none."""
        self.memory[_COMPUTING_AT] = 0
        if computing is not None:
            _COMPUTING.pack_into(self.memory, _COMPUTING_AT + 1, *computing.batch, *computing.attempt)
            self.memory[_COMPUTING_AT] = 1

    @property
    def ring_handle(self) -> bytes:
        """The 64 bytes by which other processes open the ring in GPU memory (cuda_ipc)."""
        return bytes(self.memory[_HANDLE_AT : _HANDLE_AT + HANDLE_BYTES])

    @ring_handle.setter
    def ring_handle(self, handle: bytes) -> None:
        assert len(handle) == HANDLE_BYTES
        self.memory[_HANDLE_AT : _HANDLE_AT + HANDLE_BYTES] = handle

    def check_file(self) -> None:
        """RetryError unless the file still has its name and size: else new readers could not map it."""
        try:
            size = self.path.stat().st_size
        except FileNotFoundError:
            size = -1
        if size != len(self.memory):
            what = "was removed" if size < 0 else f"was cut to {size:,} bytes"
            raise RetryError(
                f"arena {self.path} {what} by another process; its folder belongs to the run: leave it alone"
            )

    def is_whole(self) -> bool:
        """Whether the mapped file, unlinked or not, has its full size. 1 us.

        What lies behind the end of a file that was cut reads as zeros up to the end of that page, without
        any error; only the pages behind it are a SIGBUS. Ask after the last read.
        """
        mapped = self.memory.obj
        assert isinstance(mapped, mmap.mmap), "an arena is a mapped file"
        return mapped.size() >= len(self.memory)

    def close(self) -> None:
        """Let go of the mapping; it ends with the last view of it."""
        self.memory.release()

    def unlink(self) -> None:
        """Remove the file. Whoever has it mapped keeps it."""
        self.path.unlink(missing_ok=True)

    def _checked(self, slot: int) -> int:
        assert 0 <= slot < self.slots, f"slot {slot} of {self.slots}"
        return slot


def read_computing(folder: Path, incarnation: str) -> Computing | None:
    """Whose forward ran when `incarnation` died; None if none did, or its file is gone or damaged."""
    path = folder / arena_name(incarnation)
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    try:
        raw = os.pread(file, PAGE_BYTES, 0)
        _check_file(path, raw[: _FILE.size], os.fstat(file).st_size)
    except (CorruptPack, StalePack):
        return None
    finally:
        os.close(file)
    if raw[_COMPUTING_AT] != 1:
        return None
    epoch, index, coordinator_epoch, counter = _COMPUTING.unpack_from(raw, _COMPUTING_AT + 1)
    if max(epoch, index) > _MOST_OF_A_LEDGER:
        return None
    return Computing(BatchId(epoch, index), Stamp(coordinator_epoch, counter))


def sweep(folder: Path, keep: Collection[str] = ()) -> Swept:
    """Remove arena, inbox and locks of every incarnation in `folder` that is dead and not in `keep`.

    An incarnation takes its lock before it makes any other file, so a file without a held lock is a
    dead one's. Mappings of others stay valid. The coordinator's `control` socket is not touched.
    """
    files = {path.name: path for path in folder.iterdir()} if folder.is_dir() else {}
    dead = []
    freed_bytes = 0
    for incarnation in sorted({_owner(name) for name in files} - {None, "control", *keep}, key=str):
        with if_dead(folder / lock_name(str(incarnation))) as is_dead:
            if not is_dead:
                continue
            dead.append(str(incarnation))
            for suffix in _SUFFIXES:
                path = files.get(f"{incarnation}{suffix}")
                if path is not None:
                    with contextlib.suppress(FileNotFoundError):  # another sweep may be quicker
                        freed_bytes += path.lstat().st_blocks * 512
                        path.unlink()
    return Swept(tuple(dead), freed_bytes)


def _owner(name: str) -> str | None:
    """The incarnation a file belongs to, by the longest suffix that fits."""
    for suffix in sorted(_SUFFIXES, key=len, reverse=True):
        if name.endswith(suffix):
            return name.removesuffix(suffix)
    return None


def _allocate(file: int, path: Path, size: int) -> None:
    try:
        os.posix_fallocate(file, 0, size)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.ENOMEM):
            raise
        os.ftruncate(file, 0)
        raise ArenaFull(
            f"arena {path} needs {size:,} bytes, {free_bytes(path.parent):,} are free; lower target.slots or "
            "plan.token_budget, enlarge the tmpfs (compose: ARENA_SIZE), or choose another arena.dir"
        ) from error


def _map(file: int, size: int) -> memoryview:
    """All pages are entered now: a page fault per 4 KiB later would cost a tenth of the copy."""
    return memoryview(mmap.mmap(file, size, mmap.MAP_SHARED | mmap.MAP_POPULATE))


def _check_file(path: Path, raw: bytes, size: int) -> None:
    """CorruptPack unless `raw` is the header of the arena that `path` names; StalePack if it is not whole."""
    if len(raw) < _FILE.size:
        raise CorruptPack(f"{path} of {size} bytes is too short for an arena")
    magic, version, kind, slots, slot_bytes, length, name, _ = _FILE.unpack(raw)
    if magic != _MAGIC or version != _VERSION or kind >= len(KINDS):
        raise CorruptPack(f"{path} is no arena of version {_VERSION}")
    if arena_name(name[:length].decode("ascii", "replace")) != path.name:
        raise CorruptPack(f"{path} was written by {name[:length]!r}")
    if size != arena_bytes(KINDS[kind], slots, slot_bytes):
        raise StalePack(f"{path} was cut: {slots} slots of {slot_bytes:,} do not fit its {size:,} bytes")


def _slot_at(slot: int) -> int:
    return PAGE_BYTES + slot * _SLOT_HEADER_BYTES


def _payload_at(slots: int) -> int:
    return align(_slot_at(slots), PAGE_BYTES)
