"""Noise has the same bits whoever adds it, in whatever pieces, and the distribution asked for."""

import pytest
import torch

from services.dflash.noise import add_noise_, join_taps


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["uniform", "normal"])
def test_joined_by_the_target_equals_split_and_joined_by_the_drafter(kind, dtype):
    taps = [torch.randn(50, 24, generator=torch.Generator().manual_seed(i)).to(dtype) for i in range(3)]
    joined = add_noise_(torch.cat(taps, dim=-1), kind=kind, scale=0.3, seed=2**62 + 5)
    assert torch.equal(join_taps(taps, kind=kind, scale=0.3, seed=2**62 + 5), joined)
    piece = add_noise_(taps[1].clone(), kind=kind, scale=0.3, seed=2**62 + 5, first_column=24)
    assert torch.equal(piece, joined[:, 24:48])
    assert not torch.equal(join_taps(taps, kind=kind, scale=0.3, seed=7), joined)


@pytest.mark.parametrize(("kind", "deviation"), [("uniform", 0.5 / 3**0.5), ("normal", 0.5)])
def test_distribution(kind, deviation):
    noise = add_noise_(torch.zeros(400, 300), kind=kind, scale=0.5, seed=11)
    assert abs(float(noise.mean())) < 5e-3
    assert abs(float(noise.std()) - deviation) < 5e-3
    centred = noise - noise.mean()
    for left, right in ((centred[1:], centred[:-1]), (centred[:, 1:], centred[:, :-1])):
        assert abs(float((left * right).mean())) / deviation**2 < 0.02
    if kind == "uniform":
        assert float(noise.abs().max()) <= 0.5


def test_no_noise_leaves_features_alone():
    features = torch.randn(5, 6)
    assert add_noise_(features, kind="none", scale=1.0, seed=0) is features
    assert torch.equal(join_taps([features[:, :3], features[:, 3:]]), features)
