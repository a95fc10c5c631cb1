"""The inspector shows the mask as it is, and warns of what looks well trained and accepts nothing."""

import io
import json
import re

import numpy as np
import pytest
from rich.console import Console
from tiny_tokenizers import make_tokenizer, template_text
from transformers import LlamaConfig

from protocol.errors import DataError, ModelError
from services.config.schema import Data
from services.data.dataset import Sample
from services.data.inspect import inspect
from services.data.prepare import prepare
from services.data.writer import write_dataset


def save_model(folder, **changes):
    tokenizer = make_tokenizer()
    for name, value in changes.items():
        setattr(tokenizer, name, value)
    tokenizer.save_pretrained(folder)
    stop = tokenizer.convert_tokens_to_ids("<|im_end|>")
    LlamaConfig(vocab_size=1024, eos_token_id=stop).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """(model, prepared dataset of three chats)"""
    folder = tmp_path_factory.mktemp("inspect")
    model = save_model(folder / "model")
    rows = [{"prompt": f"Fox {at}?", "completion": "It jumps,\n日本 😀."} for at in range(3)]
    (folder / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    prepare([folder / "in.jsonl"], folder / "data", model, Data(path=folder / "data"))
    return model, folder / "data"


def look(data, row=None, tokenizer=None, color=False):
    out = io.StringIO()
    console = Console(file=out, width=150, force_terminal=color, color_system="truecolor" if color else None)
    return inspect(data, row, tokenizer, console), out.getvalue()


def test_good_data_has_no_warnings(world):
    warnings, shown = look(world[1])
    assert warnings == []
    for words in ("rows", "tokens", "supervised", "duplicates", "fingerprint"):
        assert words in shown


def test_a_sample_shows_its_answers_supervised_with_their_first_and_last_token(world):
    _, shown = look(world[1], row=2)
    assert "in.jsonl:3" in shown
    assert "Fox 2?<|im_end|>" in shown
    assert "⟦It jumps,⏎" in shown
    assert "'<|im_end|>'" in shown
    _, coloured = look(world[1], row=2, color=True)
    assert re.search("\x1b\\[30;48;[0-9;]+mIt jumps,⏎", coloured)
    assert "⟦" not in coloured


def test_an_unknown_row_and_a_named_tokenizer_that_is_missing_are_errors(world):
    with pytest.raises(DataError, match="sample 3 does not exist"):
        look(world[1], row=3)
    with pytest.raises(ModelError, match="no tokenizer can be loaded"):
        look(world[1], tokenizer="/nowhere")


def test_another_tokenizer_and_another_template_are_warned_of(world, tmp_path):
    other = make_tokenizer("pieces")
    other.save_pretrained(tmp_path / "pieces")
    LlamaConfig(vocab_size=1024, eos_token_id=0).save_pretrained(tmp_path / "pieces")
    warnings, _ = look(world[1], tokenizer=str(tmp_path / "pieces"))
    assert any("another tokenizer" in warning for warning in warnings)
    model = save_model(tmp_path / "headers", chat_template=template_text("headers"))
    warnings, _ = look(world[1], tokenizer=model)
    assert warnings == [f"prepared with another chat template than {model}'s"]


def sample(ids, mask):
    return Sample(np.asarray(ids, np.int32), np.asarray(mask, np.uint8))


def test_masks_duplicates_stop_tokens_and_mask_ids_are_warned_of(tmp_path):
    model = save_model(tmp_path / "model", mask_token="<|call|>")
    mask = make_tokenizer().convert_tokens_to_ids("<|call|>")
    write_dataset(tmp_path / "d", [sample([5, 6, mask], [1, 1, 1]), sample([5, 6, mask], [1, 1, 1])], {})
    warnings, _ = look(tmp_path / "d", tokenizer=model)
    for words in (
        "2 of 2 samples are supervised throughout", "1 of 2 samples are duplicates",
        "no answer ends with a stop token ('<|im_end|>')", f"'<|call|>' ({mask}) is in the data, 2 times",
    ):  # fmt: skip
        assert any(words in warning for warning in warnings), words


def test_the_mask_that_a_drafter_would_get_is_looked_for_where_the_tokenizer_has_none(tmp_path):
    model = save_model(tmp_path / "model")
    behind = max(make_tokenizer().get_vocab().values()) + 1
    stop = make_tokenizer().convert_tokens_to_ids("<|im_end|>")
    for last, found in ((behind, True), (behind - 1, False)):
        write_dataset(tmp_path / f"d{found}", [sample([5, last, stop], [0, 1, 1])], {"embedding_rows": 1024})
        warnings, _ = look(tmp_path / f"d{found}", tokenizer=model)
        assert any(f"({behind}) is in the data, 1 times" in warning for warning in warnings) is found


def test_samples_that_a_weight_repeats_are_no_duplicates(world, tmp_path):
    path = tmp_path / "in.jsonl"
    rows = [{"prompt": f"Fox {at}?", "completion": "It jumps."} for at in (0, 1, 1)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, weight in (("once", 1), ("thrice", 3)):
        options = Data(path=tmp_path / name, weights=(weight,))
        prepare([path], tmp_path / name, world[0], options)
        warnings, _ = look(tmp_path / name)
        assert [w for w in warnings if "duplicates" in w] == [f"1 of {3 * weight} samples are duplicates"]


def test_few_supervised_tokens_and_answers_behind_another_prompt_are_warned_of(tmp_path):
    note = "last answer not behind the prompt that a server sends"
    write_dataset(tmp_path / "d", [sample(range(200), [0] * 198 + [1, 1])], {"notes": {note: 1}})
    warnings, shown = look(tmp_path / "d")
    assert len(warnings) == 2
    assert "only 1.0%" in warnings[0]
    assert "another prompt" in warnings[1]
    assert "no tokenizer found" in shown


def test_a_sample_is_shown_by_ids_when_there_is_no_tokenizer(tmp_path):
    write_dataset(tmp_path / "d", [sample([7, 8, 9], [0, 1, 1])], {})
    assert "7 ⟦8 9 ⟧" in look(tmp_path / "d", row=0)[1]
