"""Calls of the CUDA driver that PyTorch has no name for: pinning, rings processes share, raw copies.

The driver, not the runtime: `libcuda.so.1` is one per process whichever runtime PyTorch came with, and a
refused call leaves no pending error behind that the next kernel launch would raise. Calls run in the
device's primary context, the one PyTorch uses. Codes are tested: nothing here fails silently.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from protocol.arena import HANDLE_BYTES

REGISTER_CHUNK_BYTES = 64 << 30
RING_UNIT_BYTES = 2 << 20  # smaller allocations share a block, and a handle names the whole block
_OUT_OF_MEMORY = 2
_REGISTER_PORTABLE = 1
_LAZY_PEER_ACCESS = 1


class DriverError(RuntimeError):
    """A call the driver refused."""

    def __init__(self, call: str, code: int, name: str) -> None:
        super().__init__(f"{call} failed with {name} ({code})")
        self.code = code

    @property
    def out_of_memory(self) -> bool:
        return self.code == _OUT_OF_MEMORY


class _Handle(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_ubyte * HANDLE_BYTES)]


class Driver:
    """The driver, seen from one device (its index among the visible ones)."""

    def __init__(self, device: int) -> None:
        """DriverError, or OSError without a driver."""
        self._library = ctypes.CDLL("libcuda.so.1")
        self._call("cuInit", 0)
        ordinal, self._context = ctypes.c_int(), ctypes.c_void_p()
        self._call("cuDeviceGet", ctypes.byref(ordinal), device)
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), ordinal)

    def register(self, address: int, size: int) -> None:
        """Pin host memory, in chunks. All of it or none. 0.1 s a GiB."""
        done_bytes = 0
        try:
            while done_bytes < size:
                chunk = min(REGISTER_CHUNK_BYTES, size - done_bytes)
                start = ctypes.c_void_p(address + done_bytes)
                with self._current():
                    self._call("cuMemHostRegister_v2", start, ctypes.c_size_t(chunk), _REGISTER_PORTABLE)
                done_bytes += chunk
        except DriverError:
            self.unregister(address, done_bytes)
            raise

    def unregister(self, address: int, size: int) -> None:
        """Undo `register`. No copy from or to the memory may be under way."""
        for offset in range(0, size, REGISTER_CHUNK_BYTES):
            with self._current():
                self._call("cuMemHostUnregister", ctypes.c_void_p(address + offset))

    def allocate(self, size: int) -> int:
        """Device memory outside PyTorch's allocator (and so outside expandable segments), zeroed."""
        pointer = ctypes.c_uint64()
        units = -(-size // RING_UNIT_BYTES) * RING_UNIT_BYTES
        with self._current():
            self._call("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(units))
            self._call("cuMemsetD8_v2", pointer, 0, ctypes.c_size_t(units))
        return pointer.value

    def free(self, pointer: int) -> None:
        """Undo `allocate`."""
        with self._current():
            self._call("cuMemFree_v2", ctypes.c_uint64(pointer))

    def free_bytes(self) -> int:
        """Free memory of the device."""
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        with self._current():
            self._call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        return free.value

    def export(self, pointer: int) -> bytes:
        """The handle by which another process opens what `allocate` gave."""
        handle = _Handle()
        with self._current():
            self._call("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(pointer))
        return bytes(handle.bytes)

    def open(self, handle: bytes) -> int:
        """Map another process's allocation, on any GPU this one reaches, with this device's own index."""
        pointer = ctypes.c_uint64()
        with self._current():
            self._call(
                "cuIpcOpenMemHandle_v2",
                ctypes.byref(pointer),
                _Handle.from_buffer_copy(handle),
                _LAZY_PEER_ACCESS,
            )
        return pointer.value

    def close(self, pointer: int) -> None:
        """Undo `open`. No copy from the memory may be under way."""
        with self._current():
            self._call("cuIpcCloseMemHandle", ctypes.c_uint64(pointer))

    def copy(self, to: int, source: int, size: int, stream: int) -> None:
        """Queue a copy between any two addresses, host or device, on `stream` (torch's `cuda_stream`)."""
        with self._current():
            self._call(
                "cuMemcpyAsync",
                ctypes.c_uint64(to),
                ctypes.c_uint64(source),
                ctypes.c_size_t(size),
                ctypes.c_void_p(stream),
            )

    @contextmanager
    def _current(self) -> Iterator[None]:
        """The device's context for calls of this thread, whatever thread that is."""
        self._call("cuCtxPushCurrent_v2", self._context)
        try:
            yield
        finally:
            self._call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    def _call(self, name: str, *arguments: Any) -> None:
        call: Callable[..., int] = getattr(self._library, name)
        code = call(*arguments)
        if code:
            text = ctypes.c_char_p()
            self._library.cuGetErrorName(code, ctypes.byref(text))
            raise DriverError(name, code, (text.value or b"an unknown error").decode())
