"""Answers by a server that speaks OpenAI's chat completions (vLLM, SGLang, ...), many at a time.

Requests that fail for the moment (connection refused, 429, 5xx) are sent again, 1, 2, 4, ... s later;
what a server refuses for good (400, 422: a prompt too long) is that prompt's fault and named.
"""

from __future__ import annotations

import json
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

from protocol.errors import ConfigError, RunStopped
from services import seeds
from services.data.regenerate import Answer, Ask, Asked, Refused

PROMPT_FAULTS = (400, 413, 422)
LATER = (408, 409, 425, 429, 500, 502, 503, 504)
KEPT = ("content", "reasoning_content", "reasoning", "tool_calls")


class ServerAnswers:
    """`url` up to and without `/chat/completions`, e.g. http://localhost:8000/v1."""

    def __init__(
        self, url: str, ask: Ask, *, concurrency: int = 64, attempts: int = 8, first_wait_s: float = 1.0,
        timeout_s: float = 3600.0, api_key: str = "",
    ) -> None:  # fmt: skip
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"server {url!r}: must be an http:// or https:// address, up to /v1")
        self._url = url.rstrip("/") + "/chat/completions"
        self._ask = ask
        self._concurrency = concurrency
        self._attempts = attempts
        self._first_wait_s = first_wait_s
        self._timeout_s = timeout_s
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._stopping = threading.Event()

    def answers(self, asked: Sequence[Asked]) -> Iterator[Answer | Refused]:
        """In order of completion. Raises RunStopped when the server does not come back."""
        pool = ThreadPoolExecutor(self._concurrency, thread_name_prefix="answers")
        try:
            for future in as_completed([pool.submit(self._answer, one) for one in asked]):
                yield future.result()
        finally:
            self._stopping.set()  # wakes whoever waits to try again
            pool.shutdown(cancel_futures=True)
            self._stopping.clear()

    def _answer(self, asked: Asked) -> Answer | Refused:
        wait_s, reason = self._first_wait_s, ""
        for _ in range(self._attempts):
            try:
                return self._read(asked, self._post(self._body(asked)))
            except urllib.error.HTTPError as error:
                reason = f"{error.code}: {error.read()[:300].decode(errors='replace')}"
                if error.code in PROMPT_FAULTS:
                    return Refused(asked, f"the server refuses it ({reason})")
                if error.code not in LATER:
                    break
            except (OSError, TimeoutError) as error:
                reason = str(error)
            if self._stopping.wait(wait_s):
                break
            wait_s *= 2
        raise RunStopped(f"{self._url}: no answer ({reason}); run it again to go on where it stopped")

    def _body(self, asked: Asked) -> dict[str, Any]:
        ask = self._ask
        body = {
            "model": ask.model, "messages": asked.messages, "max_tokens": ask.max_new_tokens,
            "temperature": ask.temperature, "top_p": ask.top_p,
            "seed": seeds.seed("answer", ask.seed, *asked.source, asked.number) % 2**31,
            "chat_template_kwargs": {"enable_thinking": ask.thinking, "thinking": ask.thinking},
        }  # fmt: skip
        return {**body, "tools": asked.tools} if asked.tools else body

    def _post(self, body: dict[str, Any]) -> Any:
        request = urllib.request.Request(self._url, json.dumps(body).encode(), self._headers)  # noqa: S310 - http(s)
        with urllib.request.urlopen(request, timeout=self._timeout_s) as response:  # noqa: S310 - checked above
            return json.loads(response.read())

    def _read(self, asked: Asked, reply: Any) -> Answer | Refused:
        try:
            choice = reply["choices"][0]
            message = {key: choice["message"][key] for key in KEPT if choice["message"].get(key)}
        except (KeyError, IndexError, TypeError):
            raise RunStopped(f"{self._url}: no chat completion in its reply: {str(reply)[:300]}") from None
        if not message:
            return Refused(asked, "the server's answer is empty")
        message = {"role": "assistant", "content": "", **message}
        cut = choice.get("finish_reason") == "length"
        return Answer(asked, message, "length" if cut else "stop", None)
