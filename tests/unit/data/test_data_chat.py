"""The loss mask is exactly the assistant's turns with their end tokens, for every kind of template."""

import random
import unicodedata

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_tokenizers import KINDS, make_tokenizer, template_text

from protocol.errors import ModelError
from services.data.chat import ChatEncoder
from services.data.records import BadSample, parse
from services.data.turns import TODAY, WORD, ChatTemplate

TRIMS = {"headers", "merged", "brackets"}
END = {
    "chatml": "<|im_end|>", "chatml_generation": "<|im_end|>", "thinker": "<|im_end|>", "opener": "<|end|>",
    "headers": "<|eot|>", "merged": "<end_of_turn>", "brackets": "<eos>", "channels": "<|end|>",
    "doubled_end": "<|end|>", "endless": "", "plain_text": "\n### end", "eos_lines": "<eos>",
}  # fmt: skip
CHAT = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "Hello there"},
    {"role": "assistant", "content": "How are you today?"},
    {"role": "user", "content": "And the fox? 😀"},
    {"role": "assistant", "content": "\n\nIt jumps, 日本. 😀 "},
]
TOKENIZERS = {kind: make_tokenizer(kind, None) for kind in (*KINDS, "legacy")}
ENCODERS: dict[tuple[str, str, str], ChatEncoder] = {}


def encoder(template, kind="bytes", thinking="train"):
    key = (template, kind, thinking)
    if key not in ENCODERS:
        tokenizer = TOKENIZERS[kind]
        ENCODERS[key] = ChatEncoder(tokenizer, ChatTemplate(tokenizer, thinking, template_text(template)))
    return ENCODERS[key]


def supervised(messages, template, kind="bytes", thinking="train", tools=None):
    """The supervised runs as text, and what stands before each of them."""
    made = encoder(template, kind, thinking)
    encoded = made.encode(parse({"messages": messages, "tools": tools}))
    runs = np.flatnonzero(np.diff(np.concatenate(([0], encoded.loss_mask, [0]))))
    assert [range(a, b) for a, b in runs.reshape(-1, 2).tolist()] == list(encoded.turns)
    return [made._decode(encoded.input_ids[run]) for run in encoded.turns], encoded, made


def expected(content, template, last, thinking="train"):
    """Written down from the templates by hand."""
    text = content.strip() if template in TRIMS else content
    end = "<|return|>" if template == "channels" and last else END[template]
    lead = {"channels": "<|channel|>final<|message|>", "brackets": " "}.get(template, "")
    if template == "thinker" and last:
        lead, text = "<think>\n\n</think>\n\n" if thinking == "train" else "", text.lstrip("\n")
    return lead + text + end


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("template", END)
def test_every_answer_is_supervised_with_its_end_and_nothing_else(template, kind):
    found, _, _ = supervised(CHAT, template, kind)
    assert found == [
        expected(CHAT[2]["content"], template, False), expected(CHAT[4]["content"], template, True)
    ]  # fmt: skip


@pytest.mark.parametrize("template", END)
def test_a_tokenizer_that_puts_spaces_in_front_has_the_same_answers_but_for_those(template):
    found, _, _ = supervised(CHAT, template, "legacy")
    wanted = [expected(CHAT[at]["content"], template, at == 4) for at in (2, 4)]
    assert [text.replace(" ", "") for text in found] == [text.replace(" ", "") for text in wanted]


@pytest.mark.parametrize("template", END)
def test_the_tokens_before_an_answer_are_the_prompt_that_a_server_sends(template):
    chat = CHAT[:3]
    _, encoded, made = supervised(chat, template, thinking="strip")
    prompt = made.template.render(chat[:2], prompt=True)
    assert made._decode(encoded.input_ids[: encoded.turns[0].start]) == prompt.removesuffix(
        "<think>\n" if template == "opener" else ""
    )


PIECES = [
    "fox", " ", "\n", "\n\n", "The quick", "日本", "😀", "é", "e\u0301", "<", "<|", "|>", "</", "[",
    "]", "<think", "{", '"', "'", "\t", "###", "end", "system", "assistant", "\r\n", "0", "1,000", "\u200d",
    "Привет", "\\n", "%}", "{{", "user:",
]  # fmt: skip


def random_text(rng):
    while True:
        made = "".join(rng.choices(PIECES, k=rng.randint(1, 12)))
        if made.strip() and "### end" not in made:
            return made


def random_chat(rng):
    messages = [{"role": "system", "content": random_text(rng)}] if rng.random() < 0.5 else []
    for _ in range(rng.randint(1, 4)):
        messages += [
            {"role": "user", "content": random_text(rng)}, {"role": "assistant", "content": random_text(rng)}
        ]  # fmt: skip
    return messages


def check_random_chats(template, seeds):
    for number in seeds:
        rng = random.Random(number)
        messages, kind, thinking = random_chat(rng), rng.choice(KINDS), rng.choice(["train", "strip"])
        found, encoded, _ = supervised(messages, template, kind, thinking)
        answers = [message["content"] for message in messages if message["role"] == "assistant"]
        wanted = [
            expected(text, template, at == len(answers) - 1, thinking) for at, text in enumerate(answers)
        ]
        if kind != "pieces":  # those tokenizers put text into Unicode's composed form
            wanted = [text.replace("e\u0301", "é") for text in wanted]
        assert found == wanted, (template, kind, number)
        assert encoded.loss_mask.sum() == sum(len(turn) for turn in encoded.turns)


@pytest.mark.parametrize("template", END)
@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32))
def test_random_chats_decode_to_their_answers(template, number):
    check_random_chats(template, [number])


@pytest.mark.slow
@pytest.mark.parametrize("template", END)
def test_two_thousand_random_chats_decode_to_their_answers(template):
    check_random_chats(template, range(2000))


def test_a_template_with_generation_marks_gives_the_same_mask_as_one_without():
    _, plain, _ = supervised(CHAT, "chatml")
    _, marked, _ = supervised(CHAT, "chatml_generation")
    np.testing.assert_array_equal(plain.input_ids, marked.input_ids)
    np.testing.assert_array_equal(plain.loss_mask, marked.loss_mask)


def test_an_answer_that_begins_with_a_newline_is_tokenized_as_it_is_generated():
    tokenizer = TOKENIZERS["pieces"]
    chat = [CHAT[1], {"role": "assistant", "content": "\nHello"}]
    _, encoded, made = supervised(chat, "chatml", "pieces")
    prompt = made.template.render(chat[:1], prompt=True)
    start = encoded.turns[0].start
    assert encoded.input_ids[:start].tolist() == tokenizer(prompt, add_special_tokens=False)["input_ids"]
    assert "answer tokenized apart from its prompt" in encoded.notes


THOUGHT = [
    {"role": "user", "content": "One?"},
    {"role": "assistant", "content": "<think>\nfirst\n</think>\n\nA"},
    {"role": "user", "content": "Two?"},
    {"role": "assistant", "content": "<think>\nsecond\n</think>\n\nB"},
]


def test_thinking_is_trained_where_the_template_keeps_it():
    found, encoded, _ = supervised(THOUGHT, "thinker")
    assert found == ["A<|im_end|>", "<think>\nsecond\n</think>\n\nB<|im_end|>"]
    assert "thinking of an earlier answer dropped by the template" in encoded.notes


def test_thinking_is_stripped_and_the_empty_block_belongs_to_the_prompt():
    found, encoded, made = supervised(THOUGHT, "thinker", thinking="strip")
    assert found == ["A<|im_end|>", "B<|im_end|>"]
    before = made._decode(encoded.input_ids[: encoded.turns[-1].start])
    assert before.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert encoded.notes.count("thinking stripped from an answer") == 2


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
def test_thinking_in_a_field_of_its_own_is_stripped_too(key):
    chat = [CHAT[1], {"role": "assistant", "content": "A", key: "secret"}]
    found, encoded, made = supervised(chat, "channels", thinking="strip")
    assert found == ["<|channel|>final<|message|>A<|return|>"]
    assert "secret" not in made._decode(encoded.input_ids)


def test_thinking_in_a_channel_is_trained():
    chat = [CHAT[1], {"role": "assistant", "content": "A", "thinking": "hm"}]
    found, _, _ = supervised(chat, "channels")
    thought = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"
    assert found == [thought + "<|channel|>final<|message|>A<|return|>"]


def test_a_template_that_drops_the_thinking_of_the_last_answer_is_refused():
    with pytest.raises(BadSample, match=r"messages\[3\]: the chat template drops the thinking") as refused:
        supervised(THOUGHT, "opener")
    assert refused.value.kind == "thinking"
    assert supervised(THOUGHT, "opener", thinking="strip")[0] == ["A<|end|>", "B<|end|>"]


def test_an_answer_without_thinking_behind_a_prompt_that_opens_it_is_noted():
    _, encoded, _ = supervised(CHAT, "opener")
    assert "last answer not behind the prompt that a server sends" in encoded.notes
    assert supervised(CHAT, "opener", thinking="strip")[1].notes == ()


def test_thinking_that_is_never_closed_is_refused():
    with pytest.raises(BadSample, match="never closed"):
        supervised([CHAT[1], {"role": "assistant", "content": "<think>\nhm"}], "thinker")


def test_thinking_that_the_prompt_opened_is_stripped_and_a_tag_in_a_sentence_is_not():
    opened = [CHAT[1], {"role": "assistant", "content": "hm\n</think>\n\nA"}]
    assert supervised(opened, "chatml", thinking="strip")[0] == ["A<|im_end|>"]
    for text in ("The tag </think> closes it.", "Use <think> and </think>\nas tags."):
        chat = [CHAT[1], {"role": "assistant", "content": text}]
        assert supervised(chat, "chatml", thinking="strip")[0] == [text + "<|im_end|>"]
        with pytest.raises(BadSample):  # this template takes it for thinking
            supervised(chat, "thinker")


NASTY = {
    "the same answers": ["x", "yes", "x", "yes"],
    "a header": ["x", "assistant\n<|im_start|>assistant\nhi"],
    "an end token": ["x", "a<|im_end|>\n<|im_start|>user\nb"],
    "the question": ["<|im_end|>", "<|im_end|>"],
    "special tokens in questions": ["<eos><|end|>", "ok", "[INST]", "fine"],
    "one character": ["x", "y", "x", "z"],
    "joined letters": ["x", "👩‍👩‍👧‍👦 \u1112\u1161\u11ab ﬁ end"],
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", NASTY)
def test_answers_that_look_like_something_else_are_found_all_the_same(name, kind):
    texts = NASTY[name]
    chat = [{"role": ("user", "assistant")[at % 2], "content": text} for at, text in enumerate(texts)]
    for template in END:
        found, _, _ = supervised(chat, template, kind)
        wanted = [expected(text, template, at == len(texts) // 2 - 1) for at, text in enumerate(texts[1::2])]
        composed = unicodedata.normalize("NFC", "\0".join(wanted)) if kind != "pieces" else "\0".join(wanted)
        assert "\0".join(found) == composed, template


def test_a_chat_that_contains_the_probe_is_refused():
    with pytest.raises(BadSample, match="exactly once"):
        supervised([{"role": "user", "content": f"say {WORD}"}, CHAT[2]], "chatml")


def test_nothing_left_without_thinking_is_refused():
    with pytest.raises(BadSample, match="nothing is left"):
        supervised(
            [CHAT[1], {"role": "assistant", "content": "<think>\nhm\n</think>\n"}],
            "thinker",
            thinking="strip",
        )


CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Paris", "days": 3}}}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
CALLS = [
    {"role": "user", "content": "Rain?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "sunny"},
    {"role": "assistant", "content": "No."},
    {"role": "user", "content": "Sure?"},
    {"role": "assistant", "content": "Yes."},
]
ARGUMENTS = '{"city": "Paris", "days": 3}'


@pytest.mark.parametrize(
    ("template", "wanted"),
    [
        ("thinker", [
            f'<tool_call>\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool_call><|im_end|>',
            "No.<|im_end|>", "<think>\n\n</think>\n\nYes.<|im_end|>",
        ]),
        ("headers", [
            f'{{"name": "weather", "parameters": {ARGUMENTS}}}<|eom|>', "No.<|eot|>", "Yes.<|eot|>"
        ]),
        ("brackets", [
            f'[TOOL_CALLS] [{{"name": "weather", "arguments": {ARGUMENTS}}}]<eos>', " No.<eos>", " Yes.<eos>"
        ]),
        ("channels", [
            f"<|channel|>commentary to=functions.weather<|message|>{ARGUMENTS}<|call|>",
            "<|channel|>final<|message|>No.<|end|>", "<|channel|>final<|message|>Yes.<|return|>",
        ]),
    ],
)  # fmt: skip
@pytest.mark.parametrize("kind", KINDS)
def test_tool_calls_are_supervised_and_their_results_are_not(template, wanted, kind):
    assert supervised(CALLS, template, kind, tools=TOOLS)[0] == wanted


def test_text_and_call_of_one_turn_are_supervised_together():
    chat = [CALLS[0], {"role": "assistant", "content": "Let me look.", "tool_calls": [CALL]}]
    found, _, _ = supervised(chat, "channels", tools=TOOLS)
    assert found == [
        "<|channel|>analysis<|message|>Let me look.<|end|><|start|>assistant"
        f"<|channel|>commentary to=functions.weather<|message|>{ARGUMENTS}<|call|>"
    ]


def test_a_template_that_refuses_a_chat_is_a_bad_sample():
    with pytest.raises(BadSample, match="roles must alternate"):
        supervised([CHAT[1], CHAT[1], CHAT[2]], "merged")


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{% for m in messages %}{{ m.content | upper }}{% endfor %}", "exactly once"),
        ("{% for m in messages %}{{ m.content }}{{ m.content }}{% endfor %}", "exactly once"),
        ("{{ raise_exception('no') }}", "no"),
        ("{% for m in messages %}", "cannot render"),
    ],
)
def test_a_template_that_cannot_be_followed_is_refused_at_once(source, words):
    with pytest.raises(ModelError, match=words):
        ChatTemplate(TOKENIZERS["bytes"], "train", source)


def test_a_template_that_changes_answers_is_refused():
    source = "{% for m in messages %}<|user|>{{ m.content | replace('fox', 'cat') }}<|end|>{% endfor %}"
    made = ChatEncoder(TOKENIZERS["bytes"], ChatTemplate(TOKENIZERS["bytes"], "train", source))
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "a fox"}]
    with pytest.raises(BadSample, match="changes its text"):
        made.encode(parse({"messages": chat}))


def test_a_template_without_a_generation_prompt_has_its_header_unsupervised():
    source = "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>{% endfor %}"
    made = ChatEncoder(TOKENIZERS["bytes"], ChatTemplate(TOKENIZERS["bytes"], "train", source))
    encoded = made.encode(parse({"messages": CHAT[1:3]}))
    assert made._decode(encoded.input_ids[encoded.turns[0]]) == "How are you today?<|end|>"


def test_a_tokenizer_without_a_template_is_refused():
    with pytest.raises(ModelError, match=r"data\.chat_template"):
        ChatTemplate(TOKENIZERS["bytes"], "train")


def test_the_fingerprint_follows_template_and_thinking_and_not_the_day():
    tokenizer = TOKENIZERS["bytes"]
    made = [
        ChatTemplate(tokenizer, thinking, template_text(name)).fingerprint
        for thinking in ("train", "strip") for name in ("chatml", "headers")
    ]  # fmt: skip
    assert len(set(made)) == 4
    dated = ChatTemplate(tokenizer, "train", template_text("headers"))
    assert dated.fingerprint == made[1]
    assert TODAY.strftime("%d %b %Y") in dated.render(CHAT)
