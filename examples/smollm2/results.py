"""What came of it: results.json and a table. A row that failed is shown empty."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from commands import began_s, console
from drafters import Row
from prompts import tokens
from rich.table import Table


def collect(out: Path, rows: list[Row]) -> dict[str, Any]:
    """What is there by now, by row; also written to results.json."""
    found = {row.name: result(out, row) for row in rows}
    speeds = out / "speed.json"
    everything = {
        "data": {name: json.loads((out / f"prepare-{name}.json").read_text()) for name in ("all", "greedy")},
        "tokens": {name: tokens(out, name) for name in ("all", "greedy")},
        "rows": found,
        "speed": json.loads(speeds.read_text()).get("block_sizes") if speeds.exists() else None,
        "wall_s": round(time.monotonic() - began_s),
    }
    (out / "results.json").write_text(json.dumps(everything, indent=1) + "\n")
    return found


def show(found: dict[str, Any]) -> None:
    domains = ("gsm8k", "mt_bench", "human_eval", "self_instruct")
    table = Table(
        "drafter", "steps", "tokens", "loss", *domains, "lossless", title="acceptance length, greedy"
    )
    for name, values in found.items():
        lengths = values.get("acceptance") or {}
        cells = [values.get("steps"), values.get("tokens"), values.get("loss"), *map(lengths.get, domains)]
        table.add_row(name, *map(shown, [*cells, values.get("lossless")]))
    console.print(table)


def shown(value: Any) -> str:
    return "" if value is None else f"{value:.3f}" if isinstance(value, float) else str(value)


def result(out: Path, row: Row) -> dict[str, Any]:
    run, evaluated = out / "runs" / row.name, out / "evals" / f"{row.name}.json"
    values: dict[str, Any] = {"flags": row.flags, "data": row.data}
    metrics = run / "metrics.jsonl"
    if metrics.exists():
        steps = [json.loads(line) for line in metrics.read_text().splitlines()]
        last = steps[-50:]
        values |= {
            "steps": steps[-1]["step"],
            "tokens": int(sum(step["tokens"] for step in steps)),
            "loss": sum(step["loss"] for step in last) / len(last),
            "accepted_length_while_training": sum(step["accepted_length"] for step in last) / len(last),
        }
    if (run / "peer.json").exists():
        last_line = (run / "peer.json").read_text().strip().rpartition("\n")[2]
        said = json.loads(last_line) if last_line.startswith('{"') else {}  # before it, lines of progress
        values |= {name: said.get(name) for name in ("peer", "options", "steps", "tokens", "loss", "seconds")}
    if (run / "acceptance.jsonl").exists():
        values["while_training"] = [
            json.loads(line) for line in (run / "acceptance.jsonl").read_text().splitlines()
        ]
    if evaluated.exists():
        eval_ = json.loads(evaluated.read_text())
        values |= {
            "acceptance": eval_["acceptance_length_by_domain"],
            "by_position": eval_["by_position_by_domain"],
            "by_request": eval_["acceptance_length_by_request"],
            "lossless": eval_["lossless"],
            "ties": len(eval_["ties"]),
            "prompts": eval_["prompts"],
            "block_size": eval_["block_size"],
        }
    return values
