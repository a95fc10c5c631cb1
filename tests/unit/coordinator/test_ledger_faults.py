"""The ledger on a full disk, torn, of another run; roll-backs on request; folders that nobody knows."""

import errno
import os
import sqlite3
import subprocess

import pytest

from protocol.errors import ConfigError, DiskFull, LedgerError, RetryError
from protocol.messages import BatchId, StepAt, StepTry
from services.coordinator.checkpoints import refuse_strangers, retire, sweep_unknown
from services.coordinator.disk import disk_errors
from services.coordinator.ledger import Ledger

IDENTITY = {"options": {}, "dataset": "d", "model": "m"}
SHA = "0" * 64


def commit(ledger: Ledger, step: int) -> None:
    step_try = StepTry(ledger.timeline, step, 1, step + 1)
    ledger.commit_step(step_try, 0, [(BatchId(0, 10 * step + index), 2) for index in range(10)], [])


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 2 MiB with a `fill`, for root."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")
    folder = tmp_path / "small"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "draftmill-test", str(folder)], check=True)
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(folder):
    filler = folder / "filler"
    with filler.open("wb", buffering=0) as stream:
        for size in (1 << 16, 1 << 12, 1):
            with pytest.raises(OSError, match="No space"):
                while True:
                    stream.write(bytes(size))
    return filler


def test_a_full_disk_loses_no_committed_step_and_says_what_helps(small_disk):
    path = small_disk / "ledger.sqlite"
    ledger = Ledger(path, IDENTITY)
    commit(ledger, 0)
    filler = fill(small_disk)
    done = 1
    with pytest.raises(DiskFull, match="free some space"), disk_errors(path):
        for step in range(1, 1000):
            commit(ledger, step)
            done = step + 1
    assert ledger.committed_steps == done
    ledger.close()
    filler.unlink()
    again = Ledger(path, IDENTITY)
    assert again.committed_steps == done
    commit(again, done)
    assert len(again.outcomes(0)) == 10 * (done + 1)


def test_a_disk_that_is_full_at_the_start_is_no_damaged_ledger(small_disk):
    filler = fill(small_disk)
    path = small_disk / "ledger.sqlite"
    with pytest.raises(DiskFull, match="nothing that was committed is lost"), disk_errors(path):
        Ledger(path, IDENTITY).new_coordinator_epoch()
    filler.unlink()
    assert Ledger(path, IDENTITY).new_coordinator_epoch() == 1


@pytest.mark.parametrize(
    ("code", "told"),
    [
        (errno.ENOSPC, DiskFull), (errno.EDQUOT, DiskFull), (errno.EFBIG, DiskFull), (errno.EIO, RetryError),
        (errno.EMFILE, RetryError), (errno.EROFS, ConfigError), (errno.EISDIR, ConfigError),
        (errno.EACCES, PermissionError), (errno.ENOENT, FileNotFoundError),
    ],
)  # fmt: skip
def test_what_a_disk_refuses_is_told_by_what_helps_and_the_rest_passes_through(tmp_path, code, told):
    with pytest.raises(told) as found, disk_errors(tmp_path):
        raise OSError(code, "no", "a-file")
    assert type(found.value) is told and "a-file" in str(found.value)


def test_a_run_folder_that_is_a_file_is_a_wrong_option(tmp_path):
    (tmp_path / "run").write_text("")
    with pytest.raises(ConfigError, match="run: File exists"), disk_errors(tmp_path / "run"):
        (tmp_path / "run").mkdir(parents=True, exist_ok=True)


def test_a_ledger_that_another_program_holds_may_be_opened_later(tmp_path, monkeypatch):
    path = tmp_path / "ledger.sqlite"
    Ledger(path, IDENTITY).close()
    connect = sqlite3.connect
    monkeypatch.setattr(sqlite3, "connect", lambda *words, **more: connect(*words, **more, timeout=0.05))
    holder = connect(path, isolation_level=None)
    holder.execute("BEGIN EXCLUSIVE")
    with pytest.raises(RetryError, match="another program holds it"):
        Ledger(path, IDENTITY)
    holder.execute("ROLLBACK")
    holder.close()
    Ledger(path, IDENTITY).close()


def test_a_ledger_that_cannot_be_opened_is_a_wrong_option(tmp_path):
    (tmp_path / "ledger.sqlite").mkdir()
    with pytest.raises(ConfigError, match=r"ledger\.sqlite: unable to open"):
        Ledger(tmp_path / "ledger.sqlite", IDENTITY)


def test_damage_that_is_met_later_is_damage_too(tmp_path):
    error = sqlite3.DatabaseError("malformed")
    error.sqlite_errorcode = sqlite3.SQLITE_CORRUPT
    with pytest.raises(LedgerError, match="restore it from a backup"), disk_errors(tmp_path):
        raise error
    with pytest.raises(sqlite3.IntegrityError), disk_errors(tmp_path):
        raise sqlite3.IntegrityError("a constraint: our own fault")


def test_a_ledger_in_which_no_run_has_begun_takes_no_identity_from_whoever_only_reads(tmp_path):
    """`extend` opens it so; a coordinator that died at once had left it empty."""
    path = tmp_path / "ledger.sqlite"
    path.touch()
    with pytest.raises(LedgerError, match="no run has begun"):
        Ledger(path, None)
    ledger = Ledger(path, IDENTITY)
    assert ledger.identity == IDENTITY
    ledger.close()
    assert Ledger(path, None).identity == IDENTITY


@pytest.mark.parametrize("share", [0.0, 0.3, 0.6, 0.99])
def test_a_truncated_ledger_is_refused_or_a_new_one(tmp_path, share):
    path = tmp_path / "ledger.sqlite"
    ledger = Ledger(path, IDENTITY)
    for step in range(200):
        commit(ledger, step)
    ledger.close()
    os.truncate(path, int(path.stat().st_size * share))
    if share == 0.0:
        assert Ledger(path, IDENTITY).committed_steps == 0
        return
    with pytest.raises(LedgerError, match=r"damaged|backup"):
        Ledger(path, IDENTITY)


def test_a_ledger_of_another_run_is_refused_by_the_option_that_differs(tmp_path):
    path = tmp_path / "ledger.sqlite"
    Ledger(path, IDENTITY | {"options": {"run.seed": 1}}).close()
    with pytest.raises(LedgerError, match=r"run\.seed"):
        Ledger(path, IDENTITY | {"options": {"run.seed": 2}})


def test_a_finished_run_that_was_rolled_back_is_not_finished(tmp_path):
    ledger = Ledger(tmp_path / "ledger.sqlite", IDENTITY)
    commit(ledger, 0)
    ledger.record_checkpoint("ckpt-0-1-drafter-1", StepAt(0, 1), SHA)
    commit(ledger, 1)
    ledger.finish()
    assert ledger.finished
    assert ledger.open_timeline(ledger.checkpoints()[-1].at) == 1
    assert not ledger.finished and ledger.committed_steps == 1 and len(ledger.outcomes(0)) == 10


def test_folders_that_the_ledger_does_not_know_are_swept_but_not_under_a_living_writer(tmp_path):
    ledger = Ledger(tmp_path / "ledger.sqlite", IDENTITY)
    root = tmp_path / "checkpoints"
    known, dead = "ckpt-0-4-drafter-1", ["ckpt-0-8-drafter-1", ".partial-ckpt-0-12-drafter-1"]
    living, other = [".partial-ckpt-0-12-drafter-2", "ckpt-0-16-drafter-2"], "notes"
    for name in (known, other, *dead, *living):
        (root / name).mkdir(parents=True)
    ledger.record_checkpoint(known, StepAt(0, 4), SHA)
    assert sweep_unknown(ledger, root, lambda name: name == "drafter-2") == sorted(dead)
    assert sorted(folder.name for folder in root.iterdir()) == sorted([known, other, *living])
    assert sweep_unknown(ledger, tmp_path / "missing", lambda name: False) == []


def test_checkpoints_of_a_ledger_that_is_gone_are_not_swept(tmp_path):
    root = tmp_path / "checkpoints"
    refuse_strangers(Ledger(tmp_path / "ledger.sqlite", IDENTITY), root)  # there are none yet
    (root / ".partial-ckpt-0-12-drafter-1").mkdir(parents=True)
    refuse_strangers(Ledger(tmp_path / "ledger.sqlite", IDENTITY), root)  # a half one is nothing to keep
    (root / "ckpt-0-8-drafter-1").mkdir()
    ledger = Ledger(tmp_path / "ledger.sqlite", IDENTITY)
    with pytest.raises(LedgerError, match=r"1 checkpoints \(ckpt-0-8-drafter-1\) of a ledger that is gone"):
        refuse_strangers(ledger, root)
    ledger.welcome("drafter-1", "drafter", 0, "host")
    refuse_strangers(ledger, root)  # written, and its writer died before it was recorded


def test_old_checkpoints_are_retired_and_the_initial_weights_stay(tmp_path):
    ledger = Ledger(tmp_path / "ledger.sqlite", IDENTITY)
    for step in (0, 1, 2, 3):
        name = f"ckpt-0-{step}-drafter-1"
        (tmp_path / name).mkdir()
        ledger.record_checkpoint(name, StepAt(0, step), SHA)
    retire(ledger, tmp_path, keep=2)
    assert [row.at.step for row in ledger.checkpoints()] == [0, 2, 3]
    assert not (tmp_path / "ckpt-0-1-drafter-1").exists()
