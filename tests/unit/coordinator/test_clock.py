"""No decision hangs on the wall clock: it may jump either way while a run goes on."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[3]
STAMPS_ONLY = {  # what people read, never what is decided
    ("services/coordinator/ledger.py", "new_coordinator_epoch"),
    ("services/coordinator/record.py", "event"),
    ("protocol/traces.py", "_is_void"),  # how old a person's request for a trace is
}
WALL = {"time", "time_ns", "localtime", "gmtime", "ctime"}
DECIDING = ["protocol", "services/coordinator", "services/target", "services/drafter", "services/transport"]


def wall_clock_readers(file: Path) -> set[tuple[str, str]]:
    """(file, function) of every call of time.time, time.localtime and the like, or use of datetime."""
    found = set()
    for function in ast.walk(ast.parse(file.read_text())):
        if not isinstance(function, ast.FunctionDef):
            continue
        for node in ast.walk(function):
            wall = isinstance(node, ast.Attribute) and (
                (isinstance(node.value, ast.Name) and node.value.id == "time" and node.attr in WALL)
                or node.attr in {"now", "utcnow", "today"}
            )
            if wall:
                found.add((str(file.relative_to(ROOT)), function.name))
    return found


def test_only_records_for_people_read_the_wall_clock():
    files = [file for folder in DECIDING for file in sorted((ROOT / folder).glob("*.py"))]
    files.append(ROOT / "services/link.py")
    assert len(files) > 30
    assert set().union(*map(wall_clock_readers, files)) <= STAMPS_ONLY
