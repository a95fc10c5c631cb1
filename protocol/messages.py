"""Every message of the protocol: two levels up, two levels down, and the few words around them.

Roles and coordinator talk in levels, not edges. A role's Report is its whole inventory; a role's
Orders are everything the coordinator wants of it. Each is sent at once after a change and again
every second, and the newest one replaces all before it. So a lost, late, doubled or reordered
message, a reconnect and a restart of either side are one case: the next level puts it right.

    role         -> coordinator   TargetHello | DrafterHello, TargetReport | DrafterReport, Bye
    coordinator  -> role          Welcome, Who, TargetOrders | DrafterOrders, Exit
    target       -> drafter       Pack        (into the drafter's own inbox, never via the coordinator)

Ids are never reused. `Stamp`s come from one counter of one coordinator epoch and are ordered, so
"newer" has a meaning across restarts; an attempt, a lease and an orders message are named by one.
Under 10 us to validate a report of 16 slots; a report is under 2 KB and there are a few per pack.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

PROTOCOL_VERSION = 3
MAX_ITEMS = 8192  # of one list in one message, e.g. samples of a batch: the codec reads no longer one

Count = Annotated[int, Field(ge=0, le=2**63 - 1)]
Name = Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[A-Za-z0-9_.\-]+$")]
TEXT_CHARACTERS = 4096
Text = Annotated[str, Field(max_length=TEXT_CHARACTERS)]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Totals = Annotated[dict[Name, float], Field(max_length=64)]


class BatchId(NamedTuple):
    """One batch of the epoch plan: the samples that travel as one pack."""

    epoch: Count
    index: Count  # type: ignore[assignment]  # in place of tuple.index, which nobody needs here


class Stamp(NamedTuple):
    """A moment in the coordinator's history, totally ordered, also across its restarts."""

    coordinator_epoch: Count
    counter: Count


class StepAt(NamedTuple):
    """Weights on `timeline` after `step` committed steps (0 = initial weights)."""

    timeline: Count
    step: Count


class StepTry(NamedTuple):
    """One attempt at step `step`: the transition from `step` to `step + 1` committed steps."""

    timeline: Count
    step: Count
    coordinator_epoch: Count
    counter: Count


class Frozen(BaseModel):
    """Immutable, strictly typed, no unknown fields."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=True)


class Message(Frozen):
    """Base of everything that crosses a socket; the class name is its name on the wire."""


# ---- data plane -------------------------------------------------------------------------------


class Section(Frozen):
    """One tensor inside a slot, 64-byte aligned; `offset` counts bytes from the slot's payload."""

    name: Name
    dtype: Literal["float32", "bfloat16", "float16", "float8_e4m3fn", "int64", "int32", "uint8"]
    shape: Annotated[tuple[Count, ...], Field(max_length=4)]
    offset: Count


class Descriptor(Frozen):
    """Where a pack lies and what is in it. `arena` is a file name inside the run's arena folder.

    Sections: `features` [T, taps*hidden], or with split taps `features.0` .. `features.D-1`
    [T, hidden]; `last_hidden` [T, hidden] when the recipe needs it; `input_ids` int32 [T];
    `loss_mask` uint8 [T]; `position_ids` int32 [T] (restarting per document);
    `document_offsets` int32 [documents + 1]; `sample_ids` int64 [documents].
    """

    arena: Name
    slot: Count
    batch: BatchId
    attempt: Stamp
    tokens: Count
    payload_bytes: Count
    checksum: Count | None  # None: not sampled for this pack
    sections: Annotated[tuple[Section, ...], Field(max_length=64)]


class Pack(Message):
    """A target hands one pack to the drafter that will train on it."""

    target: Name
    lease: Stamp
    descriptor: Descriptor


# ---- role -> coordinator ----------------------------------------------------------------------


class Hello(Message):
    """First word of an incarnation, and again whenever the coordinator asks Who."""

    incarnation: Name
    seq: Count
    protocol: Count
    fingerprint: Sha256
    host: Name
    index: Count | None  # None: any vacant one


class TargetHello(Hello):
    role: ClassVar[str] = "target"
    arena: Name
    slots: Count
    slot_bytes: Count


class DrafterHello(Hello):
    role: ClassVar[str] = "drafter"
    inbox: Text


class SkippedSample(Frozen):
    """A sample left out of its pack, with the reason that the ledger records."""

    sample: Count
    reason: Text


class SlotReport(Frozen):
    """One batch inside a target, from the order on."""

    batch: BatchId
    attempt: Stamp
    state: Literal["queued", "computing", "ready", "failed"]
    slot: Count | None  # None until a slot is taken
    tokens: Count
    payload_bytes: Count
    skipped: Annotated[tuple[SkippedSample, ...], Field(max_length=MAX_ITEMS)]
    reason: Text  # "" unless failed
    published: Stamp | None  # the last lease it was announced under, for who looks


class Report(Message):
    """The whole inventory of a role. `orders` is the newest Orders it has acted on."""

    incarnation: Name
    seq: Count
    orders: Stamp
    totals: Totals  # monotone counters of this incarnation: seconds by phase, tokens, bytes


class TargetReport(Report):
    slots: tuple[SlotReport, ...]


class Vote(Frozen):
    """A rank's word on one step try, given only after its reduced gradient is complete."""

    step_try: StepTry
    packs: tuple[Stamp, ...]  # attempts trained by this rank, in plan order
    bad_positions: tuple[Count, ...]  # this rank's non-finite packs, by position within the step
    gradient_finite: bool  # of the reduced gradient, equal on all ranks


class Saved(Frozen):
    """A checkpoint that is durable on disk but not yet in the ledger."""

    at: StepAt
    name: Name
    sha256: Sha256


class StepMetrics(Frozen):
    """Figures of one committed step, known one step later."""

    at: StepAt
    values: Totals


class Failure(Frozen):
    """An order that a drafter could not follow: to take a state, to stand in a group, to save."""

    order: Literal["adopt", "group", "save"]
    reason: Text

    def __str__(self) -> str:
        return f"{self.order}: {self.reason}"


class DrafterReport(Report):
    complete: StepAt | None  # None: no usable weights yet
    generation: Count | None  # process group it stands in; None: none
    held: tuple[Stamp, ...]
    training: (
        StepTry | None
    )  # this and `trained`, packs of it done, tell who looks; nothing is decided by them
    trained: Count
    vote: Vote | None
    saved: tuple[Saved, ...]
    metrics: tuple[StepMetrics, ...]  # of the last steps, newest last
    failures: Annotated[tuple[Failure, ...], Field(max_length=16)]  # of orders that still stand


class Bye(Message):
    """Last word of an incarnation that leaves by itself."""

    incarnation: Name
    seq: Count
    reason: Text


# ---- coordinator -> role ----------------------------------------------------------------------


class Who(Message):
    """The coordinator does not know this sender: say Hello."""


class Welcome(Message):
    """The incarnation is a member; `index` is its place, and with it its device."""

    incarnation: Name
    index: Count


class Exit(Message):
    """Leave now. `finished` runs end with status 0; fenced or refused incarnations do not."""

    incarnation: Name
    finished: bool
    reason: Text


class Publication(Frozen):
    """Announce this pack into that inbox under that lease."""

    lease: Stamp
    inbox: Text


class Assignment(Frozen):
    """Compute this batch (or keep it): whatever is not assigned is dropped, its slot freed."""

    batch: BatchId
    attempt: Stamp
    samples: Annotated[tuple[Count, ...], Field(max_length=MAX_ITEMS)]
    publish: Publication | None  # None: keep it ready


class TargetOrders(Message):
    incarnation: Name
    stamp: Stamp
    assignments: tuple[Assignment, ...]  # in the order they are wanted


class Member(Frozen):
    rank: Count
    incarnation: Name


class Group(Frozen):
    """The drafters that reduce gradients together. The first member hosts the store."""

    generation: Count
    members: tuple[Member, ...]
    store: Text  # host:port, "" for a group of one


class Adopt(Frozen):
    """Become complete at `at`: from the seed, from a recorded checkpoint, or from a group member."""

    at: StepAt
    source: Literal["seed", "checkpoint", "peer"]
    name: Text  # checkpoint: its folder name; peer: its incarnation; seed: ""
    sha256: Text  # checkpoint only


class TrainPack(Frozen):
    position: Count  # within the step; gradients accumulate in this order
    batch: BatchId
    attempt: Stamp | None  # None: not ready yet, wait for newer orders


class Train(Frozen):
    """This rank's share of a step try. An empty share still joins the reduction."""

    step_try: StepTry
    packs: tuple[TrainPack, ...]


class DrafterOrders(Message):
    incarnation: Name
    stamp: Stamp
    held: tuple[Stamp, ...]  # packs it may hold; any other older than `stamp` is dropped
    arenas: tuple[Name, ...]  # live target arenas; others are unmapped once unused
    group: Group | None
    adopt: Adopt | None
    committed: StepTry | None  # the ledger's last committed try on this timeline
    train: Train | None
    save: StepAt | None  # write a checkpoint when complete there
    recorded: tuple[StepAt, ...]  # checkpoints the ledger holds: no need to report them again


MESSAGES: tuple[type[Message], ...] = (
    Pack, TargetHello, DrafterHello, TargetReport, DrafterReport, Bye,
    Who, Welcome, Exit, TargetOrders, DrafterOrders,
)  # fmt: skip
