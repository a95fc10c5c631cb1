"""A real Docker engine and a real compose project; what cannot be had is a reason to skip.

The engine is the one that runs, else a `dockerd` of our own on a temporary data folder (root only). The base
image is made with debootstrap, once (1 to 3 minutes), and kept as a tar in the user's cache.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
IMAGE = "draftmill-test-base"
USER_ID = 1000
# what an interpreter built on this release links to, beside the C library
LIBRARIES = (
    "libsqlite3-0", "libffi8", "libssl3", "libbz2-1.0", "liblzma5", "libexpat1", "libuuid1", "libreadline8",
    "libncursesw6", "zlib1g",
)  # fmt: skip
DEADLINE_S = 300.0


class Unavailable(Exception):
    """Why there is no engine, image or compose here."""


def run(*words: str, check: bool = True, **more) -> str:
    done = subprocess.run(words, capture_output=True, text=True, **more)
    if check and done.returncode:
        raise AssertionError(f"{' '.join(words)}: exit {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout.strip()


def wait(until: Callable[[], bool], what: str, *, limit_s: float = DEADLINE_S, tell=lambda: "") -> None:
    """Poll a condition twice a second, with a deadline."""
    deadline_s = time.monotonic() + limit_s
    pause = subprocess.Popen(["sleep", str(limit_s + 60)])
    try:
        while not until():
            if time.monotonic() > deadline_s:
                raise AssertionError(f"{what}: not within {limit_s:.0f} s\n{tell()}")
            with contextlib.suppress(subprocess.TimeoutExpired):
                pause.wait(0.5)
    finally:
        pause.kill()
        pause.wait()


def answers() -> bool:
    return subprocess.run(["docker", "info"], capture_output=True).returncode == 0


@contextlib.contextmanager
def engine() -> Iterator[None]:
    """The running engine, else one of ours for as long as the block lasts."""
    if not shutil.which("docker"):
        raise Unavailable("needs docker (Debian: docker.io)")
    if answers():
        yield
        return
    if os.geteuid() != 0 or not shutil.which("dockerd"):
        raise Unavailable(
            "no Docker engine answers, and only root with dockerd (Debian: docker.io) can start one"
        )
    with tempfile.TemporaryDirectory(prefix="draftmill-engine-") as folder:
        socket = f"unix://{folder}/docker.sock"
        words = ["dockerd", "--data-root", f"{folder}/data", "--exec-root", f"{folder}/exec", "-H", socket]
        log = Path(folder, "dockerd.log")
        with log.open("wb") as file:
            daemon = subprocess.Popen([*words, "--pidfile", f"{folder}/pid"], stdout=file, stderr=file)
        before = os.environ.get("DOCKER_HOST")
        os.environ["DOCKER_HOST"] = socket
        try:
            wait(lambda: answers() or daemon.poll() is not None, "dockerd", limit_s=60)
            if daemon.poll() is not None:
                raise Unavailable("dockerd cannot run here: " + "".join(log.read_text().splitlines()[-1:]))
            yield
        finally:
            os.environ.pop("DOCKER_HOST") if before is None else os.environ.update(DOCKER_HOST=before)
            daemon.terminate()
            daemon.wait(60)


def base_image() -> str:
    """IMAGE in the engine: Debian bookworm with the libraries that Python links to, and our folders."""
    if run("docker", "images", "-q", IMAGE):
        return IMAGE
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "draftmill"
    tar = cache / f"{IMAGE}-bookworm.tar"
    if not tar.exists():
        _debootstrap(tar)
    run("docker", "import", str(tar), IMAGE)
    return IMAGE


def _debootstrap(tar: Path) -> None:
    if os.geteuid() != 0 or not shutil.which("debootstrap"):
        raise Unavailable("the base image needs root and debootstrap (Debian: debootstrap)")
    tar.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="draftmill-base-", dir=tar.parent) as folder:
        root = Path(folder, "root")
        include = f"--include={','.join(LIBRARIES)}"
        done = subprocess.run(
            ["debootstrap", "--variant=minbase", include, "bookworm", str(root)],
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise Unavailable("debootstrap: " + done.stdout.strip().rpartition("\n")[2])
        (root / "root").chmod(0o755)  # this machine's Python may lie below
        for name, mode in (
            ("runs", 0o755),
            ("data", 0o755),
            ("models", 0o755),
            ("cache", 0o700),
            ("arena", 0o700),
        ):
            (root / name).mkdir()
            (root / name).chmod(mode)
            os.chown(root / name, USER_ID, USER_ID)
        aside = Path(folder, "image.tar")
        run("tar", "-C", str(root), "-c", "-f", str(aside), ".")
        aside.rename(tar)


def compose_command() -> list[str]:
    if shutil.which("docker-compose"):
        return ["docker-compose"]
    if subprocess.run(["docker", "compose", "version"], capture_output=True).returncode == 0:
        return ["docker", "compose"]
    raise Unavailable("needs docker-compose (Debian: docker-compose)")


class Project:
    """One compose project in a copy of the files that users have."""

    def __init__(self, folder: Path, name: str, port: int, variables: dict[str, str]) -> None:
        self.name, self.port, self._command = name, port, compose_command()
        self.folder = folder
        shutil.copytree(ROOT / "deploy", folder / "deploy")
        shutil.copy(ROOT / "docker-compose.yml", folder)
        shutil.copy(Path(__file__).parent / "compose.test.yml", folder)
        given = {
            "COMPOSE_PROJECT_NAME": name, "COMPOSE_FILE": "docker-compose.yml:compose.test.yml",
            "STATUS_AT": f"127.0.0.1:{port}", "TEST_IMAGE": IMAGE, "TEST_CHECKOUT": str(ROOT),
            "TEST_PYTHON": sys.executable, "TEST_PREFIX": sys.prefix, "TEST_BASE_PREFIX": sys.base_prefix,
            "MEMLOCK": str(resource.getrlimit(resource.RLIMIT_MEMLOCK)[1]),
        }  # fmt: skip
        text = "".join(f"{key}={value}\n" for key, value in (given | variables).items())
        (folder / ".env").write_text(text)

    def compose(self, *words: str, check: bool = True) -> str:
        environ = {k: v for k, v in os.environ.items() if not k.startswith(("DFLASH_", "COMPOSE_"))}
        return run(*self._command, *words, cwd=self.folder, env=environ, check=check)

    def container(self, service: str, number: int = 1) -> str:
        label = [
            f"label=com.docker.compose.project={self.name}",
            f"label=com.docker.compose.service={service}",
        ]
        numbered = f"label=com.docker.compose.container-number={number}"
        words = [word for text in (*label, numbered) for word in ("--filter", text)]
        return run("docker", "ps", "-a", "-q", *words)

    def state(self, container: str) -> dict:
        return json.loads(run("docker", "inspect", "-f", "{{json .State}}", container))

    def get(self, path: str) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=10) as answer:
            return answer.read().decode()

    def status(self) -> dict | None:
        """None while the coordinator does not answer."""
        try:
            return json.loads(self.get("/status"))
        except OSError:
            return None

    def step(self) -> int:
        status = self.status()
        return status["step"] if status else -1

    def logs(self) -> str:
        return self.compose("logs", "--no-color", "--tail=15", check=False)

    def left(self) -> dict[str, str]:
        """What the engine still has of this project."""
        mine = ["--filter", f"label=com.docker.compose.project={self.name}", "-q"]
        return {
            "containers": run("docker", "ps", "-a", *mine),
            "volumes": run("docker", "volume", "ls", *mine),
            "networks": run("docker", "network", "ls", *mine),
            "mounts": "\n".join(
                line for line in Path("/proc/mounts").read_text().splitlines() if f"{self.name}_arena" in line
            ),
        }
