"""What an evaluator writes: its history, the checkpoint it holds while it works, and the best one.

    <run.dir>/acceptance.jsonl          one line an evaluation, appended and flushed
    <run.dir>/evaluated/<checkpoint>/   hard links to the checkpoint's files, and evaluation.json when done
    <run.dir>/best -> evaluated/<name>  the best by acceptance length; replaced by renaming a link

Holding links before anything is read makes the coordinator's pruning harmless: the names go, the files stay.
Links cost no space until the checkpoint is pruned; the best one then costs one checkpoint. Where the file
system has no hard links, files are copied. An evaluation counts once evaluation.json is there: line and best
follow from it, now or after a restart.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
from pathlib import Path
from typing import Any

from protocol.errors import CheckpointError, DiskFull
from protocol.files import sync_folder, write_durably
from services.dflash.checkpoint import OPTIMIZER

HISTORY, EVALUATED, BEST, FIGURES = "acceptance.jsonl", "evaluated", "best", "evaluation.json"
NEEDED = {"checkpoint", "step", "acceptance_length"}
"""What decides: an evaluation without it is none."""

_PARTIAL = ".partial-"
log = logging.getLogger(__name__)


class History:
    """acceptance.jsonl."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def read(self) -> list[dict[str, Any]]:
        """All whole lines; what a power cut left of the last one is taken off the file.

        A line that is no evaluation is left out: what it was of is evaluated again if it is the newest.
        """
        if not self._file.is_file():
            return []
        content = self._file.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]
        if len(whole) < len(content):
            os.truncate(self._file, len(whole))
        lines = [_figures(line) for line in whole.splitlines() if line.strip()]
        if None in lines:
            log.warning("lines left out", extra={"file": str(self._file), "lines": lines.count(None)})
        return [line for line in lines if line is not None]

    def append(self, line: dict[str, Any]) -> None:
        """On the disk when it returns."""
        with self._file.open("ab") as file:
            file.write(json.dumps(line, allow_nan=False).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())


class Kept:
    """`evaluated` and `best` of a run's folder. One user at a time."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._folder = run_dir / EVALUATED
        self._folder.mkdir(parents=True, exist_ok=True)

    def hold(self, checkpoint: Path) -> Path:
        """A folder with the files of `checkpoint`, whatever becomes of that.

        Raises CheckpointError if it is not there, or no longer whole.
        """
        held = self._folder / checkpoint.name
        if held.is_dir():
            return held
        partial = self._folder / f"{_PARTIAL}{checkpoint.name}"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        try:
            for file in sorted(checkpoint.iterdir()):
                _link(file, partial / file.name)
        except FileNotFoundError as error:
            shutil.rmtree(partial)
            raise CheckpointError(f"checkpoint {checkpoint}: it was removed meanwhile") from error
        except OSError as error:
            shutil.rmtree(partial)
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise
            raise DiskFull(f"{partial}: {error.strerror}; the evaluator has no room to work in") from error
        partial.rename(held)
        return held

    def write_figures(self, held: Path, line: dict[str, Any]) -> None:
        """The evaluation of what `held` holds is done."""
        write_durably(held / FIGURES, json.dumps(line, indent=1, allow_nan=False).encode() + b"\n")

    def figures(self, held: Path) -> dict[str, Any]:
        """What `write_figures` wrote. Call for what `evaluated` names."""
        found = _figures((held / FIGURES).read_bytes())
        assert found is not None, "figures of a folder that has none"
        return found

    def evaluated(self) -> list[Path]:
        """Held folders with whole figures: their evaluation is done, whatever came after it."""
        files = sorted(self._folder.glob(f"*/{FIGURES}"))
        return [file.parent for file in files if _figures(file.read_bytes()) is not None]

    def promote(self, held: Path) -> None:
        """`held` is the best one; readers of `best` see the former or this one, nothing in between."""
        link = self._run_dir / f".{BEST}"
        link.unlink(missing_ok=True)
        link.symlink_to(Path(EVALUATED) / held.name)
        link.rename(self._run_dir / BEST)
        sync_folder(self._run_dir)

    def best(self) -> Path | None:
        """The folder that `best` names."""
        link = self._run_dir / BEST
        return self._folder / link.readlink().name if link.is_symlink() else None

    def release(self) -> None:
        """Let go of everything but the best."""
        best = self.best()
        for folder in self._folder.iterdir():
            if folder != best:
                shutil.rmtree(folder, ignore_errors=True)


def _figures(text: bytes) -> dict[str, Any] | None:
    """An evaluation; None: the text is not one."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) and found.keys() >= NEEDED else None


def _link(source: Path, name: Path) -> None:
    """A hard link, else a copy: some file systems, and other users' files, allow no links. No copy of the
    optimizer's state, two thirds of a checkpoint: no evaluation and no export reads it.
    """
    try:
        os.link(source, name)
    except FileNotFoundError:
        raise
    except OSError:
        if source.name != OPTIMIZER:
            shutil.copyfile(source, name)
