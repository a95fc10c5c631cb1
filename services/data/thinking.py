"""Thinking blocks of answers: where they are, taking them out, and whether a template keeps them.

Thinking leads an answer's content (`<think>..</think>`, or only `</think>` where the prompt opened it),
or is a field of its own. With `data.thinking = strip` it goes, and the drafter learns the mode without
thinking; with `train` it stays, and a template that drops it from the last answer is refused: the
drafter would learn answers that the served model never gives in that place.
"""

from __future__ import annotations

import re
from typing import Any

from services.data.records import REASONING, BadSample, text_of

BLOCK = re.compile(r"\s*<think>(.*?)</think>\s*", re.DOTALL)
OPENED_BLOCK = re.compile(r"(.*?)</think>(?:\s*\n\s*|$)", re.DOTALL)  # not a tag that a sentence talks about


def split_thinking(message: dict[str, Any], at: int) -> tuple[str, str | None]:
    """(answer, its thinking or None) of the assistant message `at`. Raises BadSample for half a block."""
    content = text_of(message)
    field = next((message[key] for key in REASONING if message.get(key)), None)
    found = BLOCK.match(content)
    if found:
        return content[found.end() :], found.group(1)
    if content.lstrip().startswith("<think>"):
        raise BadSample("thinking", f"messages[{at}]: <think> is never closed")
    opened = OPENED_BLOCK.match(content)
    if opened and field is None and "<think>" not in content:
        return content[opened.end() :], opened.group(1)
    return content, field


def without_thinking(messages: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[str]]:
    """The messages with no thinking left in any answer, and a note for each that had some."""
    plain, notes = [], []
    for at, message in enumerate(messages):
        content, thinking = split_thinking(message, at) if message["role"] == "assistant" else ("", None)
        if thinking is not None:
            message = {key: value for key, value in message.items() if key not in REASONING}
            message["content"] = content
            notes.append("thinking stripped from an answer")
            if not content.strip() and not message.get("tool_calls"):
                raise BadSample("empty turn", f"messages[{at}]: nothing is left without its thinking")
        plain.append(message)
    return plain, notes


def check_thinking(answers: list[str], messages: list[dict[str, Any]]) -> list[str]:
    """A note for each earlier answer that was rendered without its thinking; BadSample if the last one was.

    `answers` are the rendered assistant turns, in order.
    """
    notes = []
    places = [at for at, message in enumerate(messages) if message["role"] == "assistant"]
    for rendered, at in zip(answers, places, strict=True):
        _, thinking = split_thinking(messages[at], at)
        if thinking is None or thinking.strip() in rendered:
            continue
        if at == places[-1]:
            raise BadSample(
                "thinking",
                f"messages[{at}]: the chat template drops the thinking of the last answer; "
                f"regenerate the data, give another data.chat_template, or set data.thinking = strip",
            )
        notes.append("thinking of an earlier answer dropped by the template")
    return notes
