"""CURVE keys of a control plane on tcp://: one folder, one text file a key, an allow-list of clients.

    server.public  server.secret     the coordinator's pair; every role needs the public half
    NAME.public    NAME.secret       a client's pair (by default one, "roles", shared by all roles)
    allowed                          public keys of clients that may connect, one a line, # for comments

Keys are 32 bytes, written in Z85 (40 characters). Secrets are 0600; one that others can read is refused.
"""

from __future__ import annotations

import os
import stat
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import zmq
from zmq.utils import z85

from protocol.errors import ConfigError
from protocol.files import private_folder, write_durably

KEY_CHARACTERS = 40


class ServerKeys(NamedTuple):
    """What the coordinator needs: its pair, and the public keys of the clients it lets in."""

    public: bytes
    secret: bytes
    allowed: frozenset[bytes]


class ClientKeys(NamedTuple):
    """What a role needs: its pair, and the coordinator's public key."""

    public: bytes
    secret: bytes
    server: bytes


def generate_keys(folder: Path, clients: Sequence[str] = ("roles",)) -> None:
    """A fresh set of keys in `folder` (made 0700). ConfigError if it has some: none is replaced."""
    private_folder(folder)
    existing = sorted(
        p.name for p in folder.iterdir() if p.suffix in {".secret", ".public"} or p.name == "allowed"
    )
    if existing:
        raise ConfigError(f"folder {folder} already has keys ({', '.join(existing)}); choose an empty one")
    _generate_pair(folder, "server")
    allowed = [_generate_pair(folder, client) for client in clients]
    write_durably(folder / "allowed", b"".join(key + b"\n" for key in allowed))


def load_server_keys(folder: Path) -> ServerKeys:
    """The coordinator's keys from `folder`. ConfigError for a missing, open or malformed file."""
    lines = _read(folder / "allowed").splitlines()
    keys = [line.strip() for line in lines if line.strip() and not line.startswith(b"#")]
    allowed = frozenset(_checked(folder / "allowed", key) for key in keys)
    return ServerKeys(_load(folder / "server.public"), _load_secret(folder / "server.secret"), allowed)


def load_client_keys(folder: Path, client: str = "roles") -> ClientKeys:
    """A role's keys from `folder`. ConfigError for a missing, open or malformed file."""
    return ClientKeys(
        _load(folder / f"{client}.public"),
        _load_secret(folder / f"{client}.secret"),
        _load(folder / "server.public"),
    )


def _generate_pair(folder: Path, name: str) -> bytes:
    public, secret = zmq.curve_keypair()
    write_durably(folder / f"{name}.secret", secret + b"\n")
    write_durably(folder / f"{name}.public", public + b"\n")
    return public


def _load_secret(path: Path) -> bytes:
    key = _load(path)
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & 0o077:
        raise ConfigError(f"secret key {path} has mode {mode:04o}; others can read it: chmod 600 {path}")
    return key


def _load(path: Path) -> bytes:
    return _checked(path, _read(path).strip())


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"key file {path}: {os.strerror(error.errno or 0)}; make keys with `draftmill keys`"
        ) from error


def _checked(path: Path, key: bytes) -> bytes:
    try:
        valid = len(key) == KEY_CHARACTERS and len(z85.decode(key)) == 32
    except (ValueError, KeyError, struct.error):
        valid = False
    if not valid:
        raise ConfigError(
            f"key file {path}: a key is {KEY_CHARACTERS} characters of Z85; make keys with `draftmill keys`"
        )
    return key
