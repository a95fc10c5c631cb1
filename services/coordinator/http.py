"""What a browser, Prometheus, `draftmill status` and health checks see. Loopback unless set otherwise.

    GET /          the run at a glance: page.html, which draws /status
    GET /metrics   Prometheus text          GET /healthz   200 while there is progress, 503 with the reason
    GET /status    the snapshot, JSON       POST /stop     finish the step, record a checkpoint, leave

Daemon threads, standard library only; they read whole snapshots and never the coordinator's state. A
request that names a coordinator (its incarnation, in the header FOR) is answered by that one alone: on a
fixed port another run may listen where the one that was meant has ended.
"""

from __future__ import annotations

import errno
import json
import logging
import socket
import socketserver
import threading
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from protocol.errors import AlreadyRunning, ConfigError
from services.coordinator.metrics import Snapshot, registry
from services.lifecycle import FOR

log = logging.getLogger(__name__)

_POLICY = "default-src 'self' 'unsafe-inline'; img-src data:; frame-ancestors 'none'"
"""The page needs nothing from elsewhere, so a browser may refuse everything from elsewhere."""


CONNECTIONS = 32
"""At a time; a client that sends its request byte by byte would otherwise keep a file open for ever."""


class Board:
    """The newest snapshot and health, handed from the loop to the HTTP threads."""

    def __init__(self, on_stop: Callable[[], None], incarnation: str = "") -> None:
        self.incarnation = incarnation  # whose board it is
        self.snapshot: Snapshot | None = None
        self.unhealthy = "starting"
        self.on_stop = on_stop
        self.registry = registry(lambda: self.snapshot)


class StatusServer:
    """Serves a Board until closed. `url` is where.

    AlreadyRunning: the port is taken. ConfigError: the address cannot be used at all.
    """

    def __init__(self, board: Board, host: str, port: int) -> None:
        handler = type("Handler", (_Handler,), {"board": board})
        try:
            self._server = _Connections((host, port), handler)
        except OSError as error:
            where = f"http address {host}:{port}: {error.strerror}"
            if error.errno == errno.EADDRINUSE:
                raise AlreadyRunning(f"{where}; set coordinator.http_port to a free one, or 0") from error
            raise ConfigError(f"{where}; set coordinator.http_host and http_port to what is here") from error
        self.url = f"http://{host}:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, name="http", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Connections(ThreadingHTTPServer):
    """A thread each; the oldest gives way to one too many."""

    daemon_threads = True
    request_queue_size = CONNECTIONS

    def __init__(self, *arguments: Any) -> None:
        self._open: dict[Any, None] = {}  # oldest first
        super().__init__(*arguments)

    def server_bind(self) -> None:
        """Without asking a resolver for the host's full name, which nobody reads and which may take long."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def process_request(self, request: Any, client_address: Any) -> None:
        if len(self._open) >= CONNECTIONS:
            with suppress(OSError, RuntimeError, StopIteration, KeyError):  # it has just ended
                oldest = next(iter(self._open))
                del self._open[oldest]
                oldest.shutdown(socket.SHUT_RDWR)
        self._open[request] = None
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self._open.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that hangs up is no news."""
        log.debug("request broken off", exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    board: Board
    server_version = "draftmill"
    timeout = 10.0

    def do_GET(self) -> None:
        board = self.board
        if self._is_for_another():
            return
        if self.path == "/":
            page = files("services.coordinator").joinpath("page.html").read_bytes()
            self._answer(200, "text/html; charset=utf-8", page)
        elif self.path == "/metrics":
            self._answer(200, CONTENT_TYPE_LATEST, generate_latest(board.registry))
        elif self.path == "/healthz":
            self._answer(503 if board.unhealthy else 200, "text/plain", (board.unhealthy or "ok").encode())
        elif self.path == "/status":
            code = 503 if board.snapshot is None else 200
            self._answer(code, "application/json", json.dumps(board.snapshot).encode())
        else:
            self._answer(404, "text/plain", b"try /, /metrics, /healthz or /status")

    def do_POST(self) -> None:
        if "Origin" in self.headers:  # a page of another site, in the browser of someone who may stop runs
            self._answer(403, "text/plain", b"not from a browser")
        elif self._is_for_another():
            return
        elif self.path == "/stop":
            self.board.on_stop()
            self._answer(202, "text/plain", b"stopping: after this step, on a recorded checkpoint")
        else:
            self._answer(404, "text/plain", b"only /stop takes a POST")

    def _is_for_another(self) -> bool:
        meant = self.headers.get(FOR, "")
        if meant in ("", self.board.incarnation):
            return False
        self._answer(409, "text/plain", b"another coordinator listens here")
        return True

    def _answer(self, code: int, kind: str, body: bytes) -> None:
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Content-Security-Policy", _POLICY)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """A line per scrape helps nobody."""
