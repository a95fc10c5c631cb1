"""Packs through real arenas: what goes in comes out, what is no longer true is found out."""

import gc
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transport_packs import BATCH, attempt, make_pack

from protocol.arena import read_computing
from protocol.codec import decode, encode
from protocol.errors import ConfigError, CorruptPack, DecodeError, RetryError, StalePack
from protocol.messages import Pack, Stamp
from services.transport.reader import SlotReader
from services.transport.writer import SlotWriter

CPU = torch.device("cpu")


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[SlotWriter]:
    made = SlotWriter.create(
        tmp_path, "target-1", slots=2, slot_bytes=8192, kind="auto", checksum="always", device=CPU
    )
    yield made
    made.close()


@pytest.mark.parametrize("split", [False, True])
def test_every_bit_arrives_without_a_copy(tmp_path: Path, writer: SlotWriter, split: bool) -> None:
    sent = make_pack(split=split)
    reader = SlotReader(tmp_path, CPU)
    got = reader.open(writer.write(1, BATCH, attempt(1), sent))
    got.wait()
    got.verify()
    assert list(got) == list(sent)
    for name, tensor in sent.items():
        assert torch.equal(got[name], tensor), name
        assert got[name].dtype == tensor.dtype
        assert got[name].data_ptr() % 64 == 0
    writer.write(1, BATCH, attempt(2), make_pack(seed=1, split=split))
    assert not torch.equal(got["input_ids"], sent["input_ids"]), "it was a copy"


@pytest.mark.parametrize("tokens", [1, 2, 63, 64, 65])
def test_packs_of_any_length_fit(tmp_path: Path, writer: SlotWriter, tokens: int) -> None:
    sent = make_pack(tokens)
    got = SlotReader(tmp_path, CPU).open(writer.write(0, BATCH, attempt(tokens), sent))
    got.verify()
    assert all(torch.equal(got[name], sent[name]) for name in sent)


def test_strided_tensors_are_packed(tmp_path: Path, writer: SlotWriter) -> None:
    sent = make_pack()
    wide_TF = torch.randn(13, 100).to(torch.bfloat16)
    sent["features"] = wide_TF[:, 10:58]
    got = SlotReader(tmp_path, CPU).open(writer.write(0, BATCH, attempt(1), sent))
    assert torch.equal(got["features"], wide_TF[:, 10:58])


def test_a_pack_that_is_none_or_too_large_is_refused_before_the_slot_is_touched(
    tmp_path: Path, writer: SlotWriter
) -> None:
    held = SlotReader(tmp_path, CPU).open(writer.write(0, BATCH, attempt(1), make_pack()))
    with pytest.raises(DecodeError, match="in slots of 8,192"):
        writer.write(0, BATCH, attempt(2), make_pack(tokens=100))
    short = make_pack()
    short["features"] = short["features"][:-1]
    with pytest.raises(DecodeError, match="12 rows, it must have 13"):
        writer.write(0, BATCH, attempt(2), short)
    held.verify()


def test_a_slot_that_moved_on_is_stale_at_once_and_later(tmp_path: Path, writer: SlotWriter) -> None:
    reader = SlotReader(tmp_path, CPU)
    old = writer.write(0, BATCH, attempt(1), make_pack())
    held = reader.open(old)
    writer.write(0, BATCH, attempt(2), make_pack(seed=2))
    with pytest.raises(StalePack, match="holds attempt"):
        held.verify()
    with pytest.raises(StalePack, match="holds attempt"):
        reader.open(old)
    other = writer.write(1, BATCH, attempt(3), make_pack())
    writer.invalidate(1)
    with pytest.raises(StalePack, match="nothing whole"):
        reader.open(other)


def test_a_changed_byte_in_a_current_slot_is_corrupt(tmp_path: Path, writer: SlotWriter) -> None:
    reader = SlotReader(tmp_path, CPU)
    descriptor = writer.write(0, BATCH, attempt(1), make_pack())
    reader.open(descriptor)["loss_mask"][3] += 1
    with pytest.raises(CorruptPack, match=r"slot 0 of target-1\.arena"):
        reader.open(descriptor).verify()


@pytest.mark.parametrize("checksums", ["always", "off"])
def test_a_file_that_is_cut_within_a_page_reads_as_zeros_and_is_found_out(
    tmp_path: Path, checksums: str
) -> None:
    writer = SlotWriter.create(tmp_path, "target-1", slots=2, slot_bytes=8192, checksum=checksums, device=CPU)
    sent = make_pack(tokens=64)
    descriptor = writer.write(0, BATCH, attempt(1), sent)
    held = SlotReader(tmp_path, CPU).open(descriptor)
    held.verify()
    held.confirm()
    arena = writer._arena
    os.truncate(arena.path, len(arena.memory) - len(arena.payloads()) + 5000)
    assert held["features"].flatten()[2500:].count_nonzero() == 0, "the kernel would tell by itself"
    with pytest.raises(StalePack, match=r"slot 0 of target-1\.arena .* cut"):
        held.confirm()
    with pytest.raises(StalePack, match="cut"):
        held.verify()
    with pytest.raises(RetryError, match="was cut to"):
        writer.write(0, BATCH, attempt(2), sent)
    writer.close()


def test_a_descriptor_that_contradicts_its_slot_is_refused(tmp_path: Path, writer: SlotWriter) -> None:
    descriptor = writer.write(0, BATCH, attempt(1), make_pack())
    for change in ({"checksum": 5}, {"batch": (9, 9)}):
        changed = type(descriptor).model_validate(descriptor.model_dump() | change)
        with pytest.raises(DecodeError, match="the slot says"):
            SlotReader(tmp_path, CPU).open(changed)


def test_a_descriptor_that_does_not_fit_is_refused(tmp_path: Path, writer: SlotWriter) -> None:
    descriptor = writer.write(0, BATCH, attempt(1), make_pack())
    with pytest.raises(DecodeError, match="slot 7 of an arena of 2"):
        SlotReader(tmp_path, CPU).open(descriptor.model_copy(update={"slot": 7}))


def test_checksums_are_sampled(tmp_path: Path) -> None:
    writer = SlotWriter.create(tmp_path, "target-1", slots=1, slot_bytes=8192, checksum="sampled", device=CPU)
    written = [writer.write(0, BATCH, attempt(counter), make_pack()) for counter in range(32)]
    assert sum(descriptor.checksum is not None for descriptor in written) == 2
    writer.close()


def test_an_arena_is_unmapped_when_it_is_not_kept_and_no_longer_used(
    tmp_path: Path, writer: SlotWriter
) -> None:
    reader = SlotReader(tmp_path, CPU)
    held = reader.open(writer.write(0, BATCH, attempt(1), make_pack()))
    writer.close()
    assert reader.mapped == {"target-1.arena"}
    reader.keep({"target-1.arena"})
    reader.keep(set())
    assert reader.mapped == {"target-1.arena"}
    held.verify()
    features = held["features"]
    before = features.clone()
    del held
    gc.collect()
    assert reader.mapped == set()
    assert torch.equal(features, before), "a tensor must outlive its pack"
    del features
    gc.collect()
    assert str(tmp_path / "target-1.arena") not in Path("/proc/self/maps").read_text()


def test_closing_leaves_no_file(tmp_path: Path, writer: SlotWriter) -> None:
    descriptor = writer.write(0, BATCH, attempt(1), make_pack())
    writer.close()
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(StalePack, match="is gone"):
        SlotReader(tmp_path, CPU).open(descriptor)


def test_kinds_that_need_a_gpu_say_so(tmp_path: Path) -> None:
    for kind in ("pinned", "cuda_ipc"):
        with pytest.raises(ConfigError, match=f"arena.kind = {kind} needs a target on a GPU"):
            SlotWriter.create(tmp_path, "target-1", slots=1, slot_bytes=64, kind=kind, device=CPU)
    assert list(tmp_path.iterdir()) == []


def test_who_computes_is_in_the_file(tmp_path: Path, writer: SlotWriter) -> None:
    writer.set_computing(BATCH, attempt(4))
    assert read_computing(tmp_path, "target-1") == (BATCH, attempt(4))
    writer.set_computing(None)
    assert read_computing(tmp_path, "target-1") is None


TARGET = """
import sys
from pathlib import Path
import torch
from protocol.codec import encode
from protocol.messages import Pack, Stamp
from services.transport.writer import SlotWriter
from transport_packs import BATCH, attempt, make_pack

writer = SlotWriter.create(Path(sys.argv[1]), "target-9", slots=4, slot_bytes=1 << 20, kind="shm",
                           checksum="always", device=torch.device("cpu"))
for slot in range(4):
    descriptor = writer.write(slot, BATCH, attempt(slot), make_pack(900 + slot, seed=slot))
    body = encode(Pack(target="target-9", lease=Stamp(1, 100 + slot), descriptor=descriptor))[1]
    sys.stdout.write(body.hex() + "\\n")
sys.stdout.flush()
sys.stdin.read()
"""


def test_packs_of_another_process_survive_its_death(tmp_path: Path) -> None:
    target = subprocess.Popen(
        [sys.executable, "-c", TARGET, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parent,
    )
    with target:
        assert target.stdout is not None
        packs = [decode([b"Pack", bytes.fromhex(target.stdout.readline())]) for _ in range(4)]
        reader = SlotReader(tmp_path, CPU)
        held = [reader.open(pack.descriptor) for pack in packs if isinstance(pack, Pack)]
        target.kill()
        target.wait(timeout=10)
    (tmp_path / "target-9.arena").unlink()
    for slot, pack in enumerate(held):
        pack.verify()
        sent = make_pack(900 + slot, seed=slot)
        assert all(torch.equal(pack[name], sent[name]) for name in sent)


def test_a_pack_message_is_small(writer: SlotWriter) -> None:
    descriptor = writer.write(0, BATCH, attempt(0), make_pack(split=True))
    assert len(encode(Pack(target="target-1", lease=Stamp(1, 1), descriptor=descriptor))[1]) < 600
