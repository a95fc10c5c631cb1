"""Sockets whose options keep a dead, slow or hostile peer from costing others messages or memory.

    coordinator, drafter inbox    ROUTER, binds      dealer of each role / target connects

- ROUTER_MANDATORY: a send to a peer that left raises EHOSTUNREACH; without it 200,000 were swallowed.
- IMMEDIATE: a DEALER queues only for a peer that is there, so a restart does not replay old words.
- Finite queues and frames of at most 4 MiB: a peer that does not read, or writes too much, is bounded.
- ZMTP heartbeats of 1 s, 3 s to be missed: a peer that vanished without a FIN is noticed.
- LINGER 0: closing never waits, but for a role's last word (`Link.close`).
- A second bind of a live ipc:// path silently steals it, so an flock on `<path>.lock` comes first.
- tcp:// speaks CURVE with an allow-list of client keys, or is refused.
Measured on two cores: 45 us a round trip, 140,000 messages a second.
"""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Self

import zmq
from zmq.auth.thread import ThreadAuthenticator

from protocol.codec import MAX_MESSAGE_BYTES
from protocol.errors import AlreadyRunning, ConfigError
from protocol.files import FileLock, private_folder
from protocol.keys import ClientKeys, ServerKeys

HIGH_WATER_MESSAGES = 4096
HEARTBEAT_MS = 1000
HEARTBEAT_TIMEOUT_MS = 3000
RECONNECT_MS = 50
RECONNECT_MAX_MS = 1000
MAX_IPC_PATH_BYTES = 107  # sun_path without its NUL
_ZAP_DOMAIN = b"draftmill"


def new_context() -> zmq.Context:
    """A context of its own for the thread that owns its sockets; `term()` it after the last close."""
    return zmq.Context(io_threads=1)


class Router:
    """A bound ROUTER with the lock on its path and the keeper of its allow-list."""

    def __init__(
        self, socket: zmq.Socket, lock: FileLock | None, authenticator: ThreadAuthenticator | None
    ) -> None:
        self.socket = socket
        self.endpoint = socket.get_string(zmq.LAST_ENDPOINT)
        self._lock = lock
        self._authenticator = authenticator

    def close(self) -> None:
        """Close the socket, then let the next owner bind. libzmq leaves a named ipc:// path behind."""
        self.socket.close(0)
        if self._authenticator is not None:
            self._authenticator.stop()
        if self._lock is not None and self._lock.held:
            Path(self.endpoint.removeprefix("ipc://")).unlink(missing_ok=True)
            self._lock.release(unlink=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def router(
    context: zmq.Context, endpoint: str, *, keys: ServerKeys | None = None, insecure: bool = False
) -> Router:
    """A ROUTER bound to `endpoint`. Send with NOBLOCK: EHOSTUNREACH is a peer that left, Again a full queue.

    ConfigError: a rule on the endpoint is broken. AlreadyRunning: another live process is bound to it.
    """
    scheme, address = _split(endpoint)
    _require_keys(endpoint, scheme, keys is not None, insecure)
    lock = _lock_path(address) if scheme == "ipc" else None
    socket = _socket(context, zmq.ROUTER)
    socket.set(zmq.ROUTER_MANDATORY, 1)
    authenticator = _serve_curve(context, socket, keys) if scheme == "tcp" and keys else None
    try:
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        socket.close(0)
        if authenticator is not None:
            authenticator.stop()
        if lock is not None:
            lock.release(unlink=True)
        if error.errno == zmq.EADDRINUSE:
            raise AlreadyRunning(f"{endpoint} is bound by another process; stop that one first") from error
        raise ConfigError(f"endpoint {endpoint} cannot be bound: {error.strerror}; choose another") from error
    return Router(socket, lock, authenticator)


def dealer(
    context: zmq.Context, endpoint: str, *, keys: ClientKeys | None = None, insecure: bool = False
) -> zmq.Socket:
    """A DEALER that connects to `endpoint`, and again whenever the peer returns, under a fresh routing id.

    Send with NOBLOCK: Again means nobody is there, or the queue is full. ConfigError: a rule on the
    endpoint is broken; that nobody listens there yet is none.
    """
    scheme, address = _split(endpoint)
    _require_keys(endpoint, scheme, keys is not None, insecure)
    if scheme == "ipc":
        _checked_path(address)
    socket = _socket(context, zmq.DEALER)
    socket.set(zmq.IMMEDIATE, 1)
    socket.set(zmq.RECONNECT_IVL, RECONNECT_MS)
    socket.set(zmq.RECONNECT_IVL_MAX, RECONNECT_MAX_MS)
    if scheme == "tcp" and keys:
        socket.curve_publickey, socket.curve_secretkey, socket.curve_serverkey = keys
    try:
        socket.connect(endpoint)
    except zmq.ZMQError as error:
        socket.close(0)
        raise ConfigError(f"endpoint {endpoint} cannot be used: {error.strerror}; choose another") from error
    return socket


def _socket(context: zmq.Context, kind: int) -> zmq.Socket:
    socket = context.socket(kind)
    socket.set(zmq.LINGER, 0)
    socket.set(zmq.SNDHWM, HIGH_WATER_MESSAGES)
    socket.set(zmq.RCVHWM, HIGH_WATER_MESSAGES)
    socket.set(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
    socket.set(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
    socket.set(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS)
    socket.set(zmq.HEARTBEAT_TTL, HEARTBEAT_TIMEOUT_MS)
    return socket


def _split(endpoint: str) -> tuple[str, str]:
    scheme, separator, address = endpoint.partition("://")
    if not separator or scheme not in {"ipc", "tcp"} or not address:
        raise ConfigError(f"endpoint {endpoint!r}: it is ipc://PATH or tcp://HOST:PORT")
    return scheme, address


def _require_keys(endpoint: str, scheme: str, has_keys: bool, insecure: bool) -> None:
    if scheme == "tcp" and not has_keys and not insecure:
        raise ConfigError(
            f"endpoint {endpoint}: tcp:// without CURVE keys lets anybody command the run; "
            "make keys with `draftmill keys`, use ipc://, or set coordinator.insecure = true"
        )


def _checked_path(address: str) -> Path:
    """Abstract and relative names are refused: the first have no owner, the second mean what the cwd says."""
    path = Path(address)
    if not path.is_absolute():
        raise ConfigError(f"endpoint ipc://{address}: the path must be absolute")
    if len(address.encode()) > MAX_IPC_PATH_BYTES:
        raise ConfigError(
            f"endpoint ipc://{address}: a path of {len(address.encode())} bytes; the kernel takes "
            f"{MAX_IPC_PATH_BYTES}: choose a shorter arena.dir or run name"
        )
    return path


def _lock_path(address: str) -> FileLock:
    path = _checked_path(address)
    private_folder(path.parent)
    return FileLock(path.with_name(path.name + ".lock")).acquire()


def _serve_curve(context: zmq.Context, socket: zmq.Socket, keys: ServerKeys) -> ThreadAuthenticator:
    """Let in only clients whose public key is on the list. Before the bind: no connection precedes it."""
    authenticator = ThreadAuthenticator(context)
    authenticator.configure_curve_callback(
        domain=_ZAP_DOMAIN.decode(), credentials_provider=_AllowList(keys.allowed)
    )
    authenticator.start()
    authenticator.thread.name = "zap"
    socket.set(zmq.ZAP_DOMAIN, _ZAP_DOMAIN)
    socket.set(zmq.ZAP_ENFORCE_DOMAIN, 1)
    socket.curve_server = True
    socket.curve_publickey, socket.curve_secretkey = keys.public, keys.secret
    return authenticator


class _AllowList:
    def __init__(self, allowed: frozenset[bytes]) -> None:
        self._allowed = allowed

    def callback(self, domain: str, key: bytes) -> bool:
        """Whether the client with this public key (Z85) may connect."""
        return key in self._allowed
