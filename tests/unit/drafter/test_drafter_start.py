"""Where a drafter runs and what it starts from."""

from __future__ import annotations

import pytest
import torch
from drafter_cases import tiny_config, tiny_shape

from protocol.errors import CheckpointError, ConfigError
from services.dflash.drafter import Drafter
from services.dflash.export import export_drafter
from services.drafter.start import device_of, initial_weights


def test_initial_weights_are_a_function_of_the_runs_seed():
    one = initial_weights(tiny_config(), tiny_shape())
    again = initial_weights(tiny_config(), tiny_shape())
    other = initial_weights(tiny_config(run={"seed": 8}), tiny_shape())
    assert all(torch.equal(one[name], again[name]) for name in one)
    assert not torch.equal(one["fc.weight"], other["fc.weight"])


def test_initial_weights_from_an_export(tmp_path):
    drafter = Drafter(tiny_shape(), seed=3)
    export_drafter(drafter, tmp_path / "out", dtype="float32")
    weights = initial_weights(tiny_config(drafter={"init_from": str(tmp_path / "out")}), tiny_shape())
    assert all(torch.equal(weights[name], tensor) for name, tensor in drafter.state_dict().items())


def test_an_export_of_another_drafter_is_refused(tmp_path):
    export_drafter(Drafter(tiny_shape(), seed=3), tmp_path / "out", dtype="float32")
    config = tiny_config(drafter={"init_from": str(tmp_path / "out")})
    wanted = tiny_shape().__class__.from_dict(tiny_shape().to_dict() | {"block_size": 8})
    with pytest.raises(CheckpointError, match=r"block_size is 4, this run's is 8"):
        initial_weights(config, wanted)


def test_devices_are_the_options_entry_by_place():
    config = tiny_config(drafter={"gpus": ("cpu", "3")})
    assert device_of(config, None) == torch.device("cpu")
    assert device_of(config, 1) == torch.device("cuda", 3)
    with pytest.raises(ConfigError, match="names 2"):
        device_of(config, 2)
