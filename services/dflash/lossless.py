"""Whether greedy answers are the target's own: against its plain decoding, and by one forward of each answer.

    compare      equal token for token; where two answers part, the two tokens' logits must tie within
                 rounding (a block and a single token take different matrix products), and that is counted
    look_again   each token is the target's best after those before it, up to the same rounding, and the
                 answer ends where the target's would

Rounding in bfloat16 is so coarse that float32 alone proves much.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from services.dflash.growing_keys import growing_keys
from services.dflash.prompts import Prompt
from services.dflash.speculate import Generation
from services.dflash.target_model import Target

# Of the larger logit: what another order of summation may change. bf16 keeps 8 bits.
_TIE = {torch.float32: 1e-4, torch.float16: 2e-3, torch.bfloat16: 2e-2}
LOOK_ROWS = 1024  # of logits at a time: 0.6 GB in float32 at 152 K tokens


def compare(
    target: Target, prompts: Sequence[Prompt], drafted: Sequence[Generation], plain: Sequence[Generation]
) -> tuple[list[int], list[int]]:
    """(prompts parting at a tie, prompts parting otherwise) from plain decoding."""
    ties: list[int] = []
    differing: list[int] = []
    for index, (prompt, left, right) in enumerate(zip(prompts, drafted, plain, strict=False)):
        if left.tokens == right.tokens:
            continue
        place = next(
            (i for i, pair in enumerate(zip(left.tokens, right.tokens, strict=False)) if pair[0] != pair[1]),
            None,
        )
        tied = place is not None and _tied(
            target, prompt.ids + right.tokens[:place], left.tokens[place], right.tokens[place]
        )
        (ties if tied else differing).append(index)
    return ties, differing


@growing_keys()
@torch.inference_mode()
def look_again(
    target: Target,
    prompts: Sequence[Prompt],
    drafted: Sequence[Generation],
    max_new_tokens: int,
    stop_ids: Sequence[int],
    progress: Callable[[int, int], None] | None,
) -> tuple[list[int], list[int]]:
    """(prompts with a token that only ties with the target's best, prompts with a worse one or a wrong end).

    One forward of the whole answer, without a cache: what a fault of the cache did to it shows too. Where the
    target's logits are NaN no token is its best.
    """
    ties: list[int] = []
    differing: list[int] = []
    for index, (prompt, answer) in enumerate(zip(prompts, drafted, strict=True)):
        whole = len(answer.tokens) == _length(answer.tokens, max_new_tokens, stop_ids)
        right, best = _is_best(target, prompt.ids, answer.tokens)
        if not whole or not right:
            differing.append(index)
        elif not best:
            ties.append(index)
        if progress is not None:
            progress(len(prompts), len(prompts))
    return ties, differing


def _is_best(target: Target, prompt: Sequence[int], tokens: Sequence[int]) -> tuple[bool, bool]:
    """Whether each token is the target's best after those before it: up to rounding, and exactly."""
    ids_T = torch.tensor([*prompt, *tokens], device=target.device)
    hidden_TH = target.base(input_ids=ids_T[None], use_cache=False).last_hidden_state[0]
    right = best = True
    rows = hidden_TH[len(prompt) - 1 : -1].split(LOOK_ROWS)
    for part_RH, chosen_R in zip(rows, ids_T[len(prompt) :].split(LOOK_ROWS), strict=True):
        logits_RV = target.logits(part_RH)
        behind_R = logits_RV.amax(-1) - logits_RV.gather(1, chosen_R[:, None])[:, 0]
        allowed_R = _TIE[target.dtype] * logits_RV.abs_().amax(-1).clamp_(min=1.0)
        right = right and bool((behind_R <= allowed_R).all())
        best = best and bool((behind_R <= 0).all())
    return right, best


def _length(tokens: Sequence[int], max_new_tokens: int, stop_ids: Sequence[int]) -> int:
    """Of an answer that begins with these tokens: up to the first that stops it, or to the limit."""
    stops = (place for place, token in enumerate(tokens, start=1) if token in stop_ids)
    return min(next(stops, max_new_tokens), max_new_tokens)


@growing_keys()
@torch.inference_mode()
def _tied(target: Target, prefix: Sequence[int], left: int, right: int) -> bool:
    """Whether both tokens are the best after `prefix`, up to rounding."""
    ids = torch.tensor([list(prefix)], device=target.device)
    logits_V = target.logits(target.base(input_ids=ids, use_cache=False).last_hidden_state[0, -1])
    best = float(logits_V.max())
    worse = float(torch.minimum(logits_V[left], logits_V[right]))
    return best - worse <= _TIE[target.dtype] * max(1.0, float(logits_V.abs().max()))
