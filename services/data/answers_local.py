"""Answers by our own batched generation: left-padded batches, a cache, one random stream an answer.

A window of prompts is sorted by length and cut into batches of at most `batch_tokens` positions (prompt
and answer limit), so little is padded; a batch halves when half of its answers have ended. Simple on purpose:
a serving engine (see answers_server.py) is several times faster for large sets.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from services import seeds
from services.config.schema import Config
from services.data.convert import read_template
from services.data.records import BadSample
from services.data.regenerate import Answer, Ask, Asked, Refused
from services.data.turns import ChatTemplate
from services.dflash.counter_random import hash_bits
from services.dflash.growing_keys import growing_keys
from services.dflash.sampling import Sampling, pick
from services.dflash.target_model import Target, load_target, load_tokenizer


def local_answers(config: Config, ask: Ask, *, device: str, batch_tokens: int) -> LocalAnswers:
    """Load the target of `config` on `device` ("" for a GPU if there is one). Raises ModelError."""
    tokenizer = load_tokenizer(config.model.path)
    template = ChatTemplate(tokenizer, config.data.thinking, read_template(config.data.chat_template))
    target = load_target(
        config.model.path,
        dtype=config.model.dtype,
        device=device or ("cuda" if torch.cuda.is_available() else "cpu"),
        attention=config.model.attention,
    )
    return LocalAnswers(target, tokenizer, template, ask, batch_tokens=batch_tokens)


class Prompt(NamedTuple):
    asked: Asked
    ids: list[int]


class LocalAnswers:
    """Answers of a loaded target. `template` renders in the mode that is asked for."""

    def __init__(
        self, target: Target, tokenizer: Any, template: ChatTemplate, ask: Ask, *, batch_tokens: int
    ) -> None:
        self._target = target
        self._tokenizer = tokenizer
        self._template = template
        self._ask = ask
        self._batch_tokens = batch_tokens
        self._limit = getattr(target.config, "max_position_embeddings", None) or 2**31

    def answers(self, asked: Sequence[Asked]) -> Iterator[Answer | Refused]:
        """Batch by batch, shortest prompts first."""
        prompts = []
        for one in asked:
            prompt = self._prompt(one)
            if isinstance(prompt, Refused):
                yield prompt
            else:
                prompts.append(prompt)
        prompts.sort(key=lambda prompt: len(prompt.ids))
        for batch in self._batches(prompts):
            for prompt, ids in zip(batch, self._generate(batch), strict=True):
                yield self._answer(prompt, ids)

    def _prompt(self, asked: Asked) -> Prompt | Refused:
        try:
            text = self._template.render(asked.messages, asked.tools, prompt=True)
        except BadSample as error:
            return Refused(asked, str(error))
        ids = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        if len(ids) + self._ask.max_new_tokens > self._limit:
            wanted = f"{len(ids)} tokens and {self._ask.max_new_tokens} of an answer"
            return Refused(asked, f"{wanted}, more than the model's {self._limit} positions")
        return Prompt(asked, ids)

    def _batches(self, prompts: list[Prompt]) -> Iterator[list[Prompt]]:
        batch: list[Prompt] = []
        for prompt in prompts:
            longest = len(prompt.ids) + self._ask.max_new_tokens
            if batch and (len(batch) + 1) * longest > self._batch_tokens:
                yield batch
                batch = []
            batch.append(prompt)
        if batch:
            yield batch

    @growing_keys()
    @torch.inference_mode()
    def _generate(self, batch: list[Prompt]) -> list[list[int]]:
        """The answers' ids, up to and with a stop token, or up to the limit."""
        device = self._target.device
        width = max(len(prompt.ids) for prompt in batch)
        pads = [width - len(prompt.ids) for prompt in batch]
        ids_BT = torch.tensor(
            [[0] * pad + prompt.ids for pad, prompt in zip(pads, batch, strict=True)], device=device
        )
        mask_BT = torch.tensor([[0] * pad + [1] * (width - pad) for pad in pads], device=device)
        position_BT = (mask_BT.cumsum(-1) - 1).clamp(min=0)
        draws = Draws(self._ask, [prompt.asked for prompt in batch], device)
        answers: list[list[int]] = [[] for _ in batch]
        rows = list(range(len(batch)))  # answers that the batch still computes
        cache = None
        for step in range(self._ask.max_new_tokens):
            output = self._target.model(
                input_ids=ids_BT, attention_mask=mask_BT, position_ids=position_BT,
                past_key_values=cache, use_cache=True, logits_to_keep=1,
            )  # fmt: skip
            cache = output.past_key_values
            chosen = draws.choose(output.logits[:, -1], rows, step)
            for row, token in zip(rows, chosen.tolist(), strict=True):
                if not self._ended(answers[row]):
                    answers[row].append(token)
            going = [place for place, row in enumerate(rows) if not self._ended(answers[row])]
            if not going:
                break
            ids_BT, position_BT = chosen[:, None], position_BT[:, -1:] + 1
            mask_BT = torch.cat([mask_BT, mask_BT.new_ones(len(rows), 1)], dim=1)
            if 2 * len(going) <= len(rows) and all(hasattr(c, "batch_select_indices") for c in cache.layers):
                kept = torch.tensor(going, device=device)
                cache.batch_select_indices(kept)
                ids_BT, position_BT, mask_BT = ids_BT[kept], position_BT[kept], mask_BT[kept]
                rows = [rows[place] for place in going]
        return answers

    def _ended(self, answer: list[int]) -> bool:
        return bool(answer) and answer[-1] in self._target.stop_ids

    def _answer(self, prompt: Prompt, ids: list[int]) -> Answer:
        stopped = self._ended(ids)
        text = self._tokenizer.decode(
            ids[:-1] if stopped else ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        message = {"role": "assistant", "content": text}
        return Answer(
            prompt.asked, message, "stop" if stopped else "length", (prompt.ids + ids, len(prompt.ids))
        )


class Draws:
    """Next tokens of a batch. A draw is a function of its answer's name and step, not of its neighbours."""

    def __init__(self, ask: Ask, asked: Sequence[Asked], device: torch.device) -> None:
        self._sampling = Sampling(ask.temperature, ask.top_p) if ask.temperature else None
        named = [seeds.seed("answer", ask.seed, *one.source, one.number) for one in asked]
        self._low_N = torch.tensor([name & 0xFFFFFFFF for name in named], device=device)
        self._high_N = torch.tensor([name >> 32 for name in named], device=device)

    def choose(self, logits_BV: Tensor, rows: list[int], step: int) -> Tensor:
        """int64 [B], of the answers `rows`; the greedy choice at temperature 0."""
        if self._sampling is None:
            return logits_BV.argmax(-1)
        row_B = torch.tensor(rows, device=logits_BV.device)
        name_B = hash_bits(self._low_N[row_B], self._high_N[row_B], 0)
        return pick(
            self._sampling.probabilities(logits_BV), hash_bits(name_B, torch.full_like(name_B, step), 1)
        )
