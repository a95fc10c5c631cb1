"""Only what changes the weights changes the fingerprint."""

import pytest

from protocol.errors import ModelError
from services.config.fingerprint import differences, fingerprint, identity, model_fingerprint
from services.config.names import OPTIONS
from services.config.schema import Config


def make(**sections) -> Config:
    return Config.model_validate({"model": {"path": "m"}, "data": {"path": "d"}} | sections)


def test_depth_transport_profile_world_size_and_places_do_not_enter():
    moved = make(
        model={"path": "elsewhere"},
        data={"path": "elsewhere"},
        target={"postprocess_depth": 3, "count": 2, "slots": 9, "split_fc_layers": True},
        drafter={"count": 3, "elastic": "wait"},
        arena={"kind": "pinned"},
        profile={"interval_s": 1.0},
        run={"dir": "elsewhere"},
    )
    assert fingerprint(moved, "data", "model") == fingerprint(make(), "data", "model")


@pytest.mark.parametrize(
    "changed",
    [
        {"run": {"seed": 1}},
        {"plan": {"token_budget": 8192}},
        {"drafter": {"layers": 4}},
        {"recipe": {"lr": 1e-3}},
        {"model": {"path": "m", "dtype": "float32"}},
    ],
)
def test_training_options_enter(changed):
    assert fingerprint(make(**changed), "data", "model") != fingerprint(make(), "data", "model")


def test_contents_of_data_and_model_enter():
    prints = {fingerprint(make(), data, model) for data in "ab" for model in "ab"}
    assert len(prints) == 4


def test_a_given_default_is_the_default():
    assert fingerprint(make(recipe={"lr": 6e-4}), "d", "m") == fingerprint(make(), "d", "m")


def test_every_option_says_whether_it_trains():
    assert all(isinstance(option.field.json_schema_extra, dict) for option in OPTIONS)


def test_differences_name_the_option_and_both_values():
    old, new = identity(make(), "a", "m"), identity(make(recipe={"lr": 1e-3}), "b", "m")
    assert differences(old, new) == [
        "dataset: a in the run, b now",
        "recipe.lr: 0.0006 in the run, 0.001 now",
    ]


def test_model_fingerprint_sees_weights_and_configuration(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(bytes(1_000_000))
    first = model_fingerprint(tmp_path)
    weights.write_bytes(b"\1" + bytes(999_999))
    second = model_fingerprint(tmp_path)
    (tmp_path / "config.json").write_text('{"a": 1}')
    assert len({first, second, model_fingerprint(tmp_path)}) == 3


def test_model_fingerprint_refuses_a_folder_without_weights(tmp_path):
    with pytest.raises(ModelError, match="safetensors"):
        model_fingerprint(tmp_path)
