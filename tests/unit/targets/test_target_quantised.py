"""Targets whose files are quantised: Transformers loads them, the taps are the quantised model's own."""

from __future__ import annotations

import importlib.util
import json
from typing import Any

import pytest
import torch
from target_families import SHAPE
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig

from protocol.errors import ModelError
from services.dflash.self_check import self_check
from services.dflash.target_model import load_embedding_and_head, load_target

TAPS = (1, 4)


def plain_model() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(**{**SHAPE, "hidden_size": 64, "intermediate_size": 128, "vocab_size": 128})
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def write_compressed(folder, *, ignore=("lm_head",)) -> None:
    """Eight bits a weight in the layout of compressed-tensors, one scale an output row."""
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import (
        QuantizationArgs,
        QuantizationConfig,
        QuantizationScheme,
        apply_quantization_config,
    )

    model = plain_model()
    weights = QuantizationArgs(num_bits=8, type="int", strategy="channel", symmetric=True)
    scheme = QuantizationScheme(targets=["Linear"], weights=weights)
    apply_quantization_config(
        model, QuantizationConfig(config_groups={"all": scheme}, ignore=list(ignore), format="pack-quantized")
    )
    with torch.no_grad():
        for module in model.modules():
            if hasattr(module, "weight_scale"):
                module.weight_scale.copy_(module.weight.abs().amax(-1, keepdim=True) / 127)
    compressor = ModelCompressor.from_pretrained_model(model, quantization_format="pack-quantized")
    compressor.compress_model(model)
    model.save_pretrained(folder)
    compressor.update_config(folder)


def write_loaded(folder, quantization: Any, **options: Any) -> None:
    """As `from_pretrained` quantises on the spot, written out again."""
    plain_model().save_pretrained(folder / "plain")
    model = AutoModelForCausalLM.from_pretrained(
        folder / "plain", quantization_config=quantization, dtype=torch.float32, **options
    )
    model.save_pretrained(folder)


def write(kind: str, folder) -> None:
    if kind == "compressed-tensors":
        write_compressed(folder)
    elif kind == "bitsandbytes":
        write_loaded(folder, BitsAndBytesConfig(load_in_4bit=True), device_map={"": "cpu"})
    else:
        from torchao.quantization import Int8WeightOnlyConfig
        from transformers import TorchAoConfig

        write_loaded(folder, TorchAoConfig(Int8WeightOnlyConfig(version=2)))


@pytest.mark.filterwarnings("ignore")  # of the packages themselves
@pytest.mark.parametrize("kind", ["compressed-tensors", "bitsandbytes", "torchao"])
def test_a_quantised_target_passes_the_self_check_and_lends_its_ends(kind, tmp_path):
    if importlib.util.find_spec(kind.replace("-", "_")) is None:
        pytest.skip(f"PyPI package {kind} is not installed")
    write(kind, tmp_path)
    assert "quantization_config" in json.loads((tmp_path / "config.json").read_text())
    target = load_target(tmp_path)
    assert max(self_check(target, TAPS).values()) <= 1e-5
    with torch.inference_mode():
        ids = torch.arange(3, 40)[None]
        shift = target.model(ids).logits - plain_model()(ids).logits
        size = target.model(ids).logits.norm()
    assert 0.0 < float(shift.norm() / size) < 1.2, "not quantised, or unrelated (1.4)"
    embedding, head = load_embedding_and_head(tmp_path)
    assert torch.equal(embedding, target.embed_weight_VH)
    assert torch.equal(head.weight_VH, target.head.weight_VH)
    assert embedding.dtype == head.weight_VH.dtype == target.dtype == torch.float32


@pytest.mark.filterwarnings("ignore")
def test_a_quantised_head_is_refused(tmp_path):
    pytest.importorskip("compressed_tensors", reason="PyPI package compressed-tensors is not installed")
    write_compressed(tmp_path, ignore=())
    for load in (load_target, load_embedding_and_head):
        with pytest.raises(ModelError, match="LM head is quantised"):
            load(tmp_path)


def test_a_quantisation_whose_package_is_missing_is_named(tmp_path):
    plain_model().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "hqq", "quant_config": {}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"(?i)hqq"):
        load_target(tmp_path)
