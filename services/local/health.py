"""The health check of a container: `python -m services.local.health URL [--member]`; exits with 0 or 1.

Of the coordinator: does the run progress (its /healthz). Of a role, with `--member`: is it one of the run's
members that has reported lately; one whose run is over is well at rest. A role that makes no progress exits
by itself (watch.stuck_s), so nobody has to judge that from outside. Standard library only: 0.1 s a call.
"""

from __future__ import annotations

import json
import re
import socket
import sys
import urllib.error
import urllib.request
from collections.abc import Sequence
from typing import Any

ANSWER_S = 5.0
SILENT_S = 30.0
OVER = {"finished", "stopped", "failed"}


def problem(url: str, host: str | None) -> str:
    """Why the run, or the role on `host`, is not well; "" if it is."""
    if host is None:
        return _get(f"{url}/healthz")[1].removeprefix("ok")
    code, body = _get(f"{url}/status")
    if code != 200:
        return body
    return _of_member(json.loads(body), host)


def _of_member(status: dict[str, Any], host: str) -> str:
    if status["state"] in OVER:
        return ""
    mine = [role for role in status["roles"] if role["host"] == re.sub(r"[^A-Za-z0-9_.\-]", "_", host)]
    if not mine:
        return f"no member of the run is on {host}"
    if mine[0]["state"] != "ready" or mine[0]["silent_s"] > SILENT_S:
        return (
            f"{mine[0]['role']} {mine[0]['index']} is {mine[0]['state']}, silent {mine[0]['silent_s']:.0f} s"
        )
    return ""


def _get(url: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(url, timeout=ANSWER_S) as answer:  # noqa: S310 - from our command line
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()
    except OSError as error:
        return 0, f"{url}: {error}"


def main(words: Sequence[str]) -> int:
    found = problem(words[0], socket.gethostname() if "--member" in words[1:] else None)
    sys.stdout.write((found or "well") + "\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
