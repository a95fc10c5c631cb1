"""Does this target, on this device, give what the drafter is trained and served on? Seconds, at start.

Three public drafters reached an accuracy of 0.98 in training and an acceptance of 0.1 when served:
their taps were one layer off, their last hidden state was normed twice, or a padded batch shifted
rows. Each of those is an error of order one here, far above any rounding.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from protocol.errors import ModelError
from services.dflash.drafter_config import logit_rules
from services.dflash.taps import PackBuffer, TapCapture, packed_rows
from services.dflash.target_model import Target

_LENGTHS = (7, 19, 1, 12)
_SAME_BATCH = {torch.float32: 1e-5, torch.float16: 2e-2, torch.bfloat16: 2e-2}
_SCALE = 1e-2  # Gemma rounds its scale to its own type
_OTHER_BATCH = {torch.float32: 1e-3, torch.float16: 1e-1, torch.bfloat16: 3e-1}  # of order one if wrong


def self_check(target: Target, layer_ids: Sequence[int], *, seed: int = 0) -> dict[str, float]:
    """Worst relative row errors by check; raises `ModelError` naming the first that is too large.

    `taps`: captured rows against `output_hidden_states` of the same batch; `logits`: the head on the
    captured last hidden state against the model's own logits; `ragged`: a padded batch against each
    sample alone; `cut`: capture without the layers behind the last tap against capture with them;
    `scale`: what the first layer is given against scaled embedding rows, which the drafter is given.
    """
    generator = torch.Generator().manual_seed(seed)
    padded = max(_LENGTHS) + 3
    ids = torch.randint(0, target.config.vocab_size, (len(_LENGTHS), padded), generator=generator)
    ids, rows_T = ids.to(target.device), packed_rows(_LENGTHS, padded).to(target.device)

    whole, first = _reference(target, layer_ids, ids)
    batch = [hidden.flatten(0, 1)[rows_T] for hidden in whole]
    alone = [_reference(target, layer_ids, ids[i : i + 1, :n])[0] for i, n in enumerate(_LENGTHS)]
    single = [torch.cat([sample[k][0] for sample in alone]) for k in range(len(batch))]
    taps, last = _captured(target, layer_ids, ids, rows_T, last_hidden=True)
    cut, _ = _captured(target, layer_ids, ids, rows_T, last_hidden=False)
    assert last is not None

    same, other = _SAME_BATCH[target.dtype], _OTHER_BATCH[target.dtype]
    errors = {
        "taps": _worst(taps, batch[:-1]),
        "logits": _worst([target.logits(last)], batch[-1:]),
        "ragged": _worst_sample([*taps, target.logits(last)], single),
        "cut": _worst(cut, taps),
        "scale": _scale_error(target, ids, first),
    }
    limits = {"taps": same, "logits": same, "ragged": other, "cut": same, "scale": _SCALE}
    for name, error in errors.items():
        if not error <= limits[name]:  # NaN, too
            raise ModelError(
                f"target self-check {name!r}: relative error {error:.2e}, at most {limits[name]:.0e} is "
                f"rounding; this model's hidden states are not what a drafter is served with (taps "
                f"{tuple(layer_ids)}, {target.dtype}); another attention or dtype may be right"
            )
    return errors


@torch.inference_mode()
def _reference(target: Target, layer_ids: Sequence[int], ids: Tensor) -> tuple[list[Tensor], Tensor]:
    """Tapped hidden states and logits by Hugging Face's interface, [batch, S, .] each; layer 0's input."""
    output = target.model(input_ids=ids, output_hidden_states=True, use_cache=False)
    states = output.hidden_states
    return [*(states[layer + 1] for layer in layer_ids), output.logits], states[0]


def _scale_error(target: Target, ids: Tensor, first: Tensor) -> float:
    """Relative error of the embedding scale that drafters of this target get; a new family's may be unknown.

    0.0 where the first layer is not given multiples of embedding rows (positions are added, say): then
    there is no scale to be wrong.
    """
    rows = target.embed_weight_VH[ids].float()
    if first.shape != rows.shape:
        return 0.0
    size = rows.square().sum(-1)
    used = size > 0
    factor = (first.float() * rows).sum(-1)[used] / size[used]
    left = (first.float()[used] - factor[:, None] * rows[used]).norm(dim=-1)
    if not bool((left <= _SCALE * first.float()[used].norm(dim=-1)).all()):
        return 0.0
    return float((factor / logit_rules(target.config)[0] - 1.0).abs().max())


def _captured(
    target: Target, layer_ids: Sequence[int], ids: Tensor, rows_T: Tensor, *, last_hidden: bool
) -> tuple[list[Tensor], Tensor | None]:
    tokens, hidden_size = rows_T.numel(), target.config.hidden_size
    buffer = PackBuffer.allocate(
        tokens,
        len(layer_ids),
        hidden_size,
        split=False,
        last_hidden=last_hidden,
        dtype=target.dtype,
        device=target.device,
    )
    with TapCapture(target, layer_ids, last_hidden=last_hidden) as capture:
        capture.run(ids, rows_T, buffer)
    return [buffer.tap(i, tokens, hidden_size) for i in range(len(layer_ids))], buffer.last_hidden


def _worst(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Largest over tensors of the mean over rows of |found - expected| / |expected|.

    By row, since the first token's activations are a thousand times larger than others' and would hide them.
    """
    return max(float(_row_errors(*pair).mean()) for pair in zip(found, expected, strict=True))


def _worst_sample(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Largest over tensors and samples of the median row's error.

    Rounding sends a few tokens of a half-precision batch to other experts than it sends them to alone, and
    those rows differ a lot; a shifted or polluted sample differs in most of its rows. In half precision a
    median needs a few rows to be one.
    """
    least = 1 if expected[0].dtype == torch.float32 else 5
    return max(
        float(rows.median())
        for pair in zip(found, expected, strict=True)
        for rows in _row_errors(*pair).split(_LENGTHS)
        if rows.numel() >= least
    )


def _row_errors(found: Tensor, expected: Tensor) -> Tensor:
    gap, size = (found.float() - expected.float()).norm(dim=-1), expected.float().norm(dim=-1)
    return gap / size.clamp(min=1e-6)
