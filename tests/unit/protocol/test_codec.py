"""Whatever arrives is a message or a DecodeError; whatever is sent arrives whole."""

import math
import tracemalloc
import types
import typing

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from protocol import messages as m
from protocol.codec import MAX_MAP_ITEMS, MAX_MESSAGE_BYTES, decode, encode
from protocol.errors import DecodeError

LEAVES = [
    (m.Count, st.integers(0, 2**63 - 1)),
    (m.Name, st.from_regex(r"\A[A-Za-z0-9_.\-]{1,128}\Z")),
    (m.Text, st.text(max_size=40)),
    (m.Sha256, st.text("0123456789abcdef", min_size=64, max_size=64)),
    (m.Totals, st.dictionaries(st.from_regex(r"\A[a-z_]{1,9}\Z"), st.floats(), max_size=4)),
    (bool, st.booleans()),
    (float, st.floats()),
    (types.NoneType, st.none()),
]


def values(kind: typing.Any) -> st.SearchStrategy:
    """A strategy for an annotation of messages.py."""
    for leaf, strategy in LEAVES:
        if kind is leaf:
            return strategy
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Literal:
        return st.sampled_from(parts)
    if origin is typing.Annotated:
        return values(parts[0])
    if origin in (types.UnionType, typing.Union):
        return st.one_of(*[values(part) for part in parts])
    if origin is tuple:
        return st.lists(values(parts[0]), max_size=2 if parts[0] is not m.Count else 4).map(tuple)
    assert isinstance(kind, type), kind
    assert issubclass(kind, (BaseModel, tuple)), kind
    hints = typing.get_type_hints(kind, include_extras=True)
    fields = kind.model_fields if issubclass(kind, BaseModel) else kind._fields
    return st.builds(kind, **{name: values(hints[name]) for name in fields})


any_message = st.one_of(*[values(kind) for kind in m.MESSAGES])
any_value = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.binary(), inner),
)
any_name = st.sampled_from([kind.__name__.encode() for kind in m.MESSAGES]) | st.binary()


def pack() -> m.Pack:
    section = m.Section(name="input_ids", dtype="int32", shape=(3,), offset=0)
    descriptor = m.Descriptor(
        arena="target-0.arena",
        slot=0,
        batch=m.BatchId(0, 1),
        attempt=m.Stamp(1, 2),
        tokens=3,
        payload_bytes=64,
        checksum=None,
        sections=(section,),
    )
    return m.Pack(target="target-0", lease=m.Stamp(1, 3), descriptor=descriptor)


def changed(**fields: object) -> list[bytes]:
    """The frames of a Pack with other or further fields."""
    return [b"Pack", msgpack.packb(pack().model_dump() | fields)]


def decoded_or_refused(frames: list[bytes]) -> None:
    try:
        message = decode(frames)
    except DecodeError:
        return
    assert isinstance(message, m.Message)


@settings(deadline=None)
@given(any_message)
def test_a_message_survives_the_wire(message: m.Message) -> None:
    again = decode(encode(message))
    assert type(again) is type(message)
    assert repr(again) == repr(message)  # NaN differs from itself, its repr does not
    assert encode(again) == encode(message)


@settings(deadline=None)
@given(st.lists(st.binary(max_size=200), max_size=4))
def test_any_frames_are_a_message_or_refused(frames: list[bytes]) -> None:
    decoded_or_refused(frames)


@settings(deadline=None)
@given(any_name, st.binary(max_size=400) | any_value.map(msgpack.packb))
def test_any_body_is_a_message_or_refused(name: bytes, body: bytes) -> None:
    decoded_or_refused([name, body])


@settings(deadline=None)
@given(any_message, st.data())
def test_a_damaged_message_is_a_message_or_refused(message: m.Message, data: st.DataObject) -> None:
    name, body = encode(message)
    at = data.draw(st.integers(0, len(body) - 1))
    flipped = body[at] ^ data.draw(st.integers(1, 255))
    decoded_or_refused([name, body[:at] + bytes([flipped]) + body[at + 1 :]])
    if at:
        with pytest.raises(DecodeError):
            decode([name, body[:at]])
    with pytest.raises(DecodeError):
        decode([name, body + body[at:]])


@pytest.mark.parametrize("number", [math.inf, -math.inf, math.nan, -0.0, 5e-324])
def test_every_float_survives(number: float) -> None:
    metrics = m.StepMetrics(at=m.StepAt(0, 1), values={"loss": number})
    report = m.DrafterReport(
        incarnation="d", seq=0, orders=m.Stamp(0, 0), totals={}, complete=None, generation=None, held=(),
        training=None, trained=0, vote=None, saved=(), metrics=(metrics,), failures=(),
    )  # fmt: skip
    again = decode(encode(report))
    assert isinstance(again, m.DrafterReport)
    assert msgpack.packb(again.metrics[0].values["loss"]) == msgpack.packb(number)


@pytest.mark.parametrize(
    ("frames", "said"),
    [
        ([], "message of 0 frames"),
        ([b"Pack"], "message of 1 frames"),
        ([*encode(pack()), b""], "message of 3 frames"),
        ([b"pack", encode(pack())[1]], "b'pack' is unknown"),
        ([b"Message", encode(pack())[1]], "b'Message' is unknown"),
        ([b"\xff" * 1000, b""], "is unknown"),
        ([b"Pack", b""], "Pack: not a msgpack map"),
        ([b"Pack", b"\x93\x01\x02\x03"], r"Pack\.\(all of it\)"),
        (changed(lease=None), r"Pack\.lease"),
        (changed(lease=(1,)), r"Pack\.lease\.counter: Missing|Pack\.lease\.1: Field required"),
        (changed(lease=(1, 2, 3)), r"Pack\.lease"),
        (changed(lease=(1, "2")), r"Pack\.lease\.1"),
        (changed(lease=(1, True)), r"Pack\.lease\.1"),
        (changed(lease=(1, -1)), r"Pack\.lease\.1"),
        (changed(lease=(1, 2**63)), r"Pack\.lease\.1"),
        (changed(target=b"target-0"), "Pack: not a msgpack map"),
        (changed(target="../../etc"), r"Pack\.target"),
        (changed(target="a\n"), r"Pack\.target"),
        (changed(extra=1), r"Pack\.extra: Extra inputs"),
        (changed(**{"": 1}), "Extra inputs"),
    ],
)
def test_a_refusal_names_message_and_field(frames: list[bytes], said: str) -> None:
    with pytest.raises(DecodeError, match=said) as caught:
        decode(frames)
    assert len(str(caught.value)) < 500


def test_a_missing_field_is_named() -> None:
    fields = pack().model_dump()
    del fields["lease"]
    with pytest.raises(DecodeError, match=r"Pack\.lease: Field required"):
        decode([b"Pack", msgpack.packb(fields)])


HOSTILE = {
    "too large": bytes(MAX_MESSAGE_BYTES + 1),
    "long array announced": b"\xdd\xff\xff\xff\xff",
    "long map announced": b"\xdf\xff\xff\xff\xff",
    "long text announced": b"\xdb\xff\xff\xff\xff",
    "deep": b"\x91" * 100_000,
    "deep and wide": b"\xdc\x1f\xff" * (MAX_MESSAGE_BYTES // 3),
    "many maps": b"\x81\xa1x" + b"\xdc\x1f\xff" + b"\x80" * 8191,
    "wide map": b"\xde\x7f\xff" + b"\xa1x\x01" * 32767,
    "extension": b"\x81\xa1x\xd4\x05\x00",
    "empty extension": b"\x81\xa1x\xc7\x00\x05",
    "broken timestamp": b"\x81\xa1x\xc7\x00\xff",
    "not UTF-8": b"\x81\xa1\xff\x01",
    "map as a key": b"\x81\x80\x01",
    "number as a key": b"\x81\x01\x01",
}


@pytest.mark.parametrize("body", HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_bodies_are_refused_and_cost_little(body: bytes) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(DecodeError):
            decode([b"TargetReport", body])
        assert tracemalloc.get_traced_memory()[1] < 72 << 20
    finally:
        tracemalloc.stop()


def test_the_limits_hold_on_the_way_out_too() -> None:
    with pytest.raises(ValueError, match="samples"):
        m.Assignment(
            batch=m.BatchId(0, 0), attempt=m.Stamp(0, 0), samples=(1,) * (m.MAX_ITEMS + 1), publish=None
        )
    full = m.Assignment(
        batch=m.BatchId(0, 0), attempt=m.Stamp(0, 0), samples=(2**62,) * m.MAX_ITEMS, publish=None
    )
    orders = m.TargetOrders(incarnation="t", stamp=m.Stamp(0, 0), assignments=(full,) * 56)
    assert decode(encode(orders)) == orders
    with pytest.raises(ValueError, match="4,194,304"):
        encode(orders.model_copy(update={"assignments": (full,) * 60}))


def test_every_message_is_within_the_limits_on_counts() -> None:
    for kind in m.MESSAGES:
        assert len(kind.model_fields) <= MAX_MAP_ITEMS
