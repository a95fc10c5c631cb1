"""Hub ids are found in the cache, and refused with the remedy where there is neither cache nor network."""

from __future__ import annotations

from pathlib import Path

import pytest
from huggingface_hub import constants
from target_families import FAMILIES, model_of

from protocol.errors import ModelError
from services.dflash.target_model import (
    load_embedding_and_head,
    load_stop_ids,
    load_target,
    load_tokenizer,
)
from services.models.hub import load_local, local_folder


@pytest.fixture
def offline(monkeypatch, tmp_path):
    """What HF_HUB_OFFLINE=1 does, and a cache of our own."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def cached(cache: Path, name: str) -> Path:
    """A model in the cache's layout, as a download leaves it."""
    repository = cache / f"models--{name.replace('/', '--')}"
    snapshot = repository / "snapshots" / ("0" * 40)
    model_of(FAMILIES["qwen3"], tied=False).save_pretrained(snapshot)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0" * 40)
    return snapshot


def test_a_cached_hub_id_is_its_snapshot(offline):
    snapshot = cached(offline, "someone/tiny-1.5B")
    assert local_folder("someone/tiny-1.5B", offline) == str(snapshot)
    flags = [("--model.path", "someone/tiny-1.5B"), ("--data.path", "data")]
    loaded = load_local(None, flags)
    assert loaded.config.model.path == str(snapshot)
    assert load_target(loaded.config.model.path).config.num_hidden_layers == 7


def test_a_description_without_weights_is_enough_where_nothing_is_loaded(offline):
    snapshot = cached(offline, "someone/tiny-1.5B")
    for file in snapshot.glob("*.safetensors"):
        file.unlink()
    flags = [("--model.path", "someone/tiny-1.5B"), ("--data.path", "data")]
    found = Path(load_local(None, flags, weights=False).config.model.path)
    assert found == snapshot and (found / "config.json").is_file()


def test_an_unknown_hub_id_is_refused_with_the_remedy(offline):
    with pytest.raises(ModelError, match=r"HF_HUB_OFFLINE is set.*hf download someone/none"):
        local_folder("someone/none", offline)
    for load in (load_target, load_embedding_and_head, load_stop_ids):
        with pytest.raises(ModelError, match="someone/none"):
            load("someone/none")


def test_folders_and_what_cannot_be_a_hub_id_stay_as_they_are(offline, tmp_path):
    for path in (str(tmp_path), "nowhere", "/no/such/folder", "a/b/c", ""):
        assert local_folder(path, offline) == path


@pytest.mark.parametrize("path", ["nowhere", "/no/such/folder"])
def test_who_needs_the_files_is_told_at_once_that_there_is_no_folder(offline, path):
    flags = [("--model.path", path), ("--data.path", "data")]
    with pytest.raises(ModelError, match=f"^model.path = {path}: is no folder; give the local folder"):
        load_local(None, flags)
    assert load_local(None, flags, missing_ok=True).config.model.path == path


def test_a_folder_without_tokenizer_files_is_not_given_an_empty_tokenizer(tmp_path):
    with pytest.raises(ModelError, match=r"there is no tokenizer in it \(tokenizer.json"):
        load_tokenizer(tmp_path)
