"""One line of acceptance.jsonl: what was found of one checkpoint. Flat, JSON-ready, never NaN.

checkpoint, timeline, step, epoch       which weights; epoch of their last step, from 0
acceptance_length, .._by_request        with the target, on eval.prompts; between 1 and block_size
by_position                             share of rounds that kept the draft in slot 1, 2, ..
lossless, ties, differing               are the answers the target's own: see services/dflash/lossless.py
held_out_loss, .._accuracy, ..          on the held-out samples, if there are any
sampling                                None: greedy
seconds, at                             taken, rests included; unix time of the end
best_acceptance_length, best_step       of the history up to here, this line included
"""

from __future__ import annotations

from typing import Any

from services.dflash.eval_result import EvalResult
from services.evaluator.agenda import Recorded
from services.evaluator.held_out import HeldOut

_TAKEN = (
    "acceptance_length", "acceptance_length_by_request", "acceptance_length_by_domain", "by_position",
    "lossless", "prompts", "tokens", "block_size", "max_new_tokens", "sampling",
)  # fmt: skip


def line_of(
    found: Recorded, result: EvalResult, held_out: HeldOut | None, *, seconds: float, at_unix_s: float
) -> dict[str, Any]:
    """Without the best ones, which depend on the history."""
    figures = result.to_dict()
    return {
        "checkpoint": found.name, "timeline": found.timeline, "step": found.step, "epoch": found.epoch,
        **{name: figures[name] for name in _TAKEN},
        "ties": len(result.ties), "differing": len(result.differing),
        **(held_out.to_dict() if held_out else {}),
        "seconds": seconds, "at": at_unix_s,
    }  # fmt: skip
