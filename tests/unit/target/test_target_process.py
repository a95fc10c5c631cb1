"""A target as a process: it obeys SIGTERM, and a kill leaves proof of what it was doing."""

import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from protocol.arena import Computing, arena_name, lock_name, read_computing
from protocol.codec import decode, encode
from protocol.files import is_alive, private_folder
from protocol.messages import (
    Assignment,
    BatchId,
    Bye,
    Message,
    Stamp,
    TargetHello,
    TargetOrders,
    TargetReport,
    Welcome,
)
from protocol.sockets import Router, new_context, router
from services.config.schema import Config
from services.lifecycle import ExitCode, arena_folder

pytestmark = pytest.mark.process
NAME = "target-0"
DEADLINE_S = 60.0
PROGRAM = """
import sys, threading
from services.config.schema import Config
from services.lifecycle import leave
from services.target.server import join_run
from services.target.start import device_of, start

config, name, how = Config.model_validate_json(sys.argv[1]), sys.argv[2], sys.argv[3]
started = start(config, device_of(config, 0))
if how == "hang":
    started.target.layers[2].register_forward_pre_hook(lambda *_: threading.Event().wait())
leave(join_run(config, started, name, 0))
"""


def launch(config: Config, how: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", PROGRAM, config.model_dump_json(), NAME, how])


def receive(control: Router) -> tuple[bytes, Message]:
    assert control.socket.poll(DEADLINE_S * 1000), "the target says nothing"
    peer, *frames = control.socket.recv_multipart()
    return peer, decode(frames)


def order(control: Router, *assignments: Assignment) -> None:
    """Welcome the target and order `assignments`."""
    while True:
        peer, message = receive(control)
        if isinstance(message, TargetHello):
            break
    welcome = Welcome(incarnation=NAME, index=0)
    for say in (welcome, TargetOrders(incarnation=NAME, stamp=Stamp(1, 1), assignments=assignments)):
        control.socket.send_multipart([peer, *encode(say)])


def wait_for_state(control: Router, state: str) -> None:
    while True:
        _, message = receive(control)
        if isinstance(message, TargetReport) and any(slot.state == state for slot in message.slots):
            return


@pytest.fixture
def folder(make_config: Callable[..., Config]) -> Path:
    return private_folder(arena_folder(make_config()))


def test_sigterm_ends_a_target_with_bye_and_an_empty_folder(
    make_config: Callable[..., Config], folder: Path
) -> None:
    context = new_context()
    process = launch(make_config(), "well")
    with router(context, f"ipc://{folder / 'control'}") as control:
        order(control, Assignment(batch=BatchId(0, 0), attempt=Stamp(1, 9), samples=(0, 1), publish=None))
        wait_for_state(control, "ready")
        assert (folder / arena_name(NAME)).exists() and is_alive(folder / lock_name(NAME))
        process.send_signal(signal.SIGTERM)
        while not isinstance(receive(control)[1], Bye):
            pass
        assert process.wait(DEADLINE_S) == ExitCode.STOPPED
    assert not (folder / arena_name(NAME)).exists() and not (folder / lock_name(NAME)).exists()
    context.term()


def test_a_killed_target_leaves_a_free_lock_and_the_name_of_its_forward(
    make_config: Callable[..., Config], folder: Path
) -> None:
    context = new_context()
    process = launch(make_config(target={"self_check": False, "warm_up": False}), "hang")
    with router(context, f"ipc://{folder / 'control'}") as control:
        order(control, Assignment(batch=BatchId(2, 5), attempt=Stamp(1, 9), samples=(0, 1), publish=None))
        wait_for_state(control, "computing")
        while read_computing(folder, NAME) is None:
            receive(control)
        process.kill()
        assert process.wait(DEADLINE_S) == -signal.SIGKILL
    assert not is_alive(folder / lock_name(NAME))
    assert read_computing(folder, NAME) == Computing(BatchId(2, 5), Stamp(1, 9))
    context.term()
