"""One input row becomes a conversation or a tokenized sample, or is refused with the rule it breaks.

    {"messages": [{"role", "content", ...}], "tools": [...]}       OpenAI's form
    {"conversations": [{"from", "value"}], "system": "..."}        ShareGPT's form, or role and content
    {"prompt": text or messages, "completion": text or messages}   one exchange, rendered as a chat
    {"input_ids": [...], "loss_mask": [...]}                       tokenized, 1 where the model answered
    {"input_ids": [...], "prompt_length": n}                       tokenized, answered from token n on

Nothing is repaired silently: what is harmless (an empty system message, a last question without an
answer) is left out and counted by name, anything else is a BadSample. 20 us a conversation.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from protocol.errors import DataError

ROLES = {
    "system": "system", "developer": "developer", "user": "user", "human": "user", "assistant": "assistant",
    "gpt": "assistant", "tool": "tool", "function": "tool", "observation": "tool",
}  # fmt: skip
REASONING = ("reasoning_content", "reasoning", "thinking")
KEPT = ("tool_calls", "tool_call_id", "name", *REASONING)
FORBIDDEN = re.compile("[\x00\ud800-\udfff]")


class BadSample(DataError):
    """One row breaks a rule: `kind` is what skipped rows are counted by."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class Conversation(NamedTuple):
    """Messages in OpenAI's form: system first, no two answers in a row, the last one an answer."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    notes: tuple[str, ...]  # what was left out, by name


class Tokenized(NamedTuple):
    """A row that came with tokens."""

    input_ids: np.ndarray  # int64 [T]
    loss_mask: np.ndarray  # uint8 [T]


def parse(row: Any) -> Conversation | Tokenized:
    """Whatever form the row has. Raises BadSample."""
    if not isinstance(row, dict):
        raise BadSample("shape", f"a {type(row).__name__}; a row must be an object")
    if row.get("input_ids") is not None:
        return _tokenized(row)
    return _conversation(_messages_of(row), _tools(row.get("tools")))


def parse_prompt(row: Any) -> Conversation:
    """The messages to be answered: the same forms, without the last answer, if there is one."""
    if not isinstance(row, dict):
        raise BadSample("shape", f"a {type(row).__name__}; a row must be an object")
    if row.get("prompt") is not None and row.get("messages") is None:
        row = {"messages": _as_messages(row["prompt"], "user"), "tools": row.get("tools")}
    messages, notes = _cleaned(_messages_of(row))
    if messages and messages[-1]["role"] == "assistant":
        messages = messages[:-1]
    if not messages or messages[-1]["role"] not in ("user", "tool"):
        raise BadSample("no question", "no message of a user is left to be answered")
    _check_order(messages)
    return Conversation(messages, _tools(row.get("tools")), notes)


def _messages_of(row: dict[str, Any]) -> Sequence[Any]:
    if row.get("messages") is not None:
        messages = row["messages"]
    elif row.get("conversations") is not None:
        messages = row["conversations"]
    elif row.get("prompt") is not None and row.get("completion") is not None:
        messages = _as_messages(row["prompt"], "user") + _as_messages(row["completion"], "assistant")
    else:
        keys = ", ".join(sorted(map(str, row)))[:200]
        forms = "messages, conversations, prompt + completion or input_ids"
        raise BadSample("shape", f"has {keys}; must have {forms}")
    if not isinstance(messages, Sequence) or isinstance(messages, str):
        raise BadSample("shape", f"the conversation is a {type(messages).__name__}; must be a list")
    if isinstance(row.get("system"), str):
        return [{"role": "system", "content": row["system"]}, *messages]
    return messages


def text_of(message: dict[str, Any]) -> str:
    """The text of a parsed message; its content may be None beside tool calls."""
    return message["content"] or ""


def _cleaned(raw: Sequence[Any]) -> tuple[list[dict[str, Any]], tuple[str, ...]]:
    """Parsed messages without an empty system message, and a note if there was one."""
    messages = [_message(item, f"messages[{at}]") for at, item in enumerate(raw)]
    if messages and messages[0]["role"] in ("system", "developer") and not text_of(messages[0]).strip():
        return messages[1:], ("empty system message left out",)
    return messages, ()


def _conversation(raw: Sequence[Any], tools: list[dict[str, Any]] | None) -> Conversation:
    messages, notes = _cleaned(raw)
    last = max((at for at, message in enumerate(messages) if message["role"] == "assistant"), default=-1)
    if last < 0:
        raise BadSample(
            "no answer", f"none of {len(messages)} messages is an assistant's; nothing to learn from"
        )
    _check_order(messages)
    if last < len(messages) - 1:
        messages = messages[: last + 1]
        notes += ("last turn without an answer left out",)
    return Conversation(messages, tools, notes)


def _check_order(messages: list[dict[str, Any]]) -> None:
    before, calls = "", False
    for at, message in enumerate(messages):
        role, where = message["role"], f"messages[{at}]"
        if role in ("system", "developer") and at > 0:
            raise BadSample("order", f"{where} is a {role} message; only the first may be one")
        if role == "assistant" and before == "assistant":
            raise BadSample("order", f"{where}: two assistant messages in a row; merge them or drop one")
        if role == "assistant" and before not in ("user", "tool"):
            raise BadSample("order", f"{where}: an assistant message without a user's before it")
        if role == "tool" and not (before == "tool" or (before == "assistant" and calls)):
            raise BadSample("order", f"{where}: a tool result without a tool call before it")
        if role != "tool" and not text_of(message).strip() and not message.get("tool_calls"):
            raise BadSample("empty turn", f"{where}: an empty {role} turn; it needs text or tool calls")
        before, calls = role, bool(message.get("tool_calls")) or (role == "tool" and calls)


def _message(item: Any, where: str) -> dict[str, Any]:
    if not isinstance(item, dict):
        raise BadSample("shape", f"{where} is a {type(item).__name__}; must be an object")
    name = item.get("role") if item.get("role") is not None else item.get("from")
    if not isinstance(name, str) or name not in ROLES:
        known = ", ".join(ROLES)
        raise BadSample("role", f"{where} has the role {name!r}; must be one of {known}")
    content = _text(item["content"] if item.get("content") is not None else item.get("value"), where)
    message: dict[str, Any] = {"role": ROLES[name], "content": content}
    message.update({key: item[key] for key in KEPT if item.get(key) is not None})
    if "tool_calls" in message:
        message["tool_calls"] = _tool_calls(message["tool_calls"], where)
        if not message["tool_calls"]:
            del message["tool_calls"]
    for key in (*REASONING, "name", "tool_call_id"):
        if key in message:
            message[key] = _text(message[key], f"{where}.{key}")
    return message


def _text(content: Any, where: str) -> str:
    if content is None:
        return ""
    if isinstance(content, Sequence) and not isinstance(content, str):
        parts = [part if isinstance(part, dict) else {} for part in content]
        if any(part.get("type") != "text" or not isinstance(part.get("text"), str) for part in parts):
            raise BadSample("content", f"{where} has content parts other than text; only text is trained on")
        content = "".join(part["text"] for part in parts)
    if not isinstance(content, str):
        raise BadSample("content", f"{where} has content of type {type(content).__name__}; must be text")
    _check_text(content, where)
    return content


def _check_text(text: str, where: str) -> None:
    found = FORBIDDEN.search(text)
    if found:
        code = ord(found.group())
        what = f"the lone surrogate U+{code:04X}" if code else "a NUL character"
        raise BadSample("characters", f"{where} has {what} at character {found.start()}; remove it")


def _tool_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    """As serving engines hand them to templates: arguments given as JSON text become objects."""
    if not isinstance(calls, Sequence) or not all(isinstance(call, dict) for call in calls):
        raise BadSample("tool calls", f"{where}.tool_calls must be a list of objects")
    parsed = []
    for call in calls:
        function = call.get("function", call)
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise BadSample("tool calls", f"{where}.tool_calls has a call without a function name")
        arguments = function.get("arguments", {})
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments or "{}")
            except ValueError:
                raise BadSample("tool calls", f"{where}: arguments of {function['name']} not JSON") from None
        _check_text(json.dumps([function["name"], arguments], ensure_ascii=False), where)
        function = {"name": function["name"], "arguments": arguments}
        kept = {"id": call["id"]} if isinstance(call.get("id"), str) else {}
        parsed.append({**kept, "type": "function", "function": function})
    return parsed


def _tools(tools: Any) -> list[dict[str, Any]] | None:
    if isinstance(tools, str):
        try:
            tools = json.loads(tools) if tools.strip() else None
        except ValueError:
            raise BadSample("tools", "tools is text that is not JSON") from None
    if not tools:
        return None
    if not isinstance(tools, Sequence) or not all(isinstance(tool, dict) for tool in tools):
        raise BadSample("tools", "tools must be a list of JSON schemas")
    _check_text(json.dumps(tools, ensure_ascii=False), "tools")
    return list(tools)


def _as_messages(part: Any, role: str) -> list[Any]:
    if isinstance(part, str):
        return [{"role": role, "content": part}]
    if not isinstance(part, Sequence):
        raise BadSample("shape", f"the {role}'s part is a {type(part).__name__}; must be text or messages")
    return list(part)


def _tokenized(row: dict[str, Any]) -> Tokenized:
    ids = _integers(row["input_ids"], "input_ids")
    mask, prompt = row.get("loss_mask"), row.get("prompt_length")
    if (mask is None) == (prompt is None):
        raise BadSample("shape", "input_ids needs either loss_mask or prompt_length, not both and not none")
    if mask is None:
        if not isinstance(prompt, int) or isinstance(prompt, bool) or not 0 <= prompt <= len(ids):
            raise BadSample(
                "lengths", f"prompt_length is {prompt!r}; must be 0 to {len(ids)}, the row's tokens"
            )
        return Tokenized(ids, (np.arange(len(ids)) >= prompt).astype(np.uint8))
    loss_mask = _integers(mask, "loss_mask")
    if len(loss_mask) != len(ids):
        found = f"{len(ids)} input_ids and {len(loss_mask)} entries of loss_mask"
        raise BadSample("lengths", f"{found}; must be equal")
    if len(loss_mask) and (loss_mask.min() < 0 or loss_mask.max() > 1):
        raise BadSample("loss mask", "loss_mask has values other than 0 and 1")
    return Tokenized(ids, loss_mask.astype(np.uint8))


def _integers(values: Any, name: str) -> np.ndarray:
    """int64 [n] of a list of integers or truths; anything else in it is refused."""
    try:
        array = np.asarray(values)
    except (ValueError, OverflowError):
        array = np.empty((0, 0), object)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iub"):
        raise BadSample("shape", f"{name} must be a flat list of integers")
    return array.astype(np.int64)
