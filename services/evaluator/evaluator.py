"""The evaluator: while a run trains, what its recorded checkpoints are worth with the real target.

    wait for a new recorded checkpoint -> hold its files -> held-out loss -> decode the held-out prompts
        -> evaluation.json -> a line in acceptance.jsonl -> the best so far?

Not a member of the run: it says no Hello, holds no lease and no pack, and only reads. Between two rounds
of decoding or two packs it rests as `evaluator.share` demands, hears a signal and beats the watchdog. One
evaluation costs one decoding of all prompts with the drafter, `eval.batch` at a time, and one forward of the
answers and of the held-out samples.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from protocol.errors import CheckpointError, ConfigError
from protocol.files import FileLock
from services.config.schema import Config
from services.device import use_device
from services.dflash.evaluate import check_fit, evaluate, load_drafter, load_held_out
from services.dflash.prompts import Prompt
from services.dflash.target_model import Target, load_target
from services.evaluator.agenda import Agenda, Recorded, better, pause_s
from services.evaluator.figures import line_of
from services.evaluator.held_out import Validation
from services.evaluator.kept import HISTORY, History, Kept
from services.evaluator.run_state import Run
from services.lifecycle import ExitCode, Watchdog, stop_on_signals

log = logging.getLogger(__name__)

LOCK = "evaluator.lock"
POLL_S = 2.0
_BEAT_S = 1.0


class Interrupted(Exception):
    """A signal came while a checkpoint was evaluated; what was measured of it is thrown away."""


def main(config: Config) -> ExitCode:
    """Evaluate until the run is over and its newest checkpoint done, or a signal comes.

    Raises:
        ConfigError, ModelError, DataError: nothing was evaluated.
        AlreadyRunning: the run has an evaluator.
    """
    if not config.eval.prompts:
        raise ConfigError(
            'eval.prompts = "": an evaluator decodes held-out prompts; give a JSONL file of them'
        )
    config.run.dir.mkdir(parents=True, exist_ok=True)
    stop = stop_on_signals()
    run = Run(config.run.dir)  # before minutes of loading, in which it may end
    with FileLock(config.run.dir / LOCK):
        return Evaluator.load(config, run, stop).run()


def device_of(config: Config, count: int) -> torch.device:
    """Where the evaluator runs, on a host of `count` GPUs.

    Raises:
        ConfigError: none is named and none is free. One that is shared must have been meant: a second
            copy of the target there may be more than its memory holds.
    """
    named = config.evaluator.gpu
    if named:
        return torch.device(f"cuda:{named}" if named.isdigit() else named)
    if not count:
        return torch.device("cpu")
    targets, drafters = config.target, config.drafter
    taken = set(targets.gpus or map(str, range(targets.count)))
    taken |= set(drafters.gpus or map(str, range(count - drafters.count, count)))
    taken = {name.removeprefix("cuda:") for name in taken}
    free = [number for number in range(count) if str(number) not in taken]
    if not free:
        raise ConfigError(
            f"evaluator.gpu: targets and drafters have all {count} GPUs; name one to share, whose memory "
            "must hold another copy of the target (evaluator.share bounds its time), or cpu"
        )
    return torch.device("cuda", free[0])


class Evaluator:
    """One process's loop over the recorded checkpoints of a run."""

    def __init__(
        self,
        config: Config,
        target: Target,
        prompts: Sequence[Prompt],
        validation: Validation | None,
        run: Run,
        stop: threading.Event,
    ) -> None:
        self._config, self._target, self._prompts, self._validation = config, target, prompts, validation
        self._stop = stop
        self._watchdog = Watchdog(config.watch.stuck_s)
        self._run, self._share = run, config.evaluator.share
        self._checkpoints = config.run.dir / "checkpoints"
        self._history, self._kept = History(config.run.dir / HISTORY), Kept(config.run.dir)
        self._agenda = Agenda(self._history.read())
        self._since_s = time.monotonic()  # the end of the last rest

    @classmethod
    def load(cls, config: Config, run: Run, stop: threading.Event) -> Evaluator:
        """Target, prompts and held-out samples. Raises ConfigError, ModelError, DataError."""
        if config.evaluator.threads:
            torch.set_num_threads(config.evaluator.threads)
        device = device_of(config, torch.cuda.device_count() if torch.cuda.is_available() else 0)
        use_device(device)
        prompts, validation = load_held_out(config), Validation.open(config)
        target = load_target(
            config.model.path, dtype=config.model.dtype, device=device, attention=config.model.attention
        )
        held_out = 0 if validation is None else sum(map(len, validation.packs))
        log.info("evaluator", extra={"prompts": len(prompts), "held_out": held_out, "device": str(device)})
        return cls(config, target, prompts, validation, run, stop)

    def run(self) -> ExitCode:
        """FINISHED once the run is over and its newest checkpoint done, as other roles that are sent away;
        RUN_FAILED if it failed, STOPPED by a signal."""
        self._watchdog.start()
        for held in self._kept.evaluated():
            self._settle(held)
        self._kept.release()
        try:
            return self._loop()
        except Interrupted:
            return ExitCode.STOPPED
        finally:
            self._kept.release()
            self._watchdog.stop()

    def _loop(self) -> ExitCode:
        while not self._stop.is_set():
            self._watchdog.beat()
            state = self._run.look()
            if state is not None:  # over: nobody else works there, and somebody waits for the last one
                self._share = 1.0 if state.over else self._config.evaluator.share
            found = self._agenda.next(state.checkpoints) if state else None
            if found is not None:
                self._take(found)
            elif state is not None and state.over:
                return ExitCode.RUN_FAILED if state.failed else ExitCode.FINISHED
            else:
                self._stop.wait(POLL_S)
        return ExitCode.STOPPED

    # ---- one checkpoint -----------------------------------------------------------------------

    def _take(self, found: Recorded) -> None:
        """Evaluate and record it; one that was pruned or damaged is left out for good."""
        try:
            held = self._kept.hold(self._checkpoints / found.name)
            line = self._evaluate(found, held)
        except CheckpointError as error:
            log.warning("not evaluated", extra={"checkpoint": found.name, "error": str(error)})
            self._agenda.set_aside(found.name)
        else:
            self._kept.write_figures(held, line)
            self._settle(held)
        self._kept.release()
        if self._target.device.type == "cuda":
            torch.cuda.empty_cache()  # of a device that may be shared; only the target stays while it waits

    def _evaluate(self, found: Recorded, held: Path) -> dict[str, Any]:
        began_s = self._since_s = time.monotonic()
        drafter = load_drafter(held)
        check_fit(drafter.config, self._target)
        drafter = drafter.to(self._target.device, self._target.dtype).eval()
        held_out = None
        if self._validation is not None:
            held_out = self._validation.measure(self._target, drafter, self._rest)
        result = evaluate(
            self._target, drafter, self._prompts,
            max_new_tokens=self._config.eval.max_new_tokens, plain=False, batch=self._config.eval.batch,
            progress=lambda _done, _of: self._rest(),
        )  # fmt: skip
        return line_of(found, result, held_out, seconds=time.monotonic() - began_s, at_unix_s=time.time())

    def _settle(self, held: Path) -> None:
        """What follows from a finished evaluation: its line, once, and the best. Safe to repeat."""
        line = self._kept.figures(held)
        if line["checkpoint"] not in self._agenda:
            is_best = better(line, self._agenda.best)
            best = line if is_best else self._agenda.best
            self._history.append(line | {
                "best_acceptance_length": best and best["acceptance_length"],
                "best_step": best and best["step"],
            })  # fmt: skip
            self._agenda.add(line)
            log.info("evaluated", extra={
                "step": line["step"], "acceptance_length": line["acceptance_length"],
                "held_out_loss": line.get("held_out_loss"), "lossless": line["lossless"], "best": is_best,
                "seconds": round(line["seconds"], 1),
            })  # fmt: skip
        if self._agenda.best is not None and self._agenda.best["checkpoint"] == line["checkpoint"]:
            self._kept.promote(held)

    def _rest(self) -> None:
        """Between two pieces of work. Raises Interrupted once a signal has come."""
        until_s = time.monotonic() + pause_s(time.monotonic() - self._since_s, self._share)
        self._watchdog.beat()
        while (left_s := until_s - time.monotonic()) > 0 and not self._stop.wait(min(left_s, _BEAT_S)):
            self._watchdog.beat()
        if self._stop.is_set():
            raise Interrupted
        self._since_s = time.monotonic()
