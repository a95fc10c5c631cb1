"""A whole run under `draftmill up`, observed for a while in its steady state and then killed.

    start -> first commits -> settled: SETTLING steps and the initial checkpoint recorded -> window -> SIGKILL

A clean stop would write a last checkpoint, 12 GB for Qwen3-8B's drafter. Commits are timed by the lines of
run.dir/metrics.jsonl, looked at every 20 ms; phases and totals come from the coordinator's status.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

from protocol.errors import RetryError
from services.config.schema import Config
from services.local.status import fetch_json, read_address
from stages.footprint import Found, look, role_pids
from stages.roles import PROGRAM

LOOK_S, STATUS_S = 0.02, 0.5
SETTLING = 4
LOG_LINES = 25
WORK = {"target": ("forward", "pack"), "drafter": ("forward", "backward", "reduce", "step")}


class Commit(NamedTuple):
    at_s: float
    tokens: float


class Seen(NamedTuple):
    """A status, and when it came."""

    at_s: float
    status: Any


class Observed(NamedTuple):
    commits: list[Commit]  # of the window, the first one only begins it
    statuses: list[Seen]  # of the window
    footprint: Found | None
    settled: bool  # False: the window began before the initial checkpoint was recorded
    first_commit_s: float  # since the start


class Running:
    """One run; leaving the context kills it."""

    def __init__(self, config: Config, flags: list[str], environ: dict[str, str]) -> None:
        self.config = config
        self.begun_s = time.perf_counter()
        self._up = subprocess.Popen([*PROGRAM, "up", *flags], env=environ, stdout=sys.stderr)
        self._lines = config.run.dir / "metrics.jsonl"
        self._read = 0
        self._pids: dict[str, int] = {}
        self.commits: list[Commit] = []
        self.statuses: list[Seen] = []

    def __enter__(self) -> Running:
        return self

    def __exit__(self, *_: object) -> None:
        """The kernel kills the roles with `up`."""
        self._up.kill()
        self._up.wait(20.0)
        deadline_s = time.perf_counter() + 20.0
        while any(Path(f"/proc/{pid}").exists() for pid in self._pids.values()):
            if time.perf_counter() > deadline_s:
                break
            time.sleep(LOOK_S)

    def observe(self, window_s: float, until_s: float) -> Observed:
        """A window of `window_s`, which is cut short where `until_s` (perf_counter) would pass.

        RuntimeError: the run ended, or there was not one step in the window.
        """
        begins = settled = None
        footprint = None
        while (now_s := time.perf_counter()) < until_s:
            self._look(now_s)
            if begins is None and len(self.commits) >= SETTLING:
                settled = self._checkpoint_recorded()
                begins = len(self.commits) - 1 if settled or now_s > until_s - window_s else None
            elif begins is not None and now_s > self.commits[begins].at_s + window_s:
                break
            if self._up.poll() is not None:
                break
            time.sleep(LOOK_S)
        if begins is None or len(self.commits) - begins < 2:
            raise RuntimeError(f"no steady state in time: {len(self.commits)} commits;\n{self._last_lines()}")
        if self._up.poll() is None:
            footprint = look(self.config, self._pids)
        commits = self.commits[begins:]
        statuses = [seen for seen in self.statuses if seen.at_s >= commits[0].at_s]
        first_s = self.commits[0].at_s - self.begun_s
        return Observed(commits, statuses, footprint, bool(settled), first_s)

    def _look(self, now_s: float) -> None:
        if self._lines.exists():
            with self._lines.open() as file:
                file.seek(self._read)
                text = file.read()
            whole, _, _ = text.rpartition("\n")
            self._read += len(whole) + 1 if whole else 0
            self.commits += [Commit(now_s, _tokens(line)) for line in whole.splitlines()]
        if not self.statuses or now_s - self.statuses[-1].at_s > STATUS_S:
            self._ask(now_s)

    def _ask(self, now_s: float) -> None:
        with contextlib.suppress(OSError):
            self._pids |= role_pids(self._up.pid)
        with contextlib.suppress(RetryError):
            status = fetch_json(read_address(self.config.run.dir))
            if status is not None:
                self.statuses.append(Seen(now_s, status))

    def _checkpoint_recorded(self) -> bool:
        return bool(self.statuses and self.statuses[-1].status["checkpoints"])

    def _last_lines(self) -> str:
        text = []
        for log in sorted((self.config.run.dir / "logs").glob("*.log")):
            lines = log.read_text(errors="replace").splitlines()[-LOG_LINES:]
            text += [f"--- {log.name}", *lines]
        return os.linesep.join(text)


def _tokens(line: str) -> float:
    return float(json.loads(line)["tokens"])


def figures(observed: Observed) -> dict[str, Any]:
    """Committed tokens a second, and of each role what it made and where its seconds went."""
    first, last = observed.commits[0], observed.commits[-1]
    tokens = sum(commit.tokens for commit in observed.commits[1:])
    rate = tokens / (last.at_s - first.at_s)
    return {
        "steps": len(observed.commits) - 1,
        "window_s": round(last.at_s - first.at_s, 2),
        "committed_tokens_per_s": round(rate, 1),
        "initial_checkpoint_was_recorded": observed.settled,
        "first_commit_after_s": round(observed.first_commit_s, 1),
        "roles": _roles(observed.statuses),
    }


def _roles(statuses: list[Seen]) -> dict[str, Any]:
    if len(statuses) < 2:
        return {}
    seconds = statuses[-1].at_s - statuses[0].at_s
    found = {}
    earlier = {role["incarnation"]: role["totals"] for role in statuses[0].status["roles"]}
    for after in statuses[-1].status["roles"]:
        name, old, new = after["role"], earlier.get(after["incarnation"], {}), after["totals"]
        grown = {key: value - old.get(key, 0.0) for key, value in new.items()}
        shares = {
            key.removeprefix("phase_").removesuffix("_seconds"): round(value / seconds, 4)
            for key, value in sorted(grown.items())
            if key.startswith("phase_")
        }
        busy = [
            role["totals"]["gpu_utilization_ratio"]
            for seen in statuses for role in seen.status["roles"]
            if role["role"] == name and "gpu_utilization_ratio" in role["totals"]
        ]  # fmt: skip
        found[name] = {
            "device": after["device"],
            "tokens_per_s": round(grown.get("tokens_total", 0.0) / seconds, 1),
            "working": round(sum(shares.get(key, 0.0) for key in WORK.get(name, ())), 4),
            "phase_share": shares,
            "gpu_utilization_mean": round(sum(busy) / len(busy), 4) if busy else None,
        }
    return found
