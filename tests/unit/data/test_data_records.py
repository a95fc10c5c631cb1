"""Each form of a row becomes the same conversation, and each broken rule is named."""

import numpy as np
import pytest

from services.data.records import BadSample, Conversation, Tokenized, parse

ASKED = {"role": "user", "content": "Hi"}
ANSWERED = {"role": "assistant", "content": "Hello"}
CALLED = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}],
}


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [ASKED, ANSWERED]},
        {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]},
        {"conversations": [ASKED, ANSWERED]},
        {"prompt": "Hi", "completion": "Hello"},
        {"prompt": [ASKED], "completion": [ANSWERED]},
        {"prompt": [ASKED], "completion": "Hello"},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}, ANSWERED], "tools": []},
        {"messages": [{**ASKED, "tool_calls": None, "weight": 3}, ANSWERED], "id": 7, "tools": ""},
    ],
)
def test_every_form_of_a_chat_is_the_same_conversation(row):
    assert parse(row) == Conversation([ASKED, ANSWERED], None, ())


def test_a_system_field_becomes_the_first_message():
    parsed = parse({"conversations": [ASKED, ANSWERED], "system": "Be kind."})
    assert parsed.messages[0] == {"role": "system", "content": "Be kind."}


def test_what_is_harmless_is_left_out_and_noted():
    parsed = parse({"messages": [{"role": "system", "content": " "}, ASKED, ANSWERED, ASKED]})
    assert parsed.messages == [ASKED, ANSWERED]
    assert parsed.notes == ("empty system message left out", "last turn without an answer left out")


def test_arguments_given_as_text_become_an_object():
    call = {"id": "c1", "function": {"name": "f", "arguments": '{"a": 1}'}}
    parsed = parse(
        {"messages": [ASKED, {"role": "assistant", "tool_calls": [call]}], "tools": '[{"name": "f"}]'}
    )
    assert parsed.messages[1]["tool_calls"] == [
        {"id": "c1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    ]
    assert parsed.tools == [{"name": "f"}]


def test_tokenized_rows_come_with_a_mask_or_a_prompt_length():
    for row in ({"loss_mask": [0, 1, 1]}, {"loss_mask": [False, True, True]}, {"prompt_length": 1}):
        parsed = parse({"input_ids": [5, 6, 7], **row})
        assert isinstance(parsed, Tokenized)
        np.testing.assert_array_equal(parsed.input_ids, [5, 6, 7])
        np.testing.assert_array_equal(parsed.loss_mask, [0, 1, 1])


def chat(*messages):
    return {"messages": list(messages)}


@pytest.mark.parametrize(
    ("row", "kind", "words"),
    [
        ([], "shape", "a list; a row must be an object"),
        ({"text": "Hi"}, "shape", "has text; must have messages"),
        ({"messages": "Hi"}, "shape", "must be a list"),
        ({"prompt": 3, "completion": "a"}, "shape", "the user's part is a int"),
        (chat("Hi"), "shape", r"messages\[0\] is a str"),
        (chat(ASKED, {"role": "bot", "content": "a"}), "role", r"messages\[1\] has the role 'bot'; must be"),
        (chat(ASKED, {"role": ["user"], "content": "a"}), "role", "must be one of"),
        (chat(ASKED, {"content": "a"}), "role", "the role None"),
        (chat(ASKED), "no answer", "none of 1 messages"),
        (chat(), "no answer", "none of 0 messages"),
        (chat(ANSWERED), "order", "without a user's before it"),
        (chat(ASKED, ANSWERED, ANSWERED), "order", r"messages\[2\]: two assistant messages in a row"),
        (chat(ASKED, {"role": "system", "content": "a"}, ANSWERED), "order", "only the first may be one"),
        (chat(ASKED, ANSWERED, {"role": "tool", "content": "a"}, ANSWERED), "order", "without a tool call"),
        (chat({"role": "user", "content": ""}, ANSWERED), "empty turn", "an empty user turn"),
        (chat(ASKED, {"role": "assistant", "content": " \n"}), "empty turn", "an empty assistant turn"),
        (chat(ASKED, {"role": "assistant", "content": None}), "empty turn", "an empty assistant turn"),
        (chat(ASKED, {"role": "assistant", "content": 5}), "content", "type int"),
        (chat({"role": "user", "content": [{"type": "image"}]}, ANSWERED), "content", "other than text"),
        (chat(ASKED, {"role": "assistant", "content": "a\0b"}), "characters", "NUL character at character 1"),
        (chat(ASKED, {"role": "assistant", "content": "\udc00"}), "characters", r"lone surrogate U\+DC00"),
        (chat(ASKED, {**ANSWERED, "reasoning_content": "\ud800"}), "characters", "reasoning_content has"),
        (chat(ASKED, {"role": "assistant", "tool_calls": "f"}), "tool calls", "must be a list"),
        (chat(ASKED, {"role": "assistant", "tool_calls": [{"id": "1"}]}), "tool calls", "function name"),
        (
            chat(ASKED, {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}),
            "tool calls", "arguments of f not JSON",
        ),
        ({**chat(ASKED, ANSWERED), "tools": "["}, "tools", "not JSON"),
        ({**chat(ASKED, ANSWERED), "tools": [3]}, "tools", "list of JSON schemas"),
        ({"input_ids": [1, 2]}, "shape", "either loss_mask or prompt_length"),
        ({"input_ids": [1, 2], "loss_mask": [0, 1], "prompt_length": 1}, "shape", "not both"),
        ({"input_ids": [1, 2], "loss_mask": [1]}, "lengths", "2 input_ids and 1 entries of loss_mask"),
        ({"input_ids": [1, 2], "loss_mask": [0, 2]}, "loss mask", "other than 0 and 1"),
        ({"input_ids": [1, 2], "prompt_length": 3}, "lengths", "prompt_length is 3; must be 0 to 2"),
        ({"input_ids": [1, 2], "prompt_length": True}, "lengths", "prompt_length is True"),
        ({"input_ids": [1, "a"], "prompt_length": 0}, "shape", "flat list of integers"),
        ({"input_ids": [1.5], "prompt_length": 0}, "shape", "flat list of integers"),
        ({"input_ids": [[1], [2, 3]], "prompt_length": 0}, "shape", "flat list of integers"),
        ({"input_ids": [2**70], "prompt_length": 0}, "shape", "flat list of integers"),
    ],
)  # fmt: skip
def test_what_breaks_a_rule_is_refused_by_its_name(row, kind, words):
    with pytest.raises(BadSample, match=words) as refused:
        parse(row)
    assert refused.value.kind == kind


def test_a_tool_result_follows_its_call():
    result = {"role": "tool", "content": ""}
    assert len(parse(chat(ASKED, CALLED, result, result, ANSWERED)).messages) == 5
