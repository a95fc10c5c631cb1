"""Roles as containers start them: without an index, always restarted, idle when the run is over."""

import os
import re
import signal
from pathlib import Path

import pytest

pytestmark = [pytest.mark.process, pytest.mark.slow]

PLACES = {("target", "0"), ("target", "1"), ("drafter", "0")}
LINGER = "[watch]\nlinger = true\n"


def command_of(process) -> str:
    return Path(f"/proc/{process.pid}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip()


def taken(run) -> set[tuple[str, int]]:
    """Places of those whom the coordinator knows; none while nobody answers."""
    try:
        return {(role["role"], role["index"]) for role in run.status()["roles"]}
    except OSError:
        return set()


@pytest.fixture
def unplaced(make_run):
    run = make_run(extra=LINGER)
    run.placed = False
    upload = f'every_steps = 4\nupload = "{run.dir / "elsewhere"}"'
    run.file.write_text(run.file.read_text().replace("every_steps = 4", upload))
    return run


def test_roles_find_their_places_again_and_rest_at_the_end(unplaced, undisturbed):
    run = unplaced
    run.start("coordinator", "drafter-0")  # no step without a target: a run of a second would be over
    run.wait(lambda: taken(run) == {("drafter", 0)}, "the drafter's place")
    for victim in ("drafter-0", "coordinator"):
        run.kill(victim)
        run.start(victim)
        run.wait(lambda: taken(run) == {("drafter", 0)}, f"the drafter's place after {victim}'s death")
    run.start("target-0", "target-1")
    run.wait(lambda: "joined as target" in run.log("coordinator"), "a target")
    run.kill("target-0")
    run.wait(run.finished, "the finished record", revive=True)
    joined = set(re.findall(r"(target|drafter) (\d+) joined as", run.log("coordinator")))
    assert ("drafter", "0") in joined and joined <= PLACES and len(joined) > 1
    roles = [run.processes[name] for name in run.names() if name != "coordinator"]
    run.wait(lambda: all(command_of(process) == "sleep infinity" for process in roles), "all roles at rest")
    run.wait(lambda: (run.dir / "result.json").exists(), "the accounting")

    status = run.status()  # still served, for whoever looks after the end
    assert status["state"] == "finished" and status["batches_without_outcome"] == 0
    assert run.get("/healthz") == "ok"
    last = status["checkpoints"][-1]["name"]
    assert status["checkpoints"][-1]["step"] == status["step"]
    run.wait((run.dir / "elsewhere" / last / "uploaded.json").exists, "the last checkpoint's copy")
    assert "draftmill_upload_errors_total 0.0" in run.get("/metrics")

    run.start("target-0")  # a container that is started anew, e.g. with the host
    run.wait(lambda: command_of(run.processes["target-0"]) == "sleep infinity", "a late one rests too")

    run.kill("coordinator", signal.SIGTERM)
    assert run.processes["coordinator"].returncode == 0
    for process in [*roles, run.processes["target-0"]]:
        os.kill(process.pid, signal.SIGTERM)
        process.wait(10)
    run.assert_exactly_once()
    run.assert_nothing_left()
    assert run.final_weights() == undisturbed
