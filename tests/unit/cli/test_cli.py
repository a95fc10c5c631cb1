"""The command line as people meet it: real processes, their output and exit codes."""

import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from transformers import LlamaConfig

from protocol.errors import ConfigError
from protocol.files import FileLock
from services.cli_eval import device_named
from services.config.names import OPTIONS
from services.lifecycle import ExitCode

NEEDED = ["--model.path", "m", "--data.path", "d"]


def draftmill(*words: str, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "services.cli", *words]
    return subprocess.run(command, capture_output=True, text=True, cwd=folder, check=False)


def test_config_shows_every_option_with_its_value_and_origin(tmp_path):
    (tmp_path / "run.toml").write_text("[target]\ncount = 2\n")
    ran = draftmill("config", "--config", "run.toml", *NEEDED, "--recipe.lr=0.001", folder=tmp_path)
    assert ran.returncode == 0, ran.stderr
    lines = {line.split()[0]: line.split()[1:] for line in ran.stdout.splitlines()}
    assert lines["target.count"] == ["2", "(run.toml:2)"]
    assert lines["recipe.lr"] == ["0.001", "(--recipe.lr)"]
    assert lines["run.epochs"] == ["1", "(default)"]
    assert set(lines) == {option.path for option in OPTIONS}


@pytest.mark.parametrize("sink", ["/dev/full", "closed pipe"])
def test_the_exit_code_does_not_depend_on_who_reads_what_is_printed(sink):
    """Roles write into the run's folder, whose disk may be full."""
    if sink == "closed pipe":
        reader, stderr = os.pipe()
        os.close(reader)
    else:
        stderr = os.open(sink, os.O_WRONLY)
    command = [sys.executable, "-m", "services.cli", "check", *NEEDED, "--target.slot", "3"]
    ran = subprocess.run(command, stderr=stderr, check=False)
    os.close(stderr)
    assert ran.returncode == ExitCode.CONFIGURATION


@pytest.mark.parametrize(
    "command", ["up", "coordinator", "target", "drafter", "evaluator", "check", "plan", "status", "stop"]
)
def test_every_command_refuses_a_wrong_option_in_one_block_and_leaves_the_disk_alone(tmp_path, command):
    ran = draftmill(command, *NEEDED, "--target.slot", "3", "--run.epochs", "none", folder=tmp_path)
    assert ran.returncode == ExitCode.CONFIGURATION
    assert "2 problems" in ran.stderr
    assert "did you mean --target.slots?" in ran.stderr
    assert "run.epochs = none (--run.epochs): must be a valid integer" in ran.stderr
    assert "Traceback" not in ran.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_roles_compiler_keeps_its_kernels_where_the_option_says(tmp_path):
    """In a process of its own, as a role does it: the variable would outlive the test."""
    (tmp_path / "model").mkdir()
    flags = [("--model.path", str(tmp_path / "model")), ("--data.path", "d")]
    flags += [("--run.compile-cache", "~/kernels")]
    code = (
        "from types import SimpleNamespace\n"
        "from services import cli\n"
        f"cli._role(SimpleNamespace(obj={flags!r}), None, 'drafter', 0)\n"
        "from torch._inductor.runtime.cache_dir_utils import cache_dir, triton_cache_dir\n"
        "print(cache_dir(), triton_cache_dir(0))\n"
    )
    environ = {**os.environ, "HOME": str(tmp_path), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inherited")}
    environ.pop("TRITON_CACHE_DIR", None)
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environ, check=False
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.split() == [str(tmp_path / "kernels"), str(tmp_path / "kernels" / "triton" / "0")]


def test_an_unknown_command_or_plain_flag_is_a_usage_error():
    ran = draftmill("trian")
    assert ran.returncode == ExitCode.USAGE
    assert "train" in ran.stderr or "No such command" in ran.stderr
    assert draftmill("check", "--confg", "x").returncode == ExitCode.USAGE
    ran = draftmill("up", "--block-size", "8", "--seed=1", "--config", "--gpus")
    assert ran.returncode == ExitCode.USAGE
    assert "--block-size: did you mean --drafter.block-size?" in ran.stderr
    assert "--seed=1: did you mean --run.seed?" in ran.stderr
    assert "--gpus: did you mean --target.gpus or --drafter.gpus?" in ran.stderr


def test_a_folder_that_may_not_be_written_is_named_without_a_traceback(tmp_path):
    forbidden = Path("/sys/draftmill")  # not even to root
    try:
        forbidden.mkdir()
    except PermissionError:
        pass
    except OSError:
        pytest.skip("/sys is read-only here")
    places = {"model.path": tmp_path, "data.path": "d", "run.dir": forbidden}
    ran = draftmill("coordinator", *(f"--{option}={place}" for option, place in places.items()))
    assert ran.returncode == ExitCode.CONFIGURATION and "Traceback" not in ran.stderr
    assert f"{forbidden}: user" in ran.stderr and "may not read or write it" in ran.stderr


def test_prepare_says_where_the_rows_are_that_it_left_out(tmp_path):
    LlamaConfig(vocab_size=32).save_pretrained(tmp_path / "model")
    (tmp_path / "in.jsonl").write_text('{"input_ids": [1, 2, 3], "prompt_length": 1}\n{"text": "a"}\n')
    words = ["--model.path", "model", "--data.path", "data", "--data.on-bad-line", "skip"]
    ran = draftmill("prepare", "in.jsonl", *words, folder=tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout)["skipped"] == {"shape": 1}
    assert "1 row left out, with the reason: data/skipped.jsonl" in ran.stderr
    assert (tmp_path / "data" / "skipped.jsonl").is_file()


def test_a_device_that_is_not_there_is_an_option_that_is_wrong():
    assert device_named("cpu") == "cpu"
    with pytest.raises(ConfigError, match="--device cuda:99: there is no GPU 99 here"):
        device_named("cuda:99")
    with pytest.raises(ConfigError, match="--device gpu: a device is cpu, or a GPU as torch counts them"):
        device_named("gpu")


def test_status_and_stop_of_a_run_that_does_not_run(tmp_path):
    for command in ("status", "stop"):
        ran = draftmill(command, str(tmp_path))
        assert ran.returncode == ExitCode.PEER_LOST
        assert "is the run started?" in ran.stderr


STATUS = {
    "run": "demo",
    "state": "running",
    "step": 3,
    "total_steps": 9,
    "epochs": 1,
    "added_later": 1,
    "roles": [
        {"role": "target", "index": 0, "slots": [{"batch": [0, 4], "state": "ready", "holder": "drafter-x"}]}
    ],
    "batches": {"committed": 12, "failed": 1},
    "checkpoints": [{"timeline": 0, "step": 3, "name": "t0-s3"}],
}


@pytest.fixture
def live_run(tmp_path):
    """A run folder whose coordinator answers as /status and /stop do, and ends when it is asked to."""
    lock = FileLock(tmp_path / "coordinator.lock").acquire()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.answer(json.dumps(STATUS).encode())

        def do_POST(self):
            (tmp_path / "result.json").write_text(json.dumps(STATUS | {"state": "stopping"}))
            self.answer(b"")
            lock.release()

        def answer(self, body):
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = {
            "http": f"http://127.0.0.1:{server.server_address[1]}",
            "pid": 1,
            "incarnation": "coordinator-1",
        }
        (tmp_path / "coordinator.json").write_text(json.dumps(address))
        yield tmp_path
        server.shutdown()


def test_status_tells_what_is_held_by_whom(live_run):
    ran = draftmill("status", str(live_run))
    assert ran.returncode == 0, ran.stderr
    for part in (
        "step 3/9",
        "target-0",
        "drafter-x",
        "12 batches committed, 1 failed",
        "t0-s3",
        "no advice yet",
    ):
        assert part in ran.stdout
    assert json.loads(draftmill("status", str(live_run), "--json").stdout) == STATUS


def test_stop_asks_waits_for_the_end_and_tells_it(live_run):
    ran = draftmill("stop", str(live_run))
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == "stopping at step 3 of 9; `draftmill up` resumes it\n"


@pytest.mark.parametrize(
    ("end", "said"),
    [
        ({"state": "stopped"}, "stopped at step 3 of 9; `draftmill up` resumes it"),
        ({"state": "finished", "step": 9, "samples_committed": 48}, "finished: 9 steps, 48 samples"),
        ({"state": "failed", "reason": "too many failed"}, "failed at step 3 of 9: too many failed"),
    ],
)
def test_a_run_that_is_over_tells_how_it_ended(tmp_path, end, said):
    (tmp_path / "coordinator.json").write_text(json.dumps({"http": "http://127.0.0.1:9"}))
    for command in ("status", "stop"):
        ran = draftmill(command, str(tmp_path))
        assert ran.returncode == ExitCode.PEER_LOST
        assert "ended without telling how far it was; `draftmill up` resumes it" in ran.stderr
    (tmp_path / "result.json").write_text(json.dumps(STATUS | end))
    for command in ("status", "stop"):
        ran = draftmill(command, str(tmp_path))
        assert ran.returncode == 0, ran.stderr
        assert ran.stdout.splitlines()[-1] == said
    assert json.loads(draftmill("status", str(tmp_path), "--json").stdout) == STATUS | end


def test_keys_are_made_once(tmp_path):
    assert draftmill("keys", str(tmp_path / "keys")).returncode == 0
    assert (tmp_path / "keys" / "server.secret").stat().st_mode & 0o077 == 0
    again = draftmill("keys", str(tmp_path / "keys"))
    assert again.returncode == ExitCode.CONFIGURATION
    assert "already has keys" in again.stderr
