"""What answers show of the prefix cache: nothing that requests of another key or salt have left."""

import itertools
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

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
SHARES = ("--block-size", "16", "--borrow-prefixes", "always")
_texts = itertools.count()


def authorization(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@pytest.fixture(scope="module")
def proxy(tiny_model: Path) -> Iterator[Server]:
    """A proxy whose keys do not share cached KV, before two prefill servers and a decode server
    that pull prefixes from one another."""
    p, d = (
        partial(make, tiny_model, *SHARES) for make in (start_prefill, start_decode)
    )
    with started(p, p, d) as (first, second, decode):
        urls = ("--prefill", first.url, "--prefill", second.url, "--decode", decode.url)
        front = start(
            "proxy", "--port", "0", "--health-interval-s", "0.2", *urls, *KEYS
        )
        with running(front):
            ready = partial(
                http.get, f"{front.url}/ready", headers=authorization(ROOT), timeout=10
            )
            wait_until(lambda: all(ready().json()["servers"].values()))
            yield front


@pytest.fixture(scope="module")
def server(tiny_model: Path) -> Iterator[Server]:
    """A server that is asked directly, with keys of its own."""
    alone = start_decode(tiny_model, *SHARES, *KEYS)
    with running(alone):
        yield alone


def cached_tokens(url: str, key: str, path: str, body: dict[str, Any]) -> int:
    """The `cached_tokens` of an answer. Its headers must not show more."""
    body = {"model": MODEL, "temperature": 0, **body}
    headers = authorization(key)
    answer = http.post(f"{url}{path}", json=body, headers=headers, timeout=TIMEOUT_S)
    assert answer.status_code == 200, answer.text
    usage = answer.json()["usage"]
    details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details")
    cached: int = details["cached_tokens"]
    if not cached:
        assert parse_kv(answer.headers["x-baton-kv"])["skipped"] == 0
        prefill = parse_kv(answer.headers.get("x-baton-kv-prefill", "skipped=0"))
        assert prefill["skipped"] == prefill.get("transferred", 0) == 0
    return cached


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
def test_a_key_finds_nothing_that_another_key_has_cached(
    side, path, make_body, request
):
    url, body = request.getfixturevalue(side).url, make_body()
    assert cached_tokens(url, ALICE, path, body) == 0
    assert cached_tokens(url, BOB, path, body) == 0
    assert cached_tokens(url, ALICE, path, body) > 0
    assert cached_tokens(url, BOB, path, body) > 0


@ENDPOINTS
@pytest.mark.parametrize("side", ["proxy", "server"])
def test_a_salt_divides_the_cache_of_a_key(side, path, make_body, request):
    url, body = request.getfixturevalue(side).url, make_body()
    salted = {**body, "cache_salt": "a session"}
    assert cached_tokens(url, ALICE, path, body) == 0
    assert cached_tokens(url, ALICE, path, salted) == 0
    assert cached_tokens(url, BOB, path, salted) == 0, "the same salt under another key"
    assert cached_tokens(url, ALICE, path, {**body, "cache_salt": "another"}) == 0
    assert cached_tokens(url, ALICE, path, salted) > 0
    assert cached_tokens(url, BOB, path, salted) > 0


def test_salts_divide_the_caches_of_servers_without_keys(tiny_cluster):
    body = {"prompt": fresh_prompt(150), "max_tokens": 3}
    for cached in (False, True):
        for salt in ({}, {"cache_salt": "one"}, {"cache_salt": "two"}):
            found = cached_tokens(
                tiny_cluster.url, "unused", "/v1/completions", {**body, **salt}
            )
            assert (found > 0) is cached


@pytest.mark.parametrize("salt", ["", 7, "x" * 1025, ["a"]])
@pytest.mark.parametrize("side", ["proxy", "server"])
def test_a_wrong_salt_is_refused_by_name(side, salt, request):
    body = {"model": MODEL, **completion(), "cache_salt": salt}
    url = request.getfixturevalue(side).url
    answer = http.post(f"{url}/v1/completions", json=body, headers=authorization(ALICE))
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "cache_salt"
    assert (
        "it must be a string of 1 to 1024 characters"
        in answer.json()["error"]["message"]
    )
