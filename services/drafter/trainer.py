"""The drafter trainer: adopt -> take packs -> train pack -> reduce -> vote -> commit or discard -> save.

    main thread      desk -> the next action -> desk             (waits once a step, for the reduced gradient)
    thread intake    inbox -> slots opened, copied, verified     (services/drafter/intake.py)
    thread checkpoint, while there is one to write               (services/drafter/saver.py)
    thread link      owns the sockets                            (services/link.py)
    thread trace     a trace of the main thread, on request      (services/tracer.py)
    thread group     what a peer may hold: left behind with it   (services/drafter/leavable.py)

The desk decides and the trainer does; after each action it says the whole level again. One lock keeps
desk and intake in step, and nobody holds it for more than some 20 us.
"""

from __future__ import annotations

import logging
import threading
import time
from pathlib import Path

from protocol.errors import CheckpointError, GroupBroken
from protocol.messages import (
    Adopt,
    DrafterOrders,
    Group,
    Saved,
    Stamp,
    StepAt,
    StepMetrics,
    StepTry,
    TrainPack,
    Vote,
)
from services.config.schema import Config
from services.dflash.checkpoint import read_checkpoint
from services.drafter.desk import (
    Commit,
    Desk,
    Discard,
    Form,
    Learn,
    Leave,
    Load,
    Reduce,
    Save,
    Wait,
)
from services.drafter.intake import Intake
from services.drafter.meeting import Standing, meet, plan_copies
from services.drafter.reduce import GroupReducer, LocalReducer, Reducer, TryLeft
from services.drafter.saver import Saver, Unsaved
from services.drafter.start import Started, device_of, hello, initial_weights, start
from services.drafter.step import LastPack, Outcome
from services.gpu_figures import GpuFigures, uuid_of
from services.lifecycle import (
    ExitCode,
    Watchdog,
    arena_folder,
    hold_lock,
    stop_on_signals,
    tidy_end,
)
from services.link import Link
from services.tracer import Tracer
from services.transport.reader import SlotReader
from services.window import Window

log = logging.getLogger(__name__)

RETRY_S = 5.0  # before a checkpoint that could not be read or written is tried again
LAST_CHECKPOINT_S = 10.0  # a checkpoint under way may take this long when the process leaves
WAITING = {"orders": "wait_orders", "group": "wait_group", "pack": "wait_pack", "vote": "vote_wait"}


def main(config: Config, incarnation: str, index: int | None = None) -> ExitCode:
    """Train as drafter `index` (None: any vacant place) until the run ends or a signal stops it.

    Raises:
        ConfigError, ModelError, DataError: before the coordinator hears of this drafter.
        Fenced: the coordinator sent it away. PeerGone: none answered.
        CorruptPack: a slot that should hold a pack holds something else.
        StalePack: an arena was cut while a pack in it was trained on.
    """
    started = start(config, device_of(config, index))
    folder = arena_folder(config)
    lock = hold_lock(folder, incarnation)
    inbox = f"ipc://{folder.resolve() / incarnation}.inbox"
    link = Link.of_run(config, hello(config, started, incarnation, index, inbox), inbox=inbox)
    trainer = DrafterTrainer(config, incarnation, started, link, folder, stop_on_signals(link.wake))
    with tidy_end(lock):
        return trainer.train()


class DrafterTrainer:
    """One drafter from its first Hello to its Bye."""

    def __init__(
        self,
        config: Config,
        incarnation: str,
        started: Started,
        link: Link,
        folder: Path,
        stop: threading.Event,
    ) -> None:
        self.config, self.incarnation, self.link, self.stop = config, incarnation, link, stop
        self.shape, self.device = started.shape, started.device
        self.weights, self.step, self.phases = started.weights, started.step, started.phases
        self.checkpoints = config.run.dir / "checkpoints"
        self.lock = threading.RLock()
        self.desk = Desk(incarnation)
        self.level = self.desk.level()  # as it was said last
        self.intake = Intake(link, SlotReader(folder, started.device), self.lock, self._accept)
        self.saver = Saver(self.checkpoints, incarnation, started.shape, link.wake)
        self.reducer: Reducer = LocalReducer()
        self.outcome: Outcome | None = None
        self.counts = {"tokens_total": 0.0, "packs_total": 0.0}
        self.window = Window(config.profile.interval_s)
        self.watchdog = Watchdog(config.watch.stuck_s)
        self.tracer = Tracer(config.run.dir, lambda: link.place, started.device)
        self.gpu = GpuFigures(uuid_of(started.device))
        self.failed_at_s: float | None = None
        self.generation: int | None = None  # stood in, or being formed

    # ---- the loop -----------------------------------------------------------------------------

    def train(self) -> ExitCode:
        """Until the run ends. Returns FINISHED or STOPPED."""
        self.link.start()
        self.watchdog.start()
        self.intake.start()
        self.tracer.start()
        with self.tracer.working():
            self._loop()
        return self._leave()

    def _loop(self) -> None:
        while self.link.exit is None and not self.stop.is_set():
            seen = self.link.version
            self.tracer.turn()
            self._follow()
            action = self.desk.next_action()
            match action:
                case Load(adopt):
                    self._load(adopt)
                case Form(group):
                    self._form(group)
                case Leave(generation, why):
                    self._ungroup(generation, why)
                case Learn(pack, step_try, last):
                    self._learn(pack, LastPack(self.reducer, step_try) if last else None)
                case Reduce(step_try, packs):
                    self._reduce(step_try, packs)
                case Commit(step_try):
                    self._commit(step_try)
                case Discard():
                    self._discard()
                case Save(at):
                    self._save(at)
                case Wait(why):
                    with self.phases(WAITING[why]):
                        self.link.wait(seen, self.config.coordinator.heartbeat_s)
            self.watchdog.beat()

    def _follow(self) -> None:
        """Take in what has come, and say the whole level."""
        self.intake.check()
        result = self.saver.take_result()
        with self.lock:
            if isinstance(result, Saved):
                self.desk.saved(result)
            elif isinstance(result, Unsaved):
                self.desk.unsaved(*result)
                self.failed_at_s = time.monotonic()
            if self.failed_at_s is not None and time.monotonic() - self.failed_at_s > RETRY_S:
                self.failed_at_s = None
                self.desk.retry()
            if isinstance(self.link.orders, DrafterOrders):
                self.intake.drop(self.desk.take_orders(self.link.orders))
            self.level = self.desk.level()
            self.link.report(totals=self._totals(), **self.level)
        self.window.look(self._totals())

    def _accept(self, attempt: Stamp, lease: Stamp) -> bool:
        """In thread intake: a pack is at hand. The coordinator hears of it whatever we are computing."""
        accepted = self.desk.take_pack(attempt, lease)
        self.level["held"] = self.desk.held
        self.link.report(totals=self._totals(), **self.level)
        return accepted

    def _totals(self) -> dict[str, float]:
        intake = {
            "stale_packs_total": float(self.intake.stale_packs),
            "phase_h2d_seconds": self.intake.open_s,
        }
        return self.counts | intake | self.phases.totals() | self.gpu.read()

    def _leave(self) -> ExitCode:
        exit_ = self.link.exit
        reason = exit_.reason if exit_ else "stopped by a signal"
        log.info("leaving", extra={"reason": reason})
        self.reducer.close()
        self.saver.close(LAST_CHECKPOINT_S)
        self.intake.close()
        self.link.close(reason)
        self.tracer.close()
        self.watchdog.stop()
        if exit_ is None:
            return ExitCode.STOPPED
        if not exit_.finished:
            raise self.link.why_refused()
        return ExitCode.FINISHED

    # ---- state --------------------------------------------------------------------------------

    def _load(self, adopt: Adopt) -> None:
        """Become complete at `adopt.at`; a state that cannot be taken leaves the present one alone."""
        try:
            if adopt.source == "seed":
                self.weights.start(initial_weights(self.config, self.shape))
            else:
                checkpoint = read_checkpoint(self.checkpoints / adopt.name, adopt.sha256)
                if checkpoint.state.get("step") != adopt.at.step:
                    raise CheckpointError(
                        f"checkpoint {adopt.name}: it is of step {checkpoint.state.get('step')}, "
                        f"wanted is step {adopt.at.step}; the ledger is of another run"
                    )
                self.weights.load(checkpoint.weights, checkpoint.optimizer)
        except (CheckpointError, OSError) as error:
            log.exception("state not adopted", extra={"source": adopt.source, "checkpoint": adopt.name})
            self.desk.unloaded(adopt, str(error))
            self.failed_at_s = time.monotonic()
            return
        log.info("complete", extra={"step": adopt.at.step, "source": adopt.source})
        self.desk.loaded(adopt.at)

    def _save(self, at: StepAt) -> None:
        with self.phases("checkpoint"):
            snapshot = self.weights.snapshot()
        self.desk.saving(at)
        self.saver.start(at, snapshot)

    # ---- the group ----------------------------------------------------------------------------

    def _form(self, group: Group | None) -> None:
        """Stand in `group`; on the way, complete members give their state to those told to take it."""
        self.reducer.close()
        self.reducer = LocalReducer()
        self.generation = group.generation if group else None
        if group is None or len(group.members) == 1:
            self.desk.formed(self.generation)
            return
        try:
            with self.phases("wait_group"):
                self._join(group)
        except GroupBroken as error:
            self._ungroup(group.generation, str(error))

    def _join(self, group: Group) -> None:
        orders = self.desk.orders
        adopt = orders.adopt if orders and orders.adopt and orders.adopt.source == "peer" else None
        meeting = meet(group, self.incarnation, self._awaited)
        standings = meeting.share(
            Standing(self.desk.complete, adopt.name if adopt else "", adopt.at if adopt else None)
        )
        self.reducer = reducer = GroupReducer(meeting, self.device, self._wanted)
        for source, receiver in plan_copies(meeting.names, standings):
            if meeting.rank == source:
                reducer.send(self.weights.state, receiver)
            elif meeting.rank == receiver and adopt is not None:
                self.desk.overwriting()
                reducer.receive(self.weights.state, source)
                self.desk.loaded(adopt.at)
                log.info("complete", extra={"step": adopt.at.step, "source": adopt.name})
        self.desk.formed(group.generation)
        log.info(
            "group", extra={"generation": group.generation, "rank": meeting.rank, "size": len(meeting.names)}
        )

    def _ungroup(self, generation: int, why: str) -> None:
        log.warning("no group", extra={"generation": generation, "reason": why})
        self.reducer.close()
        self.reducer = LocalReducer()
        self.generation = None
        self.desk.ungrouped(generation, why)

    def _awaited(self, step_try: StepTry | None) -> bool:
        """Whether to go on waiting for the other members. Waiting for a peer is progress."""
        self.watchdog.beat()
        return self._wanted(step_try)

    def _wanted(self, step_try: StepTry | None) -> bool:
        """Whether the newest orders still want this group, and this try."""
        orders = self.link.orders
        if self.link.failed or self.link.exit is not None or self.stop.is_set():
            return False
        if not isinstance(orders, DrafterOrders):
            return False
        if orders.group is None or orders.group.generation != self.generation:
            return False
        return step_try is None or (orders.train is not None and orders.train.step_try == step_try)

    # ---- a step -------------------------------------------------------------------------------

    def _learn(self, pack: TrainPack, last: LastPack | None) -> None:
        """With the group's sums under way orders must wait: the reduction follows at once."""
        assert pack.attempt is not None, "a pack without an attempt"
        overlapped = last if last is not None and last.reducer.overlaps else None
        with self.intake.sections(pack.attempt) as sections:
            try:
                self.step.add(pack.position, pack.batch, sections, last=overlapped)
            except (GroupBroken, TryLeft) as error:
                assert last is not None, "a reduction before the last pack"
                self._unreduced(last.step_try, error)
                return
            self.counts["tokens_total"] += sections["input_ids"].shape[0]
        self.counts["packs_total"] += 1
        self.desk.learned(pack)
        if overlapped is not None:
            reduce = self.desk.next_action()
            assert isinstance(reduce, Reduce), f"{reduce} after the last pack"
            self._reduce(*reduce)

    def _unreduced(self, step_try: StepTry, error: GroupBroken | TryLeft) -> None:
        self.step.clear()
        self.desk.unreduced(step_try)
        if isinstance(error, GroupBroken) and self.generation is not None:
            self._ungroup(self.generation, str(error))

    def _reduce(self, step_try: StepTry, packs: tuple[Stamp, ...]) -> None:
        try:
            outcome = self.step.seal(self.reducer, step_try)
        except (GroupBroken, TryLeft) as error:
            self._unreduced(step_try, error)
            return
        self.outcome = outcome
        vote = Vote(
            step_try=step_try,
            packs=packs,
            bad_positions=outcome.own_bad,
            gradient_finite=outcome.gradient_finite,
        )
        self.desk.voted(vote)

    def _commit(self, step_try: StepTry) -> None:
        assert self.outcome is not None, "a commit without a reduced gradient"
        figures = self.step.apply(step_try.step, self.outcome)
        self.outcome = None
        at = StepAt(step_try.timeline, step_try.step + 1)
        self.desk.committed(StepMetrics(at=at, values=figures))

    def _discard(self) -> None:
        self.step.clear()
        self.outcome = None
        self.desk.discarded()
