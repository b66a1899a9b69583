"""What the end-to-end tests ask a server."""

import concurrent.futures
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tests.rigs.plain_http import http

TIMEOUT_S = 120.0
MODEL = "test-model"  # what the tests' servers call theirs


@dataclass(frozen=True)
class Answer:
    token_ids: list[int]
    text: str
    finish_reason: str
    usage: dict[str, Any]
    kv: dict[str, int]


def complete(url: str, prompt: Sequence[int] | str, max_tokens: int = 8, **members: Any) -> Answer:
    """A greedy completion, unless `members` say otherwise, that ignores ends of sequence."""
    body = {
        "model": MODEL,
        "prompt": prompt if isinstance(prompt, str) else list(prompt),
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        **members,
    }
    response = http.post(f"{url}/v1/completions", json=body, timeout=TIMEOUT_S)
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
    """All at once, one connection each."""
    with concurrent.futures.ThreadPoolExecutor(len(prompts)) as pool:
        return list(pool.map(lambda p: complete(url, p, max_tokens, **members), prompts))


def stream(url: str, prompt: Sequence[int], max_tokens: int = 8, **members: Any) -> list[Any]:
    """The parsed events of a streamed completion; "[DONE]" stays text."""
    body = {
        "model": MODEL,
        "prompt": list(prompt),
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        "stream": True,
        **members,
    }
    events: list[Any] = []
    with http.stream("POST", f"{url}/v1/completions", json=body, timeout=TIMEOUT_S) as response:
        assert response.status_code == 200, response.read()
        for line in response.iter_lines():
            if line.startswith("data: "):
                data = line.removeprefix("data: ")
                events.append(data if data == "[DONE]" else json.loads(data))
    return events


def streamed_token_ids(events: Sequence[Any]) -> list[int]:
    chunks = [e for e in events if isinstance(e, dict) and e.get("choices")]
    return [t for chunk in chunks for t in chunk["choices"][0].get("token_ids") or []]


ASK = {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None}


def prefill(url: str, prompt: Sequence[int], **members: Any) -> dict[str, Any]:
    """Runs leg 1 by hand and returns the kv_transfer_params that a proxy would relay."""
    body = {
        "model": MODEL,
        "prompt": list(prompt),
        "max_tokens": 1,
        "temperature": 0,
        "ignore_eos": True,
        "kv_transfer_params": ASK,
        **members,
    }
    response = http.post(f"{url}/v1/completions", json=body, timeout=TIMEOUT_S)
    assert response.status_code == 200, response.text
    params: dict[str, Any] = response.json()["kv_transfer_params"]
    return params
