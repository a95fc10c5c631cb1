"""Greedy speculative decoding of many prompts at a time: the tokens and lists of `speculate`, ties aside.

    waiting prompts --one forward, padded on the right--> rows of the batch
    round:  one draft of all rows' blocks -> one forward of the target -> each row keeps its own prefix
    rows that have ended are dropped, and as many waiting prompts take their place

Decoding a small model on a GPU is bound by the host, which launches as many kernels for one row as for fifty.
A CPU gains from larger products (`benchmarks/decoding.py`). Long prompts come first, so that buffers never
grow and a lack of memory shows at once.

What rows differ in (start, limit, size of the last block, stop) is in masks and counts on the device; a round
moves one small tensor to the host. Memory: keys and values of at most TOKENS tokens.

Shapes: B rows, S slots of a block, D = S - 1 drafts, R = B * S.
"""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache
from transformers.cache_utils import DynamicLayer

from services.dflash.drafter import Drafter
from services.dflash.growing_keys import growing_keys
from services.dflash.row_cache import Cursor, RowLayer, RowsAttention, causal, hiding_mask
from services.dflash.speculate import Generation
from services.dflash.taps import TapReader
from services.dflash.target_model import Target

TOKENS = 32_768  # rows * capacity: 4.8 GB of bfloat16 keys and values at Qwen3-8B, 0.8 GB at SmolLM2-135M
_STEP = 16  # lengths of buffers and masks: kernels want aligned rows, and fewer shapes are allocated
MASKED_ATTENTION = ("sdpa", "eager")  # which take a mask of one's own
_ROPES_BY_LENGTH = ("dynamic", "longrope")  # their frequencies would follow the longest row


def can_batch(target: Target) -> bool:
    """Whether rows of one batch may stand at different positions: a mask and positions say all of it.

    Not with sliding windows, recurrent states or an index in the cache, attention other than "sdpa" and
    "eager" or of a model's own making (biases by distance, say), and positions of several dimensions.
    """
    taken = inspect.signature(target.base.forward).parameters
    return (
        target.config._attn_implementation in MASKED_ATTENTION
        and getattr(target.base, "_supports_attention_backend", False)
        and {"attention_mask", "position_ids", "past_key_values"} <= taken.keys()
        and rows_may_differ(target.config)
    )


def rows_may_differ(config: Any) -> bool:
    """`can_batch`, as far as the configuration of the text tower tells."""
    layers = DynamicCache(config=config).layers
    rope = getattr(config, "rope_parameters", None) or {}
    ropes = [rope, *(by_type for by_type in rope.values() if isinstance(by_type, dict))]
    return (
        len(layers) == config.num_hidden_layers
        and all(type(layer) is DynamicLayer for layer in layers)
        and not any("mrope_section" in one or one.get("rope_type") in _ROPES_BY_LENGTH for one in ropes)
    )


@growing_keys()
@torch.inference_mode()
def speculate_batch(
    target: Target,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    stop_ids: Sequence[int],
    block_size: int | None = None,
    rows: int = 32,
    progress: Callable[[int, int], None] | None = None,
) -> list[Generation]:
    """Decodes `prompts` with the drafter, up to `rows` at a time; for targets that `can_batch`.

    Answers in the order of the prompts, without seconds (0.0): a row's are those of its whole batch.
    `progress` (prompts done, of all) is called at every round; what it raises ends the decoding.
    """
    assert can_batch(target), "this target's prompts are decoded one by one"
    answers = [_Answer(prompt, len(prompt) + max_new_tokens) for prompt in prompts]
    waiting = deque(sorted(answers, key=lambda answer: -answer.limit))
    with TapReader(target, drafter.config.target_layer_ids) as taps:
        batch = _Batch(target, drafter, taps, block_size or drafter.config.block_size, stop_ids, rows)
        while waiting or batch.working():
            batch.refill(waiting)
            batch.round()
            if progress is not None:
                progress(sum(answer.ended for answer in answers), len(answers))
    return [Generation(tuple(answer.tokens), tuple(answer.accepted), 0.0, 0.0) for answer in answers]


@dataclass(eq=False)
class _Answer:
    """What the host knows of a row."""

    prompt: Sequence[int]
    limit: int  # tokens, prompt included
    tokens: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    ended: bool = False

    @property
    def start(self) -> int:
        """Position of the latest token, the clean one of the next block: in neither cache yet."""
        return len(self.prompt) + len(self.tokens) - 1

    def add(self, tokens: Sequence[int], stop_ids: Sequence[int]) -> None:
        self.tokens.extend(tokens)
        self.ended = tokens[-1] in stop_ids or self.start + 1 >= self.limit


class _Rows:
    """Rows that go through the models together: caches and state on the device, answers on the host."""

    def __init__(self, target: Target, drafter: Drafter, capacity: int) -> None:
        self.cursor = Cursor()
        self.cache = Cache(
            layers=[RowLayer(self.cursor, capacity) for _ in range(target.config.num_hidden_layers)]
        )
        self.context = [RowLayer(self.cursor, capacity) for _ in range(drafter.config.num_hidden_layers)]
        self.answers: list[_Answer] = []
        self.state_3B = torch.empty(3, 0)  # clean token, its position, limit

    @property
    def layers(self) -> list[RowLayer]:
        return [*self.cache.layers, *self.context]  # type: ignore[list-item]

    def regroup(self, kept: Sequence[int], more: _Rows | None, capacity: int) -> None:
        """Keeps the rows at these places and appends those of `more`."""
        kept_B = torch.tensor(kept, dtype=torch.int64, device=self.state_3B.device)
        for number, layer in enumerate(self.layers):
            layer.regroup(kept_B, more.layers[number] if more else None, capacity)
        self.answers = [self.answers[place] for place in kept] + (more.answers if more else [])
        self.state_3B = self.state_3B.index_select(1, kept_B)
        if more is not None:
            self.state_3B = torch.cat((self.state_3B, more.state_3B), dim=1)


class _Batch:
    """The rows at work, and the models that they go through."""

    def __init__(
        self, target: Target, drafter: Drafter, taps: TapReader, size: int, stop_ids: Sequence[int], most: int
    ) -> None:
        self.target, self.drafter, self.taps = target, drafter, taps
        self.size, self.most, self.stop_ids = size, most, stop_ids
        self.stops = torch.tensor(stop_ids, dtype=torch.int64, device=target.device)
        self.slots_S = torch.arange(size, device=target.device)
        self.rows: _Rows | None = None

    def working(self) -> list[int]:
        """Places of the rows that have not ended."""
        answers = self.rows.answers if self.rows else []
        return [place for place, answer in enumerate(answers) if not answer.ended]

    def refill(self, waiting: deque[_Answer]) -> None:
        """Drops ended rows and takes waiting prompts, the longest first, where that saves rounds."""
        working = self.working()
        if not working:
            self.rows = None  # before others take their memory
        staying = [self.rows.answers[place] for place in working] if self.rows else []
        longest = max(answer.limit for answer in (*staying, *([waiting[0]] if waiting else [])))
        capacity = _aligned(longest + self.size)
        allowed = max(1, min(self.most, TOKENS // capacity))
        free = min(allowed - len(working), len(waiting))
        if free > 0 and (not working or free * 4 >= allowed or free == len(waiting)):
            more = self._prefill([waiting.popleft() for _ in range(free)], capacity)
            if self.rows is None:
                self.rows = more
            else:
                self.rows.regroup(working, more, capacity)
        elif self.rows is not None and len(working) * 2 <= len(self.rows.answers):
            self.rows.regroup(working, None, capacity)

    def _prefill(self, answers: list[_Answer], capacity: int) -> _Rows:
        """New rows with their first tokens. No mask: a causal row never sees the padding on its right."""
        device, rows = self.target.device, _Rows(self.target, self.drafter, capacity)
        lengths = [len(answer.prompt) for answer in answers]
        ids_BP = torch.zeros(len(answers), max(lengths), dtype=torch.int64)
        for row, answer in enumerate(answers):
            ids_BP[row, : lengths[row]] = torch.tensor(answer.prompt)
        positions_BP = torch.arange(max(lengths), device=device).expand(ids_BP.shape)
        rows.answers = answers
        rows.cursor.move(positions_BP, max(lengths))
        hidden_BPH = self._forward(rows, ids_BP.to(device), positions_BP, None)
        last_B = torch.tensor(lengths, device=device) - 1
        last_BH = hidden_BPH[torch.arange(len(answers), device=device), last_B]
        for answer, first in zip(answers, self.target.logits(last_BH).argmax(-1).tolist(), strict=True):
            answer.add([first], self.stop_ids)
        state = [
            (answer.tokens[-1], answer.start, answer.start + 1 if answer.ended else answer.limit)
            for answer in answers
        ]
        rows.state_3B = torch.tensor(state, device=device).T
        return rows

    def round(self) -> None:
        """One block of every row: drafted, verified, and each row's own prefix kept."""
        rows = self.rows
        if rows is None or not self.working():
            return
        clean_B, start_B, limit_B = rows.state_3B.unbind()
        index_BS = start_B[:, None] + self.slots_S
        rows.cursor.move(index_BS, _aligned(max(answer.start for answer in rows.answers) + self.size))
        drafts_BD = self._draft(rows, clean_B, torch.minimum(start_B + self.size, limit_B))
        own_BS = self._verify(rows, torch.cat((clean_B[:, None], drafts_BD), 1), limit_B)

        agreed_B = (drafts_BD == own_BS[:, :-1]).cumprod(1).sum(1)
        unstopped_B = (own_BS[:, :, None] != self.stops).all(-1).cumprod(1).sum(1)
        count_B = torch.minimum(torch.minimum(agreed_B, unstopped_B) + 1, limit_B - 1 - start_B).clamp(min=0)
        start_B = start_B + count_B
        # a row that has stopped keeps nothing from now on, as one at its limit
        limit_B = torch.where(unstopped_B < count_B, start_B + 1, limit_B)
        clean_B = own_BS.gather(1, (count_B - 1).clamp(min=0)[:, None])[:, 0]
        rows.state_3B = torch.stack((clean_B, start_B, limit_B))
        self._tell(rows, torch.cat((count_B[:, None], own_BS), 1).tolist())

    def _draft(self, rows: _Rows, clean_B: Tensor, end_B: Tensor) -> Tensor:
        """The drafter's best tokens [B, D] for the masked slots; `end_B` as in `RowsAttention`."""
        target, drafter = self.target, self.drafter
        inputs_RH = drafter.block_inputs(target.embed_weight_VH, clean_B, self.size, target.dtype)
        attend = RowsAttention(drafter.config, rows.context, rows.cursor, end_B, target.dtype)
        context = [layer.both for layer in rows.context]
        hidden_RH = drafter(inputs_RH, rows.cursor.index_BS.flatten(), context, attend)
        masked_MH = hidden_RH.unflatten(0, (-1, self.size))[:, 1:].flatten(0, 1)  # flat: one product, not B
        return target.logits(masked_MH).argmax(-1).view(len(rows.answers), self.size - 1)

    def _verify(self, rows: _Rows, ids_BS: Tensor, limit_B: Tensor) -> Tensor:
        """The target's own tokens [B, S] after each slot."""
        mask = hiding_mask(causal(rows.cursor), self.target.dtype)
        positions_BS = torch.minimum(rows.cursor.index_BS, limit_B[:, None] - 1)  # where a table may end
        return self.target.logits(self._forward(rows, ids_BS, positions_BS, mask)).argmax(-1)

    def _forward(self, rows: _Rows, ids_BS: Tensor, positions_BS: Tensor, mask: Tensor | None) -> Tensor:
        """The target's last hidden rows [B, S, H]; its taps extend the drafter's context."""
        output = self.target.base(
            input_ids=ids_BS,
            position_ids=positions_BS,
            attention_mask=mask,
            past_key_values=rows.cache,
            use_cache=True,
        )
        context_RH = self.drafter.context(self.taps.batch().flatten(0, 1))
        found = self.drafter.context_key_values(context_RH, rows.cursor.index_BS.flatten())
        for layer, key_value in zip(rows.context, found, strict=True):
            layer.write(key_value)
        hidden_BSH: Tensor = output.last_hidden_state
        return hidden_BSH

    def _tell(self, rows: _Rows, found: list[list[int]]) -> None:
        """`found`: how many tokens each row keeps, and the tokens."""
        for answer, (count, *tokens) in zip(rows.answers, found, strict=True):
            if not answer.ended:
                answer.add(tokens[:count], self.stop_ids)
                answer.accepted.append(count)


def _aligned(tokens: int) -> int:
    return -(-tokens // _STEP) * _STEP
