"""Each family: what is captured, trained on and exported is what its own Transformers class computes."""

from __future__ import annotations

import json

import pytest
import torch
from target_case import LENGTHS, Case, relative
from target_families import FAMILIES, TAPS, model_of

from protocol.errors import ModelError
from services.dflash.anchors import draw_anchors
from services.dflash.drafter import Drafter
from services.dflash.export import export_drafter
from services.dflash.export_check import check_export, zlab_installed
from services.dflash.loss import LossOptions
from services.dflash.pack import pack_loss
from services.dflash.self_check import self_check
from services.dflash.speculate import decode_plainly, speculate
from services.dflash.target_model import load_embedding_and_head

SAME = 1e-5  # relative, worst row
RAGGED = 1e-4  # another batch is another order of summation, which experts and recurrent layers amplify


@pytest.fixture(scope="module", params=FAMILIES)
def case(request, tmp_path_factory):
    return Case.make(request.param, tmp_path_factory.mktemp("target"))


def test_taps_and_logits_of_a_ragged_batch_are_the_models_own(case):
    taps, logits, _ = case.batch
    assert relative(case.captured.features, taps) <= SAME
    assert relative(case.target.logits(case.captured.last_hidden), logits) <= SAME
    taps, logits = case.alone
    assert relative(case.captured.features, taps) <= RAGGED
    assert relative(case.target.logits(case.captured.last_hidden), logits) <= RAGGED


def test_the_self_check_of_the_start_passes(case):
    errors = self_check(case.target, TAPS)
    assert max(errors.values()) <= SAME


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


@pytest.mark.parametrize("name", FAMILIES)
def test_tied_heads_are_the_embedding(name, tmp_path):
    family = FAMILIES[name]
    model = model_of(family, tied=True)
    model.save_pretrained(tmp_path)
    embedding, head = load_embedding_and_head(tmp_path)
    assert head.weight_VH is embedding
    assert torch.equal(embedding, model.get_input_embeddings().weight)
