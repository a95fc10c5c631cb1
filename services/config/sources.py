"""Where option values come from: flags, variables, one TOML file. Each value keeps its origin.

A source is read into `{path: Given(value, origin)}`; what it cannot place is a Finding, never dropped.
Text of flags and variables is left to pydantic's lax conversion, but for lists (comma-separated).
The only reader of the environment in the project is this package.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from services.config.names import BY_FLAG, BY_PATH, BY_VARIABLE, PREFIX, Option, suggestion


@dataclass(frozen=True)
class Given:
    """A value as its source wrote it; `origin` is a flag, a variable or `file:line`."""

    value: Any
    origin: str


@dataclass(frozen=True)
class Finding:
    """One broken rule: the thing with its value and origin, then rule and remedy."""

    subject: str
    rule: str
    in_use: bool = False  # another live process has it: nothing is wrong with the option

    def __str__(self) -> str:
        return f"{self.subject}: {self.rule}"


@dataclass
class Source:
    """What one source gave, and what is wrong with it."""

    given: dict[str, Given] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    unread: bool = False  # it is there, and nobody can say what it would have given

    def add(self, option: Option, value: Any, origin: str) -> None:
        """Take a value; a second, different one for the same option is a finding."""
        if option.is_list and isinstance(value, str):
            value = [part.strip() for part in value.split(",") if part.strip()]
        earlier = self.given.get(option.path)
        if earlier is not None and earlier.value != value:
            rule = f"{earlier.origin} gives the same option {show(earlier.value)}; keep one of them"
            self.findings.append(Finding(f"{option.path} = {show(value)} ({origin})", rule))
        self.given[option.path] = Given(value, origin)


def show(value: Any) -> str:
    """A value as the user would write it."""
    if isinstance(value, list | tuple):
        return ",".join(str(part) for part in value) or "''"
    if isinstance(value, bool):
        return str(value).lower()
    text = str(value)
    return text if text and text.isprintable() else repr(text)


def split_flags(arguments: Sequence[str]) -> tuple[list[tuple[str, str]], list[str]]:
    """Take `--section.option VALUE` and `--section.option=VALUE` out of a command line.

    Returns the (flag, value) pairs and the rest. A flag without a value means `true`, so that
    `--target.compile` reads as people expect. Everything after `--` is left alone.
    """
    pairs: list[tuple[str, str]] = []
    rest: list[str] = []
    waiting = list(arguments)
    while waiting:
        word = waiting.pop(0)
        if word == "--":
            return pairs, [*rest, word, *waiting]
        if not re.match(r"--[a-z][a-z0-9_-]*\.", word):
            rest.append(word)
            continue
        flag, equals, value = word.partition("=")
        if not equals:
            takes_next = bool(waiting) and not waiting[0].startswith("--")
            value = waiting.pop(0) if takes_next else "true"
        pairs.append((flag, value))
    return pairs, rest


def from_flags(pairs: Sequence[tuple[str, str]]) -> Source:
    """`(--section.option, value)` pairs; `_` and `-` are the same in a flag."""
    source = Source()
    for flag, value in pairs:
        option = BY_FLAG.get(flag.replace("_", "-"))
        if option is None:
            rule = f"there is no such option{suggestion(flag, BY_FLAG)}"
            source.findings.append(Finding(f"{flag} {show(value)}", rule))
        else:
            source.add(option, value, flag)
    return source


def from_variables(environ: Mapping[str, str]) -> Source:
    """Every `DFLASH_*` variable; an empty one counts as not set (compose files pass those)."""
    source = Source()
    for name in sorted(environ):
        if not name.startswith(PREFIX) or environ[name] == "":
            continue
        option = BY_VARIABLE.get(name)
        if option is None:
            rule = f"no option has this variable{suggestion(name, BY_VARIABLE)}"
            source.findings.append(Finding(f"{name}={show(environ[name])}", rule))
        else:
            source.add(option, environ[name], name)
    return source


def from_file(path: Path) -> Source:
    """One TOML file of `[section]` tables."""
    source = Source(unread=True)
    try:
        text = path.read_text(encoding="utf-8")
        tables = tomllib.loads(text)
    except (OSError, UnicodeDecodeError) as error:
        source.findings.append(
            Finding(f"--config {path}", f"cannot be read ({error}); give an existing file")
        )
        return source
    except tomllib.TOMLDecodeError as error:
        source.findings.append(Finding(f"--config {path}", f"is not TOML: {error}"))
        return source
    source.unread = False
    lines = _lines_of_keys(text)
    for section, table in tables.items():
        entries = table if isinstance(table, dict) else {"": table}
        for name, value in entries.items():
            key = f"{section}.{name}" if name else section
            _place(source, key, value, f"{path}:{lines[key]}" if key in lines else str(path))
    return source


def _place(source: Source, key: str, value: Any, origin: str) -> None:
    option = BY_PATH.get(key)
    if option is None:
        rule = f"there is no such option{suggestion(key, BY_PATH)}"
        source.findings.append(Finding(f"{key} = {show(value)} ({origin})", rule))
    elif isinstance(value, bool) and not option.is_bool:
        # pydantic would take `slots = true` as 1
        source.findings.append(
            Finding(f"{key} = {show(value)} ({origin})", "true and false fit switches only")
        )
    else:
        source.add(option, value, origin)


def _lines_of_keys(text: str) -> dict[str, int]:
    """Line of each `section.name`, found by eye; keys that it misses are shown without a line."""
    lines: dict[str, int] = {}
    table = ""
    for number, line in enumerate(text.splitlines(), start=1):
        if header := re.match(r"\s*\[\s*([\w.-]+)\s*\]", line):
            table = header[1] + "."
        elif key := re.match(r"\s*([\w.-]+)\s*=", line):
            lines.setdefault(table + key[1], number)
    return lines
