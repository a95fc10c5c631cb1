"""Headless Chromium on a page: its DOM after a while, a screenshot, and what it wrote to the console."""

from __future__ import annotations

import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import NamedTuple

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


class Visit(NamedTuple):
    dom: str
    console: list[str]


def shown(dom: str) -> dict[str, float]:
    """`data-metric` -> `data-value` of our page."""
    values: dict[str, float] = {}

    class Reader(HTMLParser):
        def handle_starttag(self, tag, attrs):
            given = dict(attrs)
            if given.get("data-metric") and given.get("data-value"):
                values[given["data-metric"]] = float(given["data-value"])

    Reader().feed(dom)
    return values


def visit(url: str, profile: Path, *, seconds: float = 4.0) -> Visit:
    """The DOM after `seconds` of the page's own clock, which stands still while a request is under way."""
    done = _run(url, profile, seconds, "--dump-dom")
    return Visit(done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line])


def screenshot(url: str, profile: Path, file: Path, *, seconds: float = 4.0, dark: bool = False) -> None:
    look = ["--force-dark-mode", "--blink-settings=preferredColorScheme=0"] if dark else []
    _run(url, profile, seconds, f"--screenshot={file}", "--window-size=1240,1330", "--hide-scrollbars", *look)


def _run(url: str, profile: Path, seconds: float, *more: str) -> subprocess.CompletedProcess[str]:
    assert BROWSER is not None, "callers skip without a browser"
    command = [
        BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
        "--no-first-run", "--disable-extensions", "--disable-background-networking",
        f"--user-data-dir={profile}", "--enable-logging=stderr", "--log-level=0",
        f"--virtual-time-budget={int(seconds * 1000)}", *more, url,
    ]  # fmt: skip
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
