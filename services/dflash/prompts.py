"""Held-out prompts as token ids, in the target's own chat template.

One JSON object a line with `prompt`, `messages` or `turns` (its first turn), and optionally `domain`
or `category` to report by.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from protocol.errors import DataError


class Asked(NamedTuple):
    messages: list[dict[str, str]]
    domain: str


class Prompt(NamedTuple):
    ids: tuple[int, ...]
    domain: str
    number: int = 0  # in its file; sampled answers are drawn by it, whoever decodes which part


def load_prompts(path: Path, tokenizer: Any, *, limit: int = 0, **template_options: Any) -> list[Prompt]:
    """The first `limit` prompts of a JSONL file (0: all). Raises `DataError` naming the line.

    `template_options` go to the chat template (`enable_thinking=False`, say).
    """
    return [
        Prompt(encode_chat(tokenizer, asked.messages, **template_options), asked.domain, number)
        for number, asked in enumerate(read_prompts(path, limit))
    ]


def read_prompts(path: Path, limit: int = 0) -> list[Asked]:
    """The same as text, for who has no tokenizer."""
    if not path.is_file():
        raise DataError(f"prompts {path}: no such file; name a JSONL file of prompts")
    prompts: list[Asked] = []
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), start=1):
        if not line.strip():
            continue
        if limit and len(prompts) == limit:
            break
        row = _parse(path, number, line)
        domain = str(row.get("domain") or row.get("category") or "")
        prompts.append(Asked(_messages(path, number, row), domain))
    if not prompts:
        raise DataError(
            f"prompts {path}: it holds none; one JSON object a line with `prompt`, `messages` or `turns`"
        )
    return prompts


def encode_chat(
    tokenizer: Any, messages: Sequence[dict[str, str]], **template_options: Any
) -> tuple[int, ...]:
    """Ids up to where the answer begins; without a chat template, the contents alone."""
    if not getattr(tokenizer, "chat_template", None):
        return tuple(tokenizer("\n".join(message["content"] for message in messages))["input_ids"])
    text = tokenizer.apply_chat_template(
        list(messages), tokenize=False, add_generation_prompt=True, **template_options
    )
    return tuple(tokenizer(text, add_special_tokens=False)["input_ids"])


def _parse(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise DataError(f"prompts {path}, line {number}: not JSON ({error})") from error
    if not isinstance(row, dict):
        raise DataError(f"prompts {path}, line {number}: {type(row).__name__}, must be an object")
    return row


def _messages(path: Path, number: int, row: dict[str, Any]) -> list[dict[str, str]]:
    if row.get("messages"):
        messages: list[dict[str, str]] = row["messages"]
        if not isinstance(messages, list) or not all(isinstance(m, dict) and "role" in m for m in messages):
            raise DataError(f"prompts {path}, line {number}: `messages` must be a list of {{role, content}}")
        messages = messages[:-1] if messages[-1]["role"] == "assistant" else messages
        if not messages:
            raise DataError(f"prompts {path}, line {number}: `messages` has an answer only, and no question")
        return messages
    text = row.get("prompt") or (row.get("turns") or [None])[0]
    if not isinstance(text, str):
        raise DataError(
            f"prompts {path}, line {number}: keys {sorted(row)}; needs `prompt`, `messages` or `turns`"
        )
    return [{"role": "user", "content": text}]
