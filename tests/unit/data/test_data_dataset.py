"""A dataset is what was written, readable by `datasets` too, and refused when anything is missing."""

import json
import os

import datasets
import numpy as np
import pytest

from protocol.errors import AlreadyRunning, DataError
from services.data import shards
from services.data.dataset import Dataset, Sample, Source
from services.data.shards import Row
from services.data.writer import DatasetWriter, write_dataset


def samples(count, first=0):
    for number in range(first, first + count):
        length = 2 + number % 5
        yield Sample(
            np.arange(number, number + length, dtype=np.int32), (np.arange(length) % 2).astype(np.uint8)
        )


def rows(count, first=0):
    return [Row(sample, Source(0, first + at)) for at, sample in enumerate(samples(count, first), start=1)]


def test_samples_come_back_as_read_only_views(tmp_path):
    write_dataset(tmp_path / "d", samples(2500), {"max_length": 8})
    dataset = Dataset.open(tmp_path / "d")
    assert len(dataset) == 2500
    assert dataset.info == {"max_length": 8}
    for row in (0, 1023, 1024, 2499):
        expected = next(samples(1, row))
        found = dataset.sample(row)
        np.testing.assert_array_equal(found.input_ids, expected.input_ids)
        np.testing.assert_array_equal(found.loss_mask, expected.loss_mask)
        assert (found.input_ids.dtype, found.loss_mask.dtype) == (np.int32, np.uint8)
        assert not found.input_ids.flags.writeable
        assert dataset.source(row) == Source(0, row + 1)
        assert dataset.lengths[row] == len(expected.input_ids)
        assert dataset.supervised[row] == expected.loss_mask.sum()
    assert not dataset.lengths.flags.writeable


def test_the_datasets_library_opens_it(tmp_path):
    write_dataset(tmp_path / "d", samples(3), {})
    loaded = datasets.load_from_disk(str(tmp_path / "d"))
    assert loaded[2]["input_ids"] == [2, 3, 4, 5]
    assert loaded[2]["loss_mask"] == [0, 1, 0, 1]


def test_the_fingerprint_is_of_the_content_and_not_of_its_shards(tmp_path, monkeypatch):
    one = write_dataset(tmp_path / "one", samples(50), {"a": 1})
    monkeypatch.setattr(shards, "BATCH_ROWS", 7)
    with DatasetWriter(tmp_path / "two", key="k") as writer:
        for first in range(0, 50, 10):
            writer.add(rows(10, first))
            writer.commit(first, at_least_rows=10)
        two = writer.finish(lambda blocks: {})
    assert len(list((tmp_path / "two").glob("*.arrow"))) == 5
    assert one.fingerprint == two.fingerprint
    assert write_dataset(tmp_path / "three", samples(50, 1), {}).fingerprint != one.fingerprint
    assert Dataset.open(tmp_path / "two").fingerprint == one.fingerprint


def test_an_interrupted_writer_leaves_the_disk_unchanged(tmp_path):
    with pytest.raises(KeyboardInterrupt), DatasetWriter(tmp_path / "d", key="k") as writer:
        writer.add(rows(5))
        writer.commit(1, at_least_rows=1)
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []


def abandon(path, key):
    """What a kill leaves: two closed shards, an open one, and no lock."""
    writer = DatasetWriter(path, key=key)
    writer.__enter__()
    for first in (0, 10):
        writer.add(rows(10, first))
        writer.commit({"line": first + 10}, at_least_rows=10)
    writer.add(rows(2000, 20))
    writer._rows.abandon()
    os.close(writer._lock)


def test_a_killed_writer_is_resumed_after_its_last_shard(tmp_path):
    abandon(tmp_path / "d", key="same")
    with DatasetWriter(tmp_path / "d", key="same") as writer:
        assert writer.progress == {"line": 20}
        writer.add(rows(10, 20))
        dataset = writer.finish(lambda blocks: {})
    assert [dataset.source(row).line for row in range(30)] == list(range(1, 31))
    assert dataset.fingerprint == write_dataset(tmp_path / "whole", samples(30), {}).fingerprint


def test_another_key_starts_afresh(tmp_path):
    abandon(tmp_path / "d", key="old")
    with DatasetWriter(tmp_path / "d", key="new") as writer:
        assert writer.progress is None
        writer.add(rows(3))
        assert len(writer.finish(lambda blocks: {})) == 3


def test_two_writers_of_one_output_and_an_existing_output_are_refused(tmp_path):
    with DatasetWriter(tmp_path / "d", key="k") as writer:
        with pytest.raises(AlreadyRunning, match="another prepare"), DatasetWriter(tmp_path / "d", key="k"):
            pass
        writer.add(rows(1))
        writer.finish(lambda blocks: {})
    with pytest.raises(DataError, match="exists already"):
        DatasetWriter(tmp_path / "d", key="k")


def test_a_dataset_without_samples_is_refused(tmp_path):
    with pytest.raises(DataError, match="no sample is left"):
        write_dataset(tmp_path / "d", [], {})
    assert list(tmp_path.iterdir()) == []


def damage_manifest(folder):
    (folder / "draftmill.json").write_text("{")


def damage_format(folder):
    manifest = json.loads((folder / "draftmill.json").read_text())
    (folder / "draftmill.json").write_text(json.dumps({**manifest, "format": 99}))


def damage_shard(folder):
    shard = next(folder.glob("*.arrow"))
    shard.write_bytes(shard.read_bytes()[:-8])


def remove_shard(folder):
    next(folder.glob("*.arrow")).unlink()


def remove_manifest(folder):
    (folder / "draftmill.json").unlink()


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (damage_manifest, "not readable as JSON"),
        (damage_format, "format 99"),
        (damage_shard, "must be"),
        (remove_shard, "missing"),
        (remove_manifest, "run `draftmill prepare`"),
    ],
)
def test_a_damaged_dataset_is_refused(tmp_path, damage, words):
    write_dataset(tmp_path / "d", samples(3), {})
    damage(tmp_path / "d")
    with pytest.raises(DataError, match=words):
        Dataset.open(tmp_path / "d")


def test_an_unknown_row_is_refused(tmp_path):
    dataset = write_dataset(tmp_path / "d", samples(3), {})
    for row in (-1, 3):
        with pytest.raises(DataError, match=f"sample {row} does not exist; samples are 0 to 2"):
            dataset.sample(row)
