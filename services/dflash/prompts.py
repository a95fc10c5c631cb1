"""Held-out prompts as token ids, in the chat template that the drafter's data were made with.

One JSON object a line with `prompt`, `messages` or `conversations`, as for `draftmill prepare`, or `turns`
(its first turn), and optionally `domain` or `category` to report by.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import TemplateError

from protocol.errors import DataError
from services.data.records import BadSample, Conversation, parse_prompt, text_of
from services.data.turns import TODAY


class Asked(NamedTuple):
    conversation: Conversation
    domain: str
    where: str  # for messages


class Prompt(NamedTuple):
    ids: tuple[int, ...]
    domain: str
    number: int = 0  # in its file; sampled answers are drawn by it, whoever decodes which part


def load_prompts(path: Path, tokenizer: Any, *, limit: int = 0, **template_options: Any) -> list[Prompt]:
    """The first `limit` prompts of a JSONL file (0: all). Raises `DataError` naming the line.

    `template_options` go to the chat template (`enable_thinking=False`, say); `chat_template` is another one.
    """
    return [
        Prompt(encode_chat(tokenizer, asked, **template_options), asked.domain, number)
        for number, asked in enumerate(read_prompts(path, limit))
    ]


def read_prompts(path: Path, limit: int = 0) -> list[Asked]:
    """The same as text, for who has no tokenizer."""
    if not path.is_file():
        raise DataError(f"prompts {path}: no such file; name a JSONL file of prompts")
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise DataError(f"prompts {path}: not UTF-8 ({error}); convert it") from error
    prompts: list[Asked] = []
    for number, line in enumerate(lines, start=1):
        if limit and len(prompts) == limit:
            break
        if line.strip():
            prompts.append(_asked(line, f"prompts {path}, line {number}"))
    if not prompts:
        raise DataError(
            f"prompts {path}: it holds none; one JSON object a line with `prompt`, `messages` or `turns`"
        )
    return prompts


def encode_chat(tokenizer: Any, asked: Asked, **template_options: Any) -> tuple[int, ...]:
    """Ids up to where the answer begins; without a chat template, the contents alone.

    The template is told the day that `draftmill prepare` tells it, so that figures do not depend on theirs.
    """
    messages, tools = asked.conversation.messages, asked.conversation.tools
    if not (template_options.get("chat_template") or getattr(tokenizer, "chat_template", None)):
        return tuple(tokenizer("\n".join(map(text_of, messages)))["input_ids"])
    try:
        text = tokenizer.apply_chat_template(
            messages, tools=tools, tokenize=False, add_generation_prompt=True,
            strftime_now=TODAY.strftime, **template_options,
        )  # fmt: skip
    except (TemplateError, TypeError, ValueError) as error:
        raise DataError(f"{asked.where}: the chat template refuses it: {error}") from error
    return tuple(tokenizer(text, add_special_tokens=False)["input_ids"])


def _asked(line: str, where: str) -> Asked:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise DataError(f"{where}: not JSON ({error})") from error
    if not isinstance(row, dict):
        raise DataError(f"{where}: {type(row).__name__}, must be an object")
    row = {name: value for name, value in row.items() if value not in (None, "", [])}
    if "turns" in row and not {"prompt", "messages", "conversations"} & row.keys():
        turns = row["turns"]
        if not isinstance(turns, list) or not isinstance(turns[0], str):
            raise DataError(f"{where}: `turns` must be a list of texts, the first of which is asked")
        row["prompt"] = turns[0]
    if not {"prompt", "messages", "conversations"} & row.keys():
        raise DataError(f"{where}: keys {sorted(row)}; needs `prompt`, `messages` or `turns`")
    try:
        conversation = parse_prompt(row)
    except BadSample as error:
        raise DataError(f"{where}: {error}") from error
    return Asked(conversation, str(row.get("domain") or row.get("category") or ""), where)
