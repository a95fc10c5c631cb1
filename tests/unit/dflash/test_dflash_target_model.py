"""Targets from folders of safetensors: embedding and head alone, tied or not, and what is refused."""

import json

import pytest
import torch
from dflash_tiny import FAMILIES, tiny_model
from jinja2 import TemplateError

from protocol.errors import DataError, ModelError
from services.config.schema import Config
from services.dflash.evaluate import template_options
from services.dflash.prompts import load_prompts
from services.dflash.target_model import (
    load_embedding_and_head,
    load_stop_ids,
    load_target,
    load_text_config,
    load_tokenizer,
)


def saved(tmp_path, family, **options):
    model = tiny_model(family)
    model.save_pretrained(tmp_path / family, **options)
    return tmp_path / family, model


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("shards", ["5GB", "20KB"])
def test_embedding_and_head_alone_equal_the_loaded_models(tmp_path, family, shards):
    folder, model = saved(tmp_path, family, max_shard_size=shards)
    assert (folder / "model.safetensors.index.json").exists() == (shards == "20KB")
    target = load_target(folder, attention="eager" if family == "gemma2" else "sdpa")
    embedding, head = load_embedding_and_head(folder)
    assert torch.equal(embedding, model.get_input_embeddings().weight)
    assert torch.equal(head.weight_VH, model.get_output_embeddings().weight)
    assert (head.multiplier, head.softcap) == (target.head.multiplier, target.head.softcap)
    tied = model.config.tie_word_embeddings
    assert (head.weight_VH is embedding) == tied
    assert torch.equal(target.head.weight_VH, head.weight_VH)
    assert load_text_config(folder).num_hidden_layers == 7 == len(target.layers)
    assert not any(parameter.requires_grad for parameter in target.model.parameters())


def test_sdpa_is_refused_where_it_would_leave_out_a_cap(tmp_path):
    folder, _ = saved(tmp_path, "gemma2")
    with pytest.raises(ModelError, match=r"50.0, which sdpa leaves out"):
        load_target(folder)


def test_types_are_converted(tmp_path):
    folder, _ = saved(tmp_path, "qwen3")
    embedding, head = load_embedding_and_head(folder, dtype="bfloat16")
    assert (
        embedding.dtype
        == head.weight_VH.dtype
        == load_target(folder, dtype="bfloat16").dtype
        == torch.bfloat16
    )


def test_stop_ids_come_from_both_configurations(tmp_path):
    folder, _ = saved(tmp_path, "llama")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 7]}))
    assert load_stop_ids(folder) == load_target(folder).stop_ids == (2, 5, 7)
    (folder / "generation_config.json").unlink()
    assert load_stop_ids(folder) == (2,)


def test_missing_models_and_weights_are_refused(tmp_path):
    for load in (load_target, load_text_config, load_embedding_and_head, load_tokenizer):
        with pytest.raises(ModelError, match="nowhere"):
            load(tmp_path / "nowhere")
    folder, _ = saved(tmp_path, "llama")
    (folder / "model.safetensors").rename(folder / "elsewhere")
    for load in (load_target, load_embedding_and_head):
        with pytest.raises(ModelError, match="safetensors"):
            load(folder)


def test_weights_that_would_be_random_are_refused(tmp_path):
    from safetensors.torch import load_file, save_file

    folder, _ = saved(tmp_path, "qwen3")
    weights = load_file(folder / "model.safetensors")
    del weights["lm_head.weight"], weights["model.layers.3.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match="would be random"):
        load_target(folder)


class Words:
    """A tokenizer without a chat template: one id a word."""

    chat_template = None

    def __call__(self, text, **_):
        return {"input_ids": [len(word) for word in text.split()]}


def test_prompts_are_read_in_each_form(tmp_path):
    rows = [
        {"prompt": "a bb"},
        {"turns": ["ccc", "d"], "category": "maths"},
        {
            "messages": [{"role": "user", "content": "ee"}, {"role": "assistant", "content": "answer"}],
            "domain": "x",
        },
    ]
    file = tmp_path / "prompts.jsonl"
    separators = json.dumps({"prompt": "a", "domain": "\u2028 \x85"}, ensure_ascii=False)  # end no line
    file.write_text("\n".join([*map(json.dumps, rows), separators]) + "\n\n", encoding="utf-8")
    assert [(p.ids, p.domain) for p in load_prompts(file, Words())] == [
        ((1, 2), ""),
        ((3,), "maths"),
        ((2,), "x"),
        ((1,), "\u2028 \x85"),
    ]
    assert len(load_prompts(file, Words(), limit=2)) == 2


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "line 1: not JSON"),
        ("[]", "line 1: list"),
        ('{"a": 1}', "needs"),
        ("", "holds none"),
        ('{"turns": "hello"}', "line 1: `turns` must be a list"),
        ('{"messages": [{"role": "user"}]}', "line 1: .*an empty user turn"),
        ('{"prompt": 3}', "line 1: .*int"),
    ],
)
def test_bad_prompts_are_named(tmp_path, text, words):
    (tmp_path / "p.jsonl").write_text(text)
    with pytest.raises(DataError, match=words):
        load_prompts(tmp_path / "p.jsonl", Words())
    with pytest.raises(DataError, match="no such file"):
        load_prompts(tmp_path / "q.jsonl", Words())


def test_prompts_of_another_encoding_are_named_and_a_byte_order_mark_is_none_of_them(tmp_path):
    file = tmp_path / "p.jsonl"
    file.write_bytes('{"prompt": "\xe9"}'.encode("latin-1"))
    with pytest.raises(DataError, match="not UTF-8"):
        load_prompts(file, Words())
    file.write_bytes(b"\xef\xbb\xbf" + b'{"conversations": [{"from": "human", "value": "a bb"}]}')
    assert load_prompts(file, Words())[0].ids == (1, 2)


class Templated(Words):
    """Renders with the template it is given, else with its own, as Transformers does."""

    chat_template = "own"

    def apply_chat_template(self, messages, *, chat_template=None, strftime_now, **_):
        if messages[0]["content"] == "refused":
            raise TemplateError("no such thing")
        return f"{chat_template or self.chat_template} {strftime_now('%Y')} {messages[0]['content']}"


def test_prompts_are_rendered_with_the_datas_template_on_its_day(tmp_path):
    file = tmp_path / "p.jsonl"
    file.write_text('{"prompt": "a"}\n')
    (tmp_path / "template").write_text("another")
    for named, words in (("", (3, 4, 1)), (str(tmp_path / "template"), (7, 4, 1))):
        config = Config(model={"path": "m"}, data={"path": "d", "chat_template": named})
        assert load_prompts(file, Templated(), **template_options(config))[0].ids == words
    file.write_text('{"prompt": "refused"}\n')
    with pytest.raises(DataError, match="line 1: the chat template refuses it: no such thing"):
        load_prompts(file, Templated())


@pytest.mark.parametrize("kind", ["llama", "of-nobody-else"])
def test_code_that_comes_with_a_model_is_never_run(tmp_path, kind):
    """Neither for an architecture that only it describes, nor for one that the library knows."""
    folder, ran = tmp_path / "model", tmp_path / "ran"
    folder.mkdir()
    (folder / "evil.py").write_text(f"open({str(ran)!r}, 'w').close()\nclass Evil: ...\n")
    names = {"AutoConfig": "evil.Evil", "AutoModelForCausalLM": "evil.Evil"}
    tokenizer = {"auto_map": {"AutoTokenizer": ["evil.Evil", None]}, "tokenizer_class": "Evil"}
    (folder / "config.json").write_text(json.dumps({"model_type": kind, "auto_map": names}))
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    refused = []
    for load in (load_text_config, load_tokenizer, load_target):
        try:
            load(folder)
        except ModelError:
            refused.append(load)
    assert load_target in refused and load_tokenizer in refused
    assert (load_text_config in refused) == (kind != "llama")
    assert not ran.exists()
