"""One frozen Config out of flags > variables > file > defaults, or one ConfigError with every finding.

pydantic-settings merges the sources; each value keeps its origin, so an error can say where it was
written. About 30 ms. Reads the environment and one file, writes nothing.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource

from protocol.errors import AlreadyRunning, ConfigError
from services.config.names import BY_PATH, OPTIONS
from services.config.rules import broken_rules
from services.config.schema import Config
from services.config.sources import Finding, Given, Source, from_file, from_flags, from_variables, show

REQUIRED = tuple(option.path for option in OPTIONS if option.field.is_required())


class Loaded(NamedTuple):
    """The options, and for each path that was given, where."""

    config: Config
    origins: dict[str, str]

    def describe(self, *paths: str) -> str:
        """`path = value (origin), ...` for a message."""
        return ", ".join(
            f"{path} = {show(BY_PATH[path].value(self.config))} ({self.origins.get(path, 'default')})"
            for path in paths
        )


def load(
    file: Path | None = None,
    flags: Sequence[tuple[str, str]] = (),
    environ: Mapping[str, str] | None = None,
    needs: Sequence[str] = REQUIRED,
) -> Loaded:
    """Read all sources. `environ` None: this process's environment.

    `needs` are the required options that the caller uses; the others are empty if nobody gave them.
    Raises ConfigError naming option, value, origin and rule of everything that is wrong, at once.
    """
    variables = from_variables(os.environ if environ is None else environ)
    sources = [from_flags(flags), variables, from_file(file) if file else Source()]
    findings = [finding for source in sources for finding in source.findings]
    given = {path: value for source in reversed(sources) for path, value in source.given.items()}
    unread = any(source.unread for source in sources)  # what is missing may stand there
    unused = {path: Given("", "not used") for path in REQUIRED if path not in needs}
    try:
        config = _assemble([*(source.given for source in sources), unused])
    except ValidationError as error:
        refuse(findings + _readable(error, given, missing=not unread))
        raise  # every validation error is a finding, so this is not reached
    if unread:
        refuse(findings)
    loaded = Loaded(config, {path: value.origin for path, value in given.items()})
    findings += [Finding(loaded.describe(*broken.options), broken.rule) for broken in broken_rules(config)]
    refuse(findings)
    return loaded


def refuse(findings: Sequence[Finding]) -> None:
    """Raise one ConfigError for all findings, AlreadyRunning if each is of something that is in use; nothing
    when there are none.
    """
    if not findings:
        return
    lines = "\n".join(f"  - {finding}" for finding in findings)
    if all(finding.in_use for finding in findings):
        raise AlreadyRunning(f"another process is in the way\n{lines}")
    count = "1 problem" if len(findings) == 1 else f"{len(findings)} problems"
    raise ConfigError(f"{count} with the configuration\n{lines}")


class _Layer(PydanticBaseSettingsSource):
    """One source, nested as the schema is."""

    def __init__(self, settings: type[BaseSettings], given: Mapping[str, Given]) -> None:
        super().__init__(settings)
        self._given = given

    def get_field_value(self, field: Any, field_name: str) -> tuple[Any, str, bool]:
        return self().get(field_name), field_name, False

    def __call__(self) -> dict[str, Any]:
        tree: dict[str, Any] = {}
        for path, given in self._given.items():
            section, _, name = path.partition(".")
            tree.setdefault(section, {})[name] = given.value
        return {"options": tree}


def _assemble(layers: Sequence[Mapping[str, Given]]) -> Config:
    """Merge and validate the layers, the first one winning."""

    class Assembled(BaseSettings):
        options: Config

        @classmethod
        def settings_customise_sources(
            cls, settings_cls: type[BaseSettings], *_: Any, **__: Any
        ) -> tuple[PydanticBaseSettingsSource, ...]:
            return tuple(_Layer(settings_cls, layer) for layer in layers)

    return Assembled().options


def _readable(error: ValidationError, given: Mapping[str, Given], *, missing: bool) -> list[Finding]:
    """One finding for each problem; options that nobody gave are left out unless `missing`."""
    problems = [problem for problem in error.errors() if missing or problem["type"] != "missing"]
    return [finding for problem in problems for finding in _finding(problem, given)]


def _finding(problem: Any, given: Mapping[str, Given]) -> list[Finding]:
    path = ".".join(str(part) for part in problem["loc"][1:3])  # the first is "options"
    if problem["type"] == "missing":
        wanted = [
            option
            for option in OPTIONS
            if path in (option.path, option.section) and option.field.is_required()
        ]
        return [
            Finding(option.path, f"must be given ({option.field.description}); {option.flag} VALUE")
            for option in wanted
        ]
    element = f", element {problem['loc'][3]}" if len(problem["loc"]) > 3 else ""
    source = given.get(path)
    subject = f"{path} = {show(source.value)} ({source.origin})" if source else path
    return [Finding(subject, f"{_rule(problem)}{element} ({_meaning(path)})")]


def _rule(problem: Any) -> str:
    if problem["type"] == "string_pattern_mismatch":  # which of them is said, a pattern is for machines
        return "does not have the form that is wanted"
    return str(problem["msg"]).replace("Input should be", "must be", 1)


def _meaning(path: str) -> str:
    return BY_PATH[path].field.description or path if path in BY_PATH else path
