"""Prepare writes every row, or names what it left out, or changes nothing."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tiny_tokenizers import make_tokenizer, template_text
from transformers import LlamaConfig

from protocol.errors import AlreadyRunning, ConfigError, DataError, ModelError
from services.config.schema import Data
from services.data import prepare as preparing
from services.data import sources
from services.data.dataset import Dataset
from services.data.prepare import prepare
from services.data.writer import DatasetWriter

ROWS = 1024


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    make_tokenizer().save_pretrained(folder)
    LlamaConfig(vocab_size=ROWS).save_pretrained(folder)
    return str(folder)


def chat(number=0, answer="It jumps over the lazy dog."):
    return {"messages": [
        {"role": "user", "content": f"What about fox {number}?"}, {"role": "assistant", "content": answer}
    ]}  # fmt: skip


def tokenized(length, prompt=1):
    return {"input_ids": list(range(length)), "prompt_length": prompt}


def write_lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def run(tmp_path, model, inputs, **options):
    output = tmp_path / "out"
    inputs = inputs if isinstance(inputs, list) else [inputs]
    info = prepare(inputs, output, model, Data(path=output, **options))
    return info, Dataset.open(output)


def test_chats_become_a_dataset_that_says_what_it_is(tmp_path, model):
    tokenizer = make_tokenizer()
    info, dataset = run(tmp_path, model, write_lines(tmp_path / "in.jsonl", [chat(at) for at in range(5)]))
    assert len(dataset) == 5
    assert info == dataset.info
    sample = dataset.sample(3)
    supervised = sample.input_ids[sample.loss_mask == 1].tolist()
    assert tokenizer.decode(supervised) == "It jumps over the lazy dog.<|im_end|>"
    assert "fox 3?" in tokenizer.decode(sample.input_ids.tolist())
    assert dataset.source(3).line == 4
    assert info["statistics"]["rows"] == 5
    assert info["statistics"]["tokens"] == int(dataset.lengths.sum())
    assert info["statistics"]["supervised_tokens"] == int(dataset.supervised.sum())
    assert info["statistics"]["duplicates"] == 0
    assert info["embedding_rows"] == ROWS
    assert len(info["tokenizer_sha256"]) == len(info["template_sha256"]) == 64


def test_json_lines_parquet_and_folders_give_the_same_samples(tmp_path, model):
    rows = [chat(at) for at in range(300)]
    lines = write_lines(tmp_path / "in.jsonl", rows)
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "in.parquet", row_group_size=70)
    datasets.Dataset.from_list(rows).save_to_disk(str(tmp_path / "folder"))
    prints = set()
    for at, path in enumerate((lines, tmp_path / "in.parquet", tmp_path / "folder")):
        (tmp_path / str(at)).mkdir()
        _, dataset = run(tmp_path / str(at), model, path)
        assert [dataset.source(row).line for row in range(300)] == list(range(1, 301))
        prints.add(dataset.fingerprint)
    assert len(prints) == 1


def test_a_prepared_dataset_is_an_input_too_and_inputs_are_joined_in_order(tmp_path, model):
    _, first = run(tmp_path, model, write_lines(tmp_path / "a.jsonl", [chat(1), chat(2)]))
    (tmp_path / "more").mkdir()
    _, joined = run(
        tmp_path / "more", model, [tmp_path / "out", write_lines(tmp_path / "b.jsonl", [tokenized(9)])]
    )
    assert len(joined) == 3
    for row in (0, 1):
        np.testing.assert_array_equal(joined.sample(row).input_ids, first.sample(row).input_ids)
        np.testing.assert_array_equal(joined.sample(row).loss_mask, first.sample(row).loss_mask)
    assert [joined.source(row) for row in range(3)] == [(0, 1), (0, 2), (1, 1)]


@pytest.mark.process
def test_workers_change_nothing_but_the_time(tmp_path, model):
    lines = write_lines(tmp_path / "in.jsonl", [chat(at) for at in range(600)] + [{"bad": 1}])
    prints = []
    for workers in (0, 1):
        (tmp_path / str(workers)).mkdir()
        info, dataset = run(tmp_path / str(workers), model, lines, workers=workers, on_bad_line="skip")
        prints.append((dataset.fingerprint, info["skipped"], [dataset.source(row) for row in range(600)]))
    assert prints[0] == prints[1]


BAD_LINES = [
    (b"{", "json", "not JSON"),
    (b"[1, 2", "json", "not JSON"),
    (b"[" * 100_000, "json", "not readable as JSON"),
    (b'{"messages": 1' + b"0" * 5000 + b"}", "json", "not readable as JSON"),
    (b'{"prompt": "a\0b", "completion": "c"}', "characters", "NUL byte at byte 13"),
    (b'{"prompt": "a\\u0000b", "completion": "c"}', "characters", "NUL character"),
    (b'{"prompt": "a", "completion": "\\ud800"}', "characters", r"lone surrogate U\+D800"),
    (b'{"prompt": "\xff", "completion": "c"}', "encoding", "byte 12 of the line is not UTF-8"),
    (
        b'{"prompt": "a", "completion": "' + b"b" * 10_000_000 + b'"}',
        "line too long",
        "more than 8388608 bytes",
    ),
    (b'{"prompt": "a", "completion": ""}', "empty turn", "an empty assistant turn"),
    (json.dumps(tokenized(3, 3)).encode(), "loss mask", "all-zero loss mask"),
    (json.dumps({"input_ids": [1, 2, 3], "loss_mask": [1, 0, 1]}).encode(), "loss mask", "no two supervised"),
    (json.dumps({"input_ids": [1, ROWS], "prompt_length": 0}).encode(), "ids", r"input_ids\[1\] is 1024"),
    (json.dumps({"input_ids": [-1, 2], "prompt_length": 0}).encode(), "ids", r"input_ids\[0\] is -1"),
    (json.dumps({"input_ids": [], "prompt_length": 0}).encode(), "loss mask", "all-zero"),
    (json.dumps({"input_ids": [1, 2, 3], "loss_mask": [1, 1]}).encode(), "lengths", "3 input_ids and 2"),
    (json.dumps({"messages": [*chat()["messages"], chat()["messages"][1]]}).encode(), "order", "in a row"),
    (json.dumps({"messages": [{"role": "bot", "content": "a"}]}).encode(), "role", "has the role 'bot'"),
    (b'"text"', "shape", "must be an object"),
    (b"\xef\xbb\xbf{}", "json", "not JSON"),
]


@pytest.mark.parametrize(("line", "kind", "words"), BAD_LINES, ids=range(len(BAD_LINES)))
def test_a_bad_line_is_refused_by_number_or_skipped_and_counted(tmp_path, model, line, kind, words):
    path = tmp_path / "in.jsonl"
    good = json.dumps(chat()).encode()
    path.write_bytes(good + b"\n" + line + b"\n" + good + b"\n")
    with pytest.raises(DataError, match=rf"in\.jsonl, line 2: .*{words}.*data\.on_bad_line = skip"):
        run(tmp_path, model, path)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["in.jsonl"]
    info, dataset = run(tmp_path, model, path, on_bad_line="skip")
    assert info["skipped"] == {kind: 1}
    assert [dataset.source(row).line for row in range(len(dataset))] == [1, 3]
    noted = json.loads((tmp_path / "out" / "skipped.jsonl").read_text())
    assert (noted["line"], noted["kind"]) == (2, kind)


def test_line_ends_byte_order_marks_and_blank_lines_are_counted(tmp_path, model):
    path = tmp_path / "in.jsonl"
    good = json.dumps(chat()).encode()
    path.write_bytes(b"\xef\xbb\xbf" + good + b"\r\n\n" + good)
    info, dataset = run(tmp_path, model, path)
    assert info["notes"] == {"byte order mark left out": 1, "line ended by CRLF": 1, "blank line left out": 1}
    assert [dataset.source(row).line for row in range(2)] == [1, 3]
    assert info["statistics"]["duplicates"] == 1


def test_a_sample_longer_than_the_limit_is_refused_skipped_or_truncated(tmp_path, model):
    path = write_lines(tmp_path / "in.jsonl", [tokenized(30), tokenized(20)])
    with pytest.raises(
        DataError, match=r"line 1: 30 tokens, more than data.max_length = 20.*data\.on_too_long"
    ):
        run(tmp_path, model, path, max_length=20, on_bad_line="skip")
    info, dataset = run(tmp_path, model, path, max_length=20, on_too_long="skip")
    assert (dataset.lengths.tolist(), info["skipped"]) == ([20], {"too long": 1})
    (tmp_path / "cut").mkdir()
    info, dataset = run(tmp_path / "cut", model, path, max_length=20, on_too_long="truncate")
    assert (dataset.lengths.tolist(), info["notes"]) == ([20, 20], {"cut off at the limit": 1})


def test_a_chat_is_truncated_after_the_last_answer_that_fits(tmp_path, model):
    long = {"messages": chat()["messages"] + chat(1, "dog " * 100)["messages"]}
    path = write_lines(tmp_path / "in.jsonl", [long, chat(0, "fox " * 200)])
    info, dataset = run(tmp_path, model, path, max_length=100, on_too_long="truncate")
    tokenizer = make_tokenizer()
    assert tokenizer.decode(dataset.sample(0).input_ids.tolist()).endswith("lazy dog.<|im_end|>")
    assert dataset.lengths[1] == 100
    assert info["notes"] == {"turns past the limit cut off": 1, "cut off at the limit": 1}


def test_a_prompt_that_fills_the_limit_leaves_nothing_to_train_on(tmp_path, model):
    path = write_lines(tmp_path / "in.jsonl", [tokenized(30, 25)])
    with pytest.raises(DataError, match="line 1: all-zero loss mask"):
        run(tmp_path, model, path, max_length=20, on_too_long="truncate")


def test_nothing_left_is_an_error_and_an_existing_output_stays(tmp_path, model):
    (tmp_path / "empty.jsonl").write_bytes(b"")
    with pytest.raises(DataError, match="no sample is left"):
        run(tmp_path, model, tmp_path / "empty.jsonl")
    path = write_lines(tmp_path / "in.jsonl", [chat()])
    run(tmp_path, model, path)
    before = (tmp_path / "out" / "draftmill.json").read_bytes()
    with pytest.raises(DataError, match="exists already"):
        run(tmp_path, model, path)
    assert (tmp_path / "out" / "draftmill.json").read_bytes() == before


def test_inputs_that_cannot_be_read_are_named(tmp_path, model):
    (tmp_path / "text.txt").write_text("a")
    (tmp_path / "broken.parquet").write_bytes(b"PAR1")
    (tmp_path / "folder").mkdir()
    datasets.DatasetDict({"train": datasets.Dataset.from_list([chat()])}).save_to_disk(
        str(tmp_path / "splits")
    )
    for name, words in [
        ("missing.jsonl", "no such input"), ("text.txt", "must be .jsonl"), ("folder", "no folder of"),
        ("broken.parquet", "not readable as Parquet"), ("splits", "splits train; name one, .*splits/train"),
    ]:  # fmt: skip
        with pytest.raises(DataError, match=words):
            run(tmp_path, model, tmp_path / name)
        assert not (tmp_path / "out").exists()
    with pytest.raises(DataError, match="no input"):
        run(tmp_path, model, [])


def test_tokenizer_template_and_embedding_must_fit(tmp_path, model):
    path = write_lines(tmp_path / "in.jsonl", [chat()])
    small = tmp_path / "small"
    make_tokenizer(template=None).save_pretrained(small)
    LlamaConfig(vocab_size=300).save_pretrained(small)
    with pytest.raises(ModelError, match=r"has id \d+, the embedding 300 rows"):
        run(tmp_path, str(small), path)
    LlamaConfig(vocab_size=ROWS).save_pretrained(small)
    with pytest.raises(ModelError, match=r"data\.chat_template"):
        run(tmp_path, str(small), path)
    (tmp_path / "t.jinja").write_text(template_text("headers"))
    with pytest.raises(ModelError, match="cannot be read"):
        run(tmp_path, str(small), path, chat_template=str(tmp_path / "none.jinja"))
    for folder in ("empty", str(tmp_path / "nowhere")):
        (tmp_path / "empty").mkdir(exist_ok=True)
        with pytest.raises(ModelError, match=r"model\.path"):
            run(tmp_path, str(tmp_path / folder), path)
    assert not [entry for entry in tmp_path.iterdir() if "out" in entry.name]
    info, _ = run(tmp_path, str(small), path, chat_template=str(tmp_path / "t.jinja"))
    assert info["template_sha256"]


def test_tokenized_rows_need_no_template(tmp_path, model):
    bare = tmp_path / "bare"
    make_tokenizer(template=None).save_pretrained(bare)
    LlamaConfig(vocab_size=ROWS).save_pretrained(bare)
    info, dataset = run(tmp_path, str(bare), write_lines(tmp_path / "in.jsonl", [tokenized(9, 4)]))
    assert info["template_sha256"] is None
    assert dataset.supervised.tolist() == [5]


@pytest.mark.process
def test_tokenized_rows_need_no_tokenizer_and_chats_say_that_there_is_none(tmp_path):
    LlamaConfig(vocab_size=ROWS).save_pretrained(tmp_path / "bare")
    info, data = run(tmp_path, str(tmp_path / "bare"), write_lines(tmp_path / "a.jsonl", [tokenized(5)]))
    assert len(data) == 1 and info["tokenizer_sha256"] is None
    with pytest.raises(ModelError, match=r"there is no tokenizer in it .* or give tokenized rows"):
        run(tmp_path / "chats", str(tmp_path / "bare"), write_lines(tmp_path / "b.jsonl", [chat()]))


def test_an_interrupted_prepare_leaves_the_disk_unchanged(tmp_path, model):
    path = write_lines(tmp_path / "in.jsonl", [chat(at) for at in range(600)])

    def interrupt(progress):
        raise KeyboardInterrupt

    for workers in (0, 1):
        with pytest.raises(KeyboardInterrupt):
            options = Data(path=tmp_path / "out", workers=workers)
            prepare([path], tmp_path / "out", model, options, on_progress=interrupt)
        assert [entry.name for entry in tmp_path.iterdir()] == ["in.jsonl"]


KILLED = """
import os, signal, sys
from pathlib import Path
from services.config.schema import Data
from services.data import prepare as preparing
preparing.SHARD_ROWS = preparing.CHUNK_ROWS
inputs, output, model, chunks = [Path(sys.argv[1])], Path(sys.argv[2]), sys.argv[3], int(sys.argv[4])
seen = []
def kill(progress):
    seen.append(progress)
    if len(seen) == chunks:
        os.kill(os.getpid(), signal.SIGKILL)
options = Data(path=output, on_bad_line="skip", validation_ratio=0.1)
preparing.prepare(inputs, output, model, options, on_progress=kill)
"""


@pytest.mark.process
def test_killed_and_resumed_no_row_is_lost_or_doubled(tmp_path, model, monkeypatch):
    monkeypatch.setattr(preparing, "SHARD_ROWS", preparing.CHUNK_ROWS)
    rows = [{"bad": at} if at % 100 == 7 else chat(at) for at in range(1500)]
    path = write_lines(tmp_path / "in.jsonl", rows)
    for chunks in (2, 1):
        script = [sys.executable, "-c", KILLED, str(path), str(tmp_path / "out"), model, str(chunks)]
        assert (
            subprocess.run(script, env={**os.environ, "OMP_NUM_THREADS": "1"}).returncode == -signal.SIGKILL
        )
        assert not (tmp_path / "out").exists()
    seen = []
    options = Data(path=tmp_path / "out", on_bad_line="skip", validation_ratio=0.1)
    info = prepare([path], tmp_path / "out", model, options, on_progress=seen.append)
    dataset = Dataset.open(tmp_path / "out")
    assert seen[0].share > 0.5
    good = [at + 1 for at, row in enumerate(rows) if "bad" not in row]
    held_out = Dataset.open(tmp_path / "out" / "validation")
    written = [[part.source(row).line for row in range(len(part))] for part in (dataset, held_out)]
    assert written == [sorted(written[0]), sorted(written[1])]
    assert sorted(written[0] + written[1]) == good
    assert info["skipped"] == {"shape": 15}
    noted = [
        json.loads(line)["line"] for line in (tmp_path / "out" / "skipped.jsonl").read_text().splitlines()
    ]
    assert noted == [at + 1 for at, row in enumerate(rows) if "bad" in row]
    (tmp_path / "whole").mkdir()
    _, whole = run(tmp_path / "whole", model, path, on_bad_line="skip", validation_ratio=0.1)
    assert whole.fingerprint == dataset.fingerprint
    assert Dataset.open(tmp_path / "whole" / "out" / "validation").fingerprint == held_out.fingerprint


def test_a_share_of_the_prompts_is_held_out_whatever_their_answers(tmp_path, model):
    rows = [chat(at, answer) for at in range(200) for answer in ("It jumps.", "It does not.")]
    info, dataset = run(tmp_path, model, write_lines(tmp_path / "in.jsonl", rows), validation_ratio=0.2)
    held_out = Dataset.open(tmp_path / "out" / "validation")
    assert len(dataset) + len(held_out) == 400
    assert 40 < len(held_out) == info["validation_rows"] < 120
    lines = {(held_out.source(row).line - 1) // 2 for row in range(len(held_out))}
    assert len(lines) * 2 == len(held_out)
    assert lines.isdisjoint((dataset.source(row).line - 1) // 2 for row in range(len(dataset)))
    (tmp_path / "fewer").mkdir()
    some = write_lines(tmp_path / "some.jsonl", rows[100:300])
    run(tmp_path / "fewer", model, some, validation_ratio=0.2)
    again = Dataset.open(tmp_path / "fewer" / "out" / "validation")
    assert {(again.source(row).line - 1) // 2 + 50 for row in range(len(again))} == lines & set(
        range(50, 150)
    )


def test_weights_repeat_and_thin_out_inputs(tmp_path, model):
    paths = [write_lines(tmp_path / f"{name}.jsonl", [chat(at) for at in range(200)]) for name in "abc"]
    info, dataset = run(tmp_path, model, paths, weights=(2.0, 0.25, 1.5))
    files = [dataset.source(row).file for row in range(len(dataset))]
    assert files.count(0) == 400
    assert 20 < files.count(1) < 80
    assert 250 < files.count(2) < 350
    assert info["notes"]["left out by its weight"] == 200 - files.count(1)
    assert info["copies_by_weight"] == 200 + (files.count(2) - 200)
    with pytest.raises(ConfigError, match=r"data\.weights"):
        prepare(paths, tmp_path / "more", model, Data(path=tmp_path / "more", weights=(1.0,)))


def test_two_at_once_are_refused(tmp_path, model):
    path = write_lines(tmp_path / "in.jsonl", [chat()])
    with DatasetWriter(tmp_path / "out", key="other"), pytest.raises(AlreadyRunning):
        run(tmp_path, model, path)


@pytest.mark.parametrize("position", [0, 1, 69, 70, 71, 299])
def test_reading_goes_on_at_any_position(tmp_path, position):
    rows = [{"n": at} for at in range(300)]
    lines = write_lines(tmp_path / "in.jsonl", rows)
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "in.parquet", row_group_size=70)
    datasets.Dataset.from_list(rows).save_to_disk(str(tmp_path / "folder"))
    for path in (lines, tmp_path / "in.parquet", tmp_path / "folder"):
        everything = list(sources.read_rows(path, 0, 0))
        offset = everything[position - 1].position if position else 0
        assert list(sources.read_rows(path, position, offset)) == everything[position:]
        assert everything[-1].position == sources.source_size(Path(path))
