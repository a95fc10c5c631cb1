"""Exactly the answers asked for, whoever gives them and however often it is interrupted."""

import dataclasses
import json
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch
from tiny_tokenizers import make_tokenizer
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

from protocol.errors import AlreadyRunning, ConfigError, DataError, RunStopped
from services.cli import app
from services.config.schema import Config, Data, Model
from services.data.answers_local import LocalAnswers, local_answers
from services.data.answers_server import ServerAnswers
from services.data.dataset import Dataset
from services.data.prepare import prepare
from services.data.regenerate import Answer, Ask, Asked, Refused, WhenAsked, regenerate
from services.data.turns import ChatTemplate
from services.dflash.target_model import wrap_target

TOKENIZER = make_tokenizer()


class Echo:
    """Answers with the question; stops or refuses where it is told to."""

    def __init__(self, stop_after=10**9, refuse=()):
        self.asked, self.stop_after, self.refuse = [], stop_after, refuse

    def answers(self, asked):
        for one in reversed(asked):
            if len(self.asked) == self.stop_after:
                raise KeyboardInterrupt
            self.asked.append((*one.source, one.number))
            if one.source[1] in self.refuse:
                yield Refused(one, "too long")
                continue
            text = f"{one.messages[-1]['content']} / {one.number}"
            yield Answer(one, {"role": "assistant", "content": text}, "stop", None)


def write_prompts(path, count):
    path.write_text("".join(json.dumps({"prompt": f"Fox {at}?"}) + "\n" for at in range(count)))
    return path


def read(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_every_prompt_gets_the_answers_asked_for(tmp_path):
    inputs = [write_prompts(tmp_path / "a.jsonl", 3), write_prompts(tmp_path / "b.jsonl", 2)]
    seen = []
    summary = regenerate(
        inputs,
        tmp_path / "out.jsonl",
        Echo(),
        Ask("m", answers=2, temperature=1.0),
        on_progress=lambda *at: seen.append(at),
    )
    rows = read(tmp_path / "out.jsonl")
    assert {(*row["source"], row["answer"]) for row in rows} == {
        (file, line, number)
        for file, lines in ((0, 3), (1, 2))
        for line in range(1, lines + 1)
        for number in (0, 1)
    }
    assert summary == (5, 10, 10, 0, {})
    assert seen[-1] == (10, 10)
    assert rows[-1]["messages"] == [
        {"role": "user", "content": "Fox 0?"}, {"role": "assistant", "content": "Fox 0? / 0"}
    ]  # fmt: skip


def test_interrupted_it_asks_only_what_is_missing(tmp_path):
    inputs = [write_prompts(tmp_path / "a.jsonl", 20)]
    output = tmp_path / "out.jsonl"
    with pytest.raises(KeyboardInterrupt):
        regenerate(inputs, output, Echo(stop_after=7), Ask("m"))
    with output.open("ab") as stream:
        stream.write(b'{"source": [0, 1], "ans')  # what a kill leaves
    echo = Echo()
    assert regenerate(inputs, output, echo, Ask("m")).answers == 20
    assert len(echo.asked) == 13
    assert Counter(row["source"][1] for row in read(output)) == Counter(range(1, 21))
    echo = Echo()
    assert regenerate(inputs, output, echo, Ask("m")).answers == 20
    assert echo.asked == []


def test_an_output_of_other_options_or_of_something_else_is_refused(tmp_path):
    inputs = [write_prompts(tmp_path / "a.jsonl", 2)]
    output = tmp_path / "out.jsonl"
    regenerate(inputs, output, Echo(), Ask("m"))
    before = output.read_bytes()
    with pytest.raises(DataError, match="other options"):
        regenerate(inputs, output, Echo(), Ask("m", thinking=False))
    assert output.read_bytes() == before
    output.write_bytes(before + before)
    with pytest.raises(DataError, match="line 3: an answer that is there already"):
        regenerate(inputs, output, Echo(), Ask("m"))
    with pytest.raises(DataError, match="line 1: no answer of"):
        regenerate(inputs, inputs[0], Echo(), Ask("m"))


def test_an_output_of_other_prompts_is_refused(tmp_path):
    inputs = [write_prompts(tmp_path / "a.jsonl", 4)]
    output = tmp_path / "out.jsonl"
    with pytest.raises(KeyboardInterrupt):
        regenerate(inputs, output, Echo(stop_after=3), Ask("m"))
    before = output.read_bytes()
    lines = inputs[0].read_text().splitlines(keepends=True)
    inputs[0].write_text("".join(reversed(lines)))
    with pytest.raises(DataError, match="another prompt than input 0, line 2"):
        regenerate(inputs, output, Echo(), Ask("m"))
    assert output.read_bytes() == before
    inputs[0].write_text("".join(lines))
    assert regenerate(inputs, output, Echo(), Ask("m")).answers == 4


def test_one_process_writes_an_output(tmp_path):
    inputs = [write_prompts(tmp_path / "a.jsonl", 2)]

    class Nested:
        def answers(self, asked):
            with pytest.raises(AlreadyRunning):
                regenerate(inputs, tmp_path / "out.jsonl", Echo(), Ask("m"))
            return Echo().answers(asked)

    assert regenerate(inputs, tmp_path / "out.jsonl", Nested(), Ask("m")).answers == 2


def test_bad_prompts_are_refused_before_anything_is_asked_or_skipped(tmp_path):
    path = write_prompts(tmp_path / "a.jsonl", 3)
    path.write_text(path.read_text() + '{\n\n{"prompt": ""}\n{"messages": []}\n')
    echo = Echo(refuse=(2,))
    with pytest.raises(DataError, match="line 4: not JSON"):
        regenerate([path], tmp_path / "out.jsonl", echo, Ask("m"))
    assert echo.asked == []
    summary = regenerate([path], tmp_path / "out.jsonl", echo, Ask("m"), on_bad_line="skip")
    assert summary == (3, 2, 2, 0, {"json": 1, "empty turn": 1, "no question": 1, "refused": 1})
    good = write_prompts(tmp_path / "b.jsonl", 3)
    with pytest.raises(DataError, match="line 2: too long"):
        regenerate([good], tmp_path / "other.jsonl", Echo(refuse=(2,)), Ask("m"))


def test_no_model_is_loaded_for_wrong_inputs_or_when_nothing_is_left_to_ask(tmp_path):
    path, made, echo = write_prompts(tmp_path / "a.jsonl", 3), [], Echo()

    def make():
        made.append(echo)
        return echo

    with pytest.raises(DataError, match="there is no folder"):
        regenerate([path], tmp_path / "none" / "out.jsonl", WhenAsked(make), Ask("m"))
    (tmp_path / "bad.jsonl").write_text("{\n")
    with pytest.raises(DataError, match="line 1: not JSON"):
        regenerate([tmp_path / "bad.jsonl"], tmp_path / "out.jsonl", WhenAsked(make), Ask("m"))
    assert made == []
    for _ in range(2):
        assert regenerate([path], tmp_path / "out.jsonl", WhenAsked(make), Ask("m")).answers == 3
    assert made == [echo] and len(echo.asked) == 3


def test_an_answer_that_is_there_is_asked_again(tmp_path):
    chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "old"}]
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": chat}))
    regenerate([tmp_path / "a.jsonl"], tmp_path / "out.jsonl", Echo(), Ask("m"))
    assert read(tmp_path / "out.jsonl")[0]["messages"][1:] == [{"role": "assistant", "content": "Hi / 0"}]


@pytest.mark.parametrize("wrong", [{"answers": 0}, {"answers": 2}, {"max_new_tokens": 0}])
def test_senseless_asks_are_refused(wrong):
    with pytest.raises(DataError):
        Ask("m", **wrong)


@pytest.fixture(scope="module")
def target():
    torch.manual_seed(0)
    stop = TOKENIZER.convert_tokens_to_ids("<|im_end|>")
    config = LlamaConfig(
        vocab_size=1024, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, eos_token_id=stop, bos_token_id=1, pad_token_id=0,
        initializer_range=0.3,
    )  # fmt: skip
    return wrap_target(LlamaForCausalLM(config).float())


def local(target, batch_tokens=4096, **ask):
    asked = Ask("m", **{"max_new_tokens": 24, **ask})
    template = ChatTemplate(TOKENIZER, "train")
    return LocalAnswers(target, TOKENIZER, template, asked, batch_tokens=batch_tokens)


def questions(*texts, numbers=1):
    return [
        Asked((0, line), number, [{"role": "user", "content": text}], None)
        for line, text in enumerate(texts, start=1) for number in range(numbers)
    ]  # fmt: skip


def tokens(answers):
    return {(*answer.asked.source, answer.asked.number): answer.tokens for answer in answers}


TEXTS = ("Hi", "What does the quick brown fox do to the lazy dog?", "日本", "Why?")


def test_greedy_answers_of_a_batch_are_those_of_plain_generation(target):
    made = list(local(target).answers(questions(*TEXTS)))
    assert len(made) == 4
    for answer in made:
        ids, prompt = answer.tokens
        mask = torch.ones(1, prompt, dtype=torch.long)
        plain = target.model.generate(
            torch.tensor([ids[:prompt]]), attention_mask=mask, max_new_tokens=24, do_sample=False
        )
        assert ids == plain[0].tolist()
        assert (answer.finish == "stop") == (ids[-1] in target.stop_ids)
        assert TOKENIZER.decode(ids[:prompt]).endswith("<|im_start|>assistant\n")


def test_sampled_answers_depend_on_their_own_seed_and_not_on_their_batch(target):
    wide = tokens(local(target, temperature=1.0, answers=2).answers(questions(*TEXTS, numbers=2)))
    narrow = tokens(
        local(target, batch_tokens=1, temperature=1.0, answers=2).answers(questions(*TEXTS, numbers=2))
    )
    assert wide == narrow
    assert wide[(0, 1, 0)] != wide[(0, 1, 1)]
    other = tokens(local(target, temperature=1.0, answers=2, seed=1).answers(questions(*TEXTS, numbers=2)))
    assert other != wide


def test_a_batch_goes_on_with_those_that_have_not_ended(target):
    often = dataclasses.replace(target, stop_ids=tuple(range(0, 1024, 10)))
    asked = {"temperature": 1.0, "answers": 6}
    wide = tokens(local(often, **asked).answers(questions(*TEXTS, numbers=6)))
    lengths = {len(ids) - prompt for ids, prompt in wide.values()}
    assert len(lengths) > 5  # ended one by one
    assert wide == tokens(local(often, batch_tokens=1, **asked).answers(questions(*TEXTS, numbers=6)))


def test_no_kernel_plans_for_each_number_of_keys(target):
    allowed = []
    hook = target.layers[0].register_forward_pre_hook(
        lambda *_: allowed.append(torch.backends.cuda.cudnn_sdp_enabled())
    )
    list(local(target).answers(questions(*TEXTS)))
    hook.remove()
    assert allowed and not any(allowed) and torch.backends.cuda.cudnn_sdp_enabled()


def test_a_prompt_that_leaves_no_room_is_refused(target):
    (made,) = local(target, max_new_tokens=250).answers(questions("fox"))
    assert isinstance(made, Refused)
    assert "more than the model's 256 positions" in made.reason


def test_what_was_generated_is_what_is_trained_on(target, tmp_path):
    model = tmp_path / "model"
    TOKENIZER.save_pretrained(model)
    target.model.save_pretrained(model)
    config = Config(model=Model(path=str(model), dtype="float32"), data=Data(path=tmp_path / "data"))
    inputs = [write_prompts(tmp_path / "a.jsonl", 3)]
    output = tmp_path / "out.jsonl"
    ask = Ask("m", max_new_tokens=24)
    regenerate(inputs, output, local_answers(config, ask, device="cpu", batch_tokens=512), ask)
    prepare([output], tmp_path / "data", str(model), config.data)
    dataset = Dataset.open(tmp_path / "data")
    for row, line in enumerate(read(output)):
        assert dataset.sample(row).input_ids.tolist() == line["input_ids"]
        assert int(dataset.supervised[row]) == len(line["input_ids"]) - line["prompt_length"]


class Handler(BaseHTTPRequestHandler):
    """A small chat-completions server; `server.script` maps a question to the replies it gets, in turn."""

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        question = body["messages"][-1]["content"]
        with self.server.lock:
            self.server.bodies.append((self.path, dict(self.headers), body))
            replies = self.server.script.get(question, [])
            code = replies.pop(0) if replies else 200
        message = {"role": "assistant", "content": question.upper(), "reasoning_content": "hm"}
        reply = {
            "choices": [{"message": message, "finish_reason": "length" if "long" in question else "stop"}]
        }
        data = json.dumps(reply if code == 200 else {"error": "no"}).encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *words):
        pass


@pytest.fixture
def server():
    made = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    made.script, made.bodies, made.lock = {}, [], threading.Lock()
    thread = threading.Thread(target=made.serve_forever, name="chat-server")
    thread.start()
    yield made
    made.shutdown()
    thread.join()
    made.server_close()


def ask_server(server, **options):
    url = f"http://127.0.0.1:{server.server_port}/v1"
    ask = Ask("served", max_new_tokens=9, temperature=0.7, thinking=False)
    return ServerAnswers(url, ask, first_wait_s=0.01, **options)


def test_a_server_answers_and_is_asked_again_when_it_is_busy(server):
    server.script = {"Hi": [503, 429], "Why?": [400]}
    made = {
        answer.asked.source[1]: answer
        for answer in ask_server(server, api_key="k").answers(questions("Hi", "Why?", "long"))
    }
    assert made[1].message == {"role": "assistant", "content": "HI", "reasoning_content": "hm"}
    assert (made[1].finish, made[3].finish, made[1].tokens) == ("stop", "length", None)
    assert isinstance(made[2], Refused)
    assert "400" in made[2].reason
    path, headers, body = server.bodies[0]
    assert path == "/v1/chat/completions"
    assert headers["Authorization"] == "Bearer k"
    assert (body["model"], body["max_tokens"], body["temperature"]) == ("served", 9, 0.7)
    assert body["chat_template_kwargs"]["enable_thinking"] is False


def test_a_server_that_stays_away_stops_the_run_with_what_to_do(server):
    server.script = {"Hi": [500] * 3}
    with pytest.raises(RunStopped, match="go on where it stopped"):
        list(ask_server(server, attempts=3).answers(questions("Hi", "a", "b")))
    server.script = {"Hi": [401]}
    with pytest.raises(RunStopped, match="401"):
        list(ask_server(server).answers(questions("Hi")))


def test_an_address_that_is_none_is_refused():
    with pytest.raises(ConfigError, match="http"):
        ServerAnswers("localhost:8000", Ask("m"))


def test_the_command_asks_a_server_in_the_mode_that_will_be_served(server, tmp_path):
    prompts = write_prompts(tmp_path / "a.jsonl", 2)
    url = f"http://127.0.0.1:{server.server_port}/v1"
    words = [
        "regenerate",
        str(prompts),
        "--out",
        str(tmp_path / "out.jsonl"),
        "--server",
        url,
        "--answers",
        "2",
    ]
    options = [("--model.path", "served"), ("--data.thinking", "strip")]
    ran = CliRunner().invoke(app, [*words, "--temperature", "0.5"], obj=options)
    assert ran.exit_code == 0, ran.output
    assert json.loads(ran.stdout)["answers"] == 4 == len(read(tmp_path / "out.jsonl"))
    assert all(body["chat_template_kwargs"]["enable_thinking"] is False for _, _, body in server.bodies)
    assert len({body["seed"] for _, _, body in server.bodies}) == 4
