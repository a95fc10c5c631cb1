"""One fault at a time against a real run, which must finish exactly once and with the same bits."""

import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import zmq
from harness import DEADLINE_S, environment, slowness

from protocol.codec import encode
from protocol.messages import (
    MESSAGES,
    PROTOCOL_VERSION,
    Bye,
    DrafterHello,
    DrafterReport,
    Failure,
    Stamp,
    StepAt,
    TargetReport,
)
from protocol.sockets import dealer, new_context
from services.lifecycle import ExitCode, arena_folder, control_endpoint

pytestmark = pytest.mark.process


def change(run, **options: str) -> None:
    """Replace options of the harness's configuration by name."""
    lines = run.file.read_text().splitlines()
    for name, value in options.items():
        (at,) = [number for number, line in enumerate(lines) if line.split(" = ")[0] == name]
        lines[at] = f"{name} = {value}"
    run.file.write_text("\n".join(lines) + "\n")


def command(run, *words: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "services.cli", *words, "--config", str(run.file)]
    return subprocess.run(
        line, capture_output=True, text=True, timeout=DEADLINE_S * slowness(), env=environment(), check=False
    )


def incarnations(run, role: str) -> list[str]:
    return sorted(
        lock.stem for lock in arena_folder(run.config).glob(f"{role}-*.lock") if lock.suffix == ".lock"
    )


# ---- strangers --------------------------------------------------------------------------------


def hostile(run, seeded: random.Random) -> list[bytes]:
    """No message, half a message, or one that a living member said long ago."""
    kind = seeded.randrange(6)
    names = [message.__name__.encode() for message in MESSAGES]
    if kind == 0:
        return [seeded.randbytes(seeded.randrange(64)) for _ in range(seeded.randrange(1, 5))]
    if kind == 1:
        return [seeded.choice(names), seeded.randbytes(seeded.randrange(256))]
    name = seeded.choice(run.known)
    common = {"incarnation": name, "seq": seeded.randrange(2)}
    level = {"orders": Stamp(0, 0), "totals": {}}
    if kind == 2:
        return encode(Bye(**common, reason="replayed"))
    if kind == 3:
        return encode(TargetReport(**common, **level, slots=()))
    if kind == 4:
        ahead = StepAt(0, 21)
        return encode(
            DrafterReport(
                **common,
                **level,
                complete=ahead,
                generation=None,
                held=(),
                training=None,
                trained=0,
                vote=None,
                saved=(),
                metrics=(),
                failures=(
                    Failure(order="group", reason="replayed"),
                    Failure(order="adopt", reason="replayed"),
                ),
            )
        )
    frames = encode(
        DrafterHello(
            **common,
            protocol=PROTOCOL_VERSION,
            fingerprint="0" * 64,
            host="h",
            index=None,
            inbox="ipc:///nowhere",
        )
    )
    return [frames[0], frames[1][: seeded.randrange(len(frames[1]))]] if seeded.random() < 0.5 else frames


def test_ten_thousand_messages_of_a_stranger_change_nothing(make_run, undisturbed):
    run = make_run()
    run.start()
    run.wait_step(1)
    run.known = [*incarnations(run, "target"), *incarnations(run, "drafter"), "target-0000000000ab"]
    seeded, sent = random.Random(5), 0
    with new_context() as context, dealer(context, control_endpoint(run.config)) as stranger:
        while sent < 10_000 and not run.finished():
            for _ in range(100):  # each waits for room of its own: the queue may have had one place
                assert stranger.poll(DEADLINE_S * 1000, zmq.POLLOUT), "the coordinator takes no messages"
                stranger.send_multipart(hostile(run, seeded), zmq.NOBLOCK)
                sent += 1
            while stranger.poll(0):
                stranger.recv_multipart()
    assert sent >= 10_000, f"the run was over after {sent} messages: make it longer"
    run.wait_finished()
    run.assert_exactly_once()
    run.assert_nothing_left()
    assert run.final_weights() == undisturbed
    counters = run.result()["counters"]
    assert counters["refused_messages"] > 0 and counters["stale_messages"] > 0, (sent, counters)
    assert run.query("SELECT count(*) FROM incarnations WHERE died NOT LIKE 'left%'") == [(0,)]


# ---- the dead that are not ---------------------------------------------------------------------


def test_a_target_that_was_fenced_while_it_slept_is_sent_away_when_it_wakes(make_run, undisturbed):
    run = make_run(targets=1)
    change(run, silence_s="1.0")
    run.start()
    run.wait_step(2)
    run.kill("target-0", signal.SIGSTOP)
    run.wait(lambda: run.query("SELECT 1 FROM incarnations WHERE died LIKE 'silent%'") != [], "fenced")
    steps = run.committed_steps()
    run.kill("target-0", signal.SIGCONT)
    run.wait(lambda: run.processes["target-0"].poll() is not None, "the zombie's end", revive=True)
    assert run.processes["target-0"].returncode == ExitCode.REFUSED
    assert "declared dead" in run.log("target-0") and run.committed_steps() <= steps + 2
    run.wait_finished(revive=True)
    run.assert_exactly_once()
    run.assert_nothing_left()
    assert run.final_weights() == undisturbed


def test_a_second_coordinator_is_refused_and_the_first_goes_on(make_run):
    run = make_run()
    run.start("coordinator")
    run.wait(lambda: (run.dir / "coordinator.json").exists(), "the first")
    second = command(run, "coordinator")
    assert second.returncode == ExitCode.REFUSED
    assert "coordinator.lock is held by another live process" in second.stderr
    assert run.processes["coordinator"].poll() is None and run.status()["state"] == "starting"


# ---- memory ------------------------------------------------------------------------------------


@pytest.fixture
def small_memory(make_run):
    """A run whose arena folder is a file system of 8 MiB, for root."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")
    run = make_run(targets=1)
    options = "size=8m,mode=0700"
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "draftmill-test", str(run.arena)], check=True)
    yield run
    for process in run.processes.values():
        process.kill()
        process.wait(DEADLINE_S)
    subprocess.run(["umount", "-l", str(run.arena)], check=True)


def fill(file: Path) -> None:
    with file.open("ab", buffering=0) as stream, pytest.raises(OSError, match="No space"):
        while True:
            stream.write(bytes(4096))


def test_full_memory_keeps_new_targets_out_until_there_is_room_and_ends_no_run(small_memory, undisturbed):
    run = small_memory
    filler = run.arena / "filler"
    run.start()
    run.wait_step(2)
    run.kill("drafter-0")  # without it the run cannot end meanwhile, however long a target takes to start
    run.kill("target-0")
    run.wait(lambda: not list(run.arena.rglob("*.arena")), "the dead target's arena to be swept")
    fill(filler)
    run.start("target-0")
    assert run.processes["target-0"].wait(DEADLINE_S * slowness()) == ExitCode.PEER_LOST
    assert "enlarge the tmpfs" in run.log("target-0")
    filler.unlink()
    joined = run.log("coordinator").count(" joined as ")
    run.start("target-0", "drafter-0")
    run.wait(lambda: run.log("coordinator").count(" joined as ") == joined + 2, "both to join again")
    fill(filler)
    run.wait_finished()
    filler.unlink()
    run.assert_exactly_once()
    run.assert_nothing_left()
    assert run.final_weights() == undisturbed


# ---- another world, an earlier step ------------------------------------------------------------


@pytest.mark.long
def test_a_finished_run_goes_on_from_an_earlier_checkpoint_with_other_counts(make_run):
    first = make_run("moved", targets=2, drafters=2)
    first.start()
    first.wait_finished()
    absent = command(first, "rollback", "5")
    assert absent.returncode == ExitCode.CONFIGURATION
    assert "checkpoint of step 5: it is not kept; kept are 0, 16, 20, 22 (of 22" in absent.stderr
    done = command(first, "rollback", "16")
    assert done.returncode == 0 and "timeline 1 starts from ckpt-0-16-drafter-" in done.stdout

    second = make_run("moved", targets=1, drafters=1)
    second.start("coordinator")
    where = second.dir / "coordinator.json"
    second.wait(lambda: where.stat().st_mtime > done_at(first), "a coordinator")
    busy = command(second, "rollback", "0")
    assert busy.returncode == ExitCode.REFUSED and "held by another live process" in busy.stderr
    second.start("target-0", "drafter-0")
    finished = "SELECT 1 FROM finished WHERE timeline = 1"
    second.wait(lambda: second.query(finished) != [], "the second finished record")
    second.wait_finished()
    second.assert_exactly_once()
    second.assert_nothing_left()
    assert second.query("SELECT timeline, parent, step FROM timelines WHERE timeline > 0") == [(1, 0, 16)]
    metrics = [json.loads(line) for line in (second.dir / "metrics.jsonl").read_text().splitlines()]
    again = [line["step"] for line in metrics if line["timeline"] == 1]
    assert again == sorted(set(again)) and again[0] == 17


def done_at(run) -> float:
    return (run.dir / "result.json").stat().st_mtime
