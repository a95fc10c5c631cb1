"""Each family: what is captured, trained on and exported is what its own Transformers class computes."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from target_case import LENGTHS, Case, Figures, relative
from target_families import FAMILIES, TAPS, model_of
from target_table import documented, rules
from transformers import T5Config

from protocol.errors import ModelError
from services.check.model import check_model
from services.config.load import load
from services.data.forecast import read_target
from services.dflash.anchors import draw_anchors
from services.dflash.drafter import Drafter
from services.dflash.export import export_drafter
from services.dflash.export_check import check_export, zlab_installed
from services.dflash.loss import LossOptions
from services.dflash.pack import pack_loss
from services.dflash.self_check import self_check
from services.dflash.speculate import decode_plainly, speculate
from services.dflash.speculate_batch import can_batch, speculate_batch
from services.dflash.target_model import load_embedding_and_head, load_target

SAME = 1e-5  # relative, worst row
ROUNDING = 2e-6
RAGGED = 1e-4  # another batch is another order of summation, which experts and recurrent layers amplify


@pytest.fixture(scope="module", params=FAMILIES)
def case(request, tmp_path_factory):
    return Case.make(request.param, tmp_path_factory.mktemp("target"))


def test_taps_and_logits_of_a_ragged_batch_are_the_models_own(case):
    """The figures stand in docs/targets.md, too, and may not become ten times worse than there."""
    found = Figures.of(case)
    assert found.taps <= SAME and found.logits <= SAME and found.ragged <= RAGGED
    special, rule, *errors = documented()[case.name]
    assert (special, rule) == (case.family.special, rules(case.family))
    for error, stated in zip(vars(found).values(), map(float, errors), strict=True):
        assert error <= max(10 * stated, ROUNDING)


def test_its_memory_can_be_planned(case):
    shape = read_target(str(case.folder))
    assert shape.parameters >= sum(parameter.numel() for parameter in case.target.model.parameters())
    assert shape.widths.hidden == 32
    assert shape.widths.attention >= 32 and shape.widths.mlp >= 32


def test_the_table_in_the_docs_has_every_family():
    assert list(documented()) == list(FAMILIES)


def test_the_self_check_of_the_start_passes(case):
    errors = self_check(case.target, TAPS)
    assert max(errors.values()) <= SAME


def test_the_self_check_passes_in_the_type_that_people_train_with(case):
    target = load_target(case.folder, dtype="bfloat16", attention=case.family.attention)
    self_check(target, TAPS)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_padding_that_reaches_real_tokens_is_refused(dtype, tmp_path):
    """As in a model that looks both ways: its taps are its own, and yet no drafter's."""
    case = Case.make("llama", tmp_path)
    target = load_target(case.folder, dtype=dtype)
    for layer in target.layers:
        layer.self_attn.is_causal = False
    with pytest.raises(ModelError, match="'ragged'"):
        self_check(target, TAPS)


def test_an_unknown_embedding_scale_is_refused(tmp_path):
    """As of a family that came after us: its configuration names the factor otherwise."""
    case = Case.make("granite", tmp_path)
    case.target.config.embedding_multiplier = 1.0
    with pytest.raises(ModelError, match="'scale'"):
        self_check(case.target, TAPS)


def test_embedding_and_head_alone_are_the_models(case):
    embedding, head = load_embedding_and_head(case.folder)
    assert torch.equal(embedding, case.original.get_input_embeddings().weight)
    assert torch.equal(head.weight_VH, case.original.get_output_embeddings().weight)
    assert head[1:] == case.target.head[1:] == (case.family.multiplier, case.family.softcap)


def test_scale_cap_and_shape_reach_the_drafter(case):
    _, _, first = case.batch
    rows = case.target.embed_weight_VH[torch.cat([case.ids[i, :n] for i, n in enumerate(LENGTHS)])]
    config = case.drafter
    assert relative(rows * config.input_embedding_scale, first) <= SAME
    rules = (config.input_embedding_scale, config.output_multiplier, config.final_logit_softcapping)
    assert rules == (case.family.scale, case.family.multiplier, case.family.softcap)
    assert config.rope_theta == case.family.rope_theta
    assert (config.mask_token_id, config.target_layer_ids, config.num_target_layers) == (96, TAPS, 7)
    assert (config.hidden_size, config.vocab_size) == (32, 97)


def test_an_export_reads_back_here_and_in_zlabs_class(case, tmp_path):
    drafter = Drafter(case.drafter, seed=4)
    export_drafter(drafter, tmp_path / "out", dtype="float32")
    found = check_export(tmp_path / "out", drafter, dtype="float32")
    assert found["zlab"] == zlab_installed()
    inner = json.loads((tmp_path / "out" / "config.json").read_text())["dflash_config"]
    assert inner.get("input_embedding_scale", 1.0) == case.family.scale
    assert inner.get("output_multiplier", 1.0) == case.family.multiplier
    assert inner.get("final_logit_softcapping", 0.0) == case.family.softcap


def test_a_few_steps_lower_the_loss(case):
    offsets = torch.tensor([0, *LENGTHS]).cumsum(0).to(torch.int32)
    pack = {
        "features_TF": case.captured.features,
        "input_ids_T": torch.cat([case.ids[i, :n] for i, n in enumerate(LENGTHS)]).to(torch.int32),
        "loss_mask_T": torch.ones(sum(LENGTHS), dtype=torch.uint8),
        "position_ids_T": torch.cat([torch.arange(n, dtype=torch.int32) for n in LENGTHS]),
        "document_offsets": offsets,
    }
    anchors = draw_anchors(pack["loss_mask_T"], offsets, 16, 0)
    drafter = Drafter(case.drafter, seed=1)
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=3e-3)
    losses = []
    for _ in range(4):
        result = pack_loss(
            drafter,
            case.target.embed_weight_VH,
            case.target.head,
            **pack,
            anchors=anchors,
            loss=LossOptions(),
        )
        loss = result.loss_sum / result.weight_sum
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses == sorted(losses, reverse=True), losses


def test_decoding_with_a_drafter_is_lossless(case):
    """With the target's own cache, whose recurrent and sliding layers have to forget refused drafts."""
    drafter = Drafter(case.drafter, seed=4).eval()
    prompt = case.ids[0, :12].tolist()
    plain = decode_plainly(case.target, prompt, max_new_tokens=14, stop_ids=())
    drafted = speculate(case.target, drafter, prompt, max_new_tokens=14, stop_ids=())
    _, logits, _ = case.asked(torch.tensor([[*prompt, *plain.tokens]]))
    assert list(plain.tokens) == logits[0, 11:-1].argmax(-1).tolist()
    assert drafted.tokens == plain.tokens


def test_prompts_decoded_together_are_decoded_as_alone(case):
    """Wherever it is said to be possible: positions, masks and logits are then all that rows differ in."""
    if not can_batch(case.target):
        return
    drafter = Drafter(case.drafter, seed=4).eval()
    prompts = [case.ids[row, :length].tolist() for row, length in enumerate((12, 1, 5))]
    limits = {"max_new_tokens": 8, "stop_ids": ()}
    alone = [speculate(case.target, drafter, prompt, **limits) for prompt in prompts]
    together = speculate_batch(case.target, drafter, prompts, rows=2, **limits)
    assert [answer.tokens for answer in together] == [answer.tokens for answer in alone]
    assert [answer.accepted for answer in together] == [answer.accepted for answer in alone]


@pytest.mark.parametrize("name", FAMILIES)
def test_tied_heads_are_the_embedding(name, tmp_path):
    family = FAMILIES[name]
    model = model_of(family, tied=True)
    model.save_pretrained(tmp_path)
    embedding, head = load_embedding_and_head(tmp_path)
    assert head.weight_VH is embedding
    assert torch.equal(embedding, model.get_input_embeddings().weight)


@pytest.mark.parametrize("name", [name for name in FAMILIES if FAMILIES[name].attention != "sdpa"])
def test_attention_that_a_family_lacks_is_refused_with_the_remedy(name, tmp_path):
    model_of(FAMILIES[name], tied=False).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r'set model.attention = "eager"'):
        load_target(tmp_path)
    flags = {"model.path": str(tmp_path), "data.path": "unused", "drafter.mask_token_id": "96"}
    _, findings = check_model(load(None, [(f"--{name}", value) for name, value in flags.items()], {}))
    assert 'set model.attention = "eager"' in str(findings[0])


@pytest.mark.parametrize("name", ["deepseek_v3", "qwen3_5"])
def test_a_layer_for_several_tokens_does_not_hide_the_embedding(name, tmp_path):
    """Real checkpoints have an embedding and a head of that layer, too; no model is built because of it."""
    model = model_of(FAMILIES[name], tied=False)
    model.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    for end in ("embed_tokens.weight", "shared_head.head.weight"):
        for layer in ("model.layers.7", "mtp"):
            weights[f"{layer}.{end}"] = torch.zeros_like(weights["model.embed_tokens.weight"])
    del weights["model.norm.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    embedding, head = load_embedding_and_head(tmp_path)
    assert torch.equal(embedding, model.get_input_embeddings().weight)
    assert torch.equal(head.weight_VH, model.get_output_embeddings().weight)


@pytest.mark.parametrize("name", [name for name in FAMILIES if FAMILIES[name].wraps])
def test_a_wrapper_may_say_at_the_top_only_that_the_head_is_tied(name, tmp_path):
    model = model_of(FAMILIES[name], tied=True)
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["text_config"]["tie_word_embeddings"] = False
    (tmp_path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    target = load_target(tmp_path)
    embedding, head = load_embedding_and_head(tmp_path)
    assert torch.equal(target.head.weight_VH, model.get_output_embeddings().weight)
    assert head.weight_VH is embedding and torch.equal(embedding, target.embed_weight_VH)


@pytest.mark.parametrize("equal", [True, False])
def test_a_head_in_the_files_is_tied_only_if_it_is_the_embedding(equal, tmp_path):
    """As Transformers does it, whatever the configuration says."""
    model_of(FAMILIES["qwen3"], tied=True).save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone() * (1.0 if equal else 2.0)
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    embedding, head = load_embedding_and_head(tmp_path)
    assert (head.weight_VH is embedding) == equal
    assert torch.equal(head.weight_VH, load_target(tmp_path).head.weight_VH)


def test_what_writes_no_text_is_refused(tmp_path):
    T5Config(d_model=16, num_layers=1, vocab_size=32).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="T5Config: no causal language model"):
        load_target(tmp_path)
