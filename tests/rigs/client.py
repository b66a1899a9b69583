"""Requests to servers, for end-to-end tests."""

import concurrent.futures
import itertools
import json
import random
import re
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from tests.rigs.plain_http import http

TIMEOUT_S = 120.0
MODEL = "test-model"  # the served model name of all servers in tests
REMOTE_DECODE_PARAMS = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
}
_seeds = itertools.count(5000)


def make_prompt(seed: int, length: int, vocab: int = 256) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, vocab) for _ in range(length)]


def fresh_prompt(length: int = 150) -> list[int]:
    """Return a prompt that no server has received from this process."""
    return make_prompt(next(_seeds), length)


def greedy(prompt: object, max_tokens: int, **members: Any) -> dict[str, Any]:
    """Return the body of a greedy completion that ignores end-of-sequence tokens.

    `members` are added to the body and override it.
    """
    body = {
        "model": MODEL,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
    }
    return body | {"ignore_eos": True, "return_token_ids": True} | members


def post(url: str, path: str = "/v1/completions", **body: Any) -> httpx.Response:
    return http.post(f"{url}{path}", json={"model": MODEL, **body}, timeout=TIMEOUT_S)


def answer_of(url: str, path: str = "/v1/completions", **body: Any) -> dict[str, Any]:
    """Return the JSON of a response, which must have status 200."""
    response = post(url, path, **body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


@dataclass(frozen=True)
class Answer:
    token_ids: list[int]
    text: str
    finish_reason: str
    usage: dict[str, Any]
    kv: dict[str, int]


def complete(
    url: str, prompt: Sequence[int] | str, max_tokens: int = 8, **members: Any
) -> Answer:
    response = post(url, **greedy(prompt, max_tokens, **members))
    assert response.status_code == 200, response.text
    data = response.json()
    choice = data["choices"][0]
    return Answer(
        token_ids=choice["token_ids"],
        text=choice["text"],
        finish_reason=choice["finish_reason"],
        usage=data["usage"],
        kv=parse_kv(response.headers["x-baton-kv"]),
    )


def parse_kv(header: str) -> dict[str, int]:
    pairs = (part.strip().split("=") for part in header.split(","))
    return {name: int(value) for name, value in pairs}


def complete_all(
    url: str, prompts: Sequence[Sequence[int]], max_tokens: int = 8, **members: Any
) -> list[Answer]:
    """Send all prompts at once, each over a connection of its own."""
    with concurrent.futures.ThreadPoolExecutor(len(prompts)) as pool:
        return list(
            pool.map(lambda p: complete(url, p, max_tokens, **members), prompts)
        )


def sse_events(text: str) -> list[tuple[str, str]]:
    """Return the name and data of each complete event of a Baton stream."""
    matches = re.findall(r"(?:event: (.+)\n)?data: (.+)\n\n", text)
    return [(name or "message", data) for name, data in matches]


def _events(url: str, body: dict[str, Any]) -> Iterator[str]:
    """Yield the data of a stream's events as they arrive."""
    with http.stream(
        "POST", f"{url}/v1/completions", json=body, timeout=TIMEOUT_S
    ) as response:
        assert response.status_code == 200, response.read()
        for line in response.iter_lines():
            if line.startswith("data: "):
                yield line.removeprefix("data: ")


def stream(
    url: str, prompt: Sequence[int], max_tokens: int = 8, **members: Any
) -> list[Any]:
    """Return the parsed events of a streamed completion; "[DONE]" stays text."""
    events = _events(url, greedy(prompt, max_tokens, stream=True, **members))
    return [event if event == "[DONE]" else json.loads(event) for event in events]


def streamed_token_ids(events: Sequence[Any]) -> list[int]:
    chunks = [
        event for event in events if isinstance(event, dict) and event.get("choices")
    ]
    return [
        token_id
        for chunk in chunks
        for token_id in chunk["choices"][0].get("token_ids") or []
    ]


class Stream(threading.Thread):
    """A streamed completion that a thread reads.

    Attributes:
        events: the data of the events read so far.
    """

    def __init__(
        self, url: str, prompt: list[int], max_tokens: int, **members: Any
    ) -> None:
        super().__init__(daemon=True)
        self.events: list[str] = []
        self.error: Exception | None = None
        self._url = url
        self._body = greedy(prompt, max_tokens, stream=True, **members)
        self.start()

    def run(self) -> None:
        try:
            for event in _events(self._url, self._body):
                self.events.append(event)
        except httpx.HTTPError as error:
            self.error = error

    def wait_for_events(self, num_events: int = 3) -> "Stream":
        """Wait until `num_events` events have arrived. Return `self`."""
        while len(self.events) < num_events:
            assert self.is_alive(), (self.events, self.error)
            self.join(0.02)
        return self

    def token_ids(self) -> list[int]:
        return streamed_token_ids([json.loads(e) for e in self.events if e != "[DONE]"])

    def assert_tokens(self, token_ids: list[int]) -> None:
        """Assert that the stream ends without an error, with these tokens."""
        self.join(60)
        assert self.error is None, self.error
        assert self.events[-1] == "[DONE]", self.events
        assert self.token_ids() == token_ids


class Load(threading.Thread):
    """A client that sends completions, one after the other, until `done` is set.

    Attributes:
        num_right: number of answers with the expected tokens.
        problems: descriptions of all other answers.
    """

    def __init__(
        self, url: str, prompts: list[list[int]], expected: list[list[int]]
    ) -> None:
        super().__init__(daemon=True)
        self.done = threading.Event()
        self.num_right = 0
        self.problems: list[str] = []
        self._url = url
        self._cases = list(zip(prompts, expected, strict=True))
        self.start()

    def run(self) -> None:
        with httpx.Client(timeout=60, verify=False) as client:
            for prompt, expected in itertools.cycle(self._cases):
                if self.done.is_set():
                    return
                body = greedy(prompt, len(expected))
                try:
                    answer = client.post(f"{self._url}/v1/completions", json=body)
                except httpx.HTTPError as error:
                    self.problems.append(repr(error))
                    continue
                if answer.status_code != 200:
                    self.problems.append(answer.text)
                elif answer.json()["choices"][0]["token_ids"] != expected:
                    self.problems.append("other tokens")
                else:
                    self.num_right += 1


def prefill(url: str, prompt: Sequence[int], **members: Any) -> dict[str, Any]:
    """Run the prefill leg and return its kv_transfer_params, as a proxy relays them."""
    fields = {
        "kv_transfer_params": REMOTE_DECODE_PARAMS,
        "return_token_ids": False,
        **members,
    }
    answer = answer_of(url, **greedy(prompt, 1, **fields))
    params: dict[str, Any] = answer["kv_transfer_params"]
    return params
