"""The drafter that hosts the group's store freezes for good: the others go on, with the state they have."""

import signal

import pytest

pytestmark = pytest.mark.process


def last_group(run, name: str) -> dict[str, str]:
    """What its log says of the group it formed last: generation, rank, size."""
    lines = [line for line in run.log(name).splitlines() if " rank=" in line and " size=" in line]
    return dict(word.split("=", 1) for word in lines[-1].split() if "=" in word) if lines else {}


def host_of_all(run) -> str | None:
    """The first member, once all stand in one group."""
    groups = {name: last_group(run, name) for name in run.names() if name.startswith("drafter")}
    if {group.get("size") for group in groups.values()} != {str(run.drafters)}:
        return None
    if len({group["generation"] for group in groups.values()}) != 1:
        return None
    return next(name for name, group in groups.items() if group["rank"] == "0")


def test_the_others_go_on_without_a_frozen_host_and_roll_nothing_back(make_run):
    run = make_run(drafters=3, drafter_more='elastic = "shrink"')
    text = run.file.read_text().replace("silence_s = 10.0", "silence_s = 2.0")
    run.file.write_text(text.replace("epochs = 2", "epochs = 8"))
    run.start()
    run.wait(lambda: host_of_all(run) is not None, "a group of all")
    run.wait_step(run.committed_steps() + 2)
    frozen = host_of_all(run)
    assert frozen is not None
    run.kill(frozen, signal.SIGSTOP)
    run.wait(lambda: run.query("SELECT 1 FROM incarnations WHERE died LIKE 'silent%'") != [], "the fence")
    run.wait_step(run.committed_steps() + 2)
    run.kill(frozen)
    run.wait_finished()
    run.assert_exactly_once()
    assert run.query("SELECT count(*) FROM timelines") == [(1,)], "rolled back"
    assert run.query("SELECT count(*) FROM incarnations WHERE died NOT LIKE 'left%'") == [(1,)]
