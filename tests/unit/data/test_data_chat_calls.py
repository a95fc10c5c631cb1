"""Random chats with thinking, tool calls and tool results: supervised is what the target would say."""

import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_data_chat import TOOLS, expected, random_text, supervised
from tiny_tokenizers import KINDS

THINK = {"thinker": "reasoning_content", "channels": "thinking"}
"""Templates that render thinking, and the field that they take it from."""


def call_turn(template: str, arguments: dict) -> str:
    """Written down from the templates by hand."""
    text = json.dumps(arguments, ensure_ascii=False)
    return {
        "thinker": f'<tool_call>\n{{"name": "weather", "arguments": {text}}}\n</tool_call><|im_end|>',
        "headers": f'{{"name": "weather", "parameters": {text}}}<|eom|>',
        "brackets": f'[TOOL_CALLS] [{{"name": "weather", "arguments": {text}}}]<eos>',
        "channels": f"<|channel|>commentary to=functions.weather<|message|>{text}<|call|>",
    }[template]


def thought_turn(template: str, thought: str, content: str) -> str:
    """A last answer with its thinking."""
    if template == "thinker":
        return f"<think>\n{thought.strip(chr(10))}\n</think>\n\n{content}<|im_end|>"
    lead = f"<|channel|>analysis<|message|>{thought}<|end|><|start|>assistant"
    return f"{lead}<|channel|>final<|message|>{content}<|return|>"


def random_chat(rng: random.Random, template: str, thinking: str) -> tuple[list[dict], list[str]]:
    """Messages, and the text of each of the assistant's turns."""
    messages = [{"role": "system", "content": random_text(rng)}] if rng.random() < 0.5 else []
    wanted = []
    exchanges = rng.randint(1, 3)
    for number in range(exchanges):
        messages.append({"role": "user", "content": random_text(rng)})
        if rng.random() < 0.6:
            arguments = {"city": random_text(rng), "days": rng.randint(0, 9)}
            call = {"type": "function", "function": {"name": "weather", "arguments": arguments}}
            messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
            messages += [{"role": "tool", "content": random_text(rng)}] * rng.randint(1, 2)
            wanted.append(call_turn(template, arguments))
        last, content = number == exchanges - 1, random_text(rng).strip()
        answer = {"role": "assistant", "content": content}
        turn = expected(content, template, last, thinking)
        if template in THINK and rng.random() < 0.6:
            thought = random_text(rng)
            if template == "thinker" and rng.random() < 0.5:
                answer["content"] = f"<think>\n{thought}\n</think>\n\n{content}"
            else:
                answer[THINK[template]] = thought
            if last and thinking == "train":
                turn = thought_turn(template, thought, content)
        messages.append(answer)
        wanted.append(turn)
    return messages, wanted


def check_random_chats(template: str, seeds) -> None:
    for number in seeds:
        rng = random.Random(number)
        kind, thinking = rng.choice(KINDS), rng.choice(["train", "strip"])
        messages, wanted = random_chat(rng, template, thinking)
        found, encoded, _ = supervised(messages, template, kind, thinking, TOOLS)
        if kind != "pieces":  # those tokenizers put text into Unicode's composed form
            wanted = [text.replace("e\u0301", "é") for text in wanted]
        assert found == wanted, (template, kind, thinking, number)
        assert encoded.loss_mask.sum() == sum(len(turn) for turn in encoded.turns)


WITH_CALLS = ("thinker", "headers", "brackets", "channels")


@pytest.mark.parametrize("template", WITH_CALLS)
@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32))
def test_random_chats_with_calls_decode_to_their_turns(template, number):
    check_random_chats(template, [number])


@pytest.mark.slow
@pytest.mark.parametrize("template", WITH_CALLS)
def test_two_thousand_random_chats_with_calls_decode_to_their_turns(template):
    check_random_chats(template, range(2000))
