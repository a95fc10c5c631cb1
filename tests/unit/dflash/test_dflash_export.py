"""Exports read back by our strict reader and by z-lab's class; look-alike layouts are refused by name."""

import json
import re

import pytest
import torch
from dflash_tiny import drafter_config
from safetensors.torch import load_file, save_file

from protocol.errors import CheckpointError, ConfigError
from services.dflash.checkpoint import write_checkpoint
from services.dflash.drafter import Drafter
from services.dflash.evaluate import load_drafter, run_export
from services.dflash.export import export_drafter, load_zlab, zlab_config
from services.dflash.export_check import check_export, zlab_installed

SLIDING = {"layer_types": ("sliding_attention", "full_attention", "full_attention"), "sliding_window": 8}
GEMMA = {"input_embedding_scale": 5.65, "output_multiplier": 0.5, "final_logit_softcapping": 30.0}


def exported(tmp_path, **changes):
    drafter = Drafter(drafter_config(**changes), seed=4)
    export_drafter(drafter, tmp_path / "out")
    return tmp_path / "out", drafter


def edit(folder, **fields):
    config = json.loads((folder / "config.json").read_text())
    for name, value in fields.items():
        if name.startswith("dflash_config."):
            config["dflash_config"][name.removeprefix("dflash_config.")] = value
        elif value is None:
            del config[name]
        else:
            config[name] = value
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("changes", [{}, SLIDING, GEMMA], ids=["plain", "sliding", "gemma"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_training_checkpoint_to_export_and_back(tmp_path, changes, dtype):
    drafter = Drafter(drafter_config(**changes), seed=4)
    write_checkpoint(
        tmp_path / "ckpt", weights=drafter.state_dict(), optimizer={}, state={}, drafter=drafter.config
    )
    found = run_export(tmp_path / "ckpt", tmp_path / "out", dtype=dtype)
    assert found["tensors"] == 36 and found["zlab"] == zlab_installed()
    if found["zlab"]:
        assert found["hidden_error"] < 1e-5
    assert {tensor.dtype for tensor in load_file(tmp_path / "out" / "model.safetensors").values()} == {
        getattr(torch, dtype)
    }
    again = load_drafter(tmp_path / "out")
    assert again.config == drafter.config
    if dtype == "float32":
        assert all(torch.equal(a, b) for a, b in zip(again.parameters(), drafter.parameters(), strict=True))


@pytest.mark.parametrize("dtype", ["int8", "fp16", "half", ""])
def test_a_type_that_weights_cannot_have_is_refused_and_leaves_nothing(tmp_path, dtype):
    drafter = Drafter(drafter_config(), seed=4)
    with pytest.raises(ConfigError, match="weights are float32, bfloat16, float16"):
        export_drafter(drafter, tmp_path / "out", dtype=dtype)
    assert list(tmp_path.iterdir()) == []


def test_whoever_may_read_the_configuration_may_read_the_weights(tmp_path):
    out, _ = exported(tmp_path)
    files = list(out.iterdir())
    assert len(files) == 2 and len({file.stat().st_mode for file in files}) == 1


def test_config_has_everything_in_every_place_that_is_read():
    config = zlab_config(drafter_config(**SLIDING, **GEMMA), "bfloat16")
    assert config["architectures"] == ["DFlashDraftModel"] and config["model_type"] == "qwen3"
    assert config["block_size"] == config["dflash_config"]["block_size"] == 6
    assert config["dflash_config"]["target_layer_ids"] == [1, 2, 4] and config["num_target_layers"] == 7
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 10000.0
    assert config["use_sliding_window"] is True and config["sliding_window"] == 8
    assert {name: config["dflash_config"][name] for name in GEMMA} == GEMMA
    assert not {"is_causal", "partial_rotary_factor"} & config.keys()
    plain = zlab_config(drafter_config(), "bfloat16")
    assert not {"use_sliding_window", "sliding_window"} & plain.keys()
    assert set(plain["dflash_config"]) == {"mask_token_id", "target_layer_ids", "block_size"}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"block_size": 7}, "block_size is 7 at the top and 6"),
        ({"architectures": ["DFlash2DraftModel"]}, "DFlash 2"),
        ({"dflash_config.selector_rank": 64}, "DFlash 2"),
        ({"speculators_model_type": "dflash"}, "speculators"),
        ({"draft_vocab_size": 32}, "pruned draft vocabularies"),
        ({"architectures": ["LlamaForCausalLM"]}, "only DFlashDraftModel in z-lab"),
        ({"attention_bias": True}, "attention_bias"),
        ({"is_causal": True}, "is_causal"),
        ({"partial_rotary_factor": 0.25}, "partial_rotary_factor"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1.0}}, "'yarn'"),
        ({"layer_types": ["sliding_attention", "full_attention", "full_attention"]}, "use_sliding_window"),
        ({"dflash_config.target_layer_ids": [1, 6]}, "last of 7"),
        ({"num_target_layers": None}, "lacks"),
        ({"intermediate_size": 40}, "its configuration says"),
        ({"num_hidden_layers": 2, "layer_types": ["full_attention"] * 2}, "unknown"),
    ],
)
def test_look_alikes_are_refused_by_name(tmp_path, change, words):
    folder, _ = exported(tmp_path)
    edit(folder, **change)
    with pytest.raises(CheckpointError, match=words):
        load_zlab(folder)


@pytest.mark.parametrize("name", sorted(zlab_config(drafter_config(), "bfloat16")))
def test_without_a_field_it_is_the_same_drafter_or_none(tmp_path, name):
    """Never a KeyError: what has a default may be missing, in either of two places, and all else is named."""
    folder, drafter = exported(tmp_path)
    edit(folder, **{name: None})
    try:
        assert load_zlab(folder).config == drafter.config
    except CheckpointError as error:
        assert re.search(f"lacks .*'{name}'|architectures|lacks .*target_layer_ids", str(error))


def test_without_the_base_of_its_rotary_embedding_there_is_no_drafter(tmp_path):
    folder, _ = exported(tmp_path)
    edit(folder, rope_theta=None, rope_parameters=None)
    with pytest.raises(CheckpointError, match=r"lacks \['rope_theta'\]"):
        load_zlab(folder)


def test_missing_renamed_and_pruned_tensors_are_refused(tmp_path):
    folder, _ = exported(tmp_path)
    weights = load_file(folder / "model.safetensors")
    renamed = {name.replace("hidden_norm", "hnorm"): tensor for name, tensor in weights.items()}
    save_file(renamed, folder / "model.safetensors")
    with pytest.raises(
        CheckpointError, match=r"missing tensors \['hidden_norm.weight'\] \(1\), unknown \['hnorm"
    ):
        load_zlab(folder)
    save_file({**weights, "d2t": torch.zeros(3)}, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match="pruned"):
        load_zlab(folder)


def test_truncated_weights_are_refused(tmp_path):
    folder, _ = exported(tmp_path)
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[: len(content) // 2])
    with pytest.raises(CheckpointError, match="truncated or damaged"):
        load_zlab(folder)


def test_an_export_of_other_weights_fails_its_check(tmp_path):
    folder, drafter = exported(tmp_path)
    with torch.no_grad():
        drafter.layers[1].mlp.up_proj.weight[3, 3] += 1.0
    with pytest.raises(CheckpointError, match=r"layers.1.mlp.up_proj.weight does not read back"):
        check_export(folder, drafter)


def test_nothing_is_overwritten_and_nothing_there_is_named(tmp_path):
    folder, drafter = exported(tmp_path)
    with pytest.raises(CheckpointError, match="exists"):
        export_drafter(drafter, folder)
    with pytest.raises(CheckpointError, match="no such folder"):
        load_drafter(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match=r"no config.json"):
        load_drafter(tmp_path / "empty")
