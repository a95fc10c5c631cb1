"""The table of families in docs/targets.md; run as a script it writes it anew, 30 s."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

from target_case import Case, Figures
from target_families import FAMILIES, Family

DOC = Path(__file__).parents[3] / "docs" / "targets.md"
BEGIN, END = "<!-- families: begin -->", "<!-- families: end -->"
HEAD = (
    "| family | what is special in the test | scale, factor, cap | taps | logits | ragged |",
    "|---|---|---|---|---|---|",
)


def rules(family: Family) -> str:
    """Embedding scale, logit factor and soft-cap that go into drafter and export."""
    found = [f"{family.scale:.4g}" if family.scale != 1.0 else "", "", ""]
    found[1] = f"{family.multiplier:g}" if family.multiplier != 1.0 else ""
    found[2] = f"{family.softcap:g}" if family.softcap else ""
    return ", ".join(part or "-" for part in found) if any(found) else "-"


def row(name: str, figures: Figures) -> str:
    family = FAMILIES[name]
    errors = " | ".join(f"{error:.0e}" if error else "0" for error in vars(figures).values())
    return f"| `{name}` | {family.special} | {rules(family)} | {errors} |"


def documented() -> dict[str, tuple[str, ...]]:
    """Cells of the table by family."""
    table = DOC.read_text().split(BEGIN)[1].split(END)[0]
    rows = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("| `")]
    return {cells[0].strip("`"): tuple(cells[1:]) for cells in rows}


def main() -> None:
    """Measures every family and replaces what stands between the marks."""
    rows = []
    for name in FAMILIES:
        with tempfile.TemporaryDirectory() as folder:
            rows.append(row(name, Figures.of(Case.make(name, Path(folder)))))
    table = "\n".join([BEGIN, *HEAD, *rows, END])
    DOC.write_text(re.sub(f"{BEGIN}.*{END}", lambda _: table, DOC.read_text(), flags=re.DOTALL))


if __name__ == "__main__":
    main()
