"""What the coordinator says of its run, read over HTTP: the JSON of `/status`, typed, and `/stop`.

The address is in `<run.dir>/coordinator.json`, written by the coordinator at start. Everything has a
default, so that a view keeps working beside a coordinator of another version. One request takes about
2 ms; none waits longer than a second.
"""

from __future__ import annotations

import http.client
import json
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from protocol.errors import PeerGone
from services.lifecycle import FOR

ADDRESS_FILE = "coordinator.json"
RESULT = "result.json"  # the last status, left behind by a coordinator that ended by itself
OVER = {"finished", "stopped", "failed"}  # states that no step follows
ANSWER_S = 1.0
ELSEWHERE = 409  # who answers is not the coordinator that was asked


class Part(BaseModel):
    """Part of a status; unknown fields are from a newer coordinator."""

    model_config = ConfigDict(extra="ignore", frozen=True)


class Slot(Part):
    batch: tuple[int, int] = (0, 0)  # epoch, index
    state: str = ""
    holder: str | None = None  # the drafter that has it; None: nobody


class Role(Part):
    role: str
    index: int
    incarnation: str = ""
    device: str = ""
    state: str = ""
    tokens_per_s: float = 0.0
    waits_for: str | None = None  # None or "": works
    silent_s: float = 0.0
    phases: dict[str, float] = Field(default_factory=dict)  # seconds by phase
    slots: tuple[Slot, ...] = ()


class Batches(Part):
    pending: int = 0
    assigned: int = 0
    ready: int = 0
    leased: int = 0
    committed: int = 0
    failed: int = 0


class Event(Part):
    at: float  # unix seconds
    text: str


class Checkpoint(Part):
    timeline: int
    step: int
    name: str


class Evaluation(Part):
    """The newest figures of an evaluator."""

    step: int = 0
    acceptance_length: float | None = None
    held_out_loss: float | None = None
    best_acceptance_length: float | None = None
    best_step: int | None = None


class Status(Part):
    """The whole of `/status`."""

    run: str = ""
    state: str = "starting"  # starting | running | stopping | stopped | finished | failed
    reason: str = ""
    epoch: int = 0  # 0-based
    epochs: int = 0
    step: int = 0  # committed
    total_steps: int = 0
    timeline: int = 0
    samples_total: int = 0
    samples_committed: int = 0
    samples_failed: int = 0
    batches: Batches = Batches()
    in_flight_packs: int = 0
    in_flight_cap_packs: int = 0
    in_flight_bytes: int = 0
    target_tokens_per_s: float = 0.0
    drafter_tokens_per_s: float = 0.0
    loss: float | None = None
    lr: float | None = None
    eta_s: float | None = None
    wall_s: float = 0.0
    restarts: int = 0
    roles: tuple[Role, ...] = ()
    events: tuple[Event, ...] = ()
    checkpoints: tuple[Checkpoint, ...] = ()
    evaluation: Evaluation | None = None
    lingers: bool = False  # its coordinator stays up after the end, and serves this


class Address(NamedTuple):
    """Where a coordinator listens."""

    http: str  # http://127.0.0.1:9440
    incarnation: str


def read_address(run_dir: Path) -> Address:
    """From the run's folder. PeerGone: no coordinator has ever written one, or the file is not whole."""
    file = run_dir / ADDRESS_FILE
    try:
        found = json.loads(file.read_bytes())
        return Address(str(found["http"]), str(found.get("incarnation", "")))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise PeerGone(
            f"{file}: no coordinator has written its address there; is the run started? "
            "Is this its folder (run.dir)?"
        ) from error


def fetch(address: Address) -> Status:
    """PeerGone when nobody answers within a second, or the answer is no status."""
    body = _request(address, "GET", "/status")
    try:
        return Status.model_validate_json(body)
    except ValidationError as error:
        raise PeerGone(
            f"{address.http}/status: not the status of a run: {error.errors()[0]['msg']}"
        ) from error


def fetch_json(address: Address) -> Any:
    """The same as the coordinator wrote it, with what this version does not know."""
    return json.loads(_request(address, "GET", "/status"))


def request_stop(address: Address) -> None:
    """Ask for a clean stop: finish the step, record a checkpoint, leave. PeerGone when nobody answers."""
    _request(address, "POST", "/stop")


def _request(address: Address, method: str, path: str) -> bytes:
    meant = {FOR: address.incarnation} if address.incarnation else {}
    try:
        connection = http.client.HTTPConnection(urlsplit(address.http).netloc, timeout=ANSWER_S)
        with closing(connection):
            connection.request(method, path, headers=meant)
            response = connection.getresponse()
            body = response.read()
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise PeerGone(f"{address.http}{path}: no answer ({error}); is the coordinator running?") from error
    if response.status == ELSEWHERE:
        raise PeerGone(f"{address.http}{path}: another run's coordinator listens there; this run's has ended")
    if response.status >= 300:
        raise PeerGone(f"{address.http}{path}: HTTP {response.status} {response.reason}")
    return body
