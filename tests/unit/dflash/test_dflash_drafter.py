"""The drafter is z-lab's architecture (hidden states to 1e-5), seeded, and shaped by the target."""

import pytest
import torch
from dflash_packs import tiny_pack
from dflash_tiny import drafter_config

from services.dflash.drafter import Drafter
from services.dflash.export import export_drafter
from services.dflash.export_check import block_hidden, load_with_zlab, zlab_installed

SHAPES = {
    "full": {},
    "sliding": {"layer_types": ("sliding_attention",) * 2 + ("full_attention",), "sliding_window": 9},
    "all sliding, window below the block": {"layer_types": ("sliding_attention",) * 3, "sliding_window": 4},
    "one layer, one tap, wide heads": {
        "num_hidden_layers": 1,
        "layer_types": ("full_attention",),
        "target_layer_ids": (3,),
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 64,
        "block_size": 16,
        "rope_theta": 1e6,
    },
}


def lively(config, seed=3):
    """Weights large enough that every part of the model moves the result; norms away from one."""
    drafter = Drafter(config, seed=seed).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in drafter.parameters():
            if parameter.dim() > 1:
                parameter.mul_(8.0)
            else:
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return drafter


@pytest.mark.skipif(not zlab_installed(), reason="z-lab's package (PyPI dflash 0.1.0) is not installed")
@pytest.mark.parametrize("shape", SHAPES)
def test_hidden_states_equal_zlabs(shape, tmp_path):
    config = drafter_config(**SHAPES[shape])
    drafter = lively(config)
    export_drafter(drafter, tmp_path / "out", dtype="float32")
    theirs = load_with_zlab(tmp_path / "out")
    for tokens in (1, 5, 40):
        features_TF = tiny_pack([tokens], config).features_TF
        inputs_RH = torch.randn(config.block_size, 32, generator=torch.Generator().manual_seed(tokens))
        with torch.inference_mode():
            expected = theirs(
                target_hidden=features_TF[None],
                noise_embedding=inputs_RH[None],
                position_ids=torch.arange(tokens + config.block_size)[None],
            )[0]
            mine = block_hidden(drafter, features_TF, inputs_RH)
        torch.testing.assert_close(mine, expected, atol=1e-5, rtol=1e-5)


def test_initial_weights_depend_on_seed_and_name_alone():
    before = torch.random.get_rng_state()
    first = Drafter(drafter_config(), seed=1).state_dict()
    assert torch.equal(torch.random.get_rng_state(), before)
    deeper = drafter_config(num_hidden_layers=4, layer_types=("full_attention",) * 4)
    again, other = Drafter(deeper, seed=1).state_dict(), Drafter(drafter_config(), seed=2).state_dict()
    assert all(torch.equal(tensor, again[name]) for name, tensor in first.items())
    assert not torch.equal(first["fc.weight"], other["fc.weight"])
    assert abs(float(first["fc.weight"].std()) - 0.02) < 0.001


def test_tensor_names_and_count_are_the_layout():
    config = drafter_config()
    state = Drafter(config, seed=0).state_dict()
    assert len(state) == 3 + 11 * config.num_hidden_layers
    assert sum(tensor.numel() for tensor in state.values()) == config.parameter_count


def test_bf16_activations_keep_fp32_masters():
    config = drafter_config()
    drafter = lively(config)
    features_TF = tiny_pack([20], config).features_TF
    inputs_RH = torch.randn(6, 32, generator=torch.Generator().manual_seed(0))
    half = block_hidden(drafter, features_TF.bfloat16(), inputs_RH.bfloat16())
    assert half.dtype == torch.bfloat16
    assert all(parameter.dtype == torch.float32 for parameter in drafter.parameters())
    torch.testing.assert_close(
        half.float(), block_hidden(drafter, features_TF, inputs_RH), atol=0.2, rtol=0.1
    )
