"""A target whose greedy answers repeat, and a drafter trained on them until it accepts several tokens."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from dflash_tiny import drafter_config, tiny_target
from torch import Tensor

from services.dflash.anchors import draw_anchors
from services.dflash.drafter import Drafter
from services.dflash.loss import LossOptions
from services.dflash.pack import PackLoss, pack_loss
from services.dflash.taps import PackBuffer, TapCapture, packed_rows
from services.dflash.target_model import Target

PROMPTS = [[3 + seed, 40 - seed, 17, 60 + seed] for seed in range(10)]
SLIDING = {"layer_types": ("sliding_attention", "sliding_attention", "full_attention"), "sliding_window": 9}
_LENGTH = 30


class Trained(NamedTuple):
    target: Target
    drafter: Drafter
    first: PackLoss
    last: PackLoss


@torch.inference_mode()
def greedy_answers(target: Target) -> Tensor:
    """Prompts and greedy answers [prompts, _LENGTH], all at once and without a cache."""
    ids = torch.tensor(PROMPTS)
    while ids.shape[1] < _LENGTH:
        best = target.model(input_ids=ids, use_cache=False).logits[:, -1].argmax(-1, keepdim=True)
        ids = torch.cat((ids, best), dim=1)
    return ids


@lru_cache(maxsize=8)
def train_drafter(family: str, *, steps: int = 90, sliding: bool = False) -> Trained:
    """Half a second of training on a quiet core; the result is shared by tests, which leave it as it is."""
    target = tiny_target(family)
    ids = greedy_answers(target)
    tokens = ids.numel()
    scale = 32**0.5 if "gemma" in family else 1.0
    config = drafter_config(
        input_embedding_scale=scale,
        final_logit_softcapping=target.head.softcap,
        num_hidden_layers=3 if sliding else 2,
        **(SLIDING if sliding else {"layer_types": ("full_attention",) * 2}),
    )
    buffer = PackBuffer.allocate(
        tokens, config.taps, 32, split=False, last_hidden=False, dtype=torch.float32, device="cpu"
    )
    with TapCapture(target, config.target_layer_ids) as capture:
        capture.run(ids, packed_rows([_LENGTH] * len(PROMPTS), _LENGTH), buffer)
    loss_mask = torch.ones(len(PROMPTS), _LENGTH, dtype=torch.uint8)
    loss_mask[:, :4] = 0
    pack = {
        "features_TF": buffer.sections(tokens)["features"],
        "input_ids_T": ids.flatten().clone(),
        "loss_mask_T": loss_mask.flatten(),
        "position_ids_T": torch.arange(_LENGTH).repeat(len(PROMPTS)),
        "document_offsets": torch.arange(0, tokens + 1, _LENGTH, dtype=torch.int32),
    }
    drafter = Drafter(config, seed=0)
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=6e-3)
    results = []
    for step in range(steps):
        anchors = draw_anchors(pack["loss_mask_T"], pack["document_offsets"], 64, step)
        result = pack_loss(
            drafter, target.embed_weight_VH, target.head, **pack, anchors=anchors, loss=LossOptions()
        )
        optimizer.zero_grad()
        (result.loss_sum / result.weight_sum).backward()
        optimizer.step()
        results.append(PackLoss(*(part.detach() for part in result)))
    return Trained(target, drafter.eval(), results[0], results[-1])
