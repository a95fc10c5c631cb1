"""Real sockets on temporary paths and loopback ports: who gets in, who is told, who is refused."""

import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import zmq

from protocol.errors import AlreadyRunning, ConfigError
from protocol.keys import ClientKeys, generate_keys, load_client_keys, load_server_keys
from protocol.sockets import MAX_IPC_PATH_BYTES, dealer, new_context, router

WAIT_MS = 5000


@pytest.fixture
def context() -> Iterator[zmq.Context]:
    context = new_context()
    yield context
    context.destroy(linger=0)


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="dm-") as name:  # short: a socket path has 107 bytes
        yield Path(name)


@pytest.fixture
def client(context: zmq.Context) -> Iterator[Callable[..., zmq.Socket]]:
    """`client(endpoint, ...)`: a dealer that is closed at the end of the test."""
    with ExitStack() as stack:
        yield lambda endpoint, **options: stack.enter_context(dealer(context, endpoint, **options))


def receive(socket: zmq.Socket) -> list[bytes]:
    assert socket.poll(WAIT_MS), "nothing came"
    return socket.recv_multipart()


def send(socket: zmq.Socket, frames: list[bytes]) -> None:
    assert socket.poll(WAIT_MS, zmq.POLLOUT), "nobody to send to"
    socket.send_multipart(frames, zmq.NOBLOCK)


def test_frames_go_both_ways(context: zmq.Context, client: Callable[..., zmq.Socket], folder: Path) -> None:
    endpoint = f"ipc://{folder}/control"
    peer = client(endpoint)
    with router(context, endpoint) as server:
        send(peer, [b"Hello", b"x"])
        sender, *frames = receive(server.socket)
        assert frames == [b"Hello", b"x"]
        server.socket.send_multipart([sender, b"Welcome", b"y"], zmq.NOBLOCK)
        assert receive(peer) == [b"Welcome", b"y"]


def test_a_dealer_queues_nothing_for_a_peer_that_is_not_there(
    client: Callable[..., zmq.Socket], folder: Path
) -> None:
    peer = client(f"ipc://{folder}/nobody")
    with pytest.raises(zmq.Again):
        peer.send_multipart([b"lost"], zmq.NOBLOCK)


def test_a_router_is_told_that_a_peer_is_unknown(context: zmq.Context, folder: Path) -> None:
    with router(context, f"ipc://{folder}/control") as server, pytest.raises(zmq.ZMQError) as caught:
        server.socket.send_multipart([b"stranger", b"x"], zmq.NOBLOCK)
    assert caught.value.errno == zmq.EHOSTUNREACH


def test_a_live_path_is_not_stolen_and_a_closed_one_is_free(context: zmq.Context, folder: Path) -> None:
    endpoint = f"ipc://{folder}/control"
    with router(context, endpoint), pytest.raises(AlreadyRunning, match=r"control\.lock"):
        router(context, endpoint)
    router(context, endpoint).close()
    assert list(folder.iterdir()) == []


def test_a_socket_left_behind_by_a_dead_owner_is_replaced(context: zmq.Context, folder: Path) -> None:
    (folder / "control").touch()
    (folder / "control.lock").touch()
    with router(context, f"ipc://{folder}/control"):
        assert stat.S_ISSOCK((folder / "control").stat().st_mode)
    assert list(folder.iterdir()) == []


def test_the_folder_of_a_socket_is_made_private_and_an_open_one_is_refused(
    context: zmq.Context, folder: Path
) -> None:
    with router(context, f"ipc://{folder}/a/b/control"):
        assert (folder / "a/b").stat().st_mode & 0o777 == 0o700
    (folder / "open").mkdir()
    (folder / "open").chmod(0o755)
    with pytest.raises(ConfigError, match="0755"):
        router(context, f"ipc://{folder}/open/control")


@pytest.mark.parametrize("bind", [router, dealer])
@pytest.mark.parametrize(
    ("endpoint", "said"),
    [
        ("ipc://relative/path", "absolute"),
        ("ipc://@abstract", "absolute"),
        ("ipc:///tmp/" + "x" * MAX_IPC_PATH_BYTES, "107"),
        ("inproc://here", "ipc://PATH or tcp://"),
        ("nonsense", "ipc://PATH or tcp://"),
        ("tcp://127.0.0.1:5555", "without CURVE keys"),
    ],
)
def test_endpoints_against_the_rules_are_refused(
    context: zmq.Context, bind, endpoint: str, said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        bind(context, endpoint)


def test_the_longest_path_the_kernel_takes(context: zmq.Context, folder: Path) -> None:
    room = MAX_IPC_PATH_BYTES - len(str(folder)) - 1
    router(context, f"ipc://{folder}/{'x' * room}").close()
    with pytest.raises(ConfigError, match="108 bytes"):
        router(context, f"ipc://{folder}/{'x' * (room + 1)}")


def test_a_frame_over_the_limit_costs_the_sender_its_connection(
    context: zmq.Context, client: Callable[..., zmq.Socket], folder: Path
) -> None:
    endpoint = f"ipc://{folder}/control"
    with router(context, endpoint) as server:
        peer = client(endpoint)
        send(peer, [b"Hello", bytes(5 << 20)])
        other = client(endpoint)
        send(other, [b"Hello", b"fine"])
        assert receive(server.socket)[1:] == [b"Hello", b"fine"]


def test_tcp_without_encryption_when_asked_for(
    context: zmq.Context, client: Callable[..., zmq.Socket]
) -> None:
    with router(context, "tcp://127.0.0.1:*", insecure=True) as server:
        assert not server.endpoint.endswith("*")
        peer = client(server.endpoint, insecure=True)
        send(peer, [b"x"])
        assert receive(server.socket)[1:] == [b"x"]
        with pytest.raises(AlreadyRunning, match="bound by another"):
            router(context, server.endpoint, insecure=True)


def test_curve_lets_in_only_listed_clients(
    context: zmq.Context, client: Callable[..., zmq.Socket], folder: Path
) -> None:
    generate_keys(folder / "keys")
    server_keys, listed = load_server_keys(folder / "keys"), load_client_keys(folder / "keys")
    public, secret = zmq.curve_keypair()
    unlisted = ClientKeys(public, secret, listed.server)
    wrong_server = ClientKeys(listed.public, listed.secret, public)
    with router(context, "tcp://127.0.0.1:*", keys=server_keys) as server:
        strangers = [
            client(server.endpoint, keys=unlisted),
            client(server.endpoint, keys=wrong_server),
            client(server.endpoint, insecure=True),
        ]
        refusals = [refusal(stranger) for stranger in strangers]
        friend = client(server.endpoint, keys=listed)
        send(friend, [b"friend"])
        assert receive(server.socket)[1:] == [b"friend"]
        for refused in refusals:
            with refused:
                assert refused.poll(WAIT_MS), "a stranger was not turned away"
        for stranger in strangers:
            with pytest.raises(zmq.Again):
                stranger.send_multipart([b"stranger"], zmq.NOBLOCK)


def refusal(socket: zmq.Socket) -> zmq.Socket:
    """A socket that becomes readable when the handshake of `socket` fails."""
    return socket.get_monitor_socket(
        zmq.EVENT_HANDSHAKE_FAILED_AUTH
        | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
        | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
        | zmq.EVENT_DISCONNECTED
    )


def test_keys_are_private_and_never_replaced(folder: Path) -> None:
    generate_keys(folder / "keys", ["a", "b"])
    assert len(load_server_keys(folder / "keys").allowed) == 2
    with pytest.raises(ConfigError, match="already has keys"):
        generate_keys(folder / "keys")
    (folder / "keys/a.secret").chmod(0o644)
    with pytest.raises(ConfigError, match="0644"):
        load_client_keys(folder / "keys", "a")
    (folder / "keys/b.secret").write_text("%%%")
    with pytest.raises(ConfigError, match="40 characters"):
        load_client_keys(folder / "keys", "b")
    with pytest.raises(ConfigError, match="No such file"):
        load_client_keys(folder / "keys", "c")
