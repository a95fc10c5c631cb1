"""The view shows what a person needs to know who waits for whom."""

import io

from rich.console import Console

from services.local.status import Batches, Event, Role, Slot, Status
from services.local.view import duration, plain_line, render, size

STATUS = Status(
    run="demo",
    state="running",
    epoch=1,
    epochs=3,
    step=34,
    total_steps=120,
    samples_total=900,
    samples_committed=270,
    samples_failed=2,
    batches=Batches(pending=80, assigned=2, ready=3, leased=4),
    in_flight_packs=9,
    in_flight_cap_packs=12,
    in_flight_bytes=3 << 20,
    target_tokens_per_s=950.4,
    drafter_tokens_per_s=480.0,
    loss=3.25,
    lr=6e-4,
    eta_s=200.0,
    wall_s=61.0,
    roles=(
        Role(
            role="target",
            index=0,
            state="ready",
            tokens_per_s=950.4,
            waits_for="slot",
            slots=(Slot(state="ready"),),
        ),
        Role(role="drafter", index=0, state="ready", silent_s=12.0),
    ),
    events=(Event(at=0.0, text="target-0 joined"),),
)


def drawn(status: Status | None, note: str = "") -> str:
    console = Console(file=io.StringIO(), width=120)
    console.print(render(status, {"target-0": 2}, note))
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_the_live_view_shows_progress_rates_pool_cap_waits_loss_and_restarts():
    text = drawn(STATUS, "stopping")
    wanted = [
        "running",
        "epoch 2/3",
        "step 34/120",
        "ETA 3m20s",
        "270/900 samples, 2 failed",
        "in flight 9/12 packs",
    ]
    wanted += [
        "3 MiB",
        "ready 3",
        "leased 4",
        "targets 950",
        "drafters 480",
        "loss 3.2500",
        "lr 0.0006",
        "target-0",
    ]
    wanted += ["slot", "1 ready", "silent 12s", "restarts 2", "target-0 joined", "stopping"]
    assert [part for part in wanted if part not in text] == []


def test_the_view_of_an_unborn_run():
    assert "waiting for the coordinator" in drawn(None)
    assert "waiting for the coordinator" in plain_line(None, 0)


def test_the_plain_line_says_the_same_in_one_line():
    line = plain_line(STATUS, 2)
    assert "\n" not in line
    for part in ("state=running", "epoch=2/3", "step=34/120", "eta=3m20s", "in_flight=9/12", "loss=3.250"):
        assert part in line
    assert line.endswith("waits: target-0 for slot")


def test_durations_and_sizes():
    assert [duration(value) for value in (None, 45.2, 200, 3720)] == ["-", "45s", "3m20s", "1h02m"]
    sizes = {
        0: "0 B",
        1023: "1023 B",
        1536: "1.5 KiB",
        3 << 30: "3 GiB",
        200 << 30: "200 GiB",
        1 << 51: "2048 TiB",
    }
    assert {value: size(value) for value in sizes} == sizes
