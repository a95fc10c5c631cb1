"""The target's frozen LM head fused with the loss: full logits [R, V] never exist.

Rows are taken in chunks; a chunk's logits live for a few milliseconds, and its gradient with respect
to the hidden rows is made at once, while they are there. A row's loss depends on its own hidden row
alone, so `d loss_r / d hidden_r` [R, H] can be kept unscaled, and whatever weights the rows get
afterwards only scale it: backward is one multiplication. Two matrix products a step instead of the
three of a recomputing checkpoint, and 4*chunk*V bytes instead of 4*R*V (5 GB for 512 blocks of 16 and
151,936 rows).

A GPU keeps a chunk's logits in bfloat16 and turns them into losses and slopes in one kernel: 0.46 ms
for 1,024 rows of 151,936, between two products of 1.7 ms each.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from services.dflash.compiled import compiled

CPU_CHUNK_ROWS = 256  # 50 MB of float32 logits at 49,152 rows; smaller products are up to a third slower
GPU_CHUNK_ROWS = 1024


class FrozenHead(NamedTuple):
    """logits = cap(multiplier * hidden @ weight.T); cap(z) = softcap * tanh(z / softcap), none if 0."""

    weight_VH: Tensor
    multiplier: float = 1.0
    softcap: float = 0.0

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 [..., V]; for a few rows only."""
        return _logits(hidden, self)[0]


class RowLosses(NamedTuple):
    loss_R: Tensor  # float32, differentiable with respect to the hidden rows
    correct_R: Tensor  # bool: the label has the largest logit


@torch.no_grad()
def best_ids(hidden_RH: Tensor, head: FrozenHead) -> Tensor:
    """int64 [R]: the token with the largest logit for each row, after its final norm; first of equals.

    Logits are float32 whatever the head's type: rounded ones tie, for SmolLM2-135M in one row of 54.
    """
    weight_VH = head.weight_VH
    if hidden_RH.is_cuda:
        parts = hidden_RH.to(weight_VH.dtype).split(GPU_CHUNK_ROWS)
        return torch.cat([_in_float32(part_RH, weight_VH).argmax(-1) for part_RH in parts])
    weight_VH = weight_VH.float()
    return torch.cat([(part.float() @ weight_VH.T).argmax(-1) for part in hidden_RH.split(CPU_CHUNK_ROWS)])


def _in_float32(x: Tensor, weight: Tensor) -> Tensor:
    """`x @ weight.T`, its sums not rounded; only a GPU has such a product of 16-bit factors."""
    if weight.dtype == torch.float32:
        return x @ weight.T
    return torch.mm(x, weight.T, out_dtype=torch.float32)


def row_losses(
    hidden_RH: Tensor, head: FrozenHead, labels_R: Tensor, teacher_RH: Tensor | None = None
) -> RowLosses:
    """Each row's cross-entropy with its label or, given the target's own hidden rows, KL(target || draft).

    `hidden_RH`, `teacher_RH` [R, H] after their final norms; `labels_R` int64 [R]. Chunk size does not
    change results beyond the rounding of the matrix product.
    """
    chunk = GPU_CHUNK_ROWS if hidden_RH.is_cuda else CPU_CHUNK_ROWS
    loss_R, correct_R = _HeadLoss.apply(hidden_RH, head, labels_R, teacher_RH, chunk)
    return RowLosses(loss_R, correct_R)


def _raw(hidden: Tensor, head: FrozenHead) -> Tensor:
    """Before multiplier and cap, in the head's type."""
    return hidden.to(head.weight_VH.dtype) @ head.weight_VH.T


def _logits(hidden: Tensor, head: FrozenHead) -> tuple[Tensor, Tensor | None]:
    return _capped(_raw(hidden, head).float(), head.multiplier, head.softcap)


def _capped(raw: Tensor, multiplier: float, softcap: float) -> tuple[Tensor, Tensor | None]:
    """Logits, and tanh(.) where its slope is needed; float32, `raw` may be overwritten."""
    if multiplier != 1.0:
        raw = raw * multiplier
    if softcap == 0.0:
        return raw, None
    squashed = raw.div_(softcap).tanh_()
    return squashed * softcap, squashed


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_RH: Tensor, head: FrozenHead, labels_R: Tensor, teacher_RH: Tensor | None, chunk: int
    ) -> tuple[Tensor, Tensor]:
        rows = hidden_RH.shape[0]
        loss_R = torch.empty(rows, dtype=torch.float32, device=hidden_RH.device)
        correct_R = torch.empty(rows, dtype=torch.bool, device=hidden_RH.device)
        gradient_RH = torch.empty_like(hidden_RH) if ctx.needs_input_grad[0] else None
        losses = _losses_on_gpu if hidden_RH.is_cuda else _losses
        for first in range(0, rows, chunk):
            part = slice(first, first + chunk)
            teacher = None if teacher_RH is None else _raw(teacher_RH[part], head)
            loss_R[part], correct_R[part], slope = losses(
                _raw(hidden_RH[part], head), labels_R[part], teacher, head.multiplier, head.softcap
            )
            if gradient_RH is not None:
                gradient_RH[part] = slope.to(head.weight_VH.dtype) @ head.weight_VH
        ctx.save_for_backward(gradient_RH)
        ctx.mark_non_differentiable(correct_R)
        return loss_R, correct_R

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None, None]:
        (gradient_RH,) = ctx.saved_tensors
        return gradient_RH * gradients[0][:, None].to(gradient_RH.dtype), None, None, None, None


def _losses(
    raw: Tensor, labels: Tensor, teacher_raw: Tensor | None, multiplier: float, softcap: float
) -> tuple[Tensor, Tensor, Tensor]:
    """(loss, correct, d loss / d raw logits [chunk, V]) of a few rows; the logits are overwritten."""
    logits, squashed = _capped(raw.float(), multiplier, softcap)
    label = logits.gather(1, labels[:, None])
    top, best = logits.max(1, keepdim=True)  # of equals the one that decoding takes
    probability = logits.sub_(top)
    shifted_label = label - top
    if teacher_raw is not None:
        wanted_log = _capped(teacher_raw.float(), multiplier, softcap)[0].log_softmax(-1)
        wanted = wanted_log.exp()
        expected = (wanted * (wanted_log - probability)).sum(1, keepdim=True)
    probability.exp_()
    total = probability.sum(1, keepdim=True)
    probability.div_(total)
    if teacher_raw is None:
        loss = total.log() - shifted_label
        probability.scatter_(1, labels[:, None], probability.gather(1, labels[:, None]) - 1.0)
    else:
        loss = expected + total.log()
        probability.sub_(wanted)
    if squashed is not None:
        probability.mul_(1.0 - squashed.square())
    if multiplier != 1.0:
        probability.mul_(multiplier)
    return loss[:, 0], best[:, 0] == labels, probability


def _losses_on_gpu(*rows: Any) -> tuple[Tensor, Tensor, Tensor]:
    return compiled(_losses_in_one_kernel)(*rows)


def _losses_in_one_kernel(
    raw: Tensor, labels: Tensor, teacher_raw: Tensor | None, multiplier: float, softcap: float
) -> tuple[Tensor, Tensor, Tensor]:
    """`_losses` for a compiler: nothing in place, no scatter, the slope in the type of `raw`."""
    logits, squashed = _capped(raw.float(), multiplier, softcap)
    label = logits.gather(1, labels[:, None])
    top, best = logits.amax(1, keepdim=True), logits.argmax(1)
    exponentials = (logits - top).exp()
    total = exponentials.sum(1, keepdim=True)
    if teacher_raw is None:
        wanted = torch.arange(raw.shape[1], device=raw.device) == labels[:, None]
        loss = total.log() - (label - top)
    else:
        wanted_log = _capped(teacher_raw.float(), multiplier, softcap)[0].log_softmax(-1)
        wanted = wanted_log.exp()
        loss = (wanted * (wanted_log - (logits - top))).sum(1, keepdim=True) + total.log()
    slope = exponentials / total - wanted.float()
    if squashed is not None:
        slope = slope * (1.0 - squashed.square())
    return loss[:, 0], best == labels, (slope * multiplier).to(raw.dtype)
