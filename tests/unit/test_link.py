"""A role's link when the coordinator goes away: the role does not outlive its run."""

import time
from pathlib import Path

import pytest

from protocol.codec import decode, encode
from protocol.errors import ConfigError, PeerGone
from protocol.messages import PROTOCOL_VERSION, DrafterHello, DrafterReport, Stamp, Welcome
from protocol.sockets import Router, new_context, router
from services.config.schema import Config
from services.link import Link

NAME = "drafter-1"
DEADLINE_S = 20.0
HELLO = DrafterHello(
    incarnation=NAME,
    seq=0,
    protocol=PROTOCOL_VERSION,
    fingerprint="0" * 64,
    host="h",
    index=None,
    inbox="ipc:///nowhere",
)
LEVEL = {
    "orders": Stamp(0, 0), "totals": {}, "complete": None, "generation": None, "held": (), "training": None,
    "trained": 0, "vote": None, "saved": (), "metrics": (), "failures": (),
}  # fmt: skip


def receive(control: Router) -> tuple[bytes, object]:
    assert control.socket.poll(DEADLINE_S * 1000), "nothing is said"
    sender, *frames = control.socket.recv_multipart()
    return sender, decode(frames)


def serve(control: Router, link: Link) -> None:
    """Be a coordinator until the first report."""
    sender, _ = receive(control)
    welcome = Welcome(incarnation=NAME, index=0)
    control.socket.send_multipart([sender, *encode(welcome)])
    link.report(**LEVEL)
    while not isinstance(receive(control)[1], DrafterReport):
        pass


def wait_for_exit(link: Link) -> None:
    deadline_s, seen = time.monotonic() + DEADLINE_S, link.version
    while link.exit is None:
        assert time.monotonic() < deadline_s, "it stays"
        seen = link.wait(seen, 1.0)


def test_a_role_leaves_when_its_coordinator_does_not_come_back(tmp_path: Path) -> None:
    endpoint, context = f"ipc://{tmp_path / 'control'}", new_context()
    link = Link(endpoint, HELLO, heartbeat_s=0.05, absence_s=1.0)
    with router(context, endpoint) as control:
        link.start()
        serve(control, link)
        assert link.exit is None
    wait_for_exit(link)
    assert link.exit is not None and not link.exit.finished
    with pytest.raises(PeerGone, match="no coordinator was reached for 1 s"):
        raise link.why_refused()
    link.close("the test is over")
    context.term()


def test_a_role_stays_while_a_coordinator_returns_in_time(tmp_path: Path) -> None:
    endpoint, context = f"ipc://{tmp_path / 'control'}", new_context()
    link = Link(endpoint, HELLO, heartbeat_s=0.05, absence_s=15.0)
    with router(context, endpoint) as control:
        link.start()
        serve(control, link)
    with router(context, endpoint) as control:
        while not isinstance(receive(control)[1], DrafterReport):
            pass
        assert link.exit is None
        link.close("the test is over")
    context.term()


def test_the_options_of_a_run_make_the_link(tmp_path: Path) -> None:
    """An endpoint of its own, a beat in half a second, given up after one; `watch.stuck_s` is for later."""
    endpoint, context = f"ipc://{tmp_path / 'control'}", new_context()
    options = {"endpoint": endpoint, "heartbeat_s": 0.5, "silence_s": 1.0}
    config = Config.model_validate({"model": {"path": "m"}, "data": {"path": "d"}, "coordinator": options})
    link = Link.of_run(config, HELLO)
    with router(context, endpoint) as control:
        link.start()
        first, second = receive(control)[1], receive(control)[1]
        assert isinstance(first, DrafterHello) and isinstance(second, DrafterHello)
        assert second.seq == first.seq + 1
        wait_for_exit(link)
    with pytest.raises(PeerGone, match="no coordinator answered within 1 s"):
        raise link.why_refused()
    link.close("the test is over")
    context.term()


def test_a_run_over_the_network_has_its_keys_read_before_anything_is_said(tmp_path: Path) -> None:
    options = {"endpoint": "tcp://127.0.0.1:9", "keys": str(tmp_path)}
    config = Config.model_validate({"model": {"path": "m"}, "data": {"path": "d"}, "coordinator": options})
    with pytest.raises(ConfigError, match=r"roles\.public"):
        Link.of_run(config, HELLO)
