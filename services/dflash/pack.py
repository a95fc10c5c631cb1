"""The loss of one training pack: features in, two differentiable sums and a few counts out.

    anchors -> block rows (clean token, masks) -> drafter over context and block -> frozen head -> sums

On a GPU every shape is fixed by (T, A, B) and nothing waits for the host; unused slots are computed
and weigh zero. On a CPU unused blocks and slots without a label are dropped first, since the head's
matrix products (49,152 rows for the demo's target) are most of the step.

On a GPU packs are padded to a multiple of TOKEN_STEP, since each T is compiled once. Callers may pad
too: rows past `document_offsets[-1]` must be finite and their loss mask zero; repeated last offsets
are empty documents.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from services.dflash.anchors import Anchors
from services.dflash.attention import DenseAttention, DocumentAttention, FlexAttention
from services.dflash.drafter import Attend, Drafter
from services.dflash.head import FrozenHead, best_ids, row_losses
from services.dflash.loss import LossOptions, slot_weights
from services.dflash.mask import BlockLayout, block_layout

TOKEN_STEP = 1024

AttentionKind = Literal["auto", "flex", "dense", "reference"]


class PackLoss(NamedTuple):
    """float32 sums on the pack's device; only `loss_sum` carries a gradient. K = B - 1 slots."""

    loss_sum: Tensor
    weight_sum: Tensor
    correct_K: Tensor  # slots whose label has the largest logit
    count_K: Tensor  # slots with a label
    accepted_sum: Tensor  # over blocks: 1 + slots correct before the first wrong one
    blocks: Tensor


def pack_loss(
    drafter: Drafter,
    embed_weight_VH: Tensor,
    head: FrozenHead,
    *,
    features_TF: Tensor,
    input_ids_T: Tensor,
    loss_mask_T: Tensor,
    position_ids_T: Tensor,
    document_offsets: Tensor,
    anchors: Anchors,
    loss: LossOptions,
    label_ids_T: Tensor | None = None,
    last_hidden_TH: Tensor | None = None,
    attention: AttentionKind = "auto",
    dtype: torch.dtype = torch.float32,
) -> PackLoss:
    """Sums over the pack's blocks; all tensors on one device.

    `label_ids_T` (None: `input_ids_T`) are what slots are to foretell. `last_hidden_TH` (after the target's
    final norm) is needed for `kl` only. Without a valid anchor the loss is zero and so are its gradients.
    """
    dense_cpu = attention in ("auto", "dense") and not features_TF.is_cuda
    if dense_cpu:
        anchors = Anchors(*(part[anchors.valid_A] for part in anchors))
        if not anchors.valid_A.numel():
            return _nothing(drafter)
    if label_ids_T is None:
        label_ids_T = input_ids_T
    if features_TF.is_cuda:
        features_TF, input_ids_T, label_ids_T, loss_mask_T, position_ids_T = (
            _padded(rows) for rows in (features_TF, input_ids_T, label_ids_T, loss_mask_T, position_ids_T)
        )
    tokens, size = features_TF.shape[0], drafter.config.block_size
    layout = block_layout(anchors, document_offsets, tokens, size)
    attend = _attend(drafter, layout, attention, features_TF.is_cuda)

    context = drafter.context_key_values(drafter.context(features_TF.to(dtype)), position_ids_T)
    first_A = layout.anchor_A.clamp(max=tokens - 1)
    slots_B = torch.arange(size, device=features_TF.device)
    inputs_RH = drafter.block_inputs(embed_weight_VH, input_ids_T[first_A], size, dtype)
    positions_R = (position_ids_T[first_A].to(torch.int64)[:, None] + slots_B).flatten()
    hidden_RH = drafter(inputs_RH, positions_R, context, attend)

    place_AK = layout.anchor_A[:, None] + slots_B[1:]
    inside_AK = layout.valid_A[:, None] & (place_AK < layout.end_A[:, None])
    place_AK = place_AK.clamp(max=tokens - 1)
    real_AK = inside_AK & (loss_mask_T[place_AK] != 0)
    kept_AK = real_AK if dense_cpu else torch.ones_like(real_AK)
    loss_AK, correct_AK = _slot_losses(
        hidden_RH.unflatten(0, (-1, size))[:, 1:],
        head,
        label_ids_T[place_AK].to(torch.int64),
        _teacher_rows(last_hidden_TH, place_AK) if loss.kind == "kl" else None,
        kept_AK,
    )
    return _sums(loss, loss_AK, correct_AK, real_AK, layout.valid_A)


def targets_labels(last_hidden_TH: Tensor, head: FrozenHead, input_ids_T: Tensor) -> Tensor:
    """The target's best token for each place, as the row before it foretells it; typed like `input_ids_T`.

    The first place of a document has the former one's last row before it: no slot ever stands there. Costs a
    product with the whole head.
    """
    best_T = best_ids(last_hidden_TH[: len(input_ids_T) - 1], head)
    return torch.cat((input_ids_T[:1], best_T.to(input_ids_T)))


def _padded(rows: Tensor) -> Tensor:
    """Zero rows appended up to the next multiple of TOKEN_STEP."""
    missing = -rows.shape[0] % TOKEN_STEP
    return torch.cat((rows, rows.new_zeros(missing, *rows.shape[1:]))) if missing else rows


def _attend(drafter: Drafter, layout: BlockLayout, attention: AttentionKind, on_gpu: bool) -> Attend:
    if attention == "flex" or (attention == "auto" and on_gpu):
        return FlexAttention(drafter.config, layout)
    if attention == "reference" or on_gpu:
        return DenseAttention(drafter.config, layout)
    return DocumentAttention(drafter.config, layout)


def _teacher_rows(last_hidden_TH: Tensor | None, place_AK: Tensor) -> Tensor:
    """The target's rows that predict the tokens at `place_AK`: each stands one place before its token."""
    assert last_hidden_TH is not None, "kl needs the target's last hidden state"
    return last_hidden_TH[(place_AK - 1).clamp(max=last_hidden_TH.shape[0] - 1)]


def _slot_losses(
    hidden_AKH: Tensor, head: FrozenHead, labels_AK: Tensor, teacher_AKH: Tensor | None, kept_AK: Tensor
) -> tuple[Tensor, Tensor]:
    """(loss float32, correct bool) [A, K] through the head; slots not kept are 0 and False."""
    if hidden_AKH.is_cuda:  # fixed shapes: `kept` would need the host
        teacher_RH = None if teacher_AKH is None else teacher_AKH.flatten(0, 1)
        row = row_losses(hidden_AKH.flatten(0, 1), head, labels_AK.flatten(), teacher_RH)
        return row.loss_R.view_as(labels_AK), row.correct_R.view_as(labels_AK)
    teacher_RH = None if teacher_AKH is None else teacher_AKH[kept_AK]
    row = row_losses(hidden_AKH[kept_AK], head, labels_AK[kept_AK], teacher_RH)
    loss_AK = torch.zeros(kept_AK.shape).masked_scatter(kept_AK, row.loss_R)
    correct_AK = torch.zeros_like(kept_AK).masked_scatter(kept_AK, row.correct_R)
    return loss_AK, correct_AK


def _sums(
    options: LossOptions, loss_AK: Tensor, correct_AK: Tensor, real_AK: Tensor, valid_A: Tensor
) -> PackLoss:
    weight_AK = slot_weights(options, loss_AK, real_AK)
    right_AK = correct_AK & real_AK
    prefix_AK = right_AK.to(torch.float32).cumprod(1)
    blocks = valid_A.sum(dtype=torch.float32)
    return PackLoss(
        # `where`, not a product alone: a slot without a label must not turn 0 * inf into NaN.
        loss_sum=(torch.where(real_AK, loss_AK, 0.0) * weight_AK).sum(),
        weight_sum=weight_AK.sum(),
        correct_K=right_AK.sum(0, dtype=torch.float32),
        count_K=real_AK.sum(0, dtype=torch.float32),
        accepted_sum=blocks + prefix_AK.sum(),
        blocks=blocks,
    )


def _nothing(drafter: Drafter) -> PackLoss:
    """Zero sums that still reach every parameter, so that its gradient is zeros and not missing."""
    zero = torch.zeros(())
    touched = torch.stack([parameter.flatten()[0] for parameter in drafter.parameters()]).sum() * 0.0
    slots = torch.zeros(drafter.config.block_size - 1)
    return PackLoss(touched, zero, slots, slots, zero, zero)
