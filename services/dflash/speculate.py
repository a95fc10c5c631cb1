"""Speculative decoding with the real target and real key-value caches: what acceptance length means.

    prompt --target--> first token, taps of the prompt
    loop:  (clean token, masks) --drafter over cached context--> B-1 drafts
           (clean token, drafts) --target--> keep the agreeing prefix + one token of the target's own
           crop the target's cache to what was kept; its taps extend the drafter's context

Acceptance length: tokens a round yields, 1 to B. Lists are cut at the stop token and at the limit, and
the last block is shorter, as in z-lab's `dflash_generate`, so they can be compared one by one.
Output is the target's own: the same tokens greedily, the same distribution when sampled.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import DynamicCache

from services.dflash.attention import ServingAttention
from services.dflash.drafter import Drafter, KeyValue
from services.dflash.growing_keys import growing_keys
from services.dflash.sampling import Sampling, accept, draw
from services.dflash.taps import TapReader
from services.dflash.target_model import Target


@dataclass(frozen=True)
class Generation:
    """One answer: new tokens (with the stop token, if it came), tokens of each round, seconds."""

    tokens: tuple[int, ...]
    accepted: tuple[int, ...]  # acceptance lengths; empty for plain decoding
    prefill_s: float
    decode_s: float


class ContextCache:
    """The drafter's keys and values of the tokens decoded so far, one pair of buffers a layer."""

    def __init__(self, drafter: Drafter, capacity: int, dtype: torch.dtype, device: torch.device) -> None:
        config = drafter.config
        shape = (capacity, config.num_key_value_heads, config.head_dim)
        self.drafter, self.tokens = drafter, 0
        self._layers = [
            KeyValue(
                torch.empty(shape, dtype=dtype, device=device), torch.empty(shape, dtype=dtype, device=device)
            )
            for _ in range(config.num_hidden_layers)
        ]

    def extend(self, features_TF: Tensor) -> None:
        """Appends the target's tapped rows of the next tokens."""
        start, end = self.tokens, self.tokens + features_TF.shape[0]
        positions = torch.arange(start, end, device=features_TF.device)
        context = self.drafter.context(features_TF)
        for kept, new in zip(self._layers, self.drafter.context_key_values(context, positions), strict=True):
            kept.key[start:end], kept.value[start:end] = new
        self.tokens = end

    def layers(self) -> list[KeyValue]:
        return [KeyValue(layer.key[: self.tokens], layer.value[: self.tokens]) for layer in self._layers]


class _Decoder:
    """The target, its cache, and the sequence it has decoded."""

    def __init__(
        self,
        target: Target,
        prompt: Sequence[int],
        max_new_tokens: int,
        sampling: Sampling | None,
        *,
        crops: bool,
    ) -> None:
        self.target, self.sampling = target, sampling
        self.generator = sampling.generator(target.device) if sampling else None
        self.limit = len(prompt) + max_new_tokens
        self.sequence = list(prompt)
        self.cache = DynamicCache(config=target.model.config)  # type: ignore[arg-type]
        if crops:  # sliding and convolution layers then keep what a crop needs, and wait for one each round
            self.cache.activate_past_recording()
        self._crops, self._start = crops, 0
        self._before: dict[tuple[int, int], Tensor] = {}  # recurrent states as the latest forward found them

    def forward(self, ids: Sequence[int], *, last_only: bool = False) -> Tensor:
        """Logits [len(ids) or 1, V] of tokens that follow what the cache holds."""
        start = self._start = self.cache.get_seq_length()
        device = self.target.device
        if self._crops:
            self._before = {key: state.clone() for key, state in self._recurrent_states().items()}
        output = self.target.model(
            input_ids=torch.tensor([list(ids)], device=device),
            position_ids=torch.arange(start, start + len(ids), device=device)[None],
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=1 if last_only else 0,
        )
        return output.logits[0]

    def crop(self, tokens: int) -> None:
        """Keeps the first `tokens`, of which the sequence holds those of the latest forward.

        A negative argument is how many tokens Hugging Face's cache removes, from all but recurrent states
        (gated delta nets, Mamba): nothing can be taken out of those. They are put back to what they were
        before the latest forward, and the tokens kept go through the target once more.
        """
        surplus = self.cache.get_seq_length() - tokens
        if not surplus or not self._before:
            self.cache.crop(-surplus)
            return
        self.cache.crop(self._start - self.cache.get_seq_length())
        for key, state in self._recurrent_states().items():
            state.copy_(self._before[key])
        self.forward(self.sequence[self._start : tokens])
        self.cache.crop(0)

    def _recurrent_states(self) -> dict[tuple[int, int], Tensor]:
        """By layer and place in it; attention and plain convolution layers have none."""
        return {
            (layer, place): state
            for layer, held in enumerate(self.cache.layers)
            for place, state in getattr(held, "recurrent_states", {}).items()
            if state is not None
        }

    def choose(self, logits_V: Tensor) -> int:
        if self.sampling is None or self.generator is None:
            return int(logits_V.argmax())
        return int(draw(self.sampling.probabilities(logits_V[None]), self.generator))


@growing_keys()
@torch.inference_mode()
def speculate(
    target: Target,
    drafter: Drafter,
    prompt: Sequence[int],
    *,
    max_new_tokens: int,
    stop_ids: Sequence[int],
    block_size: int | None = None,
    sampling: Sampling | None = None,
) -> Generation:
    """Decodes one prompt with the drafter; `sampling` None is greedy. Drafter and target on one device.

    `block_size` may be smaller than the drafter's own; 1 would be plain decoding.
    """
    size = block_size or drafter.config.block_size
    decoder = _Decoder(target, prompt, max_new_tokens, sampling, crops=True)
    began = _now(target.device)
    with TapReader(target, drafter.config.target_layer_ids) as taps:
        first = decoder.choose(decoder.forward(prompt, last_only=True)[-1])
        decoder.crop(len(prompt))
        context = ContextCache(drafter, decoder.limit + size, target.dtype, target.device)
        context.extend(taps.features())
        decoder.sequence.append(first)
        prefilled = _now(target.device)

        accepted: list[int] = []
        stopped = first in stop_ids
        while len(decoder.sequence) < decoder.limit and not stopped:
            start = len(decoder.sequence) - 1  # of the clean token, which neither cache holds yet
            new = _round(decoder, drafter, context, min(size, decoder.limit - start))
            new = new[: decoder.limit - len(decoder.sequence)]
            new, stopped = _until_stop(new, stop_ids)
            decoder.sequence.extend(new)
            decoder.crop(start + len(new))
            context.extend(taps.features()[: len(new)])
            accepted.append(len(new))
    done = _now(target.device)
    return Generation(
        tuple(decoder.sequence[len(prompt) :]), tuple(accepted), prefilled - began, done - prefilled
    )


def _round(decoder: _Decoder, drafter: Drafter, context: ContextCache, size: int) -> list[int]:
    """Tokens that one draft and one verification yield, at least one."""
    clean = decoder.sequence[-1]
    if size == 1:
        return [decoder.choose(decoder.forward([clean])[-1])]
    draft_logits = _draft(decoder.target, drafter, context, clean, size)
    if decoder.sampling is None or decoder.generator is None:
        drafts = draft_logits.argmax(-1).tolist()
        own = decoder.forward([clean, *drafts]).argmax(-1).tolist()
        kept = next((k for k, draft in enumerate(drafts) if draft != own[k]), len(drafts))
        return [*drafts[:kept], own[kept]]
    q_KV = decoder.sampling.probabilities(draft_logits)
    draft_K = draw(q_KV, decoder.generator)
    p_BV = decoder.sampling.probabilities(decoder.forward([clean, *draft_K.tolist()]))
    kept, following = accept(draft_K, p_BV, q_KV, decoder.generator)
    return [*draft_K[:kept].tolist(), following]


def _draft(target: Target, drafter: Drafter, context: ContextCache, clean: int, size: int) -> Tensor:
    """Logits [size - 1, V] of a block's masked slots."""
    device = target.device
    clean_A = torch.tensor([clean], device=device)
    inputs_RH = drafter.block_inputs(target.embed_weight_VH, clean_A, size, target.dtype)
    positions_R = torch.arange(context.tokens, context.tokens + size, device=device)
    attend = ServingAttention(drafter.config, context.tokens, size, device)
    return target.logits(drafter(inputs_RH, positions_R, context.layers(), attend)[1:])


@growing_keys()
@torch.inference_mode()
def decode_plainly(
    target: Target,
    prompt: Sequence[int],
    *,
    max_new_tokens: int,
    stop_ids: Sequence[int],
    sampling: Sampling | None = None,
) -> Generation:
    """The target alone with the same cache, one token a forward: the yardstick of speed and losslessness."""
    decoder = _Decoder(target, prompt, max_new_tokens, sampling, crops=False)
    began = _now(target.device)
    token = decoder.choose(decoder.forward(prompt, last_only=True)[-1])
    decoder.sequence.append(token)
    prefilled = _now(target.device)
    while len(decoder.sequence) < decoder.limit and token not in stop_ids:
        token = decoder.choose(decoder.forward([token])[-1])
        decoder.sequence.append(token)
    done = _now(target.device)
    return Generation(tuple(decoder.sequence[len(prompt) :]), (), prefilled - began, done - prefilled)


def _until_stop(tokens: list[int], stop_ids: Sequence[int]) -> tuple[list[int], bool]:
    for place, token in enumerate(tokens):
        if token in stop_ids:
            return tokens[: place + 1], True
    return tokens, False


def _now(device: torch.device) -> float:
    """Seconds, after everything queued on the device has run."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
