"""What came of it: results.json, a table and pictures. What is not there yet, or failed, is shown empty.

by_position.svg      GSM8K test: the share of rounds that kept each slot of a block, a curve a row
while_training.svg   acceptance length of blocks at random anchors, and of decoding by the evaluator
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from commands import began_s, console, write_whole
from drafters import Row, last_line
from prompts import tokens
from rich.table import Table

from services.dflash.eval_picture import by_position_svg, curves_svg

AVERAGED = 50


def collect(out: Path, rows: list[Row], failures: dict[str, str]) -> dict[str, Any]:
    """What is there by now, by row; also written to results.json. Runs may be under way."""
    names = [name for name in ("all", "greedy") if (out / f"prepare-{name}.json").exists()]
    found = {row.name: result(out, row, failures.get(row.name)) for row in rows}
    everything = {
        "data": {name: json.loads((out / f"prepare-{name}.json").read_text()) for name in names},
        "tokens": {name: tokens(out, name) for name in names},
        "rows": found,
        "wall_s_of_last_start": round(time.monotonic() - began_s),
    }
    write_whole(out / "results.json", json.dumps(everything, indent=1) + "\n")
    write_whole(out / "by_position.svg", by_position(found))
    write_whole(out / "while_training.svg", while_training(out, found))
    return found


def by_position(found: dict[str, Any]) -> str:
    curves = {
        f"{name}: {values['acceptance']['gsm8k']:.2f}": values["by_position"]["gsm8k"]
        for name, values in found.items()
        if "gsm8k" in values.get("by_position", {})
    }
    return by_position_svg(curves)


def while_training(out: Path, found: dict[str, Any]) -> str:
    """Each point of a row is the mean of AVERAGED steps."""
    curves = {name: averaged(steps_of(out / "runs" / name)) for name in found}
    for name, values in found.items():
        evaluated = [(line["step"], line["acceptance_length"]) for line in values.get("while_training", [])]
        decoded = [(step, length) for step, length in evaluated if length is not None]
        curves |= {f"{name}, decoded": decoded} if decoded else {}
    points = [point for curve in curves.values() for point in curve]
    return curves_svg(
        {name: curve for name, curve in curves.items() if curve},
        title="Acceptance length while training", across="step",
        x_range=(0, max([1, *(x for x, _ in points)])),
        y_range=(1.0, max([1.5, *(y for _, y in points)])),
    )  # fmt: skip


def averaged(steps: list[dict[str, Any]]) -> list[tuple[float, float]]:
    parts = [steps[start : start + AVERAGED] for start in range(0, len(steps), AVERAGED)]
    return [(part[-1]["step"], mean([step["accepted_length"] for step in part])) for part in parts]


def show(found: dict[str, Any]) -> None:
    domains = ("gsm8k", "mt_bench", "human_eval", "self_instruct")
    columns = ("measured", "prompts", "steps", "tokens", "loss", *domains, "lossless")
    table = Table(*columns, title="acceptance length, greedy")
    for name, values in found.items():
        shown_values = {"measured": name, **values, **(values.get("acceptance") or {})}
        table.add_row(*(shown(shown_values.get(column)) for column in columns))
    console.print(table)


def shown(value: Any) -> str:
    return "" if value is None else f"{value:.3f}" if isinstance(value, float) else str(value)


def result(out: Path, row: Row, failure: str | None) -> dict[str, Any]:
    evals, speed = evaluations(out, row), out / "evals" / f"{row.name}-speed.json"
    return {
        "flags": row.flags,
        "data": row.data,
        **({"failed": failure} if failure else {}),
        **training(out / "runs" / row.name),
        **peer(out, row),
        **(evaluation(evals[0]) if evals else {}),
        **({"speed": json.loads(speed.read_text())["block_sizes"]} if speed.exists() else {}),
    }


def lines(path: Path) -> list[dict[str, Any]]:
    """Those that are whole: somebody may be writing. None without the file."""
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    return [json.loads(line) for line in text.split("\n")[:-1]]


def steps_of(run: Path) -> list[dict[str, Any]]:
    """In order. Of a step that was taken again, the last time counts."""
    by_step = {step["step"]: step for step in lines(run / "metrics.jsonl")}
    return [by_step[number] for number in sorted(by_step)]


def training(run: Path) -> dict[str, Any]:
    """Sums, and means of the last AVERAGED steps."""
    steps = steps_of(run)
    if not steps:
        return {}
    last = steps[-AVERAGED:]
    return {
        "steps": steps[-1]["step"],
        "tokens": int(sum(step["tokens"] for step in steps)),
        "loss": mean([step["loss"] for step in last]),
        "accepted_length_while_training": mean([step["accepted_length"] for step in last]),
        "while_training": lines(run / "acceptance.jsonl"),
    }


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def peer(out: Path, row: Row) -> dict[str, Any]:
    found = exported(out, row) if row.peer else []
    said = json.loads(last_line(found[0])) if found else {}  # before it, lines of progress
    wanted = ("peer", "options", "steps", "tokens", "loss", "seconds")
    counted = {"acceptance_of_its_own_blocks": said["acceptance"]} if "acceptance" in said else {}
    return {name: said[name] for name in wanted if name in said} | counted


def exported(out: Path, row: Row) -> list[Path]:
    """Records of the row's exports: the whole one, then those that were cut, latest step first."""
    cut = (out / "exports").glob(f"{row.name}-at-*.json")
    latest = sorted(cut, key=lambda file: int(file.stem.rpartition("-")[2]), reverse=True)
    return [file for file in (out / "exports" / f"{row.name}.json", *latest) if file.exists()]


def evaluations(out: Path, row: Row) -> list[Path]:
    """The best first: of all prompts, of few, of a run that was cut."""
    names = [row.name, f"{row.name}-few", *(f"{file.stem}-few" for file in exported(out, row))]
    return [file for name in names if (file := out / "evals" / f"{name}.json").exists()]


def evaluation(file: Path) -> dict[str, Any]:
    found = json.loads(file.read_text())
    return {
        "measured": file.stem,
        "acceptance": found["acceptance_length_by_domain"],
        "by_position": found["by_position_by_domain"],
        "by_request": found["acceptance_length_by_request"],
        "lossless": found["lossless"],
        "ties": len(found["ties"]),
        "prompts": found["prompts"],
        "block_size": found["block_size"],
    }
