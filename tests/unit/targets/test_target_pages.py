"""Targets of one host that load the same files in their own type have one copy of the weights together."""

from __future__ import annotations

import re
import shutil
import tempfile
from pathlib import Path

import pytest
import torch
from target_families import SHAPE
from transformers import AutoModelForCausalLM, LlamaConfig

from services.dflash.target_model import load_target

KIB = 1024


@pytest.fixture
def folder():
    """A model of 8 MB in bfloat16, in memory-backed files where there are such."""
    parent = Path("/dev/shm") if Path("/dev/shm").is_dir() else None
    found = Path(tempfile.mkdtemp(prefix="draftmill-pages-", dir=parent))
    config = LlamaConfig(**{**SHAPE, "hidden_size": 256, "intermediate_size": 1024})
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(found)
    yield found
    shutil.rmtree(found)


def mapped_bytes(file: Path) -> tuple[int, int]:
    """(resident, this process's proportional share) of all mappings of `file`: a page mapped twice is two
    resident ones, and half in each share."""
    text = Path("/proc/self/smaps").read_text()
    found = re.findall(rf"{re.escape(str(file))}\n.*?Rss: +(\d+) kB\nPss: +(\d+) kB", text, flags=re.DOTALL)
    return sum(int(rss) for rss, _ in found) * KIB, sum(int(pss) for _, pss in found) * KIB


def load_and_touch(folder: Path, dtype: str) -> object:
    target = load_target(folder, dtype=dtype)
    with torch.inference_mode():
        assert all(torch.isfinite(parameter.sum()) for parameter in target.model.parameters())
    return target


def test_two_targets_share_the_pages_of_their_weights(folder):
    file = folder / "model.safetensors"
    first = load_and_touch(folder, "bfloat16")
    resident, share = mapped_bytes(file)
    assert resident >= 0.95 * file.stat().st_size and share >= 0.95 * resident
    second = load_and_touch(folder, "bfloat16")
    twice, shared = mapped_bytes(file)
    assert twice >= 1.9 * file.stat().st_size
    assert shared <= 1.05 * file.stat().st_size
    assert first is not second


def test_another_type_is_a_copy_of_its_own(folder):
    target = load_and_touch(folder, "float32")
    resident, _ = mapped_bytes(folder / "model.safetensors")
    assert resident <= 0.05 * (folder / "model.safetensors").stat().st_size
    assert target is not None
