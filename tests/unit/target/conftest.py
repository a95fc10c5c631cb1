"""A tiny Llama, a dataset of ragged samples and configurations over both."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from services.config.schema import Config
from services.data.dataset import Dataset, Sample
from services.data.writer import write_dataset

VOCABULARY = 64
LENGTHS = (5, 16, 9, 12, 30, 24, 31, 7)
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(1)
    shape = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=6,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128,
        bos_token_id=0, eos_token_id=1, tie_word_embeddings=True,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("model")
    LlamaForCausalLM(shape).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """`LENGTHS` samples, and a last one with a token the model does not have."""
    random = np.random.default_rng(3)
    rows = [random.integers(2, VOCABULARY - 1, length).astype(np.int32) for length in LENGTHS]
    rows.append(np.array([5, VOCABULARY, 6], np.int32))
    samples = [Sample(row, np.ones(len(row), np.uint8)) for row in rows]
    return write_dataset(tmp_path_factory.mktemp("data") / "set", samples, {})


@pytest.fixture
def make_config(tmp_path: Path, model_folder: Path, dataset: Dataset) -> Callable[..., Config]:
    """A configuration; `section={option: value}` changes it."""

    def make(**sections: dict[str, Any]) -> Config:
        tree: dict[str, dict[str, Any]] = {
            "run": {"dir": tmp_path / "run", "seed": 11},
            "model": {"path": str(model_folder), "dtype": "float32"},
            "data": {"path": dataset.path},
            "plan": {"token_budget": 64, "bucket_edges": (16, 32)},
            "target": {"slots": 3},
            "drafter": {"taps": 2, "mask_token_id": VOCABULARY - 1},
            "arena": {"dir": tmp_path / "arena", "kind": "shm", "checksum": "always"},
            "coordinator": {"heartbeat_s": 0.2},
        }
        for section, options in sections.items():
            tree.setdefault(section, {}).update(options)
        return Config.model_validate(tree)

    return make
