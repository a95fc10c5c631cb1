"""`draftmill up`: one coordinator, N targets and M drafters on this machine, until the run is over.

    start what is due -> ask the coordinator how it goes -> show -> wait -> reap what ended

Stopping always goes through the coordinator (SIGTERM: it finishes the step, has a checkpoint recorded
and sends the roles away); only what is left after watch.stop_s is killed. Costs one HTTP request a second.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from signal import SIGTERM

from rich.console import Console

from protocol.arena import sweep
from protocol.errors import PeerGone
from services.config.schema import Config
from services.lifecycle import ExitCode, arena_folder, stop_on_signals
from services.local.display import Display, display
from services.local.processes import ROLE_PROGRAM, Processes
from services.local.progress import Progress
from services.local.status import RESULT, Status, fetch, read_address
from services.local.supervisor import COORDINATOR, EVALUATOR, RoleId, Supervisor, Verdict, describe
from services.local.view import duration
from services.local.wakeups import Wakeups, wakeups

TICK_S = 1.0
LEAVE_S = 5.0  # for roles that the coordinator has sent away, before they are asked again
LAST_LINES = 25
_ENDING = {"stopping", "stopped", "finished", "failed"}


def run_up(config: Config, arguments: Sequence[str], console: Console) -> ExitCode:
    """Run to the end. `arguments` are the command line's configuration words, handed to every role.

    Returns FINISHED when the coordinator recorded the end of the run, STOPPED after a signal or
    `draftmill stop`, else what made the run hopeless, after showing the last log lines of the culprit.
    """
    with wakeups() as waits, display(console) as shown:
        up = Up(config, arguments, shown, waits)
        verdict = up.run()
    up.conclude(console, verdict)
    return verdict.code


class Up:
    """One run on this machine."""

    def __init__(
        self,
        config: Config,
        arguments: Sequence[str],
        shown: Display,
        waits: Wakeups,
        program: Sequence[str] = ROLE_PROGRAM,
    ) -> None:
        """Children run `program ROLE *arguments`."""
        roles = [COORDINATOR]
        roles += [RoleId("target", index) for index in range(config.target.count)]
        roles += [RoleId("drafter", index) for index in range(config.drafter.count)]
        roles += [EVALUATOR] * config.evaluator.count
        self._config, self._shown, self._waits = config, shown, waits
        watch = config.watch
        self._supervisor = Supervisor(roles, watch.restart_delay_s, watch.give_up_after)
        threads = {"target": config.target.threads, "drafter": config.drafter.threads, "coordinator": 1}
        threads["evaluator"] = config.evaluator.threads
        self._processes = Processes(config.run.dir / "logs", arguments, threads, program)
        self._progress = Progress()
        self._status: Status | None = None
        self._asked_s = 0.0
        self._started_s, self._started_unix_s = time.monotonic(), time.time()
        self._stop = stop_on_signals()

    def run(self) -> Verdict:
        """Start everything, keep it running, end it."""
        sweep(arena_folder(self._config))
        while self._supervisor.verdict is None and not self._stop.is_set():
            self._start_due()
            due_s = self._supervisor.next_due_s()
            self._turn("", TICK_S if due_s is None else min(TICK_S, due_s - time.monotonic()))
        self._let_coordinator_finish()
        self._let_roles_leave()
        sweep(arena_folder(self._config))
        self._shown.show(self._status, self._restarts(), "")
        return self._supervisor.verdict or Verdict(ExitCode.STOPPED, "stopped by a signal", None)

    def conclude(self, console: Console, verdict: Verdict) -> None:
        """How it ended, in a few lines; on failure with the end of the culprit's log."""
        status = self._status or Status()
        restarts = sum(self._restarts().values())
        counts = (
            f"{status.samples_committed} samples committed, {status.samples_failed} failed, "
            f"of {status.samples_total}; {status.step} steps, {restarts} restarts"
            if status.total_steps
            else "it did not begin"
        )
        took = duration(time.monotonic() - self._started_s)
        console.print(f"{verdict.code.name.lower().replace('_', ' ')}: {counts}, {took}", highlight=False)
        if verdict.reason:
            console.print(verdict.reason, style="red", markup=False, highlight=False)
        if verdict.culprit is not None:
            console.print(f"last lines of {self._processes.log_file(verdict.culprit)}:", highlight=False)
            for line in self._processes.last_lines(verdict.culprit, LAST_LINES):
                console.print(f"  {line}", markup=False, highlight=False, soft_wrap=True)

    def _final_status(self) -> Status | None:
        """The coordinator's own account of its end, else the last that it answered."""
        file = self._config.run.dir / RESULT
        if file.is_file() and file.stat().st_mtime >= self._started_unix_s:
            return Status.model_validate_json(file.read_bytes())
        return self._status

    # ---- the loop's parts ---------------------------------------------------------------------

    def _turn(self, note: str, patience_s: float = TICK_S) -> None:
        self._ask()
        self._shown.show(self._status, self._restarts(), note)
        self._waits.wait(patience_s)
        self._reap()

    def _start_due(self) -> None:
        for role in self._supervisor.due(time.monotonic()):
            pid = self._processes.start(role)
            self._supervisor.started(role)
            self._shown.say(f"{role} started (pid {pid})")

    def _reap(self) -> None:
        for role, code in self._processes.reap():
            self._progress.exited(role)
            self._supervisor.exited(role, code, time.monotonic())
            self._shown.say(f"{role} ended with {describe(code)}")

    def _ask(self) -> None:
        if time.monotonic() - self._asked_s < TICK_S / 2 or COORDINATOR not in self._processes:
            return
        self._asked_s = time.monotonic()
        try:
            self._status = fetch(read_address(self._config.run.dir))
        except PeerGone:
            return  # starting, or busy: the last known status stays on the screen
        for role in self._progress.of(self._status):
            self._supervisor.progressed(role)
        self._supervisor.run_is_ending(self._status.state in _ENDING, time.monotonic())

    def _restarts(self) -> dict[str, int]:
        return {
            str(role): place.restarts for role, place in self._supervisor.places.items() if place.restarts
        }

    # ---- the end ------------------------------------------------------------------------------

    def _let_coordinator_finish(self) -> None:
        self._processes.signal(COORDINATOR, SIGTERM)
        deadline_s = time.monotonic() + self._config.watch.stop_s
        note = "stopping: the step is finished and a checkpoint recorded"
        if self._stop.is_set():
            note += "; again to kill"
            self._shown.say(note)
        while COORDINATOR in self._processes and time.monotonic() < deadline_s:
            self._turn(note)

    def _let_roles_leave(self) -> None:
        self._status = self._final_status()
        verdict = self._supervisor.verdict
        if verdict is not None and verdict.culprit is None:  # the coordinator has sent them away
            self._wait_for_all(LEAVE_S)
            if verdict.code is ExitCode.FINISHED:
                self._let_evaluator_finish()
        self._processes.signal_all(SIGTERM)
        self._wait_for_all(self._config.watch.stop_s)
        for role in self._processes.kill_all():
            self._shown.say(f"{role} did not leave and was killed")

    def _let_evaluator_finish(self) -> None:
        """The last checkpoint is the one that people want to know of; its watchdog ends one that is stuck."""
        while EVALUATOR in self._processes and not self._stop.is_set():
            self._turn("the last checkpoint is evaluated")

    def _wait_for_all(self, limit_s: float) -> None:
        deadline_s = time.monotonic() + limit_s
        while self._processes and time.monotonic() < deadline_s:
            self._turn("waiting for the roles to leave")
