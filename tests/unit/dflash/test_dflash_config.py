"""Shapes derived from targets: taps, mask rows, widths, scales, each refusal by its rule (traps 5, 7)."""

import pytest
from dflash_tiny import FAMILIES, drafter_config
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import (
    DeepseekV3Config,
    GraniteConfig,
    LlamaConfig,
    PreTrainedTokenizerFast,
    Qwen3_5MoeTextConfig,
    Qwen3Config,
)

from protocol.errors import ModelError
from services.config.schema import Drafter as Options
from services.dflash.drafter_config import (
    DrafterConfig,
    choose_mask_token_id,
    derive,
    misfits,
    most_taps,
    spread_taps,
)

OPTIONS = Options(layers=2, taps=3, block_size=8, mask_token_id=96)


def tokenizer(words=90, added=(), template=None, **special):
    base = Tokenizer(WordLevel({f"w{i}": i for i in range(words)}, unk_token="w0"))
    made = PreTrainedTokenizerFast(tokenizer_object=base, **special)
    made.add_special_tokens({"additional_special_tokens": list(added)})
    made.chat_template = template
    return made


@pytest.mark.parametrize(
    ("layers", "taps", "ids"),
    [
        (36, 5, (1, 9, 17, 25, 33)),
        (64, 5, (1, 16, 31, 46, 61)),
        (30, 2, (1, 27)),
        (30, 1, (15,)),
        (32, 5, (1, 8, 15, 22, 29)),
    ],
)
def test_taps_are_the_papers(layers, taps, ids):
    assert spread_taps(layers, taps) == ids


@given(layers=st.integers(5, 200), taps=st.integers(1, 12))
def test_spread_taps_never_reach_the_last_layer(layers, taps):
    ids = spread_taps(layers, taps)
    assert len(ids) == taps and max(ids) <= layers - 2 and list(ids) == sorted(ids)


@pytest.mark.parametrize(
    ("ids", "rule"),
    [
        ((1, 6), "last of 7"),
        ((1, 1), "once"),
        ((3, 1), "ascending"),
        ((7,), "no layer"),
        ((-1,), "no layer"),
        ((), "at least one"),
    ],
)
def test_wrong_taps_are_refused(ids, rule):
    with pytest.raises(ModelError, match=rule):
        drafter_config(target_layer_ids=ids)


@given(layers=st.integers(1, 60))
def test_as_many_taps_are_spread_as_is_said_and_no_more(layers):
    most = most_taps(layers)
    for taps in range(1, most + 2):
        ids = spread_taps(layers, taps)
        ascend = list(ids) == sorted(set(ids))
        assert (taps <= most) == (ascend and max(ids) <= layers - 2)


@pytest.mark.parametrize(
    ("layers", "rule"),
    [(7, "lower drafter.taps to 4"), (4, "lower drafter.taps to 1"), (2, "too few for any"), (1, "too few")],
)
def test_too_many_taps_for_a_shallow_target_name_how_many_fit(layers, rule):
    options = OPTIONS.model_copy(update={"taps": 20})
    with pytest.raises(ModelError, match=rf"^drafter\.taps 20: the target has {layers} layers, .*{rule}"):
        derive(Qwen3Config(num_hidden_layers=layers, vocab_size=97), options, None)


def test_all_that_a_target_lacks_is_said_at_once():
    small = Qwen3Config(num_hidden_layers=4, vocab_size=90)
    options = OPTIONS.model_copy(update={"mask_token_id": -1})
    found = misfits(small, options, tokenizer())
    assert [fault.option for fault in found] == ["drafter.taps", "drafter.mask_token_id"]
    assert misfits(FAMILIES["qwen3"], OPTIONS, None) == []


@pytest.mark.parametrize("family", FAMILIES)
def test_derived_from_each_family(family):
    config = derive(FAMILIES[family], OPTIONS, None)
    assert (config.hidden_size, config.vocab_size, config.num_target_layers) == (32, 97, 7)
    assert config.target_layer_ids == (1, 2, 4)
    assert config.head_dim == (8 if family == "llama" else 16)
    assert config.tie_word_embeddings == (family in ("llama", "gemma2", "gemma3"))
    assert config.input_embedding_scale == (32**0.5 if "gemma" in family else 1.0)
    assert config.final_logit_softcapping == (3.0 if family == "gemma2" else 0.0)
    assert DrafterConfig.from_dict(config.to_dict()) == config


def test_gemma3_takes_the_rope_of_full_attention():
    assert derive(FAMILIES["gemma3"], OPTIONS, None).rope_theta == 1_000_000.0


def test_targets_without_a_dense_width_take_three_times_hidden():
    config = Qwen3_5MoeTextConfig(hidden_size=64, num_hidden_layers=8, vocab_size=97)
    assert getattr(config, "intermediate_size", None) is None
    assert derive(config, OPTIONS, None).intermediate_size == 192


def test_latent_attention_gets_plain_heads():
    config = derive(DeepseekV3Config(hidden_size=1024, num_hidden_layers=8, vocab_size=97), OPTIONS, None)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (8, 8, 128)


def test_granite_divides_its_logits():
    granite = GraniteConfig(vocab_size=97, num_hidden_layers=8, embedding_multiplier=12.0, logits_scaling=8.0)
    config = derive(granite, OPTIONS, None)
    assert (config.input_embedding_scale, config.output_multiplier) == (12.0, 0.125)


def test_options_override_the_target():
    options = OPTIONS.model_copy(
        update={
            "heads": 6,
            "kv_heads": 3,
            "head_dim": 32,
            "intermediate_size": 11,
            "sliding_layers": 1,
            "target_layer_ids": (0, 5),
        }
    )
    config = derive(FAMILIES["qwen3"], options, None)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (6, 3, 32)
    assert config.layer_types == ("sliding_attention", "full_attention") and config.sliding_window == 2048
    assert (config.window(0), config.window(1)) == (2048, 0) and config.target_layer_ids == (0, 5)


@pytest.mark.parametrize("row", [0, 1, 2])
def test_pad_bos_and_eos_are_no_mask(row):
    with pytest.raises(ModelError, match="pad, eos, bos or stop"):
        derive(FAMILIES["qwen3"], OPTIONS.model_copy(update={"mask_token_id": row}), None)


def test_stop_tokens_are_no_mask():
    with pytest.raises(ModelError, match="stop"):
        derive(FAMILIES["qwen3"], OPTIONS, None, stop_ids=(96,))


def test_rows_outside_the_embedding_are_no_mask():
    with pytest.raises(ModelError, match=r"rows 0\.\.96"):
        derive(FAMILIES["qwen3"], OPTIONS.model_copy(update={"mask_token_id": 97}), None)


@pytest.mark.parametrize(
    ("made", "rows", "row"),
    [
        (tokenizer(mask_token="<mask>"), 200, 90),
        (tokenizer(added=["<|a|>", "<|MASK|>"]), 200, 91),
        (tokenizer(added=["<|a|>", "<|MASK|>"], mask_token="<mask>"), 200, 92),  # SGLang refuses others
        (tokenizer(), 97, 90),  # the first row behind the tokenizer
        (
            tokenizer(added=["<|eot|>", "<|reserved_special_token_0|>", "<|reserved_special_token_1|>"]),
            93,
            91,
        ),
        (tokenizer(added=["<s>", "<unused0>", "[unused1]"]), 93, 91),
        (tokenizer(added=["<|user|>", "<file>", "<|end|>"], template="<|user|>x<|end|>"), 93, 91),
        (tokenizer(added=["<|a|>", "<|b|>"], pad_token="<|b|>", template="x"), 92, 91),
    ],
)
def test_mask_rows_are_chosen_by_how_idle_they_are(made, rows, row):
    assert choose_mask_token_id(made, rows) == row


def test_a_mask_equal_to_pad_is_passed_over():
    made = tokenizer(mask_token="<mask>", pad_token="<mask>")
    assert choose_mask_token_id(made, 200) == 91


def test_a_vocabulary_without_an_idle_row_is_refused():
    with pytest.raises(ModelError, match="name a row"):
        choose_mask_token_id(tokenizer(), 90)


@pytest.mark.parametrize(
    ("rope", "positions"),
    [
        ({"rope_type": "default"}, 1000),
        ({"rope_type": "linear", "factor": 4.0}, 4000),
        ({"rope_type": "dynamic", "factor": 2.5}, 2500),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 250}, 1000),
        ({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 125}, 1000),
    ],
)  # fmt: skip
def test_a_drafter_has_as_many_positions_as_a_server_derives_for_its_target(rope, positions):
    text = LlamaConfig(
        num_hidden_layers=8, max_position_embeddings=1000, vocab_size=97,
        rope_parameters={"rope_theta": 1e4, **rope},
    )  # fmt: skip
    assert derive(text, OPTIONS, None).max_position_embeddings == positions


def test_heads_must_divide():
    with pytest.raises(ModelError, match="multiple of kv_heads"):
        drafter_config(num_attention_heads=4, num_key_value_heads=3)
