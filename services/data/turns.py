"""Finds every assistant turn in a rendered chat, for any template, or says that it cannot.

A template is a program, so its output is searched by experiment, not by pattern:

    full     <|user|>Hi<|end|><|assistant|><think>..</think>Hello there<|end|><|user|>...
    prompt   the messages before the turn, with the generation prompt: what a server sends
             <|user|>Hi<|end|><|assistant|>                       -> the turn starts where it ends
    shown    the same chat with the answer replaced by a word that occurs nowhere else
             <|user|>Hi<|end|><|assistant|>WORD<|end|><|user|>... -> the text after WORD ends `full`
                                                                     too: there the answer ends
    then the end token, which is what follows an answer that is last.

Templates that rewrite earlier turns (drop their thinking, move the system prompt) break `prompt`; then
the turn starts where WORD does, if all before it is equal. Whatever agrees with neither is refused.
Two renderings a turn, 40 us each.
"""

from __future__ import annotations

import hashlib
import json
import re
from datetime import datetime
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from jinja2 import TemplateError

from protocol.errors import ModelError
from services.data.records import BadSample, Conversation, text_of
from services.data.thinking import check_thinking, split_thinking, without_thinking

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

WORD = "zq7answer7qz"
TODAY = datetime(2025, 1, 1)
"""What templates that print the date print, so that preparing twice gives the same data."""


class Turn(NamedTuple):
    """Characters [start, stop) of the rendered chat are what the model generates, end token included."""

    start: int
    stop: int
    as_served: bool  # behind exactly the prompt that a server sends


class Rendered(NamedTuple):
    text: str
    turns: tuple[Turn, ...]
    notes: tuple[str, ...]


class ChatTemplate:
    """A chat template as it will be served: `train` with thinking, `strip` without.

    `text` overrides the tokenizer's own template. Raises ModelError if there is none, or if it is broken.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, thinking: Literal["train", "strip"], text: str | None = None
    ) -> None:
        self._tokenizer = tokenizer
        self._thinking = thinking
        self._text = text if text is not None else _own_template(tokenizer)
        self._options: dict[str, Any] = {
            "enable_thinking": thinking == "train",
            "thinking": thinking == "train",
        }
        identity = json.dumps([self._text, self._options, TODAY.isoformat()], sort_keys=True)
        self.fingerprint = hashlib.sha256(identity.encode()).hexdigest()
        special = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
        special.update(tokenizer.all_special_tokens)
        self._special = re.compile(
            "|".join(map(re.escape, sorted(special, key=len, reverse=True))) or r"(?!)"
        )
        self.end = self._find_end()
        question = [{"role": "user", "content": "a"}]
        self._prompts = self.render(question, prompt=True) != self.render(question)

    def render(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        *,
        prompt: bool = False,
    ) -> str:
        """The chat as text; with `prompt`, up to where the model would answer. Raises BadSample."""
        try:
            text = self._tokenizer.apply_chat_template(
                messages, tools=tools, chat_template=self._text, tokenize=False,  # type: ignore[arg-type]
                add_generation_prompt=prompt, strftime_now=TODAY.strftime, **self._options,
            )  # fmt: skip
        except (TemplateError, TypeError, ValueError) as error:
            raise BadSample("template", f"the chat template refuses it: {error}") from None
        assert isinstance(text, str)
        return text

    def find_turns(self, conversation: Conversation) -> Rendered:
        """The rendered conversation and its assistant turns. Raises BadSample if one cannot be located."""
        messages, tools, notes = conversation.messages, conversation.tools, list[str]()
        if self._thinking == "strip":
            messages, notes = without_thinking(messages)
        full = self.render(messages, tools)
        turns: list[Turn] = []
        for at, message in enumerate(messages):
            if message["role"] == "assistant":
                turn = self._find_turn(full, messages, tools, at)
                if turns and turn.start < turns[-1].stop:
                    raise _lost(at, "it overlaps the turn before it")
                turns.append(turn)
        if not turns[-1].as_served:
            notes.append("last answer not behind the prompt that a server sends")
        if self._thinking == "train":
            notes += check_thinking([full[turn.start : turn.stop] for turn in turns], messages)
        return Rendered(full, tuple(turns), (*conversation.notes, *notes))

    def _find_turn(
        self, full: str, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, at: int
    ) -> Turn:
        around = self._around(messages, tools, at)
        if around is not None and full.endswith(around[1]):
            before, answer_stop = around[0], len(full) - len(around[1])
        elif messages[at].get("tool_calls"):
            before, after = self._around_call(messages, tools, at)
            answer_stop = len(full) - _common_suffix(full, after)
        else:
            raise _lost(at, "the text behind it depends on it")
        prompt = self.render(messages[:at], tools, prompt=True)
        lead = before[len(prompt) :]
        before = before if self._prompts else before.rstrip(" ")  # without a prompt, a space is generated
        served = full.startswith(prompt) and len(prompt) <= answer_stop
        if served and (self._prompts or not lead.strip()):
            start = len(prompt)
        elif full.startswith(before):
            start = len(before)
        else:
            raise _lost(at, "neither the generation prompt nor an equal beginning leads to it")
        self._check_text(full[start:answer_stop], messages[at], at)
        return Turn(start, self._stop(full, answer_stop, at), served)

    def _around(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, at: int
    ) -> tuple[str, str] | None:
        """What is rendered before and after the answer `at`, if it were one word and called no tool.

        None if the template refuses such a chat because a tool result follows.
        """
        shown = [*messages[:at], {"role": "assistant", "content": WORD}, *messages[at + 1 :]]
        try:
            rendered = self.render(shown, tools)
        except BadSample:
            if messages[at].get("tool_calls"):
                return None
            raise
        return _split(rendered, at)

    def _around_call(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, at: int
    ) -> tuple[str, str]:
        """The same with the last tool call's argument replaced, for templates that insist on the call."""
        *calls, last = messages[at]["tool_calls"]
        function = {"name": last["function"]["name"], "arguments": {WORD: 1}}
        message = {**messages[at], "tool_calls": [*calls, {**last, "function": function}]}
        before, after = _split(self.render([*messages[:at], message, *messages[at + 1 :]], tools), at)
        if not self._special.search(after):
            raise _lost(at, "its tool call is followed by no special token")
        return before[: before.rfind(text_of(message))] if text_of(message) else before, after

    def _stop(self, full: str, answer_stop: int, at: int) -> int:
        """Past the end token of the turn whose answer ends at `answer_stop`."""
        if full.startswith(self.end, answer_stop):
            return answer_stop + len(self.end)
        found = self._special.search(full, answer_stop)
        if found is None or not self._special.search(self.end):
            raise _lost(at, f"its end {self.end!r} is missing")
        return found.end()

    def _find_end(self) -> str:
        """What follows an answer that is last, up to its first special token; "" if nothing does."""
        probe = [{"role": "user", "content": "a"}, {"role": "assistant", "content": WORD}]
        try:
            _, tail = _split(self.render(probe), 1)
        except BadSample as error:
            raise ModelError(f"chat template: cannot render a question and an answer ({error})") from None
        found = self._special.search(tail)
        return tail[: found.end()] if found else tail.rstrip()

    def _check_text(self, rendered: str, message: dict[str, Any], at: int) -> None:
        content, _ = split_thinking(message, at)
        wanted = [content.strip(), *(call["function"]["name"] for call in message.get("tool_calls", ()))]
        if not all(text in rendered for text in wanted):
            raise _lost(at, "the template changes its text")


def _own_template(tokenizer: PreTrainedTokenizerBase) -> str:
    try:
        return tokenizer.get_chat_template()
    except ValueError:
        raise ModelError(
            f"tokenizer {tokenizer.name_or_path}: has no chat template; set data.chat_template to a file"
        ) from None


def _split(rendered: str, at: int) -> tuple[str, str]:
    before, word, after = rendered.partition(WORD)
    if not word or WORD in after:
        raise _lost(at, "the template does not print an answer exactly once")
    return before, after


def _common_suffix(one: str, other: str) -> int:
    """Length of the longest common ending."""
    length = 0
    for a, b in zip(reversed(one), reversed(other), strict=False):
        if a != b:
            break
        length += 1
    return length


def _lost(at: int, reason: str) -> BadSample:
    return BadSample("template", f"messages[{at}] cannot be located in the rendered chat: {reason}")
