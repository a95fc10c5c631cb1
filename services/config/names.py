"""The names of every option, computed from the schema: path, variable, flag. Nothing is parsed apart.

    path      target.postprocess_depth            [target] postprocess_depth in TOML
    variable  DFLASH_TARGET_POSTPROCESS_DEPTH
    flag      --target.postprocess-depth

A variable's name is looked up whole: `_` joins sections and words alike, so `DFLASH_A_B_C` cannot be
taken apart without guessing. A test refuses two options with one variable. Costs 1 ms, once.
"""

from __future__ import annotations

import difflib
import typing
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from pydantic.fields import FieldInfo

from services.config.schema import Config

PREFIX = "DFLASH_"

ALIASES = {
    "DFLASH_PROFILE_INTERVAL": "profile.interval_s",
    "DFLASH_SPLIT_FC_LAYERS": "target.split_fc_layers",
    "DFLASH_TARGETS": "target.count",
    "DFLASH_DRAFTERS": "drafter.count",
}
"""Variables that people have in their scripts, beside the computed ones."""


@dataclass(frozen=True)
class Option:
    """One leaf of the schema."""

    path: str
    field: FieldInfo

    @property
    def section(self) -> str:
        return self.path.partition(".")[0]

    @property
    def name(self) -> str:
        return self.path.partition(".")[2]

    @property
    def variable(self) -> str:
        return PREFIX + self.path.replace(".", "_").upper()

    @property
    def flag(self) -> str:
        return "--" + self.path.replace("_", "-")

    @property
    def training(self) -> bool:
        """True: part of the run's fingerprint."""
        extra = self.field.json_schema_extra
        return isinstance(extra, dict) and extra.get("training") is True

    @property
    def is_list(self) -> bool:
        return typing.get_origin(self.field.annotation) is tuple

    @property
    def is_bool(self) -> bool:
        return self.field.annotation is bool

    def value(self, config: Config) -> Any:
        return getattr(getattr(config, self.section), self.name)


def _options() -> tuple[Option, ...]:
    found = []
    for section, outer in Config.model_fields.items():
        model = outer.annotation
        assert isinstance(model, type), f"section {section} is not a model"
        found += [Option(f"{section}.{name}", inner) for name, inner in model.model_fields.items()]
    return tuple(found)


OPTIONS: tuple[Option, ...] = _options()
BY_PATH: dict[str, Option] = {option.path: option for option in OPTIONS}
BY_VARIABLE: dict[str, Option] = {option.variable: option for option in OPTIONS} | {
    alias: BY_PATH[path] for alias, path in ALIASES.items()
}
BY_FLAG: dict[str, Option] = {option.flag: option for option in OPTIONS}


def suggestion(wrong: str, known: Iterable[str]) -> str:
    """`; did you mean X?`, or "" when nothing known is close to `wrong`."""
    close = difflib.get_close_matches(wrong, list(known), n=1, cutoff=0.6)
    return f"; did you mean {close[0]}?" if close else ""
