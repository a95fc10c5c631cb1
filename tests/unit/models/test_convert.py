"""Conversion of a real GGUF: the demo's model from its package, and a two-layer one written here."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from protocol.errors import DataError, ModelError
from services.check.model import check_model
from services.cli import app
from services.config.load import load
from services.models.convert import convert_gguf, smollm2_from_package, smollm2_gguf

HIDDEN, MLP, HEADS, LAYERS = 32, 64, 4, 2
TEMPLATE = "{% for m in messages %}<s>{{ m['content'] }}<e>{% endfor %}"


def write_tiny_gguf(path: Path, *, eos: bool = True) -> dict[str, np.ndarray]:
    """A llama of two layers over printable ASCII; returns its weights."""
    tokens = ["<u>", "<s>", "<e>"] + [chr(33 + i) for i in range(94)] + ["ab", "cd"]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(MLP)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10_000.0)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 3] + [1] * 96)
    writer.add_token_merges(["a b", "c d"])
    writer.add_bos_token_id(1)
    writer.add_unk_token_id(0)
    if eos:
        writer.add_eos_token_id(2)
    writer.add_chat_template(TEMPLATE)
    random = np.random.default_rng(0)
    shapes = {"token_embd.weight": (len(tokens), HIDDEN), "output_norm.weight": (HIDDEN,)}
    for layer in range(LAYERS):
        shapes |= {
            f"blk.{layer}.attn_norm.weight": (HIDDEN,),
            f"blk.{layer}.ffn_norm.weight": (HIDDEN,),
            **{f"blk.{layer}.attn_{part}.weight": (HIDDEN, HIDDEN) for part in ("q", "k", "v", "output")},
            f"blk.{layer}.ffn_gate.weight": (MLP, HIDDEN),
            f"blk.{layer}.ffn_up.weight": (MLP, HIDDEN),
            f"blk.{layer}.ffn_down.weight": (HIDDEN, MLP),
        }
    weights = {name: random.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    for name, weight in weights.items():
        writer.add_tensor(name, weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return weights


def test_weights_and_special_tokens_come_from_the_gguf(tmp_path: Path) -> None:
    weights = write_tiny_gguf(tmp_path / "tiny.gguf")
    out = convert_gguf(tmp_path / "tiny.gguf", tmp_path / "tiny", dtype="float32")

    model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    assert np.array_equal(model.get_input_embeddings().weight.detach().numpy(), weights["token_embd.weight"])
    down = model.model.layers[1].mlp.down_proj.weight.detach().numpy()
    assert np.array_equal(down, weights["blk.1.ffn_down.weight"])
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == ("<s>", "<e>", "<e>")
    assert tokenizer.chat_template == TEMPLATE
    assert model.generation_config.eos_token_id == model.config.eos_token_id == tokenizer.eos_token_id == 2
    assert "_model_name_or_path" not in json.loads((out / "config.json").read_text())


def test_the_command_makes_a_folder_and_check_names_it_for_a_file(tmp_path: Path) -> None:
    file, out = tmp_path / "tiny.gguf", tmp_path / "tiny"
    write_tiny_gguf(file)
    told = CliRunner().invoke(app, ["convert", str(file), str(out), "--dtype", "float32"])
    assert told.exit_code == 0 and f"target in {out}" in told.stdout and (out / "config.json").is_file()
    loaded = load(None, [("--model.path", str(file)), ("--data.path", "d")], {})
    (finding,) = check_model(loaded)[1]
    assert "is a GGUF file; `draftmill convert FILE FOLDER`" in str(finding)


def test_the_stored_type_is_the_one_asked_for(tmp_path: Path) -> None:
    write_tiny_gguf(tmp_path / "tiny.gguf")
    out = convert_gguf(tmp_path / "tiny.gguf", tmp_path / "half", dtype="bfloat16")
    model = AutoModelForCausalLM.from_pretrained(out, dtype="auto")
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


def test_an_existing_folder_is_never_touched(tmp_path: Path) -> None:
    write_tiny_gguf(tmp_path / "tiny.gguf")
    out = tmp_path / "mine"
    out.mkdir()
    (out / "notes.txt").write_text("keep")
    with pytest.raises(DataError, match=r"mine exists"):
        convert_gguf(tmp_path / "tiny.gguf", out)
    assert [path.name for path in out.iterdir()] == ["notes.txt"]


@pytest.mark.parametrize(
    ("name", "content", "rule"),
    [("absent.gguf", None, "no such file"), ("weights.gguf", b"\x80\x02}q\x00.", "begins with")],
)
def test_what_is_no_gguf_is_refused_with_the_disk_unchanged(
    tmp_path: Path, name: str, content: bytes | None, rule: str
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ModelError, match=rule):
        convert_gguf(tmp_path / name, tmp_path / "out")
    assert sorted(tmp_path.rglob("*")) == before


def test_a_model_that_could_never_stop_is_refused_with_the_disk_unchanged(tmp_path: Path) -> None:
    write_tiny_gguf(tmp_path / "endless.gguf", eos=False)
    with pytest.raises(ModelError, match="generation would never stop"):
        convert_gguf(tmp_path / "endless.gguf", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["endless.gguf"]


@pytest.mark.long
def test_smollm2_from_its_package_speaks_and_stops(tmp_path_factory: pytest.TempPathFactory) -> None:
    smollm2_gguf()  # a missing package fails here, with the remedy
    cache = tmp_path_factory.mktemp("cache")
    path = smollm2_from_package(cache)
    assert smollm2_from_package(cache) == path
    assert [folder.name for folder in cache.iterdir()] == [path.name]

    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is 12 + 30?"}], add_generation_prompt=True, return_tensors="pt"
    )
    output = model.generate(**chat, max_new_tokens=48, do_sample=False)[0, chat.input_ids.shape[1] :]
    assert tokenizer.decode(output).startswith("12 + 30 =")
    assert output[-1] == tokenizer.convert_tokens_to_ids("<|im_end|>") == 2
    text = "  two  spaces , émigré\n\n\tx*12 😀"
    assert tokenizer.decode(tokenizer(text).input_ids) == text
