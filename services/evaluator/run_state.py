"""What the run has recorded, as the coordinator tells it: `/status` over HTTP, `result.json` once it is gone.

Nothing is asked but what any browser may ask, at most every other second, of a thread that reads snapshots;
neither ledger nor checkpoints are locked, and no message goes over the control plane. So an evaluator can
be late, slow, killed or wrong without the run noticing.
"""

from __future__ import annotations

import http.client
import json
import logging
import socket
import time
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from protocol.files import is_alive
from services.evaluator.agenda import Recorded
from services.lifecycle import FOR

log = logging.getLogger(__name__)

ADDRESS, RESULT, LOCK = "coordinator.json", "result.json", "coordinator.lock"
ANSWER_S = 5.0
_OVER = {"finished", "stopped", "failed"}


class RunState(NamedTuple):
    """`checkpoints` of the current history, oldest first; `over` once this coordinator adds none to them."""

    checkpoints: tuple[Recorded, ...]
    over: bool
    failed: bool


class Run:
    """The run in a folder, seen from outside. What stopped or failed before this was made may go on again."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._since_ns = time.time_ns()

    def look(self) -> RunState | None:
        """None while nobody answers: the coordinator has not started yet, or is being restarted."""
        address = self._folder / ADDRESS
        try:
            where = json.loads(address.read_bytes())
            written_ns = address.stat().st_mtime_ns
        except (OSError, ValueError):
            return None
        try:
            url = _reachable(str(where["http"]), str(where.get("host", "")))
            told = _ask(url, str(where.get("incarnation", "")))
            return self._result(written_ns) if told is None else parse(told)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            log.debug("no answer to make sense of", extra={"error": repr(error)})
            return None

    def _result(self, address_ns: int) -> RunState | None:
        """What the very coordinator that wrote the address left behind; None if it left nothing, or another
        one is starting."""
        file = self._folder / RESULT
        if is_alive(self._folder / LOCK) or not file.is_file() or file.stat().st_mtime_ns < address_ns:
            return None
        left = json.loads(file.read_bytes())
        state = parse(left)
        final = left.get("state") == "finished" or file.stat().st_mtime_ns >= self._since_ns
        return state._replace(over=state.over and final)


def parse(status: dict[str, Any]) -> RunState:
    """Of a status document."""
    rows = status.get("checkpoints", ())
    checkpoints = tuple(
        Recorded(row["name"], int(row["timeline"]), int(row["step"]), row.get("epoch")) for row in rows
    )
    state = status.get("state")
    return RunState(checkpoints, state in _OVER, state == "failed")


def _reachable(url: str, host: str) -> str:
    """A coordinator that listens on all addresses of its container is found by the container's name."""
    parts = urlsplit(url)
    if parts.hostname != "0.0.0.0":  # noqa: S104 - compared, not bound
        return url
    name = host if host and host != socket.gethostname() else "127.0.0.1"
    return f"http://{name}:{parts.port}"


def _ask(url: str, incarnation: str) -> dict[str, Any] | None:
    """None: nobody answers, or another coordinator than the one that is meant."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=ANSWER_S)
    try:
        connection.request("GET", "/status", headers={FOR: incarnation} if incarnation else {})
        answer = connection.getresponse()
        body = answer.read()
        found = json.loads(body) if answer.status == 200 else None
    except (OSError, http.client.HTTPException, ValueError) as error:
        log.debug("no answer", extra={"url": url, "error": str(error)})
        return None
    finally:
        connection.close()
    return found if isinstance(found, dict) else None
