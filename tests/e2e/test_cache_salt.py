"""Requests with different keys or salts share no cached KV. Answers do not reveal that
such KV is cached.
"""

import itertools
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.rigs.client import MODEL, TIMEOUT_S, fresh_prompt, parse_kv
from tests.rigs.cluster import (
    Server,
    running,
    start,
    start_decode,
    start_prefill,
    started,
    wait_until,
)
from tests.rigs.plain_http import http

ALICE, BOB, ROOT = (f"sk-{name}-0123456789" for name in ("alice", "bob", "root"))
KEYS = (
    "--api-key",
    ALICE,
    "--api-key",
    BOB,
    "--admin-key",
    ROOT,
    "--cache-salt-by-key",
)
BORROWS = ("--block-size", "16", "--borrow-prefixes", "always")
_texts = itertools.count()


def authorization(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@pytest.fixture(scope="module")
def proxy(tiny_model: Path) -> Iterator[Server]:
    """A proxy with API keys. No two keys share cached KV.

    Its two prefill servers and its decode server pull prefixes from one another.
    """
    start_p = partial(start_prefill, tiny_model, *BORROWS)
    start_d = partial(start_decode, tiny_model, *BORROWS)
    with started(start_p, start_p, start_d) as (first, second, decode):
        urls = ["--prefill", first.url, "--prefill", second.url, "--decode", decode.url]
        front_proxy = start(
            "proxy", "--port", "0", "--health-interval-s", "0.2", *urls, *KEYS
        )
        with running(front_proxy):
            ready = partial(
                http.get,
                f"{front_proxy.url}/ready",
                headers=authorization(ROOT),
                timeout=10,
            )
            wait_until(lambda: all(ready().json()["servers"].values()))
            yield front_proxy


@pytest.fixture(scope="module")
def server(tiny_model: Path) -> Iterator[Server]:
    """A server with API keys, without a proxy."""
    decode_server = start_decode(tiny_model, *BORROWS, *KEYS)
    with running(decode_server):
        yield decode_server


def send(url: str, key: str, path: str, body: dict[str, Any]) -> httpx.Response:
    body = {"model": MODEL, "temperature": 0, **body}
    headers = authorization(key)
    answer = http.post(f"{url}{path}", json=body, headers=headers, timeout=TIMEOUT_S)
    assert answer.status_code == 200, answer.text
    return answer


def cached_in_usage(answer: httpx.Response) -> int:
    usage = answer.json()["usage"]
    details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details")
    cached: int = details["cached_tokens"]
    return cached


def hits_in_headers(answer: httpx.Response) -> int:
    """Return the number of prompt tokens that, according to the headers, a server had
    cached or the prefill server pulled.
    """
    decode = parse_kv(answer.headers["x-baton-kv"])
    prefill = parse_kv(answer.headers.get("x-baton-kv-prefill", "skipped=0"))
    return decode["skipped"] + prefill["skipped"] + prefill.get("transferred", 0)


def cached_tokens(url: str, key: str, path: str, body: dict[str, Any]) -> int:
    """Return `cached_tokens` of an answer. If it is 0, the headers must not reveal hits
    either.
    """
    answer = send(url, key, path, body)
    cached = cached_in_usage(answer)
    if not cached:
        assert hits_in_headers(answer) == 0
    return cached


def assert_hits(side: str, url: str, key: str, path: str, body: dict[str, Any]) -> None:
    """Assert that at least one server had cached KV of the prompt.

    A single server must count the cached tokens in `usage`. Behind a proxy, they may
    only be in the headers: a prefill server without cached KV may compute the prompt
    although the decode server has some.
    """
    answer = send(url, key, path, body)
    if side == "server":
        assert cached_in_usage(answer) > 0
    assert cached_in_usage(answer) + hits_in_headers(answer) > 0


def completion() -> dict[str, Any]:
    return {"prompt": fresh_prompt(150), "max_tokens": 3}


def chat() -> dict[str, Any]:
    content = f"{next(_texts)} is a number. " * 12
    return {"messages": [{"role": "user", "content": content}], "max_tokens": 3}


def response() -> dict[str, Any]:
    return {"input": f"{next(_texts)} is a number. " * 12, "max_output_tokens": 3}


ENDPOINTS = pytest.mark.parametrize(
    ("path", "make_body"),
    [
        ("/v1/completions", completion),
        ("/v1/chat/completions", chat),
        ("/v1/responses", response),
    ],
)


@ENDPOINTS
@pytest.mark.parametrize("side", ["proxy", "server"])
def test_key_has_no_hits_on_kv_of_another_key(side, path, make_body, request):
    url = request.getfixturevalue(side).url
    body = make_body()
    assert cached_tokens(url, ALICE, path, body) == 0
    assert cached_tokens(url, BOB, path, body) == 0
    assert_hits(side, url, ALICE, path, body)
    assert_hits(side, url, BOB, path, body)


@ENDPOINTS
@pytest.mark.parametrize("side", ["proxy", "server"])
def test_salt_divides_the_cache_of_a_key(side, path, make_body, request):
    url = request.getfixturevalue(side).url
    body = make_body()
    salted = {**body, "cache_salt": "a session"}
    assert cached_tokens(url, ALICE, path, body) == 0
    assert cached_tokens(url, ALICE, path, salted) == 0
    assert cached_tokens(url, BOB, path, salted) == 0, (
        "a hit on KV of the same salt under a different key"
    )
    assert cached_tokens(url, ALICE, path, {**body, "cache_salt": "another"}) == 0
    assert_hits(side, url, ALICE, path, salted)
    assert_hits(side, url, BOB, path, salted)


def test_salts_divide_the_caches_of_servers_without_keys(tiny_cluster):
    body = {"prompt": fresh_prompt(150), "max_tokens": 3}
    for cached in (False, True):
        for salt in ({}, {"cache_salt": "one"}, {"cache_salt": "two"}):
            num_cached = cached_tokens(
                tiny_cluster.url, "unused", "/v1/completions", {**body, **salt}
            )
            assert (num_cached > 0) is cached


@pytest.mark.parametrize("salt", ["", 7, "x" * 1025, ["a"]])
@pytest.mark.parametrize("side", ["proxy", "server"])
def test_invalid_salt_is_refused_by_name(side, salt, request):
    body = {"model": MODEL, **completion(), "cache_salt": salt}
    url = request.getfixturevalue(side).url
    answer = http.post(f"{url}/v1/completions", json=body, headers=authorization(ALICE))
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "cache_salt"
    message = answer.json()["error"]["message"]
    assert "it must be a string of 1 to 1024 characters" in message
