"""One line an event: `time=.. level=.. role=.. index=.. thread=.. event=.. key=value ..`, or JSON.

Everything goes through the standard library: `log.info("ready", extra={"tokens": 4096})` writes
`event=ready tokens=4096`. Role and index are known to the process, not to its callers. Lines go to
stderr (where `draftmill up` and containers collect them) or to a file. A traceback follows its line,
indented, in text; in JSON it is a field. About 15 us a line.
"""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from services.config.schema import Log

_OWN = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName", "color_message"}
_QUIET = ("urllib3", "httpx", "httpcore", "filelock", "fsspec", "datasets", "asyncio", "torch")


class Events(logging.Formatter):
    """Renders records of one process; `index` is set once the coordinator has given the role its place."""

    def __init__(self, role: str, index: int | None, *, as_json: bool) -> None:
        super().__init__()
        self.role, self.index, self._as_json = role, index, as_json

    def format(self, record: logging.LogRecord) -> str:
        fields = self._fields(record)
        trace = self.formatException(record.exc_info) if record.exc_info else ""
        if self._as_json:
            return json.dumps(fields | ({"traceback": trace} if trace else {}), default=str)
        line = " ".join(f"{name}={_text(value)}" for name, value in fields.items())
        return "\n    ".join([line, *trace.splitlines()])

    def _fields(self, record: logging.LogRecord) -> dict[str, Any]:
        moment = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        fields: dict[str, Any] = {"time": moment.replace("+00:00", "Z"), "level": record.levelname.lower()}
        fields["role"] = self.role
        if self.index is not None:
            fields["index"] = self.index
        fields |= {"thread": record.threadName, "event": record.getMessage()}
        return fields | {name: value for name, value in vars(record).items() if name not in _OWN}


def setup(options: Log, role: str, index: int | None = None, file: Path | None = None) -> Events:
    """Send events to `file` (appended) or stderr. Returns the formatter, to set its `index` later."""
    formatter = Events(role, index, as_json=options.format == "json")
    handler = logging.FileHandler(file) if file else logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter)
    logging.basicConfig(level=options.level.upper(), handlers=[handler], force=True)
    for name in _QUIET:
        logging.getLogger(name).setLevel(logging.WARNING)
    logging.captureWarnings(True)
    return formatter


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    text = str(value)
    plain = text.isprintable() and text and not set(text) & set(' ="')
    return text if plain else json.dumps(text, ensure_ascii=False)
