"""The bytes of every message, in messages.json: a change of one is a change of the protocol.

Two versions that run side by side must agree on them. After a deliberate change raise
PROTOCOL_VERSION and write the file anew: `python tests/golden/test_messages.py`.
"""

import json
from pathlib import Path

import pytest

from protocol import messages as m
from protocol.codec import decode, encode

FILE = Path(__file__).with_name("messages.json")
BATCH, ATTEMPT, LEASE = m.BatchId(0, 7), m.Stamp(1, 41), m.Stamp(2, 3)
TRY, AT = m.StepTry(0, 12, 2, 9), m.StepAt(0, 12)
SHA = "0123456789abcdef" * 4

EXAMPLES: tuple[m.Message, ...] = (
    m.Pack(
        target="target-3f9c",
        lease=LEASE,
        descriptor=m.Descriptor(
            arena="target-3f9c.arena",
            slot=2,
            batch=BATCH,
            attempt=ATTEMPT,
            tokens=300,
            payload_bytes=1920,
            checksum=2**63 - 1,
            sections=(
                m.Section(name="features", dtype="bfloat16", shape=(300, 2), offset=0),
                m.Section(name="loss_mask", dtype="uint8", shape=(300,), offset=1216),
            ),
        ),
    ),
    m.TargetHello(
        incarnation="target-3f9c", seq=0, protocol=m.PROTOCOL_VERSION, fingerprint=SHA, host="gpu-1",
        index=None, arena="target-3f9c.arena", slots=6, slot_bytes=2**27,
    ),
    m.DrafterHello(
        incarnation="drafter-11aa", seq=0, protocol=m.PROTOCOL_VERSION, fingerprint=SHA, host="gpu-1",
        index=0, inbox="ipc:///dev/shm/draftmill/demo-00c0ffee/drafter-11aa.inbox",
    ),
    m.TargetReport(
        incarnation="target-3f9c", seq=17, orders=m.Stamp(2, 5), totals={"forward_s": 1.5, "tokens": 8192.0},
        slots=(
            m.SlotReport(
                batch=BATCH, attempt=ATTEMPT, state="ready", slot=2, tokens=300, payload_bytes=1920,
                skipped=(m.SkippedSample(sample=99, reason="non-finite"),), reason="", published=LEASE,
            ),
            m.SlotReport(
                batch=m.BatchId(0, 8), attempt=m.Stamp(2, 4), state="queued", slot=None, tokens=0,
                payload_bytes=0, skipped=(), reason="", published=None,
            ),
        ),
    ),
    m.DrafterReport(
        incarnation="drafter-11aa", seq=18, orders=m.Stamp(2, 6), totals={}, complete=AT, generation=3,
        held=(ATTEMPT,), training=TRY, trained=1,
        vote=m.Vote(step_try=TRY, packs=(ATTEMPT,), bad_positions=(1,), gradient_finite=False),
        saved=(m.Saved(at=AT, name="0-12-drafter-11aa", sha256=SHA),),
        metrics=(m.StepMetrics(at=AT, values={"loss": float("nan"), "grad_norm": float("inf"), "lr": 6e-4}),),
        failures=(m.Failure(order="save", reason="disk full"),),
    ),
    m.Bye(incarnation="drafter-11aa", seq=19, reason="SIGTERM"),
    m.Who(),
    m.Welcome(incarnation="target-3f9c", index=0),
    m.Exit(incarnation="target-3f9c", finished=True, reason="the run is finished"),
    m.TargetOrders(
        incarnation="target-3f9c", stamp=m.Stamp(2, 5),
        assignments=(
            m.Assignment(
                batch=BATCH, attempt=ATTEMPT, samples=(5, 300, 70000),
                publish=m.Publication(lease=LEASE, inbox="ipc:///dev/shm/draftmill/demo/drafter-11aa.inbox"),
            ),
            m.Assignment(batch=m.BatchId(0, 8), attempt=m.Stamp(2, 4), samples=(1,), publish=None),
        ),
    ),
    m.DrafterOrders(
        incarnation="drafter-11aa", stamp=m.Stamp(2, 6), held=(ATTEMPT,), arenas=("target-3f9c.arena",),
        group=m.Group(generation=3, members=(m.Member(rank=0, incarnation="drafter-11aa"),), store="h:29500"),
        adopt=m.Adopt(at=AT, source="checkpoint", name="0-12-drafter-11aa", sha256=SHA), committed=TRY,
        train=m.Train(
            step_try=TRY,
            packs=(
                m.TrainPack(position=0, batch=BATCH, attempt=ATTEMPT),
                m.TrainPack(position=1, batch=m.BatchId(0, 8), attempt=None),
            ),
        ),
        save=AT, recorded=(m.StepAt(0, 0),),
    ),
)  # fmt: skip


def test_there_is_an_example_of_every_message() -> None:
    assert tuple(type(example) for example in EXAMPLES) == m.MESSAGES


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: type(example).__name__)
def test_the_bytes_of_a_message_have_not_changed(example: m.Message) -> None:
    name, body = encode(example)
    golden = json.loads(FILE.read_text())
    assert golden["protocol"] == m.PROTOCOL_VERSION
    assert golden["messages"][name.decode()] == body.hex()
    assert repr(decode([name, bytes.fromhex(golden["messages"][name.decode()])])) == repr(example)


if __name__ == "__main__":
    bodies = {name.decode(): body.hex() for name, body in map(encode, EXAMPLES)}
    FILE.write_text(json.dumps({"protocol": m.PROTOCOL_VERSION, "messages": bodies}, indent=1) + "\n")
