"""Precedence, origins, suggestions, everything wrong at once."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.errors import AlreadyRunning, ConfigError
from services.config.load import load, refuse
from services.config.names import ALIASES, BY_PATH, OPTIONS
from services.config.sources import Finding, split_flags

NEEDED = {"DFLASH_MODEL_PATH": "models/m", "DFLASH_DATA_PATH": "data/d"}


def refused(**kwargs) -> str:
    with pytest.raises(ConfigError) as caught:
        load(**kwargs)
    return str(caught.value)


def toml(folder: Path, text: str) -> Path:
    file = folder / "run.toml"
    file.write_text(text)
    return file


def test_flag_over_variable_over_file_over_default(tmp_path):
    file = toml(tmp_path, "[target]\nslots = 11\ncount = 2\nthreads = 3\n[drafter]\nlayers = 2\n")
    environ = NEEDED | {"DFLASH_TARGET_SLOTS": "12", "DFLASH_TARGET_COUNT": "3"}
    config, origins = load(file, [("--target.slots", "13")], environ)
    assert (config.target.slots, config.target.count, config.target.threads) == (13, 3, 3)
    assert (config.drafter.layers, config.drafter.taps) == (2, 5)
    assert origins["target.slots"] == "--target.slots"
    assert origins["target.count"] == "DFLASH_TARGET_COUNT"
    assert origins["target.threads"] == f"{file}:4"
    assert "drafter.taps" not in origins


def test_no_two_options_share_a_variable_or_a_flag():
    variables = [option.variable for option in OPTIONS] + list(ALIASES)
    assert len(set(variables)) == len(variables)
    assert len({option.flag for option in OPTIONS}) == len(OPTIONS)


def test_names_are_computed_from_the_schema():
    option = BY_PATH["target.postprocess_depth"]
    assert option.variable == "DFLASH_TARGET_POSTPROCESS_DEPTH"
    assert option.flag == "--target.postprocess-depth"


@pytest.mark.parametrize("variable", ["DFLASH_PROFILE_INTERVAL", "DFLASH_PROFILE_INTERVAL_S"])
def test_the_alias_and_the_computed_name_set_the_same_option(variable):
    assert load(environ=NEEDED | {variable: "7.5"}).config.profile.interval_s == 7.5


def test_split_fc_layers_by_its_alias():
    assert load(environ=NEEDED | {"DFLASH_SPLIT_FC_LAYERS": "1"}).config.target.split_fc_layers is True


def test_an_alias_that_contradicts_its_option_is_refused():
    message = refused(environ=NEEDED | {"DFLASH_PROFILE_INTERVAL": "5", "DFLASH_PROFILE_INTERVAL_S": "6"})
    assert "DFLASH_PROFILE_INTERVAL gives the same option 5" in message


def test_lists_are_comma_separated_in_flags_variables_and_files(tmp_path):
    file = toml(tmp_path, '[target]\ngpus = [0, 1]\n[drafter]\ngpus = "5, 6"\n')
    flags = [("--plan.bucket-edges", "64,128"), ("--drafter.target_layer_ids", "1,9,17")]
    config, _ = load(file, flags, NEEDED)
    assert config.target.gpus == ("0", "1")
    assert config.drafter.gpus == ("5", "6")
    assert config.plan.bucket_edges == (64, 128)
    assert config.drafter.target_layer_ids == (1, 9, 17)


def test_an_empty_list_and_an_empty_variable():
    environ = NEEDED | {"DFLASH_TARGET_COUNT": ""}
    config, origins = load(None, [("--target.gpus", "")], environ)
    assert config.target.gpus == ()
    assert "target.count" not in origins


def test_everything_wrong_is_named_at_once_with_value_origin_and_rule(tmp_path):
    file = toml(
        tmp_path, "[plan]\npacks_per_step = 0\ntoken_buget = 5\n[drafter]\ndtype = 'int4'\nlayers = true\n"
    )
    environ = {"DFLASH_TARGET_SLOTS": "six", "DFLASH_TARGT_COUNT": "2", "PATH": "/bin"}
    message = refused(
        file=file, flags=[("--recipe.lrr", "1"), ("--plan.bucket-edges", "64,x")], environ=environ
    )
    assert f"plan.packs_per_step = 0 ({file}:2): must be greater than 0" in message
    assert (
        f"plan.token_buget = 5 ({file}:3): there is no such option; did you mean plan.token_budget?"
        in message
    )
    assert f"drafter.dtype = int4 ({file}:5): must be 'float32' or 'bfloat16'" in message
    assert f"drafter.layers = true ({file}:6): true and false fit switches only" in message
    assert "target.slots = six (DFLASH_TARGET_SLOTS): must be a valid integer" in message
    assert "DFLASH_TARGT_COUNT=2: no option has this variable; did you mean DFLASH_TARGET_COUNT?" in message
    assert "--recipe.lrr 1: there is no such option; did you mean --recipe.lr?" in message
    assert "plan.bucket_edges = 64,x (--plan.bucket-edges)" in message
    assert "element 1" in message
    assert "model.path: must be given" in message
    assert "data.path: must be given" in message
    assert message.startswith("10 problems")


def test_unknown_section_gets_a_suggestion(tmp_path):
    message = refused(file=toml(tmp_path, "[drafters]\nlayers = 2\n"), environ=NEEDED)
    assert "drafters.layers = 2" in message
    assert "did you mean drafter.layers?" in message


def test_a_section_given_as_a_value_is_refused(tmp_path):
    assert "target = 3" in refused(file=toml(tmp_path, "target = 3\n"), environ=NEEDED)


@pytest.mark.parametrize(
    ("text", "says"), [("[run\n", "is not TOML"), (None, "cannot be read")], ids=["broken", "missing"]
)
def test_a_bad_file_is_one_finding_among_the_others(tmp_path, text, says):
    file = tmp_path / "absent.toml" if text is None else toml(tmp_path, text)
    message = refused(file=file, environ={"DFLASH_TARGET_SLOTS": "0"})
    assert says in message
    assert "target.slots = 0" in message
    assert "must be given" not in refused(file=file, environ={})  # it may stand in the file


def test_a_pattern_is_explained_in_words():
    message = refused(flags=[("--data.later", "x:data/b")], environ=NEEDED)
    assert "data.later = x:data/b (--data.later): does not have the form that is wanted" in message
    assert "as EPOCH:PATH" in message and "[1-9]" not in message


def test_what_is_in_use_by_another_process_is_another_error_than_what_is_wrong():
    busy, wrong = Finding("port", "taken", in_use=True), Finding("model.path", "is no folder")
    with pytest.raises(AlreadyRunning):
        refuse([busy, busy])
    with pytest.raises(ConfigError, match="2 problems"):
        refuse([busy, wrong])


def test_rules_between_options_name_values_and_origins():
    message = refused(flags=[("--target.slots", "2")], environ=NEEDED)
    assert "target.slots = 2 (--target.slots), target.count = 1 (default)" in message
    assert "raise it to 7" in message


def test_a_command_is_not_asked_for_what_it_does_not_use():
    config, _ = load(environ={}, needs=[])
    assert config.model.path == ""
    assert load(environ=NEEDED, needs=[]).config.model.path == "models/m"
    assert "model.path: must be given" in refused(environ={}, needs=["model.path"])


def test_split_flags_takes_only_options_of_the_schema():
    words = [
        "up",
        "--config",
        "a.toml",
        "--target.count",
        "2",
        "--run.dir=x",
        "--target.compile",
        "--json",
        "p",
    ]
    pairs, rest = split_flags([*words, "--", "--a.b"])
    assert pairs == [("--target.count", "2"), ("--run.dir", "x"), ("--target.compile", "true")]
    assert rest == ["up", "--config", "a.toml", "--json", "p", "--", "--a.b"]


def test_negative_numbers_are_values():
    config, _ = load(None, split_flags(["--drafter.mask-token-id", "-1"])[0], NEEDED)
    assert config.drafter.mask_token_id == -1


@given(st.dictionaries(st.sampled_from([o.variable for o in OPTIONS]), st.text(max_size=8), max_size=6))
def test_any_text_in_any_variable_is_a_config_or_a_config_error(values):
    try:
        load(environ=NEEDED | values)
    except ConfigError as error:
        assert "problem" in str(error)
